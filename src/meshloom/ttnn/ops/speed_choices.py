"""What programs say about how hardware does something, beside program configs: accepted, and changes no value."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from meshloom.ttnn.choices import Choice
from meshloom.ttnn.ops.configs import ProgramConfig

__all__ = (
    "ChunkGdnFusedProgramConfig ChunkGdnMonoProgramConfig ChunkGdnPhasedProgramConfig ChunkGdnWyInverse "
    "DispatchAlgorithm DistributedLayerNormStage LayerNormType MMSignalAggregatorMode WorkerMode"
).split()


class WorkerMode(Choice):
    """How cores share the sending of tokens to experts."""

    DIRECT = enum.auto()
    MUX_TOKEN_SPLIT = enum.auto()
    MUX_PAYLOAD_SPLIT = enum.auto()


class DispatchAlgorithm(Choice):
    """The way on which tokens go to experts."""

    BROADCAST = enum.auto()
    SPARSE_UNICAST = enum.auto()
    SPARSE_MCAST_LINEAR = enum.auto()
    SPARSE_MCAST_SPLIT_BW = enum.auto()
    SPARSE_MCAST_SHORTEST_PATH = enum.auto()


class MMSignalAggregatorMode(Choice):
    """Whether a product waits for several signals at once."""

    Auto = enum.auto()
    On = enum.auto()
    Off = enum.auto()


class LayerNormType(Choice):
    """Which norm."""

    LAYERNORM = enum.auto()
    RMSNORM = enum.auto()


class DistributedLayerNormStage(Choice):
    """Which half of a norm over several devices."""

    NOT_DISTRIBUTED = enum.auto()
    PRE_ALL_GATHER = enum.auto()
    POST_ALL_GATHER = enum.auto()


# gated delta rules in chunks


class ChunkGdnWyInverse(Choice):
    """How the triangular matrix of a chunk is inverted."""

    AUTO = enum.auto()
    FORWARD_SUBSTITUTION = enum.auto()
    HORNER = enum.auto()


@dataclass
class ChunkGdnMonoProgramConfig(ProgramConfig):
    """All of it in one program."""


@dataclass(kw_only=True)
class ChunkGdnPhasedProgramConfig(ProgramConfig):
    """One phase after the other."""

    use_mcast: bool = True
    scan_serial: bool = False
    prep_serial: bool = False


@dataclass(kw_only=True)
class ChunkGdnFusedProgramConfig(ProgramConfig):
    """Cores that prepare chunks hand them to cores that scan."""

    num_producers: int | None = None
    num_receivers: int | None = None
    row_local: bool | None = None
    handoff_depth: int | None = None
    unicast: bool = True
    posted: bool = False
    producer_pool: bool | None = None
    pool_extra_share: float | None = None
    handoff_checks: bool = False
    handoff_fault: int = 0
