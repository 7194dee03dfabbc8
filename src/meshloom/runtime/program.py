"""A program is a Python kernel over what one device holds, with its buffers and its runtime arguments.

The kernel is called with the device's part of each buffer (those it reads, then those it writes, then those it updates)
and with the arguments by name. It writes into what it was given and returns nothing. A parameter called `coordinate`
gets the device's place.

A kernel that means the same on a block as on each device may be run once for all. Say so (`vectorised=True`: it then
gets blocks, mesh axes first), or leave it open: it is tried with `torch.vmap` on shapes alone, and whatever vmap cannot
carry over runs device by device. A kernel with side effects in Python should say `vectorised=False`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from meshloom.engines.private import disable_current_modes
from meshloom.errors import ArgumentError, expect
from meshloom.mesh import Coordinate
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.card import Card, Kernel, SourceKernel
from meshloom.runtime.compile_cache import code_of
from meshloom.runtime.geometry import MeshCoordinateRange
from meshloom.runtime.storage import Block
from meshloom.runtime.system import System

COORDINATE = "coordinate"


class Program:
    """A kernel with its buffers and arguments.

    >>> from meshloom.runtime import MeshWorkload, create_mesh_buffer, open_mesh_device
    >>> with open_mesh_device((2,)) as mesh:
    ...     x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4,), shard_shape=(2,))
    ...     queue, workload = mesh.queue(), MeshWorkload()
    ...     workload.add_program(None, Program(lambda x, by: x.add_(by), updates=[x], args={"by": 10}))
    ...     queue.enqueue_write(x, [1, 2, 3, 4])
    ...     queue.enqueue_workload(workload)
    ...     queue.enqueue_read(x)
    tensor([11., 12., 13., 14.])
    """

    def __init__(
        self,
        kernel: Kernel | SourceKernel,
        reads: Sequence[MeshBuffer] = (),
        writes: Sequence[MeshBuffer] = (),
        updates: Sequence[MeshBuffer] = (),
        args: Mapping[str, object] | None = None,
        *,
        name: str | None = None,
        vectorised: bool | None = None,
    ) -> None:
        if not isinstance(kernel, SourceKernel):
            code_of(kernel)
        for role, given in (("reads", reads), ("writes", writes), ("updates", updates)):
            if not isinstance(given, Sequence) or not all(isinstance(each, MeshBuffer) for each in given):
                raise ArgumentError(f"{role}={given!r:.80} is no list of buffers", fix=f"{role}=[buffer, ...]")
        expect("args", args or {}, Mapping, fix='give arguments by name: args={"by": 2}')
        self.kernel: Any = kernel
        self.reads, self.writes, self.updates = tuple(reads), tuple(writes), tuple(updates)
        self.buffers = (*self.reads, *self.writes, *self.updates)
        self.args = dict(args or {})
        own = kernel.name if isinstance(kernel, SourceKernel) else getattr(kernel, "__name__", "kernel")
        self.name: str = name or str(own)
        self.vectorised = vectorised
        self._signature = None if isinstance(kernel, SourceKernel) else inspect.signature(kernel)
        names = self._signature.parameters if self._signature is not None else ()
        self.wants_coordinate = COORDINATE in names and COORDINATE not in self.args
        self._loaded: dict[int, Any] = {}
        self._detected: dict[Any, bool] = {}

    def check_args(self, args: Mapping[str, object]) -> None:
        """An error unless the kernel takes its buffers and these arguments."""
        if self._signature is None:  # `build` will say
            return
        place = {COORDINATE: ()} if self.wants_coordinate and COORDINATE not in args else {}
        try:
            self._signature.bind(*self.buffers, **args, **place)
        except TypeError as error:
            raise ArgumentError(
                f"kernel {self.name!r} cannot be called like this: {error}",
                kernel=f"{self.name}{self._signature}",
                given=f"{len(self.buffers)} buffers, arguments {sorted(args)}",
                fix="give a buffer for each array parameter and an argument for each other one",
            ) from None

    def load(self, card: Card, system: System) -> Any:
        """The kernel as a card runs it; compiled once for all cards."""
        index = card.info().index
        if index not in self._loaded:
            compiler = getattr(system.driver, "fingerprint", "") if self._signature is None else ""
            binary = system.cache.binary(self.kernel, system.driver.compile, compiler)
            self._loaded[index] = card.load(binary, self.kernel)
            system.counts["compiles"] = system.cache.compiles
        return self._loaded[index]

    def __repr__(self) -> str:
        return f"Program({self.name}: {len(self.reads)} read, {len(self.writes)} written, {len(self.updates)} updated)"


class Launch:
    """A program on a range, with the arguments it was enqueued with."""

    def __init__(
        self,
        where: MeshCoordinateRange,
        program: Program,
        args: Mapping[str, object],
        at: Mapping[Coordinate, Mapping[str, object]],
        here: MeshCoordinateRange | None,
    ) -> None:
        self.where, self.program, self.args = where, program, {**program.args, **args}
        self.here = here  # what this process holds of the range; None if that is nothing
        self.at = {place: given for place, given in at.items() if place in where}
        program.check_args(self.args if not self.at else {**self.args, **next(iter(self.at.values()))})

    def args_at(self, place: Coordinate) -> dict[str, Any]:
        """The arguments of one device."""
        args = {**self.args, **self.at.get(place, {})}
        return {**args, COORDINATE: place} if self.program.wants_coordinate else args

    def prepare(self, system: System, per_card: bool) -> None:
        """Give devices their own memory of what they write, where what is stored once would not do."""
        for buffer in (*self.program.writes, *self.program.updates):
            shared = isinstance(buffer.storage, Block) and buffer.storage.is_shared
            if shared and (per_card or self._differs(buffer)):
                buffer.storage.unshare()  # type: ignore[union-attr]

    def prepare_elsewhere(self) -> None:
        """Where other processes launch and this one does not, what all hold alike is so no more."""
        for buffer in (*self.program.writes, *self.program.updates):
            if isinstance(buffer.storage, Block) and buffer.storage.is_shared:
                buffer.storage.unshare()

    def _differs(self, written: MeshBuffer) -> bool:
        """Whether the devices may hold different values of a buffer after the launch."""
        mesh = written.device.mesh
        if self.where.shape != mesh.shape:
            return True
        mine = written.storage.block.shape[: mesh.ndim]  # type: ignore[union-attr]
        others = [each.storage.block.shape[: mesh.ndim] for each in self.program.buffers]  # type: ignore[union-attr]
        return any(size == 1 < other for lead in others for size, other in zip(mine, lead, strict=True))

    def block_function(self, system: System) -> Callable[..., Any] | None:
        """What runs the kernel on blocks for all devices at once; None if it must run on each."""
        program = self.program
        if program.wants_coordinate or self.at or program.vectorised is False or not system.is_vectorised:
            return None
        if not program.buffers:
            return None
        kernel = program.load(program.buffers[0].device.cards[0], system)
        if program.vectorised:
            return lambda *blocks: kernel(*blocks, **self.args)
        batched = _map_over_mesh(kernel, self.args, program.buffers)
        key = tuple(tuple(buffer.storage.block.shape) for buffer in program.buffers)  # type: ignore[union-attr]
        if key not in program._detected:
            program._detected[key] = len(self.here or ()) > 1 and _works(batched, program.buffers)
        return batched if program._detected[key] else None

    def run_on_block(self, function: Callable[..., object]) -> None:
        """Run the kernel once for all devices of the range that this process holds."""
        assert self.here is not None
        function(*(buffer.storage.box(self.here) for buffer in self.program.buffers))  # type: ignore[union-attr]


def _map_over_mesh(kernel: Kernel, args: Mapping[str, object], buffers: Sequence[MeshBuffer]) -> Callable[..., Any]:
    """The kernel mapped over the mesh axes; an axis that no buffer has is taken off."""
    axes = buffers[0].device.mesh.ndim

    def last(*arrays: torch.Tensor) -> torch.Tensor:
        kernel(*arrays, **args)
        return torch.zeros(())  # vmap wants a result

    def run(*blocks: torch.Tensor) -> None:
        function: Callable[..., Any] = last
        squeezed = [block[tuple(0 if size == 1 else slice(None) for size in block.shape[:axes])] for block in blocks]
        for axis in reversed(range(axes)):
            dims = tuple(0 if block.shape[axis] > 1 else None for block in blocks)
            if any(dim is not None for dim in dims):
                function = torch.vmap(function, in_dims=dims)
        function(*squeezed)

    return run


def _works(batched: Callable[..., object], buffers: Sequence[MeshBuffer]) -> bool:
    """Whether vmap can carry the kernel over, tried on shapes."""
    blocks = [torch.empty_like(buffer.storage.block, device="meta") for buffer in buffers]  # type: ignore[union-attr]
    try:
        with disable_current_modes():
            batched(*blocks)
    except BaseException:  # whatever it is, running on each device will tell
        return False
    return True


def places_of(launches: Sequence[Launch]) -> list[tuple[Coordinate, Launch]]:
    """Every coordinate of this process with its launch, row-major."""
    here = ((launch.here, launch) for launch in launches if launch.here is not None)
    return sorted(((place, launch) for held, launch in here for place in held.places()), key=lambda pair: pair[0])


def total(launches: Sequence[Launch]) -> int:
    """How many devices are launched on."""
    return sum(len(launch.here or ()) for launch in launches)
