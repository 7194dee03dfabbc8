"""Block floats in one pass over memory: what `blockfloat` computes with torch, as loops that numba compiles.

`blockfloat` loads this file on first use, and only where numba is installed. The result has the same bits. `combine`
works out an op of `CODES` on arrays of bfloat16 and rounds it; `round_floats` rounds what torch has computed.
Without numba the loops are plain functions, which are right and very slow.

A piece stays in the cache while it is worked on. All of its blocks are rounded in the way that suits nearly every one.
Blocks of tiny values, and those with an infinity or a NaN, are then rounded again, one by one.
"""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy
import torch

from meshloom.runtime.tiles import FACE

numba: Any = import_module("numba") if importlib.util.find_spec("numba") else None

Array = Any  # of numpy, in one piece, with one dim
float32, int32, uint16 = numpy.float32, numpy.int32, numpy.uint16
BLOCK = FACE
PIECE = 128 * BLOCK  # elements; what is made of them fits into the nearest cache
SHARE = 1 << 18  # elements that are worth a thread of their own

SIZE = int32(0x7FFFFFFF)  # all bits of a float32 but its sign
SPECIAL = int32(255 << 23)
LOW = int32(32 << 23)  # exponents below are scaled up first, so that all scales are normal numbers
LIFT = float32(2.0**64)
NOT_A_NUMBER = uint16(0x7FC0)

CODES: dict[Any, int] = {
    torch.clone: 0,
    torch.add: 1,
    torch.sub: 2,
    operator.sub: 2,
    torch.mul: 3,
    operator.mul: 3,
    torch.div: 4,
    torch.maximum: 5,
    torch.minimum: 6,
    torch.nn.functional.relu: 7,
    torch.neg: 8,
    torch.abs: 9,
    torch.square: 10,
}


def _compile(function: Callable[..., Any]) -> Any:
    """A loop that numba compiles when it is first called, and keeps beside this file or in the user's cache folder."""
    if numba is None:
        return function
    how = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **how)(function)
    except RuntimeError:  # it can write to neither folder: every process compiles for itself
        return numba.njit(**how)(function)


@_compile
def _widen(word: Any) -> Any:
    return int32(int32(word) << int32(16)).view(float32)


@_compile
def _apply(code: int, x: Array, y: Array, made: Array) -> None:
    """An op of CODES in float32. For ops of one operand, `y` is not read."""
    if code == 0:
        for at in range(x.size):
            made[at] = _widen(x[at])
    elif code == 1:
        for at in range(x.size):
            made[at] = _widen(x[at]) + _widen(y[at])
    elif code == 2:
        for at in range(x.size):
            made[at] = _widen(x[at]) - _widen(y[at])
    elif code == 3:
        for at in range(x.size):
            made[at] = _widen(x[at]) * _widen(y[at])
    elif code == 4:
        for at in range(x.size):
            made[at] = _widen(x[at]) / _widen(y[at])
    elif code == 5:  # a NaN of either operand stays one
        for at in range(x.size):
            one, other = _widen(x[at]), _widen(y[at])
            made[at] = other if one < other or other != other else one
    elif code == 6:
        for at in range(x.size):
            one, other = _widen(x[at]), _widen(y[at])
            made[at] = other if one > other or other != other else one
    elif code == 7:
        for at in range(x.size):
            one = _widen(x[at])
            made[at] = float32(0.0) if one < float32(0.0) else one
    elif code == 8:
        for at in range(x.size):
            made[at] = -_widen(x[at])
    elif code == 9:
        for at in range(x.size):
            made[at] = abs(_widen(x[at]))
    elif code == 10:
        for at in range(x.size):
            made[at] = _widen(x[at]) * _widen(x[at])


