"""The experimental, asynchronous spellings of collectives. Their semaphores, links and scratch buffers concern speed
alone; results are those of the plain ones, done when the call returns. Persistent outputs are written.

Some have several forms, told apart by the types of what stands at which position: `forms` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError, UnsupportedError
from meshloom.tensor import collectives as native
from meshloom.ttnn.collectives.groups import Group
from meshloom.ttnn.collectives.literal import ReduceType, gather_along, reduce_over, scatter_along, stack_members
from meshloom.ttnn.device.cores import CoreCoord
from meshloom.ttnn.device.fabric import GlobalSemaphore, Topology
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.device.subdevices import SubDeviceId
from meshloom.ttnn.ops.activations import BcastOpMath
from meshloom.ttnn.ops.calling import TABLE, Made, op, operands, result
from meshloom.ttnn.ops.signatures import CHECKS
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import REPLICATE, PlacementShard


def _is_semaphore(value: Any) -> bool:
    listed = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(each, GlobalSemaphore) for each in listed)


def _is_axis(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


SEMAPHORES = (
    "multi_device_global_semaphore barrier_semaphore barrier_semaphores rs_global_semaphores ag_global_semaphores "
    "cross_device_semaphore neighbor_semaphore final_semaphore ready_semaphore data_valid_semaphore"
).split()

CHECKS.update(dict.fromkeys(SEMAPHORES, _is_semaphore))
CHECKS.update(
    topology=lambda value: isinstance(value, Topology),
    subdevice_id=lambda value: isinstance(value, SubDeviceId),
    mesh_device=lambda value: isinstance(value, MeshDevice),
    math_op=lambda value: isinstance(value, (ReduceType, BcastOpMath)),  # of a collective, and of `bcast`
    all_gather_core_grid_offset=lambda value: isinstance(value, (CoreCoord, tuple)),
    reduce_scatter_core_grid_offset=lambda value: isinstance(value, (CoreCoord, tuple)),
    use_optimal_ccl_for_llama=lambda value: isinstance(value, bool),
    use_broadcast=lambda value: isinstance(value, bool),
    use_noc1_only=lambda value: isinstance(value, bool),
    fp32_dest_acc=lambda value: isinstance(value, bool),
    memory_config_ag=lambda value: isinstance(value, MemoryConfig),
    memory_config_mm=lambda value: isinstance(value, MemoryConfig),
    memory_config_rs=lambda value: isinstance(value, MemoryConfig),
)

# What may stand at a position of that name.
_FITS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(SEMAPHORES, lambda value: value is None or _is_semaphore(value)),
    "dim": lambda value: _is_axis(value) and value is not None,
    "num_devices": lambda value: _is_axis(value) and value is not None,
    "cluster_axis": _is_axis,
    "mesh_device": lambda value: isinstance(value, MeshDevice),
    "topology": lambda value: isinstance(value, Topology),
    "math_op": lambda value: isinstance(value, ReduceType),
    "persistent_output_buffer": lambda value: value is None or isinstance(value, Tensor),
    "buffer_tensor": lambda value: isinstance(value, Tensor),
}


def _named(name: str, forms: Sequence[str], positions: Sequence[Any], **keywords: Any) -> dict[str, Any]:
    """Arguments by name, without those that are None: positions take the names of the first form that they fit."""
    given = {each: value for each, value in keywords.items() if value is not None}
    for form in forms:
        names = form.split()[: len(positions)]
        fits = len(names) == len(positions) and not set(names) & set(given)
        if fits and all(_FITS[each](value) for each, value in zip(names, positions, strict=True)):
            return {**dict(zip(names, positions, strict=True)), **given}
    listed = ", ".join(type(each).__name__ for each in positions)
    raise ArgumentError(
        f"ttnn.{name}: no form takes ({listed}) after the tensor", fix="; ".join(f"({form})" for form in forms)
    )


def _forms(
    *,
    dim: int | None = None,
    persistent_output_buffer: Tensor | None = None,
    num_devices: int | None = None,
    cluster_axis: int | None = None,
    mesh_device: MeshDevice | None = None,
    topology: Topology | None = None,
    buffer_tensor: Tensor | None = None,
    math_op: ReduceType | None = None,
) -> None:
    """What positions of the forms below may also be given by name."""


GATHER_FORMS = (
    "dim multi_device_global_semaphore",
    "persistent_output_buffer dim multi_device_global_semaphore",
    "dim cluster_axis mesh_device topology multi_device_global_semaphore",
)


def _gather_async(name: str, reverse: bool) -> Callable[..., Any]:
    @op(name, more=_forms)
    def all_gather_async(
        input_tensor: Tensor,
        *positions: Any,
        persistent_output_tensor: Tensor | None = None,
        mode: str | None = None,
        **keywords: Any,
    ) -> Made:
        """As `ttnn.all_gather`."""
        named = _named(name, GATHER_FORMS, positions, **keywords)
        group = Group(
            name, input_tensor, mode=mode, **{each: named.get(each) for each in ("cluster_axis", "mesh_device")}
        )
        buffer = named.get("persistent_output_buffer")
        output = persistent_output_tensor if buffer is None else buffer
        return (_gather_reversed if reverse else gather_along)(group, named.get("dim")).into(output)

    return all_gather_async


def _gather_reversed(group: Group, dim: int | None) -> Made:
    """What the members hold along a dim, the last member first."""
    place = group.sharded_dim() if dim is None else group.dim(dim)
    turned = stack_members(group).flip(group.at(0))
    joined = turned.movedim(group.at(0), group.at(place)).flatten(group.at(place), group.at(place) + 1)
    return Made(joined, group.tensor, group.relabelled(REPLICATE))


all_gather_async = _gather_async("experimental.all_gather_async", reverse=False)
all_gather_async_reversed = _gather_async("experimental.all_gather_async_reversed", reverse=True)


@op("experimental.strided_all_gather_async", also="mode", more=Group)
def strided_all_gather_async(
    input_tensor: Tensor, persistent_output_buffer: Tensor | None = None, dim: int | None = None, **over: Any
) -> Made:
    """As `ttnn.all_gather`: the strides are an order of sending."""
    group = Group("experimental.strided_all_gather_async", input_tensor, **over)
    return gather_along(group, dim).into(persistent_output_buffer)


@op("experimental.ring_attention_all_gather_async", also="mode", more=Group)
def ring_attention_all_gather_async(
    input_tensor: Sequence[Tensor],
    persistent_output_buffer: Sequence[Tensor] | None = None,
    dim: int | None = None,
    **over: Any,
) -> list[Made]:
    """As `ttnn.all_gather`, for several tensors."""
    name = "experimental.ring_attention_all_gather_async"
    outputs: Sequence[Tensor | None] = persistent_output_buffer or [None] * len(input_tensor)
    groups = [Group(name, each, **over) for each in input_tensor]
    return [gather_along(group, dim).into(output) for group, output in zip(groups, outputs, strict=True)]


@op("experimental.high_bw_all_gather", also="mode", more=Group)
def high_bw_all_gather(
    input_tensor: Tensor,
    dim: int,
    *,
    input_batch_index: int | None = None,
    gathered_dim_size: int | None = None,
    input_batch_index_tensor: Tensor | None = None,
    batch_slot_num_layers: int = 1,
    batch_slot_layer_idx: int = 0,
    gathered_prefix_tensor: Tensor | None = None,
    gathered_slab_global: int = 0,
    **over: Any,
) -> Made:
    """As `ttnn.all_gather` into `output_tensor`. Slots of caches are not covered."""
    slots = (input_batch_index, gathered_dim_size, input_batch_index_tensor, gathered_prefix_tensor)
    if any(each is not None for each in slots) or (batch_slot_num_layers, batch_slot_layer_idx) != (1, 0):
        raise UnsupportedError(
            "ttnn.experimental.high_bw_all_gather: slots of caches are not covered", fix="slice, then ttnn.all_gather"
        )
    if gathered_slab_global:
        raise UnsupportedError("ttnn.experimental.high_bw_all_gather: gathered_slab_global is not covered")
    group = Group("experimental.high_bw_all_gather", input_tensor, **over)
    return gather_along(group, dim)


# reductions

REDUCE_FORMS = (
    "num_devices barrier_semaphores rs_global_semaphores ag_global_semaphores math_op",
    "cluster_axis mesh_device barrier_semaphores rs_global_semaphores ag_global_semaphores math_op",
    "buffer_tensor cluster_axis mesh_device multi_device_global_semaphore",
)


@op("experimental.all_reduce_async", more=_forms)
def all_reduce_async(input_tensor: Tensor, *positions: Any, mode: str | None = None, **keywords: Any) -> Made:
    """As `ttnn.all_reduce`, with any reduction that parts can be reduced by."""
    name = "experimental.all_reduce_async"
    named = _named(name, REDUCE_FORMS, positions, **keywords)
    group = Group(name, input_tensor, mode=mode, **{each: named.get(each) for each in ("cluster_axis", "mesh_device")})
    count = named.get("num_devices")
    if count is not None and count != group.size:
        raise OperandError(f"ttnn.{name}: num_devices is {count}, the group has {group.size}")
    kind = named.get("math_op") or ReduceType.Sum
    return reduce_over(group, kind)


SCATTER_SPEED = "chunks_per_sync compute_kernel_config chunk_width_in_mm_blocks " + (
    "mm_cores_y mm_block_ht mm_block_wt mm_N_full_block_wt"
)


def _scatter_async(name: str) -> Callable[..., Any]:
    @op(name, also=SCATTER_SPEED + " mode", more=Group)
    def reduce_scatter_async(
        input_tensor: Tensor,
        persistent_output_buffers: Sequence[Tensor] | None = None,
        dim: int | None = None,
        **over: Any,
    ) -> Made:
        """As `ttnn.reduce_scatter`; of the persistent buffers, the one that has the result's shape is written."""
        if dim is None:
            raise ArgumentError(f"ttnn.{name}: dim is missing")
        group = Group(name, input_tensor, **over)
        output = _fitting(group, dim, persistent_output_buffers)
        return scatter_along(group, dim).into(output)

    return reduce_scatter_async


