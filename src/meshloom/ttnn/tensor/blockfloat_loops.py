"""Block floats in one pass over memory: what `blockfloat` computes with torch, as loops that numba compiles.

`blockfloat` loads this file on first use, and only where numba is installed. The result has the same bits. `combine`
works out an op of `CODES` on arrays of bfloat16 and rounds it; `round_floats` rounds what torch has computed.
Without numba the loops are plain functions, which are right and very slow.

A piece stays in the cache while it is worked on. Every block is rounded in the way that suits nearly all of them.
Blocks of tiny values, and those with an infinity or a NaN, are then rounded again, element by element.
"""

from __future__ import annotations

import importlib.util
import operator
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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


def _compile(function: Callable[..., Any], is_kept: bool = False) -> Any:
    """A loop that numba compiles when it is first called. It is kept beside this file, or in the user's cache."""
    if numba is None:
        return function
    how = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=is_kept, **how)(function)
    except RuntimeError:  # neither folder can be written to, so that every process compiles for itself
        return numba.njit(**how)(function)


def _in_vectors() -> Any:
    """`_round_block` with one instruction for all 16 elements: no compiler finds these in the loop by itself."""
    ir, cgutils = import_module("llvmlite.ir"), import_module("numba.core.cgutils")
    vector, floats, short = (ir.VectorType(each, BLOCK) for each in (ir.IntType(32), ir.FloatType(), ir.IntType(16)))

    def splat(builder: Any, value: Any) -> Any:
        empty = ir.Constant(ir.VectorType(value.type, BLOCK), ir.Undefined)
        first = builder.insert_element(empty, value, ir.Constant(ir.IntType(32), 0))
        return builder.shuffle_vector(first, empty, ir.Constant(vector, [0] * BLOCK))

    def number(value: Any) -> Any:
        return ir.Constant(ir.IntType(32), int(value))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        words, start, out, limit, coarse = args
        kinds = signature.args
        given, into = (
            builder.bitcast(
                builder.gep(context.make_array(kind)(context, builder, value=array).data, [start]), each.as_pointer()
            )
            for kind, array, each in ((kinds[0], words, vector), (kinds[2], out, short))
        )
        bits = builder.load(given, align=4)
        kind = ir.FunctionType(ir.IntType(32), [vector])
        top = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.umax.v{BLOCK}i32")
        largest = builder.call(top, [builder.and_(bits, splat(builder, number(SIZE)))])
        exponent = builder.and_(largest, number(SPECIAL))
        calm = builder.select(builder.icmp_signed("<", exponent, number(LOW)), number(LOW), exponent)
        down = builder.bitcast(builder.sub(number(277 << 23), calm), ir.FloatType())  # 2^(150 - exponent)
        up = builder.bitcast(builder.sub(calm, number(23 << 23)), ir.FloatType())  # 2^(exponent - 150)
        whole = builder.fptosi(builder.fmul(builder.bitcast(bits, floats), splat(builder, down)), vector)
        for sign, bound in ((">", limit), ("<", builder.neg(limit))):
            wide = splat(builder, bound)
            whole = builder.select(builder.icmp_signed(sign, whole, wide), wide, whole)
        much = splat(builder, coarse)
        kept = builder.fsub(builder.fadd(builder.sitofp(whole, floats), much), much)
        found = builder.bitcast(builder.fmul(kept, splat(builder, up)), vector)
        builder.store(builder.trunc(builder.lshr(found, splat(builder, number(16))), short), into, align=2)
        return exponent

    @import_module("numba.extending").intrinsic  # type: ignore[untyped-decorator]
    def round_block(typing: Any, words: Any, start: Any, out: Any, limit: Any, coarse: Any) -> Any:
        types = numba.types
        return types.int32(words, types.intp, out, types.int32, types.float32), generate

    return round_block


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


def _exponent_of(words: Array, start: int) -> Any:
    """The exponent of a block, in the place that float32 has it."""
    top = int32(0)
    for at in range(start, start + BLOCK):
        top = max(top, int32(words[at] & SIZE))
    return int32(top & SPECIAL)


def _round_block(words: Array, start: int, out: Array, limit: Any, coarse: Any) -> Any:
    """Round the block that starts there as nearly every block is rounded; its exponent."""
    exponent = _exponent_of(words, start)
    for at in range(start, start + BLOCK):
        out[at] = _narrow(_round_one(int32(words[at]).view(float32), max(exponent, LOW), limit, coarse))
    return exponent


if numba is not None:
    _round_block = _in_vectors()


@_compile
def _round_special(words: Array, exponent: Any, out: Array, limit: Any, coarse: Any) -> None:
    """One block of tiny values, among which denormals are zero, or one with infinities and NaNs, which stay so."""
    for at in range(BLOCK):
        own = int32(words[at] & SPECIAL)
        if own == SPECIAL:
            out[at] = uint16(words[at] >> int32(16)) if int32(words[at] & SIZE) == SPECIAL else NOT_A_NUMBER
        elif own == 0:
            out[at] = uint16(0)
        elif exponent == SPECIAL:
            out[at] = _narrow(_round_one(int32(words[at]).view(float32), exponent, limit, coarse))
        else:
            lifted = int32(exponent + int32(64 << 23))
            out[at] = _narrow(_round_one(int32(words[at]).view(float32) * LIFT, lifted, limit, coarse) / LIFT)


@partial(_compile, is_kept=True)
def _round_piece(words: Array, out: Array, bits: int) -> None:
    limit = int32((2**bits - 1) * 2 ** (24 - bits) + 2 ** (23 - bits) - 1)  # the largest that is not rounded to 2^bits
    coarse = float32(1.5 * 2.0 ** (47 - bits))
    for start in range(0, words.size, BLOCK):
        exponent = _round_block(words, start, out, limit, coarse)
        if exponent == SPECIAL or 0 < exponent < LOW:
            end = start + BLOCK
            _round_special(words[start:end], exponent, out[start:end], limit, coarse)


@partial(_compile, is_kept=True)
def _combine(code: int, x: Array, y: Array, out: Array, bits: int) -> None:
    made = numpy.empty(PIECE, float32)
    for start in range(0, x.size, PIECE):
        end = min(start + PIECE, x.size)
        piece = made[: end - start]
        _apply(code, x[start:end], y[start:end], piece)
        _round_piece(piece.view(int32), out[start:end], bits)


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
    given, words = values.view(torch.int32).view(-1).numpy(), into.view(torch.uint16).view(-1).numpy()
    _share(len(words), lambda part: _round_piece(given[part], words[part], bits))


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
