"""Collectives: literal, on what devices hold. An all_reduce of a replicated tensor on 4 devices is 4 times the tensor.

Sums of low precision are made in float32 and rounded once, in every mode (the original rounds at every hop); those of
block floats by way of bfloat16, as there. Parts that the original leaves undefined are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.runtime import MeshCoordinate
from meshloom.tensor import collectives as native
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.collectives.groups import GroupCall
from meshloom.ttnn.ops.calling import Made, Optionals, op
from meshloom.ttnn.tensor.formats import Layout
from meshloom.ttnn.tensor.parts import Block, part
from meshloom.ttnn.tensor.topology import REPLICATE

__all__ = ["ReduceType"]

LINKS = "num_links topology subdevice_id use_l1_small_for_semaphores chunks_per_sync num_workers_per_link " + (
    "num_buffers_per_channel sub_core_grids compute_kernel_config intermediate_memory_config"
)


class ReduceType(Choice):
    """How members of a group are combined."""

    Sum, Mean, Max, Min, Std, Var, Prod = range(7)


@op("all_gather", also=LINKS + " mesh_device mode", more=GroupCall)
def all_gather(input_tensor, dim=None, **over) -> Made:
    """Every member of each group holds what all of them hold, one after the other along `dim`.

    Without `dim` it is the one that the label says is sharded along the group. Devices of the group that hold no part
    of the tensor count as zeros.

    >>> from meshloom import ttnn
    >>> import torch
    >>> mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 4))
    >>> columns = ttnn.ShardTensorToMesh(mesh, dim=1)
    >>> x = ttnn.from_torch(torch.arange(8.0).reshape(1, 8), device=mesh, mesh_mapper=columns)
    >>> x.shape, ttnn.all_gather(x, dim=1).shape, ttnn.all_gather(x).tensor_topology().placements()
    (Shape([1, 2]), Shape([1, 8]), [PlacementReplicate()])
    >>> ttnn.close_mesh_device(mesh)
    """
    group = GroupCall("all_gather", input_tensor, **over)
    return gather_along(group, dim)


def gather_along(group: GroupCall, dim: int | None = None) -> Made:
    """The all-gather of a group's tensor; the padding at the end of a dim that only the group cuts is left out."""
    place = group.sharded_dim() if dim is None else group.dim(dim)
    label = group.label_gather(place)
    if group.places is None:
        return group.collective("all_gather", "gather_block", label, place, size=group.whole_size(place), grows="more")
    return group.make(group.spread_members(group.run(native.all_gather, group.at(place)), place), label)


def cut_padding(group: GroupCall, block: Block, dim: int) -> Block:
    """A dim that the group cut and that is whole again, without the padding at its end."""
    size = group.whole_size(dim)
    return block if size is None else block.narrow(group.at(dim), 0, size)


@op("all_reduce", also=LINKS + " mesh_device mode", more=GroupCall)
def all_reduce(input_tensor, **over) -> Made:
    """Every member of each group holds the sum of what its members hold.

    >>> from meshloom import ttnn
    >>> import torch
    >>> mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 4))
    >>> ttnn.to_torch(ttnn.all_reduce(ttnn.from_torch(torch.ones(1, 2), device=mesh)))
    tensor([[4., 4.]])
    >>> ttnn.close_mesh_device(mesh)
    """
    return reduce_over(GroupCall("all_reduce", input_tensor, **over))


def reduce_over(group: GroupCall, math_op: ReduceType = ReduceType.Sum) -> Made:
    """The all-reduce of a group's tensor."""
    how: dict[str, Any] = {"op": reduction(group.name, math_op), "precise": True}
    if group.places is None:
        return group.collective("all_reduce", "reduce_block", group.relabel(REPLICATE), **how)
    return group.make(group.run(native.all_reduce, **how), group.relabel(REPLICATE))


def reduction(name: str, math_op: ReduceType | None) -> str:
    """A reduction by its native name."""
    if math_op in (ReduceType.Std, ReduceType.Var):
        raise OperandError(f"ttnn.{name}: {math_op} cannot be made of reduced parts", fix="gather first, then reduce")
    return "sum" if math_op is None else math_op.name.lower()


