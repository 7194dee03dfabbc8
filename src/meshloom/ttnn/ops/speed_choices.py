"""What programs say about how hardware does something, beside program configs: accepted, and changes no value."""

from __future__ import annotations

from dataclasses import dataclass

from meshloom.ttnn.choices import Choice
from meshloom.ttnn.ops.configs import ProgramConfig

__all__ = (
    "ChunkGdnFusedProgramConfig ChunkGdnMonoProgramConfig ChunkGdnPhasedProgramConfig ChunkGdnWyInverse "
    "DispatchAlgorithm DistributedLayerNormStage LayerNormType MMSignalAggregatorMode WorkerMode"
).split()


class WorkerMode(Choice):
    """How cores share the sending of tokens to experts."""

    DIRECT, MUX_TOKEN_SPLIT, MUX_PAYLOAD_SPLIT = range(1, 4)


class DispatchAlgorithm(Choice):
    """The way on which tokens go to experts."""

    BROADCAST, SPARSE_UNICAST, SPARSE_MCAST_LINEAR, SPARSE_MCAST_SPLIT_BW, SPARSE_MCAST_SHORTEST_PATH = range(1, 6)


class MMSignalAggregatorMode(Choice):
    """Whether a product waits for several signals at once."""

    Auto, On, Off = range(1, 4)


class LayerNormType(Choice):
    """Which norm."""

    LAYERNORM, RMSNORM = range(1, 3)


class DistributedLayerNormStage(Choice):
    """Which half of a norm over several devices."""

    NOT_DISTRIBUTED, PRE_ALL_GATHER, POST_ALL_GATHER = range(1, 4)


# gated delta rules in chunks


class ChunkGdnWyInverse(Choice):
    """How the triangular matrix of a chunk is inverted."""

    AUTO, FORWARD_SUBSTITUTION, HORNER = range(1, 4)


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
