"""The placements of a per-device result: those of the row that the operands' placements match.

A device that computes an op on what it holds carries out a row of the op's rule, if one has the placements at hand:
`S(0), R -> S(0)` of matmul says that products of row shards are row shards. Where no row does, the global tensor cannot
be reconstructed from the parts (None). Rows are read as one device carries them out, without the others:

- R counts as a shard of the same size: what all devices hold alike is a chunk of a whole that repeats it.
- What needs statistics of other devices is not done. Chunks that each device worked on for itself stand side by side
  (softmax over a sharded dim), and of a maximum every device has a term.
- A device divides a mean by its own count: it has a term of a mean. What keeps sums keeps means.
- Conditions on dtypes (`Row.when`) are not asked: they guard the planner's choice, and here nothing is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from meshloom.ops.labels import SUM, R
from meshloom.ops.rule import Call, Choices, Row, Rule
from meshloom.placement import Partial, Placement, Replicate, Shard
from meshloom.types import Shape

MEAN = Partial("mean")

EXACT = "exact"  # the label of a row in which R counts as R only
ANYTHING = Replicate()  # this very object in a row: an operand whose placement does not matter
Known = Placement | None  # None: parts differ, and the global tensor cannot be reconstructed from them


def choices_alone(rule: Rule, call: Call) -> Choices:
    """What a rule offers for a call that one device carries out; shapes are those of its parts."""
    found = rule(call)
    return replace(found, rows=tuple(row for each in found.rows for row in _alone(call.op, each)))


def _alone(op: str, row: Row) -> Iterator[Row]:
    out = row.outs[0]
    if op == "mean" and out == SUM and row.ins != (SUM,):
        yield replace(row, outs=(MEAN,))
    elif row.local or isinstance(out, Shard):
        yield row
    elif len(row.inner) == 1 and row.inner[0].op in ("max", "min") and not row.inner[0].indexed:
        yield replace(row, outs=(Partial(row.inner[0].op),))


def follow(rows: Sequence[Row], operands: Sequence[Sequence[Known]], shapes: Sequence[Shape]) -> tuple[Known, ...]:
    """What each mesh axis does to a result, from what it does to each operand and the shapes of their parts.

    >>> rows = (Row("m", (Shard(0), R), (Shard(0),)), Row("k", (Shard(1), Shard(0)), (SUM,)))
    >>> found = follow(rows, [[Shard(0), Shard(1), R, SUM], [R, Shard(0), R, R]], [(2, 3), (3, 4)])
    >>> [str(each) for each in found]
    ['S(0)', 'P(sum)', 'R', 'None']
    """
    clash = _clashing(rows, operands)
    columns = enumerate(zip(*operands, strict=True))
    return tuple(None if axis in clash else _along(rows, column, shapes) for axis, column in columns)


def _along(rows: Iterable[Row], column: Sequence[Known], shapes: Sequence[Shape]) -> Known:
    if all(isinstance(each, Replicate) for each in column):
        return R
    if MEAN in column:
        found = None if SUM in column else _along(rows, [SUM if each == MEAN else each for each in column], shapes)
        return MEAN if found == SUM else found
    return next((row.outs[0] for row in rows if _matches(row, column, shapes)), None)


def _matches(row: Row, column: Sequence[Known], shapes: Sequence[Shape]) -> bool:
    """Whether operands lie as a row wants them, or are alike everywhere and as large as the shards beside them."""
    trios = [*zip(row.ins, column, shapes, strict=True)]
    cut = {shape[want.dim] for want, have, shape in trios if isinstance(want, Shard) and have == want}
    return all(
        have == want
        or want is ANYTHING
        or (row.label != EXACT and isinstance(have, Replicate) and _size(want, shape) in cut)
        for want, have, shape in trios
    )


def _size(placement: Placement, shape: Shape) -> int | None:
    """The size of the dim that is cut, if there is one."""
    return shape[placement.dim] if isinstance(placement, Shard) and placement.dim < len(shape) else None


def _clashing(rows: Iterable[Row], operands: Sequence[Sequence[Known]]) -> set[int]:
    """Axes that cut a label in one operand where others cut it along further ones.

    Halves of x along one axis with halves of y along another: x0 + y0, x0 + y1, x1 + y0, x1 + y1 are no x + y.

    >>> both = (Row("dim 0", (Shard(0), Shard(0)), (Shard(0),)),)
    >>> _clashing(both, [[Shard(0), R], [R, Shard(0)]]), _clashing(both, [[Shard(0), R], [Shard(0), Shard(1)]])
    ({0, 1}, set())
    """
    found: set[int] = set()
    for row in (row for row in rows if row.label != EXACT and len(operands) > 1):
        pairs = [(want, held) for want, held in zip(row.ins, operands, strict=True) if isinstance(want, Shard)]
        cuts = [{axis for axis, have in enumerate(held) if have == want} for want, held in pairs]
        cutting = [axes for axes in cuts if axes]
        found |= {axis for axes in cutting for axis in axes if any(axis not in each for each in cutting)}
    return found
