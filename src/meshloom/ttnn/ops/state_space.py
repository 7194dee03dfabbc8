"""Recurrences along a sequence: state space models, and attention by a state that forgets and is corrected.

A state is kept in float32. What hardware does in chunks is done token by token here: the values are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.ops.calling import Made, make, op, operands, shared_coords
from meshloom.ttnn.ops.topologies import moves, rows, same, topology_of
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

LATENT = 32  # the elements of a state that belong to one column

# state space models


@op("experimental.prefix_scan")
def prefix_scan(a, bx, h_prev, *, math_fidelity=None) -> Made:
    """h[t] = a[t] * h[t - 1] + bx[t] along [1, 1, L, W], from h_prev [1, 1, 1, W] on."""
    name = "experimental.prefix_scan"
    _, (factors, terms, state) = operands(name, a, bx, h_prev)
    if tuple(a.shape) != tuple(bx.shape) or a.shape[-1] != h_prev.shape[-1]:
        raise OperandError(f"ttnn.{name}: a {list(a.shape)}, bx {list(bx.shape)}, h_prev {list(h_prev.shape)}")
    kept, found = state.float().select(-2, 0), []
    for factor, term in zip(factors.float().unbind(-2), terms.float().unbind(-2), strict=True):
        kept = factor * kept + term
        found.append(kept)
    wide: tuple[int | None, ...] = (0, 1, None, 3)
    return make(torch.stack(found, -2), moves(wide, wide, wide, linear=False), a, bx, h_prev)


@op("experimental.hc_sum_reduce")
def hc_sum_reduce(input, *, math_fidelity=None) -> Made:
    """The sum of every 32 neighbours of the last dim: [1, 1, L, 32 * E] gives [1, 1, L, E]."""
    name = "experimental.hc_sum_reduce"
    _, (block,) = operands(name, input)
    if input.shape[-1] % LATENT:
        raise OperandError(f"ttnn.{name}: a width of {input.shape[-1]} is not made of runs of {LATENT}")
    return make(block.float().unflatten(-1, (-1, LATENT)).sum(-1), moves(same(input)), input, scales=True)


@op("experimental.repeat_and_interleave_eltwise_mul")
def repeat_and_interleave_eltwise_mul(a, b, *, math_fidelity=None) -> Made:
    """a * b, of a width of 32 * E: `a` of width 32 is repeated E times, every element of a `b` of width E 32 times."""
    name = "experimental.repeat_and_interleave_eltwise_mul"
    _, (x, y) = operands(name, a, b)
    wide = max(a.shape[-1], LATENT * b.shape[-1] if a.shape[-1] in (LATENT, LATENT * b.shape[-1]) else b.shape[-1])
    if a.shape[-1] not in (LATENT, wide) or b.shape[-1] not in (wide // LATENT, wide):
        raise OperandError(
            f"ttnn.{name}: widths of {a.shape[-1]} and {b.shape[-1]}",
            fix=f"{LATENT} or {LATENT} * E, and E or the same",
        )
    columns = wide // LATENT
    first = x.float() if a.shape[-1] == wide else x.float().repeat(*(1,) * (x.dim() - 1), columns)
    second = y.float() if b.shape[-1] == wide else y.float().repeat_interleave(LATENT, -1)
    last = len(a.shape) - 1
    places: tuple[int | None, ...] = (*range(last), last if a.shape[-1] == wide else None)
    return make(first * second, moves(places, same(b), linear=False), a, b, scales=True)


# gated delta rules


def _delta_rule(
    name: str,
    tensors: list[Tensor],
    *,
    scale=None,
    initial_state: Tensor | None = None,
    output_final_state=False,
    use_qk_l2norm=False,
    output_head_major=False,
) -> tuple[Made, Made | None]:
    """Queries and keys [B, T, H, K], values [B, T, V heads, V], g and beta [B, T, V heads].

    S = exp(g) * S; S = S + k (beta * (v - S.T k)).T; o = S.T (q * scale). A head of keys serves a group of value heads.
    """
    (q, _, v, _, _), initial, head_major = tensors, initial_state, output_head_major
    given = [*tensors, *([] if initial is None else [initial])]
    blocks = [block.float() for block in operands(name, *given)[1]]
    _check_delta(name, *tensors)
    heads, size, axes = v.shape[2], q.shape[3], len(q.grid)
    queries, keys = ((_unit(each) if use_qk_l2norm else each) for each in blocks[:2])
    queries, keys = (each.repeat_interleave(heads // q.shape[2], -2) for each in (queries, keys))
    queries = queries * (size**-0.5 if scale is None else scale)
    start = blocks[5] if initial is not None else blocks[2].new_zeros(*(1,) * axes, v.shape[0], heads, size, v.shape[3])
    found, state = _recur([queries, keys, *blocks[2:5]], start)
    kept: tuple[int | None, ...] = (0, 1) if head_major else (0, 2)
    per_token: tuple[int | None, ...] = (kept[0], None, kept[1], None)
    value: tuple[int | None, ...] = (*per_token[:3], 3)
    gates: tuple[int | None, ...] = (kept[0], None, kept[1])
    begin = [] if initial is None else [(*kept, None, 3)]
    rule = moves(per_token, per_token, value, gates, gates, *begin, linear=False)
    made = make(found.transpose(-3, -2) if head_major else found, rule, *given)
    if not output_final_state:
        return made, None
    key, value, gate = (0, None, 1, None), (0, None, 1, 3), (0, None, 1)
    return made, make(state, moves(key, key, value, gate, gate, *[(0, 1, None, 3)] * len(begin), linear=False), *given)


def _check_delta(name: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    shapes = ", ".join(str(list(each.shape)) for each in (q, k, v, g, beta))
    fits = len(q.shape) == len(v.shape) == 4 and tuple(q.shape) == tuple(k.shape)
    fits = fits and tuple(g.shape) == tuple(beta.shape) == tuple(v.shape[:3]) and v.shape[2] % q.shape[2] == 0
    if not fits:
        raise OperandError(
            f"ttnn.{name}: q, k, v, g and beta are {shapes}", fix="[B, T, H, K] twice, [B, T, HV, V], [B, T, HV] twice"
        )


def _unit(x: Block) -> Block:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _recur(blocks: Sequence[Block], state: Block) -> tuple[Block, Block]:
    """Every token's output and the last state; tokens are the third dim from the end, of gates the second."""
    q, k, v, g, beta = blocks
    found = []
    for at in range(v.shape[-3]):
        query, key, value = (each.select(-3, at) for each in (q, k, v))
        decay, weight = (each.select(-2, at).unsqueeze(-1) for each in (g, beta))
        state = state * decay.exp().unsqueeze(-1)
        wrong = weight * (value - (state * key.unsqueeze(-1)).sum(-2))
        state = state + key.unsqueeze(-1) * wrong.unsqueeze(-2)
        found.append((state * query.unsqueeze(-1)).sum(-2))
    return torch.stack(found, -3), state


