"""Positions have values inside of a dry run, and meet arrays without data by their shapes."""

from __future__ import annotations

import pytest
import torch

import meshloom as loom
from meshloom.tensor.known_numbers import KnownNumbers


def test_a_range_of_whole_numbers_that_is_asked_for_without_data_has_values():
    with KnownNumbers():
        found = torch.arange(3, 9, 2, device="meta")
        also = torch.arange(4, device=torch.device("meta"))
    assert found.tolist() == [3, 5, 7] and also.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("made", [lambda: torch.arange(0.0, 4.0, device="meta"), lambda: torch.ones(3, device="meta")])
def test_other_tensors_stay_without_data(made):
    with KnownNumbers():
        assert made().is_meta


def test_what_has_values_meets_what_has_none():
    with KnownNumbers():
        angles = torch.arange(4, device="meta")[:, None].float() @ torch.empty(1, 8, device="meta")
        joined = torch.cat([torch.empty(2, device="meta"), torch.arange(3, device="meta")])
    assert angles.is_meta and angles.shape == (4, 8)
    assert joined.is_meta and joined.shape == (5,)


def test_outside_of_it_nothing_changes():
    assert torch.arange(3, device="meta").is_meta


def test_a_program_may_look_at_positions_in_a_dry_run_and_in_explain():
    x = loom.empty(4, 8, mesh=loom.open_mesh((2,)), placements="S(0)", device="meta")

    def program():
        positions = torch.arange(x.shape[1], device=x.device)
        assert (positions.diff() == 1).all()
        return x * positions

    with loom.dry_run() as run:
        program()
    assert [node.op for node in run.nodes] == ["mul"]
    assert loom.explain(program).result.shape == (4, 8)
