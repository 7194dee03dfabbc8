"""Casts, heads, pictures, random numbers and products of single ops, against torch on every device's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError, UnsupportedError
from ttnn_cases import distributed, held, label, mesh, tensor_of
from ttnn_draws import P, R, S
from ttnn_op_cases import DTYPES, Case, OpCases

EXPERIMENTAL = ttnn.experimental


def silu_glu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)


def xielu(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, 0.7 * x * x + 0.5 * x, 0.9 * (torch.exp(x) - 1) - 0.9 * x + 0.5 * x)


def grouped_heads(x: torch.Tensor) -> Any:
    """q q k v | q q k v, of heads of 3."""
    groups = x.unflatten(-1, (2, 4, 3))
    q, k, v = groups[..., :2, :].flatten(-3, -2), groups[..., 2, :], groups[..., 3, :]
    return tuple(each.squeeze(1).transpose(1, 2) for each in (q, k, v))


def separate_heads(x: torch.Tensor, kv: torch.Tensor) -> Any:
    q = x.squeeze(1).unflatten(-1, (4, 3)).transpose(1, 2)
    k, v = kv.squeeze(1).unflatten(-1, (2, 2, 3)).unbind(-2)
    return q, k.transpose(1, 2).transpose(-1, -2), v.transpose(1, 2)


def rotated(x: torch.Tensor, angle: float, center: tuple[float, float], bilinear: bool, fill: float) -> torch.Tensor:
    """By torch's own sampling, of a picture whose surroundings are `fill`."""
    high, wide = x.shape[1:3]
    turn = torch.deg2rad(torch.tensor(angle, dtype=torch.float64))
    ys, xs = torch.meshgrid(torch.arange(high).double(), torch.arange(wide).double(), indexing="ij")
    dx, dy = xs - center[0], ys - center[1]
    at_x, at_y = turn.cos() * dx - turn.sin() * dy + center[0], turn.sin() * dx + turn.cos() * dy + center[1]
    grid = torch.stack([2 * at_x / (wide - 1) - 1, 2 * at_y / (high - 1) - 1], -1).expand(x.shape[0], -1, -1, -1)
    shifted = (x - fill).permute(0, 3, 1, 2).double()
    mode = "bilinear" if bilinear else "nearest"
    return F.grid_sample(shifted, grid, mode, "zeros", align_corners=True).permute(0, 2, 3, 1).float() + fill


SHAPES = [(3, 4), (2, 2)]


