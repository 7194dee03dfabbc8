"""What results are like, by family of ops: dtype, layout and memory of a result for which nothing was asked.

A result is like its first operand unless its op is in the table. A rule takes what the op has made and the operands of
the call, and fills in what the op left open; what the caller asks for goes before all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from meshloom.ttnn.tensor.formats import TILE_SIZE, DataType, Layout
from meshloom.ttnn.tensor.memory import DRAM_MEMORY_CONFIG, TensorMemoryLayout
from meshloom.ttnn.tensor.tensor import Tensor

if TYPE_CHECKING:
    from meshloom.ttnn.ops.calling import Made

Rule = Callable[[Any, Sequence[Any]], None]  # what an op has made, one or several, and its operands

RULES: dict[str, Rule] = {}
INTERLEAVED = TensorMemoryLayout.INTERLEAVED


def rule_for(name: str) -> Rule | None:
    """The rule of an op by its name; that of `add` holds for `add_`."""
    return RULES.get(name.removesuffix("_"))


def _family(names: str) -> Callable[[Rule], Rule]:
    def put(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return put


def _tensors(operands: Sequence[Any]) -> list[Tensor]:
    return [each for each in operands if isinstance(each, Tensor)]


def _join(made: Made, a: Tensor, b: Tensor) -> None:
    """Of two operands: in tiles if one is, and sharded as the first that is."""
    if a.layout is not b.layout:
        made.layout = Layout.TILE
    if a._memory is not b._memory and a._memory.memory_layout is INTERLEAVED is not b._memory.memory_layout:
        made.memory_like = b


# elementwise


@_family(
    """add subtract sub multiply mul rsub bcast addalpha subalpha squared_difference ldexp logaddexp logaddexp2 xlogy
    remainder fmod maximum minimum gcd lcm atan2 hypot nextafter pow bias_gelu prelu isclose div_no_nan floor_div
    bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift logical_left_shift logical_right_shift"""
)
def pair(made: Made, operands: Sequence[Any]) -> None:
    """Arithmetic of two operands."""
    if isinstance(operands[0], Tensor) and isinstance(operands[1], Tensor):
        _join(made, operands[0], operands[1])


@_family("eq ne gt ge lt le logical_and logical_or logical_xor")
def comparison(made: Made, operands: Sequence[Any]) -> None:
    """Ones and zeros in the dtype of the first operand; bytes are compared as uint16."""
    pair(made, operands)
    if made.like.dtype is DataType.UINT8:
        made.dtype = DataType.UINT16


@_family("div divide")
def quotient(made: Made, operands: Sequence[Any]) -> None:
    """A quotient of integers that is not rounded is a float32."""
    pair(made, operands)
    if not made.like.dtype.is_float and made.block.is_floating_point():
        made.dtype = DataType.FLOAT32


@_family("clamp clip")
def limited(made: Made, operands: Sequence[Any]) -> None:
    """Integers between fractions are float32."""
    if not made.like.dtype.is_float and any(isinstance(each, float) for each in operands[1:]):
        made.dtype = DataType.FLOAT32


@_family("where")
def chosen(made: Made, operands: Sequence[Any]) -> None:
    """As the value that is chosen from, not as what chooses."""
    first, *values = operands
    tensors = _tensors(values)
    if tensors:
        made.memory_like = tensors[0]
        if any(each.layout is not first.layout for each in tensors):
            made.layout = Layout.TILE


@_family("addcmul addcdiv lerp mac")
def ternary(made: Made, operands: Sequence[Any]) -> None:
    """Of three operands: in tiles if one is, and sharded as the first that is."""
    first, *others = _tensors(operands)
    for each in reversed(others):
        _join(made, first, each)


# products, reductions, orderings


@_family(
    """matmul linear addmm sparse_matmul matmul_batched_weights experimental.fast_reduce_nc
    experimental.group_attn_matmul
    transformer.scaled_dot_product_attention transformer.scaled_dot_product_attention_decode
    transformer.paged_scaled_dot_product_attention_decode transformer.chunked_scaled_dot_product_attention"""
)
def in_dram(made: Made | list[Made], operands: Sequence[Any]) -> None:
    """Interleaved in DRAM, wherever the operands are."""
    for each in made if isinstance(made, (list, tuple)) else (made,):
        each.memory_config = each.memory_config or DRAM_MEMORY_CONFIG


@_family("max min std var prod")
def tiled(made: Made, operands: Sequence[Any]) -> None:
    """In tiles; a sum or a mean keeps rows."""
    made.layout = Layout.TILE


@_family("sort")
def sorted_pair(made: list[Made], operands: Sequence[Any]) -> None:
    """Places of elements of four bytes are uint32."""
    indices = made[1]
    if operands[0].dtype in _FOUR_BYTES:
        indices.dtype = DataType.UINT32


_FOUR_BYTES = (DataType.FLOAT32, DataType.INT32, DataType.UINT32)


# parts of tensors


@_family("slice narrow experimental.padded_slice")
def cut(made: Made, operands: Sequence[Any]) -> None:
    """Block floats that are cut inside of tiles go by way of rows and come back as bfloat16."""
    tensor, starts = operands[0], operands[1]
    steps = operands[3] if len(operands) > 3 else None
    if (
        tensor.dtype.is_block_float
        and _is_inside_tiles(tensor, starts, steps)
        and made.block.shape != tensor.block.shape
    ):
        made.dtype = DataType.BFLOAT16


def _is_inside_tiles(tensor: Tensor, starts: Any, steps: Any) -> bool:
    if isinstance(starts, Tensor) or len(starts) < 2:
        return True
    strided = steps is not None and any(step != 1 for step in steps)
    ends = zip(starts[-2:], tuple(tensor.shape)[-2:], strict=True)
    return strided or any((start + size * (start < 0)) % TILE_SIZE for start, size in ends)


@_family("concat")
def joined(made: Made, operands: Sequence[Any]) -> None:
    """Block floats whose padding lies between the operands go by way of rows and come back as bfloat16."""
    tensors, dim = operands[0], operands[1] if len(operands) > 1 else 0
    if tensors[0].dtype.is_block_float and is_padded_along(tensors, dim):
        made.dtype = DataType.BFLOAT16


def is_padded_along(tensors: Sequence[Tensor], dim: int) -> bool:
    """Whether a dim of one of some tensors has padding of tiles."""
    return any(
        each.layout is Layout.TILE
        and tuple(each.shape)[dim]
        != tuple(each.padded_shape)[len(each.padded_shape) - len(each.shape) + dim % len(each.shape)]
        for each in tensors
    )


@_family("stack")
def stacked(made: Made, operands: Sequence[Any]) -> None:
    """Block floats that are put together inside of tiles come back as bfloat16."""
    first, dim = operands[0][0], operands[1]
    if first.dtype.is_block_float and dim % (len(first.shape) + 1) >= len(first.shape) - 1:
        made.dtype = DataType.BFLOAT16


@_family("split chunk")
def pieces(made: list[Made], operands: Sequence[Any]) -> None:
    """Of block floats, pieces that begin inside of a tile come back as bfloat16: each is a slice."""
    tensor, dim = operands[0], operands[2] if len(operands) > 2 else 0
    if not tensor.dtype.is_block_float or len(made) < 2:
        return
    rank, start = len(tensor.shape), 0
    for each in made:
        starts = [start if place == dim % rank else 0 for place in range(rank)]
        if _is_inside_tiles(tensor, starts, None):
            each.dtype = DataType.BFLOAT16
        start += each.block.shape[len(tensor.grid) + dim % rank]


@_family("embedding")
def looked_up(made: Made, operands: Sequence[Any]) -> None:
    """In the layout of the table; rows of block floats are bfloat16."""
    table = operands[1]
    made.layout = table.layout
    if table.dtype.is_block_float:
        made.dtype = DataType.BFLOAT16
