"""Gates of experts and what experts do with their tokens, against torch on every device's part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError, UnsupportedError
from ttnn_cases import tensor_of
from ttnn_op_cases import Case, OpCases

PREFILL = ttnn.experimental.deepseek_prefill


def spaced(size: Any, generator: torch.Generator) -> torch.Tensor:
    """Numbers that differ in every row by more than bfloat16 rounds, in an order of chance."""
    order = torch.rand(size, generator=generator).argsort(-1)
    return order.float() / 4 - 1


def zero_or_far(size: Any, generator: torch.Generator) -> torch.Tensor:
    return torch.where(torch.rand(size, generator=generator) < 0.3, -1e4, 0.0)


def moe(x: torch.Tensor, expert_mask: torch.Tensor, topk_mask: torch.Tensor) -> torch.Tensor:
    values, numbers = torch.topk(x + expert_mask, 4)
    return (torch.softmax(values + topk_mask, -1) * (numbers == 0)).sum(-1, keepdim=True)


def grouped(scores: torch.Tensor, bias: torch.Tensor, function: Any = torch.sigmoid) -> Any:
    """One token after the other, as the model's own gate does it."""
    plain, flat = function(scores), []
    for row in (plain + bias).reshape(-1, 16):
        best = [(float(group.topk(2).values.sum()), n) for n, group in enumerate(row.chunk(4))]
        kept = {n for _, n in sorted(best, reverse=True)[:2]}
        among = [(float(value), n) for n, value in enumerate(row) if n // 4 in kept]
        flat.append([n for _, n in sorted(among, reverse=True)[:3]])
    numbers = torch.tensor(flat).reshape(*plain.shape[:-1], 3)
    weights = plain.gather(-1, numbers)
    return weights / weights.sum(-1, keepdim=True) * 2.5, numbers


def hashed(scores: torch.Tensor, tokens: torch.Tensor, table: torch.Tensor) -> Any:
    numbers = table[tokens.long().flatten()][:, :2].long()[None]
    weights = F.softplus(scores).sqrt().gather(-1, numbers)
    return weights / weights.sum(-1, keepdim=True) * 1.5, numbers


def counted(chosen: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.bincount(chosen.flatten().long(), minlength=6) * (mask != 0)


def region(expert: int, start: torch.Tensor, counts: torch.Tensor, table: torch.Tensor) -> tuple[int, int]:
    number = int(table.flatten()[expert])
    return int(start.flatten()[number]), int(counts.flatten()[number])


def extracted(x: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    first, many = region(1, start, counts, table)
    return F.pad(x[..., first : first + many, :], (0, 0, 0, 4 - many))


def inserted(x: torch.Tensor, y: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, table: torch.Tensor) -> Any:
    first, many = region(1, start, counts, table)
    found = x.clone()
    found[..., first : first + many, :] = y[..., :many, :]
    return found


def starts(size: Any, generator: torch.Generator) -> torch.Tensor:
    """Regions of four experts that do not meet: at 0, 3, 6 and 7, of three rows at most."""
    return torch.tensor([0, 3, 6, 7]).int().expand(size).clone()


def two_of_four(size: Any, generator: torch.Generator) -> torch.Tensor:
    """Two different experts: the first or the second, and the last."""
    first = torch.randint(0, 2, size, generator=generator)
    first[..., 1] = 3
    return first.int()


def unified(x: torch.Tensor, first: torch.Tensor, many: torch.Tensor, table: torch.Tensor, *w: torch.Tensor) -> Any:
    found = torch.zeros_like(x)
    for expert in range(2):
        gate, up, down = w[3 * expert : 3 * expert + 3]
        begin = int(first[table[expert]])
        end = begin + min(3, int(many[table[expert]]))
        rows = x[:, begin:end]
        found[:, begin:end] = (F.silu(rows @ gate) * (rows @ up)) @ down
    return found


GATE = {"n_groups": 4, "topk_groups": 2, "n_activated_experts": 3, "route_scale": 2.5}
TOKENS = ["S(0), R -> S(0)", "S(1), R -> S(1)", "R, R -> R"]
GATES = [
    Case(
        "moe",
        lambda x, a, b: ttnn.moe(x, a, b, 4),
        moe,
        [(1, 1, 6, 16), (1, 1, 1, 16), (1, 1, 1, 4)],
        ["S(2), R, R -> S(2)", "R, R, R -> R"],
        [spaced, zero_or_far, zero_or_far],
    ),
    Case(
        "deepseek_grouped_gate",
        lambda x, b: ttnn.experimental.deepseek_grouped_gate(x, b, **GATE),
        grouped,
        [(2, 4, 16), (16,)],
        TOKENS,
        [spaced],
    ),
    Case(
        "moe_grouped_topk",
        lambda x, b: PREFILL.moe_grouped_topk(x, b, **GATE, stable_sort=True, score_func="sqrtsoftplus"),
        lambda x, b: grouped(x, b, lambda y: F.softplus(y).sqrt()),
        [(2, 4, 16), (1, 1, 16)],
        TOKENS,
        [spaced],
    ),
    Case(
        "moe_hash_gate",
        lambda x, t, table: PREFILL.moe_hash_gate(x, t, table, n_activated_experts=2, route_scale=1.5),
        hashed,
        [(1, 4, 8), (1, 4), (10, 3)],
        ["S(1), S(1), R -> S(1)", "R, R, R -> R"],
        ["float", 10, lambda size, g: torch.randint(0, 8, size, generator=g).int()],
    ),
    Case(
        "masked_bincount",
        lambda x, mask: PREFILL.masked_bincount(x, mask, 6, 3),
        counted,
        [(8, 3), (6,)],
        ["S(0), R -> P(sum)", "R, R -> R"],
        [6, 2],
    ),
    Case(
        "topk_large_indices",
        lambda x: ttnn.experimental.topk_large_indices(x, k=3, valid_length=5),
        lambda x: x[..., :5].topk(3).indices,
        [(2, 4, 8)],
        ["S(0) -> S(0)", "S(1) -> S(1)"],
        [spaced],
    ),
    Case(
        "topk_large_indices by tensor",
        lambda x, n: ttnn.experimental.topk_large_indices(x, k=3, valid_length_tensor=n, valid_length_offset=3),
        lambda x, n: x[..., : int(n) + 3].topk(3).indices,
        [(2, 4, 8), (1,)],
        ["S(0), R -> S(0)", "R, S(0) -> P(unknown)"][:1],
        [spaced, 4],
    ),
]
ROWS = [(1, 10, 4), (3,), (3,), (2,)]
STARTS = ["float", 7, 4, 3]
WORK = [
    Case(
        "extract",
        lambda x, *told: PREFILL.extract(x, *told, local_expert_id=1, max_dispatched_tokens_per_expert=4),
        extracted,
        ROWS,
        ["S(2), R, R, R -> S(2)", "R, R, R, R -> R"],
        STARTS,
    ),
    Case(
        "insert",
        lambda x, *told: PREFILL.insert(x, *told, local_expert_id=1),
        inserted,
        [ROWS[0], (1, 4, 4), *ROWS[1:]],
        ["S(2), S(2), R, R, R -> S(2)"],
        ["float", *STARTS],
    ),
    Case(
        "routed_expert_ffn",
        PREFILL.routed_expert_ffn,
        lambda x, gate, up, down: (F.silu(x @ gate) * (x @ up)) @ down,
        [(1, 2, 6, 4), (4, 8), (4, 8), (8, 4)],
        [
            "S(2), R, R, R -> S(2)",
            "R, S(1), S(1), S(0) -> P(sum)",
            "R, R, R, S(1) -> S(3)",
            "S(3), R, R, R -> P(unknown)",
        ][:3],
    ),
    Case(
        "unified_routed_expert_moe",
        lambda x, first, many, table, *w: PREFILL.unified_routed_expert_moe(
            x, first, many, table, w[0::3], w[1::3], w[2::3], 3
        ),
        unified,
        [(1, 10, 4), (4,), (4,), (2,), (4, 6), (4, 6), (6, 4), (4, 6), (4, 6), (6, 4)],
        [
            "R, R, R, R, S(1), S(1), S(0), S(1), S(1), S(0) -> P(sum)",
            "R, R, R, R, R, R, R, R, R, R -> R",
            "S(2), R, R, R, R, R, R, R, R, R -> P(unknown)",
        ][:2],
        ["float", starts, 4, two_of_four],
    ),
    Case(
        "post_combine_reduce",
        lambda x, w: PREFILL.post_combine_reduce(x, w, expert_dim=2),
        lambda x, w: (x * w[..., None]).sum(2),
        [(2, 4, 2, 6), (2, 4, 2)],
        ["S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "S(2), S(2) -> P(sum)", "S(3), R -> S(2)", "P(sum), R -> P(sum)"],
    ),
    Case(
        "fast_reduce_nc_split",
        lambda x: ttnn.experimental.fast_reduce_nc_split(x, dim=0, split_output_width=4),
        lambda x: x.sum(0, keepdim=True).split([4, 2], -1),
        [(4, 1, 2, 6)],
        ["S(0) -> P(sum)", "S(2) -> S(2)", "P(sum) -> P(sum)"],
    ),
    Case(
        "deepseek_moe_fast_reduce_nc",
        lambda x: ttnn.experimental.deepseek_moe_fast_reduce_nc(x, 0, split_size=2),
        lambda x: x.sum(0, keepdim=True).split(2, -1),
        [(4, 1, 2, 6)],
        ["S(0) -> P(sum)", "S(2) -> S(2)"],
    ),
    Case(
        "attn_res_weighted_reduce_nc",
        PREFILL.attn_res_weighted_reduce_nc,
        lambda x, w: (x * w).sum(1, keepdim=True),
        [(2, 4, 2, 6), (2, 4, 2, 1)],
        ["S(1), S(1) -> P(sum)", "S(0), S(0) -> S(0)", "S(3), R -> S(3)", "P(sum), R -> P(sum)"],
    ),
    Case(
        "deepseek_moe_post_combine_tilize",
        lambda x: ttnn.experimental.deepseek_moe_post_combine_tilize(x, output_memory_config=ttnn.L1_MEMORY_CONFIG),
        lambda x: x,
        [(2, 3, 4)],
        ["S(0) -> S(0)", "P(sum) -> P(sum)"],
    ),
]
CASES = [*GATES, *WORK]


class TestExperts(OpCases):
    cases = CASES


def test_what_experts_cannot_do_is_told() -> None:
    x, told = tensor_of(torch.rand(1, 1, 4, 4), (1, 1)), tensor_of(torch.zeros(1, 1, 1).int(), (1, 1), dtype=ttnn.int32)
    w = [tensor_of(torch.rand(1, 1, 4, 4), (1, 1))]
    with pytest.raises(UnsupportedError, match="silu without biases"):
        PREFILL.unified_routed_expert_moe(x, told, told, told, w, w, w, 4, gate_biases=w)
    with pytest.raises(UnsupportedError, match="silu without biases"):
        PREFILL.unified_routed_expert_moe(
            x, told, told, told, w, w, w, 4, activation=ttnn.RoutedExpertActivation.SituGlu
        )
    with pytest.raises(OperandError, match="expert 1 of 1"):
        PREFILL.extract(x, told, told, told, local_expert_id=1, max_dispatched_tokens_per_expert=4)
    with pytest.raises(UnsupportedError, match="were not sent"):
        PREFILL.post_combine_reduce(x, x, x)


def test_what_a_gate_cannot_do_is_told() -> None:
    scores, bias = tensor_of(torch.rand(1, 1, 4, 16), (1, 1)), tensor_of(torch.zeros(1, 1, 16), (1, 1))
    with pytest.raises(OperandError, match="3 experts of 1 of 8 groups of 16 experts"):
        ttnn.experimental.deepseek_grouped_gate(scores, bias, topk_groups=1, n_activated_experts=3)
    with pytest.raises(ArgumentError, match="'sigmoid' or 'softmax' or 'sqrtsoftplus'"):
        PREFILL.moe_grouped_topk(scores, bias, score_func="relu")
    with pytest.raises(UnsupportedError, match="padding_config"):
        PREFILL.moe_grouped_topk(scores, bias, padding_config=bias)
    with pytest.raises(OperandError, match="k=9 of the first 8"):
        ttnn.experimental.topk_large_indices(scores, k=9, valid_length=8)
    found = ttnn.experimental.deepseek_moe_post_combine_tilize(
        ttnn.to_layout(scores, ttnn.ROW_MAJOR_LAYOUT), output_memory_config=ttnn.L1_MEMORY_CONFIG
    )
    assert found.layout is ttnn.TILE_LAYOUT and found.memory_config() == ttnn.L1_MEMORY_CONFIG
