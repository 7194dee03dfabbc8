"""In `torch.inference_mode()`, where torch counts no writes and marks no views, everything still equals dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom

# making a view of the second one moves data, and of the third one reduces
LAYOUTS = [((2,), "R"), ((2, 2), "S(0), S(0)"), ((2,), "P(max)"), ((3,), "S(0)")]
VALUES = torch.linspace(-2, 2, 20).reshape(5, 4)


def view_then_write(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A program that writes into a view and then into its base."""

    def program(x: Any) -> Any:
        made = view(x)
        made.add_(1)
        first = x.clone()
        x.mul_(2)
        return first, made, x

    return program


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "reshape": view_then_write(lambda x: x.reshape(-1)),
    "flatten": view_then_write(lambda x: x.flatten()),
    "view": view_then_write(lambda x: x.view(-1)),
    "rows": view_then_write(lambda x: x[1:4]),
    "a view of a view": view_then_write(lambda x: x.view(-1)[3:7]),
    "a part": view_then_write(lambda x: x.split(2)[1]),
    "a transposed one": view_then_write(lambda x: x.t()),
    "a function without a rule": lambda x: (x.unique(), x),
    "a mask": lambda x: (x[x > 0], x),
    "a write without a rule": lambda x: (x.renorm_(2, 0, 1.0), x),
    "a write into a view without a rule": lambda x: (x.t().renorm_(2, 0, 1.0), x),
    "a tensor that is turned": lambda x: (x.t_(), x.add_(1)),
    "rows that are renormed as they are looked up": lambda x: (F.embedding(torch.tensor([0, 1]), x, max_norm=0.1), x),
}


@pytest.mark.filterwarnings("ignore::meshloom.FallbackWarning")
@pytest.mark.parametrize("made_inside", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_dense(name: str, made_inside: bool) -> None:
    for shape, placements in LAYOUTS:
        for _ in range(2):
            ours = loom.distribute(VALUES.clone(), loom.Mesh.of(shape), placements.replace("P(max)", "R"))
            ours, dense = ours.redistribute(placements), VALUES.clone()
            with torch.inference_mode():
                if made_inside:
                    ours, dense = ours.clone(), dense.clone()
                found, wanted = PROGRAMS[name](ours), PROGRAMS[name](dense)
                for mine, theirs in zip(found, wanted, strict=True):
                    torch.testing.assert_close(mine.to_torch(), theirs)


@pytest.mark.parametrize("rows", [23, 29])
def test_what_was_met_in_inference_mode_first_can_be_trained(rows: int) -> None:
    values = torch.linspace(-1, 1, rows * 3).reshape(rows, 3)
    mesh = loom.Mesh(a=2, b=2)

    def loss(x: Any) -> Any:
        return (x.exp().log().softmax(0) * F.layer_norm(x, (3,)) + x.var(0) + x.amax(0) + x.cumsum(0)).sum()

    with torch.inference_mode():
        loss(loom.distribute(values, mesh, "S(0), S(0)"))
    ours, dense = loom.Parameter(values.clone(), mesh, "S(0), S(0)"), torch.nn.Parameter(values.clone())
    loss(ours).backward()
    loss(dense).backward()
    torch.testing.assert_close(ours.grad.to_torch(), dense.grad, atol=1e-4, rtol=1e-4)
