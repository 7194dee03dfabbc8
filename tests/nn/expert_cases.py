"""What tests of experts share: routings, where tokens and experts lie, and the oracle, which goes token by token.

`check` compares values and gradients with the oracle; `run_cases` does so on every process of a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom.nn import experts

Index = Callable[[int, int, int, torch.Generator], torch.Tensor]


def at_random(tokens: int, count: int, top_k: int, draw: torch.Generator) -> torch.Tensor:
    return torch.rand(tokens, count, generator=draw).argsort(1)[:, :top_k]


def to_one(tokens: int, count: int, top_k: int, draw: torch.Generator) -> torch.Tensor:
    """One expert gets every token, the second choices go to its neighbours: the others get none."""
    return (torch.arange(top_k) + count - top_k).expand(tokens, top_k).contiguous()


def without_first(tokens: int, count: int, top_k: int, draw: torch.Generator) -> torch.Tensor:
    """Expert 0 gets no token."""
    return at_random(tokens, count - 1, top_k, draw) + 1


def with_gaps(tokens: int, count: int, top_k: int, draw: torch.Generator) -> torch.Tensor:
    """Choices that were dropped, and tokens without any."""
    index = at_random(tokens, count, top_k, draw)
    index[torch.rand(index.shape, generator=draw) < 0.4] = -1
    return index


ROUTINGS: dict[str, Index] = {
    "at random": at_random,
    "to one": to_one,
    "without the first": without_first,
    "with gaps": with_gaps,
}


@dataclass(frozen=True)
class Layout:
    """A mesh, and where tokens, the weights of the wide side and those of the narrow side lie."""

    mesh: loom.Mesh
    tokens: str
    up: str
    down: str

    def open(self, processes: tuple[int, ...] | None = None) -> loom.Mesh:
        return loom.open_mesh(self.mesh.shape, axes=self.mesh.axes, processes=processes)


LAYOUTS = {
    "ep4": Layout(loom.Mesh(ep=4), "S(0)", "S(0)", "S(0)"),
    "ep8": Layout(loom.Mesh(ep=8), "S(0)", "S(0)", "S(0)"),
    "dp2 ep4": Layout(loom.Mesh(dp=2, ep=4), "S(0), S(0)", "R, S(0)", "R, S(0)"),
    "ep4 dp2": Layout(loom.Mesh(ep=4, dp=2), "S(0), S(0)", "S(0), R", "S(0), R"),
    "dp2 tp4": Layout(loom.Mesh(dp=2, tp=4), "S(0), R", "R, S(0)", "R, S(0)"),
    "dp2 ep2 tp2": Layout(loom.Mesh(dp=2, ep=2, tp=2), "S(0), S(0), R", "R, S(0), S(0)", "R, S(0), S(0)"),
    "columns": Layout(loom.Mesh(dp=2, ep=2, tp=2), "S(0), S(0), R", "R, S(0), S(2)", "R, S(0), S(1)"),
    "width": Layout(loom.Mesh(dp=2, ep=2), "R, S(1)", "R, S(0)", "R, S(0)"),
    "nowhere": Layout(loom.Mesh(dp=2, tp=2), "S(0), R", "R, R", "R, R"),
}


@dataclass
class Case:
    """Tokens, choices, weights and experts, dense."""

    tokens: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor

    @property
    def tracked(self) -> list[torch.Tensor]:
        return [self.tokens, self.weights, self.up, self.down]


def make(tokens: int, count: int, top_k: int, routing: str, seed: int = 0) -> Case:
    draw = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()

    index = ROUTINGS[routing](tokens, count, top_k, draw)
    return Case(
        numbers(tokens, 6),
        index.reshape(tokens, top_k),
        numbers(tokens, top_k),
        numbers(count, 6, 5),
        numbers(count, 5, 6),
    )


def dense(case: Case) -> torch.Tensor:
    """Token by token, choice by choice."""
    rows = []
    for token, chosen, weights in zip(case.tokens, case.index.tolist(), case.weights, strict=True):
        made = [w * (F.silu(token @ case.up[e]) @ case.down[e]) for e, w in zip(chosen, weights, strict=True) if e >= 0]
        rows.append(sum(made, torch.zeros_like(token)))
    return torch.stack(rows) if rows else case.tokens * 1


def mix(case: Any) -> torch.Tensor:
    """The same by dispatch and combine, on the mesh or off it."""
    sent = experts.dispatch(case.tokens, case.index, case.up)
    wide = F.silu(sent.multiply(sent.rows, case.up))
    return experts.combine(sent, sent.multiply(wide, case.down), case.weights)


def place(case: Case, layout: Layout, mesh: loom.Mesh) -> Case:
    def put(tensor: torch.Tensor, placements: str) -> Any:
        made = loom.distribute(tensor.detach(), mesh, placements)
        return made.requires_grad_() if tensor.requires_grad else made

    rows = [layout.tokens.replace("S(1)", "R")] * 2
    return Case(
        put(case.tokens, layout.tokens), put(case.index, rows[0]), put(case.weights, rows[1]), put(case.up, layout.up),
        put(case.down, layout.down),
    )  # fmt: skip


def check(case: Case, layout: Layout, mesh: loom.Mesh, run: Callable[[Any], Any] = mix) -> loom.Tensor:
    """An error unless values and gradients on the mesh are those of the oracle."""
    ours = place(case, layout, mesh)
    expected, found = dense(case), run(ours)
    torch.testing.assert_close(found.to_torch(), expected)
    factor = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=expected.dtype)
    theirs = torch.autograd.grad((expected * factor).sum(), case.tracked, allow_unused=True)
    (found * factor).sum().backward()
    for mine, gradient, given in zip(ours.tracked, theirs, case.tracked, strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad.to_torch(), torch.zeros_like(given) if gradient is None else gradient)
        assert mine.grad.placements == mine.placements
    return found


# Tokens that do not divide, fewer than devices, none; experts that do not divide, fewer than devices.
SIZES = [
    (0, 4, 2, "at random"),
    (32, 8, 2, "at random"),
    (13, 10, 3, "without the first"),
    (32, 8, 2, "to one"),
    (3, 3, 2, "at random"),
    (11, 6, 2, "with gaps"),
]


def run_cases(names: list[str]) -> int:
    """The layouts of these names with every size, on a mesh that the processes split; how many were checked."""
    count = 0
    for name in names:
        mesh = LAYOUTS[name].open()
        assert mesh.is_split == (os.environ["WORLD_SIZE"] != "1")
        for sizes in SIZES:
            try:
                check(make(*sizes), LAYOUTS[name], mesh)
            except Exception as error:
                raise AssertionError(f"{name} with {sizes}") from error
            count += 1
    return count