def _fitting(group: Group, dim: int, buffers: Sequence[Tensor] | Tensor | None) -> Tensor | None:
    """Of intermediate and output buffers, the last that has the shape of the result."""
    place = group.dim(dim, "scatter")
    shape = list(group.tensor.shape)
    shape[place] = group.divided(place)
    listed = [buffers] if isinstance(buffers, Tensor) else buffers or ()
    return next((each for each in reversed(listed) if each.shape == shape), None)


reduce_scatter_minimal_async = _scatter_async("experimental.reduce_scatter_minimal_async")
strided_reduce_scatter_async = _scatter_async("experimental.strided_reduce_scatter_async")


@op("experimental.reduce_scatter_minimal_direct", also="mode", more=Group)
def reduce_scatter_minimal_direct(
    input_tensor: Tensor, dim: int, *, persistent_buffers: Sequence[Tensor] | None = None, **over: Any
) -> Made:
    """As `ttnn.reduce_scatter`; of the persistent buffers, the one that has the result's shape is written."""
    group = Group("experimental.reduce_scatter_minimal_direct", input_tensor, **over)
    output = _fitting(group, dim, persistent_buffers)
    return scatter_along(group, dim).into(output)


@op("experimental.llama_reduce_scatter", also="mode", more=Group)
def llama_reduce_scatter(input_tensor: Tensor, dim: int, **over: Any) -> Made:
    """As `ttnn.reduce_scatter`."""
    group = Group("experimental.llama_reduce_scatter", input_tensor, **over)
    return scatter_along(group, dim)


