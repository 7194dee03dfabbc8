"""What a chip is like inside, as far as memory goes: DRAM and L1 with their banks, and its grid of cores.

Sizes of DRAM come from the machine preset; what a preset does not say (banks, L1, cores) stands in this table.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from meshloom.errors import ArgumentError, expect
from meshloom.fabric.catalogue import Preset, load_preset, preset

ALIGNMENT = 64
KIB, MIB, GB = 1 << 10, 1 << 20, 10**9


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid of cores or banks: `x` columns, `y` rows.

    >>> Grid(12, 1).num_cores, str(Grid(12, 1))
    (12, '12x1')
    """

    x: int
    y: int

    @property
    def num_cores(self) -> int:
        """How many there are."""
        return self.x * self.y

    def __str__(self) -> str:
        return f"{self.x}x{self.y}"


@dataclass(frozen=True, slots=True)
class Chip:
    """The memory of one device: bytes of DRAM in `banks`, bytes of L1 per core, and the cores.

    >>> chip_of("t3000").banks, chip_of("t3000").dram_grid
    (12, Grid(x=12, y=1))
    """

    name: str
    dram: int
    banks: int
    l1: int
    cores: Grid

    @property
    def dram_grid(self) -> Grid:
        """The banks of DRAM as a grid of one row."""
        return Grid(self.banks, 1)


# DRAM: 12 banks of 1 GB on Wormhole, 8 of 4 GiB on Blackhole. L1 of one core is 0x180000 B on Blackhole, of which the
# first 0x37000 belong to firmware; Wormhole has 1464 KiB. Cores: what a program may use.
WORMHOLE = Chip("wormhole_b0", 12 * GB, 12, 1464 * KIB, Grid(8, 8))
BLACKHOLE = Chip("blackhole", 32 * GB, 8, 0x180000 - 0x37000, Grid(13, 10))
HOST = Chip("host", 12 * GB, 1, 1 * MIB, Grid(1, 1))

_OF_PRESET = {
    "n300": WORMHOLE,
    "t3000": WORMHOLE,
    "galaxy": WORMHOLE,
    "galaxy4": WORMHOLE,
    "quietbox": BLACKHOLE,
    "loudbox": BLACKHOLE,
}


def read_preset(given: str | Preset) -> Preset:
    """A preset by name, from a file, or as it is."""
    if isinstance(given, Preset):
        return given
    expect("preset", given, (str, os.PathLike), fix="give the name of a preset, its file, or a Preset")
    given = os.fspath(given)
    return load_preset(given) if os.sep in given or given.endswith(".toml") else preset(given)


def chip_of(given: str | Preset | None = None, memory: float | None = None) -> Chip:
    """The chip of a machine preset; with `memory`, one whose DRAM is one bank of that many bytes.

    >>> chip_of(memory=1 << 20)
    Chip(name='host', dram=1048576, banks=1, l1=1048576, cores=Grid(x=1, y=1))
    """
    chip = HOST
    if given is not None:
        found = read_preset(given)
        chip = replace(_OF_PRESET.get(found.name, HOST), dram=int(found.memory))
    if memory is None:
        return chip
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not ALIGNMENT <= memory < 1e18:
        raise ArgumentError(
            f"memory={memory!r} is not a size", fix=f"give the bytes of one device, {ALIGNMENT} or more"
        )
    return replace(chip, dram=int(memory), banks=1)
