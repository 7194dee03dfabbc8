"""Tokens to the devices of their experts and back, and the bookkeeping around it.

`expert_mapping_tensor` is [1, 1, experts, devices], one where a device (row-major over the mesh) has the expert; a
device's own experts are numbered in the order of their numbers. Rows that the original leaves undefined are zero.
"""

from __future__ import annotations

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.tensor import collectives as native
from meshloom.ttnn.collectives.groups import GroupCall
from meshloom.ttnn.collectives.literal import LINKS
from meshloom.ttnn.ops.block_moves import outside_capture
from meshloom.ttnn.ops.calling import Made, Optionals, op, operands
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.parts import Block, each
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import UNKNOWN, PlacementPartial


@op("all_to_all_dispatch", also=LINKS + " mode", more=GroupCall)
def all_to_all_dispatch(
    input_tensor, expert_indices_tensor, expert_mapping_tensor, *, output_tensors=None, output_concat_dim=1, **over
) -> list[Made]:
    """Tokens [B, 1, S, H] with their experts [B, 1, S, K] to the devices that have the experts.

    Each device of a group of D gets [1, B*D, S, H] (`output_concat_dim=2`: [1, B, S*D, H]), zero for tokens that chose
    none of its experts, and the experts of all tokens, [1, B*D, S, K].
    """
    name = "all_to_all_dispatch"
    dim = _row_dim(name, output_concat_dim, "output_concat_dim")
    tokens = GroupCall(name, input_tensor, **over)
    chosen = GroupCall(name, expert_indices_tensor, **over)
    owners = _owners(name, tokens, expert_mapping_tensor)
    rows, experts = (
        group.run_on(group.block.transpose(group.at(0), group.at(1)), native.all_gather, group.at(dim))
        for group in (tokens, chosen)
    )
    wanted = each(lambda some, owned: owned[some.long()].any(-1), [experts, owners], tokens.mesh.ndim)
    kept = torch.where(wanted.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype))
    label = tokens.relabel(UNKNOWN)
    outputs = list(output_tensors) if output_tensors is not None else [None, None]
    return [
        tokens.make(kept, label, output=outputs[0]),
        chosen.make(experts, chosen.label_gather(dim), output=outputs[1]),
    ]


@op("experimental.all_to_all_dispatch_metadata", also=LINKS + " mode", more=GroupCall)
def all_to_all_dispatch_metadata(
    input_tensor,
    expert_indices_tensor,
    expert_scores_tensor,
    expert_mapping_tensor,
    *,
    shared_expert_ids=None,
    output_tensors=None,
    **over,
) -> list[Made]:
    """`all_to_all_dispatch` with the scores of the experts too: tokens, experts, scores of all tokens of the group.

    Every token goes to the experts of `shared_expert_ids`, whichever it chose.
    """
    name, dim = "experimental.all_to_all_dispatch_metadata", 1
    tokens, chosen, scores = (
        GroupCall(name, each, **over) for each in (input_tensor, expert_indices_tensor, expert_scores_tensor)
    )
    owners = _owners(name, tokens, expert_mapping_tensor)
    rows, experts, weights = (
        group.run_on(group.block.transpose(group.at(0), group.at(1)), native.all_gather, group.at(dim))
        for group in (tokens, chosen, scores)
    )
    shared = torch.zeros(owners.shape[-1], dtype=torch.bool)
    shared[list(shared_expert_ids or ())] = True

    def is_wanted(some: Block, owned: Block) -> Block:
        return owned[some.long()].any(-1) | (owned & shared).any()

    wanted = each(is_wanted, [experts, owners], tokens.mesh.ndim)
    kept = torch.where(wanted.unsqueeze(-1), rows, torch.zeros((), dtype=rows.dtype))
    outputs = list(output_tensors) if output_tensors is not None else [None] * 3
    return [
        tokens.make(kept, tokens.relabel(UNKNOWN), output=outputs[0]),
        chosen.make(experts, chosen.label_gather(dim), output=outputs[1]),
        scores.make(weights, scores.label_gather(dim), output=outputs[2]),
    ]


def _row_dim(name: str, dim: int | None, argument: str) -> int:
    if dim not in (1, 2):
        raise OperandError(f"ttnn.{name}: {argument} must be 1 or 2, not {dim!r}")
    return dim