@op("experimental.deepseek_moe_reduce_scatter", also="mode", more=Group)
def deepseek_moe_reduce_scatter(
    input_tensors: Sequence[Tensor], output_memory_config: MemoryConfig, dim: int, **over: Any
) -> Made:
    """As `ttnn.reduce_scatter` of the tensors joined along `dim`: the i-th is what is summed for member i."""
    name = "experimental.deepseek_moe_reduce_scatter"
    _, blocks = operands(name, *input_tensors)
    group = Group(name, input_tensors[0], **over)
    place = group.dim(dim, "scatter")
    if len(blocks) != group.size:
        raise OperandError(f"ttnn.{name}: {len(blocks)} tensors for a group of {group.size}", fix="one per member")
    lead = [max(sizes) for sizes in zip(*(block.shape[: group.mesh.ndim] for block in blocks), strict=True)]
    joined = torch.cat([each.expand(*lead, *each.shape[group.mesh.ndim :]) for each in blocks], group.at(place))
    found = group.run_on(joined, native.reduce_scatter, group.at(place), precise=True)
    return Made(found, input_tensors[0], group.scattered(place), memory_config=output_memory_config)


def _scratch(group: Group, shape: Sequence[int]) -> Tensor:
    block = group.block.new_zeros(*group.mesh.shape, *shape)
    return result(block, group.tensor, topology=group.tensor.tensor_topology())


