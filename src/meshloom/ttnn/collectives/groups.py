"""The devices that a collective goes over, and the way from a block to the native collectives and back.

A group is the devices along one mesh axis (`cluster_axis`), or all of them row-major; there is one for every place on
the other axes. A block is given to `meshloom.tensor.collectives` as a tensor that has the mesh axes as dims of its own,
each cut by its axis, or not cut where all along the axis hold the same. So ways to carry out (`mode`), the log of
communication and several processes are those of the native collectives.

A tensor that lies on part of a mesh has groups of those devices alone: they are a mesh of their own with the same axes
(`GroupCall.mesh`), and `make` puts a result back where they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from meshloom.comms import members_of
from meshloom.comms.literal import Call, check_mode
from meshloom.errors import ArgumentError, ModeError, OperandError, TraceError, closest
from meshloom.mesh import Mesh
from meshloom.mesh.process import number_of
from meshloom.runtime import MeshCoordinate, state
from meshloom.tensor import collectives as native
from meshloom.tensor.base import Tensor as Native
from meshloom.tensor.moving import same_storage
from meshloom.ttnn.config import CONFIG
from meshloom.ttnn.device import fabric
from meshloom.ttnn.ops.calling import Made, compute, operands
from meshloom.ttnn.ops.topologies import by_axis
from meshloom.ttnn.refusal_levels import refuse, refuse_addition, refuse_if, setting
from meshloom.ttnn.tensor.boxes import from_native, grid_of, lie_down, place_here, stand_up, take_box, to_native
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import REPLICATE, UNKNOWN, Placement, PlacementShard, TensorTopology as Label

__all__ = ["collective_mode"]

_mode: ContextVar[str] = ContextVar("mode", default="direct")


@contextmanager
def collective_mode(mode: str) -> Iterator[None]:
    """How collectives inside are carried out where they have no `mode=`: "direct", "host" or "fabric".

    >>> from meshloom import ttnn
    >>> with ttnn.collective_mode("fabric"):
    ...     pass
    """
    token = _mode.set(_check_mode(mode))
    try:
        yield
    finally:
        _mode.reset(token)


def _check_mode(mode: str) -> str:
    if mode not in native.MODES:
        raise ModeError(f"there is no mode {mode!r}", fix=closest(mode, native.MODES))
    return mode


def _refuse_group(name: str, size: int, mesh: Mesh) -> None:
    """Tell what the original refuses: a group of one, and all devices at once where links go along one axis only."""
    if size == 1:
        refuse_if(name == "all_gather", f"{name} collective will only work for num_devices > 1, got 1")
    elif sum(extent > 1 for extent in mesh.shape) > 1 and name in OVER_ONE_AXIS:
        last = mesh.shape[-1] - 1
        refuse(OVER_ONE_AXIS[name].format(last=last, next=last + 1), "name the cluster_axis")


# Collectives that take all devices of a grid only where links go along both axes, with the original's reason.
OVER_ONE_AXIS = {
    "all_gather": "1D fabric on a 2D mesh_device requires cluster_axis to be set",
    "broadcast": "Could not find any forwarding direction from src (M0, D{last}) to dst (M0, D{next})",
}


ONE_AXIS = [each for each in fabric.FabricConfig if each.name.startswith("FABRIC_1D")]


class GroupCall:
    """What a collective works on: a tensor, the group of devices that it goes over, and the way to carry it out."""

    def __init__(
        self, name: str, tensor: Tensor, *, cluster_axis: int | None = None, mode=None, mesh_device=None
    ) -> None:
        device, (self.block,) = operands(name, tensor)
        if mesh_device is not None and mesh_device is not device:
            raise ArgumentError(f"ttnn.{name}: mesh_device is {mesh_device}, the tensor is on {device}")
        self.name, self.tensor, self.mesh = name, tensor, device.runtime.mesh
        self.split: Mesh | None = None  # the mesh as processes split it, if the group works on parts of all of them
        self.asked = None if mode is None else _check_mode(mode)
        self.mode = self.asked or _mode.get()
        self.axes = _axes(name, self.mesh, cluster_axis)
        self.places: tuple[MeshCoordinate, ...] | None = None  # the devices, if they are not all of the mesh
        if tensor._coords is not None and len(tensor._coords) < self.mesh.size:
            self.places = tuple(sorted(tensor._coords))
            if self.mesh.is_split:  # boxes of a part of a mesh are no equal boxes: every process works on all of it
                self.split, self.mesh = self.mesh, self.mesh.split(1)
            self.mesh = _part_of(name, self.mesh, self.places, cluster_axis)
            self.block = self.take(self.block)
        self.group = members_of(self.mesh, self.axes)
        self.size = self.group.size
        if self.size == 1 or (cluster_axis is None and fabric._config in ONE_AXIS):
            _refuse_group(name, self.size, self.mesh)
        if setting.level == "original" and fabric._config is fabric.FabricConfig.DISABLED:
            refuse_addition(
                "Trying to get un-initialized fabric context", "ttnn.set_fabric_config before a mesh is opened"
            )
        self.rank = len(tensor.shape)
        self.is_flat = len(tensor._topology._shape) == 1 < self.mesh.ndim  # the label is about all devices row-major

    @property
    def names(self) -> tuple[str, ...]:
        """The mesh axes by name."""
        return tuple(self.mesh.axes[axis] for axis in self.axes)

    def dim(self, dim: int, what: str = "gather") -> int:
        """A dim of the tensor counted from the front, or the original's refusal."""
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise ArgumentError(f"ttnn.{self.name}: dim={dim!r} is not a whole number")
        if not -self.rank <= dim < self.rank:
            raise OperandError(
                f"ttnn.{self.name}: Invalid {what} dim {dim} for {self.rank}D input tensor",
                fix=f"dims go from {-self.rank} to {self.rank - 1}",
            )
        return dim % self.rank

    def chunk_size(self, dim: int, message: str | None = None) -> int:
        """The size of one member's chunk of a dim, or the original's refusal."""
        size = self.tensor.shape[dim]
        if size % self.size:
            raise OperandError(
                f"ttnn.{self.name}: {message or f'Dimension {dim} must be divisible by ring_size'}",
                shape=list(self.tensor.shape),
                group=f"{self.size} devices, {size} % {self.size} = {size % self.size}",
                fix=f"pad dim {dim} to {-(-size // self.size) * self.size}",
            )
        return size // self.size

    # between the mesh and the devices that hold a part

    def take(self, block: Block) -> Block:
        """Of a block on the whole mesh, what the devices of the groups hold."""
        grid = self.tensor._grid
        if self.split is not None:
            block = to_native(block, self.split).to_torch()
        if self.places is None or all(size == 1 for size in block.shape[: len(grid)]):
            return block
        every = block.expand(*grid, *block.shape[len(grid) :]).flatten(0, len(grid) - 1)
        return torch.unflatten(every[_numbers(grid, self.places)], 0, self.mesh.shape)

    def make(self, block: Block, label: Label, **how: Any) -> Made:
        """What a collective has made on the devices of the groups; the other devices of the mesh hold nothing of it."""
        grid = self.tensor._grid
        if self.places is not None and any(size > 1 for size in block.shape[: len(grid)]):
            dims = block.shape[len(grid) :]
            every = block.new_zeros(math.prod(grid), *dims)
            every[_numbers(grid, self.places)] = block.expand(*self.mesh.shape, *dims).flatten(0, len(grid) - 1)
            block = torch.unflatten(every, 0, grid)
        if self.split is not None:
            block = take_box(block, grid)
        return Made(block, self.tensor, label, **how)

    def local(self, place: Sequence[int], argument: str) -> tuple[int, ...]:
        """A coordinate of the mesh as one of the devices that hold a part."""
        if self.places is None:
            return tuple(place)
        if MeshCoordinate(place) not in self.places:
            raise OperandError(
                f"ttnn.{self.name}: {argument} {list(place)} holds no part of the tensor",
                tensor=f"on {', '.join(str(list(each)) for each in self.places)}",
            )
        return tuple(self.mesh.coordinates())[self.places.index(MeshCoordinate(place))]

    def spread_members(self, block: Block, dim: int) -> Block:
        """What members hold side by side along a dim, each at its place among all devices of its group; zeros for
        devices without a part.

        Devices 2 and 3 of a row of 4, which hold a and b: [a, b] becomes [0, 0, a, b].
        """
        if self.places is None:
            return block
        grid, first = self.tensor._grid, self.places[0]
        others = [axis for axis in range(len(grid)) if axis not in self.axes]
        members = [place for place in self.places if all(place[axis] == first[axis] for axis in others)]
        sizes = tuple(grid[axis] for axis in self.axes)
        slots = _numbers(sizes, [[place[axis] for axis in self.axes] for place in members])
        place = self.at(dim)
        pieces = torch.unflatten(block, place, (self.size, block.shape[place] // self.size))
        every = block.new_zeros(*pieces.shape[:place], math.prod(sizes), *pieces.shape[place + 1 :])
        return every.index_copy(place, torch.tensor(slots), pieces).flatten(place, place + 1)

    # to the native collectives and back

    def run(self, function: Callable[..., Native], *args: Any, own: bool = False, **options: Any) -> Block:
        """A native collective over the group; `args` follow the tensor, dims of ours are `self.at(dim)`."""
        return self.run_on(self.block, function, *args, own=own, **options)

    def run_on(
        self, block: Block, function: Callable[..., Native], *args: Any, own: bool = False, **options: Any
    ) -> Block:
        """A native collective over the group on another block that lies as the tensor's does."""
        self._check_capture()
        given = to_native(block, self.mesh, self.axes if own else ())
        return from_native(function(given, *args, axis=self.names, mode=self.mode, **options))

    def _check_capture(self) -> None:
        if self.mesh.is_split and state.capture is not None:
            raise TraceError(
                f"ttnn.{self.name}: a trace cannot hold a collective on a mesh that several processes split",
                mesh=self.mesh,
                fix="capture what lies between the collectives, or run the program in one process",
            )

    def collective(
        self, kind: str, act: str, label: Label, *dims: int, size: int | None = None, **options: Any
    ) -> Made:
        """What a method of a native `Call` makes of the tensor, which lies on the whole mesh: `act` is its name, `dims`
        are dims of ours that it takes. `size` cuts the first of them, whose end is padding.

        A label that says nothing of some axis is checked every time (`CONFIG.strict_ccl_topology`).
        """
        self._check_capture()
        asked, places = self.asked, [self.at(dim) for dim in dims]
        axes = None if len(self.axes) == self.mesh.ndim else self.axes

        def kernel(mesh: Mesh, block: Block) -> Block:
            topology, lying = lie_down(block, mesh)
            names = None if axes is None else tuple([mesh.axes[axis] for axis in axes])
            call = Call(kind, topology, lying, names, asked or _mode.get(), is_block=True, **options)
            found = stand_up(getattr(call, act)(*places), mesh.ndim).contiguous()
            if same_storage(found, block):
                found = found.clone()
            return found if size is None else found.narrow(places[0], 0, size)

        check_mode(self.mode, options.get("op"), lie_down(self.block, self.mesh)[0])
        made = compute(kernel, (self.tensor,), label, mesh=self.mesh)
        if UNKNOWN in label._placements:
            made.kernel = None
        return made

    def at(self, dim: int) -> int:
        """The number of a dim in the native tensor, behind the mesh axes."""
        return self.mesh.ndim + dim

    def here(self, values: torch.Tensor) -> torch.Tensor:
        """Of values for every device, with the mesh axes as dims in front, those of the devices of this process."""
        if not self.mesh.is_split:
            return values
        for axis, (start, size) in enumerate(zip(self.mesh.local_offset, self.mesh.local_shape, strict=True)):
            if values.shape[axis] > 1:
                values = values.narrow(axis, start, size)
        return values

    def place_here(self, place: Sequence[int]) -> tuple[int, ...] | None:
        """A coordinate in the box of this process; None if another process holds it."""
        return place_here(grid_of(self.mesh), place)

    def are_alike(self) -> bool:
        """Whether the members of every group hold the same; if processes split the mesh, as far as the label says."""
        if self.mesh.is_split:
            return all(self.mesh.shape[axis] == 1 or self.known[axis] == REPLICATE for axis in self.axes)
        return all(self.block.shape[axis] == 1 for axis in self.axes)

    def position(self) -> torch.Tensor:
        """Every device's number in its group, with the mesh axes as dims; `here` of it are those of this process."""
        numbers = torch.arange(self.size).reshape(self.group.sizes)
        shape = [self.mesh.shape[axis] if axis in self.axes else 1 for axis in range(self.mesh.ndim)]
        return numbers.reshape(shape)

    def partition(self, block: Block, dim: int) -> Block:
        """Member i keeps chunk i of a dim of what it holds. Nothing moves."""
        axes = self.mesh.ndim
        for axis in self.axes:
            place = axes + dim
            size = self.mesh.shape[axis]
            cut = torch.unflatten(block, place, (size, block.shape[place] // size))
            if self.mesh.is_split:
                cut = cut.narrow(place, self.mesh.local_offset[axis], self.mesh.local_shape[axis])
            if cut.shape[axis] == 1:  # all hold the same: the chunks become the members
                block = cut.movedim(place, axis).squeeze(axis + 1)
            else:
                block = cut.diagonal(dim1=axis, dim2=place).movedim(-1, axis)
        return block

    # labels

    @functools.cached_property
    def known(self) -> Sequence[Placement]:
        """What the tensor's label says of every mesh axis; one over all devices says nothing of axes of one device."""
        shape = self.mesh.shape
        found = by_axis(self.tensor, shape) or (UNKNOWN,) * len(shape)
        if self.is_flat and 1 in shape and self.mesh.size > 1:
            return [REPLICATE if size == 1 else each for each, size in zip(found, shape, strict=True)]
        return found

    def relabel(self, placement: Placement) -> Label:
        """The label with a placement along the group, and as before on the other axes."""
        known = self.known
        return self.label([placement if axis in self.axes else each for axis, each in enumerate(known)])

    def apart(self, axes: Sequence[int]) -> Label:
        """The label when only some devices got other values: what was the same along these axes is so no more."""
        known = self.known
        return self.label([UNKNOWN if axis in axes and each == REPLICATE else each for axis, each in enumerate(known)])

    def label_gather(self, dim: int) -> Label:
        """The label when each member holds what all hold along a dim, in the order of the group.

        Where a later axis cuts the same dim, neighbours hold pieces that are none: there is no global tensor.
        """
        known = self.known
        cut = [isinstance(each, PlacementShard) and each.dim == dim for each in known]
        mixed = any(cut[axis] for axis in self.axes)
        later = [mixed and axis > self.axes[0] and each for axis, each in enumerate(cut)]
        return self.label(
            [
                REPLICATE if axis in self.axes else UNKNOWN if wrong else each
                for axis, (each, wrong) in enumerate(zip(known, later, strict=True))
            ]
        )

    def label_scatter(self, dim: int) -> Label:
        """The label when each member holds its chunk of a dim; none where a later axis cuts it too."""
        known = self.known
        others = [axis for axis, each in enumerate(known) if axis not in self.axes and each == PlacementShard(dim)]
        if any(other > axis for other in others for axis in self.axes):
            return self.label([UNKNOWN if axis in (*others, *self.axes) else each for axis, each in enumerate(known)])
        return self.relabel(PlacementShard(dim))

    def label(self, axes: Sequence[Placement]) -> Label:
        """A label from what every mesh axis does; one dim that all of them cut is cut row-major by all devices.

        If the tensor's label is about all devices and the group is all of them, so is this one.
        """
        if CONFIG.strict_ccl_topology and UNKNOWN in axes:
            raise OperandError(
                f"ttnn.{self.name}: the topology of the result cannot be told",
                label=self.tensor.tensor_topology(),
                fix="CONFIG.strict_ccl_topology = False, or go over the axes in another order",
            )
        sizes = tuple(getattr(each, "size", None) for each in axes)
        flat = self.is_flat and (self.size == self.mesh.size or self.size == 1)
        return _label(self.mesh, tuple(axes), sizes, flat, self.places)

    def whole_size(self, dim: int) -> int | None:
        """The size of a dim of the whole, if the group alone cuts it and its end is padding."""
        long = [axis for axis, size in enumerate(self.mesh.shape) if size > 1]
        known = self.known
        cuts = {axis: each.size for axis in long if isinstance(each := known[axis], PlacementShard) and each.dim == dim}
        sizes = set(cuts.values())
        return next(iter(sizes)) if list(cuts) == [a for a in long if a in self.axes] and len(sizes) == 1 else None

    def sharded_dim(self) -> int:
        """The dim that the label says is cut along the group; an error that asks for one if there is none."""
        dims = {
            each.dim
            for axis, each in enumerate(self.known)
            if isinstance(each, PlacementShard) and axis in self.axes and self.mesh.shape[axis] > 1
        }
        if len(dims) != 1:
            told = "several dims are" if dims else "no dim is"
            raise ArgumentError(
                f"ttnn.{self.name}: dim is missing, and {told} sharded along the group",
                label=self.tensor.tensor_topology(),
                fix=f"ttnn.{self.name}(tensor, dim=...)",
            )
        return dims.pop()


OVER = ("cluster_axis", "mesh_device", "mode")  # what a collective takes beside its tensor


@functools.lru_cache(maxsize=4096)
def _label(
    mesh: Mesh,
    axes: tuple[Placement, ...],
    sizes: tuple[int | None, ...],
    flat: bool,
    held: tuple[MeshCoordinate, ...] | None,
) -> Label:
    """The same object for the same placements; `sizes` tells those apart that only differ in their padding."""
    told = [
        REPLICATE if size == 1 and not isinstance(each, PlacementShard) else each
        for each, size in zip(axes, mesh.shape, strict=True)
    ]
    places = held or list(mesh.coordinates())
    if len(told) > 1 and len(set(told)) == 1 and isinstance(told[0], PlacementShard):
        return Label([mesh.size], told[:1], places)
    long = [each for each, size in zip(told, mesh.shape, strict=True) if size > 1] or told
    if flat and len(set(long)) == 1:
        return Label([mesh.size], long[:1], places)
    return Label(mesh.shape, told, places)


@functools.lru_cache(maxsize=256)
def _part_of(name: str, mesh: Mesh, held: tuple[MeshCoordinate, ...], cluster_axis: int | None) -> Mesh:
    """The devices that hold a part as a mesh with the same axes: a box of the mesh, or a line if they are none."""
    picks = [sorted({place[axis] for place in held}) for axis in range(mesh.ndim)]
    if math.prod(map(len, picks)) == len(held) and all(each[-1] - each[0] == len(each) - 1 for each in picks):
        box = {axis: slice(each[0], each[-1] + 1) for axis, each in zip(mesh.axes, picks, strict=True)}
        return mesh.submesh(box)
    long = [axis for axis, size in enumerate(mesh.shape) if size > 1]
    if cluster_axis is not None and len(long) > 1:
        raise OperandError(
            f"ttnn.{name}: the tensor is on {len(held)} of {mesh.size} devices, which are no rows and columns of the "
            f"mesh: groups along axis {cluster_axis} would differ in size",
            fix="cluster_axis=None goes over all that hold a part; or use a submesh, or a mapper with uneven=True",
        )
    first = _numbers(mesh.shape, held)
    order = [*first, *(number for number in range(mesh.size) if number not in first)]
    line = {axis: mesh.size if number == long[-1] else 1 for number, axis in enumerate(mesh.axes)}
    return mesh.reordered(order).reshape(**line).submesh({mesh.axes[long[-1]]: slice(0, len(held))})


def _numbers(grid: Sequence[int], places: Sequence[Sequence[int]]) -> list[int]:
    """Coordinates of a grid counted row-major."""
    return [number_of(place, grid) for place in places]


def _axes(name: str, mesh: Mesh, cluster_axis: int | None) -> tuple[int, ...]:
    if cluster_axis is None:
        return tuple(range(mesh.ndim))
    if isinstance(cluster_axis, bool) or not isinstance(cluster_axis, int):
        raise ArgumentError(f"ttnn.{name}: cluster_axis={cluster_axis!r} is not a whole number")
    if not 0 <= cluster_axis < mesh.ndim:
        raise OperandError(
            f"ttnn.{name}: cluster_axis {cluster_axis} is not an axis of a mesh of shape {list(mesh.shape)}",
            fix=f"axes go from 0 to {mesh.ndim - 1}; None is all devices",
        )
    return (cluster_axis,)
