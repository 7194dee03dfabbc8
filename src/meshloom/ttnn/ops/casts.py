"""Other dtypes: the same bits, a typecast with its arguments in another order, and tokens in eight bits with scales."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError, UnsupportedError
from meshloom.ttnn.ops.calling import KEPT, Made, Optionals, make, op, operands
from meshloom.ttnn.ops.copies import typecast
from meshloom.ttnn.ops.topologies import EACH, moves, same
from meshloom.ttnn.tensor.formats import DataType, Layout, rounded
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

# Dtypes by the bits of an element, each with the torch dtype that has the same bits.
_BITS = {
    DataType.FLOAT32: torch.float32,
    DataType.INT32: torch.int32,
    DataType.UINT32: torch.int32,
    DataType.BFLOAT16: torch.bfloat16,
    DataType.UINT16: torch.int16,
    DataType.UINT8: torch.uint8,
    DataType.INT8: torch.int8,
}


@op("bitcast")
def bitcast(input_tensor, dtype) -> Made:
    """The same bits as elements of another dtype of that size: 1.0 of float32 is 1065353216 of int32."""
    _, (block,) = operands("bitcast", input_tensor)
    given, wanted = _BITS.get(input_tensor.dtype), _BITS.get(dtype)
    if given is None or wanted is None or given.itemsize != wanted.itemsize:
        raise OperandError(
            f"ttnn.bitcast: elements of {input_tensor.dtype.name} and of {dtype.name} have different sizes",
            fix=" or ".join(
                each.name for each, kind in _BITS.items() if given is not None and kind.itemsize == given.itemsize
            ),
        )
    made = make(rounded(block.to(given).view(wanted), dtype), EACH, input_tensor)
    made.dtype = dtype
    return made


@op("experimental.quasar.typecast", more=KEPT)
def quasar_typecast(
    input_tensor, *positions: Any, dtype=None, input_dtype=None, output_dtype=None, optional_output_tensor=None, **how
) -> Tensor:
    """`typecast` with everything by position: the dtype, or that of the input and that of the result, come first."""
    kinds = [each for each in positions if isinstance(each, DataType)]
    kinds += [each for each in (input_dtype, output_dtype, dtype) if each is not None]
    memory = next((each for each in positions if isinstance(each, MemoryConfig)), how.get("memory_config"))
    output = next((each for each in positions if isinstance(each, Tensor)), optional_output_tensor)
    if not 1 <= len(kinds) <= 2:
        raise ArgumentError("ttnn.experimental.quasar.typecast takes a dtype, or two", fix="typecast(x, ttnn.float32)")
    return typecast(input_tensor, *kinds, memory_config=memory, output_tensor=output)


@op("experimental.quantize_weights_via_host")
def quantize_weights_via_host(device_tensor, *, dtype, memory_config=None) -> Tensor:
    """A weight in another dtype, usually a block float, on the device again."""
    return typecast(device_tensor, dtype, memory_config=memory_config)


# eight bits with a scale for every run of a token's elements

RUN = 128
LARGEST = 448.0  # of float8 with four bits of exponent
SMALLEST = 1e-4  # below which a run of small numbers is not scaled up any more


@op("experimental.deepseek_prefill.per_token_cast_to_fp8")
def per_token_cast_to_fp8(input_tensor, *, round_scale_to_power_of_two=False) -> tuple[Made, Made]:
    """Every run of 128 elements over its scale, in eight bits, and the scales in float32: [..., H] and [..., H / 128].

    The scale is the largest magnitude over 448, maybe up to the next power of two.
    """
    name = "experimental.deepseek_prefill.per_token_cast_to_fp8"
    _, (block,) = operands(name, input_tensor)
    runs = _runs(name, block.float(), input_tensor)
    scale = runs.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / LARGEST
    if round_scale_to_power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    small = make((runs / scale).flatten(-2), EACH, input_tensor)
    small.dtype, small.layout = DataType.FP8_E4M3, Layout.ROW_MAJOR
    scales = make(scale.squeeze(-1), moves(same(input_tensor), linear=False), input_tensor, scales=True)
    scales.dtype, scales.layout = DataType.FLOAT32, Layout.ROW_MAJOR
    return small, scales


def _runs(name: str, block: Block, tensor: Tensor) -> Block:
    if tensor.shape[-1] % RUN:
        raise OperandError(f"ttnn.{name}: a width of {tensor.shape[-1]} is not made of runs of {RUN}")
    found: Block = block.unflatten(-1, (-1, RUN))
    return found


_REGIONS = Optionals("expert_region_offsets expert_token_counts global_expert_idx_table metadata", experts_per_chip=0)


@op("experimental.deepseek_prefill.per_token_cast_back", more=_REGIONS)
def per_token_cast_back(
    input_e4m3, input_scale=None, output_dtype=None, narrow_scales_to_bf16=False, token_count_aware=False, **regions
) -> Made:
    """Elements of eight bits times the scales of their runs, in bfloat16 unless another dtype is asked for."""
    name = "experimental.deepseek_prefill.per_token_cast_back"
    if token_count_aware or regions.get("metadata") is not None:
        raise UnsupportedError(f"ttnn.{name}: scales inside of metadata are not covered", fix="input_scale=")
    given = [input_e4m3] if input_scale is None else [input_e4m3, input_scale]
    _, (block, *scales) = operands(name, *given)
    values = block.float()
    for scale in scales:
        factor = scale.float() if not narrow_scales_to_bf16 else scale.to(torch.bfloat16).float()
        values = (_runs(name, values, input_e4m3) * factor.unsqueeze(-1)).flatten(-2)
    made = make(values, moves(*(same(each) for each in given), linear=False), *given)
    made.dtype = output_dtype or DataType.BFLOAT16
    return made
