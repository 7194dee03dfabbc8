"""Collectives that are one op with a product of matrices or with the splitting of heads.

Hardware sends while it multiplies; here one is done after the other, and the values are those of the two ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshloom.errors import OperandError, UnsupportedError
from meshloom.ttnn.collectives.groups import GroupCall, take_over
from meshloom.ttnn.collectives.literal import gather_along, reduce_over, scatter_along
from meshloom.ttnn.ops.calling import TABLE, op
from meshloom.ttnn.ops.copies import typecast
from meshloom.ttnn.ops.heads import nlp_concat_heads_decode, nlp_create_qkv_heads_decode
from meshloom.ttnn.ops.matmul import linear, multiply
from meshloom.ttnn.ops.model_ops import minimal_matmul
from meshloom.ttnn.ops.slicing import chunk, split
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.tensor import Tensor


def add_product(
    product: Tensor,
    scalar: float | None,
    base: Tensor | None,
    factor: Tensor | None,
    dtype: DataType,
    memory_config: MemoryConfig | None,
) -> Tensor:
    """base + scalar * product * factor, if they are given, in the dtype that is asked for."""
    if base is None and factor is None:
        return product
    if base is None or factor is None:
        raise OperandError("a product is added to one tensor and multiplied by another: one of them is missing")
    exact = typecast(base, DataType.FLOAT32) if base.dtype is not DataType.FLOAT32 else base
    value = 1.0 if scalar is None else scalar
    found: Tensor = TABLE["addcmul"](exact, product, factor, value=value, memory_config=memory_config)
    return found if found.dtype is dtype else typecast(found, dtype)


def _multiply(
    given: Tensor | Sequence[Tensor],
    weight: Tensor,
    scalar: float | None = None,
    base: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    dtype: DataType | None = None,
    memory_config: MemoryConfig | None = None,
    **how: Any,
) -> Tensor:
    """`minimal_matmul`, in float32 if something is done with it before it is rounded."""
    first = given if isinstance(given, Tensor) else given[0]
    kind = dtype or first.dtype
    is_added = base is not None or factor is not None
    product = minimal_matmul(
        given, weight, dtype=DataType.FLOAT32 if is_added else dtype, memory_config=memory_config, **how
    )
    return add_product(product, scalar, base, factor, kind, memory_config)


@op("experimental.dit_minimal_matmul_addcmul_fused")
def dit_minimal_matmul_addcmul_fused(
    matmul_input_tensor: Tensor,
    matmul_weight_tensor: Tensor,
    scalar: float,
    addcmul_input_tensor1: Tensor,
    addcmul_input_tensor2: Tensor,
    bias_tensor: Tensor | None = None,
    *,
    dtype: DataType | None = None,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """The first tensor plus scalar * (x @ weight + bias) * the second: a residual and a gate."""
    return _multiply(
        matmul_input_tensor,
        matmul_weight_tensor,
        scalar,
        addcmul_input_tensor1,
        addcmul_input_tensor2,
        bias_tensor=bias_tensor,
        dtype=dtype,
        memory_config=memory_config,
    )


def _pieces(name: str, tensor: Tensor, chunks: int, sizes: Sequence[int], dim: int = -1) -> list[Tensor]:
    """The result, or pieces of its width."""
    if dim not in (-1, len(tensor.shape) - 1):
        raise OperandError(f"ttnn.{name}: pieces of dim {dim} of {list(tensor.shape)}", fix="dim=-1")
    if sizes:
        return list(split(tensor, list(sizes), -1))
    if tensor.shape[-1] % chunks:
        raise OperandError(f"ttnn.{name}: {chunks} equal pieces of a width of {tensor.shape[-1]}")
    return [tensor] if chunks == 1 else list(chunk(tensor, chunks, -1))


@op(
    "experimental.all_gather_minimal_matmul_async",
    also="mode",
    more=(GroupCall, minimal_matmul),
)
def all_gather_minimal_matmul_async(
    input_tensor: Tensor,
    weight_tensor: Tensor,
    *,
    scalar: float | None = None,
    addcmul_input_tensor1: Tensor | None = None,
    addcmul_input_tensor2: Tensor | None = None,
    memory_config: MemoryConfig | None = None,
    dtype: DataType | None = None,
    persistent_output_buffer: Tensor | None = None,
    chunks: int = 1,
    dim: int = -1,
    fsdp_cluster_axis: int | None = None,
    persistent_weight_buffer: Tensor | None = None,
    chunk_sizes: Sequence[int] = (),
    **how: Any,
) -> list[Tensor]:
    """`ttnn.all_gather` along the width, then `minimal_matmul` with the whole weight; in pieces of its width."""
    name = "experimental.all_gather_minimal_matmul_async"
    if fsdp_cluster_axis is not None or persistent_weight_buffer is not None:
        raise UnsupportedError(f"ttnn.{name}: a weight in shards is not covered", fix="ttnn.all_gather it first")
    group = GroupCall(name, input_tensor, **take_over(how))
    gathered = gather_along(group, len(input_tensor.shape) - 1).tensor(output=persistent_output_buffer)
    added = (scalar, addcmul_input_tensor1, addcmul_input_tensor2)
    product = _multiply(gathered, weight_tensor, *added, dtype=dtype, memory_config=memory_config, **how)
    return _pieces(name, product, chunks, chunk_sizes, dim)


@op(
    "experimental.strided_all_gather_minimal_matmul_async",
    also="mode",
    more=(GroupCall, minimal_matmul),
)
def strided_all_gather_minimal_matmul_async(
    input_tensor: Tensor,
    weight_tensor: Tensor,
    persistent_output_buffer: Tensor | None,
    dim: int,
    *,
    memory_config_ag: MemoryConfig | None = None,
    memory_config_mm: MemoryConfig | None = None,
    fused_ternary_input_a: Tensor | None = None,
    fused_ternary_input_b: Tensor | None = None,
    fused_ternary_scalar: float | None = None,
    bias: Tensor | None = None,
    chunks: int = 1,
    **how: Any,
) -> list[Tensor]:
    """`ttnn.all_gather` along a dim, then `minimal_matmul`: what was gathered, then the product or its pieces."""
    name = "experimental.strided_all_gather_minimal_matmul_async"
    group = GroupCall(name, input_tensor, **take_over(how))
    gathered = gather_along(group, dim).tensor(memory_config=memory_config_ag, output=persistent_output_buffer)
    added = (fused_ternary_scalar, fused_ternary_input_a, fused_ternary_input_b)
    product = _multiply(gathered, weight_tensor, *added, bias_tensor=bias, memory_config=memory_config_mm, **how)
    return [gathered, *_pieces(name, product, chunks, ())]


@op(
    "experimental.minimal_matmul_strided_reduce_scatter_async",
    also="mode",
    more=(GroupCall, minimal_matmul),
)
def minimal_matmul_strided_reduce_scatter_async(
    input_tensor: Tensor | Sequence[Tensor],
    weight_tensor: Tensor,
    dim: int,
    *,
    memory_config_mm: MemoryConfig | None = None,
    rs_output_mem_config: MemoryConfig | None = None,
    optional_rs_output_tensor: Tensor | None = None,
    fused_ternary_scalar: float | None = None,
    addcmul_input_tensor1: Tensor | None = None,
    addcmul_input_tensor2: Tensor | None = None,
    bias: Tensor | None = None,
    **how: Any,
) -> list[Tensor]:
    """`minimal_matmul`, then `ttnn.reduce_scatter`: both results. What is added and multiplied is so after the sum."""
    name = "experimental.minimal_matmul_strided_reduce_scatter_async"
    over = take_over(how)
    product = minimal_matmul(input_tensor, weight_tensor, bias_tensor=bias, memory_config=memory_config_mm, **how)
    made = scatter_along(GroupCall(name, product, **over), dim)
    if addcmul_input_tensor1 is None and addcmul_input_tensor2 is None:
        return [product, made.tensor(memory_config=rs_output_mem_config, output=optional_rs_output_tensor)]
    scattered = add_product(
        made.tensor(dtype=DataType.FLOAT32),
        fused_ternary_scalar,
        addcmul_input_tensor1,
        addcmul_input_tensor2,
        product.dtype,
        rs_output_mem_config,
    )
    if optional_rs_output_tensor is not None:
        scattered = TABLE["copy"](scattered, optional_rs_output_tensor)
    return [product, scattered]


@op("experimental.llama_rs_matmul", also="mode", more=(GroupCall, multiply))
def llama_rs_matmul(
    input_tensor: Tensor,
    weight_tensor: Tensor,
    dim: int,
    *,
    second_weight_tensor: Tensor | None = None,
    rs_tensor: Tensor | None = None,
    memory_config_rs: MemoryConfig | None = None,
    memory_config_mm: MemoryConfig | None = None,
    optional_output_tensor: Tensor | None = None,
    dtype: DataType | None = None,
    **how: Any,
) -> list[Tensor]:
    """The product with the weight, or both; then the `ttnn.reduce_scatter` of another tensor, else of the first."""
    over = take_over(how)
    how |= {"dtype": dtype, "memory_config": memory_config_mm}
    products = [linear(input_tensor, weight_tensor, **how, optional_output_tensor=optional_output_tensor)]
    if second_weight_tensor is not None:
        products.append(linear(input_tensor, second_weight_tensor, **how))
    summed = products[0] if rs_tensor is None else rs_tensor
    group = GroupCall("experimental.llama_rs_matmul", summed, **over)
    return [*products, scatter_along(group, dim).tensor(memory_config=memory_config_rs)]


# with heads


@op("experimental.llama_rs_create_heads", also="mode", more=GroupCall)
def llama_rs_create_heads(
    input_tensor: Tensor,
    dim: int,
    *,
    num_heads: int,
    num_kv_heads: int,
    memory_config: MemoryConfig | None = None,
    qkv_memory_config: MemoryConfig | None = None,
    **over: Any,
) -> tuple[Tensor, ...]:
    """`ttnn.reduce_scatter` along a dim, then `nlp_create_qkv_heads_decode` of what each device has."""
    name = "experimental.llama_rs_create_heads"
    group = GroupCall(name, input_tensor, **over)
    summed = scatter_along(group, dim).tensor(memory_config=memory_config)
    heads: Any = nlp_create_qkv_heads_decode(
        summed, num_heads=num_heads, num_kv_heads=num_kv_heads, memory_config=qkv_memory_config
    )
    return tuple(heads)


@op("experimental.all_reduce_create_qkv_heads", also="mode", more=GroupCall, drops="buffer_tensor")
def all_reduce_create_qkv_heads(
    input_tensor: Tensor,
    batch_offset: Tensor | None,
    num_heads: int = 1,
    *,
    memory_config: MemoryConfig | None = None,
    num_kv_heads: int | None = None,
    slice_size: int | None = None,
    final_memory_config: MemoryConfig | None = None,
    dtype: DataType | None = None,
    **over: Any,
) -> tuple[Tensor, ...]:
    """`ttnn.all_reduce`, then `nlp_create_qkv_heads_decode` of a slice of the users: the sum, then all heads."""
    name = "experimental.all_reduce_create_qkv_heads"
    group = GroupCall(name, input_tensor, **over)
    summed = reduce_over(group).tensor(memory_config=memory_config, dtype=dtype)
    heads: Any = nlp_create_qkv_heads_decode(
        summed,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        batch_offset=batch_offset,
        slice_size=slice_size,
        memory_config=final_memory_config,
    )
    return (summed, *heads)


@op("experimental.all_gather_concat", also="mode", more=GroupCall, drops="buffer_tensor")
def all_gather_concat(
    input_tensor: Tensor, dim: int, num_heads: int = 1, memory_config: MemoryConfig | None = None, **over: Any
) -> Tensor:
    """`ttnn.all_gather` of [1, B, heads, D] along a dim, then `nlp_concat_heads_decode`."""
    name = "experimental.all_gather_concat"
    group = GroupCall(name, input_tensor, **over)
    gathered = gather_along(group, dim).tensor()
    found: Tensor = nlp_concat_heads_decode(gathered, num_heads=num_heads, memory_config=memory_config)
    return found
