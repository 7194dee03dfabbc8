"""The experimental, asynchronous spellings of collectives. Their semaphores, links and scratch buffers concern speed
alone; results are those of the plain ones, done when the call returns. Persistent outputs are written.

Most are the plain ones under another name: a line of the table, which `spell` binds by the text of signatures. Some
have several forms, told apart by the types of what stands at which position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError, UnsupportedError
from meshloom.tensor import collectives as native
from meshloom.ttnn.collectives.groups import OVER, GroupCall
from meshloom.ttnn.collectives.literal import (
    ReduceType,
    cut_padding,
    gather_along,
    reduce_over,
    scatter_along,
    stack_members,
)
from meshloom.ttnn.device.cores import CoreCoord
from meshloom.ttnn.device.fabric import GlobalSemaphore, Topology
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.device.subdevices import SubDeviceId
from meshloom.ttnn.ops import signatures
from meshloom.ttnn.ops.activations import BcastOpMath
from meshloom.ttnn.ops.calling import Made, op, operands, register
from meshloom.ttnn.ops.signatures import CHECKS
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import REPLICATE, PlacementShard


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _is_semaphore(value: Any) -> bool:
    listed = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(each, GlobalSemaphore) for each in listed)


def _is_axis(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


SEMAPHORES = (
    "multi_device_global_semaphore barrier_semaphore barrier_semaphores rs_global_semaphores ag_global_semaphores "
    "cross_device_semaphore neighbor_semaphore final_semaphore ready_semaphore data_valid_semaphore"
).split()

CHECKS.update(
    {
        **dict.fromkeys(SEMAPHORES, _is_semaphore),
        **dict.fromkeys("memory_config_ag memory_config_mm memory_config_rs".split(), _is(MemoryConfig)),
        **dict.fromkeys("use_optimal_ccl_for_llama use_broadcast use_noc1_only fp32_dest_acc".split(), _is(bool)),
        **dict.fromkeys(("all_gather_core_grid_offset", "reduce_scatter_core_grid_offset"), _is(CoreCoord, tuple)),
        "topology": _is(Topology),
        "subdevice_id": _is(SubDeviceId),
        "mesh_device": _is(MeshDevice),
        "math_op": _is(ReduceType, BcastOpMath),  # of a collective, and of `bcast`
    }
)

# What may stand at a position of that name, where an op has several forms.
_FITS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(SEMAPHORES, lambda value: value is None or _is_semaphore(value)),
    **dict.fromkeys(("dim", "num_devices"), lambda value: _is_axis(value) and value is not None),
    "cluster_axis": _is_axis,
    "mesh_device": _is(MeshDevice),
    "topology": _is(Topology),
    "math_op": _is(ReduceType),
    "persistent_output_buffer": lambda value: value is None or isinstance(value, Tensor),
    "buffer_tensor": _is(Tensor),
}
OUTPUTS = (
    "persistent_output_buffer persistent_output_buffers persistent_buffers persistent_output_tensor output_tensor"
).split()


def _positions(name: str, forms: Sequence[Sequence[str]], values: Sequence[Any], given: Any) -> dict[str, Any]:
    """Positional arguments by name: those of the first form that they fit."""
    for form in forms:
        names = form[: len(values)]
        fits = len(names) == len(values) and not set(names) & set(given)
        if fits and (len(forms) == 1 or all(_FITS[each](value) for each, value in zip(names, values, strict=True))):
            return dict(zip(names, values, strict=True))
    listed = ", ".join(type(each).__name__ for each in values)
    raise ArgumentError(
        f"ttnn.{name}: no form takes ({listed}) after the tensor",
        fix="; ".join(f"({' '.join(form)})" for form in forms),
    )


def spell(name: str, work: Callable[..., Any], doc: str, also: str = "mode") -> None:
    """Register a collective as the text of signatures spells it.

    `work(group, ...)` gets the arguments that it names; a persistent output is written, of several the one that has the
    result's shape; all else goes to the group or concerns speed.
    """
    forms = [form.partition(", *")[0].replace("=", "").split(", ")[1:] for form in signatures.forms()[name]]
    known = {each.rstrip("=") for form in signatures.forms()[name] for each in form.split(", ")}
    mine = [each for each in (*list(inspect.signature(work).parameters)[1:], *OUTPUTS) if each in known]
    order = [each for each in forms[0] if each in (*mine, *OVER)] if len(forms) == 1 else []

    def call(input_tensor: Any, *values: Any, **given: Any) -> Any:
        given = {**_positions(name, [order] if order else forms, values, given), **given}
        given = {each: value for each, value in given.items() if value is not None}
        over = {each: given[each] for each in OVER if each in given}
        own = {each: given[each] for each in mine if each in given and each not in OUTPUTS}
        output = next((given[each] for each in OUTPUTS if each in given), None)
        if not isinstance(input_tensor, (list, tuple)):
            return _write_into(work(GroupCall(name, input_tensor, **over), **own), output)
        outputs = output or [None] * len(input_tensor)
        made = [work(GroupCall(name, each, **over), **own) for each in input_tensor]
        return [each.into(room) for each, room in zip(made, outputs, strict=True)]

    told = {**inspect.signature(GroupCall).parameters, **inspect.signature(work).parameters}
    types = {each: told[each].annotation if each in told else "Tensor | None" for each in (*order, *mine)}
    kinds = inspect.Parameter
    listed = [kinds(each, kinds.POSITIONAL_OR_KEYWORD, default=None, annotation=types[each]) for each in order]
    if not order:
        listed.append(kinds("positions", kinds.VAR_POSITIONAL))
    named = [each for each in mine if each not in order]
    listed += [kinds(each, kinds.KEYWORD_ONLY, default=None, annotation=types[each]) for each in named]
    listed.insert(0, kinds("input_tensor", kinds.POSITIONAL_OR_KEYWORD, annotation="Tensor"))
    listed.append(kinds("over", kinds.VAR_KEYWORD))
    call.__signature__ = inspect.Signature(listed, return_annotation="Made")  # type: ignore[attr-defined]
    register(name, doc, call, also=also, more=GroupCall)


def _write_into(found: Any, output: Tensor | Sequence[Tensor] | None) -> Any:
    """What was made, to be written into an output; of several, into the last that has its shape."""
    if not isinstance(found, Made):
        return found
    if output is None or isinstance(output, Tensor):
        return found.into(output)
    shape = tuple(found.block.shape[len(found.like.grid) :])
    return found.into(next((each for each in reversed(output) if tuple(each.shape) == shape), None))


# what is done over a group


def _gather_reversed(group: GroupCall, dim: int | None = None) -> Made:
    """What the members hold along a dim, the last member first."""
    place = group.sharded_dim() if dim is None else group.dim(dim)
    turned = stack_members(group).flip(group.at(0))
    joined = turned.movedim(group.at(0), group.at(place)).flatten(group.at(place), group.at(place) + 1)
    return group.make(joined, group.relabel(REPLICATE))


def _gather_without_slots(
    group: GroupCall,
    dim: int,
    input_batch_index: int | None = None,
    gathered_dim_size: int | None = None,
    input_batch_index_tensor: Tensor | None = None,
    batch_slot_num_layers: int = 1,
    batch_slot_layer_idx: int = 0,
    gathered_prefix_tensor: Tensor | None = None,
    gathered_slab_global: int = 0,
) -> Made:
    slots = (input_batch_index, gathered_dim_size, input_batch_index_tensor, gathered_prefix_tensor)
    numbers = (batch_slot_num_layers, batch_slot_layer_idx, gathered_slab_global)
    if any(each is not None for each in slots) or numbers != (1, 0, 0):
        raise UnsupportedError(f"ttnn.{group.name}: slots of caches are not covered", fix="slice, then ttnn.all_gather")
    return gather_along(group, dim)


def _reduce(
    group: GroupCall, math_op: ReduceType = ReduceType.Sum, num_devices=None, buffer_tensor: Any = None
) -> Made:
    if num_devices is not None and num_devices != group.size:
        raise OperandError(f"ttnn.{group.name}: num_devices is {num_devices}, the group has {group.size}")
    return reduce_over(group, math_op)


def _exchange(group: GroupCall, in_dim: int, out_dim: int) -> Made:
    """A tensor that is sharded along `in_dim` is sharded along `out_dim` afterwards."""
    joined, cut = group.dim(in_dim, "concat"), group.dim(out_dim, "split")
    size = group.chunk_size(cut)
    if cut != joined:
        found = cut_padding(group, group.run(native.all_to_all, group.at(cut), group.at(joined)), joined)
    else:  # the pieces in a dim of their own, so that the two are different
        pieces = torch.unflatten(group.block, group.at(cut), (group.size, size))
        found = group.run_on(pieces, native.all_to_all, group.at(cut), group.at(cut) + 1).squeeze(group.at(cut))
    return group.make(found, group.label_scatter(cut))


def _slice(group: GroupCall, dim: int, output_dim_offset: int, output_dim_shape: int) -> Made:
    place = group.dim(dim, "slice")
    whole, end = group.tensor.shape[place] * group.size, output_dim_offset + output_dim_shape
    if not 0 <= output_dim_offset <= end <= whole:
        raise OperandError(f"ttnn.{group.name}: rows {output_dim_offset} to {end} of {whole}")
    if output_dim_shape % group.size:
        raise OperandError(f"ttnn.{group.name}: {output_dim_shape} rows do not divide over {group.size} devices")
    gathered = group.run(native.all_gather, group.at(place))
    found = group.partition(gathered.narrow(group.at(place), output_dim_offset, output_dim_shape), place).contiguous()
    return group.make(found, group.relabel(PlacementShard(place)))


def _room(group: GroupCall, dim: int) -> Tensor:
    """Room for what arrives, of the input's shape."""
    group.chunk_size(group.dim(dim, "scatter"))
    return _scratch(group, group.tensor.shape)


