"""Tensors on small meshes of one to three dims, and two oracles that know nothing of blocks or labels' rules.

`each_device` computes with plain torch in a loop over devices; `composed` puts parts together as a label says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom import ttnn
from meshloom.ttnn.device.system import OPEN
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import Placement, TensorTopology
from ttnn_draws import Place

_meshes: dict[Place, Any] = {}


def mesh(grid: Place) -> Any:
    """An open mesh of that shape; it stays open for all tests of a process, or until one of them closes all."""
    if _meshes.get(grid) not in OPEN:
        _meshes[grid] = ttnn.open_mesh_device(ttnn.MeshShape(*grid))
    return _meshes[grid]


def close_all() -> None:
    """Close every open mesh: a test that sets the fabric, or asks what is open, starts from none."""
    for device in list(OPEN):
        device.close()


def places(grid: Place) -> list[Place]:
    return list(itertools.product(*map(range, grid)))


def label(tensor: Tensor) -> list[Placement]:
    """What every axis of its distribution does, as it is labelled."""
    return list(tensor.tensor_topology().placements())


def tensor_of(
    block: torch.Tensor,
    grid: Place,
    placements: Sequence[Placement] | None = None,
    dtype: Any = ttnn.float32,
    layout: Any = None,
) -> Tensor:
    """A tensor from what all devices hold, mesh axes first; replicated unless placements are given."""
    told = placements or [ttnn.PlacementReplicate()] * len(grid)
    label = TensorTopology(grid, told, places(grid))
    return Tensor(block.to(dtype.store), grid, dtype, layout or ttnn.TILE_LAYOUT, label, mesh(grid))


def held(tensor: Tensor) -> dict[Place, torch.Tensor]:
    """What every device holds, by its coordinate."""
    found = {}
    for place in places(tensor.grid):
        part = tensor.block
        for size, coordinate in zip(tensor.block.shape[: len(place)], place, strict=True):
            part = part[coordinate if size > 1 else 0]
        found[place] = part
    return found


def each_device(function: Callable[..., Any], *operands: Any) -> dict[Place, Any]:
    """The function on the parts of every device, one device after the other."""
    parts = [held(each) if isinstance(each, Tensor) else each for each in operands]
    grid = next(each.grid for each in operands if isinstance(each, Tensor))
    return {
        place: function(*(each[place] if isinstance(each, dict) else each for each in parts)) for place in places(grid)
    }


def check_parts(found: Tensor, wanted: dict[Place, torch.Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Raise unless every device holds what it should, in shape and value."""
    for place, part in held(found).items():
        want = wanted[place]
        assert tuple(part.shape) == tuple(want.shape) == tuple(found.shape), (place, part.shape, want.shape)
        torch.testing.assert_close(part.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)


def check_op(
    found: Tensor, function: Callable[..., torch.Tensor], *operands: Any, rtol: float = 1e-5, atol: float = 1e-6
) -> None:
    """Raise unless every device holds the function of its own parts, worked out in float32 and rounded."""

    def fine(*parts: Any) -> torch.Tensor:
        exact = [p.float() if isinstance(p, torch.Tensor) and p.dtype is torch.bfloat16 else p for p in parts]
        return function(*exact).to(found.dtype.store)

    coarse = found.dtype in (ttnn.bfloat16, ttnn.bfloat8_b)
    tolerance = (1.6e-2, 1e-2) if coarse else (rtol, atol)
    check_parts(found, each_device(fine, *operands), *tolerance)


def composed(tensor: Tensor) -> torch.Tensor | None:
    """The whole that a label claims; None where it claims none."""
    label = tensor.tensor_topology()
    shape, placements = tuple(label.distribution_shape()), label.placements()
    parts = held(tensor)
    ordered = [parts[tuple(place)] for place in label.mesh_coords()]
    pile = torch.stack(ordered).reshape(*shape, *ordered[0].shape)
    for axis in reversed(range(len(shape))):
        pile = _joined(pile.unbind(axis), placements[axis], axis)
        if pile is None:
            return None
    return pile


def _joined(pieces: Sequence[torch.Tensor], placement: Placement, lead: int) -> Any:
    if isinstance(placement, ttnn.PlacementShard):
        dim = placement.dim if placement.dim >= 0 else placement.dim + pieces[0].dim() - lead
        return torch.cat(list(pieces), lead + dim)
    if isinstance(placement, ttnn.PlacementReplicate):
        for each in pieces[1:]:
            torch.testing.assert_close(each, pieces[0], equal_nan=True)
        return pieces[0]
    pile = torch.stack(list(pieces))
    ways = {"sum": pile.sum, "mean": pile.mean, "max": pile.amax, "min": pile.amin, "prod": pile.prod}
    return ways[placement.op](0) if placement.op in ways else None


def distributed(whole: torch.Tensor, grid: Place, placements: Sequence[Placement], seed: int = 0) -> Tensor:
    """A whole cut up as placements say: shards, copies, or random terms whose sum it is."""
    parts = {(): whole}
    generator = torch.Generator().manual_seed(seed)
    for size, placement in zip(grid, placements, strict=True):
        grown = {}
        for place, part in parts.items():
            for number, piece in enumerate(_cut(part, size, placement, generator)):
                grown[(*place, number)] = piece
        parts = grown
    block = torch.stack([parts[place] for place in places(grid)]).reshape(*grid, *next(iter(parts.values())).shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, ttnn.PlacementReplicate):
            block = block.narrow(axis, 0, 1)
    return tensor_of(block.clone(), grid, placements)


def _cut(part: torch.Tensor, size: int, placement: Placement, generator: torch.Generator) -> list[torch.Tensor]:
    if isinstance(placement, ttnn.PlacementShard):
        return list(part.chunk(size, placement.dim))
    if isinstance(placement, ttnn.PlacementReplicate):
        return [part] * size
    terms = [torch.randn(part.shape, generator=generator) for _ in range(size - 1)]
    return [*terms, part - sum(terms)] if terms else [part]


def check_claim(found: Tensor, whole: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-4) -> bool:
    """Raise if the label claims a whole that is not this one; whether it claims one."""
    claim = composed(found)
    if claim is None:
        return False
    torch.testing.assert_close(claim, whole, rtol=rtol, atol=atol, equal_nan=True)
    return True


def cores(x: int, y: int) -> Any:
    """A rectangle of cores of that width and height."""
    return ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(x - 1, y - 1))])


def semaphore_on(device: Any) -> Any:
    """A semaphore on four cores of every device."""
    return ttnn.create_global_semaphore(device, cores(2, 2), 0)
