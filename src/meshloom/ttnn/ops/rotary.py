"""Rotary position embeddings: x * cos + turned(x) * sin.

What is turned are the halves of a head or, by a matrix of one tile, its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.ops.calling import Made, compute, make, op, operands, result, shared_coords
from meshloom.ttnn.ops.matmul import multiply_blocks
from meshloom.ttnn.ops.topologies import LINEAR, rows, topology_of
from meshloom.ttnn.tensor.formats import Layout
from meshloom.ttnn.tensor.parts import Block, aligned
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology


def turned_halves(x: Block) -> Block:
    """(-second half, first half) of the last dim.

    >>> turned_halves(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    tensor([-3., -4.,  1.,  2.])
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _turn(x: Block, turned: Block, cos: Block, sin: Block) -> Block:
    if not x.dim() == cos.dim() == sin.dim():
        raise OperandError("angles have another rank than what they turn", fix="ttnn.unsqueeze_to_4D(cos)")
    return x.float() * cos.float() + turned.float() * sin.float()


def _label(tensors: Sequence[Tensor], by_position: bool = False) -> TensorTopology:
    """As the first operand, with the same angles on all devices or angles that are cut with it; terms stay terms.

    Angles `by_position` have to be cut where the sequence is: a device takes those from the start.
    """
    rank, matrix = len(tensors[0].shape), ", R" * (len(tensors) - 3)
    cuts = [f"S({dim}), S({dim}), S({dim}){matrix} -> S({dim})" for dim in range(rank)]
    cuts += [f"{at}, R, R{matrix} -> {at}" for at in ("P(sum)", *(f"S({d})" for d in range(rank)))]
    if by_position:
        cuts.remove(f"S({rank - 2}), R, R{matrix} -> S({rank - 2})")
    return topology_of(rows(*cuts, exact=True), *tensors)


@op("experimental.rotate_half")
def rotate_half(input) -> Made:
    """(-second half, first half) of the last dim."""
    _, (block,) = operands("experimental.rotate_half", input)
    if input.shape[-1] % 2:
        raise OperandError(f"ttnn.experimental.rotate_half: a width of {input.shape[-1]} has no halves")
    return make(turned_halves(block), LINEAR, input)


@op("experimental.rotary_embedding")
def rotary_embedding(input_tensor, cos_cache, sin_cache, token_index=None) -> Made:
    """Rotate halves of [.., S, D] by caches [1, 1, S or more, D]: position by position, or all by one token's angle.

    The rows that fill up the last tile are part of the result, as zeros: S is a multiple of 32.
    """
    name = "experimental.rotary_embedding"
    tensors = (input_tensor, cos_cache, sin_cache)
    x, cos, sin = operands(name, *tensors)[1]
    first, count = (0, input_tensor.shape[-2]) if token_index is None else (token_index, 1)
    if first < 0 or first + count > cos_cache.shape[-2]:
        raise OperandError(
            f"ttnn.{name}: positions {first} to {first + count - 1} of a cache of {cos_cache.shape[-2]}",
            fix="a longer cache",
        )
    angles = (each[..., first : first + count, :] for each in (cos, sin))
    values = _turn(x, turned_halves(x), *angles)
    if input_tensor.layout is Layout.TILE:
        missing = -values.shape[-2] % input_tensor.tile.tile_shape[0]
        values = torch.nn.functional.pad(values, (0, 0, 0, missing)) if missing else values
    return Made(values, input_tensor, _label(tensors, token_index is None), coords=shared_coords(*tensors))


@op("experimental.rotary_embedding_hf")
def rotary_embedding_hf(input_tensor, cos_cache, sin_cache, *, is_decode_mode=False) -> Made:
    """Rotate halves of [B, H, S, D] position by position, or of [1, B, H, D] with angles [1, B, 1, D] by user."""
    return _rotate("experimental.rotary_embedding_hf", (input_tensor, cos_cache, sin_cache), is_decode_mode)


@op("experimental.rotary_embedding_llama")
def rotary_embedding_llama(input_tensor, cos_cache, sin_cache, trans_mat, *, is_decode_mode=False) -> Made:
    """Rotate by a matrix that turns 32 elements: [1, H, S, D] position by position, or [1, B, H, D] by user."""
    tensors = (input_tensor, cos_cache, sin_cache, trans_mat)
    return _rotate("experimental.rotary_embedding_llama", tensors, is_decode_mode)


def _rotate(name: str, tensors: Sequence[Tensor], by_user: bool) -> Made:
    operands(name, *tensors)
    axes, count = len(tensors[0].grid), 1 if by_user else tensors[0].shape[-2]
    if tensors[1].shape[-2] < count:
        raise OperandError(f"{count} positions and a cache of {tensors[1].shape[-2]}", fix="a longer cache")

    def kernel(x: Block, cos: Block, sin: Block, *matrix: Block) -> Block:
        x = x.float()
        turned = _turned_by(x, matrix[0], axes) if matrix else turned_halves(x)
        if cos.shape[-2] != count or sin.shape[-2] != count:
            cos, sin = cos.narrow(-2, 0, count), sin.narrow(-2, 0, count)
        return _turn(x, turned, cos, sin)

    return compute(kernel, tensors, _label(tensors, not by_user))


@op("experimental.rotary_embedding_llama_fused_qk")
def rotary_embedding_llama_fused_qk(
    q_input_tensor, k_input_tensor, cos_cache, sin_cache, trans_mat
) -> tuple[Tensor, Tensor]:
    """Queries and keys of one token of every user; angles are [1, B, 1, D], or [1, 2 * B, 1, D] with the keys' last."""
    made = []
    for number, tensor in enumerate((q_input_tensor, k_input_tensor)):
        tensors = (tensor, cos_cache, sin_cache, trans_mat)
        x, cos, sin, matrix = operands("experimental.rotary_embedding_llama_fused_qk", *tensors)[1]
        users = tensor.shape[1]
        first = users * number if cos_cache.shape[1] >= 2 * users else 0
        angles = (each[..., first : first + users, :1, :] for each in (cos, sin))
        values = _turn(x, _turned_by(x, matrix, len(cos_cache.grid)), *angles)
        made.append(result(values, tensor, topology=_label(tensors), coords=shared_coords(*tensors)))
    return made[0], made[1]


def _turned_by(x: Block, matrix: Block, axes: int) -> Block:
    """Every piece of the last dim times the matrix; a matrix repeated for each core is the first of them."""
    side = matrix.shape[-1]
    if x.shape[-1] % side:
        raise OperandError(f"a head of {x.shape[-1]} does not divide into pieces of {side}, the matrix's width")
    pieces = x.float().reshape(*x.shape[:-1], -1, side)
    first = matrix if matrix.shape[-2] == side else matrix.narrow(-2, 0, side)
    one = aligned(first.float(), axes, pieces.dim() - axes)
    return multiply_blocks(pieces, one).reshape(x.shape)
