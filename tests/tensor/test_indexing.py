"""Indexing by tensors, writing by index, and what it communicates."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import Mesh
from oracle import check_padding

MESH = Mesh(a=2, b=3)
PLACED = ("R, R", "S(0), R", "S(1), S(0)", "S(0), S(0)", "S(2), S(1)", "P(sum), S(0)")
ROWS = torch.tensor([4, 0, -1, 2])
GRID = torch.tensor([[1, -4, 0], [2, 2, 3]])


def dense() -> torch.Tensor:
    return torch.randn(5, 4, 7, generator=torch.Generator().manual_seed(0))


def placed(placements: str, data: torch.Tensor | None = None) -> loom.Tensor:
    data = dense() if data is None else data
    if "P" not in placements:
        return loom.distribute(data, MESH, placements)
    return loom.distribute(data, MESH, placements.replace("P(sum)", "R")).redistribute(placements)


def check_same(ours: Any, expected: torch.Tensor) -> None:
    assert isinstance(ours, loom.Tensor) and ours.dtype == expected.dtype and ours.shape == expected.shape
    check_padding(ours, str(ours.topology))
    torch.testing.assert_close(ours.to_torch(), expected)


INDICES: dict[str, Any] = {
    "one": ROWS,
    "matrix": GRID % 4,
    "second": (slice(None), GRID),
    "two": (ROWS, torch.tensor([0, 3, -2, 1])),
    "apart": (ROWS[:3], slice(None), GRID),
    "with an int": (2, slice(None), ROWS),
    "with a slice": (slice(1, 4), GRID),
    "with a new dim": (None, ROWS, Ellipsis, GRID[:, :1] * 0),
    "after an ellipsis": (..., GRID),
    "a list": [0, 2, 2],
    "lists": ([0, 1], [2, 3]),
    "a number in a tensor": torch.tensor(-2),
    "an array": ROWS.numpy(),
}


@pytest.mark.parametrize("placements", PLACED)
@pytest.mark.parametrize("name", INDICES)
def test_an_index_by_tensors_gives_what_torch_gives_and_has_a_rule(name: str, placements: str) -> None:
    tensor = placed(placements)
    with loom.record() as log:
        found = tensor[INDICES[name]]
    assert log.fallbacks == {}
    check_same(found, dense()[INDICES[name]])


@pytest.mark.parametrize("placements", PLACED)
def test_an_index_on_a_mesh_works_as_a_plain_one(placements: str) -> None:
    rows = loom.distribute(torch.tensor([3, 0, 1, 4, 4]), MESH, "S(0), R")
    check_same(placed(placements)[rows], dense()[rows.to_torch()])


@pytest.mark.parametrize("index", [dense() > 0, (dense() > 0)[0], torch.tensor([True, False, True, False, True])])
def test_a_mask_has_a_result_that_depends_on_values_and_goes_through_the_fallback(index: torch.Tensor) -> None:
    tensor = placed("S(0), R")
    base, expected = (tensor, dense()) if index.shape[0] == 5 else (tensor[0], dense()[0])
    with loom.record() as log:
        found = base[index]
    assert log.fallbacks == {"getitem": 1}
    check_same(found, expected[index])


def test_a_look_up_in_a_sharded_dim_reduces_what_was_found_and_gathers_nothing() -> None:
    table = loom.randn(64, 8, mesh=Mesh(tp=4), placements="S(0)")
    with loom.record() as log:
        found = table[torch.tensor([3, 60])]
    assert [(event.kind, event.bytes) for event in log] == [("all_reduce", 2 * 3 * 2 * 8 * 4 // 4)]
    assert str(found.placements[0]) == "R"


def test_a_sharded_index_is_looked_up_without_communication() -> None:
    table = loom.randn(64, 8, mesh=Mesh(dp=4), placements="R")
    rows = loom.distribute(torch.arange(12), Mesh(dp=4), "S(0)")
    with loom.record() as log:
        found = table[rows]
    assert list(log) == [] and str(found.placements[0]) == "S(0)"


@pytest.mark.parametrize("op", ["gather", "take_along_dim"])
def test_a_gather_along_another_dim_communicates_nothing(op: str) -> None:
    scores = loom.randn(8, 10, mesh=Mesh(dp=4), placements="S(0)")
    best = scores.argmax(1, keepdim=True)
    with loom.record() as log:
        found = torch.gather(scores, 1, best) if op == "gather" else torch.take_along_dim(scores, best, 1)
    assert list(log) == [] and str(found.placements[0]) == "S(0)"


def test_each_device_takes_the_writes_into_its_chunk() -> None:
    target = loom.zeros(8, 3, mesh=Mesh(tp=4), placements="S(0)")
    with loom.record() as log:
        found = torch.index_add(target, 0, torch.tensor([7, 1, 7]), torch.ones(3, 3))
    assert list(log) == [] and str(found.placements[0]) == "S(0)"
    assert found.sum(1).tolist() == [0, 3, 0, 0, 0, 0, 0, 6]


def test_sharded_updates_of_a_replicated_target_are_summed() -> None:
    mesh = Mesh(dp=4)
    rows, updates = loom.distribute(torch.arange(8) % 3, mesh, "S(0)"), loom.ones(8, 2, mesh=mesh, placements="S(0)")
    with loom.record() as log:
        found = torch.index_add(loom.zeros(3, 2, mesh=mesh, placements="R"), 0, rows, updates)
    assert [event.kind for event in log] == ["all_reduce"]
    assert found.tolist() == [[3, 3], [3, 3], [2, 2]]


WRITES: dict[str, Any] = {
    "scatter_": lambda x: x.scatter_(0, GRID.view(2, 3, 1) % 4, 2.0),
    "scatter_add_": lambda x: x.scatter_add_(0, GRID.view(2, 3, 1) % 4, torch.ones(2, 3, 1)),
    "index_add_": lambda x: x.index_add_(1, torch.tensor([1, 1]), torch.ones(5, 2, 7), alpha=2),
    "index_fill_": lambda x: x.index_fill_(2, torch.tensor([0, 6]), -1.0),
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([4, 1]), torch.zeros(2, 4, 7)),
    "index_put_": lambda x: x.index_put_((ROWS % 5, torch.tensor([0, 1, 2, 3])), torch.tensor(3.0)),
    "accumulated": lambda x: x.index_put_((torch.tensor([1, 1]),), torch.ones(4, 7), accumulate=True),
    "tril_": lambda x: x.tril_(1),
    "masked_fill_": lambda x: x.masked_fill_(dense() > 0, 0.0),
}


@pytest.mark.parametrize("placements", PLACED)
@pytest.mark.parametrize("name", WRITES)
def test_a_write_by_index_changes_its_target_and_keeps_its_placements(name: str, placements: str) -> None:
    tensor, expected = placed(placements), dense()
    before = tensor.placements
    with loom.record() as log:
        assert WRITES[name](tensor) is tensor
    WRITES[name](expected)
    assert log.fallbacks == {} and tensor.placements == before
    check_same(tensor, expected)


ASSIGNMENTS: dict[str, tuple[Any, Any]] = {
    "rows": (torch.tensor([4, 0]), torch.arange(7.0)),
    "pairs": ((torch.tensor([4, 0, 1]), torch.tensor([0, -1, 2])), 5),
    "last dim": ((..., torch.tensor([6, 0])), torch.tensor(2.0)),
    "mask": (dense() > 0, 0.0),
    "mask of rows": (torch.tensor([True, False, True, False, False]), 1),
    "values of a mask": (dense() > 1, torch.arange(float((dense() > 1).sum()))),
    "a slice beside": ((slice(1, 3), torch.tensor([0, 2])), 9.0),
    "a slice": ((slice(None), slice(1, None, 2)), torch.ones(5, 2, 1)),
    "an int": (3, dense()[0]),
}


@pytest.mark.parametrize("placements", PLACED)
@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_an_assignment_changes_its_target_and_keeps_its_placements(name: str, placements: str) -> None:
    tensor, expected = placed(placements), dense()
    before, (index, value) = tensor.placements, ASSIGNMENTS[name]
    tensor[index] = value
    expected[index] = value
    assert tensor.placements == before
    check_same(tensor, expected)


def test_an_assignment_by_mask_communicates_nothing() -> None:
    tensor = placed("S(0), S(1)")
    mask = tensor > 0
    with loom.record() as log:
        tensor[mask] = 0.0
    assert list(log) == [] and log.fallbacks == {} and bool((tensor <= 0).all())


def test_gradients_pass_through_a_write_by_index() -> None:
    plain = torch.randn(5, 3, requires_grad=True)
    ours = loom.distribute(plain.detach(), MESH, "S(0), R").requires_grad_()
    for x in (plain, ours):
        y = x * 2
        y[torch.tensor([1, 3])] = 0.0
        y.scatter_reduce_(0, torch.tensor([[0, 4, 2]]), torch.full((1, 3), 2.0), "prod")
        y.square().sum().backward()
    torch.testing.assert_close(ours.grad.to_torch(), plain.grad)


def test_a_write_by_index_into_a_view_that_moved_data_reaches_its_base() -> None:
    base = placed("S(0), R")
    base[1:3].index_fill_(0, torch.tensor([0]), 1.0)
    assert (base[1] == 1).all() and not (base[2] == 1).all()


def test_an_index_that_does_not_fit_is_refused_in_our_words() -> None:
    with pytest.raises(loom.BoundsError, match="4 indices for 3 dims"):
        placed("R, R")[ROWS, ROWS, ROWS, ROWS]
    with pytest.raises(loom.ShapeError, match="the index has size 6 in dim 1 and the input has 4"):
        torch.gather(placed("R, R"), 0, torch.zeros(5, 6, 7, dtype=torch.int64))
    with pytest.raises(loom.ShapeError, match="index of one dim"):
        torch.index_select(placed("R, R"), 0, GRID)
    with pytest.raises(loom.ShapeError, match="sizes 3 and 7 do not broadcast"):
        torch.index_put(placed("R, R"), (torch.tensor([0, 1]),), torch.ones(3))


def test_one_hot_finds_its_classes_with_one_small_reduction() -> None:
    labels = loom.distribute(torch.tensor([0, 2, 1, 2, 0]), MESH, "S(0), R")
    with loom.record() as log:
        found = torch.nn.functional.one_hot(labels)
    assert {event.kind for event in log} == {"all_reduce"} and log.fallbacks == {}
    check_same(found, torch.nn.functional.one_hot(labels.to_torch()))
    with pytest.raises(loom.ArgumentError, match="number of classes"):
        torch.nn.functional.one_hot(labels, 0)


def test_the_best_k_of_a_sharded_dim_gathers_k_of_each_device() -> None:
    scores = loom.randn(4, 1000, mesh=Mesh(tp=4), placements="S(1)")
    with loom.record() as log:
        values, indices = scores.topk(3)
    assert [(event.kind, event.bytes) for event in log] == [("all_gather", 3 * 4 * 3 * (4 + 8))]
    expected = scores.to_torch().topk(3)
    assert torch.equal(values.to_torch(), expected.values) and torch.equal(indices.to_torch(), expected.indices)


@pytest.mark.parametrize("function", [torch.nonzero, torch.unique, torch.bincount, lambda x: x.masked_select(x > 1)])
def test_what_depends_on_values_goes_through_the_fallback(function: Any) -> None:
    numbers = torch.tensor([0, 3, 1, 3, 2])
    check_same(function(loom.distribute(numbers, MESH, "S(0), R")), function(numbers))


def test_named_results_have_torchs_names() -> None:
    tensor = placed("S(0), R")
    assert tensor.sort().values.shape == (5, 4, 7) and tensor.topk(2, 0).indices.shape == (2, 4, 7)
    check_same(tensor.msort(), dense().msort())
    assert type(tensor.sort(stable=True)).__name__ == "sort" and type(torch.topk(tensor, 1)).__name__ == "topk"
