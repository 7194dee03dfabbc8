"""Attention of sequences that lie on the devices of a group: every device has some queries and sees all keys.

Hardware passes keys and values round a ring while it works; here they are gathered first, and the values are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError, UnsupportedError
from meshloom.ttnn.collectives.groups import GroupCall
from meshloom.ttnn.collectives.literal import gather_along
from meshloom.ttnn.ops.attending import attend, attention_topology, within
from meshloom.ttnn.ops.block_moves import spread
from meshloom.ttnn.ops.calling import Made, Optionals, op, operands, register, shared_coords
from meshloom.ttnn.ops.transformer import check
from meshloom.ttnn.tensor.boxes import take_box
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import UNKNOWN, PlacementShard

Results = tuple[Made, Made | None, Made]


def _joint(
    name: str,
    own: Sequence[Tensor],
    joint: Sequence[Tensor | None],
    *,
    persistent_output_buffer_k: Tensor | None = None,
    persistent_output_buffer_v: Tensor | None = None,
    joint_strategy="rear",
    logical_n: int | Tensor,
    scale=None,
    dim=2,
    is_causal=False,
    **over: Any,
) -> Results:
    """Queries of every device over all keys of its group, then over those of a second sequence that all devices have.

    The results of both, and the logarithms of their sums of exponentials, [B, H, S + L, 1].
    """
    if joint_strategy != "rear":
        raise ArgumentError(f"ttnn.{name}: joint_strategy={joint_strategy!r}", fix="'rear'")
    q, k, v = own
    check(name, q, k, v, q.shape[1])
    if dim % 4 != 2:
        raise OperandError(f"ttnn.{name}: dim {dim} of {list(k.shape)} is not the sequence", fix="dim=2")
    second = [each for each in joint if each is not None]
    if len(second) not in (0, 3) or (is_causal and second):
        raise OperandError(f"ttnn.{name}: {len(second)} joint tensors", fix="all three, and none if is_causal")
    operands(name, *own, *second)
    group, rooms = GroupCall(name, q, **over), (persistent_output_buffer_k, persistent_output_buffer_v)
    whole = [
        gather_along(GroupCall(name, each, **over), 2).tensor(output=room)
        for each, room in zip((k, v), rooms, strict=True)
    ]
    count = _count(logical_n)
    if not 0 < count <= whole[0].shape[2]:
        raise OperandError(f"ttnn.{name}: logical_n={count} of {whole[0].shape[2]} keys", fix="what the group holds")
    axes, length = len(q.grid), q.shape[2]
    keys, values = (each.block[..., :count, :] for each in whole)
    queries, seen = q.block, None
    if is_causal:
        first = group.here(group.position()) * length
        rows = first.reshape(*first.shape, *(1,) * 4) + torch.arange(length).unsqueeze(-1)
        seen = within(torch.arange(count), rows, None)
    if second:
        queries, keys, values = (
            torch.cat(spread(pair, axes), -2)
            for pair in zip((queries, keys, values), (each.block for each in second), strict=True)
        )
    found = attend(queries, keys, values, axes, scale=scale, seen=seen)
    weight = _log_sums(queries, keys, q.shape[-1] ** -0.5 if scale is None else scale, seen)
    tensors = (q, *whole, *second)
    label, coords = attention_topology(tensors), shared_coords(*tensors)
    made = Made(found[..., :length, :].contiguous(), q, label, coords=coords)
    logs = attention_topology((q, whole[0], whole[0], *second))  # without the values
    if second:  # behind the rows of every device are those of the joint sequence
        logs = logs.with_placements([UNKNOWN if each == PlacementShard(2) else each for each in logs.placements()])
    sums = Made(weight, q, logs, coords=coords)
    if not second:
        return made, None, sums
    rest = attention_topology((second[0], *whole, *second[1:]))
    return made, Made(found[..., length:, :].contiguous(), second[0], rest, coords=coords), sums


def _count(given: int | Tensor) -> int:
    return int(given.block.flatten()[0]) if isinstance(given, Tensor) else given


def _log_sums(q: Block, k: Block, scale: float, seen: Block | None) -> Block:
    """log(sum(exp(q @ k.T * scale))) over the keys that are seen, [*mesh, B, H, S, 1]."""
    heads = k.float().repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = q.float() @ heads.transpose(-1, -2) * scale
    if seen is not None:
        logits = logits.masked_fill(~seen, -torch.inf)
    return logits.logsumexp(-1, keepdim=True)


UNCOVERED = """logical_l is_balanced is_cross kv_cache_batch_idx kv_actual_isl attention_sink sliding_window_size
    circular_kv_cache persistent_output_buffer_joint_k persistent_output_buffer_joint_v slot_id kv_actual_isl_tensor
    kv_cache_num_layers kv_cache_layer_idx kv_valid_end_tensor"""


def _register_joint(name: str, doc: str, **how: Any) -> None:
    def call(
        input_tensor_q,
        input_tensor_k,
        input_tensor_v,
        joint_tensor_q=None,
        joint_tensor_k=None,
        joint_tensor_v=None,
        **options: Any,
    ) -> Results:
        own, joint = (input_tensor_q, input_tensor_k, input_tensor_v), (joint_tensor_q, joint_tensor_k, joint_tensor_v)
        return _joint(f"transformer.{name}", own, joint, **options)

    register(f"transformer.{name}", doc, call, also="mode", more=(_joint, GroupCall), **how)


_register_joint(
    "ring_joint_scaled_dot_product_attention",
    """`joint_scaled_dot_product_attention` of a sequence that lies on a group: the first `logical_n` keys of it, and
    then those of the joint sequence, which all devices have. Causal by the place in the whole sequence.""",
    refuses=UNCOVERED,
    instead="ttnn.all_gather, then attention",
)
_register_joint(
    "exp_ring_joint_scaled_dot_product_attention", "`ring_joint_scaled_dot_product_attention` without a mask."
)


_PAGES = Optionals("page_table chunk_start_idx")


@op("transformer.ring_distributed_scaled_dot_product_attention", more=_PAGES)
def ring_distributed_scaled_dot_product_attention(
    input_tensor_q, input_tensor_k, input_tensor_v, ring_size, ring_id=None, *, scale=None, **pages
) -> Made:
    """Causal attention of queries, keys and values that all devices have, for an equal share of the queries each.

    Of 2 * ring_size chunks, device r has the r-th from the start and the r-th from the end: [B, H, S / ring_size, D].
    Without `ring_id`, r is the device's place along the mesh axis of that size.
    """
    name = "transformer.ring_distributed_scaled_dot_product_attention"
    if any(each is not None for each in _PAGES(pages)):
        raise UnsupportedError(f"ttnn.{name}: pages are not covered", fix="chunked_scaled_dot_product_attention")
    tensors = (input_tensor_q, input_tensor_k, input_tensor_v)
    _, (q, k, v) = operands(name, *tensors)
    check(name, *tensors, input_tensor_q.shape[1])
    axes, length = len(input_tensor_q.grid), input_tensor_q.shape[2]
    if length % (2 * ring_size) or length != input_tensor_k.shape[2]:
        raise OperandError(
            f"ttnn.{name}: {length} queries over {input_tensor_k.shape[2]} keys in {2 * ring_size} chunks",
            fix=f"as many of both, a multiple of {2 * ring_size}",
        )
    place, axis = _place_in_ring(name, input_tensor_q, ring_size, ring_id)
    size = length // (2 * ring_size)
    chunks = torch.stack([place, 2 * ring_size - 1 - place], -1)
    rows = (chunks.unsqueeze(-1) * size + torch.arange(size)).flatten(-2)  # [*mesh, S / ring_size]
    wide = rows.reshape(*rows.shape[:axes], 1, 1, -1, 1)
    queries, wide = spread([q, wide], axes)
    picked = queries.gather(-2, wide.expand(*queries.shape[:-2], -1, queries.shape[-1]))
    found = attend(picked, k, v, axes, scale=scale, seen=within(torch.arange(length), wide, None))
    made = Made(found, input_tensor_q, attention_topology(tensors, placed=True), coords=shared_coords(*tensors))
    if axis is not None:  # chunks from both ends are no shards
        group = GroupCall(name, input_tensor_q, cluster_axis=axis)
        made.topology = group.relabel(UNKNOWN)
    return made


def _place_in_ring(name: str, tensor: Tensor, size: int, ring_id: int | None) -> tuple[Block, int | None]:
    """Every device's place in its ring, with the mesh axes as dims, and the axis of the ring."""
    if ring_id is not None:
        if not 0 <= ring_id < size:
            raise OperandError(f"ttnn.{name}: ring_id {ring_id} of {size}")
        return torch.full((1,) * len(tensor.grid), ring_id), None
    fitting = [axis for axis, length in enumerate(tensor.grid) if length == size]
    if not fitting:
        raise OperandError(f"ttnn.{name}: no axis of a mesh of {list(tensor.grid)} has {size} devices", fix="ring_id=")
    axis = fitting[-1]
    shape = [size if each == axis else 1 for each in range(len(tensor.grid))]
    return take_box(torch.arange(size).reshape(shape), tensor.grid), axis