def _rooms(group: GroupCall, dim: int) -> list[Tensor]:
    """Room for what arrives, and for the result."""
    place = group.dim(dim, "scatter")
    shape = list(group.tensor.shape)
    shape[place] = group.chunk_size(place)
    return [_room(group, dim), _scratch(group, shape)]


def _scratch(group: GroupCall, shape: Sequence[int]) -> Tensor:
    block = group.block.new_zeros(*group.mesh.local_shape, *shape)
    return group.make(block, group.tensor.tensor_topology()).tensor()


GATHER, SCATTER = "As `ttnn.all_gather`.", "As `ttnn.reduce_scatter`."
EXCHANGE = (
    "From shards of `in_dim` to shards of `out_dim`: each member cuts what it has along `out_dim`, sends piece i to "
    "member i, and joins what it gets along `in_dim`."
)
MATMULS = "mode chunks_per_sync compute_kernel_config chunk_width_in_mm_blocks mm_cores_y mm_block_ht mm_block_wt " + (
    "mm_N_full_block_wt"
)
SLICE = "Rows `offset` to `offset + shape` of what the members hold side by side along `dim`, shared out evenly again."

for _name, _work, _doc in (
    ("all_gather_async", gather_along, GATHER),
    ("all_gather_async_reversed", _gather_reversed, "As `ttnn.all_gather`, the last member first."),
    ("strided_all_gather_async", gather_along, "As `ttnn.all_gather`: the strides are an order of sending."),
    ("ring_attention_all_gather_async", gather_along, "As `ttnn.all_gather`, for several tensors."),
    ("high_bw_all_gather", _gather_without_slots, "As `ttnn.all_gather`. Slots of caches are not covered."),
    ("all_reduce_async", _reduce, "As `ttnn.all_reduce`, with any reduction that parts can be reduced by."),
    ("reduce_scatter_minimal_async", scatter_along, SCATTER),
    ("strided_reduce_scatter_async", scatter_along, SCATTER),
    ("reduce_scatter_minimal_direct", scatter_along, SCATTER),
    ("llama_reduce_scatter", scatter_along, SCATTER),
    ("reduce_scatter_minimal_async_create_intermediate_buffer", _rooms, _rooms.__doc__),
    ("reduce_scatter_minimal_direct_create_staging_buffer", _room, _room.__doc__),
    ("reduce_scatter_minimal_direct_create_persistent_buffers", _rooms, _rooms.__doc__),
    ("all_to_all_async_generic", _exchange, EXCHANGE),
    ("all_to_all_async", _exchange, EXCHANGE),
    ("slice_reshard_async", _slice, SLICE),
):
    spell(f"experimental.{_name}", _work, _doc or "", MATMULS if _name.endswith("scatter_async") else "mode")


