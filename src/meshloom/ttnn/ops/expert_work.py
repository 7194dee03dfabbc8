"""What experts do with the tokens that were sent to them: rows of a buffer, a feed-forward net, weighted sums.

A buffer [..., rows, H] holds the tokens of a device's experts one after the other. `start` and `counts` say for every
expert of the model where its rows begin and how many they are; the table says which experts the device has.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from meshloom.errors import OperandError, UnsupportedError
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.ops.block_moves import spread
from meshloom.ttnn.ops.calling import Made, Optionals, make, op, operands
from meshloom.ttnn.ops.reductions import reduce
from meshloom.ttnn.ops.topologies import einsum, moves, rows, same
from meshloom.ttnn.tensor.formats import Layout
from meshloom.ttnn.tensor.parts import Block, aligned
from meshloom.ttnn.tensor.tensor import Tensor

__all__ = ["RoutedExpertActivation"]

# rows of a buffer


def _region(name: str, expert: int, told: Sequence[Block], axes: int) -> tuple[Block, Block]:
    """Where the rows of one of a device's experts begin, and how many they are: shape of the mesh axes."""
    flat = [each.long().flatten(axes) for each in told]  # starts, counts, the table
    if not 0 <= expert < flat[2].shape[-1]:
        raise OperandError(f"ttnn.{name}: expert {expert} of {flat[2].shape[-1]}")
    first, many, numbers = spread(flat, axes)
    number = numbers[..., expert : expert + 1]
    return first.gather(-1, number).squeeze(-1), many.gather(-1, number).squeeze(-1)


def _columns(*tensors: Tensor) -> tuple[str, ...]:
    """Buffers are cut at their columns at most: what a device has of rows is its own."""
    last = len(tensors[0].shape) - 1
    return (f"S({last}){', R' * (len(tensors) - 1)} -> S({last})",)


@op("experimental.deepseek_prefill.extract")
def extract(
    global_tensor, start: Tensor, counts, global_expert_idx_table, *, local_expert_id, max_dispatched_tokens_per_expert
) -> Made:
    """The rows of one expert, [..., max tokens, H]; zeros behind them."""
    name = "experimental.deepseek_prefill.extract"
    given = (global_tensor, start, counts, global_expert_idx_table)
    _, (block, *told) = operands(name, *given)
    axes = len(global_tensor.grid)
    first, many = _region(name, local_expert_id, told, axes)
    place = torch.arange(max_dispatched_tokens_per_expert)
    found = _take(block, first.unsqueeze(-1) + place, axes)
    kept = (place < many.unsqueeze(-1)).reshape(*many.shape, *(1,) * (len(global_tensor.shape) - 2), -1, 1)
    return make(torch.where(kept, found, 0), rows(*_columns(*given)), *given)


def _take(block: Block, index: Block, axes: int) -> Block:
    """Rows of the last but one dim by number, every device its own."""
    block, index = spread([block, index.clamp(max=block.shape[-2] - 1)], axes)
    wide = index.reshape(*index.shape[:axes], *(1,) * (block.dim() - axes - 2), -1, 1)
    return block.gather(-2, wide.expand(*block.shape[:-2], -1, block.shape[-1]))


@op("experimental.deepseek_prefill.insert")
def insert(global_tensor, local_tensor, start: Tensor, counts, global_expert_idx_table, *, local_expert_id) -> Made:
    """The rows of one expert put back where `extract` took them from, in place."""
    name = "experimental.deepseek_prefill.insert"
    given = (global_tensor, local_tensor, start, counts, global_expert_idx_table)
    _, (block, rows_of, *told) = operands(name, *given)
    axes, size = len(global_tensor.grid), global_tensor.shape[-2]
    first, many = _region(name, local_expert_id, told, axes)
    place = torch.arange(size) - first.unsqueeze(-1)
    mine = (place >= 0) & (place < many.unsqueeze(-1)) & (place < local_tensor.shape[-2])
    taken = _take(rows_of, place.clamp(0, local_tensor.shape[-2] - 1), axes)
    kept = mine.reshape(*mine.shape[:axes], *(1,) * (len(global_tensor.shape) - 2), -1, 1)
    last = len(global_tensor.shape) - 1
    cuts = (f"S({last}), S({len(local_tensor.shape) - 1}), R, R, R -> S({last})",)
    return make(torch.where(kept, taken.to(block.dtype), block), rows(*cuts), *given).into(global_tensor)


