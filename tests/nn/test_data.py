"""A loader: the same batches on any mesh and any number of processes, each process reading its own rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st

import meshloom as loom
import ranks
from meshloom.nn.data import Loader

PLACED = {(4,): ["S(0)", "R"], (2, 3): ["S(0), R", "S(0), S(0)", "S(0), S(1)", "R, S(1)", "R, R"]}


class Rows:
    """Samples with a row of numbers and a label; remembers which were read."""

    def __init__(self, count: int, width: int = 5) -> None:
        self.values, self.read = torch.randn(count, width, generator=torch.Generator().manual_seed(7)), set[int]()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.read.add(number)
        return {"row": self.values[number], "label": number}


def _dense(loader: Loader) -> list[tuple[torch.Tensor, list[int]]]:
    return [(batch["row"].to_torch(), batch["label"].to_torch().tolist()) for batch in loader]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 9), st.sampled_from(sorted(PLACED)), st.integers(0, 4), st.booleans())
def test_batches_do_not_depend_on_the_mesh(
    count: int, size: int, shape: tuple[int, ...], which: int, last: bool
) -> None:
    rows = Rows(count)
    placed = PLACED[shape][which % len(PLACED[shape])]
    alone = Loader(rows, size, loom.Mesh.of((1,)), seed=3, drop_last=last)
    spread = Loader(rows, size, loom.open_mesh(shape), placed, seed=3, drop_last=last)
    for _ in range(2):  # epochs
        expected, found = _dense(alone), _dense(spread)
        assert len(found) == len(expected) == len(spread) == (count // size if last else -(-count // size))
        for (x, labels), (y, others) in zip(found, expected, strict=True):
            assert torch.equal(x, y) and labels == others
            assert torch.equal(x, rows.values[labels])
    assert spread.epoch == 2


def test_an_epoch_has_every_sample_once_and_epochs_differ() -> None:
    loader = Loader(Rows(23), 4, loom.open_mesh((2,)), seed=1)
    orders = [[label for _, labels in _dense(loader) for label in labels] for _ in range(3)]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    other = Loader(Rows(23), 4, loom.open_mesh((2,)), seed=2)
    assert [label for _, labels in _dense(other) for label in labels] != orders[0]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 6), st.integers(1, 7), st.integers(1, 7))
def test_a_saved_loader_goes_on_with_the_next_sample(taken: int, first: int, second: int) -> None:
    whole = [label for _, labels in _dense(Loader(Rows(20), 1, loom.Mesh.of((1,)), seed=5)) for label in labels]
    loader = Loader(Rows(20), first, loom.open_mesh((4,)), seed=5)
    seen: list[int] = []
    for _, batch in zip(range(taken), loader, strict=False):
        seen += batch["label"].to_torch().tolist()
    seen = whole[: loader.samples] if loader.epoch == 0 else whole
    other = Loader(Rows(20), second, loom.open_mesh((2, 3)), "S(0), R", seed=99)
    other.load_state_dict(loader.state_dict())
    assert other.epoch == loader.epoch
    if loader.epoch == 0:
        rest = [label for _, labels in _dense(other) for label in labels]
        assert seen + rest == whole


def test_breaking_out_goes_on_behind_the_last_batch() -> None:
    loader = Loader(torch.arange(6), 2, loom.open_mesh((2,)), shuffle=False)
    for batch in loader:
        assert batch.tolist() == [0, 1]
        break
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5]]


class Pair(NamedTuple):
    x: Any
    y: Any


def test_tuples_and_named_tuples_keep_their_kind() -> None:
    mesh = loom.open_mesh((2,))
    [(x, y)] = Loader([(1.0, 2), (3.0, 4)], 2, mesh, shuffle=False)
    assert x.tolist() == [1.0, 3.0] and y.tolist() == [2, 4]
    [pair] = Loader([Pair(1.0, 2), Pair(3.0, 4)], 2, mesh, shuffle=False)
    assert type(pair) is Pair and isinstance(pair.x, loom.Tensor)


def test_workers_read_the_same() -> None:
    mesh = loom.open_mesh((2,))
    rows = torch.arange(12.0).view(6, 2)
    with_workers = [batch.to_torch() for batch in Loader(rows, 4, mesh, workers=1)]
    without = [batch.to_torch() for batch in Loader(rows, 4, mesh)]
    assert all(torch.equal(a, b) for a, b in zip(with_workers, without, strict=True))


def test_what_cannot_be_loaded_is_refused() -> None:
    mesh = loom.open_mesh((2,))
    with pytest.raises(loom.ArgumentError, match="a list_iterator has no items by number"):
        Loader(iter([1]), 2, mesh)
    with pytest.raises(loom.ArgumentError, match="the dataset is empty"):
        Loader([], 2, mesh)
    with pytest.raises(loom.ArgumentError, match="batch_size=0 is less than 1"):
        Loader([1], 0, mesh)
    with pytest.raises(loom.ArgumentError, match="a batch has a str, which cannot be put on a mesh: 'a'"):
        next(iter(Loader(["a", "b"], 2, mesh, shuffle=False)))
    with pytest.raises(loom.PlacementError, match=r"a batch cannot be P\(sum\)"):
        Loader([1], 1, mesh, "P(sum)")
    with pytest.raises(loom.ArgumentError, match=r"made a tensor of shape \[3\] of 2 samples"):
        next(iter(Loader([1, 2], 2, mesh, collate=lambda items: torch.zeros(3))))
    loader = Loader([1, 2], 2, mesh)
    with pytest.raises(loom.ArgumentError, match="the state is that of a loader of 3 samples, and this one has 2"):
        loader.load_state_dict(Loader([1, 2, 3], 2, mesh).state_dict())
    with pytest.raises(loom.ArgumentError, match="a loader's state has no 'epoch'"):
        loader.load_state_dict({})


@pytest.mark.parametrize("count", [2, 3])
def test_each_process_reads_its_own_rows(count: int) -> None:
    expected = [labels for _, labels in _dense(Loader(Rows(26), 6, loom.Mesh.of((1,)), seed=4))]
    read = []
    for labels, is_equal, own, state in ranks.run(count, "data_cases:load", count):
        assert labels == expected[: len(labels)] and is_equal
        assert state == {"epoch": 0, "samples": 18, "seed": 4, "shuffle": True, "size": 26}
        read.append(own)
    assert set.union(*read) == {label for labels in expected[:3] for label in labels}
    assert sum(map(len, read)) == 18  # none twice