def _chunk(group: Group, dim: int) -> list[int]:
    place = group.dim(dim, "scatter")
    shape = list(group.tensor.shape)
    shape[place] = group.divided(place)
    return shape


@op("experimental.reduce_scatter_minimal_async_create_intermediate_buffer", more=Group)
def create_intermediate_buffer(input_tensor: Tensor, dim: int, **over: Any) -> list[Tensor]:
    """Room for what arrives, of the input's shape."""
    group = Group("experimental.reduce_scatter_minimal_async_create_intermediate_buffer", input_tensor, **over)
    group.divided(group.dim(dim, "scatter"))
    return [_scratch(group, input_tensor.shape)]


@op("experimental.reduce_scatter_minimal_direct_create_staging_buffer", more=Group)
def create_staging_buffer(input_tensor: Tensor, dim: int, **over: Any) -> Tensor:
    """Room for what arrives, of the input's shape."""
    group = Group("experimental.reduce_scatter_minimal_direct_create_staging_buffer", input_tensor, **over)
    group.divided(group.dim(dim, "scatter"))
    return _scratch(group, input_tensor.shape)


@op("experimental.reduce_scatter_minimal_direct_create_persistent_buffers", more=Group)
def create_persistent_buffers(input_tensor: Tensor, dim: int, **over: Any) -> list[Tensor]:
    """Room for what arrives, and for the result."""
    group = Group("experimental.reduce_scatter_minimal_direct_create_persistent_buffers", input_tensor, **over)
    return [_scratch(group, input_tensor.shape), _scratch(group, _chunk(group, dim))]


# all to all


@op("experimental.all_to_all_async_generic", also="mode", more=Group)
def all_to_all_async_generic(
    input_tensor: Tensor, in_dim: int, out_dim: int, *, persistent_output_buffer: Tensor | None = None, **over: Any
) -> Made:
    """Each member cuts what it has along `in_dim`, sends piece i to member i, and joins what it gets by `out_dim`."""
    group = Group("experimental.all_to_all_async_generic", input_tensor, **over)
    return _exchange(group, in_dim, out_dim).into(persistent_output_buffer)


@op("experimental.all_to_all_async", also="mode", more=Group)
def all_to_all_async(
    input_tensor: Tensor, persistent_output_buffer: Tensor | None, in_dim: int, out_dim: int, **over: Any
) -> Made:
    """As `all_to_all_async_generic` over all devices."""
    group = Group("experimental.all_to_all_async", input_tensor, **over)
    return _exchange(group, in_dim, out_dim).into(persistent_output_buffer)


def _exchange(group: Group, in_dim: int, out_dim: int) -> Made:
    cut, joined = group.dim(in_dim, "split"), group.dim(out_dim, "concat")
    size = group.divided(cut)
    if cut != joined:
        found = group.run(native.all_to_all, group.at(cut), group.at(joined))
    else:  # the pieces in a dim of their own, so that the two are different
        pieces = group.block.unflatten(group.at(cut), (group.size, size))
        found = group.run_on(pieces, native.all_to_all, group.at(cut), group.at(cut) + 1).squeeze(group.at(cut))
    return Made(found, group.tensor, group.scattered(cut))


