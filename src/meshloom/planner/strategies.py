"""The three strategies of distributed matrix operations, as the table that is both documentation and code.

1. Row-sharded matmul: each device has rows of A and all of B; the results are concatenated.
2. A reduction over a sharded tensor: each device reduces its part; an all-reduce combines them.
3. Reduction-dim sharding: A and B are both sharded on the inner dim; the partial products are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshloom.placement import Shard
from meshloom.planner.plan import Plan


@dataclass(frozen=True, slots=True)
class Strategy:
    """One line of the table: for this op and this row of its rule, this strategy and this communication."""

    number: int
    op: str
    sharding: str
    row: str
    communication: tuple[str, ...]


STRATEGIES: tuple[Strategy, ...] = (
    Strategy(1, "matmul", "S(0), R", "m", ()),
    Strategy(2, "sum", "S(0)", "dim 0", ("all_reduce",)),
    Strategy(2, "sum", "S(1)", "dim 1", ("all_reduce",)),
    Strategy(2, "mean", "S(0)", "dim 0", ("all_reduce",)),
    Strategy(2, "mean", "S(1)", "dim 1", ("all_reduce",)),
    Strategy(3, "matmul", "S(1), S(0)", "k", ("all_reduce",)),
)


def strategy_of(decided: Plan, axis: str) -> int | None:
    """The strategy that a plan follows on a mesh axis; None where the table has no line for it.

    A reduction follows strategy 2 only if the sharded dim is one that it reduces.
    """
    row = decided.rows[decided.mesh.axis(axis)]
    lines = (line for line in STRATEGIES if line.op == decided.call.op and line.row == row.label)
    number = next((line.number for line in lines), None)
    return None if number == 2 and any(isinstance(out, Shard) for out in row.outs) else number
