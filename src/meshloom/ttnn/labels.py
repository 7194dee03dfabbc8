"""The label of an op's result, from the labels of its operands and what was done to their dims.

Labels are compared axis by axis of the mesh: a distribution over [8] on a mesh of 2x4 is one over both axes. A dim that
an op puts elsewhere takes its placement along; one that it sums over leaves partial sums; one that it mixes up is
labelled as before only if the dim is still there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from meshloom.ttnn.tensor import Tensor
from meshloom.ttnn.topology import REPLICATE, Placement, PlacementPartial, PlacementReplicate, PlacementShard
from meshloom.ttnn.topology import TensorTopology as Label

Axes = tuple[Placement, ...]


def by_axis(tensor: Tensor) -> Axes | None:
    """What every axis of the mesh does, dims counted from the front; None if the label is about something else."""
    label, grid, rank = tensor.tensor_topology(), tensor.grid, len(tensor.shape)
    shape, placements = tuple(label.distribution_shape()), tuple(label.placements())
    if shape == grid:
        found = placements
    elif len(shape) == 1 and shape[0] in (1, math.prod(grid)):
        found = placements * len(grid)
    else:
        return None
    return tuple(PlacementShard(p.dim % rank) if isinstance(p, PlacementShard) and rank else p for p in found)


def labelled(axes: Axes, like: Tensor) -> Label:
    """The label for what every axis does, in the form of an operand's label where that can say it."""
    label, grid = like.tensor_topology(), like.grid
    if len(label.distribution_shape()) == 1 and len(set(axes)) == 1:
        return Label(label.distribution_shape(), axes[:1], label.mesh_coords())
    return Label(grid, axes, like.device_coords())


def merged(tensors: Sequence[Tensor], rank: int, moved: Callable[[Tensor, int], int | None] | None = None) -> Label:
    """Of an op that works element by element: dims are aligned at the end, and what one operand shards is sharded."""
    move = moved or (lambda tensor, dim: dim + rank - len(tensor.shape))
    found: list[Placement] = [REPLICATE] * len(tensors[0].grid)
    for tensor in tensors:
        axes = by_axis(tensor)
        if axes is None:
            return tensor.tensor_topology()
        for axis, placement in enumerate(axes):
            if isinstance(placement, PlacementShard):
                dim = move(tensor, placement.dim)
                placement = REPLICATE if dim is None else PlacementShard(dim)
            if isinstance(found[axis], PlacementReplicate):
                found[axis] = placement
    return labelled(tuple(found), tensors[0])


def reduced(tensor: Tensor, dims: Sequence[int], keepdim: bool, op: str | None) -> Label:
    """Of a reduction over some dims: over a sharded one it leaves terms of `op`; the others are numbered anew."""
    axes = by_axis(tensor)
    if axes is None:
        return tensor.tensor_topology()
    gone = {dim % len(tensor.shape) for dim in dims}

    def after(placement: Placement) -> Placement:
        if not isinstance(placement, PlacementShard):
            return placement
        if placement.dim in gone:
            return PlacementPartial(op) if op is not None else REPLICATE
        return placement if keepdim else PlacementShard(placement.dim - sum(dim < placement.dim for dim in gone))

    return labelled(tuple(map(after, axes)), tensor)


def moved(tensor: Tensor, places: Mapping[int, int]) -> Label:
    """Of an op that puts dims elsewhere: where each dim is now; a sharded dim that is gone is not told any more."""
    axes = by_axis(tensor)
    if axes is None:
        return tensor.tensor_topology()

    def after(placement: Placement) -> Placement:
        if not isinstance(placement, PlacementShard):
            return placement
        return PlacementShard(places[placement.dim]) if placement.dim in places else REPLICATE

    return labelled(tuple(map(after, axes)), tensor)


def contracted(a: Tensor, b: Tensor, a_inner: int, b_inner: int, rank: int) -> Label:
    """Of a product of matrices summed over one dim of each: an axis that cuts it leaves partial sums."""
    first, second = by_axis(a), by_axis(b)
    if first is None or second is None:
        return (b if second is None else a).tensor_topology()
    return labelled(
        tuple(
            _contracted(p, q, a_inner % len(a.shape), b_inner % len(b.shape), len(a.shape), len(b.shape), rank)
            for p, q in zip(first, second, strict=True)
        ),
        a,
    )


def _contracted(
    p: Placement, q: Placement, a_inner: int, b_inner: int, a_rank: int, b_rank: int, rank: int
) -> Placement:
    for placement, inner in ((p, a_inner), (q, b_inner)):
        if placement == PlacementShard(inner):
            return PlacementPartial()
        if isinstance(placement, PlacementPartial):
            return placement
    if isinstance(p, PlacementShard):
        outer = p.dim - a_rank + rank
        return PlacementShard(outer if p.dim < a_rank - 2 else rank - 2)
    if isinstance(q, PlacementShard):
        return PlacementShard(q.dim - b_rank + rank if q.dim < b_rank - 2 else rank - 1)
    return REPLICATE
