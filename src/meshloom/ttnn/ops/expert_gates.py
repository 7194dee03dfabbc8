"""Which experts a token goes to, and with which weights.

Scores are [..., tokens, experts] of one device; weights and numbers of experts are [..., tokens, chosen]. Every token
is decided on its own, so labels keep every dim but that of the experts.
"""

from __future__ import annotations

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.nn.routing import SCORES, choose
from meshloom.ttnn.ops.block_moves import inside, spread, take_rows
from meshloom.ttnn.ops.calling import Made, make, op, operands
from meshloom.ttnn.ops.topologies import moves, rows
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.padding import real_places
from meshloom.ttnn.tensor.parts import Block, aligned
from meshloom.ttnn.tensor.tensor import Tensor

Places = tuple[int | None, ...]


def _but_last(tensor: Tensor) -> Places:
    return (*range(len(tensor.shape) - 1), None)


@op("moe")
def moe(input_tensor, expert_mask_tensor, topk_mask_tensor, k=32) -> Made:
    """The weight of expert 0 for every token: softmax(the k best of scores + expert_mask, + topk_mask), [..., 1].

    It is zero where expert 0 is not among the best.
    """
    given = (input_tensor, expert_mask_tensor, topk_mask_tensor)
    blocks = [block.float() for block in operands("moe", *given)[1]]
    axes, rank = len(input_tensor.grid), len(input_tensor.shape)
    scores, mask, kept = (aligned(block, axes, rank) for block in blocks)
    values, numbers = (scores + mask).topk(k, -1)
    weights = (values + kept[..., :k]).softmax(-1)
    found = torch.where(numbers == 0, weights, 0).sum(-1, keepdim=True)
    broadcast = [
        tuple(at if size != 1 else None for at, size in enumerate(each.shape[:-1], rank - len(each.shape)))
        for each in given[1:]
    ]
    return make(found, moves(_but_last(input_tensor), *((*each, None) for each in broadcast), linear=False), *given)


def _score(name: str, function: str, block: Block) -> Block:
    if function not in SCORES:
        raise ArgumentError(f"ttnn.{name}: score_func={function!r}", fix=" or ".join(map(repr, SCORES)))
    scores: Block = SCORES[function](block.float())
    return scores


def _choose(
    name: str,
    scores,
    bias,
    *,
    n_groups: int = 8,
    summed_experts_per_group: int = 2,
    topk_groups: int = 4,
    n_activated_experts=8,
    route_scale=1.0,
    epsilon=1e-20,
    score_func="sigmoid",
    stable_sort=False,
) -> list[Made]:
    _, (block, added) = operands(name, scores, bias)
    axes, rank, experts = len(scores.grid), len(scores.shape), scores.shape[-1]
    if experts % n_groups or topk_groups > n_groups or n_activated_experts > experts // n_groups * topk_groups:
        raise OperandError(
            f"ttnn.{name}: {n_activated_experts} experts of {topk_groups} of {n_groups} groups of {experts} experts"
        )
    plain = _score(name, score_func, block)
    biased = plain + aligned(added.float(), axes, rank)
    plain = plain.expand(biased.shape)
    numbers = choose(biased, n_activated_experts, n_groups, topk_groups, summed_experts_per_group, stable_sort)
    broadcast: Places = tuple(
        at if size != 1 else None for at, size in enumerate(bias.shape[:-1], rank - len(bias.shape))
    )
    return _weigh(plain, numbers, (scores, bias), (*broadcast, None), route_scale, epsilon)


def _weigh(
    scores: Block, numbers: Block, given: tuple[Tensor, ...], second: Places, scale: float, epsilon: float
) -> list[Made]:
    """The scores of the experts that were chosen, over their sum, and the numbers of the experts."""
    weights = scores.gather(-1, numbers)
    weights = weights / (weights.sum(-1, keepdim=True) + epsilon) * scale
    rule = moves(_but_last(given[0]), second, *(((None,) * len(each.shape)) for each in given[2:]), linear=False)
    first, last = make(weights, rule, *given), make(numbers, rule, *given)
    last.dtype = DataType.UINT16
    return [first, last]


@op("experimental.deepseek_grouped_gate", more=_choose)
def deepseek_grouped_gate(scores, bias, **how) -> list[Made]:
    """Weights and numbers of the best experts of the best groups.

    A group is as good as the sum of its best sigmoid(score) + bias. The weights are sigmoid(score) of those chosen,
    over their sum, times `route_scale`.
    """
    return _choose("experimental.deepseek_grouped_gate", scores, bias, **how)


@op("experimental.deepseek_prefill.moe_grouped_topk", more=_choose, refuses="padding_config biased_scores")
def moe_grouped_topk(scores, bias, *, weights_layout=Layout.TILE, **how) -> list[Made]:
    """`deepseek_grouped_gate` with a function of scores; equal scores go to the lower number with `stable_sort`."""
    found = _choose("experimental.deepseek_prefill.moe_grouped_topk", scores, bias, **how)
    found[0].layout = weights_layout
    return found