@op("experimental.deepseek_moe_reduce_scatter", also="mode", more=GroupCall)
def deepseek_moe_reduce_scatter(input_tensors, output_memory_config, dim, **over) -> Made:
    """As `ttnn.reduce_scatter` of the tensors joined along `dim`: the i-th is what is summed for member i."""
    name = "experimental.deepseek_moe_reduce_scatter"
    _, blocks = operands(name, *input_tensors)
    group = GroupCall(name, input_tensors[0], **over)
    blocks = [group.take(block) for block in blocks]
    place = group.dim(dim, "scatter")
    if len(blocks) != group.size:
        raise OperandError(f"ttnn.{name}: {len(blocks)} tensors for a group of {group.size}", fix="one per member")
    lead = [max(sizes) for sizes in zip(*(block.shape[: group.mesh.ndim] for block in blocks), strict=True)]
    joined = torch.cat([each.expand(*lead, *each.shape[group.mesh.ndim :]) for each in blocks], group.at(place))
    found = group.run_on(joined, native.reduce_scatter, group.at(place), precise=True)
    return group.make(found, group.label_scatter(place), memory_config=output_memory_config)


# neighbours


@op("experimental.neighbor_pad_async")
def neighbor_pad_async(
    input_tensor,
    dim: int | Sequence[int],
    padding_left,
    padding_right,
    padding_mode,
    cluster_axis: int | Sequence[int],
    *,
    persistent_output_buffer=None,
    logical_h=0,
    t_front_pad=0,
    mode=None,
) -> Made:
    """Each member's dim grown by the neighbours' rows: the end of the one before, the beginning of the one after.

    The outer ends get zeros, or repeat their outermost row ("replicate").
    """
    name = "experimental.neighbor_pad_async"
    if padding_mode not in ("zeros", "replicate"):
        raise ArgumentError(f"ttnn.{name}: padding_mode={padding_mode!r}", fix="'zeros' or 'replicate'")
    if logical_h or t_front_pad:
        raise UnsupportedError(f"ttnn.{name}: logical_h and t_front_pad are not covered", fix="pad by ttnn.pad")
    sides = [_as_list(each) for each in (dim, padding_left, padding_right, cluster_axis)]
    if len({len(each) for each in sides}) != 1:
        raise ArgumentError(f"ttnn.{name}: dim, padding_left, padding_right and cluster_axis are not equally many")
    group, block = GroupCall(name, input_tensor, mode=mode), None
    for place, left, right, axis in zip(*sides, strict=True):
        group = GroupCall(name, input_tensor, cluster_axis=axis, mode=mode)
        block = _neighbours(
            group, group.block if block is None else block, group.dim(place, "pad"), left, right, padding_mode
        )
    assert block is not None
    return group.make(block, input_tensor.tensor_topology(), output=persistent_output_buffer)