def _owners(name: str, group: GroupCall, mapping: Tensor) -> Block:
    """For every device, which experts it has: the block's parts are [experts] of bool."""
    _, (block,) = operands(name, mapping)
    axes, (experts, devices) = group.mesh.ndim, mapping.shape[-2:]
    if devices != group.mesh.size:
        raise OperandError(f"ttnn.{name}: expert_mapping_tensor is for {devices} devices of {group.mesh.size}")
    table = block.reshape(*block.shape[:axes], experts, devices)
    held = group.mesh.local_shape
    numbers = group.here(torch.arange(group.mesh.size).reshape(*group.mesh.shape, 1, 1))
    return table.expand(*held, experts, devices).gather(-1, numbers.expand(*held, experts, 1)).squeeze(-1) != 0


@op("all_to_all_combine", also=LINKS + " mode", more=GroupCall)
def all_to_all_combine(
    input_tensor, expert_metadata_tensor, expert_mapping_tensor, *, local_reduce=False, output_shard_dim=1, **over
) -> Made:
    """What experts made of tokens, [experts of the device, B*D, S, H], back to the devices of the tokens: [K, B, S, H].

    Slot k of a token is what the k-th expert that it chose made of it. With `local_reduce` a device has already summed
    what its experts made, [1, B*D, S, H]: its sum is in the slot of the first of its experts, by number, that a token
    chose; the slots of its other experts are zero. Slots of experts outside the group are zero.
    """
    name = "all_to_all_combine"
    dim = _row_dim(name, output_shard_dim, "output_shard_dim")
    group = GroupCall(name, input_tensor, **over)
    _, (metadata, mapping) = operands(name, expert_metadata_tensor, expert_mapping_tensor)
    axes = group.mesh.ndim
    gathered = group.run(native.all_gather, group.at(0))
    where = _slots(name, group, mapping, 1 if local_reduce else input_tensor.shape[0])
    position = group.here(group.position()).expand(group.mesh.local_shape)

    def combine(rows: Block, chosen: Block, table: Block, place: Block) -> Block:
        return _combine(rows, chosen, table, place, group.size, dim, local_reduce)

    found = each(combine, [gathered, metadata, where, position], axes)
    return group.make(found, group.label_scatter(dim))


def _slots(name: str, group: GroupCall, mapping: Block, held: int) -> Block:
    """For every expert the row that it has in what a group gathers, -1 if it is outside: parts are [experts].

    Groups may have experts of the same number: of rows that share the experts, each column asks its own.
    """
    axes, (experts, devices) = group.mesh.ndim, mapping.shape[-2:]
    if devices != group.mesh.size:
        raise OperandError(f"ttnn.{name}: expert_mapping_tensor is for {devices} devices of {group.mesh.size}")
    groups = _numbers(group).expand(group.mesh.shape)
    members = group.here(groups).unsqueeze(-1) == groups.flatten()  # of a device's group, [*mesh, devices]
    table = (mapping.reshape(*mapping.shape[:axes], experts, devices) != 0) & members.unsqueeze(-2)
    owner = table.long().argmax(-1)
    local = (table.long().cumsum(-2) - 1).gather(-1, owner.unsqueeze(-1)).squeeze(-1) if held > 1 else owner * 0
    position = group.position().expand(group.mesh.shape)
    return torch.where(table.any(-1), position.flatten()[owner] * held + local, torch.tensor(-1))


