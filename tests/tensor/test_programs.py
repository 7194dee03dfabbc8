"""Random programs equal the same programs on dense torch: views, writes, hooks, requests, refusals and gradients.

`make soak` is the long run: `MESHLOOM_CASES` programs from `MESHLOOM_SEED` on. A failure prints the shortest program
that shows it, as a command, and the number that draws the whole one.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import programs
from meshloom.engines.torch_engine import FUNCTIONS
from meshloom.ops import OPS
from meshloom.tensor.entries import forget_all
from program_steps import KINDS, draw_program
from programs import EXEMPT, Difference, check_program, difference_of, listed, run_program, script, shrink

CASES = int(os.environ.get("MESHLOOM_CASES", "0")) or 2000
SEED = int(os.environ.get("MESHLOOM_SEED", "0"))
PART = 100  # programs of one test, so that test processes share them
PARTS = -(-CASES // PART)


def check_drawn(number: int) -> programs.Run:
    """Draw a program and check it."""
    mesh, steps = draw_program(number)
    try:
        return check_program(mesh, steps)
    except Difference as found:
        raise Difference(found.kind, f"draw_program({number}): {found}") from None


@pytest.mark.parametrize("part", range(PARTS))
def test_programs_equal_dense(part: int, record_property: pytest.RecordProperty) -> None:
    counts: Counter[str] = Counter()
    for number in range(SEED * 1_000_000 + part * PART, SEED * 1_000_000 + min(CASES, (part + 1) * PART)):
        run = check_drawn(number)
        counts["programs against dense"] += 1
        counts["lines of programs"] += len(run.ran)
        counts["programs whose gradients were compared"] += run.has_gradients and run.started > 0
        counts["refusals of programs"] += run.refused
    for what, count in counts.items():
        record_property(what, count)
    if counts["programs against dense"] == PART:  # it cannot skip its way through
        assert counts["lines of programs"] >= 10 * PART, counts
        assert counts["programs whose gradients were compared"] >= PART * 0.45, counts


def test_a_number_draws_the_same_program_and_programs_have_every_kind_of_line() -> None:
    assert draw_program(17) == draw_program(17)
    lines = [line for number in range(200) for line in draw_program(number)[1]]
    wanted = (
        "leaf( place( call( asked( no_grad register_hook backward unbind chunk diagonal view(torch. expand( detach "
        "copy_ masked_fill_ index_put_ clamp_( fill_ zero_ scatter_ cumsum_ ]= @ P(max) P(min) P(sum) P(mean) P(prod) "
        ".view( permute("
    ).split()
    lines = [line.replace("] =", "]=") for line in lines]
    missing = [text for text in wanted if not any(text in line for line in lines)]
    assert not missing
    assert len(KINDS) >= 30


# What long runs found, as short as it gets: the mesh and the lines.
FOUND: dict[str, tuple[tuple[int, ...], str]] = {
    "a write through what was detached from a view of a leaf": ((1,), """
        v0 = leaf((3, 0), "f32", "R", 829, tracked=True)
        v1 = call("permute", v0, (1, 0), output="P(max)")
        v2 = v1.detach()
        v2[leaf((0, 3), "bool", "R", 649)] = 1.5
    """),
    "a history of its own outlives a write to the base of a view": ((2, 2), """
        v0 = leaf((3, 2), "i64", "S(0), R", 65).clone()
        v1 = v0.view(torch.float64)
        v2 = leaf((1, 1), "f64", "R, R", 736, tracked=True)
        v1[1:, :1] = v2
        v0.scatter_(0, torch.tensor([0]).view(-1, 1).expand((1, 1)), 2)
        v3 = v1 * 2
        v3.backward(like(v3, 12), retain_graph=True)
    """),
    "equal elements share the gradient of an extreme that is asked for in parts": ((2, 2), """
        v0 = leaf((5, 3, 3), "f32", "R, R", 473, tracked=True)
        v1 = v0.view(1, 45).expand((2, 45))
        v2 = call("amax", v1, -1, output="P(max), R")
        v2.backward(like(v2, 625), retain_graph=True)
    """),
    "strides of a view of something padded": ((1, 3), """
        v0 = leaf((4, 1, 2), "f64", "R, R", 868)
        v1 = call("mul", v0, v0, output="R, S(1)") + v0
        v2 = v1[-2:, 0].view(-1)
        v3 = v2.reshape(4)
    """),
    "an operand made without gradients moves and keeps nothing for backward": ((8,), """
        v0 = leaf((6, 6), "f32", "R", 773, tracked=True)
        v1 = place(v0, "S(1)")
        v2 = (v0 @ v0)[[4]].select(0, 0)
        v3 = v1[None, 3]
        with torch.no_grad(): v4 = v2.transpose(-1, 0)
        v5 = v4 * v3
        v3.sub_(0.25)
        v5.backward(like(v5, 165), retain_graph=True)
    """),
    "an index in a list is not one in a tuple": ((2, 4), """
        v0 = leaf((1, 1), "i64", "S(1), S(1)", 586)
        v1 = v0[0, 0]
        v2 = v0[[0, 0]]
        v3 = v0[0, 0]
    """),
    "the one piece of a split is still one of several": ((2, 4), """
        v0 = leaf((1, 1), "f64", "R, R", 363, tracked=True)
        v1, = v0.split(2, 1)
        v2, = v0.unbind(0)
        v3, = v0.chunk(2, 0)
    """),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_long_runs_found_equals_dense(name: str) -> None:
    mesh, steps = FOUND[name]
    for _ in range(2):  # once as a new call, once as one seen before
        found = difference_of(mesh, listed(steps))
        assert found is None, found


@pytest.mark.parametrize("name", EXEMPT)
def test_what_is_exempt_is_still_open(name: str) -> None:
    reason, mesh, steps = EXEMPT[name]
    others = set(EXEMPT) - {name}
    found = difference_of(mesh, listed(steps), others)
    assert found is not None, f"{reason}: this works now; delete the exemption {name!r}"
    assert difference_of(mesh, listed(steps)) is None


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Tables that may be changed for the length of a test."""
    forget_all()
    yield monkeypatch
    forget_all()


