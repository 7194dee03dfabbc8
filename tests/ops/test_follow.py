"""What a per-device result is: the row of the op's rule that the operands match, read as one device carries it out."""

from __future__ import annotations

from typing import Any

import pytest

from meshloom.mesh import Mesh
from meshloom.ops import Call, Ref, Row, find
from meshloom.ops.binding import bind
from meshloom.ops.follow import ANYTHING, EXACT, choices_alone, follow
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology, read_placements

R = Replicate()
ALONE = Mesh(device=1)


def followed(op: str, shapes: list[tuple[int, ...]], text: str, **arguments: Any) -> Placement | None:
    """What one axis does to the result of an op on parts of these shapes, whose placements are written in a text."""
    line = find(op)
    leaves = tuple(Ref(number) for number in range(len(shapes)))
    parts = tuple(Topology(ALONE, (R,), shape, "f32") for shape in shapes)
    call = Call(op, parts, bind(line, leaves, arguments), () if line.signature else leaves)
    held = [[each] for each in read_placements(text)]
    return follow(choices_alone(line.rule, call).rows, held, shapes)[0]


@pytest.mark.parametrize(
    ("op", "shapes", "placements", "found"),
    [
        ("matmul", [(2, 4), (4, 3)], "S(0), R", "S(0)"),
        ("matmul", [(2, 4), (4, 3)], "R, S(1)", "S(1)"),
        ("matmul", [(2, 4), (4, 3)], "S(1), S(0)", "P(sum)"),
        ("matmul", [(2, 4), (4, 3)], "S(1), R", "P(sum)"),
        ("matmul", [(2, 4), (4, 3)], "P(sum), R", "P(sum)"),
        ("matmul", [(2, 4), (4, 3)], "S(0), S(1)", None),
        ("matmul", [(2, 4), (4, 3)], "P(sum), P(sum)", None),
        ("add", [(2, 4), (2, 4)], "S(1), R", "S(1)"),
        ("add", [(2, 4), (2, 4)], "P(sum), P(sum)", "P(sum)"),
        ("add", [(2, 4), (2, 4)], "P(sum), R", None),
        ("add", [(2, 4), (1, 4)], "R, S(0)", None),  # a size-1 shard that is broadcast
        ("mul", [(2, 4), (2, 4)], "P(mean), R", "P(mean)"),
        ("relu", [(2, 4)], "P(max)", "P(max)"),
        ("relu", [(2, 4)], "P(sum)", None),
    ],
)
def test_a_result_has_the_placement_of_the_row_that_matches(
    op: str, shapes: list[tuple[int, ...]], placements: str, found: str | None
) -> None:
    made = followed(op, shapes, placements)
    assert (made if made is None else str(made)) == found


@pytest.mark.parametrize(
    ("op", "found"), [("sum", "P(sum)"), ("mean", "P(mean)"), ("amax", "P(max)"), ("prod", "P(prod)"), ("var", None)]
)
def test_a_reduced_shard_leaves_a_term_that_a_device_can_make_alone(op: str, found: str | None) -> None:
    made = followed(op, [(2, 4)], "S(0)", dim=0)
    assert (made if made is None else str(made)) == found
    assert followed(op, [(2, 4)], "S(1)", dim=0) == Shard(0)


def test_chunks_that_devices_work_on_alone_stand_side_by_side() -> None:
    assert followed("softmax", [(2, 4)], "S(1)", dim=1) == Shard(1)
    assert followed("cumsum", [(2, 4)], "S(0)", dim=0) == Shard(0)


def test_one_label_cut_by_different_axes_of_different_operands_is_no_whole() -> None:
    rows = (Row("dim 0", (Shard(0), Shard(0)), (Shard(0),)),)
    assert follow(rows, [[Shard(0), R], [R, Shard(0)]], [(2,), (2,)]) == (None, None)
    assert follow(rows, [[Shard(0), R], [Shard(0), R]], [(2,), (2,)]) == (Shard(0), R)


def test_what_is_alike_counts_as_a_shard_of_its_size_unless_the_row_is_exact() -> None:
    row = Row("", (Shard(0), Shard(0)), (Shard(0),))
    assert follow((row,), [[Shard(0)], [R]], [(2,), (2,)]) == (Shard(0),)
    assert follow((row,), [[Shard(0)], [R]], [(2,), (4,)]) == (None,)
    exact = Row(EXACT, row.ins, row.outs)
    assert follow((exact,), [[Shard(0)], [R]], [(2,), (2,)]) == (None,)
    either = Row(EXACT, (Shard(0), ANYTHING), row.outs)
    assert follow((either,), [[Shard(0)], [Partial("max")]], [(2,), (2,)]) == (Shard(0),)
