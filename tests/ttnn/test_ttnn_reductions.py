"""Reductions, orderings, running sums and tensors from nothing, against torch on every device's part and on wholes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError
from ttnn_cases import (
    check_claim,
    check_op,
    check_parts,
    composed,
    distributed,
    each_device,
    held,
    label,
    mesh,
    tensor_of,
)
from ttnn_draws import DTYPES, Grid, P, R, S, blocks, cuts, grids, shapes


def by_dims(name: str) -> Any:
    """A reduction over several dims, with torch's functions for one."""

    def call(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
        for dim in sorted((d % x.dim() for d in dims), reverse=True):
            x = {
                "sum": lambda v, d: v.sum(d, keepdim),
                "mean": lambda v, d: v.mean(d, keepdim),
                "max": lambda v, d: v.max(d, keepdim).values,
                "min": lambda v, d: v.min(d, keepdim).values,
                "prod": lambda v, d: v.prod(d, keepdim),
            }[name](x, dim)
        return x

    return call


@settings(max_examples=60, deadline=None)
@given(data=st.data(), grid=grids(), name=st.sampled_from(["sum", "mean", "max", "min"]))
def test_a_reduction_is_torchs_on_every_device(data: st.DataObject, grid: Grid, name: str) -> None:
    shape = data.draw(shapes(sizes=(1, 2, 5, 33)))
    dims = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), min_size=1, unique_by=lambda d: d % len(shape)))
    keepdim = data.draw(st.booleans())
    x = tensor_of(data.draw(blocks(grid, shape)), grid, dtype=data.draw(st.sampled_from(DTYPES)))
    found = getattr(ttnn, name)(x, dim=dims, keepdim=keepdim)
    assert found.dtype is x.dtype and found.layout is x.layout
    check_op(found, lambda part: by_dims(name)(part, dims, keepdim), x, rtol=1e-4, atol=1e-4)


@settings(max_examples=80, deadline=None)
@given(data=st.data(), grid=grids(), name=st.sampled_from(["sum", "mean", "max", "min", "prod"]))
def test_a_label_of_a_reduction_claims_only_what_is_so(data: st.DataObject, grid: Grid, name: str) -> None:
    shape = [data.draw(st.sampled_from([1, 6, 12])) for _ in range(3)]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    whole = torch.rand(shape, generator=generator) + 0.5
    x = distributed(whole, grid, data.draw(cuts(grid, shape)))
    dim, keepdim = data.draw(st.integers(-3, 2)), data.draw(st.booleans())
    found = getattr(ttnn, name)(x, dim, keepdim)
    claims = check_claim(found, by_dims(name)(whole, [dim], keepdim), rtol=1e-3, atol=1e-3)
    terms = any(isinstance(each, P) and size > 1 for each, size in zip(label(x), grid, strict=True))
    assert claims or (terms and name not in ("sum", "mean"))


def test_dims_behind_a_dim_that_is_gone_are_numbered_anew() -> None:
    x = distributed(torch.rand(2, 4, 6), (2, 3), [S(0), S(2)])
    assert label(ttnn.sum(x, 1)) == [S(0), S(1)] and label(ttnn.sum(x, 1, True)) == [S(0), S(2)]
    assert label(ttnn.sum(x, 0)) == [P("sum"), S(1)] and label(ttnn.max(x, -1)) == [S(0), P("max")]
    assert label(ttnn.mean(x)) == [P("mean"), P("mean")] and label(ttnn.std(x, 2)) == [S(0), P("unknown")]
    assert label(ttnn.argmax(x, 2)) == [S(0), P("unknown")] and label(ttnn.argmax(x, 1)) == [S(0), S(1)]
    assert label(ttnn.sum(distributed(torch.rand(4, 4), (2,), [P()]), 0)) == [P()]
    assert label(ttnn.max(distributed(torch.rand(4, 4), (2,), [P()]), 0)) == [P("unknown")]


def test_the_oracle_of_labels_notices_a_shard_that_was_summed_away() -> None:
    whole = torch.rand(4, 6)
    found = ttnn.sum(distributed(whole, (2,), [S(0)]), 0)
    found.update_tensor_topology(found.tensor_topology().with_placements([S(0)]))
    with pytest.raises(AssertionError):
        check_claim(found, whole.sum(0))


@pytest.mark.parametrize("name", ["std", "var"])
@pytest.mark.parametrize("correction", [True, False])
def test_spread_is_torchs(name: str, correction: bool) -> None:
    x = tensor_of(torch.rand(2, 1, 4, 7), (2, 3))
    for dim in (None, 0, -1, (0, 1)):
        found = getattr(ttnn, name)(x, dim, correction=correction)
        check_op(found, lambda part, d=dim: getattr(torch, name)(part, d, correction=int(correction)), x)


