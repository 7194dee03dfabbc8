"""Fourier transforms, casts, statistics and recurrences against torch on every device's part."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional as F

from meshloom import ttnn
from ttnn_op_cases import Case, OpCases

ROWS = (2, 4, 12)
PLANES = (2, 4, 5, 6)


def parts(found: torch.Tensor) -> Any:
    return found.real, found.imag


def twiddles(x: torch.Tensor) -> torch.Tensor:
    high, wide = x.shape[-2:]
    turn = torch.outer(torch.arange(high), torch.arange(wide)) / (high * wide)
    return x * torch.exp(-2j * math.pi * turn)


TWO = ["S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "P(sum), P(sum) -> P(sum)", "R, R -> R"]
SPECTRA = [
    Case("fft", ttnn.experimental.fft, lambda r, i: parts(torch.fft.fft(r + 1j * i)), [ROWS] * 2, TWO),
    Case("fft real", ttnn.experimental.fft, lambda r: parts(torch.fft.fft(r)), [ROWS], ["S(1) -> S(1)"]),
    Case("fft fast", lambda r: ttnn.experimental.fft(r, "fast"), lambda r: parts(torch.fft.fft(r)), [ROWS], ["R -> R"]),
    Case("ifft", ttnn.experimental.ifft, lambda r, i: parts(torch.fft.ifft(r + 1j * i)), [ROWS] * 2, TWO),
    Case(
        "bluestein_fft",
        lambda r, i: ttnn.experimental.bluestein_fft(r, i, 7),
        lambda r, i: parts(torch.fft.fft(r + 1j * i)),
        [(2, 7)] * 2,
        ["S(0), S(0) -> S(0)"],
    ),
    Case(
        "bluestein_fft real",
        lambda r: ttnn.experimental.bluestein_fft(r, 7),
        lambda r: parts(torch.fft.fft(r)),
        [(2, 7)],
        ["S(0) -> S(0)"],
    ),
    Case(
        "fft_three_pass",
        lambda r, i: ttnn.experimental.fft_three_pass(r, i, 12, inverse=True),
        lambda r, i: parts(torch.fft.ifft(r + 1j * i)),
        [ROWS] * 2,
        TWO,
    ),
    Case(
        "fft_three_pass real",
        lambda r: ttnn.experimental.fft_three_pass(r, full_N=12),
        lambda r: parts(torch.fft.fft(r)),
        [ROWS],
    ),
    Case(
        "apply_twiddles",
        lambda r, i: ttnn.experimental.apply_twiddles(r, i, 4, 12),
        lambda r, i: parts(twiddles(r + 1j * i)),
        [ROWS] * 2,
        ["S(0), S(0) -> S(0)", "P(sum), P(sum) -> P(sum)"],
    ),
    Case(
        "complex_mul",
        ttnn.experimental.complex_mul,
        lambda a, b, c, d: parts((a + 1j * b) * (c + 1j * d)),
        [ROWS] * 4,
        ["S(2), S(2), S(2), S(2) -> S(2)", "P(sum), P(sum), R, R -> P(unknown)"],
    ),
]
STATISTICS = [
    Case(
        "var_hw",
        ttnn.var_hw,
        lambda x: x.var((2, 3), correction=0, keepdim=True),
        [PLANES],
        ["S(0) -> S(0)", "S(1) -> S(1)", "S(3) -> P(unknown)"],
    ),
    Case("std_hw", ttnn.std_hw, lambda x: x.std((2, 3), correction=0, keepdim=True), [PLANES], ["S(1) -> S(1)"]),
    Case(
        "normalize_hw",
        ttnn.normalize_hw,
        lambda x: (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), correction=0, keepdim=True),
        [PLANES],
        ["S(0) -> S(0)", "S(1) -> S(1)"],
    ),
    Case(
        "normalize_global", ttnn.normalize_global, lambda x: (x - x.mean()) / x.std(correction=0), [PLANES], ["R -> R"]
    ),
]


def scan(a: torch.Tensor, bx: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    found, state = [], h[..., 0, :]
    for t in range(a.shape[-2]):
        state = a[..., t, :] * state + bx[..., t, :]
        found.append(state)
    return torch.stack(found, -2)


def delta_rule(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, s: Any) -> Any:
    """One matrix after the other, as the papers write it: S (I - beta k k^T) exp(g) + beta k v^T."""
    heads = v.shape[2]
    unit = [F.normalize(each, dim=-1, eps=1e-6).repeat_interleave(heads // q.shape[2], 2) for each in (q, k)]
    state, found = s.clone(), torch.zeros_like(v)
    for b in range(v.shape[0]):
        for h in range(heads):
            for t in range(v.shape[1]):
                key, weight = unit[1][b, t, h], beta[b, t, h]
                eye = torch.eye(len(key)) - weight * torch.outer(key, key)
                state[b, h] = eye @ (state[b, h] * g[b, t, h].exp()) + weight * torch.outer(key, v[b, t, h])
                found[b, t, h] = state[b, h].T @ unit[0][b, t, h] * 0.5
    return found, state


def negative(size: Any, generator: torch.Generator) -> torch.Tensor:
    return -torch.rand(size, generator=generator)


DELTA = [(2, 3, 2, 4), (2, 3, 2, 4), (2, 3, 4, 6), (2, 3, 4), (2, 3, 4), (2, 4, 4, 6)]
GATES = ["float", "float", "float", negative, "positive", "float"]
HOW = {"scale": 0.5, "output_final_state": True, "use_qk_l2norm": True}


def delta(name: str, **how: Any) -> Any:
    return lambda q, k, v, g, beta, s: getattr(ttnn.transformer, name)(
        q, k, v, g, beta, initial_state=s, **{**HOW, **how}
    )


def head_major(*given: torch.Tensor) -> Any:
    found, state = delta_rule(*given)
    return found.transpose(1, 2), state


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    heads = F.rms_norm(x.unflatten(-1, (3, 4)), (4,), weight, 1e-5).flatten(-2)
    return heads * torch.sigmoid(gate[..., 2:14])


RECURRENCES = [
    Case(
        "prefix_scan",
        ttnn.experimental.prefix_scan,
        scan,
        [(1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 1, 8)],
        ["S(3), S(3), S(3) -> S(3)", "S(2), S(2), R -> P(unknown)"],
    ),
    Case(
        "hc_sum_reduce",
        ttnn.experimental.hc_sum_reduce,
        lambda x: x.unflatten(-1, (-1, 32)).sum(-1),
        [(1, 1, 4, 128)],
        ["S(3) -> S(3)", "S(2) -> S(2)", "P(sum) -> P(sum)"],
    ),
    Case(
        "repeat_and_interleave_eltwise_mul",
        ttnn.experimental.repeat_and_interleave_eltwise_mul,
        lambda a, b: a.repeat(1, 1, 1, 4) * b.repeat_interleave(32, -1),
        [(1, 1, 2, 32), (1, 1, 2, 4)],
        ["R, S(3) -> S(3)", "S(2), S(2) -> S(2)"],
    ),
    Case(
        "repeat_and_interleave_eltwise_mul full",
        ttnn.experimental.repeat_and_interleave_eltwise_mul,
        lambda a, b: a * b.repeat_interleave(32, -1),
        [(1, 1, 2, 128), (1, 1, 2, 4)],
        ["S(3), S(3) -> S(3)"],
    ),
    Case(
        "fused_recurrent_gated_delta_rule",
        delta("fused_recurrent_gated_delta_rule"),
        delta_rule,
        DELTA,
        [
            "S(0), S(0), S(0), S(0), S(0), S(0) -> S(0)",
            "S(2), S(2), S(2), S(2), S(2), S(1) -> S(2), S(1)",
            "R, R, S(3), R, R, S(3) -> S(3)",
        ],
        GATES,
    ),
    Case("chunk_gated_delta_rule", delta("chunk_gated_delta_rule"), delta_rule, DELTA, [], GATES),
    Case(
        "chunk_gated_delta_rule head major",
        delta("chunk_gated_delta_rule", output_head_major=True),
        head_major,
        DELTA,
        ["S(2), S(2), S(2), S(2), S(2), S(1) -> S(1)"],
        GATES,
    ),
    Case(
        "kda.sigmoid_gated_rms_norm",
        lambda x, gate, w: ttnn.experimental.kda.sigmoid_gated_rms_norm(x, gate, w, 3, gate_column_offset=2),
        gated_norm,
        [(2, 4, 12), (2, 4, 16), (4,)],
        ["S(0), S(0), R -> S(0)", "S(1), S(1), R -> S(1)"],
    ),
]
CASES = [*SPECTRA, *STATISTICS, *RECURRENCES]


class TestSpectraStatisticsAndRecurrences(OpCases):
    cases = CASES
