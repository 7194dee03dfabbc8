"""Random numbers do not depend on placements, meshes or numbers of devices, and follow torch's generators."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import meshloom as loom
from layouts import layouts
from meshloom.tensor import random
from meshloom.tensor.random import TILE

LAYOUTS = layouts(
    "1 R", "3 R", "2 S(0)", "4 S(0)", "16 S(1)", "2x4 S(0), S(0)", "2x4 S(1), S(0)", "2x3x2 S(0), R, S(1)",
    "128 S(0)",
)  # fmt: skip
DRAWS: dict[str, Callable[..., Any]] = {
    "randn": lambda shape, mesh, at: loom.randn(*shape, mesh=mesh, placements=at),
    "rand": lambda shape, mesh, at: loom.rand(*shape, mesh=mesh, placements=at),
    "randn_like": lambda shape, mesh, at: loom.randn_like(loom.zeros(*shape, mesh=mesh, placements=at)),
    "rand_like": lambda shape, mesh, at: loom.rand_like(loom.zeros(*shape, mesh=mesh, placements=at)),
    "torch.randn_like": lambda shape, mesh, at: torch.randn_like(loom.zeros(*shape, mesh=mesh, placements=at)),
    "loom.dropout": lambda shape, mesh, at: loom.dropout(loom.ones(*shape, mesh=mesh, placements=at), 0.4),
    "F.dropout": lambda shape, mesh, at: F.dropout(loom.ones(*shape, mesh=mesh, placements=at), 0.4),
    "nn.Dropout": lambda shape, mesh, at: torch.nn.Dropout(0.4)(loom.ones(*shape, mesh=mesh, placements=at)),
    "dropout in place": lambda shape, mesh, at: F.dropout(loom.ones(*shape, mesh=mesh, placements=at), inplace=True),
    "normal_": lambda shape, mesh, at: loom.zeros(*shape, mesh=mesh, placements=at).normal_(),
    "uniform_": lambda shape, mesh, at: loom.zeros(*shape, mesh=mesh, placements=at).uniform_(-1, 1),
    "random_": lambda shape, mesh, at: loom.zeros(*shape, mesh=mesh, placements=at).random_(0, 9),
    "log_normal_": lambda shape, mesh, at: loom.zeros(*shape, mesh=mesh, placements=at).log_normal_(0.5, 2),
    "exponential_": lambda shape, mesh, at: loom.zeros(*shape, mesh=mesh, placements=at).exponential_(3.0),
    "init.uniform_": lambda shape, mesh, at: torch.nn.init.uniform_(loom.ones(*shape, mesh=mesh, placements=at), 2, 3),
    "init.kaiming_uniform_": lambda shape, mesh, at: torch.nn.init.kaiming_uniform_(
        loom.ones(*shape, mesh=mesh, placements=at), a=5**0.5
    ),
    "bernoulli": lambda shape, mesh, at: torch.bernoulli(loom.full(shape, 0.5, mesh=mesh, placements=at)),
    "init": lambda shape, mesh, at: torch.nn.init.xavier_normal_(loom.Parameter(torch.ones(shape), mesh, at)).detach(),
}


def draw(name: str, layout: tuple[tuple[int, ...], str], shape: tuple[int, ...] = (7, 5), seed: int = 3) -> Any:
    """A random tensor drawn from a seed."""
    torch.manual_seed(seed)
    return DRAWS[name](shape, loom.open_mesh(layout[0]), layout[1])


@pytest.mark.parametrize("name", DRAWS)
def test_values_are_equal_across_placements_meshes_and_numbers_of_devices(name: str) -> None:
    expected = draw(name, LAYOUTS[0]).to_torch()
    assert expected.unique().numel() > 1
    for layout in LAYOUTS[1:]:
        assert torch.equal(draw(name, layout).to_torch(), expected), layout
    assert not torch.equal(draw(name, LAYOUTS[0], seed=4).to_torch(), expected)


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(0, 9), st.integers(1, 9)),
    layout=st.sampled_from(LAYOUTS),
    name=st.sampled_from(["randn", "rand", "F.dropout"]),
    seed=st.integers(0, 2**31),
)
def test_any_shape_equals_its_replicated_twin(shape: Any, layout: Any, name: str, seed: int) -> None:
    assert torch.equal(draw(name, layout, shape, seed).to_torch(), draw(name, ((1,), "R"), shape, seed).to_torch())


@pytest.mark.parametrize("name", ["normal_", "uniform_", "random_", "init", "init.kaiming_uniform_"])
def test_numbers_in_place_gather_nothing(name: str) -> None:
    with loom.communication("forbid"), loom.record() as log:
        draw(name, ((2, 4), "S(0), S(1)"))
    assert not log.fallbacks


def test_numbers_in_place_have_their_moments_and_respect_autograd() -> None:
    mesh = loom.open_mesh((4,))
    x = loom.zeros(400, 100, mesh=mesh, placements="S(1)").normal_(2.0, 0.5).to_torch()
    assert abs(x.mean() - 2) < 0.02 and abs(x.std() - 0.5) < 0.02
    y = loom.zeros(400, 100, mesh=mesh, placements="S(0)").uniform_(-3, 1).to_torch()
    assert y.min() >= -3 and y.max() < 1 and abs(y.mean() + 1) < 0.05
    leaf = loom.Parameter(torch.ones(3, 3), mesh)
    with pytest.raises(RuntimeError, match="leaf"):
        leaf.normal_()
    with torch.no_grad():
        version = leaf._version
        assert leaf.normal_() is leaf and leaf._version > version
    with pytest.raises(RuntimeError, match="std"):
        loom.zeros(3, mesh=mesh).normal_(0, -1)
    with pytest.raises(loom.DTypeError, match="normal_ cannot draw i64"):
        loom.zeros(3, mesh=mesh, dtype=torch.int64).normal_()
    part = loom.zeros(8, mesh=mesh, placements="S(0)")
    part[2:5].uniform_(1, 2)
    assert (part.to_torch() > 0).tolist() == [False, False, True, True, True, False, False, False]


def test_values_are_equal_beyond_one_tile() -> None:
    shape = (TILE // 100 + 7, 205)
    expected = draw("randn", ((1,), "R"), shape).to_torch()
    assert expected.numel() > 2 * TILE
    for layout in [((8,), "S(0)"), ((2, 4), "S(1), S(1)")]:
        assert torch.equal(draw("randn", layout, shape).to_torch(), expected)
    first, second = expected.flatten()[:TILE], expected.flatten()[TILE : 2 * TILE]
    assert not torch.equal(first, second)
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.02


@pytest.mark.parametrize("name", DRAWS)
def test_two_calls_give_different_values(name: str) -> None:
    mesh = loom.open_mesh((4,))
    assert not torch.equal(DRAWS[name]((7, 5), mesh, "S(0)").to_torch(), DRAWS[name]((7, 5), mesh, "S(0)").to_torch())


@pytest.mark.parametrize("name", DRAWS)
def test_a_forked_generator_leaves_the_outer_one_alone(name: str) -> None:
    mesh = loom.open_mesh((4,))
    torch.manual_seed(0)
    expected = DRAWS[name]((7, 5), mesh, "S(0)").to_torch()
    torch.manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        DRAWS[name]((7, 5), mesh, "S(0)")
    assert torch.equal(DRAWS[name]((7, 5), mesh, "S(0)").to_torch(), expected)


def test_saved_generator_state_gives_the_same_values_again() -> None:
    mesh = loom.open_mesh((4,))
    kept = torch.get_rng_state()
    first = loom.randn(9, mesh=mesh).to_torch()
    torch.set_rng_state(kept)
    assert torch.equal(loom.randn(9, mesh=mesh).to_torch(), first)


def test_a_random_op_draws_one_key_whatever_its_size() -> None:
    mesh = loom.open_mesh((4,))
    following = []
    for size in (0, 1, 7, 3 * TILE):
        torch.manual_seed(0)
        loom.randn(size, mesh=mesh)
        following.append(torch.rand(()).item())
    assert len(set(following)) == 1


def test_a_generator_of_ones_own_is_used_and_the_default_one_is_not() -> None:
    mesh = loom.open_mesh((4,))
    state = torch.get_rng_state()
    drawn = [loom.rand(9, mesh=mesh, generator=torch.Generator().manual_seed(s)).to_torch() for s in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("layout", [((4,), "S(0)"), ((2, 2), "S(0), S(1)"), ((8,), "R")])
def test_the_values_have_the_right_moments(layout: Any) -> None:
    normal, uniform = draw("randn", layout, (301, 333)), draw("rand", layout, (301, 333))
    assert normal.mean().item() == pytest.approx(0, abs=0.02)
    assert normal.var().item() == pytest.approx(1, abs=0.02)
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.01)
    assert uniform.var().item() == pytest.approx(1 / 12, abs=0.005)
    assert uniform.min().item() >= 0
    assert uniform.max().item() < 1


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("layout", [((4,), "S(0)"), ((2, 2), "S(1), S(0)"), ((2,), "P(sum)")])
def test_dropout_keeps_the_mean_and_drops_its_share(p: float, layout: Any) -> None:
    torch.manual_seed(0)
    x = loom.distribute(torch.ones(301, 333), loom.open_mesh(layout[0]), layout[1])
    found = F.dropout(x, p).to_torch()
    assert found.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    assert (found == 0).float().mean().item() == pytest.approx(p, abs=0.01)
    assert found.mean().item() == pytest.approx(1, abs=0.05)


def test_dropout_masks_are_not_the_same_on_every_device() -> None:
    found = F.dropout(loom.ones(8, 64, mesh=loom.open_mesh((8,)), placements="S(0)"), 0.5)
    parts = {tuple(found.shard_at((place,)).flatten().tolist()) for place in range(8)}
    assert len(parts) == 8


def test_dropout_in_eval_mode_and_with_p_zero_is_the_identity() -> None:
    x = loom.randn(7, 5, mesh=loom.open_mesh((4,)), placements="S(0)")
    state = torch.get_rng_state()
    assert torch.nn.Dropout(0.5).eval()(x) is x
    assert F.dropout(x, 0.0) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_with_p_one_gives_zeros_and_zero_gradients() -> None:
    x = loom.randn(7, 5, mesh=loom.open_mesh((4,)), placements="S(0)").requires_grad_()
    y = F.dropout(x, 1.0)
    y.sum().backward()
    assert not y.detach().any()
    assert not x.grad.any()


def test_a_probability_out_of_range_is_refused() -> None:
    x = loom.ones(4, mesh=loom.open_mesh((2,)))
    for p in (-0.1, 1.5):
        with pytest.raises(loom.ArgumentError, match=rf"dropout probability {p} is not between 0 and 1"):
            F.dropout(x, p)


def test_the_gradient_of_dropout_is_its_mask() -> None:
    x = loom.distribute(torch.ones(7, 5), loom.open_mesh((4,)), "S(0)").requires_grad_()
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad.to_torch(), y.detach().to_torch())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_dtype_asked_for_comes_out(dtype: torch.dtype) -> None:
    mesh = loom.open_mesh((4,))
    for found in (loom.randn(9, mesh=mesh, dtype=dtype), F.dropout(loom.ones(9, mesh=mesh, dtype=dtype))):
        assert found.dtype == dtype
    with pytest.raises(loom.ArgumentError, match="random values need a floating dtype, not i64"):
        loom.randn(9, mesh=mesh, dtype=torch.int64)


def test_attention_dropout_is_equal_across_placements() -> None:
    found = []
    for shape, at in [((1,), "R"), ((2,), "S(1)"), ((4,), "S(0)"), ((2, 2), "S(0), S(1)")]:
        mesh = loom.open_mesh(shape)
        inputs = torch.randn(3, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(5)
        q, k, v = (loom.distribute(each, mesh, at) for each in inputs)
        found.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True).to_torch())
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
    with_none = F.scaled_dot_product_attention(*inputs, is_causal=True)
    assert not torch.allclose(found[0], with_none)


def tile_of(key: int, tile: int, count: int = 1024) -> torch.Tensor:
    return random.uniform(torch.empty(count), random.STREAMS.at(key, tile))


def test_tiles_whose_seeds_agree_in_32_bits_differ() -> None:
    assert not torch.equal(tile_of(12345, 11149), tile_of(12345, 40422))


@pytest.mark.parametrize("bit", [0, 1, 31, 32, 33, 62, 63])
def test_a_stream_depends_on_every_bit_of_key_and_tile(bit: int) -> None:
    first = tile_of(5, 9)
    assert torch.equal(first, tile_of(5, 9))
    for other in (tile_of(5 ^ 1 << bit, 9), tile_of(5, 9 ^ 1 << bit)):
        assert int((first == other).sum()) < 8  # 24 bits each: equal by chance at most


def test_no_two_of_many_streams_begin_alike() -> None:
    """200,000 seeds of 32 bits would collide 4 or 5 times."""
    starts = {tuple(tile_of(key, tile, 4).tolist()) for key in range(200) for tile in range(1000)}
    assert len(starts) == 200_000


def test_neighbouring_streams_are_not_correlated() -> None:
    tiles = torch.stack(
        [tile_of(7, tile, 4096) for tile in range(40)] + [tile_of(key, 7, 4096) for key in range(40, 80)]
    )
    found = torch.corrcoef(tiles - 0.5) * 64
    off = found[~torch.eye(80, dtype=torch.bool)]
    assert off.abs().max() < 6 and 0.9 < off.std() < 1.1


def test_draws_of_every_kind_start_from_all_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing seeds a generator with a number, which would keep 32 bits of it."""

    class Seedless(torch.Generator):
        def manual_seed(self, seed: int) -> Any:
            raise AssertionError("a generator was seeded with a number")

    random.STREAMS.at(0, 0)
    monkeypatch.setattr(torch, "Generator", Seedless)
    mesh = loom.open_mesh((2,))
    chances = loom.ones(4, 3, mesh=mesh)
    loom.randperm(5, mesh=mesh), loom.randint(9, (4,), mesh=mesh), loom.multinomial(chances, 2)
    loom.bernoulli(chances / 2), torch.nn.functional.dropout(chances), loom.randn(3, mesh=mesh), loom.rand(3, mesh=mesh)


def test_exponential_draws_have_their_moments_and_stay_above_zero() -> None:
    drawn = random.exponential(torch.empty(1 << 16, dtype=torch.float64), random.STREAMS.at(1, 2))
    assert drawn.min() > 0
    torch.testing.assert_close(drawn.mean().item(), 1.0, atol=0.02, rtol=0)
    torch.testing.assert_close(drawn.var().item(), 1.0, atol=0.05, rtol=0)
    assert abs((drawn > 3).double().mean().item() - math.exp(-3)) < 0.003


def test_threads_draw_without_disturbing_each_other() -> None:
    expected = [tile_of(key, 1) for key in range(8)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda key: tile_of(key, 1), range(8)))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_attention_with_dropout_differs_from_dense_by_its_draw_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every element kept, what is left of dropout is its scale."""
    monkeypatch.setattr(random, "uniform", lambda out, generator: out.zero_())
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 5, 4).unbind(0)
    mesh = loom.open_mesh((2,))
    found = F.scaled_dot_product_attention(*(loom.distribute(each, mesh, "S(0)") for each in (q, k, v)), dropout_p=0.25)
    torch.testing.assert_close(found.to_torch() * 0.75, F.scaled_dot_product_attention(q, k, v))
