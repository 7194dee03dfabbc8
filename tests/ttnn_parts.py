"""Oracles of the per-device view, as plain loops over devices: what each holds, and what a label makes of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from meshloom import ttnn
from meshloom.ttnn.tensor.formats import rounded
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology
from ttnn_draws import P, R


class NoWhole(Exception):
    """A label that says that the global tensor cannot be reconstructed."""


def places(grid: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, grid))


def part(tensor: Tensor, place: Sequence[int]) -> torch.Tensor:
    """What one device holds."""
    block = tensor.block
    index = [0 if size == 1 else c for c, size in zip(place, block.shape, strict=False)]
    return block[tuple(index)]


def of_block(
    device: Any, block: torch.Tensor, placements: Sequence[Any], dtype: Any = None, layout: Any = None
) -> Tensor:
    """A tensor of a block as it is, labelled."""
    grid = tuple(device.shape)
    kind = dtype or (ttnn.float32 if block.dtype.is_floating_point else ttnn.int32)
    label = TensorTopology(grid, placements, list(places(grid)))
    return Tensor(rounded(block, kind), grid, kind, layout or ttnn.ROW_MAJOR_LAYOUT, label, device)


def random_tensor(
    device: Any,
    shape: Sequence[int],
    alike: Sequence[bool],
    dtype: Any = None,
    layout: Any = None,
    high: int | None = None,
) -> Tensor:
    """Random parts, the same along some axes; along the others the label says nothing."""
    grid = tuple(device.shape)
    lead = [1 if same else size for same, size in zip(alike, grid, strict=True)]
    block = torch.randn(*lead, *shape) if high is None else torch.randint(0, high, (*lead, *shape))
    placements = [R if same or size == 1 else P("unknown") for same, size in zip(alike, grid, strict=True)]
    return of_block(device, block, placements, dtype or (ttnn.float32 if high is None else ttnn.int32), layout)


def check_each(found: Tensor, function: Callable[..., torch.Tensor], *operands: Tensor, close: float = 0.0) -> None:
    """Every device holds what the function makes of its parts."""
    for place in places(found.grid):
        expected = function(*(part(operand, place) for operand in operands))
        have = part(found, place)
        assert have.shape == expected.shape, (place, have.shape, expected.shape)
        if close:
            torch.testing.assert_close(have.double(), expected.double(), atol=close, rtol=close)
        else:
            assert torch.equal(have, expected.to(have.dtype)), place


# labels


def cut(whole: torch.Tensor, grid: Sequence[int], placements: Sequence[Any], place: Sequence[int]) -> torch.Tensor:
    """The part of a whole at a coordinate, axis after axis."""
    for size, placement, c in zip(grid, placements, place, strict=True):
        if isinstance(placement, ttnn.PlacementShard):
            whole = whole.chunk(size, dim=placement.dim)[c]
        elif isinstance(placement, ttnn.PlacementPartial):
            whole = whole * (1.0 if c == 0 else 0.0)
    return whole


def distributed(device: Any, whole: torch.Tensor, placements: Sequence[Any], dtype: Any = None) -> Tensor:
    """A whole cut into parts as placements say; axes that replicate are stored once."""
    grid = tuple(device.shape)
    lead = [1 if placement == R else size for size, placement in zip(grid, placements, strict=True)]
    rows = [cut(whole, grid, placements, place) for place in places(lead)]
    block = torch.stack(rows).reshape(*lead, *rows[0].shape)
    return of_block(device, block, placements, dtype)


def composed(tensor: Tensor) -> torch.Tensor:
    """The whole that a label says the parts are of; replicas have to be equal."""
    grid = tensor.grid
    label = tensor.tensor_topology()
    assert tuple(label.distribution_shape()) == tuple(grid)

    def whole(prefix: tuple[int, ...]) -> torch.Tensor:
        axis = len(prefix)
        if axis == len(grid):
            return part(tensor, prefix)
        found = [whole((*prefix, c)) for c in range(grid[axis])]
        placement = label.placements()[axis]
        if isinstance(placement, ttnn.PlacementShard):
            return torch.cat(found, dim=placement.dim)
        if isinstance(placement, ttnn.PlacementPartial):
            if placement.op == "unknown":
                raise NoWhole
            assert placement.op == "sum"
            return torch.stack(found).sum(0)
        assert all(torch.equal(found[0], each) for each in found), f"devices along axis {axis} differ"
        return found[0]

    return whole(())


def check_whole(found: Tensor, expected: torch.Tensor, close: float = 0.0) -> None:
    """The parts and their label make up what the op makes of wholes."""
    have = composed(found)
    assert have.shape == expected.shape, (have.shape, expected.shape, found.tensor_topology())
    torch.testing.assert_close(have.double(), expected.double(), atol=close, rtol=close)


def convolve(op: Any, mesh: Any, x: Any, weights: Any, channels: tuple[int, int], **how: Any) -> Any:
    """What a convolution makes of pictures, or lines, on a mesh: from so many channels to so many."""
    before, after = channels
    operands = {"input_tensor": x, "weight_tensor": weights, "device": mesh}
    return op(**operands, in_channels=before, out_channels=after, **how)
