"""Block floats: 16 neighbours of a row share one exponent; each keeps a sign and a few bits of mantissa.

The exponent is that of the largest of the 16. An element is its 24 bits of significand, shifted to that exponent (bits
that fall off are gone), rounded to `bits` bits to the nearest, ties to even, and cut off at the largest that there is.
Denormals count as zero, and there is no negative zero. A block with an infinity or a NaN has exponent 255: those are
read back as they are, and of the others only what reaches a unit of 2^122 (bfloat8_b) is more than zero. What a row is
filled up with to a whole block counts for its exponent.

`levels` finds the whole number that every element is of its block's unit, with float arithmetic that is exact: scaling
by powers of two, truncating, rounding. `round_blocks` is for values, `pack` and `unpack` are for the bytes of tiles.
Where numba is installed, large arrays are rounded by `blockfloat_loops`, with the same bits.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy
import torch

from meshloom.context import FallbackWarning
from meshloom.errors import ArgumentError
from meshloom.runtime import state
from meshloom.runtime.tiles import FACE, SQUARE, tilize, untilize

BLOCK = FACE
WORD = 16  # bytes that the exponents of a tile are filled up to a multiple of
CHUNK = 1 << 14  # blocks that fit into a cache together with what is made of them
LOW = 32  # exponents below are scaled up first, so that all scales are normal numbers
LIFT = 64
SPECIAL = 255
ONE_MORE = (277 << 23) - (1 << 32)  # of which an exponent is taken: int32 wraps
SMALLEST = 2.0**-126  # below are denormals


def levels(blocks: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every element as a whole number of units of its block, and the exponents: a unit is 2^(exponent - 126 - bits).

    >>> numbers, exponent = levels(torch.tensor([[255.0, 1.0, -3.0, 0.0] + [0.0] * 12]), 7)
    >>> numbers[0, :4].tolist(), exponent.tolist()
    ([127.0, 0.0, -2.0, 0.0], [[134]])
    """
    exponent = blocks.abs().view(torch.int32).amax(-1, keepdim=True) >> 23
    found = _whole(blocks, exponent.clamp(min=LOW), bits)
    return _with_special(found, exponent, lambda rows: _mend(blocks[rows], exponent[rows], bits)), exponent


def _whole(blocks: torch.Tensor, exponent: torch.Tensor, bits: int) -> torch.Tensor:
    """For exponents from LOW to 254: bits that fall off are fractions first, bits that are not kept are then."""
    found = blocks * (277 - exponent << 23).view(torch.float32)  # 2^(150 - exponent)
    found = found.copy_(found.int()).mul_(2.0 ** (bits - 24)).round_()  # int32 truncates in a tenth of trunc's time
    return found.clamp_(1 - 2**bits, 2**bits - 1)


