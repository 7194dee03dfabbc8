"""Constants of the card, as far as the stand-in needs them."""

from enum import Enum

DRAM_WRITE_OFFSET = 0x40
DRAM_ALIGNMENT = 64
PAGE_LIMIT = 2 << 20
TILE_ROWS = TILE_COLS = 32


class DType(Enum):
    """Element sizes. Members of one size are one member, as in the driver: it is no arithmetic type."""

    float32 = 4
    float16 = 2
    int32 = 4  # noqa: PIE796
    uint32 = 4  # noqa: PIE796
    uint16 = 2  # noqa: PIE796
    int8 = 1
    fp8_e4m3 = 1  # noqa: PIE796
    uint8 = 1  # noqa: PIE796
    bfloat16 = 2  # noqa: PIE796