# neighbours


@op("experimental.neighbor_pad_async")
def neighbor_pad_async(
    input_tensor: Tensor,
    dim: int | Sequence[int],
    padding_left: int | Sequence[int],
    padding_right: int | Sequence[int],
    padding_mode: str,
    cluster_axis: int | Sequence[int],
    *,
    persistent_output_buffer: Tensor | None = None,
    logical_h: int = 0,
    t_front_pad: int = 0,
    mode: str | None = None,
) -> Made:
    """Each member's dim grown by the neighbours' rows: the end of the one before, the beginning of the one after.

    The outer ends get zeros, or repeat their outermost row ("replicate").
    """
    name = "experimental.neighbor_pad_async"
    if padding_mode not in ("zeros", "replicate"):
        raise ArgumentError(f"ttnn.{name}: padding_mode={padding_mode!r}", fix="'zeros' or 'replicate'")
    if logical_h or t_front_pad:
        raise UnsupportedError(f"ttnn.{name}: logical_h and t_front_pad are not covered", fix="pad by ttnn.pad")
    sides = [_listed(each) for each in (dim, padding_left, padding_right, cluster_axis)]
    if len({len(each) for each in sides}) != 1:
        raise ArgumentError(f"ttnn.{name}: dim, padding_left, padding_right and cluster_axis are not equally many")
    group, block = Group(name, input_tensor, mode=mode), None
    for place, left, right, axis in zip(*sides, strict=True):
        group = Group(name, input_tensor, cluster_axis=axis, mode=mode)
        block = _neighbours(
            group, group.block if block is None else block, group.dim(place, "pad"), left, right, padding_mode
        )
    assert block is not None
    return Made(block, input_tensor, input_tensor.tensor_topology(), output=persistent_output_buffer)


def _listed(given: int | Sequence[int]) -> list[int]:
    return [given] if isinstance(given, int) else list(given)


def _neighbours(group: Group, block: Block, dim: int, left: int, right: int, padding_mode: str) -> Block:
    place, size = group.at(dim), block.shape[group.at(dim)]
    if max(left, right) > size:
        raise OperandError(f"ttnn.{group.name}: {max(left, right)} rows of a neighbour that has {size}")
    axis = group.axes[0]
    full = [group.mesh.shape[axis] if each == axis else n for each, n in enumerate(block.shape[: group.mesh.ndim])]
    block = block.expand(*full, *block.shape[group.mesh.ndim :])
    pieces = [block]
    if left:
        pieces.insert(0, _edge(group, block, place, size - left, left, 1, padding_mode))
    if right:
        pieces.append(_edge(group, block, place, 0, right, -1, padding_mode))
    return torch.cat(pieces, place)


def _edge(group: Group, block: Block, place: int, start: int, count: int, offset: int, padding_mode: str) -> Block:
    """What comes from the neighbour on one side; at the outer end zeros, or the member's own row next to it."""
    found = group.run_on(block.narrow(place, start, count), native.shift, offset, wrap=False, own=True)
    if padding_mode == "zeros":
        return found
    row = 0 if offset > 0 else block.shape[place] - 1
    own = block.narrow(place, row, 1).expand(found.shape)
    outer = group.position() == (0 if offset > 0 else group.size - 1)
    return torch.where(outer.reshape(*outer.shape, *(1,) * (found.dim() - outer.dim())), own, found)


