"""One process composes a redistribution from the path that is reported: its steps, one by one, give the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch

import meshloom as loom
from meshloom import Mesh, Partial, Placement, Replicate, Shard, Topology
from meshloom.comms import move
from meshloom.engines import layout
from meshloom.fabric import VIRTUAL
from meshloom.placement.topology import reduce_together
from meshloom.planner import moves, stations

MESH = Mesh(a=2, b=3, c=2)
PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial("sum"), Partial("max"))
SHAPES = ((4, 6), (5, 7))  # even in part, and padded, also in the middle


def one_by_one(data: torch.Tensor, source: Topology, target: Topology) -> torch.Tensor:
    """Every step of the path by itself."""
    way = [source.with_placements(each) for each in stations(source, target.placements, VIRTUAL)]
    assert way[-1] is target
    for before, after in itertools.pairwise(way):
        step = layout.mover(before, after)
        data = data if step is None else step(data)
    return data


def bits(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.int32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_composed_movement_is_that_of_the_steps_one_by_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    tried, several = 0, 0
    for placed in filter(reduce_together, itertools.product(PLACEMENTS, repeat=3)):
        source = Topology(MESH, placed, shape, "f32")
        data = torch.randn(source.stored_shape)
        mask = layout.mask_of(source, data.device)
        data = data if mask is None else torch.where(mask, data, 0)
        for wanted in itertools.product(PLACEMENTS[:4], repeat=3):
            target = source.with_placements(wanted)
            found, expected = move(data, source, target), one_by_one(data, source, target)
            assert torch.equal(bits(found), bits(expected)), f"{source} to {target}"
            tried, several = tried + 1, several + (len(moves(source, target, VIRTUAL)) > 1)
    assert tried > 5000
    assert several > 1000


def test_sums_over_two_axes_are_made_in_the_order_of_the_path() -> None:
    source = Topology(MESH, (Partial("sum"), Partial("sum"), Replicate()), (4,), "f32")
    data = torch.randn(source.stored_shape)
    with loom.record() as log:
        found = loom.Tensor(source, data).redistribute("R, R, R")
    order = list(dict.fromkeys(event.collective.axis for event in log.events))
    assert sorted(order) == ["a", "b"]
    left = ["a", "b"]
    for axis in order:
        data = data.sum(left.index(axis))
        left.remove(axis)
    assert torch.equal(found.to_torch(), data)