@op("experimental.deepseek_prefill.moe_hash_gate", refuses="padding_config")
def moe_hash_gate(
    scores, input_ids, tid2eid, *, n_activated_experts, route_scale=1.0, epsilon=1e-20, score_func="sqrtsoftplus"
) -> list[Made]:
    """Experts by the number of a token, from the table `tid2eid`, and their scores over the sum of them as weights."""
    name = "experimental.deepseek_prefill.moe_hash_gate"
    given = (scores, input_ids, tid2eid)
    _, (block, tokens, table) = operands(name, *given)
    axes, count = len(scores.grid), scores.shape[-2]
    lines = table.reshape(*table.shape[:axes], -1, table.shape[-1])
    flat = tokens.flatten(axes)
    if flat.shape[-1] != count or n_activated_experts > table.shape[-1]:
        raise OperandError(
            f"ttnn.{name}: scores {list(scores.shape)}, tokens {list(input_ids.shape)}, table {list(tid2eid.shape)}"
        )
    inside(name, flat, lines.shape[axes], "token")
    numbers = take_rows(lines, flat, axes)[..., :n_activated_experts].long()
    numbers = numbers.reshape(*numbers.shape[:axes], *(1,) * (len(scores.shape) - 2), count, -1)
    plain, chosen = spread([_score(name, score_func, block), numbers], axes)
    token = len(scores.shape) - 2
    places: Places = tuple(token if size == count else None for size in input_ids.shape)
    rule = moves((*(None,) * token, token, None), places, (None,) * len(tid2eid.shape), linear=False)
    weights = plain.gather(-1, chosen.expand(*plain.shape[:-1], n_activated_experts))
    first = make(weights / (weights.sum(-1, keepdim=True) + epsilon) * route_scale, rule, *given)
    last = make(chosen.expand(weights.shape).contiguous(), rule, *given)
    last.dtype = DataType.UINT16
    return [first, last]


@op("experimental.deepseek_prefill.masked_bincount")
def masked_bincount(input_tensor, expert_mask, n_routed_experts, num_experts_per_token) -> Made:
    """How often every expert was chosen, [experts], of [tokens, chosen]; zero for experts that the mask leaves out."""
    name = "experimental.deepseek_prefill.masked_bincount"
    _, (block, mask) = operands(name, input_tensor, expert_mask)
    axes = len(input_tensor.grid)
    if input_tensor.shape[-1] < num_experts_per_token:
        raise OperandError(f"ttnn.{name}: {num_experts_per_token} experts a token, and {list(input_tensor.shape)}")
    inside(name, block[..., :num_experts_per_token], n_routed_experts, "expert")
    real = real_places(input_tensor, range(len(input_tensor.shape) - 1))
    ones = torch.ones_like(block[..., :num_experts_per_token], dtype=torch.int64)
    counted = ones if real is None else ones * real
    chosen, counted = spread([block[..., :num_experts_per_token].long(), counted], axes)
    flat = counted.new_zeros(*chosen.shape[:axes], n_routed_experts).scatter_add(
        -1, chosen.flatten(axes), counted.flatten(axes)
    )
    kept = mask.flatten(axes)[..., :n_routed_experts] != 0
    cuts = [f"S({dim}), R -> P(sum)" for dim in range(len(input_tensor.shape) - 1)]
    made = make(torch.where(kept, flat, 0), rows(*cuts), input_tensor, expert_mask, filled=True)
    made.dtype, made.layout = DataType.UINT32, Layout.ROW_MAJOR
    return made


@op("experimental.topk_large_indices", refuses="valid_end_tensor", instead="valid_length_tensor=")
def topk_large_indices(input_tensor, *, k, valid_length=None, valid_length_tensor=None, valid_length_offset=0) -> Made:
    """Where the k largest elements of every row are, largest first; only the first `valid_length` of a row count."""
    name = "experimental.topk_large_indices"
    given = [input_tensor] if valid_length_tensor is None else [input_tensor, valid_length_tensor]
    _, (block, *told) = operands(name, *given)
    axes, size = len(input_tensor.grid), input_tensor.shape[-1]
    length: Block | int = size if valid_length is None else valid_length
    if told:
        first = told[0].flatten(axes)[..., :1]
        length = first.reshape(*first.shape[:axes], *(1,) * len(input_tensor.shape)) + valid_length_offset
    if not 1 <= k <= (size if isinstance(length, torch.Tensor) else min(size, length)):
        raise OperandError(f"ttnn.{name}: k={k} of the first {length} of {size} elements")
    counted = block.float().masked_fill(~(torch.arange(size) < length), -torch.inf)
    found = counted.topk(k, -1).indices
    rule = moves(_but_last(input_tensor), *((None,) * len(each.shape) for each in given[1:]), linear=False)
    made = make(found, rule, *given)
    made.dtype, made.layout = DataType.UINT32, Layout.ROW_MAJOR
    return made