def _numbers(group: GroupCall) -> Block:
    """For every device the number of its group."""
    shape = [1 if axis in group.axes else size for axis, size in enumerate(group.mesh.shape)]
    return torch.arange(group.mesh.size // group.size).reshape(shape)


def _combine(
    rows: Block, chosen: Block, table: Block, place: Block, members: int, dim: int, local_reduce: bool
) -> Block:
    """One device's slots: rows are [gathered experts, B*D, S, H], chosen [1, B*D, S, K]."""
    size = rows.shape[dim] // members
    own = place * size + torch.arange(size)
    rows, chosen = rows.index_select(dim, own), chosen.index_select(dim, own)
    experts = chosen[0].long().movedim(-1, 0)  # [K, B, S]
    slot = table[experts]
    if local_reduce:  # a device's sum counts once
        slot = torch.where(_is_found_before(slot, experts), torch.tensor(-1), slot)
    index = slot.clamp_min(0).unsqueeze(-1).expand(*slot.shape, rows.shape[-1])
    return torch.where((slot >= 0).unsqueeze(-1), rows.gather(0, index), torch.zeros((), dtype=rows.dtype))


def _is_found_before(slot: Block, experts: Block) -> Block:
    """Where another slot of the token has the same row for an expert of a lower number: a device looks for its own
    experts one after the other. Of one expert that is named twice, the first slot counts.

    >>> _is_found_before(torch.tensor([7, 7, 5]), torch.tensor([1, 0, 2]))
    tensor([ True, False, False])
    """
    count = slot.shape[0]
    order = experts * count + torch.arange(count).reshape(count, *(1,) * (slot.dim() - 1))
    return ((slot.unsqueeze(1) == slot.unsqueeze(0)) & (order.unsqueeze(0) < order.unsqueeze(1))).any(1)


@op("moe_routing_remap")
def moe_routing_remap(routing_weights_tensor, non_zero_weight_size, expert_parallel_size, cluster_axis: int) -> Made:
    """Of the non-zero weights of a row, shared out in order over the devices along an axis, each keeps its own."""
    name = "moe_routing_remap"
    group = GroupCall(name, routing_weights_tensor, cluster_axis=cluster_axis)
    if group.size != expert_parallel_size:
        raise OperandError(f"ttnn.{name}: expert_parallel_size is {expert_parallel_size}, the axis has {group.size}")
    if non_zero_weight_size % expert_parallel_size:
        raise OperandError(f"ttnn.{name}: {non_zero_weight_size} weights do not divide over {expert_parallel_size}")
    share = non_zero_weight_size // expert_parallel_size
    number = (group.block != 0).long().cumsum(-1) - 1  # of the non-zero weight, from 0 on
    position = group.here(group.position())
    first = position.reshape(*position.shape, *(1,) * group.rank) * share
    mine = (group.block != 0) & (number >= first) & (number < first + share)
    found = torch.where(mine, group.block, torch.zeros((), dtype=group.block.dtype))
    # each has some of the weights, zero for the others
    return group.make(found, group.relabel(PlacementPartial()))


_ROOMS = Optionals("optional_output_mapping_tensor optional_output_reduced_tensor")


@op("moe_expert_token_remap", more=_ROOMS)
def moe_expert_token_remap(
    topk_tensor, expert_mapping_tensor, expert_metadata_tensor, *, reduction_size=16, **rooms
) -> list[Made]:
    """The weights [1, B, S, experts] of tokens for a device's own experts, [1, B, S, own], zero where not chosen.

    The second result is [1, 1, ceil(B*S / reduction_size), own]: one where some token of a run chose the expert.
    """
    name = "moe_expert_token_remap"
    if reduction_size < 1:
        raise ArgumentError(f"ttnn.{name}: reduction_size={reduction_size}")
    group = GroupCall(name, topk_tensor)
    owned = _owners(name, group, expert_mapping_tensor)
    own = _count_own(name, expert_mapping_tensor.block)
    _, (metadata,) = operands(name, expert_metadata_tensor)

    def local(weights: Block, chosen: Block, mine: Block) -> tuple[Block, Block]:
        return _local_weights(weights, chosen, mine, own, reduction_size)

    weights, active = each(local, [group.block, metadata, owned], group.mesh.ndim)
    label = group.label_scatter(group.rank - 1)
    rows, (first, second) = Layout.ROW_MAJOR, _ROOMS(rooms)
    return [
        group.make(weights, label, layout=rows, output=first),
        group.make(active, label, dtype=DataType.UINT16, layout=rows, output=second),
    ]


def _count_own(name: str, mapping: Block) -> int:
    """How many experts a device has. In a capture it is what the mapping says now."""
    with outside_capture(mapping):
        counts = set((mapping != 0).sum(-2).flatten().tolist())
    if len(counts) != 1:
        raise OperandError(f"ttnn.{name}: devices have {sorted(counts)} experts", fix="give all of them equally many")
    return int(counts.pop())


def _local_weights(weights: Block, chosen: Block, mine: Block, own: int, run: int) -> tuple[Block, Block]:
    """One device's experts: weights [1, B, S, E], chosen [1, B, S, K], mine [E]."""
    experts = torch.argsort(mine.long(), descending=True, stable=True)[:own]
    picked = (chosen.unsqueeze(-1) == experts).any(-2)  # [1, B, S, own]
    found = torch.where(picked, weights.index_select(-1, experts), torch.zeros((), dtype=weights.dtype))
    flat = picked.reshape(1, 1, -1, own)
    missing = -flat.shape[2] % run
    padded = torch.nn.functional.pad(flat.to(torch.int32), (0, 0, 0, missing))
    runs = torch.unflatten(padded, 2, (-1, run))
    return found, runs.amax(3)
