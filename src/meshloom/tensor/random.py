"""Random numbers that do not depend on placements: fixed tiles of the flat global index, each with its own stream.

Each random op draws one 64-bit key from torch's default generator, so that `manual_seed`, `fork_rng` and activation
checkpointing hold. Tile t of a tensor is drawn from a stream that depends on all 128 bits of (key, t); whoever needs a
part of a tile draws the tile, so the values are the same wherever they are needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy
import torch

from meshloom.engines.layout import empty_stored, torch_dtype
from meshloom.errors import UnsupportedError, where
from meshloom.placement import Topology, extents
from meshloom.processes.divergence import is_compared, note
from meshloom.runtime import state
from meshloom.types import Shape, numel

TILE = 1 << 16
_MASK = (1 << 64) - 1

Draw = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


class _Keys(threading.local):
    """The keys of one call where a client draws them: the client notes them, its workers are given them."""

    drawn: list[int] | None = None
    given: Iterator[int] | None = None


KEYS = _Keys()


@contextmanager
def keys_given(keys: Sequence[int]) -> Iterator[None]:
    """The next keys are these."""
    KEYS.given = iter(keys)
    try:
        yield
    finally:
        KEYS.given = None


def note_key(generator: torch.Generator | None = None) -> None:
    """Where there is no data, nothing is drawn, unless workers are to be given the key."""
    if KEYS.drawn is not None:
        KEYS.drawn.append(draw_key(generator))


def draw_key(generator: torch.Generator | None = None) -> int:
    """One 64-bit key from torch's default generator, or from a given one."""
    if KEYS.given is not None:
        return next(KEYS.given)
    key = int(torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, generator=generator).item()) & _MASK
    if is_compared() and state.shadows is None:
        note(f"random key {key:016x}", where())
    return key


class Streams(threading.local):
    """torch's generator, started anew for each tile from 128 bits: (key, tile).

    `manual_seed` would keep 32 bits, and tiles would collide. So all 624 words of the generator's state are set, from
    numpy's Philox under the key (key, tile); torch's distributions stay as they are.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(_PROBE)
        self._state = self._generator.get_state()
        self._words = self._state.numpy()[_WORDS : _WORDS + 624 * 8].view(numpy.uint64)
        if self._state.numel() != 5056 or self._words[:2].tolist() != _PROBED:
            raise UnsupportedError(f"torch {torch.__version__} keeps the state of its generator in another layout")
        self._philox = numpy.random.Philox(key=0)
        self._start = self._philox.state
        self._key = self._start["state"]["key"]

    def at(self, key: int, tile: int) -> torch.Generator:
        """The generator at the start of a tile's stream; it is the same object every time.

        >>> a, b, c = (float(torch.rand((), generator=STREAMS.at(1, tile))) for tile in (0, 1, 0))
        >>> a == c, a == b
        (True, False)
        """
        self._key[0], self._key[1] = key, tile
        self._philox.state = self._start
        self._words[:] = self._philox.random_raw(312).view(numpy.uint32)
        return self._generator.set_state(self._state)


_PROBE, _WORDS = 5, 24  # a seed, and where its words begin: after the seed, two counters and the place of the next word
_PROBED = [_PROBE, (1812433253 * _PROBE + 1) % (1 << 32)]  # the first words of a Mersenne twister of that seed
STREAMS = Streams()


def fill_tiles(shape: Shape, dtype: torch.dtype, draw: Draw, key: int) -> torch.Tensor:
    """A dense tensor whose flat index is filled tile by tile."""
    count = numel(shape)
    flat = torch.empty(count, dtype=dtype)
    for tile in range(-(-count // TILE)):
        draw(flat[tile * TILE : (tile + 1) * TILE], STREAMS.at(key, tile))
    return flat.view(shape)


def fill(topology: Topology, draw: Draw, key: int) -> torch.Tensor:
    """What this process stores of a tensor of random numbers: of tiles that it holds nothing of, none is drawn."""
    if topology.shape == topology.stored_shape:
        return fill_tiles(topology.shape, torch_dtype(topology.dtype), draw, key)
    stored = empty_stored(topology)
    row = numel(topology.shape[1:])
    step = max(1, TILE // max(1, row))  # rows that are drawn at a time: no process ever has much more than it holds
    for extent in extents(topology):
        for begin in range(0, extent.shape[0], step):
            count, place = min(step, extent.shape[0] - begin), extent.place[0] + begin
            drawn = _draw_range((extent.start[0] + begin) * row, count * row, topology, draw, key)
            held = (slice(None), *extent.slices[1:])
            to = (slice(place, place + count), *extent.stored[1:])
            stored[to] = drawn.view(count, *topology.shape[1:])[held]
    return stored


def _draw_range(begin: int, count: int, topology: Topology, draw: Draw, key: int) -> torch.Tensor:
    """Some neighbours of the flat index; a tile is drawn whole, as whoever holds another part of it does."""
    total = numel(topology.shape)
    flat = torch.empty(count, dtype=torch_dtype(topology.dtype))
    for tile in range(begin // TILE, -(-(begin + count) // TILE)):
        start, stop = tile * TILE, min((tile + 1) * TILE, total)
        drawn = draw(flat.new_empty(stop - start), STREAMS.at(key, tile))
        left, right = max(start, begin), min(stop, begin + count)
        flat[left - begin : right - begin] = drawn[left - start : right - start]
    return flat


def normal(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Standard normal values."""
    return out.normal_(generator=generator)


def uniform(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Uniform values in [0, 1)."""
    return out.uniform_(generator=generator)


def exponential(out: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Exponential values above zero. torch's own may be drawn by another library from a seed of 32 bits."""
    drawn = torch.empty(out.shape, dtype=torch.float64).uniform_(generator=generator)
    return out.copy_(drawn.neg_().log1p_().neg_().clamp_(min=2.0**-60))