@op(
    "transformer.fused_recurrent_gated_delta_rule",
    more=_delta_rule,
    refuses="initial_state_block_idx output_per_token_state",
    instead="output_final_state=True",
)
def fused_recurrent_gated_delta_rule(q, k: Tensor, v, g, beta, **how) -> tuple[Made, Made | None]:
    """A state [B, HV, K, V] that forgets by exp(g) and learns by beta: every token's output, and the last state."""
    return _delta_rule("transformer.fused_recurrent_gated_delta_rule", [q, k, v, g, beta], **how)


@op("transformer.chunk_gated_delta_rule", more=_delta_rule, drops="chunk_size")
def chunk_gated_delta_rule(q, k: Tensor, v, g, beta, **how) -> tuple[Made, Made | None]:
    """`fused_recurrent_gated_delta_rule` for long sequences; heads come before tokens with `output_head_major`."""
    return _delta_rule("transformer.chunk_gated_delta_rule", [q, k, v, g, beta], **how)


@op("experimental.kda.sigmoid_gated_rms_norm")
def sigmoid_gated_rms_norm(input, gate, weight, num_heads, *, epsilon=1e-05, gate_column_offset=0) -> Made:
    """The norm of every head of [..., heads * D] times a weight of [D], times the sigmoid of the gate's columns."""
    name = "experimental.kda.sigmoid_gated_rms_norm"
    _, (block, gates, factors) = operands(name, input, gate, weight)
    wide, axes = input.shape[-1], len(input.grid)
    if wide % num_heads or gate.shape[-1] < gate_column_offset + wide:
        raise OperandError(
            f"ttnn.{name}: {num_heads} heads of {list(input.shape)}, and columns {gate_column_offset} to "
            f"{gate_column_offset + wide} of a gate {list(gate.shape)}"
        )
    heads = block.float().unflatten(-1, (num_heads, -1))
    normal = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + epsilon)
    scaled = normal * factors.float().flatten(axes).reshape(*factors.shape[:axes], *(1,) * len(input.shape), -1)
    columns = gates.float().narrow(-1, gate_column_offset, wide)
    last = len(input.shape) - 1
    cuts = [f"S({d}), S({d}), R -> S({d})" for d in range(last)]
    if gate.shape[-1] == wide:
        cuts.append(f"S({last}), S({last}), R -> S({last})")
    tensors = (input, gate, weight)
    label = topology_of(rows(*cuts), *tensors, shape=tuple(input.shape))
    return Made(scaled.flatten(-2) * torch.sigmoid(columns), input, label, coords=shared_coords(*tensors))
