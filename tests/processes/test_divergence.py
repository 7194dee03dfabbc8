"""Processes that do different things are told apart, late too, and by the tensors that they work on."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import faults
import meshloom as loom
import ranks
from meshloom.mesh import HERE
from meshloom.processes.divergence import FIRST, STORY

LATE = FIRST + 40  # collectives before the fault, so that the default check samples


def _swap(mesh: Any) -> None:
    """The same two sums, in another order on one rank, on one line."""
    pair = [loom.full((8, 2), value, mesh=mesh, placements="S(0)") for value in (1.0, 2.0)]
    for x in pair if HERE.rank == 0 else reversed(pair):
        x.sum()


def _swap_results(mesh: Any) -> None:
    """The same, of what was computed from one tensor."""
    x = loom.ones(8, 2, mesh=mesh, placements="S(0)")
    pair = [x * 2, x * 3.0, x + x]
    for y in pair if HERE.rank == 0 else reversed(pair):
        y.sum()


def _swap_operands(mesh: Any) -> None:
    """A product of the same operands, in another order on one rank."""
    x, y = (loom.ones(4, 4, mesh=mesh, placements="S(0)") for _ in range(2))
    _ = x @ y if HERE.rank == 0 else y @ x


def _branch(mesh: Any) -> None:
    x = loom.ones(8, 2, mesh=mesh, placements="S(0)")
    _ = x.amax() if HERE.rank == 0 else x.sum()


def _seed(mesh: Any) -> None:
    torch.manual_seed(HERE.rank)
    loom.randn(4, mesh=mesh, placements="R")


def _plain(mesh: Any) -> None:
    _ = loom.ones(8, 2, mesh=mesh, placements="S(0)") * torch.full((2,), float(HERE.rank))


def _large_plain(mesh: Any) -> None:
    drawn = torch.randn(300, 700, generator=torch.Generator().manual_seed(HERE.rank))
    loom.distribute(drawn.T, mesh, "R")


def _collective(mesh: Any) -> None:
    """A literal collective of another tensor."""
    pair = [loom.ones(4, 2, mesh=mesh, placements="S(0)") for _ in range(2)]
    loom.collectives.all_reduce(pair[HERE.rank])


def _gradients(mesh: Any) -> None:
    """Losses of two models, one after the other, in another order on one rank."""
    x = loom.ones(4, 3, mesh=mesh, placements="S(0)")
    pair = [loom.Parameter(torch.ones(3, 2), mesh, {}) for _ in range(2)]
    for w in pair if HERE.rank == 0 else reversed(pair):
        (x @ w).sum().backward()


FAULTS: dict[str, Callable[[Any], None]] = {
    "swapped": _swap,
    "swapped results": _swap_results,
    "swapped operands": _swap_operands,
    "another op": _branch,
    "another seed": _seed,
    "another plain tensor": _plain,
    "another large plain tensor": _large_plain,
    "another tensor of a collective": _collective,
    "swapped backward": _gradients,
}


def late(name: str, check: str) -> str:
    """A fault after many collectives, then as many as it takes until it is found; what the error says."""
    mesh = loom.open_mesh((2,), axes=("dp",), check=check, timeout=60)
    x = loom.ones(4, mesh=mesh, placements="S(0)")
    for _ in range(LATE):
        x.sum()
    FAULTS[name](mesh)
    try:
        for _ in range(FIRST + 1):
            x.sum()
    except loom.DivergenceError as error:
        return str(error)
    return "not found"


@pytest.mark.parametrize("name", FAULTS)
def test_a_late_fault_is_found_by_the_default_check(name: str) -> None:
    for text in ranks.run(2, "test_divergence:late", name, "sample"):
        assert text.startswith(("the processes do ", "a plain tensor")), text
        assert "rank 0: " in text and "rank 1: " in text and "test_divergence.py:" in text, text


def test_swapped_sums_are_found_at_once_where_everything_is_compared() -> None:
    assert all("not found" not in text for text in ranks.run(2, "test_divergence:always"))


def always() -> str:
    """The error is raised at the first of two swapped sums."""
    mesh = loom.open_mesh((2,), axes=("dp",), check="always", timeout=60)
    try:
        _swap(mesh)
    except loom.DivergenceError as error:
        assert str(error).startswith("the processes do the same on different tensors: "), error
        return "found"
    return "not found"


def no_faults() -> int:
    """The same call on two lines, local work of one rank alone, gradients that one rank reads: all is well."""
    mesh = loom.open_mesh((2,), axes=("dp",), check="always", timeout=60)
    x, w = loom.ones(4, 3, mesh=mesh, placements="S(0)"), loom.Parameter(torch.ones(3, 2), mesh, {})
    if HERE.rank == 0:
        a = x.sum()
    else:
        a = x.sum()
    assert a.item() == 12
    for _ in range(3):
        (x @ w).sum().backward()
    if HERE.rank == 0:
        assert w.grad is not None and repr(w.grad.shape)
    torch.optim.SGD([w], lr=0.1).step()
    return STORY.hash


def test_the_same_calls_on_other_lines_are_no_divergence() -> None:
    first, second = ranks.run(2, "test_divergence:no_faults")
    assert first == second != 0


@pytest.mark.slow
@pytest.mark.parametrize(("case", "says"), [("differs_at_the_end", "after the last check"), ("in_a_thread", "amax(")])
def test_a_divergence_that_nobody_raises_in_the_main_thread_ends_with_an_exit_code(
    tmp_path: Path, case: str, says: str
) -> None:
    ended = faults.run(case, tmp_path)
    assert any(each.code == 1 and "DivergenceError" in each.text and says in each.text for each in ended), ended
    assert all(each.code == 1 for each in ended) or case == "differs_at_the_end", ended


def test_the_running_hash_is_that_of_all_that_was_said() -> None:
    story = type(STORY)()
    for text in ("a", "b"):
        story.add(text)
    assert story.hash == zlib.crc32(b"ab")
