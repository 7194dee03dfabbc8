"""Norms of diffusion models that are one op with what comes after them: activations, heads, rotary embeddings.

The pair before and after a gather is that of `rms_norm_pre_all_gather` and its kind; a device has some heads of a row.
"""

from __future__ import annotations

from meshloom.errors import OperandError
from meshloom.ttnn.ops.calling import KEPT, TABLE, op
from meshloom.ttnn.ops.copies import typecast
from meshloom.ttnn.ops.movement import permute, reshape
from meshloom.ttnn.ops.normalisation import layer_norm_post_all_gather, rms_norm, rms_norm_post_all_gather
from meshloom.ttnn.ops.rotary import rotary_embedding_llama
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.tensor import Tensor


def split_and_turn(
    name: str, tensor: Tensor, heads: int, matrix: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> Tensor:
    """[1, 1, S, heads * D] as [1, heads, S, D], and turned by angles [1, 1, S, D] if there are some."""
    if heads > 1:
        *lead, rows, wide = tensor.shape
        if lead != [1] * len(lead) or wide % heads:
            raise OperandError(f"ttnn.{name}: {heads} heads of {list(tensor.shape)}", fix="[1, 1, S, heads * D]")
        tensor = permute(reshape(tensor, (1, rows, heads, wide // heads)), (0, 2, 1, 3))
    angles = (matrix, cos, sin)
    if all(each is None for each in angles):
        return tensor
    if matrix is None or cos is None or sin is None:
        raise OperandError(f"ttnn.{name}: transformation_mat, rope_cos and rope_sin are given together or not at all")
    return rotary_embedding_llama(tensor, cos, sin, matrix)


def finish(tensor: Tensor, dtype: DataType | None, memory_config: MemoryConfig | None, output: Tensor | None) -> Tensor:
    """A result as asked for, or written into room for it."""
    if output is not None:
        found: Tensor = TABLE["copy"](tensor, output)
        return found
    if dtype not in (None, tensor.dtype):
        return typecast(tensor, dtype, memory_config=memory_config)
    if memory_config not in (None, tensor.memory_config()):
        moved: Tensor = TABLE["to_memory_config"](tensor, memory_config)
        return moved
    return tensor


def finish_heads(
    made: Tensor,
    *,
    name: str,
    like: Tensor,
    num_heads_per_device=1,
    transformation_mat: Tensor | None = None,
    rope_cos: Tensor | None = None,
    rope_sin: Tensor | None = None,
    memory_config=None,
    dtype=None,
) -> Tensor:
    """Rows as heads [1, heads, S, D], turned by their angles, in the dtype of the operand."""
    turned = split_and_turn(name, made, num_heads_per_device, transformation_mat, rope_cos, rope_sin)
    return finish(turned, dtype or like.dtype, memory_config, None)


@op("experimental.dit_layernorm_post_allgather", more=KEPT)
def dit_layernorm_post_allgather(input_tensor, stats, *, epsilon=1e-05, weight=None, bias=None, **how) -> Tensor:
    """`layer_norm_post_all_gather`."""
    return layer_norm_post_all_gather(input_tensor, stats, epsilon=epsilon, weight=weight, bias=bias, **how)


@op("experimental.wan_fused_rmsnorm_post_allgather", more=finish_heads)
def wan_fused_rmsnorm_post_allgather(input_tensor, stats, *, epsilon=1e-05, weight=None, **how) -> Tensor:
    """`rms_norm_post_all_gather` of [1, 1, S, heads * D], as heads [1, heads, S, D], turned by their angles."""
    name = "experimental.wan_fused_rmsnorm_post_allgather"
    exact = DataType.FLOAT32  # rounded once, at the end
    normal = rms_norm_post_all_gather(input_tensor, stats, epsilon=epsilon, weight=weight, dtype=exact)
    return finish_heads(normal, name=name, like=input_tensor, **how)


@op("experimental.dit_rms_norm_unary_fused", more=KEPT)
def dit_rms_norm_unary_fused(
    input_tensor, epsilon=1e-05, weight=None, bias=None, residual_input_tensor=None, *, activation=None, **how
) -> Tensor:
    """`rms_norm`, then an activation."""
    exact = typecast(input_tensor, DataType.FLOAT32)  # rounded once, at the end
    normal = rms_norm(exact, epsilon=epsilon, weight=weight, bias=bias, residual_input_tensor=residual_input_tensor)
    found = normal if activation is None else TABLE["unary_chain"](normal, [activation])
    return finish(found, input_tensor.dtype, how.get("memory_config"), None)
