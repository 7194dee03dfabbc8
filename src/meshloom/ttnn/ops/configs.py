"""What programs say about how hardware should compute: kernel configs and program configs.

Products here are exact as torch's and there are no kernels to place, so these are values that ops accept, check for
their type, and leave alone. Their fields and defaults are the original's; all may be changed.
"""

from __future__ import annotations

import enum
from ast import literal_eval
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Any

from meshloom.errors import ArgumentError
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.device.cores import CoreCoord, CoreRangeSet
from meshloom.ttnn.device.system import Arch
from meshloom.ttnn.tensor.formats import MathFidelity

__all__ = """NOC NOC_MODE BlackholeComputeKernelConfig ComputeKernelConfig CoreType DeviceComputeKernelConfig
    LayerNormDefaultProgramConfig LayerNormShardedMultiCoreProgramConfig MatmulMultiCoreReuseMultiCast1DProgramConfig
    MatmulMultiCoreReuseMultiCastBatchedDRAMShardedProgramConfig MatmulMultiCoreReuseMultiCastDRAMShardedProgramConfig
    MatmulMultiCoreReuseMultiCastProgramConfig MatmulMultiCoreReuseProgramConfig MatmulProgramConfig
    MinimalMatmulConfig ProgramConfig SDPAProgramConfig SlidingWindowParallelConfig SoftmaxDefaultProgramConfig
    SoftmaxProgramConfig SoftmaxShardedMultiCoreProgramConfig ThrottleLevel WormholeComputeKernelConfig
    init_device_compute_kernel_config""".split()


class ThrottleLevel(Choice):
    """How much slower than it could matrix hardware runs."""

    NO_THROTTLE, LEVEL_1, LEVEL_2, LEVEL_3, LEVEL_4, LEVEL_5 = range(6)


class NOC(Choice):
    """One of the two networks of a chip."""

    RISCV_0_default, RISCV_1_default = range(2)


class NOC_MODE(Choice):
    """Whether kernels keep to one network."""

    DM_DEDICATED_NOC, DM_DYNAMIC_NOC = range(2)


_CORES = (
    "ARC DRAM ACTIVE_ETH IDLE_ETH PCIE TENSIX ROUTER_ONLY SECURITY L2CPU HARVESTED ETH WORKER DISPATCH COUNT "
    "UNSPECIFIED"
)
CoreType = enum.Enum("CoreType", _CORES.split(), start=0)  # type: ignore[misc]


@dataclass(kw_only=True)
class DeviceComputeKernelConfig:
    """How kernels compute.

    >>> WormholeComputeKernelConfig(math_fidelity=MathFidelity.HiFi4, fp32_dest_acc_en=True).packer_l1_acc
    False
    """

    math_fidelity: MathFidelity = MathFidelity.Invalid
    math_approx_mode: bool = True
    fp32_dest_acc_en: bool = False
    packer_l1_acc: bool = False
    dst_full_sync_en: bool = False
    throttle_level: ThrottleLevel = ThrottleLevel.NO_THROTTLE

    def __post_init__(self) -> None:
        if not isinstance(self.math_fidelity, MathFidelity):
            raise ArgumentError(f"math_fidelity={self.math_fidelity!r} is no MathFidelity", fix="MathFidelity.HiFi4")


WormholeComputeKernelConfig = BlackholeComputeKernelConfig = ComputeKernelConfig = DeviceComputeKernelConfig


def init_device_compute_kernel_config(
    arch: Arch, device_kernel_config: DeviceComputeKernelConfig | None = None, **values: Any
) -> DeviceComputeKernelConfig:
    """A copy of a config, its fidelity filled in; without one, a config of the values that are given.

    >>> init_device_compute_kernel_config(Arch.WORMHOLE_B0, math_fidelity=MathFidelity.HiFi2).math_fidelity
    MathFidelity.HiFi2
    """
    if not isinstance(arch, Arch):
        raise ArgumentError(f"init_device_compute_kernel_config takes an Arch, not {arch!r}", fix="device.arch()")
    filled = {"math_fidelity": MathFidelity.LoFi, **values}
    if device_kernel_config is None:
        return DeviceComputeKernelConfig(**filled)
    is_told = device_kernel_config.math_fidelity is not MathFidelity.Invalid
    return replace(device_kernel_config, **({} if is_told else {"math_fidelity": filled["math_fidelity"]}))


class ProgramConfig:
    """How an op is laid out on cores."""


class MatmulProgramConfig(ProgramConfig):
    """How a product of matrices is laid out on cores."""


class SoftmaxProgramConfig(ProgramConfig):
    """How a softmax is laid out on cores."""


# What a field is unless said, where it is no number, None or bool: each config has its own.
_MADE: dict[str, Callable[[], Any]] = {"CoreRangeSet()": CoreRangeSet, "CoreCoord(1, 1)": lambda: CoreCoord(1, 1)}


