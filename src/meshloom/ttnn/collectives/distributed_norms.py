"""Norms whose rows lie on the devices of a group: statistics are summed over it inside of the op.

Sums are exact: mean first, then the squares apart from it, in float32. Room for gathered statistics is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.tensor import collectives as native
from meshloom.ttnn.collectives.groups import GroupCall
from meshloom.ttnn.ops.activations import activate
from meshloom.ttnn.ops.calling import KEPT, TABLE, Made, op, operands, register, take
from meshloom.ttnn.ops.copies import typecast
from meshloom.ttnn.ops.fused_norms import finish, finish_heads, split_and_turn
from meshloom.ttnn.ops.group_norm import _by_channel as weight_by_channel
from meshloom.ttnn.ops.normalisation import STATISTICS, affine, as_row, weight_row
from meshloom.ttnn.ops.topologies import EACH, topology_of
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.padding import count_of, fill_padding
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import REPLICATE

# sums over a group


class _Rows:
    """Rows that a group holds parts of: sums and means over all of it."""

    def __init__(self, group: GroupCall, dims: tuple[int, ...] = (-1,)) -> None:
        self.group, self.dims = group, dims
        held = count_of(group.tensor, dims)
        if isinstance(held, int):
            self.count: Block | float = float(held * group.size)
        else:
            self.count = self._sum(group.take(held.float()))

    def _sum(self, block: Block) -> Block:
        return self.group.run_on(block, native.all_reduce, op="sum", precise=True)

    def mean(self, values: Block) -> Block:
        filled = fill_padding(values, self.group.tensor, self.dims, "sum") if self.group.places is None else values
        return self._sum(filled.sum(self.dims, keepdim=True)) / self.count


def _rms(x: Block, rows: _Rows, epsilon: float) -> Block:
    return x * torch.rsqrt(rows.mean(x.square()) + epsilon)


def _layer(x: Block, rows: _Rows, epsilon: float) -> Block:
    apart = x - rows.mean(x)
    return apart * torch.rsqrt(rows.mean(apart.square()) + epsilon)


def _normalise(
    name: str,
    tensor: Tensor,
    function: Callable[[Block, _Rows, float], Block],
    epsilon: float,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    **over: Any,
) -> Made:
    """The norm of rows that lie on a group, times the weight, plus the bias: in float32, to be rounded at the end."""
    given = [each for each in (weight, bias) if each is not None]
    operands(name, tensor, *given, *([] if residual is None else [residual]))
    group = GroupCall(name, tensor, **over)
    axes, rank, width = len(tensor.grid), len(tensor.shape), tensor.shape[-1]
    x = group.block.float()
    if residual is not None:
        x = x + group.take(residual.block).float()
    gamma, beta = (None if each is None else weight_row(each, width, axes) for each in (weight, bias))
    gamma, beta = (None if each is None else group.take(each) for each in (gamma, beta))
    found = affine(function(x, _Rows(group), epsilon), gamma, beta, axes, rank)
    label = topology_of(EACH, tensor, *map(as_row, given), *([] if residual is None else [residual]))
    return group.make(found, label, dtype=DataType.FLOAT32)


@op(
    "experimental.dit_fused_distributed_rmsnorm",
    also="mode",
    more=(GroupCall, finish_heads),
    drops="persistent_output_buffer",
    refuses="affine_tile_row_map",
    instead="one weight for all rows",
)
def dit_fused_distributed_rmsnorm(
    input_tensor, *, epsilon=1e-05, num_heads_per_device=1, per_head_norm=False, weight=None, bias=None, **how
) -> Tensor:
    """`rms_norm` of rows over a group, then as heads [1, heads, S, D], turned by their angles.

    With `per_head_norm` every head has a norm of its own, and nothing is sent.
    """
    name, over = "experimental.dit_fused_distributed_rmsnorm", take(GroupCall, how)
    if per_head_norm:
        exact = typecast(input_tensor, DataType.FLOAT32)
        heads = split_and_turn(name, exact, num_heads_per_device, None, None, None)
        normal: Tensor = TABLE["rms_norm"](heads, epsilon=epsilon, weight=weight, bias=bias)
        return finish_heads(normal, name=name, like=input_tensor, **how)
    made = _normalise(name, input_tensor, _rms, epsilon, weight, bias, **over)
    return finish_heads(made.tensor(), name=name, like=input_tensor, num_heads_per_device=num_heads_per_device, **how)


@op(
    "experimental.dit_fused_distributed_layernorm",
    also="mode",
    more=(GroupCall, finish_heads),
    drops="persistent_output_buffer",
)
def dit_fused_distributed_layernorm(input_tensor, *, epsilon=1e-05, weight=None, bias=None, **how) -> Tensor:
    """`layer_norm` of rows over a group, then as heads [1, heads, S, D], turned by their angles."""
    name = "experimental.dit_fused_distributed_layernorm"
    made = _normalise(name, input_tensor, _layer, epsilon, weight, bias, **take(GroupCall, how))
    return finish_heads(made.tensor(), name=name, like=input_tensor, **how)


@op("fused_rms_minimal", also="mode", more=(GroupCall, KEPT), drops="stats")
def fused_rms_minimal(
    input_tensor, *, persistent_output_tensor=None, residual_input_tensor=None, epsilon=1e-12, weight=None, **over
) -> Tensor:
    """`rms_norm` of rows over a group, of the sum with a residual, which becomes that sum."""
    name, residual, (memory_config, dtype) = "fused_rms_minimal", residual_input_tensor, KEPT(over)
    made = _normalise(name, input_tensor, _rms, epsilon, weight, None, residual, **over)
    if residual is not None:
        TABLE["add_"](residual, input_tensor)
    return finish(made.tensor(), dtype or input_tensor.dtype, memory_config, persistent_output_tensor)


# groups of channels, whose places lie on the group


@op("experimental.dit_fused_distributed_groupnorm", also="mode", more=GroupCall, drops="persistent_output_buffer")
def dit_fused_distributed_groupnorm(
    input_tensor, *, num_groups, epsilon=1e-05, weight=None, bias=None, activation=None, **over
) -> Made:
    """`group_norm` of [N, 1, H * W, C] whose places lie on a group of devices, then an activation."""
    name = "experimental.dit_fused_distributed_groupnorm"
    channels, axes, rank = input_tensor.shape[-1], len(input_tensor.grid), len(input_tensor.shape)
    if channels % num_groups:
        raise OperandError(f"ttnn.{name}: {channels} channels are not {num_groups} equal groups")
    given = [each for each in (weight, bias) if each is not None]
    operands(name, input_tensor, *given)
    group = GroupCall(name, input_tensor, **over)
    rows = _Rows(group, tuple(range(1 - rank, -1)))

    def average(values: Block) -> Block:
        """The mean of its group of channels, for every channel."""
        groups = rows.mean(values).unflatten(-1, (num_groups, -1))
        found: Block = groups.mean(-1, keepdim=True).expand_as(groups).flatten(-2)
        return found

    apart = group.block.float() - average(group.block.float())
    normal = apart * torch.rsqrt(average(apart.square()) + epsilon)
    gamma, beta = (weight_by_channel(each, input_tensor, None) for each in (weight, bias))
    gamma, beta = (None if each is None else group.take(each) for each in (gamma, beta))
    found = affine(normal, gamma, beta, axes, rank)
    label = topology_of(EACH, input_tensor, *map(as_row, given))
    return group.make(found if activation is None else activate(found, activation), label)


# room for statistics


def _room(name: str, tensor: Tensor, columns: int, **over: Any) -> Tensor | None:
    """Room for what the devices of a group gather about each row; a device that is alone needs none."""
    group = GroupCall(name, tensor, **over)
    if group.size == 1:
        return None
    block = torch.zeros(*(1,) * len(tensor.grid), *tensor.shape[:-1], columns * group.size)
    label = group.label([REPLICATE] * group.mesh.ndim)
    return group.make(block, label, dtype=DataType.BFLOAT16, layout=Layout.TILE).tensor()


def _create_room(kind: str, columns: int) -> None:
    name = f"experimental.dit_fused_distributed_{kind}_create_stats_buffer"

    def call(input_tensor: Tensor, *, per_head_norm: bool = False, **over: Any) -> Any:
        return None if per_head_norm else _room(name, input_tensor, columns, **over)

    doc = f"Room for the statistics of `dit_fused_distributed_{kind}`; None where nothing is sent."
    unused = "num_heads_per_device weight transformation_mat rope_cos rope_sin"
    register(name, doc, call, more=GroupCall, drops=unused)


_create_room("rmsnorm", STATISTICS)
_create_room("layernorm", 2 * STATISTICS)


@op("experimental.dit_fused_distributed_groupnorm_create_stats_buffer", more=GroupCall)
def dit_fused_distributed_groupnorm_create_stats_buffer(input_tensor, num_groups, **over) -> Any:
    """Room for the statistics of `dit_fused_distributed_groupnorm`; None where nothing is sent."""
    name = "experimental.dit_fused_distributed_groupnorm_create_stats_buffer"
    if num_groups < 1:
        raise ArgumentError(f"ttnn.{name}: num_groups={num_groups}")
    return _room(name, input_tensor, 2 * STATISTICS, **over)
