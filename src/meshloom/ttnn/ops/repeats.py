"""Calls seen before: an op that names its kernel is decided once for every kind of call, and is then the kernel alone.

A kind is the op, its arguments, and of every tensor all that decisions depend on: shape, dtype, layout, label, memory,
the devices that it lies on and their chip. Remembered is the kernel, a function of blocks, and what its results are:
dtype, layout, label, memory config, the bytes that they take. A call like it looks that up, runs the kernel on the
blocks of its own tensors, and gets memory for the result in lockstep, as every call does.

What changes from call to call is never remembered. If somebody has to see the call (a hook, a capture, the race
detector, a replay that is under way), or a tensor is not there (deallocated, on the host), the call is decided again in
the general way. So are errors, which are then told as they are the first time, and calls that the original refuses,
which are told on every line of a program.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from meshloom.errors import OperandError, place_of
from meshloom.runtime import MeshCoordinate, state
from meshloom.ttnn.device import queues
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.ops.configs import DeviceComputeKernelConfig, ProgramConfig
from meshloom.ttnn.tensor.blockfloat import round_pointwise
from meshloom.ttnn.tensor.formats import BITS, CAST, Shape, rounded
from meshloom.ttnn.tensor.memory import BufferType, MemoryConfig, hold_region
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import TILE, Owner, Tensor, bytes_on, form_of, next_id
from meshloom.ttnn.tensor.topology import TensorTopology

if TYPE_CHECKING:
    from meshloom.ttnn.ops.calling import Made

Kind = tuple[tuple[Any, ...], list[Tensor], MeshDevice]  # its key, and the tensors and the device of this call
LIMIT = 1 << 13  # kinds that are remembered at most


def kind_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], takes: Mapping[str, str | None]) -> Kind | None:
    """The kind of a call; None if it has none, or if this call has to be seen. `takes` tells what becomes of names."""
    if state.capture is not None:
        return None
    key: list[Any] = [name]
    tensors: list[Tensor] = []
    for each in args:
        if each.__class__ is Tensor and (form := each._form or form_of(each)) is not None:
            tensors.append(each)
            key.append(form)
        elif not _add(key, tensors, each):
            return None
    for argument, each in kwargs.items():
        key.append(argument)
        if not _add(key, tensors, each):
            if takes.get(argument, "") is not None:
                return None
            key.append(each.__class__)  # it changes no result
    if not tensors:
        return None
    device = tensors[0]._device
    if device is None or device.watched:
        return None
    for tensor in tensors:
        if tensor._device is not device or tensor._room.region.freed:  # type: ignore[union-attr]
            return None
    key.append(device.chip_name)  # which cores there are for shards
    return tuple(key), tensors, device


_PLAIN = frozenset((str, type(None), bool, int, torch.dtype))
_LISTED = frozenset((list, tuple, Shape, torch.Size))
_CONFIGS = (DeviceComputeKernelConfig, ProgramConfig)


def _add(key: list[Any], tensors: list[Tensor], value: Any) -> bool:
    """Add an argument to a key; False for what no key can hold."""
    kind = value.__class__
    if kind in _PLAIN:
        key += (kind, value)
    elif kind is float:
        key += (kind, value if value else str(value))  # 0.0 equals -0.0
    elif kind is Tensor:
        form = value._form or form_of(value)
        if form is None:
            return False
        tensors.append(value)
        key.append(form)
    elif kind is MemoryConfig:
        key += (kind, value.token)
    elif kind in _LISTED:
        key += (kind, len(value))
        for each in value:
            if each.__class__ is int:
                key.append(each)
            elif not _add(key, tensors, each):
                return False
    elif isinstance(value, Enum) or _is_value(value):
        key.append(value)
    elif isinstance(value, _CONFIGS):  # programs may change them
        key.append(kind)
        return all(_add(key, tensors, each) for each in vars(value).values())
    else:
        return False
    return True


def _is_value(given: Any) -> bool:
    """Whether an argument never changes and can be compared, its type included."""
    if not getattr(getattr(given, "__dataclass_params__", None), "frozen", False):
        return False
    try:
        hash(given)
    except TypeError:  # it has a list inside
        return False
    return True


class Result:
    """One result of a kind of call: the kernel, the places of its operands, and what its tensor is."""

    __slots__ = (
        "coords", "dtype", "form", "into", "is_rounded", "kernel", "kind", "layout", "memory", "operands", "owner",
        "per_bank", "size", "store", "takes_mesh", "topology",
    )  # fmt: skip

    def __init__(self, made: Made, tensor: Tensor, operands: Sequence[int] | None, into: int | None) -> None:
        assert made.kernel is not None
        self.kernel, self.takes_mesh, self.is_rounded = made.kernel, made.takes_mesh, made.is_rounded
        self.operands = operands  # their places among the tensors of a call; None: all of them, in their order
        self.into = into  # the place of the tensor that it is written into, if it is
        self.dtype, self.layout, self.memory = tensor.dtype, tensor.layout, tensor._memory
        self.store = self.dtype.store if self.dtype in CAST else None  # rounding is a cast
        self.topology, self.coords = made.topology, made.coords or made.like._coords
        if made.is_pointwise and self.dtype in BITS:
            self.is_rounded, self.kernel = (
                False,
                partial(round_pointwise, made.kernel, BITS[self.dtype], known=made.function),
            )
        shape = tuple(tensor.shape)
        self.size, self.per_bank = bytes_on(self.memory, shape, self.dtype, self.layout, TILE)
        self.kind = "dram" if self.memory.buffer_type is BufferType.DRAM else "l1"
        self.owner, self.form = Owner(self.dtype, shape), None if into is not None else form_of(tensor)

    @property
    def plain_kernel(self) -> Callable[..., Block] | None:
        """The kernel, if it gives the block of the result for the blocks of all tensors in their order."""
        return None if self.operands is not None or self.takes_mesh or self.is_rounded else self.kernel

    def compute(self, tensors: Sequence[Tensor], device: MeshDevice) -> Block:
        """The block of the result."""
        places = self.operands
        given = tensors if places is None else [tensors[place] for place in places]
        blocks = map(_block, given)
        values = self.kernel(device.runtime.mesh, *blocks) if self.takes_mesh else self.kernel(*blocks)
        if not self.is_rounded:
            return values
        return values.to(self.store) if self.store is not None else rounded(values, self.dtype)

    def keep(self, values: Block, tensors: Sequence[Tensor], device: MeshDevice, place: tuple[str, int]) -> Tensor:
        """The block in a new tensor, or in the one that it is written into."""
        if self.into is not None:
            return write_into(values, tensors[self.into], tensors[0], self.topology, self.coords)
        runtime = device.runtime
        allocator = runtime.system.memory[self.kind]
        size = self.size * allocator.banks if self.per_bank else self.size
        region = allocator.allocate(size, runtime.mask, self.owner, place, from_top=self.kind == "l1")
        made: Tensor = _blank(Tensor)
        made._block, made._grid, made._device = values, tensors[0]._grid, device
        made._room = hold_region(allocator, region)
        made.dtype, made.layout, made.tile, made.home, made._form = self.dtype, self.layout, TILE, device, self.form
        made._topology, made._memory, made._coords = self.topology, self.memory, self.coords
        made._pad, made._pinned, made._sharers, made.tensor_id = 0.0, False, None, next_id()
        return made


_blank = object.__new__
_block = operator.attrgetter("_block")


class Repeat:
    """What a call of a kind that was seen does."""

    __slots__ = ("_counted", "_kernel", "_pack", "_program", "_results")

    def __init__(
        self, program: tuple[Any, ...] | None, results: Sequence[Result], pack: Callable[..., Any] | None
    ) -> None:
        self._program = program  # that a call counts as; None if it was seen as a part of another op only
        self._results, self._pack = results, pack
        self._kernel = results[0].plain_kernel if pack is None else None
        self._counted: Any = None  # programs of a device among which it is

    def run(self, kind: Kind, is_outermost: bool) -> Any:
        """The result; NotImplemented if the general way has to see the call, or say what is wrong."""
        _, tensors, device = kind
        if is_outermost and self._counted is not device._programs:
            if self._program is None:
                return NotImplemented
            device.count_program(self._program)
            self._counted = device._programs if self._program in device._programs else None
        results, pack, kernel = self._results, self._pack, self._kernel
        try:
            blocks: Any
            if kernel is not None:
                blocks = kernel(*map(_block, tensors))
            elif pack is None:
                blocks = results[0].compute(tensors, device)
            else:
                blocks = [each.compute(tensors, device) for each in results]
        except FOREIGN:
            return NotImplemented
        place = place_of(sys._getframe(2))
        if pack is None:
            return results[0].keep(blocks, tensors, device, place)
        pairs = zip(results, blocks, strict=True)
        return pack([each.keep(values, tensors, device, place) for each, values in pairs])


# What torch and Python say about operands that an op did not check itself.
FOREIGN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

SEEN: dict[tuple[Any, ...], Repeat] = {}
_lock = threading.Lock()


def remember(
    kind: Kind, program: tuple[Any, ...] | None, made: Sequence[Made], found: Sequence[Tensor], pack: type | None
) -> None:
    """Keep what the next call of a kind needs, if every result has a kernel of tensors that were given."""
    key, tensors, _ = kind
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    results = []
    for each, tensor in zip(made, found, strict=True):
        is_known = each.frees is None and all(id(one) in places for one in each.given)
        in_order = [id(one) for one in each.given] == [id(one) for one in tensors]
        is_twice = len(places) < len(tensors)  # one tensor in two places, and next time there are two
        if (
            each.kernel is None
            or not is_known
            or holds_tensor(each.kernel)
            or (is_twice and (not in_order or id(tensor) in places))
        ):
            return
        operands = None if in_order else [places[id(one)] for one in each.given]
        results.append(Result(each, tensor, operands, places.get(id(tensor))))
    with _lock:
        if len(SEEN) >= LIMIT:
            del SEEN[next(iter(SEEN))]
        SEEN[key] = Repeat(program, results, pack)


def holds_tensor(value: Any, depth: int = 4) -> bool:
    """Whether a function keeps a tensor or a block: it would be that of the first call, and would never be freed.

    >>> holds_tensor(torch.add), holds_tensor(lambda x: x + 1)
    (False, False)
    >>> kept = torch.zeros(2); (lambda kept: holds_tensor(lambda x: x + kept))(kept)
    True
    """
    if isinstance(value, (torch.Tensor, Tensor)):
        return True
    inside: Sequence[Any] = ()
    if isinstance(value, partial):
        inside = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, (list, tuple)):
        inside = value
    elif getattr(value, "__closure__", None) is not None:
        inside = [cell.cell_contents for cell in value.__closure__]
    return depth > 0 and any(holds_tensor(each, depth - 1) for each in inside)


def forget() -> None:
    """Decide every kind of call again: for settings that decisions depend on, when they change."""
    with _lock:
        SEEN.clear()


def write_into(
    values: Block, output: Tensor, like: Tensor, topology: TensorTopology, coords: tuple[MeshCoordinate, ...] | None
) -> Tensor:
    """Write the block of a result into a tensor that is there, if it fits."""
    axes = len(output.grid)
    if output._device is not like._device:
        raise OperandError(
            f"output_tensor is on {output._device or 'the host'}, the operands are on {like._device or 'the host'}",
            fix="give one on the same mesh",
        )
    if values.shape[axes:] != output.block.shape[axes:]:
        raise OperandError(
            f"output_tensor has shape {list(output.shape)}, the result {list(values.shape[axes:])}",
            fix="give one of the shape of the result",
        )
    output.write(values, coords, topology)
    if output._device is not None and (output._device.watched or state.capture is not None):
        queues.used(output._device, "op", writes=(output,))
    output.update_tensor_topology(topology)
    return output