def test_a_scalar_multiplies_a_reduction() -> None:
    x = tensor_of(torch.rand(2, 4, 7), (2,))
    check_op(ttnn.sum(x, -1, scalar=0.5), lambda part: part.sum(-1) * 0.5, x)
    check_op(ttnn.max(x, -1, scalar=2.0), lambda part: part.amax(-1) * 2.0, x)


def test_products_over_one_dim_all_and_named_ones() -> None:
    x = tensor_of(torch.rand(2, 1, 3, 2, 4) + 0.5, (2, 2))
    check_op(ttnn.prod(x), lambda part: part.prod(), x)
    check_op(ttnn.prod(x, 1), lambda part: part.prod(1), x)
    check_op(ttnn.prod(x, -1, True), lambda part: part.prod(-1, True), x)
    room = tensor_of(torch.zeros(1, 1, 1, 2, 4), (2, 2))
    assert ttnn.prod(x, room, dims=[0]) is room
    check_op(room, lambda part: part.prod(0, True), x)


@pytest.mark.parametrize("dim", [None, 0, 1, -1])
@pytest.mark.parametrize("keepdim", [False, True])
def test_argmax_finds_the_first_largest(dim: int | None, keepdim: bool) -> None:
    x = tensor_of(torch.randint(0, 5, (2, 2, 3, 4)).float(), (2, 2))
    found = ttnn.argmax(x, dim, keepdim)
    assert found.dtype is ttnn.uint32 and found.layout is ttnn.ROW_MAJOR_LAYOUT

    def wanted(part: torch.Tensor) -> torch.Tensor:
        where = part.argmax(dim, keepdim) if dim is not None else part.flatten().argmax()
        return where.reshape((1,) * part.dim()) if dim is None and keepdim else where

    check_op(found, wanted, x)


@pytest.mark.parametrize("largest", [True, False])
def test_topk_and_sort_give_values_and_their_places(largest: bool) -> None:
    x = tensor_of(torch.rand(2, 3, 4, 40), (2, 3))
    values, places = ttnn.topk(x, 5, -1, largest)
    assert places.dtype is ttnn.uint16
    check_op(values, lambda part: part.topk(5, -1, largest).values, x)
    check_op(places, lambda part: part.topk(5, -1, largest).indices, x)
    values, places = ttnn.sort(x, 1, descending=largest)
    check_op(values, lambda part: part.sort(1, descending=largest).values, x)
    check_parts(values, each_device(lambda part, at: part.gather(1, at.long()), x, places))
    names = tensor_of(torch.arange(40).expand(1, 1, 4, 40) + 100, (2, 3), dtype=ttnn.uint16)
    _, named = ttnn.topk(x, 5, indices_tensor=names)
    check_op(named, lambda part: part.topk(5).indices + 100, x)
    rooms = [tensor_of(torch.zeros(1, 1, 4, 5), (2, 3)), tensor_of(torch.zeros(1, 1, 4, 5), (2, 3), dtype=ttnn.uint16)]
    assert ttnn.topk(x, 5, output_tensor=tuple(rooms)) == rooms or rooms[0].block.sum() > 0
    with pytest.raises(OperandError, match="k=41 of a dim of size 40"):
        ttnn.topk(x, 41)


def test_a_long_dim_has_places_of_32_bits() -> None:
    x = tensor_of(torch.rand(1, 70000), (2,))
    assert ttnn.topk(x, 2)[1].dtype is ttnn.uint32 and ttnn.sort(x)[1].dtype is ttnn.uint32


@pytest.mark.parametrize("reverse", [False, True])
def test_running_sums_and_products(reverse: bool) -> None:
    x = tensor_of(torch.rand(2, 3, 4, 7), (2, 3))

    def ordered(function: Any) -> Any:
        def call(part: torch.Tensor) -> torch.Tensor:
            return function(part.flip(-1)).flip(-1) if reverse else function(part)

        return call

    check_op(ttnn.cumsum(x, -1, reverse_order=reverse), ordered(lambda part: part.cumsum(-1)), x)
    check_op(ttnn.cumprod(x, -1, reverse_order=reverse), ordered(lambda part: part.cumprod(-1)), x)
    assert ttnn.cumsum(x, 0, dtype=ttnn.bfloat16).dtype is ttnn.bfloat16
    out = tensor_of(torch.zeros(1, 1, 4, 7), (2, 3))
    assert ttnn.cumsum(x, 0, out=out) is out


def test_a_moving_average_starts_from_nothing() -> None:
    x = tensor_of(torch.ones(2, 3, 4), (2,))
    wanted = torch.tensor([1 - 0.5**n for n in range(1, 5)]).expand(3, 4)
    check_parts(ttnn.ema(x, 0.5), each_device(lambda _: wanted, x))


