"""Ops of `meshloom.ttnn` one by one: what a call makes of operands, beside what plain torch makes of them.

A case is an op with the shapes of its operands, the call, and the function of torch on the parts of one device. `cuts`
say what becomes of labels: "S(0), R -> S(0)" is checked with wholes that are cut that way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshloom import ttnn
from ttnn_cases import check_parts, composed, distributed, each_device, label, mesh, tensor_of
from ttnn_draws import P, R, S

GRIDS = [(1, 1), (2, 2)]
DTYPES = [ttnn.float32, ttnn.bfloat16]
COARSE = (2e-2, 2e-2)


@dataclass(frozen=True)
class Case:
    """An op, its operands, what it computes, and what becomes of labels."""

    name: str
    call: Callable[..., Any]
    torch: Callable[..., Any]
    shapes: Sequence[Sequence[int]]
    cuts: Sequence[str] = ()
    makes: Sequence[Any] = ()  # of each operand: "float", "positive", or the numbers below which integers are
    tolerance: tuple[float, float] = (1e-4, 1e-5)
    coarse: tuple[float, float] = COARSE
    keywords: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    def kind(self, place: int) -> Any:
        return self.makes[place] if place < len(self.makes) else "float"

    def values(self, place: int, lead: Sequence[int] = (), seed: int = 0) -> torch.Tensor:
        """Values of an operand."""
        generator = torch.Generator().manual_seed(100 * seed + place)
        size, kind = (*lead, *self.shapes[place]), self.kind(place)
        if callable(kind):
            return kind(size, generator)
        if isinstance(kind, int):
            return torch.randint(0, kind, size, generator=generator).int()
        found = torch.rand(size, generator=generator) * 2 - 1
        return found.abs() + 0.1 if kind == "positive" else found

    def operand(self, place: int, grid: tuple[int, ...], dtype: Any) -> Any:
        """An operand whose parts differ between the devices along one axis."""
        lead = tuple(size if (axis + place) % 2 == 0 else 1 for axis, size in enumerate(grid))
        values = self.values(place, lead)
        kind = dtype if values.is_floating_point() else ttnn.int32
        return tensor_of(values, grid, dtype=kind, layout=ttnn.TILE_LAYOUT)


def listed(found: Any) -> list[Any]:
    """One result or several, as a list."""
    if isinstance(found, ttnn.ComplexTensor):
        return [found.real, found.imag]
    if not isinstance(found, (list, tuple)):
        return [found]
    return [part for each in found for part in listed(each)]


def check_values(case: Case, grid: tuple[int, ...], dtype: Any) -> None:
    """Raise unless every device holds what torch makes of its own parts, in float32 and rounded once."""
    operands = [case.operand(place, grid, dtype) for place in range(len(case.shapes))]

    def fine(*parts: Any) -> list[Any]:
        exact = [part.float() if part.is_floating_point() else part for part in parts]
        return listed(case.torch(*exact, **case.keywords))

    wanted = each_device(fine, *operands)
    found = listed(case.call(*operands, **case.keywords))
    counts = {len(each) for each in wanted.values()}
    assert counts == {len(found)}, (counts, len(found))
    for number, each in enumerate(found):
        if each is None:
            assert all(want[number] is None for want in wanted.values())
            continue
        parts = {place: want[number].to(each.dtype.store) for place, want in wanted.items()}
        check_parts(each, parts, *(case.tolerance if dtype is ttnn.float32 else case.coarse))


def _placement(text: str) -> Any:
    return {"R": R, "P(sum)": P("sum"), "P(unknown)": P("unknown")}.get(text) or S(int(text[2:-1]))


def check_cut(case: Case, text: str) -> None:
    """Raise unless a call on wholes that are cut so gives parts of what torch makes of the wholes, labelled so."""
    left, right = (side.strip().split(", ") for side in text.split("->"))
    wholes = [case.values(place, seed=1) for place in range(len(case.shapes))]
    operands = [distributed(whole, (2,), [_placement(each)]) for whole, each in zip(wholes, left, strict=True)]
    for whole, each in zip(wholes, operands, strict=True):
        if not whole.is_floating_point():
            each.dtype = ttnn.int32
            each._block = each.block.int()
    found = listed(case.call(*operands, **case.keywords))
    wanted = listed(case.torch(*wholes, **case.keywords))
    outs = right * len(found) if len(right) == 1 else right
    for each, want, out in zip(found, wanted, outs, strict=True):
        if each is None:
            continue
        assert label(each) == [_placement(out)], (text, label(each))
        if out != "P(unknown)":
            whole = composed(each)
            assert whole is not None
            torch.testing.assert_close(whole.double(), want.double(), rtol=1e-4, atol=1e-4)


def check_trace(case: Case, grid: tuple[int, ...] = (2, 2)) -> None:
    """Raise unless the replay of a captured call gives what torch makes of the operands as they are then."""
    device = mesh(grid)
    operands = [case.operand(place, grid, ttnn.float32) for place in range(len(case.shapes))]
    case.call(*operands, **case.keywords)  # what is made once is made before the capture
    trace = ttnn.begin_trace_capture(device)
    try:
        found = listed(case.call(*operands, **case.keywords))
    finally:
        ttnn.end_trace_capture(device, trace)
    for seed in (2, 3):
        for place, operand in enumerate(operands):
            operand.block.copy_(case.values(place, operand.block.shape[: len(grid)], seed))
        wanted = each_device(lambda *parts: listed(case.torch(*parts, **case.keywords)), *operands)
        ttnn.execute_trace(device, trace, blocking=True)
        for number, each in enumerate(found):
            if each is not None:
                parts = {place: want[number].to(each.dtype.store) for place, want in wanted.items()}
                check_parts(each, parts, *case.tolerance)
    ttnn.release_trace(device, trace)


class OpCases:
    """The three tests that every case passes; a class of tests names its `cases`."""

    cases: Sequence[Case] = ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Every case, for every grid and dtype, or for every cut that it has."""
        if "text" in metafunc.fixturenames:
            metafunc.parametrize(("case", "text"), [(case, text) for case in self.cases for text in case.cuts], ids=str)
        elif "case" in metafunc.fixturenames:
            metafunc.parametrize("case", self.cases, ids=str)
        if "grid" in metafunc.fixturenames:
            metafunc.parametrize("grid", GRIDS, ids=str)
            metafunc.parametrize("dtype", DTYPES, ids=str)

    def test_values_are_torchs(self, case: Case, grid: tuple[int, ...], dtype: Any) -> None:
        check_values(case, grid, dtype)

    def test_labels_are_true(self, case: Case, text: str) -> None:
        check_cut(case, text)

    def test_calls_run_in_traces(self, case: Case) -> None:
        check_trace(case)