def expect_found(kind: str, numbers: range = range(300)) -> str:
    """Some program must show the fault; its text."""
    for number in numbers:
        mesh, steps = draw_program(number)
        found = difference_of(mesh, steps)
        if found is not None and found.kind == kind:
            fewer = shrink(mesh, steps, kind)
            return "\n".join([*fewer, str(difference_of(mesh, fewer))])
    raise AssertionError(f"no program shows the fault that was planted: {kind}")


def test_a_planted_op_that_is_wrong_is_found(planted: pytest.MonkeyPatch) -> None:
    planted.setitem(FUNCTIONS, "tanh", lambda x: torch.tanh(x) + (x > 2))
    assert "tanh" in expect_found("values")


def test_a_planted_gradient_that_is_wrong_is_found(planted: pytest.MonkeyPatch) -> None:
    planted.setitem(FUNCTIONS, "sub", lambda x, y, **_: (x - y).detach() + 2 * (x - x.detach()))
    assert "gradient of leaf" in expect_found("values")


def test_planted_padding_that_is_not_zero_is_found(planted: pytest.MonkeyPatch) -> None:
    planted.setitem(OPS, "cos", dataclasses.replace(OPS["cos"], at_zero="zero"))
    assert "cos" in expect_found("padding")


def test_a_planted_view_that_goes_stale_is_found(planted: pytest.MonkeyPatch) -> None:
    steps = ['v0 = leaf((4,), "f32", "S(0)", 1)', "v1 = v0.detach()", "v0.add_(1)"]
    assert difference_of((2,), steps) is None
    planted.setattr(programs.loom.Tensor, "detach", lambda self: self.clone())
    found = difference_of((2,), steps)
    assert found is not None and found.kind == "values" and "v1 after v0.add_(1)" in str(found)


def test_a_planted_hook_that_is_not_called_is_found(planted: pytest.MonkeyPatch) -> None:
    planted.setattr(programs.loom.Tensor, "register_hook", lambda self, hook: self._data.register_hook(lambda g: None))
    assert "register_hook" in expect_found("hooks")


def test_a_call_that_torch_refuses_and_ours_does_not_is_found(planted: pytest.MonkeyPatch) -> None:
    steps = ['v0 = leaf((4,), "f32", "S(0)", 1)', "v1 = v0.unsqueeze(4)"]
    assert run_program((2,), steps).refused == 1
    planted.setattr(programs.loom.Tensor, "unsqueeze", lambda self, dim: self)
    found = difference_of((2,), steps)
    assert found is not None and found.kind == "accepted"


def test_a_refusal_of_ours_where_torch_works_is_found(planted: pytest.MonkeyPatch) -> None:
    planted.setitem(FUNCTIONS, "exp", None)
    found = difference_of((2,), ['v0 = leaf((4,), "f32", "S(0)", 1)', "v1 = v0.exp()"])
    assert found is not None and found.kind == "refused TypeError"


def test_a_failing_program_prints_itself_as_a_script_that_fails(planted: pytest.MonkeyPatch) -> None:
    planted.setitem(FUNCTIONS, "tanh", lambda x: torch.tanh(x) + 1)
    with pytest.raises(Difference) as caught:
        check_program((2,), ['v0 = leaf((4,), "f32", "S(0)", 1)', "v1 = v0.abs()", "v2 = v0 * 2", "v3 = v2.tanh()"])
    text = str(caught.value)
    fewer = text[text.index("'''") + 3 : text.rindex("'''")]
    assert listed(fewer) == ['v0 = leaf((4,), "f32", "R", 1)', "v2 = v0 * 2", "v3 = v2.tanh()"]
    assert script((2,), listed(fewer)) in text
    with pytest.raises(Difference):
        run_program((2,), fewer)