def test_a_dim_that_is_not_there_is_refused() -> None:
    x = tensor_of(torch.rand(1, 3, 4), (2,))
    with pytest.raises(OperandError, match="Unsupported dim 2 for a tensor of rank 2"):
        ttnn.sum(x, 2)


def test_padding_at_the_end_of_a_whole_is_no_part_of_a_claim() -> None:
    x = tensor_of(torch.ones(2, 4, 3), (2,), [ttnn.PlacementShard(0, size=7)])
    total = ttnn.sum(x, 0)
    assert label(total) == [P("sum")] and check_claim(total, torch.full((3,), 7.0))
    assert label(ttnn.mean(x, 0)) == [P("unknown")]
    kept = ttnn.sum(x, 1)
    assert label(kept) == [S(0)] and label(kept)[0].size == 7


# tensors from nothing


@pytest.mark.parametrize("dtype", [ttnn.bfloat16, ttnn.float32, ttnn.int32, ttnn.uint32, ttnn.bfloat8_b])
def test_constants_are_the_same_on_every_device_and_kept_once(dtype: Any) -> None:
    device = mesh((2, 3))
    for made, value in (
        (ttnn.zeros([3, 40], dtype, device=device), 0),
        (ttnn.ones([3, 40], dtype, device=device), 1),
        (ttnn.full([3, 40], 7, dtype, device=device), 7),
    ):
        assert made.block.shape[:2] == (1, 1) and made.dtype is dtype
        assert tuple(made.tensor_topology().distribution_shape()) == (6,) and label(made) == [R]
        assert made.layout is (ttnn.TILE_LAYOUT if dtype is ttnn.bfloat8_b else ttnn.ROW_MAJOR_LAYOUT)
        assert all((part == value).all() for part in held(made).values())
    assert ttnn.full([2], (1 << 24) + 1, ttnn.int32, device=device).block.flatten().tolist() == [(1 << 24) + 1] * 2


def test_likes_have_the_shape_format_and_label_of_another() -> None:
    x = distributed(torch.rand(4, 6), (2, 3), [S(0), S(1)])
    for made, value in (
        (ttnn.zeros_like(x), 0),
        (ttnn.ones_like(x), 1),
        (ttnn.full_like(x, 5), 5),
        (ttnn.empty_like(x), None),
    ):
        assert made.shape == x.shape and made.dtype is x.dtype and made.layout is x.layout
        assert label(made) == label(x)
        assert value is None or check_claim(made, torch.full((4, 6), float(value)))
    room = tensor_of(torch.zeros(1, 1, 2, 2), (2, 3))
    assert ttnn.full_like(x, 2.0, optional_tensor=room) is room and (room.block == 2).all()


@pytest.mark.parametrize("ends", [(10,), (2, 10), (2, 11, 3), (10, 0, -4), (5, 5)])
def test_arange_counts_as_pythons_range(ends: tuple[int, ...]) -> None:
    made = ttnn.arange(*ends, dtype=ttnn.int32, device=mesh((2,)))
    assert made.block.flatten().tolist() == list(range(*ends))
    with pytest.raises(ArgumentError, match="step is 0"):
        ttnn.arange(1, 2, 0)


def test_random_numbers_repeat_with_their_seed() -> None:
    device = mesh((2, 3))
    a, b = (ttnn.rand([40, 50], device, dtype=ttnn.float32, low=2.0, high=3.0, seed=7) for _ in range(2))
    assert torch.equal(a.block, b.block) and a.block.min() >= 2 and a.block.max() <= 3
    assert a.layout is ttnn.TILE_LAYOUT and 2.4 < a.block.mean() < 2.6
    ttnn.manual_seed(3)
    c = ttnn.randn([100, 100], device, dtype=ttnn.float32)
    ttnn.manual_seed(3)
    assert torch.equal(c.block, ttnn.randn([100, 100], device, dtype=ttnn.float32).block)
    assert abs(c.block.mean()) < 0.05 and abs(c.block.std() - 1) < 0.05
    mapped = ttnn.rand([4, 6], device, dtype=ttnn.float32, seed=9, mesh_mapper=ttnn.MeshMapperConfig([S(0), S(1)]))
    assert mapped.shape == [2, 2] and composed(mapped).shape == (4, 6)


def test_uniform_and_bernoulli_draw_for_every_device_by_itself() -> None:
    x = tensor_of(torch.full((1, 1, 50, 50), 0.25), (2, 3))
    ones = ttnn.bernoulli(x)
    parts = list(held(ones).values())
    assert not torch.equal(parts[0], parts[1])
    assert all(0.2 < part.mean() < 0.3 and set(part.unique().tolist()) <= {0.0, 1.0} for part in parts)
    found = ttnn.uniform(x, 1.0, 2.0)
    parts = list(held(found).values())
    assert found is x and not torch.equal(parts[0], parts[1])
    assert all(part.min() >= 1 and part.max() <= 2 for part in parts)
