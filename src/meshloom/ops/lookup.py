"""Rules of ops that find elements by index."""

from __future__ import annotations

from meshloom.errors import ShapeError
from meshloom.ops.labels import SUM, R
from meshloom.ops.rule import Call, Choices, Row, with_none
from meshloom.placement import Placement, Shard


def embedding(call: Call) -> Choices:
    """A sharded vocabulary is a masked look-up: each device finds its own rows, the sum has them all."""
    ids, weight = call.shape("input"), call.shape("weight")
    if len(weight) != 2:
        raise ShapeError(f"embedding needs a weight of 2 dims and got {list(weight)}")
    first, second = call.index("input"), call.index("weight")

    def row(label: str, for_ids: Placement, for_weight: Placement, out: Placement, local: bool = True) -> Row:
        ins = (for_ids, for_weight) if first < second else (for_weight, for_ids)
        return Row(label, ins, (out,), local=local)

    rows = [row(f"dim {d}", Shard(d), R, Shard(d)) for d in range(len(ids))]
    rows.append(row("width", R, Shard(1), Shard(len(ids))))
    rows.append(row("vocabulary", R, Shard(0), SUM, local=False))
    return with_none(call, [ids + (weight[1],)], rows)