@op("reduce_scatter", also=LINKS + " mesh_device mode", more=GroupCall)
def reduce_scatter(input_tensor, dim, **over) -> Made:
    """Member i of each group holds chunk i, along `dim`, of the sum of what its members hold."""
    group = GroupCall("reduce_scatter", input_tensor, **over)
    return scatter_along(group, dim)


def scatter_along(group: GroupCall, dim: int, math_op: ReduceType = ReduceType.Sum) -> Made:
    """The reduce-scatter of a group's tensor."""
    place = group.dim(dim, "scatter")
    group.chunk_size(place)
    how: dict[str, Any] = {"op": reduction(group.name, math_op), "precise": True}
    label = group.label_scatter(place)
    if group.places is None:
        return group.collective("reduce_scatter", "scatter_block", label, place, **how)
    return group.make(group.run(native.reduce_scatter, group.at(place), **how), label)


@op("mesh_partition")
def mesh_partition(input_tensor, dim, cluster_axis: int | None = None) -> Made:
    """Member i of each group keeps chunk i, along `dim`, of its own tensor. Nothing is sent."""
    group = GroupCall("mesh_partition", input_tensor, cluster_axis=cluster_axis)
    place = group.dim(dim, "partition")
    chunk = group.chunk_size(
        place, f"input shape {list(input_tensor.shape)} must be divisible by cluster axis size {group.size}"
    )
    _check_tiles(group, place, chunk)
    found = group.partition(group.block, place).clone(memory_format=torch.contiguous_format)
    return group.make(found, group.label_scatter(place))


def _check_tiles(group: GroupCall, dim: int, chunk: int) -> None:
    side = dim - group.rank + 2
    if (
        group.tensor.layout is Layout.TILE
        and side >= 0
        and group.size > 1
        and chunk % group.tensor.tile.tile_shape[side]
    ):
        word = ("height", "width")[side]
        raise OperandError(
            f"ttnn.{group.name}: Can only slice tilized tensor with {word} begin index aligned to tiles",
            chunk=f"{chunk} of dim {dim}",
            fix="ttnn.to_layout(tensor, ttnn.ROW_MAJOR_LAYOUT) first",
        )


@op("broadcast", also=LINKS + " mode", more=GroupCall)
def broadcast(input_tensor, sender_coord, **over) -> Made:
    """Every member of the sender's group holds what the sender holds; other groups keep their own."""
    group = GroupCall("broadcast", input_tensor, **over)
    place = coordinate(group, sender_coord, "sender_coord")
    root = int(group.position()[tuple(c if axis in group.axes else 0 for axis, c in enumerate(place))])
    found = group.run(native.broadcast, root)
    if group.size == group.mesh.size or group.are_alike():  # one group, or members that hold the same
        return group.make(found, group.relabel(REPLICATE))
    is_sent = torch.zeros(group.mesh.shape, dtype=torch.bool)
    is_sent[tuple(slice(None) if axis in group.axes else c for axis, c in enumerate(place))] = True
    is_sent = group.here(is_sent)
    kept = torch.where(is_sent.reshape(*is_sent.shape, *(1,) * group.rank), found, _each(group))
    others = [axis for axis in range(group.mesh.ndim) if axis not in group.axes]
    return group.make(kept, group.apart(others))


def coordinate(group: GroupCall, place: Sequence[int], name: str) -> tuple[int, ...]:
    """A coordinate of the mesh as one of the group's devices, or an error."""
    if not isinstance(place, (MeshCoordinate, tuple, list)):
        raise ArgumentError(f"ttnn.{group.name}: {name}={place!r} is not a ttnn.MeshCoordinate")
    found, grid = tuple(place), group.tensor.grid
    if len(found) != len(grid) or any(not 0 <= c < size for c, size in zip(found, grid, strict=True)):
        raise OperandError(f"ttnn.{group.name}: {name} {list(found)} is not on the mesh", mesh=f"of shape {list(grid)}")
    return group.local(found, name)


def _each(group: GroupCall, block: Block | None = None) -> Block:
    """The block with a part for every device."""
    given = group.block if block is None else block
    return given.expand(*group.mesh.local_shape, *given.shape[group.mesh.ndim :])