def config(name: str, doc: str, fields: str = "", base: type = ProgramConfig, module: str = __name__) -> Any:
    """A config by the text of its fields, which are told by name.

    >>> config("Blocks", "Sizes of blocks.", "block_h: int; inplace: bool = False")(block_h=2)
    Blocks(block_h=2, inplace=False)
    """
    listed: list[Any] = []
    for each in filter(None, fields.split("; ")):
        head, _, default = each.partition(" = ")
        own, _, kind = head.partition(": ")
        if default:
            made = _MADE.get(default)
            value = field(default=literal_eval(default)) if made is None else field(default_factory=made)
            listed.append((own, kind, value))
        else:
            listed.append((own, kind))
    return make_dataclass(name, listed, bases=(base,), kw_only=True, namespace={"__doc__": doc, "__module__": module})


# every core makes a block of the result
_Reuse = config(
    "_Reuse",
    "What all have in which every core makes a block of the result.",
    "compute_with_storage_grid_size: CoreCoord; in0_block_w: int; out_subblock_h: int; out_subblock_w: int; "
    "per_core_M: int; per_core_N: int; allowed_worker_cores: CoreRangeSet | None = None",
    MatmulProgramConfig,
)
MatmulMultiCoreReuseProgramConfig = config(
    "MatmulMultiCoreReuseProgramConfig", "Every core makes a block of the result.", base=_Reuse
)
MatmulMultiCoreReuseMultiCastProgramConfig = config(
    "MatmulMultiCoreReuseMultiCastProgramConfig",
    "Operands are sent along rows and columns of cores.",
    "out_block_h: int | None = None; out_block_w: int | None = None; transpose_mcast: bool; "
    "fused_activation: Any = None; fuse_batch: bool = True",
    _Reuse,
)
MatmulMultiCoreReuseMultiCast1DProgramConfig = config(
    "MatmulMultiCoreReuseMultiCast1DProgramConfig",
    "One operand is sent to all cores.",
    "out_block_h: int | None = None; out_block_w: int | None = None; fuse_batch: bool; fused_activation: Any = None; "
    "mcast_in0: bool; gather_in0: bool = False; hop_cores: CoreRangeSet = CoreRangeSet(); "
    "num_global_cb_receivers: int = 1; untilize_out: bool = False; stream_in1: bool = False",
    _Reuse,
)
MatmulMultiCoreReuseMultiCastBatchedDRAMShardedProgramConfig = config(
    "MatmulMultiCoreReuseMultiCastBatchedDRAMShardedProgramConfig",
    "The second operand is read from the banks that have it, for batches.",
    "in0_block_w: int; per_core_M: int; per_core_N: int; fused_activation: Any = None",
    MatmulProgramConfig,
)
MatmulMultiCoreReuseMultiCastDRAMShardedProgramConfig = config(
    "MatmulMultiCoreReuseMultiCastDRAMShardedProgramConfig",
    "As the one above, for one matrix.",
    "num_workers_per_dram_bank: int = 1",
    MatmulMultiCoreReuseMultiCastBatchedDRAMShardedProgramConfig,
)
MinimalMatmulConfig = config(
    "MinimalMatmulConfig",
    "Sizes of blocks of a simple product of matrices.",
    "M_block_size: int = 1; K_block_size: int = 1; N_block_size: int = 1; subblock_h: int = 1; subblock_w: int = 1; "
    "compute_with_storage_grid_size: CoreCoord = CoreCoord(1, 1)",
)
LayerNormDefaultProgramConfig = config(
    "LayerNormDefaultProgramConfig",
    "A norm on interleaved tensors.",
    "legacy_reduction: bool = False; legacy_rsqrt: bool = False; use_welford: bool = False",
)
LayerNormShardedMultiCoreProgramConfig = config(
    "LayerNormShardedMultiCoreProgramConfig",
    "A norm on sharded tensors.",
    "compute_with_storage_grid_size: CoreCoord; subblock_w: int; block_h: int; block_w: int; inplace: bool",
    LayerNormDefaultProgramConfig,
)
SoftmaxDefaultProgramConfig = config(
    "SoftmaxDefaultProgramConfig", "A softmax on interleaved tensors.", base=SoftmaxProgramConfig
)
SoftmaxShardedMultiCoreProgramConfig = config(
    "SoftmaxShardedMultiCoreProgramConfig",
    "A softmax on sharded tensors.",
    "compute_with_storage_grid_size: CoreCoord; subblock_w: int; block_h: int; block_w: int",
    SoftmaxProgramConfig,
)
SDPAProgramConfig = config(
    "SDPAProgramConfig",
    "Attention in chunks of queries and keys.",
    "compute_with_storage_grid_size: CoreCoord; sub_core_grids: CoreRangeSet | None = None; q_chunk_size: int; "
    "k_chunk_size: int; exp_approx_mode: bool | None = None; max_cores_per_head_batch: int = 16; "
    "max_k_splits: int = 1; matmul_math_fidelity: MathFidelity | None = None; segmented_accumulation: bool = False",
)
SlidingWindowParallelConfig = config(
    "SlidingWindowParallelConfig",
    "How convolutions and pools go over cores.",
    "grid: CoreRangeSet; shard_scheme: TensorMemoryLayout; shard_orientation: ShardOrientation",
)
