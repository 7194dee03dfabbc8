"""Where a device keeps its part: in which memory, and spread over which of its cores or banks."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BufferType(enum.Enum):
    """A kind of memory."""

    DRAM = 0
    L1 = 1
    L1_SMALL = 3
    TRACE = 4


class TensorMemoryLayout(enum.Enum):
    """How a part is spread over cores or banks."""

    INTERLEAVED = 0
    HEIGHT_SHARDED = 2
    WIDTH_SHARDED = 3
    BLOCK_SHARDED = 4
    ND_SHARDED = 5


@dataclass(frozen=True)
class MemoryConfig:
    """Which memory, and how a part is spread over it."""

    memory_layout: TensorMemoryLayout = TensorMemoryLayout.INTERLEAVED
    buffer_type: BufferType = BufferType.DRAM


DRAM_MEMORY_CONFIG = MemoryConfig()
L1_MEMORY_CONFIG = MemoryConfig(buffer_type=BufferType.L1)