@op("all_broadcast", also=LINKS + " mode", more=GroupCall)
def all_broadcast(input_tensor, **over) -> list[Made]:
    """A tensor for every member of the groups: the k-th is what member k holds, on all members."""
    group = GroupCall("all_broadcast", input_tensor, **over)
    stacked = stack_members(group)
    label = group.relabel(REPLICATE)
    return [group.make(each.clone(), label) for each in stacked.unbind(group.at(0))]


def stack_members(group: GroupCall, block: Block | None = None) -> Block:
    """What all members hold, in a new first dim of every part."""
    given = group.block if block is None else block
    return group.run_on(given.unsqueeze(group.at(0)), native.all_gather, group.at(0))


@op("point_to_point", also="mode", more=GroupCall)
def point_to_point(input_tensor, sender_coord, receiver_coord, *, output_tensor=None, **over) -> Made:
    """The receiver holds what the sender holds; the other parts are zero, or as they were in `output_tensor`."""
    group = GroupCall("point_to_point", input_tensor, **over)
    source = coordinate(group, sender_coord, "sender_coord")
    target = coordinate(group, receiver_coord, "receiver_coord")
    if sum(a != b for a, b in zip(sender_coord, receiver_coord, strict=True)) > 1:
        raise OperandError(
            f"ttnn.point_to_point: {list(sender_coord)} and {list(receiver_coord)} share no row or column",
            fix="send over a device that shares one with both",
        )
    if input_tensor.memory_config().is_sharded():
        raise OperandError(
            "ttnn.point_to_point: sharded memory is not supported", fix="ttnn.to_memory_config(tensor, ...) first"
        )
    if output_tensor is not None and output_tensor.shape != input_tensor.shape:
        raise OperandError(
            f"ttnn.point_to_point: output_tensor has shape {list(output_tensor.shape)}, "
            f"what is sent {list(input_tensor.shape)}",
            fix="give one of the shape of the input",
        )
    numbers = group.position()
    found = group.run(native.send_recv, int(numbers[source]), int(numbers[target]), own=True)
    blank = torch.zeros_like(found) if output_tensor is None else _each(group, group.take(output_tensor.block)).clone()
    here = group.place_here(target)
    if here is not None:
        blank[here] = part(found, here)
    return group.make(blank, group.apart(group.axes), output=output_tensor)


_ROOMS = Optionals("output_tensor_l output_tensor_s output_tensor_m")


@op("reduce_to_root", also="mode", more=(GroupCall, _ROOMS))
def reduce_to_root(input_tensor_l, input_tensor_s, input_tensor_m, root_coord, *, scale_fp32=1.0, **over) -> list[Made]:
    """Attention over parts of the keys, put together on one device: weighted values `l`, weights `s`, maxima `m`.

    m = max(m_i), p_i = exp((m_i - m) * scale), s = sum(s_i * p_i), l = sum(l_i * p_i). On other devices it is zero.
    The columns of `l` go in equal runs with the columns of `s` and `m`. Any number of devices takes part.
    """
    given, outputs = (input_tensor_l, input_tensor_s, input_tensor_m), _ROOMS(over)
    groups = [GroupCall("reduce_to_root", each, **over) for each in given]
    place = coordinate(groups[0], root_coord, "root_coord")
    root = int(groups[0].position()[place])
    stacked = [group.run_on(group.block.unsqueeze(group.at(0)), native.gather, group.at(0), root) for group in groups]
    here = groups[0].place_here(place)
    found = _merge([part(each, here or (0,) * len(place)) for each in stacked], scale_fp32)
    return [
        group.make(_alone(group, values, here), group.apart(group.axes), output=out)
        for group, values, out in zip(groups, found, outputs, strict=True)
    ]


def _alone(group: GroupCall, values: Block, here: tuple[int, ...] | None) -> Block:
    """Values on one device, if this process holds it, and zeros on the others."""
    block = values.new_zeros(*group.mesh.local_shape, *values.shape)
    if here is not None:
        block[here] = values
    return block


def _merge(parts: Sequence[Block], scale: float) -> tuple[Block, Block, Block]:
    values, sums, tops = (each.to(torch.float32) for each in parts)
    top = tops.amax(0)
    weights = torch.exp((tops - top) * scale)
    runs = torch.unflatten(values, -1, (sums.shape[-1], values.shape[-1] // sums.shape[-1]))
    return (runs * weights.unsqueeze(-1)).sum(0).flatten(-2), (sums * weights).sum(0), top
