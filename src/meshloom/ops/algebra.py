"""When a row with partial operands holds: for every value of the dtype, or it is not offered.

Such a row is an identity: `sum(a) * b = sum(a * b)`. It may hold for real numbers and fail for those of a dtype:

- An integer sum wraps: 100 + 100 is -56 in int8 and 200 where it is widened first. Half-precision sums overflow alike.
- Zero times infinity is nan: the device that holds none of a sum would spoil it for all.
- x + -x is +0 whatever x is, so that -1 * 0 = -0 is lost where a sum is scaled part by part.
- The lowest integer has no opposite, and unsigned integers have none in order.

What every carried sum or product needs is in `holds`: it keeps its dtype, and the numbers that scale it are positive
and finite (for integers: integers). What a row needs besides is its `when`, a word of `CONDITIONS`, and stands in the
table: `"P(max) -> P(min) if floating"`. Rounding is no matter of algebra: the sums of parts may round, and
at the end of the range overflow, where the sum of the whole does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshloom.ops.dtypes import keeps, kind_number
from meshloom.ops.rule import Call, Op, Row
from meshloom.placement import Partial, Shard
from meshloom.types import is_floating, short_dtype

_KINDS: dict[type, int] = {bool: 0, int: 1, float: 2, complex: 3}
_SMALLEST, _LARGEST = 2.0**-126, 2.0**127  # normal numbers of float32, and so are their reciprocals


@dataclass(frozen=True, slots=True)
class Condition:
    """What a row asks of a call besides placements; `meaning` completes "holds ..."."""

    meaning: str
    test: Callable[[Call, Row], bool]


def _partial_dtypes(call: Call, row: Row) -> list[str]:
    return [t.dtype for t, placement in zip(call.operands, row.ins, strict=True) if isinstance(placement, Partial)]


def _are_whole(call: Call, row: Row) -> bool:
    return not any(is_floating(dtype) for dtype in _partial_dtypes(call, row))


def _are_real(call: Call, row: Row) -> bool:
    return all(is_floating(dtype) and dtype[0] != "c" for dtype in _partial_dtypes(call, row))


def _is_scaled(call: Call, row: Row) -> bool:
    return _are_whole(call, row) or (len(call.operands) == 1 and _are_real(call, row))


def _is_divided(call: Call, row: Row) -> bool:
    return call.arguments.get("rounding_mode") is None and _is_scaled(call, row)


def _is_bounded(call: Call, row: Row) -> bool:
    return len(call.operands) == 1 and _are_whole(call, row)


CONDITIONS: dict[str, Condition] = {
    "whole": Condition("for integers, whose sums and products wrap alike", _are_whole),
    "untied": Condition("for integers, which have no gradient that equal ones share", _are_whole),
    "floating": Condition("for floating-point numbers, which have an opposite each", _are_real),
    "scaled": Condition("for integers, or where R stands for a number: a tensor may hold infinity", _is_scaled),
    "divided": Condition("where R stands for a number and nothing is rounded", _is_divided),
    "bounded": Condition("for integers, where the bounds are numbers", _is_bounded),
}


def holds(op: Op, call: Call, row: Row) -> bool:
    """Whether a row is an identity for every value that the operands of a call may have."""
    return _keeps_sums(op, call, row) and (not row.when or CONDITIONS[row.when].test(call, row))


def _keeps_sums(op: Op, call: Call, row: Row) -> bool:
    """Whether sums and products that the row carries keep their dtype and are scaled by numbers that allow it."""
    if not _has_sums(row.ins) or not _has_sums(row.outs):
        return True
    numbers = _numbers(call)
    return _keeps_dtype(op, call, row, numbers) and (_are_whole(call, row) or all(_may_scale(row, n) for n in numbers))


def _has_sums(placements: tuple[object, ...]) -> bool:
    return any(isinstance(each, Partial) and each.op not in ("max", "min") for each in placements)


def _numbers(call: Call) -> list[object]:
    scales = (call.arguments.get(name) for name in ("alpha", "beta"))
    return [each for each in (*call.leaves, *scales) if type(each) in _KINDS]


def _may_scale(row: Row, number: Any) -> bool:
    """Whether floating-point sums may be scaled part by part; beside shards a sum counts once, whatever its sign."""
    cut = any(isinstance(placement, Shard) for placement in row.ins)
    return not isinstance(number, complex) and (-_LARGEST if cut else _SMALLEST) <= number <= _LARGEST


def _keeps_dtype(op: Op, call: Call, row: Row, numbers: list[object]) -> bool:
    sums = _partial_dtypes(call, row)
    kept, asked = sums[0], call.arguments.get("dtype")
    if asked is not None and short_dtype(str(asked)) != kept:
        return False
    if any(dtype != kept for dtype in sums):  # f64 + i32: the sum of the integers may wrap, that of the floats does not
        return False
    if not keeps(op.result.split(", ")[0], kept):
        return False
    beside = [topology.dtype for topology in call.operands] if op.signature is None else sums
    return all(_yields(dtype, kept) for dtype in beside) and all(_KINDS[type(n)] <= kind_number(kept) for n in numbers)


def _yields(dtype: str, kept: str) -> bool:
    """Whether a tensor of one dtype beside one of another leaves that as it is."""
    return dtype == kept or (kind_number(dtype) < kind_number(kept) and not (is_floating(dtype) and dtype != kept))
