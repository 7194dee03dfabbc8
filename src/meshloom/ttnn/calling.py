"""What all ops share: the table of them, the checks of their operands, and how a result becomes a tensor.

An op is a function with the arguments that TTNN's has, registered under its dotted name by `@op`. It asks `operands`
for blocks, computes a block with plain array calls, says the label of the result, and `result` does the rest: dtype and
rounding, room in memory, `output_tensor=`. Arguments that only concern the speed of hardware are checked for their type
in one place (`CHECKS`) and then left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from meshloom.errors import ArgumentError, MeshloomError, OperandError
from meshloom.runtime import MeshCoordinate, state
from meshloom.ttnn import queues
from meshloom.ttnn.configs import DeviceComputeKernelConfig, ProgramConfig
from meshloom.ttnn.cores import CoreCoord, CoreGrid, CoreRangeSet
from meshloom.ttnn.device import MeshDevice
from meshloom.ttnn.formats import DataType, Layout, Tile, rounded
from meshloom.ttnn.memory import MemoryConfig
from meshloom.ttnn.parts import Block
from meshloom.ttnn.tensor import Tensor
from meshloom.ttnn.topology import TensorTopology

Function = TypeVar("Function", bound=Callable[..., Any])

TABLE: dict[str, Callable[..., Any]] = {}  # every op by its dotted name: "add", "transformer.concatenate_heads"
BEFORE: list[Callable[..., Any]] = []  # hooks that are called as hook(operation, args, kwargs)
AFTER: list[Callable[..., Any]] = []  # hooks that are called as hook(operation, args, kwargs, output)


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


# Arguments with one meaning in all ops, most of them about speed only: what they may be, beside None.
CHECKS: dict[str, Callable[[Any], bool]] = {
    "memory_config": _is(MemoryConfig),
    "dtype": _is(DataType),
    "output_dtype": _is(DataType),
    "layout": _is(Layout),
    "output_layout": _is(Layout),
    "output_tile": _is(Tile),
    "output_tensor": _is(Tensor, tuple, list),
    "optional_output_tensor": _is(Tensor),
    "optional_tensor": _is(Tensor),
    "fast_and_approximate_mode": _is(bool),
    "use_multicore": _is(bool),
    "numeric_stable": _is(bool),
    "compute_kernel_config": _is(DeviceComputeKernelConfig),
    "program_config": _is(ProgramConfig),
    "core_grid": _is(CoreGrid, CoreCoord, CoreRangeSet, tuple),
    "sub_core_grids": _is(CoreRangeSet),
    "num_links": _is(int),
    "num_workers_per_link": _is(int),
    "num_buffers_per_channel": _is(int),
    "chunks_per_sync": _is(int),
    "vector_mode": _is(int),
    "use_2d_core_grid": _is(bool),
    "use_welford": _is(bool),
    "use_l1_small_for_semaphores": _is(bool),
    "disable_compensated_sum": _is(bool),
    "enable_secondary_dm": _is(bool),
}


def op(name: str, *aliases: str, spelled: Mapping[str, str] | None = None) -> Callable[[Function], Function]:
    """Register an op under its name and its aliases; `spelled` maps further spellings of arguments to ours."""
    other = dict(spelled or {})
    taken = [each for each in (name, *aliases) if each in TABLE]
    if taken:
        raise ArgumentError(f"ttnn.{taken[0]} is in the table already", fix="change the function that serves it")

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                if other:
                    kwargs = {other.get(argument, argument): value for argument, value in kwargs.items()}
                _check(name, kwargs)
            for hook in tuple(BEFORE):
                hook(call, args, kwargs)
            try:
                output = function(*args, **kwargs)
            except FOREIGN as error:
                told = _told(name, error, args, kwargs)
                if told is None:
                    raise
                raise told from error
            for hook in tuple(AFTER):
                hook(call, args, kwargs, output)
            return output

        call.spelled = other  # type: ignore[attr-defined]
        call.python_fully_qualified_name = f"ttnn.{name}"  # type: ignore[attr-defined]
        for each in (name, *aliases):
            TABLE[each] = call
        return call  # type: ignore[return-value]

    return register


# What torch and Python say about operands that an op did not check itself.
FOREIGN = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def _told(name: str, error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MeshloomError | None:
    """An error from inside of an op on tensors as one of ours; None if it is one, or the call itself is wrong."""
    flat = [
        each for given in (*args, *kwargs.values()) for each in (given if type(given) in (list, tuple) else (given,))
    ]
    tensors = [each for each in flat if isinstance(each, Tensor)]
    is_inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
    if isinstance(error, MeshloomError) or not tensors or not is_inside:
        return None
    kind = ArgumentError if isinstance(error, TypeError) else OperandError
    said = str(error).partition("\n")[0]
    return kind(
        f"ttnn.{name} cannot take these operands: {said}",
        operands=", ".join(f"{each.dtype.name} {list(each.shape)}" for each in tensors),
    )


def _check(name: str, kwargs: dict[str, Any]) -> None:
    for argument, value in kwargs.items():
        fits = CHECKS.get(argument)
        if fits is not None and value is not None and not fits(value):
            raise ArgumentError(f"ttnn.{name}: {argument}={value!r} is of the wrong type")


def operands(name: str, *tensors: Tensor) -> tuple[MeshDevice, list[Block]]:
    """The device that all operands are on, and their blocks."""
    device: MeshDevice | None = None
    blocks = []
    program: list[Any] = [name]
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"ttnn.{name}: operand {position} is a {type(tensor).__name__}, not a ttnn.Tensor")
        if tensor._device is None and tensor.home is not None:
            tensor.settle()
        here = tensor._device
        if here is None:
            raise OperandError(
                f"ttnn.{name}: Input tensor {chr(65 + position)} must be on device, "
                "got storage type: StorageType::HOST",
                fix="ttnn.to_device(tensor, mesh_device)",
            )
        if here is not device:
            if device is not None:
                raise OperandError(
                    f"ttnn.{name}: Operands to eltwise binary need to be on the same device!",
                    operands=f"on {device} and {here}",
                    fix="move them to one mesh",
                )
            device = here
        block, room = tensor._block, tensor._room
        if block is None or (room is not None and room.region.freed):
            raise OperandError(
                f"ttnn.{name}: Input Tensor {chr(65 + position)} is not allocated",
                fix="deallocate(tensor) only after its last use",
            )
        blocks.append(block)
        program += (block.shape, tensor.dtype._value_, tensor.layout._value_)
    if device is None:
        raise ArgumentError(f"ttnn.{name} needs a tensor")
    device.count_program(tuple(program))
    if device.watched or state.capture is not None:
        queues.used(device, name, reads=tensors)
    return device, blocks


def shared_coords(*tensors: Tensor) -> tuple[MeshCoordinate, ...] | None:
    """The devices that hold a part of every operand; None means all."""
    told = [tensor._coords for tensor in tensors if tensor._coords is not None]
    return tuple(place for place in told[0] if all(place in each for each in told)) if told else None


def result(
    block: Block,
    like: Tensor,
    *,
    topology: TensorTopology,
    dtype: DataType | None = None,
    layout: Layout | None = None,
    memory_config: MemoryConfig | None = None,
    output_tensor: Tensor | None = None,
    coords: tuple[MeshCoordinate, ...] | None = None,
) -> Tensor:
    """A block as a tensor: format, label and memory as its first operand's, unless said otherwise."""
    kind = dtype or (output_tensor.dtype if output_tensor is not None else like.dtype)
    number = kind._value_
    values = block if block.dtype is _EXACT[number] else rounded(block, kind)
    if output_tensor is not None:
        return _written(values, output_tensor, like, topology)
    made = Tensor(
        values,
        like._grid,
        kind,
        Layout.TILE if number in _TILED else layout or like.layout,
        topology,
        like._device,
        memory_config or like._memory,
        like.tile,
        coords=coords or like._coords,
    )
    if made._device is not None and made._device.watched:
        queues.used(made._device, "op", writes=(made,))
    return made


# By number: the torch dtype of formats whose values need no rounding once they are in it, and formats of whole tiles.
_EXACT = [
    kind.store if kind in (DataType.BFLOAT16, DataType.FLOAT32, DataType.INT32) else None
    for kind in sorted(DataType, key=lambda kind: kind.value)
]
_TILED = (DataType.BFLOAT8_B.value, DataType.BFLOAT4_B.value)


def _written(values: Block, output: Tensor, like: Tensor, topology: TensorTopology) -> Tensor:
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
    output.write(values)
    if output._device is not None and (output._device.watched or state.capture is not None):
        queues.used(output._device, "op", writes=(output,))
    output.update_tensor_topology(topology)
    return output
