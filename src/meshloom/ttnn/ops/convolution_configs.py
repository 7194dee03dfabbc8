"""What a convolution is told beside its sizes: dtype of weights, activation, padding, and much about speed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from meshloom.ttnn.choices import Choice
from meshloom.ttnn.device.cores import CoreCoord
from meshloom.ttnn.ops.activations import Activation
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.memory import TensorMemoryLayout

__all__ = (
    "Conv1dConfig Conv2dConfig Conv2dDRAMSliceHeight Conv2dDRAMSliceWidth Conv2dL1Full Conv2dL1FullSliceConfig "
    "Conv2dSliceConfig Conv3dConfig Op2DSliceConfig PaddingMode"
).split()


class PaddingMode(Choice):
    """What is around a picture."""

    Zeros, Replicate = range(2)


@dataclass(kw_only=True)
class Conv2dConfig:
    """How a convolution is done. `weights_dtype`, `activation`, `output_layout`, `padding_mode` and
    `deallocate_activation` change what comes out or what is left; the rest is about speed."""

    weights_dtype: DataType | None = None
    activation: Activation | None = None
    deallocate_activation: bool = False
    reallocate_halo_output: bool = True
    config_tensors_in_dram: bool = False
    act_block_h_override: int = 0
    act_block_w_div: int = 1
    reshard_if_not_optimal: bool = False
    override_sharding_config: bool = False
    shard_layout: TensorMemoryLayout | None = None
    core_grid: Any = None
    transpose_shards: bool = False
    output_layout: Layout = Layout.TILE
    enable_act_double_buffer: bool = False
    enable_weights_double_buffer: bool = False
    full_inner_dim: bool = False
    enable_kernel_stride_folding: bool | None = None
    enable_activation_reuse: bool = False
    force_split_reader: bool | None = None
    override_output_sharding_config: bool = False
    padding_mode: PaddingMode = PaddingMode.Zeros


Conv1dConfig = Conv2dConfig


@dataclass(kw_only=True)
class Conv3dConfig:
    """How a convolution of volumes is done. `C_in_block` is how many input channels of weights stand together,
    `output_layout` and `dilation` change the result; the rest is about speed."""

    weights_dtype: DataType = DataType.BFLOAT16
    output_layout: Layout = Layout.ROW_MAJOR
    T_out_block: int = 1
    W_out_block: int = 1
    H_out_block: int = 1
    C_out_block: int = 0
    C_in_block: int = 0
    dilation: Sequence[int] = (1, 1, 1)
    alignment: int = 32
    compute_with_storage_grid_size: CoreCoord = field(default_factory=lambda: CoreCoord(1, 1))
    enable_fp32_operand_split: bool = False


@dataclass(kw_only=True)
class Op2DSliceConfig:
    """In how many slices a large picture is worked on; about memory only."""

    class SliceTypeEnum(enum.Enum):
        """Along which side slices are cut."""

        DRAMSliceHeight, DRAMSliceWidth, L1Full = range(3)

    slice_type: SliceTypeEnum
    num_slices: int = 0


Conv2dSliceConfig = Op2DSliceConfig
for _kind in Op2DSliceConfig.SliceTypeEnum:  # `Conv2dSliceConfig.DRAMSliceWidth` is written without the name between
    setattr(Op2DSliceConfig, _kind.name, _kind)

Conv2dDRAMSliceHeight, Conv2dDRAMSliceWidth, Conv2dL1Full = Op2DSliceConfig.SliceTypeEnum
Conv2dL1FullSliceConfig = Conv2dSliceConfig(slice_type=Conv2dL1Full)
