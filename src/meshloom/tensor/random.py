"""Random numbers that do not depend on placements: fixed tiles of the flat global index, each with its own seed.

Each random op draws one 64-bit key from torch's default generator, so that `manual_seed`, `fork_rng` and activation
checkpointing hold. Tile t of a tensor is drawn from a generator seeded by (key, t); whoever needs a part of a tile
draws the tile, so the values are the same wherever they are needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshloom.backends.checks import is_listening, note
from meshloom.errors import where
from meshloom.types import Shape, numel

TILE = 1 << 16
_MASK = (1 << 64) - 1

Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def draw_key(generator: torch.Generator | None = None) -> int:
    """One 64-bit key from torch's default generator, or from a given one."""
    key = int(torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, generator=generator).item()) & _MASK
    if is_listening():
        note(f"random key {key:016x} at {where()}")
    return key


def seed_of(key: int, tile: int) -> int:
    """A seed for one tile (splitmix64 of the key advanced by the tile).

    >>> seed_of(1, 0) != seed_of(1, 1) != seed_of(2, 0)
    True
    """
    z = (key + 0x9E3779B97F4A7C15 * (tile + 1)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def fill_tiles(shape: Shape, dtype: torch.dtype, draw: Draw, key: int) -> torch.Tensor:
    """A dense tensor whose flat index is filled tile by tile."""
    count = numel(shape)
    flat = torch.empty(count, dtype=dtype)
    generator = torch.Generator()
    for tile in range(-(-count // TILE)):
        generator.manual_seed(seed_of(key, tile))
        draw(flat[tile * TILE : (tile + 1) * TILE], generator)
    return flat.view(shape)


def normal(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values."""
    return out.normal_(generator=generator)


def uniform(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Uniform values in [0, 1)."""
    return out.uniform_(generator=generator)