def _with_special(found: torch.Tensor, exponent: torch.Tensor, mend: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Blocks of tiny values and those with an infinity or a NaN done otherwise. Zeros are nothing special."""
    if state.capture is not None:  # nothing has a value now, so all blocks are done both ways
        rows = (exponent > 0) & (exponent < LOW) | (exponent == SPECIAL)
        return torch.where(rows, mend(slice(None)), found)
    low, high = exponent.aminmax()
    if int(low) < LOW or int(high) == SPECIAL:
        rows = ((exponent > 0) & (exponent < LOW) | (exponent == SPECIAL)).squeeze(-1)
        if bool(rows.any()):
            found[rows] = mend(rows)
    return found


def _mend(blocks: torch.Tensor, exponent: torch.Tensor, bits: int) -> torch.Tensor:
    """As `_whole`, for special blocks: tiny values are lifted, denormals among them are zero, infinities are marked."""
    large = _whole(torch.where(blocks.isfinite(), blocks, 0.0), exponent.clamp(min=SPECIAL), bits)
    lifted = torch.where(blocks.abs() < SMALLEST, 0.0, blocks) * 2.0**LIFT
    whole = _whole(lifted, exponent.clamp(max=LOW) + LIFT, bits)
    infinite = torch.where(blocks.isinf(), blocks.sign() * 2 ** (bits - 1), large)
    marked = torch.where(blocks.isnan(), 3.0 * 2 ** (bits - 2), infinite)
    return torch.where(exponent == SPECIAL, marked, whole)


def values_of(numbers: torch.Tensor, exponent: torch.Tensor, bits: int) -> torch.Tensor:
    """The values of whole numbers of units. Adding zero makes -0 positive."""
    unit = (exponent.clamp(min=LOW) - (bits - 1) << 23).view(torch.float32)
    found = (numbers * unit).add_(0.0)
    return _with_special(found, exponent, lambda rows: _read(numbers[rows], exponent[rows], bits))


def _read(numbers: torch.Tensor, exponent: torch.Tensor, bits: int) -> torch.Tensor:
    values = torch.ldexp(numbers.double(), exponent - 126 - bits).float() + 0.0
    return torch.where((exponent == SPECIAL) & (numbers.abs() > 2 ** (bits - 1)), math.nan, values)


def round_blocks(
    values: torch.Tensor, bits: int, dtype: torch.dtype = torch.float32, filled_with: float = 0.0
) -> torch.Tensor:
    """Values as block floats with `bits` of mantissa (7 or 3) can say them, 16 along the last dim a block.

    >>> round_blocks(torch.tensor([255.0, 1.0, -0.0]), 7)
    tensor([254.,   0.,   0.])
    >>> round_blocks(torch.tensor([0.3, 0.7]), 7, filled_with=64.0)
    tensor([0., 1.])
    """
    if not values.numel():
        return values.to(dtype)
    width = values.shape[-1] if values.dim() else 1
    missing = -width % BLOCK
    data = values.float() if filled_with else values
    if missing:
        data = torch.nn.functional.pad(data.reshape(-1, width), [0, missing], value=filled_with)
    blocks = data.reshape(-1, BLOCK)
    if state.capture is not None:
        found = values_of(*levels(blocks.float(), bits), bits).to(dtype)
    else:
        found = _round_all(None, [blocks], bits, dtype)
    return found.reshape(-1, width + missing)[:, :width].reshape(values.shape) if missing else found.view(values.shape)


def round_pointwise(
    function: Callable[..., torch.Tensor], bits: int, *blocks: torch.Tensor, known: Any = None
) -> torch.Tensor:
    """What a function makes of arrays element by element, as block floats in bfloat16; it is given bfloat16 as float32.
    Where all have one shape, it is worked out piece by piece, so that what comes in between never leaves the cache; or
    in one loop, if it is `known` by another name to `blockfloat_loops`.

    >>> round_pointwise(torch.add, 7, torch.tensor([200.0, 1.0]), torch.tensor([55.0, 0.0]))
    tensor([254.,   0.], dtype=torch.bfloat16)
    """
    first = blocks[0]
    is_even = first.dim() > 0 and first.shape[-1] % BLOCK == 0 and first.numel() > BLOCK * CHUNK
    if not is_even or any(each.shape != first.shape or not each.is_contiguous() for each in blocks):
        fine = [each.float() if each.dtype is torch.bfloat16 else each for each in blocks]
        return round_blocks(function(*fine), bits, torch.bfloat16)
    loops = None if known is None else _loops_for(*blocks)
    if loops is not None and known in loops.CODES and all(each.dtype is torch.bfloat16 for each in blocks):
        found: torch.Tensor = loops.combine(loops.CODES[known], bits, first, blocks[-1])
        return found
    flat = [each.view(-1, BLOCK) for each in blocks]
    return _round_all(function, flat, bits, torch.bfloat16).view(first.shape)


def _round_all(
    function: Callable[..., torch.Tensor] | None, blocks: Sequence[torch.Tensor], bits: int, dtype: torch.dtype
) -> torch.Tensor:
    """What a function makes of blocks of 16, or the blocks themselves, rounded piece by piece in float32."""
    found, size = torch.empty(blocks[0].shape, dtype=dtype), min(CHUNK, len(blocks[0]))
    is_large = len(found) > size and dtype is torch.bfloat16
    loops = _loops_for(*blocks) if is_large else None
    work, sizes = (torch.empty(size, BLOCK), torch.zeros(size, 2 * BLOCK)) if loops is None else (found, found)
    fine = [torch.empty(size, BLOCK) if each.dtype is torch.bfloat16 else None for each in blocks]
    is_fine = len(found) <= size  # of one piece alone it is not worth while to ask
    for start in range(0, len(found), size):
        into, parts = found[start : start + size], [each[start : start + size] for each in blocks]
        if len(into) < size:  # the last piece
            work, sizes = work[: len(into)], sizes[: len(into)]
            fine = [None if room is None else room[: len(into)] for room in fine]
        given = [part if room is None else room.copy_(part) for part, room in zip(parts, fine, strict=True)]
        made = given[0] if function is None else function(*given)
        made = made if made.dtype is torch.float32 else made.float()
        if loops is not None:
            loops.round_floats(made.contiguous(), into, bits)
            continue
        is_fine = is_fine or _has_fine_bits(made, bits)  # then the next pieces have some, too
        _round_into(into, made, bits, work, sizes, is_fine)
    return found


def _loops_for(*blocks: torch.Tensor) -> Any:
    """The compiled loops, if they are there and can read these arrays."""
    return _load_loops() if all(each.device.type == "cpu" for each in blocks) else None


@functools.cache
def _load_loops() -> Any:
    """`blockfloat_loops`, where numba is installed."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        return import_module("meshloom.ttnn.tensor.blockfloat_loops")
    except ImportError as error:
        warnings.warn(
            f"numba is installed and cannot be loaded: {error}. Block floats are rounded with torch: the same values, "
            "more slowly. Install a numba that fits: pip install 'meshloom[fast]'",
            FallbackWarning,
            stacklevel=2,
        )
        return None


def _has_fine_bits(values: torch.Tensor, bits: int) -> bool:
    """Whether bits may fall off that matter: of an element that is not rounded to zero, at most its last `bits` do."""
    words = values.numpy().view(numpy.int32).reshape(-1)
    return bool(numpy.bitwise_or.reduce(words) & (1 << bits) - 1)


def _round_into(
    into: torch.Tensor, blocks: torch.Tensor, bits: int, work: torch.Tensor, sizes: torch.Tensor, is_fine: bool
) -> None:
    """Blocks rounded as `values_of(*levels(...))` does, in as few passes as torch has for it.

    The second half of every row of `sizes` is zero: torch finds the largest of 32 in half the time that it takes for
    16. A whole number that goes through int32 is truncated. Adding what is so large that a float of that size has no
    finer bits, and taking it away again, rounds to the nearest of those that are kept, ties to even, and leaves no -0.
    """
    torch.abs(blocks, out=sizes[:, :BLOCK])
    exponent = sizes.view(torch.int32).amax(-1, keepdim=True).bitwise_and_(SPECIAL << 23)
    calm = exponent.clamp(min=LOW << 23)
    torch.mul(blocks, (ONE_MORE - calm).view(torch.float32), out=work)  # times 2^(150 - exponent)
    if is_fine:
        work.copy_(work.int())
    limit = (2**bits - 1) * 2 ** (24 - bits) + 2 ** (23 - bits) - 1  # the largest that is not rounded up to 2^bits
    coarse = 1.5 * 2.0 ** (47 - bits)
    torch.nn.functional.hardtanh_(work, -limit, limit).add_(coarse).sub_(coarse)
    into.copy_(work.mul_((calm - (23 << 23)).view(torch.float32)))  # times 2^(exponent - 150)
    low, high = (int(each) >> 23 for each in torch.aminmax(exponent))
    if low < LOW or high == SPECIAL:
        exponent = exponent >> 23
        rows = ((exponent > 0) & (exponent < LOW) | (exponent == SPECIAL)).squeeze(-1)
        if bool(rows.any()):
            into[rows] = values_of(*levels(blocks[rows], bits), bits).to(into.dtype)


def pack(values: torch.Tensor, bits: int, tile: Sequence[int] = SQUARE) -> torch.Tensor:
    """The bytes of tiles: for each 64 exponents, then 1024 signs and mantissas, in the order of faces. In smaller tiles
    there are fewer, and zeros fill the exponents up to words of 16.

    Sides that are no multiple of a tile's are padded with zeros. The last dim of the result is a tile, the one before
    it counts the tiles of a matrix. With `bits=3`, the first of two elements is in the lower half of their byte.

    >>> pack(torch.ones(2, 40, 32), 7).shape, pack(torch.ones(32, 32), 3).shape
    (torch.Size([2, 2, 1088]), torch.Size([1, 576]))
    >>> pack(torch.full((32, 32), -1.5), 7)[0, [0, 64]]
    tensor([127, 224], dtype=torch.uint8)
    """
    _check_bits(bits)
    matrix = values.reshape((1,) * (2 - values.dim()) + tuple(values.shape))
    tiles = tilize(matrix.float(), pad=True, tile=tile)
    blocks = tiles.reshape(-1, BLOCK)
    rows, size = math.prod(tile) // BLOCK, BLOCK if bits == 7 else BLOCK // 2
    front = -(-rows // WORD) * WORD
    found = torch.zeros(len(blocks) // rows, front + rows * size, dtype=torch.uint8)
    per_chunk = CHUNK // rows
    for part, into in zip(torch.split(blocks, CHUNK), torch.split(found, per_chunk), strict=True):
        numbers, exponent = levels(part, bits)
        into[:, :rows] = exponent.view(-1, rows)
        into[:, front:] = _bytes(numbers, bits).view(-1, rows * size)
    return found.view(*tiles.shape[:-1], -1, front + rows * size)


def _bytes(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """The size of a number and its sign in one byte; of -1 to 1 - 2^bits, the bit for the sign is set as it is."""
    whole = numbers.to(torch.int8)
    signed = whole.abs().view(torch.uint8) | whole.view(torch.uint8) & 1 << bits
    return signed if bits == 7 else signed[:, ::2] | signed[:, 1::2] << 4


def _numbers(signed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `_bytes`: a negative number has all bits of its size turned, and one added."""
    if bits == 3:
        signed = torch.stack((signed & 0xF, signed >> 4), -1).reshape(-1, BLOCK)
    negative = signed >> bits
    whole = (signed & (1 << bits) - 1).bitwise_xor_(negative.neg()).add_(negative)
    return whole.view(torch.int8).float()


def unpack(tiles: torch.Tensor, shape: Sequence[int], bits: int, tile: Sequence[int] = SQUARE) -> torch.Tensor:
    """The float32 values of the bytes of tiles, as a tensor of that shape: the inverse of `pack` up to rounding.

    >>> unpack(pack(torch.full((3, 5), 1 / 3), 7), (3, 5), 7)[0, 0]
    tensor(0.3320)
    """
    _check_bits(bits)
    rows, size = math.prod(tile) // BLOCK, BLOCK if bits == 7 else BLOCK // 2
    sizes = (1,) * (2 - len(shape)) + tuple(shape)
    front = -(-rows // WORD) * WORD
    room = math.prod(sizes[:-2]) * math.prod(-(-side // part) for side, part in zip(sizes[-2:], tile, strict=True))
    if tiles.dtype != torch.uint8 or tiles.numel() != room * (front + rows * size):
        raise ArgumentError(
            f"{tiles.numel()} elements of {tiles.dtype} are not the tiles of shape {list(shape)}",
            fix=f"{room} tiles of {front + rows * size} bytes, torch.uint8",
        )
    data = tiles.reshape(-1, front + rows * size)
    values = torch.empty(len(data), rows, BLOCK)
    for part, into in zip(torch.split(data, CHUNK // rows), torch.split(values, CHUNK // rows), strict=True):
        exponent = part[:, :rows].reshape(-1, 1).to(torch.int32)
        numbers = _numbers(part[:, front:].reshape(-1, size), bits)
        into[:] = values_of(numbers, exponent, bits).view(into.shape)
    return untilize(values.reshape(*sizes[:-2], -1), sizes, tile).reshape(tuple(shape))


def _check_bits(bits: int) -> None:
    if bits not in (3, 7):
        raise ArgumentError(f"there are no block floats with {bits} bits of mantissa", fix="7 (bfloat8_b) or 3 (4_b)")
