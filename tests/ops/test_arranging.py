"""Joining, cutting and turning by torch's many names: values as dense, no fallback, dims that stay sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Mesh
from oracle import check_padding

MESH = Mesh(a=2, b=3)


def dense(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def check_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        check_padding(ours, str(ours.topology))
        torch.testing.assert_close(ours.to_torch(), theirs)
        return
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        check_same(mine, other)


WORKS: dict[str, Callable[[Any], Any]] = {
    "hstack": lambda x: torch.hstack([x, x]),
    "vstack": lambda x: torch.vstack((x, x)),
    "dstack": lambda x: torch.dstack([x, x]),
    "column_stack": lambda x: torch.column_stack([x, x[:, 0]]),
    "hstack of lines": lambda x: torch.hstack([x[0], x[1]]),
    "vstack of lines": lambda x: torch.vstack([x[0], x[1]]),
    "tensor_split": lambda x: torch.tensor_split(x, 4),
    "tensor_split at": lambda x: x.tensor_split((1, 3), dim=1),
    "hsplit": lambda x: torch.hsplit(x, 2),
    "vsplit": lambda x: x.vsplit([2, 3]),
    "atleast_3d": torch.atleast_3d,
    "atleast_2d of a line": lambda x: torch.atleast_2d(x[0]),
    "diag": torch.diag,
    "diag of a line": lambda x: torch.diag(x[0], 1),
    "fliplr": torch.fliplr,
    "flipud": lambda x: x.flipud(),
    "select": lambda x: x.select(1, -1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "moveaxis": lambda x: torch.moveaxis(x, 0, -1),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, 5, 6)),
    "unbind": lambda x: x.unbind(1),
    "unflatten": lambda x: x.unflatten(1, (2, -1)),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "repeat_interleave": lambda x: x.repeat_interleave(3, dim=1),
    "rot90": lambda x: x.rot90(),
    "linalg.diagonal": torch.linalg.diagonal,
    "pad": lambda x: F.pad(x, (1, 0), value=7.0),
}


@pytest.mark.parametrize("placements", ["S(0), R", "R, S(1)", "S(1), S(0)", "S(0), S(0)", "P(sum), S(1)"])
@pytest.mark.parametrize("name", WORKS)
def test_the_value_is_torchs_and_there_is_a_rule(name: str, placements: str) -> None:
    tensor = loom.distribute(dense(5, 6), MESH, "R, R").redistribute(placements)
    with loom.record() as log:
        found = WORKS[name](tensor)
    assert log.fallbacks == {}
    check_same(found, WORKS[name](dense(5, 6)))


def test_the_placement_that_was_asked_for_is_that_of_the_result() -> None:
    tensor = loom.distribute(dense(5, 6), MESH, "S(0), R")
    assert str(loom.diag_embed(tensor, output="S(0), S(2)").placements) == str((loom.Shard(0), loom.Shard(2)))
    lines = [tensor[0], tensor[1]]
    with loom.with_output("S(1), R"):
        found = torch.vstack(lines)
    assert [str(each) for each in found.placements] == ["S(1)", "R"]


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.roll(2, 1),
        lambda x: x.flip(1),
        lambda x: x.repeat(1, 2),
        lambda x: x.tril(),
        lambda x: x.triu(1),
        lambda x: F.pad(x, (1, 1)),
        lambda x: x.unfold(1, 2, 1),
        lambda x: x.sort(1),
        lambda x: x.repeat_interleave(2, 0),
    ],
)
def test_a_dim_that_is_left_alone_stays_sharded_and_nothing_moves(work: Callable[[Any], Any]) -> None:
    with loom.record() as log:
        found = work(loom.randn(6, 4, mesh=MESH, placements="S(0), R"))
    first = found[0] if isinstance(found, tuple) else found
    assert list(log) == [] and str(first.placements[0]) == "S(0)"


def test_a_triangle_of_sharded_rows_and_columns_needs_no_communication() -> None:
    data = dense(7, 8)
    with loom.record() as log:
        found = loom.distribute(data, MESH, "S(0), S(1)").tril(-1)
    assert list(log) == []
    check_same(found, data.tril(-1))


def test_repeats_by_a_tensor_depend_on_values_and_go_through_the_fallback() -> None:
    tensor, counts = loom.distribute(dense(3, 2), MESH, "S(0), R"), torch.tensor([2, 0, 1])
    with loom.record() as log:
        found = tensor.repeat_interleave(counts, 0)
    assert log.fallbacks == {"repeat_interleave": 1}
    check_same(found, dense(3, 2).repeat_interleave(counts, 0))


def test_an_empty_dim_unbinds_into_nothing() -> None:
    assert loom.zeros(0, 2, mesh=MESH).unbind() == ()


def test_views_write_through_and_copies_do_not() -> None:
    base = loom.distribute(dense(4, 2, 3), MESH, "S(0), R")
    base.unflatten(2, (3, 1)).fill_(1.0)
    base.diagonal(0, 1, 2).fill_(2.0)
    assert base.sum().item() == 24 + 8
    base.flip(1).fill_(5.0)
    base[0].diag().fill_(5.0)
    assert base.sum().item() == 24 + 8
    base.diagonal().fill_(9.0)  # it had to gather dim 0
    assert (base == 9).sum().item() == 6 and base[1, 1].tolist() == [9, 9, 9]


def test_steps_below_one_are_refused_as_in_torch() -> None:
    with pytest.raises(loom.ArgumentError, match="slice step must be above 0"):
        loom.zeros(4, mesh=MESH)[::-1]


def test_what_does_not_fit_is_refused_in_our_words() -> None:
    tensor = loom.zeros(5, 6, mesh=MESH)
    with pytest.raises(loom.ShapeError, match="hsplit does not cut size 6 into 4 equal sections"):
        torch.hsplit(tensor, 4)
    with pytest.raises(loom.ShapeError, match="takes more off"):
        F.pad(tensor, (-4, -4))
    with pytest.raises(loom.ShapeError, match=r"windows of 9 by steps of 1 do not fit dim 1 of size 6"):
        tensor.unfold(1, 9, 1)
    with pytest.raises(loom.ShapeError, match="needs two dims or more"):
        tensor[0].tril()
    with pytest.raises(loom.ShapeError, match="repeats"):
        tensor.repeat(2)


@pytest.mark.parametrize("shape", [(0, 0, 0, 2), (0, 3, 2), (3, 0, 2), (5, 2)])
def test_complex_numbers_of_pairs_that_three_devices_share_are_also_made_of_none(shape: tuple[int, ...]) -> None:
    pairs, mesh = dense(*shape), Mesh(x=3)
    ours = torch.view_as_complex(loom.distribute(pairs, mesh, [loom.Shard(len(shape) - 1)]))
    check_same(ours, torch.view_as_complex(pairs))
