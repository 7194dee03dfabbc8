"""Tensors of whole random numbers and draws by chance: the same values on any mesh and placements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import Mesh

MESHES = (Mesh(a=1), Mesh(a=4), Mesh(a=2, b=3))
CHANCES = torch.tensor([[0.1, 0.0, 0.6, 0.3], [1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 5.0, 0.0]])


def chances(mesh: Mesh) -> loom.Tensor:
    return loom.distribute(CHANCES, mesh)


DRAWN: dict[str, Callable[[Mesh], loom.Tensor]] = {
    "randint": lambda mesh: loom.randint(-3, 9, (5, 7), mesh=mesh),
    "randint below": lambda mesh: loom.randint(4, size=(9,), mesh=mesh, dtype=torch.int32),
    "randint_like": lambda mesh: torch.randint_like(chances(mesh), 3),
    "randperm": lambda mesh: loom.randperm(11, mesh=mesh),
    "normal": lambda mesh: loom.normal(2.0, 3.0, (5, 2), mesh=mesh),
    "normal around": lambda mesh: torch.normal(chances(mesh), 0.5),
    "normal of both": lambda mesh: torch.normal(chances(mesh), chances(mesh)),
    "bernoulli": lambda mesh: torch.bernoulli(chances(mesh).clamp(0, 1)),
    "bernoulli of p": lambda mesh: chances(mesh).bernoulli(0.3),
    "multinomial": lambda mesh: torch.multinomial(chances(mesh)[:2], 3),
    "multinomial again": lambda mesh: chances(mesh).multinomial(6, replacement=True),
}


@pytest.mark.parametrize("name", DRAWN)
def test_values_do_not_depend_on_the_mesh(name: str) -> None:
    found = []
    for mesh in MESHES:
        torch.manual_seed(3)
        found.append(DRAWN[name](mesh).to_torch())
    assert all(torch.equal(each, found[0]) for each in found[1:])
    torch.manual_seed(4)
    again = [DRAWN[name](MESHES[0]).to_torch() for _ in range(8)]
    assert any(not torch.equal(each, found[0]) for each in again)


@pytest.mark.parametrize("name", DRAWN)
def test_a_draw_can_be_explained_and_draws_nothing_then(name: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    loom.explain(lambda: DRAWN[name](MESHES[1]))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_gives_the_same_again_and_leaves_the_default_alone() -> None:
    mesh = MESHES[2]
    for draw in (
        lambda g: loom.randint(100, (6,), mesh=mesh, generator=g),
        lambda g: loom.randperm(9, mesh=mesh, generator=g),
        lambda g: loom.normal(0, 1, (6,), mesh=mesh, generator=g),
        lambda g: torch.bernoulli(chances(mesh).clamp(0, 1), generator=g),
        lambda g: torch.multinomial(chances(mesh), 1, generator=g),
    ):
        state = torch.get_rng_state()
        first, second = (draw(torch.Generator().manual_seed(5)).to_torch() for _ in range(2))
        assert torch.equal(first, second) and torch.equal(torch.get_rng_state(), state)


def test_whole_numbers_stay_within_their_bounds_and_reach_them() -> None:
    drawn = loom.randint(-2, 3, (1000,), mesh=MESHES[1])
    assert sorted(set(drawn.tolist())) == [-2, -1, 0, 1, 2] and drawn.dtype == torch.int64
    assert sorted(loom.randperm(7, mesh=MESHES[1]).tolist()) == list(range(7))


@pytest.mark.parametrize("again", [False, True])
def test_draws_come_as_often_as_their_chances_say(again: bool) -> None:
    torch.manual_seed(0)
    weights = torch.tensor([1.0, 0.0, 2.0, 5.0])
    lines = loom.distribute(weights.expand(4000, 4), Mesh(dp=4), "S(0)")
    with loom.record() as log:
        drawn = torch.multinomial(lines, 2, again)
    assert {event.kind for event in log} <= {"all_reduce"} and log.fallbacks == {}  # the check of the chances
    assert str(drawn.placements[0]) == "S(0)"
    first = torch.bincount(drawn.to_torch()[:, 0], minlength=4) / 4000
    torch.testing.assert_close(first, weights / 8, rtol=0, atol=0.04)
    assert again or bool((drawn[:, 0] != drawn[:, 1]).all())


def test_bernoulli_comes_as_often_as_its_chances_say_and_keeps_dtype_and_placements() -> None:
    torch.manual_seed(0)
    p = loom.full((8000,), 0.3, mesh=Mesh(dp=4), dtype=torch.bfloat16)
    drawn = torch.bernoulli(p)
    assert drawn.dtype == torch.bfloat16 and drawn.placements == p.placements
    assert abs(drawn.float().mean().item() - 0.3) < 0.03


def test_grids_are_torchs() -> None:
    mesh = MESHES[2]
    pairs = [
        (loom.linspace(0, 1, 7, mesh=mesh), torch.linspace(0, 1, 7)),
        (loom.logspace(0, 3, 4, base=2, mesh=mesh), torch.logspace(0, 3, 4, base=2)),
        (loom.eye(5, 3, mesh=mesh, dtype="int64"), torch.eye(5, 3, dtype=torch.int64)),
        (loom.eye(4, mesh=mesh, placements="S(1), R"), torch.eye(4)),
        (loom.empty(3, 2, mesh=mesh), torch.zeros(3, 2)),
    ]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.to_torch(), theirs)
    assert loom.eye(2, mesh=mesh, requires_grad=True).requires_grad


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: loom.randint(3, mesh=MESHES[1]), "takes .high, size. or .low, high, size."),
        (lambda: loom.randint(3, 3, (2,), mesh=MESHES[1]), "low below high"),
        (lambda: torch.multinomial(chances(MESHES[1]), 5), "5 draws from 4 without replacement"),
        (lambda: torch.multinomial(chances(MESHES[1]) - 1, 1), "chances must be finite, not negative"),
        (lambda: torch.multinomial(chances(MESHES[1]) * 0, 1), "some of each line above zero"),
        (lambda: loom.normal(0.0, 1.0), "takes a size"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_our_words(work: Callable[[], Any], message: str) -> None:
    with pytest.raises(loom.ArgumentError, match=message):
        work()