def deformable(value: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Point by point."""
    batch, queries, heads, _, points, _ = places.shape
    found, first = torch.zeros(batch, queries, heads, value.shape[-1]), 0
    for level, (high, wide) in enumerate(SHAPES):
        picture = value[:, first : first + high * wide].unflatten(1, (high, wide))
        first += high * wide
        for b, q, h, p in torch.cartesian_prod(*map(torch.arange, (batch, queries, heads, points))).tolist():
            x = float(places[b, q, h, level, p, 0]) * wide - 0.5
            y = float(places[b, q, h, level, p, 1]) * high - 0.5
            for row in (int(y // 1), int(y // 1) + 1):
                for column in (int(x // 1), int(x // 1) + 1):
                    if 0 <= row < high and 0 <= column < wide:
                        near = (1 - abs(x - column)) * (1 - abs(y - row)) * weights[b, q, h, level, p]
                        found[b, q, h] += near * picture[b, row, column, h]
    return found.flatten(-2)


def from_offsets(value: torch.Tensor, near: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    sizes = torch.tensor([[wide, high] for high, wide in SHAPES])
    return deformable(value, near[:, :, None, :, None] + offsets / sizes[None, None, None, :, None], weights)


def by_user(queries: torch.Tensor, caches: torch.Tensor) -> torch.Tensor:
    return torch.einsum("ohbk,bokn->ohbn", queries, caches)


MSDA = [(2, 16, 2, 3), (2, 4, 2, 2, 3, 2), (2, 4, 2, 2, 3)]
CASES = [
    Case("xielu", lambda x: ttnn.xielu(x, alpha_p=0.7, alpha_n=0.9), xielu, [(2, 6)], ["S(1) -> S(1)"]),
    Case(
        "clamped_silu_glu",
        lambda gate, up: ttnn.clamped_silu_glu(gate, up, 0.5),
        silu_glu,
        [(2, 6), (2, 6)],
        ["S(0), S(0) -> S(0)", "P(sum), R -> P(unknown)"],
    ),
    Case(
        "create_qkv_heads",
        lambda x: EXPERIMENTAL.create_qkv_heads(x, num_heads=4, num_kv_heads=2, transpose_k_heads=False),
        grouped_heads,
        [(2, 1, 4, 24)],
        ["S(0) -> S(0)", "S(2) -> S(2)", "P(sum) -> P(sum)"],
    ),
    Case(
        "create_qkv_heads_from_separate_tensors",
        lambda x, kv: EXPERIMENTAL.create_qkv_heads_from_separate_tensors(x, kv, num_heads=4, num_kv_heads=2),
        separate_heads,
        [(2, 1, 4, 12), (2, 1, 6, 12)],
        ["S(0), S(0) -> S(0)", "S(2), R -> S(2), R, R", "R, S(2) -> R, S(3), S(2)"],
    ),
    Case(
        "nlp_create_q_heads_split",
        lambda x: EXPERIMENTAL.nlp_create_q_heads_split(x, num_heads=2, split_head_dim=4),
        lambda x: x.squeeze(1).unflatten(-1, (2, 6)).transpose(1, 2).split([4, 2], -1),
        [(2, 1, 4, 12)],
        ["S(0) -> S(0)", "S(2) -> S(2)"],
    ),
    Case(
        "intimg",
        EXPERIMENTAL.intimg,
        lambda x: x.cumsum(1).cumsum(2),
        [(2, 3, 4, 6)],
        ["S(0) -> S(0)", "S(3) -> S(3)", "P(sum) -> P(sum)"],
    ),
    Case(
        "rotate",
        lambda x: ttnn.rotate(x, 33.0, fill=0.25),
        lambda x: rotated(x, 33.0, (2.0, 1.5), False, 0.25),
        [(2, 4, 5, 2)],
        ["S(0) -> S(0)", "S(3) -> S(3)", "P(sum) -> P(unknown)"],
    ),
    Case(
        "rotate bilinear",
        lambda x: ttnn.rotate(x, -70.0, center=(1.0, 2.0), interpolation_mode="bilinear"),
        lambda x: rotated(x, -70.0, (1.0, 2.0), True, 0.0),
        [(2, 4, 5, 2)],
        ["S(3) -> S(3)", "P(sum) -> P(sum)"],
    ),
    Case(
        "fused_msda",
        lambda *given: EXPERIMENTAL.fused_msda(*given, SHAPES),
        deformable,
        MSDA,
        ["S(0), S(0), S(0) -> S(0)", "R, S(1), S(1) -> S(1)", "S(2), S(2), S(2) -> S(2)", "P(sum), R, R -> P(sum)"],
        ["float", "positive"],
        coarse=(3e-2, 6e-2),
    ),
    Case(
        "fused_msda in grid space",
        lambda v, p, w: EXPERIMENTAL.fused_msda(v, p, w, SHAPES, locations_in_grid_space=True),
        lambda v, p, w: deformable(v, (p + 1) / 2, w),
        MSDA,
        coarse=(3e-2, 6e-2),
    ),
    Case(
        "fused_msda_from_offsets",
        lambda *given: EXPERIMENTAL.fused_msda_from_offsets(*given, SHAPES),
        from_offsets,
        [MSDA[0], (2, 4, 2, 2), *MSDA[1:]],
        ["S(0), S(0), S(0), S(0) -> S(0)", "R, S(1), S(1), S(1) -> S(1)", "S(2), R, S(2), S(2) -> S(2)"],
        ["float", "positive"],
        coarse=(3e-2, 6e-2),
    ),
    Case(
        "attn_matmul_from_cache scores",
        lambda a, b: EXPERIMENTAL.attn_matmul_from_cache(
            a, b, num_tokens=20, transpose_hw=True, compute_with_storage_grid_size=ttnn.CoreCoord(8, 8)
        ),
        lambda a, b: by_user(a, b[:, :, :32].transpose(-1, -2)),
        [(1, 4, 2, 6), (2, 1, 64, 6)],
        ["S(2), S(0) -> S(2)", "S(1), R -> S(1)"],
    ),
    Case(
        "attn_matmul_from_cache values",
        lambda a, b: EXPERIMENTAL.attn_matmul_from_cache(
            a, b, num_tokens=32, transpose_hw=False, compute_with_storage_grid_size=ttnn.CoreCoord(8, 8)
        ),
        lambda a, b: by_user(a, b[:, :, :32]),
        [(1, 4, 2, 32), (2, 1, 64, 6)],
        ["S(2), S(0) -> S(2)", "R, S(3) -> S(3)"],
    ),
    Case(
        "matmul_decode",
        lambda a, b: EXPERIMENTAL.matmul_decode(a, b, partial_width_sharded=True),
        torch.matmul,
        [(1, 2, 6), (6, 4)],
        ["S(2), S(0) -> P(sum)", "R, S(1) -> S(2)"],
    ),
    Case(
        "per_token_cast_back",
        lambda x, scale: EXPERIMENTAL.deepseek_prefill.per_token_cast_back(x, scale, ttnn.float32),
        lambda x, scale: x * scale.repeat_interleave(128, -1),
        [(2, 256), (2, 2)],
        ["S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)"],
    ),
]


class TestSingleOps(OpCases):
    cases = CASES


# casts


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (ttnn.float32, ttnn.int32, torch.int32),
        (ttnn.bfloat16, ttnn.uint16, torch.uint16),
        (ttnn.float32, ttnn.uint32, torch.uint32),
    ],
    ids=str,
)
def test_a_bitcast_keeps_the_bits_both_ways(first: Any, second: Any, kind: Any) -> None:
    x = torch.tensor([[[1.0, -2.5, 3e-5, -0.0]]])
    given = tensor_of(x, (2,), [R], dtype=first)
    found = ttnn.bitcast(given, second)
    assert found.dtype is second
    assert held(found)[(0,)].tolist() == x.to(first.store).view(kind)[0].to(torch.int64).tolist()
    assert torch.equal(ttnn.bitcast(found, first).block, given.block)
    with pytest.raises(OperandError, match="different sizes"):
        ttnn.bitcast(given, ttnn.uint8)


def test_typecast_of_quasar_takes_dtypes_in_both_orders() -> None:
    x = tensor_of(torch.tensor([[[1.5, 2.5]]]), (2,), [R])
    cast = EXPERIMENTAL.quasar.typecast
    assert cast(x, ttnn.bfloat16).dtype is cast(x, ttnn.float32, ttnn.bfloat16).dtype is ttnn.bfloat16
    found = cast(x, ttnn.float32, ttnn.int32, ttnn.L1_MEMORY_CONFIG)
    assert found.to_list() == [[1, 2]] and found.memory_config() == ttnn.L1_MEMORY_CONFIG
    assert cast(x, input_dtype=ttnn.float32, output_dtype=ttnn.int32).dtype is ttnn.int32
    with pytest.raises(ArgumentError, match="takes a dtype"):
        cast(x)
    weight = EXPERIMENTAL.quantize_weights_via_host(x, dtype=ttnn.bfloat8_b, memory_config=ttnn.L1_MEMORY_CONFIG)
    assert weight.dtype is ttnn.bfloat8_b and weight.memory_config() == ttnn.L1_MEMORY_CONFIG


@pytest.mark.parametrize("rounds", [False, True])
def test_tokens_in_eight_bits_come_back_up_to_their_rounding(rounds: bool) -> None:
    x = torch.randn(2, 3, 256) * 100
    given = tensor_of(x, (2,), [S(0)])
    small, scale = EXPERIMENTAL.deepseek_prefill.per_token_cast_to_fp8(given, round_scale_to_power_of_two=rounds)
    assert small.dtype is ttnn.fp8_e4m3 and scale.shape == [3, 2] and label(small) == label(scale) == [S(0)]
    runs = x.unflatten(-1, (2, 128))
    wanted = runs.abs().amax(-1) / 448
    wanted = torch.exp2(torch.log2(wanted).ceil()) if rounds else wanted
    torch.testing.assert_close(scale.block, wanted)
    eighth = (runs / wanted.unsqueeze(-1)).to(torch.float8_e4m3fn).float().flatten(-2)
    assert torch.equal(small.block.float(), eighth)
    back = EXPERIMENTAL.deepseek_prefill.per_token_cast_back(small, scale)
    assert back.dtype is ttnn.bfloat16
    torch.testing.assert_close(back.block.float(), x, rtol=0.07, atol=0.5)
    with pytest.raises(OperandError, match="runs of 128"):
        EXPERIMENTAL.deepseek_prefill.per_token_cast_to_fp8(tensor_of(torch.ones(1, 2, 100), (2,), [R]))
    with pytest.raises(UnsupportedError, match="metadata"):
        EXPERIMENTAL.deepseek_prefill.per_token_cast_back(small, scale, token_count_aware=True)


# numbers from nowhere


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_leaves_out_as_many_as_asked_and_differs_between_devices_if_asked(dtype: Any) -> None:
    x = tensor_of(torch.ones(1, 1, 100, 100), (1, 2), dtype=dtype)
    found = EXPERIMENTAL.dropout(x, 0.25, 4 / 3, 7)
    parts = list(held(found).values())
    for part in parts:
        kept = part[part != 0].float()
        assert abs(kept.numel() / 1e4 - 0.75) < 0.02 and torch.allclose(
            kept, torch.tensor(4 / 3).to(dtype.store).float()
        )
    assert not torch.equal(*parts) and label(found) == [R, P("unknown")]
    same = EXPERIMENTAL.dropout(x, 0.25, 4 / 3, 7, use_per_device_seed=False)
    assert label(same) == [R, R] and torch.equal(held(same)[(0, 0)], parts[0])
    assert torch.equal(EXPERIMENTAL.dropout(x, 0.25, 4 / 3, 7).block, found.block)
    cut = distributed(torch.randn(4, 4), (2,), [S(0)])
    assert label(EXPERIMENTAL.dropout(cut, 0.5, 2.0, 1)) == [S(0)]


def test_a_list_of_numbers_becomes_a_tensor_on_all_devices() -> None:
    found = ttnn.from_buffer([1.5, 2.0, 3.0, 4.0], [2, 2], ttnn.bfloat16, mesh((1, 2)), ttnn.TILE_LAYOUT)
    assert found.to_list() == [[1.5, 2.0], [3.0, 4.0]] and found.layout is ttnn.TILE_LAYOUT
    whole = ttnn.from_buffer(range(3), [3], ttnn.uint32, mesh((1, 2)), memory_config=ttnn.L1_MEMORY_CONFIG)
    assert whole.to_list() == [0, 1, 2] and whole.memory_config() == ttnn.L1_MEMORY_CONFIG
    assert whole.layout is ttnn.ROW_MAJOR_LAYOUT and label(whole) == [R]
    with pytest.raises(OperandError, match="3 numbers for a shape of"):
        ttnn.from_buffer([1, 2, 3], [2, 2], ttnn.uint32, mesh((1, 2)))


# comparisons


def test_correlation_is_one_for_scaled_copies_and_zero_for_what_has_nothing_in_common() -> None:
    pcc, generator = ttnn.pearson_correlation_coefficient, torch.Generator().manual_seed(0)
    x, other = (torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(2))
    assert pcc(x, x) == 1.0 and pcc(x, 3 * x + 1) == pytest.approx(1.0, abs=1e-12)
    assert pcc(x, -x) == pytest.approx(-1.0, abs=1e-12)
    assert abs(pcc(x, other) - float(torch.corrcoef(torch.stack([x, other]))[0, 1])) < 1e-6
    assert pcc(torch.full((3,), torch.nan), torch.full((3,), torch.nan)) == 1.0
    assert pcc(torch.full((3,), torch.nan), x[:3]) == pcc(torch.zeros(3), x[:3]) == 0.0
    assert pcc(torch.ones(3), 2 * torch.ones(3)) == 0.0 and pcc(torch.ones(2).bfloat16(), torch.ones(2)) == 1.0
    assert pcc(x.float(), tensor_of(x.reshape(1, 50).float(), (2,), [R])) == 1.0
    with pytest.raises(OperandError, match="differ"):
        pcc(x, x[:3])


def test_what_pictures_and_heads_cannot_be_is_told() -> None:
    x = tensor_of(torch.rand(1, 2, 4, 4, 3), (2,), [R])
    with pytest.raises(UnsupportedError, match="as large as the picture"):
        ttnn.rotate(x, 10.0, expand=True)
    with pytest.raises(ArgumentError, match="'nearest' or 'bilinear'"):
        ttnn.rotate(x, 10.0, interpolation_mode="cubic")
    with pytest.raises(OperandError, match="is not 2 groups of 4 heads"):
        EXPERIMENTAL.create_qkv_heads(tensor_of(torch.rand(1, 1, 1, 2, 20), (2,), [R]), num_heads=4, num_kv_heads=2)
    with pytest.raises(OperandError, match="of 2"):
        EXPERIMENTAL.attn_matmul_from_cache(
            tensor_of(torch.rand(1, 1, 1, 1, 2), (2,), [R]),
            tensor_of(torch.rand(1, 1, 1, 2, 2), (2,), [R]),
            num_tokens=4,
            transpose_hw=True,
            compute_with_storage_grid_size=ttnn.CoreCoord(8, 8),
        )