@_compile
def _share_exponents(words: Array, exponents: Array) -> bool:
    """The exponent of its block for every element, in the place that float32 has it; whether a block is special."""
    is_special = False
    for block in range(words.size // BLOCK):
        top = int32(0)
        for at in range(BLOCK):
            top = max(top, int32(words[BLOCK * block + at] & SIZE))
        exponent = int32(top & SPECIAL)
        is_special |= (exponent != 0) & (exponent < LOW) | (exponent == SPECIAL)
        for at in range(BLOCK):
            exponents[BLOCK * block + at] = exponent
    return is_special


@_compile
def _round_one(value: Any, exponent: Any, limit: Any, coarse: Any) -> Any:
    """One element of a block with that exponent, from LOW on: truncated, cut off, and rounded, ties to even.

    Adding what is so large that a float of that size has no finer bits, and taking it away again, is that rounding.
    """
    down = int32(int32(int32(254 << 23) - exponent) + int32(23 << 23)).view(float32)  # 2^(150 - exponent)
    kept = float32(min(max(int32(value * down), int32(-limit)), limit))
    return float32(((kept + coarse) - coarse) * int32(exponent - int32(23 << 23)).view(float32))


@_compile
def _narrow(value: Any) -> Any:
    """A float32 that bfloat16 has exactly, as that."""
    return uint16(float32(value).view(int32) >> int32(16))


@_compile
def _round_special(values: Array, words: Array, exponent: Any, out: Array, limit: Any, coarse: Any) -> None:
    """One block of tiny values, among which denormals are zero, or one with infinities and NaNs, which stay so."""
    for at in range(BLOCK):
        own = int32(words[at] & SPECIAL)
        if own == SPECIAL:
            out[at] = uint16(words[at] >> int32(16)) if int32(words[at] & SIZE) == SPECIAL else NOT_A_NUMBER
        elif own == 0:
            out[at] = uint16(0)
        elif exponent == SPECIAL:
            out[at] = _narrow(_round_one(values[at], exponent, limit, coarse))
        else:
            lifted = _round_one(values[at] * LIFT, int32(exponent + int32(64 << 23)), limit, coarse)
            out[at] = _narrow(lifted / LIFT)


@_compile
def _round_piece(values: Array, exponents: Array, out: Array, bits: int) -> None:
    limit = int32((2**bits - 1) * 2 ** (24 - bits) + 2 ** (23 - bits) - 1)  # the largest that is not rounded to 2^bits
    coarse = float32(1.5 * 2.0 ** (47 - bits))
    words = values.view(int32)
    is_special = _share_exponents(words, exponents)
    for at in range(values.size):
        out[at] = _narrow(_round_one(values[at], max(exponents[at], LOW), limit, coarse))
    if is_special:
        for start in range(0, values.size, BLOCK):
            end, exponent = start + BLOCK, exponents[start]
            if exponent == SPECIAL or 0 < exponent < LOW:
                _round_special(values[start:end], words[start:end], exponent, out[start:end], limit, coarse)


@_compile
def _combine(code: int, x: Array, y: Array, out: Array, bits: int) -> None:
    made, exponents = numpy.empty(PIECE, float32), numpy.empty(PIECE, int32)
    for start in range(0, x.size, PIECE):
        end = min(start + PIECE, x.size)
        piece = made[: end - start]
        _apply(code, x[start:end], y[start:end], piece)
        _round_piece(piece, exponents, out[start:end], bits)


@_compile
def _round_floats(values: Array, out: Array, bits: int) -> None:
    exponents = numpy.empty(PIECE, int32)
    for start in range(0, values.size, PIECE):
        end = min(start + PIECE, values.size)
        _round_piece(values[start:end], exponents, out[start:end], bits)


def combine(code: int, bits: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """An op of CODES on arrays of bfloat16 in one piece and of whole blocks, rounded once.

    >>> x, y = torch.full((16,), 200.0).bfloat16(), torch.arange(16).bfloat16()
    >>> combine(CODES[torch.add], 7, x, y)[:5]
    tensor([200., 200., 202., 204., 204.], dtype=torch.bfloat16)
    """
    found = torch.empty_like(x)
    first, second, into = (each.view(torch.uint16).view(-1).numpy() for each in (x, y, found))
    _share(len(into), lambda part: _combine(code, first[part], second[part], into[part], bits))
    return found


def round_floats(values: torch.Tensor, into: torch.Tensor, bits: int) -> None:
    """Values in float32, in one piece and of whole blocks, rounded into an array of bfloat16.

    >>> into = torch.empty(16, dtype=torch.bfloat16)
    >>> round_floats(torch.tensor([255.0, 1.0, -3.0] + [0.0] * 13), into, 7); into[:3]
    tensor([254.,   0.,  -4.], dtype=torch.bfloat16)
    """
    given, words = values.view(-1).numpy(), into.view(torch.uint16).view(-1).numpy()
    _share(len(words), lambda part: _round_floats(given[part], words[part], bits))


def _share(count: int, act: Callable[[slice], None]) -> None:
    """Work on that many elements by as many threads as torch would take, this one among them."""
    threads = min(torch.get_num_threads(), -(-count // SHARE))
    size = -(-count // (threads * PIECE)) * PIECE
    parts = [slice(start, start + size) for start in range(0, count, size)]
    waiting = [_helpers().submit(act, part) for part in parts[1:]]
    act(parts[0])
    for each in waiting:
        each.result()


_pools: list[ThreadPoolExecutor] = []
os.register_at_fork(after_in_child=_pools.clear)  # a fork has none of its parent's threads


def _helpers() -> ThreadPoolExecutor:
    if not _pools:
        _pools.append(ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="meshloom block floats"))
    return _pools[0]
