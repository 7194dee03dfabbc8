"""Collectives that are one op with a product of matrices or with the splitting of heads.

Hardware sends while it multiplies; here one is done after the other, and the values are those of the two ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshloom.errors import OperandError, UnsupportedError
from meshloom.ttnn.collectives.groups import GroupCall
from meshloom.ttnn.collectives.literal import gather_along, reduce_over, scatter_along
from meshloom.ttnn.ops.calling import KEPT, TABLE, Optionals, op, take
from meshloom.ttnn.ops.copies import typecast
from meshloom.ttnn.ops.heads import nlp_concat_heads_decode, nlp_create_qkv_heads_decode
from meshloom.ttnn.ops.matmul import linear, multiply
from meshloom.ttnn.ops.model_ops import minimal_matmul
from meshloom.ttnn.ops.slicing import chunk, split
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.tensor import Tensor


def _adds(added: Sequence[Any]) -> bool:
    return any(each is not None for each in added[1:])


def _add_product(product: Tensor, added: Sequence[Any], dtype: DataType, memory_config: MemoryConfig | None) -> Tensor:
    """base + scalar * product * factor, if they are given, in the dtype that is asked for."""
    scalar, base, factor = added
    if not _adds(added):
        return product
    if base is None or factor is None:
        raise OperandError("a product is added to one tensor and multiplied by another: one of them is missing")
    exact = typecast(base, DataType.FLOAT32) if base.dtype is not DataType.FLOAT32 else base
    value = 1.0 if scalar is None else scalar
    found: Tensor = TABLE["addcmul"](exact, product, factor, value=value, memory_config=memory_config)
    return found if found.dtype is dtype else typecast(found, dtype)


def _multiply(given: Tensor | Sequence[Tensor], weight: Tensor, added: Sequence[Any], **how: Any) -> Tensor:
    """`minimal_matmul`, in float32 if something is done with it before it is rounded."""
    first = given if isinstance(given, Tensor) else given[0]
    asked = how.pop("dtype", None)
    product = minimal_matmul(given, weight, dtype=DataType.FLOAT32 if _adds(added) else asked, **how)
    return _add_product(product, added, asked or first.dtype, how.get("memory_config"))


@op("experimental.dit_minimal_matmul_addcmul_fused", more=(KEPT, minimal_matmul))
def dit_minimal_matmul_addcmul_fused(
    matmul_input_tensor, matmul_weight_tensor, scalar, addcmul_input_tensor1, addcmul_input_tensor2, **how
) -> Tensor:
    """The first tensor plus scalar * (x @ weight + bias) * the second: a residual and a gate."""
    added = (scalar, addcmul_input_tensor1, addcmul_input_tensor2)
    return _multiply(matmul_input_tensor, matmul_weight_tensor, added, **how)


def _pieces(name: str, tensor: Tensor, chunks: int, sizes: Sequence[int] = (), dim: int = -1) -> list[Tensor]:
    """The result, or pieces of its width."""
    if dim not in (-1, len(tensor.shape) - 1):
        raise OperandError(f"ttnn.{name}: pieces of dim {dim} of {list(tensor.shape)}", fix="dim=-1")
    if sizes:
        return list(split(tensor, list(sizes), -1))
    if tensor.shape[-1] % chunks:
        raise OperandError(f"ttnn.{name}: {chunks} equal pieces of a width of {tensor.shape[-1]}")
    return [tensor] if chunks == 1 else list(chunk(tensor, chunks, -1))


# What a product is multiplied by and added to, as the ops call it: a number, what it is added to, another factor.
_ADDED = Optionals("scalar addcmul_input_tensor1 addcmul_input_tensor2")
_TERNARY = Optionals("fused_ternary_scalar fused_ternary_input_a fused_ternary_input_b")
_ADDED_AFTER = Optionals("fused_ternary_scalar addcmul_input_tensor1 addcmul_input_tensor2")
_PIECES = Optionals(chunks=1, chunk_sizes=(), dim=-1)
_SHARDED = Optionals("fsdp_cluster_axis persistent_weight_buffer")
_GATHERED = Optionals("memory_config_ag memory_config_mm")
_SCATTERED = Optionals("memory_config_rs memory_config_mm")
_SUMMED = Optionals("memory_config_mm rs_output_mem_config optional_rs_output_tensor")
_OTHERS = Optionals("second_weight_tensor rs_tensor")
_MINIMAL = (GroupCall, minimal_matmul, KEPT)


@op("experimental.all_gather_minimal_matmul_async", also="mode", more=(*_MINIMAL, _ADDED, _PIECES, _SHARDED))
def all_gather_minimal_matmul_async(
    input_tensor, weight_tensor, *, persistent_output_buffer=None, **how
) -> list[Tensor]:
    """`ttnn.all_gather` along the width, then `minimal_matmul` with the whole weight; in pieces of its width."""
    name = "experimental.all_gather_minimal_matmul_async"
    if any(each is not None for each in _SHARDED(how)):
        raise UnsupportedError(f"ttnn.{name}: a weight in shards is not covered", fix="ttnn.all_gather it first")
    group, pieces = GroupCall(name, input_tensor, **take(GroupCall, how)), _PIECES(how)
    gathered = gather_along(group, len(input_tensor.shape) - 1).tensor(output=persistent_output_buffer)
    return _pieces(name, _multiply(gathered, weight_tensor, _ADDED(how), **how), *pieces)


@op("experimental.strided_all_gather_minimal_matmul_async", also="mode", more=(*_MINIMAL, _TERNARY, _GATHERED))
def strided_all_gather_minimal_matmul_async(
    input_tensor, weight_tensor, persistent_output_buffer: Tensor | None, dim, *, bias=None, chunks=1, **how
) -> list[Tensor]:
    """`ttnn.all_gather` along a dim, then `minimal_matmul`: what was gathered, then the product or its pieces."""
    name, added = "experimental.strided_all_gather_minimal_matmul_async", _TERNARY(how)
    group, (memory, after) = GroupCall(name, input_tensor, **take(GroupCall, how)), _GATHERED(how)
    gathered = gather_along(group, dim).tensor(memory_config=memory, output=persistent_output_buffer)
    product = _multiply(gathered, weight_tensor, added, bias_tensor=bias, memory_config=after, **how)
    return [gathered, *_pieces(name, product, chunks)]


@op("experimental.minimal_matmul_strided_reduce_scatter_async", also="mode", more=(*_MINIMAL, _ADDED_AFTER, _SUMMED))
def minimal_matmul_strided_reduce_scatter_async(
    input_tensor: Tensor | Sequence[Tensor], weight_tensor, dim, *, bias=None, **how
) -> list[Tensor]:
    """`minimal_matmul`, then `ttnn.reduce_scatter`: both results. What is added and multiplied is so after the sum."""
    name, added = "experimental.minimal_matmul_strided_reduce_scatter_async", _ADDED_AFTER(how)
    over, (memory, of_sum, room) = take(GroupCall, how), _SUMMED(how)
    product = minimal_matmul(input_tensor, weight_tensor, bias_tensor=bias, memory_config=memory, **how)
    made = scatter_along(GroupCall(name, product, **over), dim)
    if not _adds(added):
        return [product, made.tensor(memory_config=of_sum, output=room)]
    scattered = _add_product(made.tensor(dtype=DataType.FLOAT32), added, product.dtype, of_sum)
    if room is not None:
        scattered = TABLE["copy"](scattered, room)
    return [product, scattered]


@op("experimental.llama_rs_matmul", also="mode", more=(GroupCall, multiply, _SCATTERED, _OTHERS))
def llama_rs_matmul(
    input_tensor, weight_tensor, dim, *, optional_output_tensor=None, dtype=None, **how
) -> list[Tensor]:
    """The product with the weight, or both; then the `ttnn.reduce_scatter` of another tensor, else of the first."""
    over, (memory, of_product), (second, other) = take(GroupCall, how), _SCATTERED(how), _OTHERS(how)
    how |= {"dtype": dtype, "memory_config": of_product}
    products = [linear(input_tensor, weight_tensor, **how, optional_output_tensor=optional_output_tensor)]
    if second is not None:
        products.append(linear(input_tensor, second, **how))
    summed = products[0] if other is None else other
    group = GroupCall("experimental.llama_rs_matmul", summed, **over)
    return [*products, scatter_along(group, dim).tensor(memory_config=memory)]


# with a plain product


_LINEAR = Optionals("bias dtype activation", transpose_a=False, transpose_b=False)


@op(
    "experimental.all_gather_matmul_async",
    also="sub_core_grids use_broadcast use_optimal_ccl_for_llama cluster_axis mode",
    more=(GroupCall, _LINEAR, _GATHERED),
)
def all_gather_matmul_async(
    input_tensor, weight_tensor, persistent_output_buffer=None, dim=None, **how
) -> list[Tensor]:
    """`ttnn.all_gather`, then `ttnn.linear` with the weight: both results."""
    group = GroupCall("experimental.all_gather_matmul_async", input_tensor, **take(GroupCall, how))
    memory, of_product = _GATHERED(how)
    gathered = gather_along(group, dim).tensor(memory_config=memory, output=persistent_output_buffer)
    return [gathered, linear(gathered, weight_tensor, memory_config=of_product, **how)]


@op("experimental.llama_all_gather_matmul_async", also="core_grid mode", more=(GroupCall, _LINEAR))
def llama_all_gather_matmul_async(
    input_tensor0, input_tensor1, dim, *, ag_memory_config=None, mm_memory_config=None, **how
) -> Tensor:
    """`ttnn.all_gather` of the first, then its product with the second."""
    group = GroupCall("experimental.llama_all_gather_matmul_async", input_tensor0, **take(GroupCall, how))
    gathered = gather_along(group, dim).tensor(memory_config=ag_memory_config)
    return linear(gathered, input_tensor1, memory_config=mm_memory_config, **how)


@op("experimental.matmul_reduce_scatter_async", also="cluster_axis mode", more=(GroupCall, _LINEAR, _SCATTERED))
def matmul_reduce_scatter_async(
    input_tensor, weight_tensor, persistent_output_buffer: Tensor | None, dim, **how
) -> list[Tensor]:
    """`ttnn.linear` with the weight, then `ttnn.reduce_scatter`: both results."""
    over, (memory, of_product) = take(GroupCall, how), _SCATTERED(how)
    product = linear(input_tensor, weight_tensor, memory_config=of_product, **how)
    group = GroupCall("experimental.matmul_reduce_scatter_async", product, **over)
    scattered = scatter_along(group, dim).into(persistent_output_buffer)
    return [product, scattered.tensor(memory_config=memory)]


# with heads


@op("experimental.llama_rs_create_heads", also="mode", more=GroupCall)
def llama_rs_create_heads(
    input_tensor, dim, *, num_heads, num_kv_heads, memory_config=None, qkv_memory_config=None, **over
) -> tuple[Tensor, ...]:
    """`ttnn.reduce_scatter` along a dim, then `nlp_create_qkv_heads_decode` of what each device has."""
    name = "experimental.llama_rs_create_heads"
    group = GroupCall(name, input_tensor, **over)
    summed = scatter_along(group, dim).tensor(memory_config=memory_config)
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "memory_config": qkv_memory_config}
    found: Any = nlp_create_qkv_heads_decode(summed, **heads)
    return tuple(found)


_HEADS = Optionals("num_kv_heads slice_size")


@op("experimental.all_reduce_create_qkv_heads", also="mode", more=(GroupCall, KEPT, _HEADS), drops="buffer_tensor")
def all_reduce_create_qkv_heads(
    input_tensor, batch_offset: Tensor | None, num_heads=1, *, final_memory_config=None, **over
) -> tuple[Tensor, ...]:
    """`ttnn.all_reduce`, then `nlp_create_qkv_heads_decode` of a slice of the users: the sum, then all heads."""
    kept, heads = take(KEPT, over), take(_HEADS, over)
    group = GroupCall("experimental.all_reduce_create_qkv_heads", input_tensor, **over)
    summed = reduce_over(group).tensor(**kept)
    heads |= {"num_heads": num_heads, "batch_offset": batch_offset, "memory_config": final_memory_config}
    found: Any = nlp_create_qkv_heads_decode(summed, **heads)
    return (summed, *found)


@op("experimental.all_gather_concat", also="mode", more=GroupCall, drops="buffer_tensor")
def all_gather_concat(input_tensor, dim, num_heads=1, memory_config=None, **over) -> Tensor:
    """`ttnn.all_gather` of [1, B, heads, D] along a dim, then `nlp_concat_heads_decode`."""
    name = "experimental.all_gather_concat"
    group = GroupCall(name, input_tensor, **over)
    gathered = gather_along(group, dim).tensor()
    return nlp_concat_heads_decode(gathered, num_heads=num_heads, memory_config=memory_config)