@op("experimental.slice_reshard_async", also="mode", more=Group)
def slice_reshard_async(
    input_tensor: Tensor, dim: int, output_dim_offset: int, output_dim_shape: int, **over: Any
) -> Made:
    """Rows `offset` to `offset + shape` of what the members hold side by side along `dim`, shared out evenly again."""
    group = Group("experimental.slice_reshard_async", input_tensor, **over)
    place = group.dim(dim, "slice")
    whole = input_tensor.shape[place] * group.size
    if not 0 <= output_dim_offset <= output_dim_offset + output_dim_shape <= whole:
        raise OperandError(
            f"ttnn.{group.name}: rows {output_dim_offset} to {output_dim_offset + output_dim_shape} of {whole}"
        )
    if output_dim_shape % group.size:
        raise OperandError(f"ttnn.{group.name}: {output_dim_shape} rows do not divide over {group.size} devices")
    gathered = group.run(native.all_gather, group.at(place))
    found = group.partitioned(gathered.narrow(group.at(place), output_dim_offset, output_dim_shape), place).contiguous()
    return Made(found, input_tensor, group.relabelled(PlacementShard(place)))


# with a product


def _product(
    a: Tensor,
    b: Tensor,
    memory_config: MemoryConfig | None,
    *,
    bias: Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    dtype: DataType | None = None,
    activation: str | None = None,
) -> Tensor:
    how: dict[str, Any] = {"bias": bias, "dtype": dtype, "activation": activation, "memory_config": memory_config}
    found: Tensor = TABLE["linear"](a, b, transpose_a=transpose_a, transpose_b=transpose_b, **how)
    return found


@op(
    "experimental.all_gather_matmul_async", also="sub_core_grids use_broadcast use_optimal_ccl_for_llama", more=_product
)
def all_gather_matmul_async(
    input_tensor: Tensor,
    weight_tensor: Tensor,
    persistent_output_buffer: Tensor | None = None,
    dim: int | None = None,
    *,
    memory_config_ag: MemoryConfig | None = None,
    memory_config_mm: MemoryConfig | None = None,
    cluster_axis: int | None = None,
    mode: str | None = None,
    **how: Any,
) -> list[Tensor]:
    """`ttnn.all_gather`, then `ttnn.linear` with the weight: both results."""
    group = Group("experimental.all_gather_matmul_async", input_tensor, cluster_axis=cluster_axis, mode=mode)
    gathered = gather_along(group, dim).tensor(memory_config=memory_config_ag, output=persistent_output_buffer)
    return [gathered, _product(gathered, weight_tensor, memory_config_mm, **how)]


@op("experimental.llama_all_gather_matmul_async", also="core_grid", more=_product)
def llama_all_gather_matmul_async(
    input_tensor0: Tensor,
    input_tensor1: Tensor,
    dim: int,
    cluster_axis: int,
    mesh_device: MeshDevice | None = None,
    *,
    ag_memory_config: MemoryConfig | None = None,
    mm_memory_config: MemoryConfig | None = None,
    mode: str | None = None,
    **how: Any,
) -> Tensor:
    """`ttnn.all_gather` of the first, then its product with the second."""
    group = Group(
        "experimental.llama_all_gather_matmul_async",
        input_tensor0,
        cluster_axis=cluster_axis,
        mode=mode,
        mesh_device=mesh_device,
    )
    gathered = gather_along(group, dim).tensor(memory_config=ag_memory_config)
    return _product(gathered, input_tensor1, mm_memory_config, **how)


@op("experimental.matmul_reduce_scatter_async", more=_product)
def matmul_reduce_scatter_async(
    input_tensor: Tensor,
    weight_tensor: Tensor,
    persistent_output_buffer: Tensor | None,
    dim: int,
    *,
    memory_config_rs: MemoryConfig | None = None,
    memory_config_mm: MemoryConfig | None = None,
    cluster_axis: int | None = None,
    mode: str | None = None,
    **how: Any,
) -> list[Tensor]:
    """`ttnn.linear` with the weight, then `ttnn.reduce_scatter`: both results."""
    product = _product(input_tensor, weight_tensor, memory_config_mm, **how)
    group = Group("experimental.matmul_reduce_scatter_async", product, cluster_axis=cluster_axis, mode=mode)
    scattered = scatter_along(group, dim).into(persistent_output_buffer)
    return [product, scattered.tensor(memory_config=memory_config_rs)]
