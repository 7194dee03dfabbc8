"""Fused ops of models: sampling, reductions over experts, products shaped for decoding."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops import calling
from meshloom.ttnn.ops.block_moves import spread
from meshloom.ttnn.ops.calling import KEPT, Made, make, op, operands, shared_coords
from meshloom.ttnn.ops.elementwise import binary
from meshloom.ttnn.ops.matmul import linear, multiply
from meshloom.ttnn.ops.movement import transpose
from meshloom.ttnn.ops.slicing import chunk, concat, slice_
from meshloom.ttnn.ops.topologies import rows, topology_of
from meshloom.ttnn.tensor.formats import TILE_SIZE, DataType, Layout
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

# tokens


@op("sampling")
def sampling(
    input_values_tensor, input_indices_tensor, k: Tensor, p: Tensor, temp, *, seed=None, output_tensor=None
) -> Made:
    """One token of every user, [1, 1, 1, B], drawn from the best `k` of [1, 1, B, n] that make up probability `p`.

    Logits are multiplied by `temp`, which is one over the temperature. The draw of a user is the same on all devices.
    """
    tensors = (input_values_tensor, input_indices_tensor, k, p, temp)
    blocks = operands("sampling", *tensors)[1]
    axes, users = len(input_values_tensor.grid), input_values_tensor.shape[-2]
    for name, tensor in (("k", k), ("p", p), ("temp", temp)):
        if tensor.shape[-1] != users:
            raise OperandError(f"ttnn.sampling: {name} is {list(tensor.shape)} for {users} users", fix="one for each")
    limit, share, heat = (each.flatten(axes).unsqueeze(-1) for each in blocks[2:])
    logits = blocks[0].flatten(axes, -2).float() * heat.float()
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    luck = torch.rand(users, 1, generator=generator)
    logits, limit, share = spread([logits, limit, share.float()], axes)
    place = _draw(logits, limit, share, luck)
    numbers, at = spread([blocks[1].flatten(axes, -2), place], axes)
    chosen = numbers.gather(-1, at).squeeze(-1)
    at_users = len(input_values_tensor.shape) - 2  # cut at the choices, devices would draw different tokens
    beside = itertools.product(["R", *(f"S({dim})" for dim in range(4))], repeat=3)
    cuts = (f"S({at_users}), S({at_users}), {', '.join(each)} -> S(3)" for each in beside)
    label = topology_of(rows(*cuts, exact=True), *tensors, shape=(1, 1, 1, users))
    flat = chosen.reshape(*chosen.shape[:axes], 1, 1, 1, users)
    kind = output_tensor.dtype if output_tensor is not None else DataType.UINT32
    made = Made(flat, input_values_tensor, label, kind, Layout.ROW_MAJOR, coords=shared_coords(*tensors))
    return made.into(output_tensor)


def _draw(logits: Block, limit: Block, share: Block, luck: Block) -> Block:
    """Where the token is that luck, from 0 to 1, falls on: among the best, in the order of their logits.

    >>> _draw(torch.tensor([[0.0, 3.0, 2.0]]), torch.tensor([[2]]), torch.tensor([[1.0]]), torch.tensor([[0.9]]))
    tensor([[2]])
    """
    sorted_, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1])
    kept = sorted_.masked_fill(rank >= limit.clamp(min=1), -torch.inf).softmax(-1)
    before = kept.cumsum(-1) - kept
    weight = kept.masked_fill((before >= share) & (rank > 0), 0)
    sums = weight.cumsum(-1)
    place = (sums <= luck * sums[..., -1:]).sum(-1, keepdim=True)
    last = (weight > 0).sum(-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(place, last.clamp(min=0)))


# products


@op("experimental.minimal_matmul", more=KEPT)
def minimal_matmul(
    input_tensor: Tensor | Sequence[Tensor],
    weight_tensor,
    *,
    bias_tensor=None,
    fused_activation=None,
    fuse_swiglu=False,
    **how,
) -> Tensor:
    """`linear`; several operands are one, side by side. With `fuse_swiglu`, silu(first half) * second half of it."""
    given = input_tensor if isinstance(input_tensor, Tensor) else concat(input_tensor, dim=-1)
    made = linear(given, weight_tensor, bias=bias_tensor, activation=fused_activation, **how)
    if not fuse_swiglu:
        return made
    gate, up = chunk(made, 2, -1)
    gated: Tensor = calling.TABLE["multiply"](gate, up, input_tensor_a_activations=["silu"])
    return gated


@op("experimental.minimal_matmul_split", more=(minimal_matmul, KEPT))
def minimal_matmul_split(input_tensor, weight_tensor, *, chunks=3, dim=-1, **how) -> list[Tensor]:
    """`minimal_matmul` in equal pieces of its width."""
    made = minimal_matmul(input_tensor, weight_tensor, **how)
    if dim not in (-1, len(made.shape) - 1) or made.shape[-1] % chunks:
        raise ArgumentError(f"ttnn.experimental.minimal_matmul_split: {chunks} pieces of dim {dim} of {made.shape}")
    return chunk(made, chunks, dim)


@op("experimental.attn_matmul")
def attn_matmul(input_tensor_a, input_tensor_b) -> Made:
    """Queries [1, H, B, K] times caches [B, 1, K, N] of every user: [1, H, B, N]."""
    return _by_user("experimental.attn_matmul", input_tensor_a, input_tensor_b)


@op("experimental.group_attn_matmul")
def group_attn_matmul(input_tensor_a, input_tensor_b) -> Made:
    """Queries [1, H, B, K] times caches [B, G, K, N] whose heads serve groups of query heads: [1, H, B, N]."""
    return _by_user("experimental.group_attn_matmul", input_tensor_a, input_tensor_b)


@op("experimental.attn_matmul_from_cache")
def attn_matmul_from_cache(input_tensor_a, input_tensor_b, *, num_tokens, transpose_hw) -> Made:
    """`attn_matmul` with the first tokens of caches [B, 1, S, D], whole tiles of them; scores if `transpose_hw`.

    Queries [1, H, B, D] give scores [1, H, B, tokens]; weights [1, H, B, tokens] give values [1, H, B, D].
    """
    name = "experimental.attn_matmul_from_cache"
    tokens = -(-num_tokens // TILE_SIZE) * TILE_SIZE
    if not 0 < tokens <= input_tensor_b.shape[2]:
        raise OperandError(f"ttnn.{name}: {num_tokens} tokens, {tokens} in whole tiles, of {input_tensor_b.shape[2]}")
    batch, heads, _, width = input_tensor_b.shape
    kept = slice_(input_tensor_b, (0, 0, 0, 0), (batch, heads, tokens, width))
    return _by_user(name, input_tensor_a, transpose(kept, 2, 3) if transpose_hw else kept)


@op("experimental.matmul_decode", more=multiply)
def matmul_decode(input_tensor_a, input_tensor_b, *, partial_width_sharded=False, **how) -> Made:
    """`matmul`; how the second operand lies on the cores changes nothing."""
    return multiply("experimental.matmul_decode", input_tensor_a, input_tensor_b, **how)


@op("clamped_silu_glu")
def clamped_silu_glu(gate, up, limit) -> Made:
    """silu(gate, at most `limit`) * (up, from -limit to limit)."""

    def gated(x: Block, y: Block) -> Block:
        return torch.nn.functional.silu(x.float().clamp(max=limit)) * y.float().clamp(-limit, limit)

    return binary("clamped_silu_glu", gated, gate, up)


def _by_user(name: str, a: Tensor, b: Tensor) -> Made:
    _, (x, y) = operands(name, a, b)
    axes, heads = len(a.grid), a.shape[1]
    if a.shape[2] != b.shape[0] or a.shape[3] != b.shape[2] or heads % b.shape[1]:
        raise OperandError(f"ttnn.{name}: {list(a.shape)} times {list(b.shape)}", fix="[1, H, B, K] and [B, G, K, N]")
    queries = x.float().transpose(axes, axes + 2).unflatten(axes + 1, (b.shape[1], -1))  # [*mesh, B, G, H / G, 1, K]
    values = (queries.squeeze(-2) @ y.float()).flatten(axes + 1, axes + 2).unsqueeze(-2).transpose(axes, axes + 2)
    cuts = rows("S(2), S(0) -> S(2)", "S(1), S(1) -> S(1)", "S(1), R -> S(1)", "R, S(3) -> S(3)")
    return make(values.contiguous(), cuts, a, b)