def _as_list(given: int | Sequence[int]) -> list[int]:
    return [given] if isinstance(given, int) else list(given)


def _neighbours(group: GroupCall, block: Block, dim: int, left: int, right: int, padding_mode: str) -> Block:
    place, size = group.at(dim), block.shape[group.at(dim)]
    if max(left, right) > size:
        raise OperandError(f"ttnn.{group.name}: {max(left, right)} rows of a neighbour that has {size}")
    axis = group.axes[0]
    held = group.mesh.local_shape
    full = [held[axis] if each == axis else n for each, n in enumerate(block.shape[: group.mesh.ndim])]
    block = block.expand(*full, *block.shape[group.mesh.ndim :])
    pieces = [block]
    if left:
        pieces.insert(0, _edge(group, block, place, size - left, left, 1, padding_mode))
    if right:
        pieces.append(_edge(group, block, place, 0, right, -1, padding_mode))
    return torch.cat(pieces, place)


def _edge(group: GroupCall, block: Block, place: int, start: int, count: int, offset: int, padding_mode: str) -> Block:
    """What comes from the neighbour on one side; at the outer end zeros, or the member's own row next to it."""
    found = group.run_on(block.narrow(place, start, count), native.shift, offset, wrap=False, own=True)
    if padding_mode == "zeros":
        return found
    row = 0 if offset > 0 else block.shape[place] - 1
    own = block.narrow(place, row, 1).expand(found.shape)
    outer = group.here(group.position()) == (0 if offset > 0 else group.size - 1)
    return torch.where(outer.reshape(*outer.shape, *(1,) * (found.dim() - outer.dim())), own, found)