# the net of an expert


@op("experimental.deepseek_prefill.routed_expert_ffn")
def routed_expert_ffn(x, gate_proj, up_proj, down_proj) -> Made:
    """(silu(x @ gate) * (x @ up)) @ down."""
    name = "experimental.deepseek_prefill.routed_expert_ffn"
    given = (x, gate_proj, up_proj, down_proj)
    blocks = [block.float() for block in operands(name, *given)[1]]
    axes, rank = len(x.grid), len(x.shape)
    found = _feed(*(aligned(each, axes, rank) for each in blocks))
    first, second, third = (len(each.shape) - 1 for each in given[1:])
    cuts = [f"S({d}), R, R, R -> S({d})" for d in range(rank - 1)]
    cuts.append(f"R, S({first}), S({second}), S({third - 1}) -> P(sum)")  # the inner width
    cuts.append(f"R, R, R, S({third}) -> S({rank - 1})")
    return make(found, rows(*cuts, exact=True), *given)


def _feed(x: Block, gate: Block, up: Block, down: Block) -> Block:
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


class RoutedExpertActivation(Choice):
    """What an expert does with its gate; of the gates with limits we know no description of the limits."""

    Silu = enum.auto()
    ClampedSiluGlu = enum.auto()
    SituGlu = enum.auto()
    SwiGluOai = enum.auto()


_SILU = RoutedExpertActivation.Silu


def _experts(
    *, gate_projs, up_projs, down_projs, max_dispatched_tokens_per_expert
) -> tuple[list[tuple[Tensor, ...]], int]:
    """The weights of every expert, and how many rows of the buffer it has at most."""
    return list(zip(gate_projs, up_projs, down_projs, strict=True)), max_dispatched_tokens_per_expert


_OPEN = Optionals("gate_biases up_biases down_biases", min_active_tokens=0, max_active_tokens=4294967295)


@op("experimental.deepseek_prefill.unified_routed_expert_moe", more=(_experts, _OPEN))
def unified_routed_expert_moe(
    dispatched_buffer, expert_region_offsets, expert_token_counts, global_expert_idx_table, *, activation=_SILU, **how
) -> Made:
    """`routed_expert_ffn` of every expert of a device on its own rows of the buffer; zeros in rows of no expert."""
    name = "experimental.deepseek_prefill.unified_routed_expert_moe"
    *biases, least, most = _OPEN(how)
    if activation is not _SILU or any(biases) or (least, most) != (0, 4294967295):
        raise UnsupportedError(f"ttnn.{name}: silu without biases for any number of tokens is what is covered")
    told = (expert_region_offsets, expert_token_counts, global_expert_idx_table)
    weights, limit = _experts(**how)
    given = (dispatched_buffer, *told, *(each for three in weights for each in three))
    _, (block, *blocks) = operands(name, *given)
    axes, rank, size = len(dispatched_buffer.grid), len(dispatched_buffer.shape), dispatched_buffer.shape[-2]
    found = block.new_zeros(()).float()
    for expert in range(len(weights)):
        first, many = _region(name, expert, blocks[:3], axes)
        place = torch.arange(size) - first.unsqueeze(-1)
        mine = (place >= 0) & (place < many.clamp(max=limit).unsqueeze(-1))
        rows_of = _take(block.float(), (first.unsqueeze(-1) + _up_to(limit, size)), axes)
        three = (aligned(each.float(), axes, rank) for each in blocks[3 + 3 * expert : 6 + 3 * expert])
        made = _take(_feed(rows_of, *three), place.clamp(0, rows_of.shape[-2] - 1), axes)
        kept = mine.reshape(*mine.shape[:axes], *(1,) * (rank - 2), -1, 1)
        found = torch.where(kept, made, found)
    inner = ", ".join(
        "S({}), S({}), S({})".format(*(len(each.shape) - at for each, at in zip(three, (1, 1, 2), strict=True)))
        for three in weights
    )
    return make(found, rows(f"R, R, R, R, {inner} -> P(sum)", exact=True), *given)


def _up_to(count: int, size: int) -> Block:
    return torch.arange(min(count, size))


# sums


@op("experimental.deepseek_prefill.post_combine_reduce")
def post_combine_reduce(combine_output, weights, indices=None, expert_dispatch_table=None, *, expert_dim=3) -> Made:
    """The weighted sum of what a token's experts made, [..., chosen, H] with weights [..., chosen]: [..., H]."""
    name = "experimental.deepseek_prefill.post_combine_reduce"
    if indices is not None or expert_dispatch_table is not None:
        raise UnsupportedError(f"ttnn.{name}: experts that were not sent are not covered", fix="give weights of zero")
    _, (block, factors) = operands(name, combine_output, weights)
    axes, rank = len(combine_output.grid), len(combine_output.shape)
    dim = expert_dim % rank
    shape = tuple(combine_output.shape[: dim + 1])
    if dim != rank - 2 or factors[(0,) * axes].numel() != torch.Size(shape).numel():
        raise OperandError(
            f"ttnn.{name}: expert_dim {expert_dim} of {list(combine_output.shape)}, weights {list(weights.shape)}"
        )
    factor = factors.float().reshape(*factors.shape[:axes], *shape, 1)
    found = (block.float() * factor).sum(-2)
    cuts = [f"S({d}), S({d}) -> S({d})" for d in range(dim)] if tuple(weights.shape[: dim + 1]) == shape else []
    cuts += [f"S({rank - 1}), R -> S({rank - 2})", "P(sum), R -> P(sum)"]
    cuts += [f"S({dim}), S({dim}) -> P(sum)"] if cuts[0].startswith("S(0)") else []
    return make(found, rows(*cuts), combine_output, weights)


def _pieces(name: str, tensor: Tensor, dim: int, sizes: Sequence[int]) -> list[Made]:
    """The sum over a dim, in pieces of its width."""
    made = reduce(name, lambda x, dims, keep: x.sum(dims, keep), "sum", tensor, dim, True)
    if sum(sizes) != tensor.shape[-1] or min(sizes) < 1:
        raise OperandError(f"ttnn.{name}: a width of {tensor.shape[-1]} in pieces of {list(sizes)}")
    whole = made.tensor()
    kept = (*range(len(tensor.shape) - 1), None)
    return [make(piece.contiguous(), moves(kept), whole) for piece in whole.block.split(list(sizes), -1)]


@op("experimental.fast_reduce_nc_split")
def fast_reduce_nc_split(input, *, dim, split_output_width) -> tuple[Made, Made]:
    """The sum over a dim, which is kept with size 1, in two pieces: so many columns, and the others."""
    sizes = (split_output_width, input.shape[-1] - split_output_width)
    first, second = _pieces("experimental.fast_reduce_nc_split", input, dim, sizes)
    return first, second


@op("experimental.deepseek_moe_fast_reduce_nc")
def deepseek_moe_fast_reduce_nc(input_tensor, dim, *, split_size) -> list[Made]:
    """The sum over a dim, which is kept with size 1, in pieces of `split_size` columns."""
    sizes = [split_size] * (input_tensor.shape[-1] // split_size)
    return _pieces("experimental.deepseek_moe_fast_reduce_nc", input_tensor, dim, sizes)


@op("experimental.deepseek_prefill.attn_res_weighted_reduce_nc")
def attn_res_weighted_reduce_nc(input, weight, *, dim=1) -> Made:
    """The sum of input * weight over a dim, which is kept with size 1."""
    name = "experimental.deepseek_prefill.attn_res_weighted_reduce_nc"
    _, (block, factor) = operands(name, input, weight)
    rank = len(input.shape)
    if len(weight.shape) != rank:
        raise OperandError(
            f"ttnn.{name}: a weight {list(weight.shape)} for {list(input.shape)}", fix="of the same rank"
        )
    at = dim % rank
    found = (block.float() * factor.float()).sum(at - rank, keepdim=True)
    letters = "abcdefg"[:rank]
    second = "".join(each if size != 1 else "." for each, size in zip(letters, weight.shape, strict=True))
    out = letters[:at] + "." + letters[at + 1 :]
    both = (einsum(f"{letters}, {each} -> {out}", 0, 1) for each in dict.fromkeys((letters, second)))
    return make(found, tuple(row for found_rows in both for row in found_rows), input, weight)


@op("experimental.deepseek_moe_post_combine_tilize")
def deepseek_moe_post_combine_tilize(input_tensor) -> Made:
    """The same values in tiles."""
    name = "experimental.deepseek_moe_post_combine_tilize"
    _, (block,) = operands(name, input_tensor)
    made = make(block.clone(), moves(same(input_tensor)), input_tensor)
    made.layout = Layout.TILE
    return made
