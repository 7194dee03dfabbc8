"""What one device does for a call: faults that prices once had, each with the figure by hand."""

from __future__ import annotations

import pytest

from meshloom import Machine, Mesh, Topology, parse
from meshloom.cost import Load, load_of
from meshloom.ops import Call, Choices, Ref, find, result_dtypes
from meshloom.planner import plan

MESH = Mesh(d=8)
MACHINE = Machine("m", latency=1e-6, bandwidth=1e10, flops=1e15, memory_bandwidth=1e11)


def call_of(op: str, *operands: str, **arguments: object) -> Call:
    topologies = tuple(parse(f"{each} on {MESH}") for each in operands)
    assert all(isinstance(each, Topology) for each in topologies)
    refs = tuple(Ref(i) for i in range(len(topologies)))
    named = dict(zip(("input", "other"), refs, strict=False)) if find(op).signature is not None else {}
    return Call(op, topologies, {**named, **arguments}, () if named else refs)


def load(call: Call, label: str, which: int = 0) -> Load:
    """The load of a call under the row with a label."""
    choices: Choices = find(call.op).rule(call)
    rows = [row for row in choices.rows if row.label == label]
    return load_of(call, choices, [rows[which]], result_dtypes(find(call.op), call, len(choices.shapes)))


def test_a_replicated_operand_is_read_whole_by_every_device():
    # decoding: 8 rows over 8 devices, a weight of 1024 x 1024 that each device reads
    found = load(call_of("matmul", "f32[8, 1024](S(0))", "f32[1024, 1024](R)"), "m")
    assert found == Load(flops=2 * 1 * 1024 * 1024, bytes=4 * (1024 + 1024 * 1024 + 1024))


def test_a_partial_operand_is_as_large_as_the_whole():
    call = call_of("add", "f32[64, 64](P(sum))", "f32[64, 64](P(sum))")
    found = load(call, next(row.label for row in find("add").rule(call).rows if str(row.ins[0]) == "P(sum)"))
    assert found == Load(flops=64 * 64, bytes=3 * 64 * 64 * 4)


def test_a_view_costs_nothing():
    call = call_of("transpose", "f32[64, 64](R)", dim0=0, dim1=1)
    assert find("transpose").view
    assert load(call, "none") == Load(0.0, 0.0)


def test_results_are_written():
    # an outer product reads little and writes much
    found = load(call_of("matmul", "f32[4096, 1](R)", "f32[1, 4096](R)"), "none")
    assert found.bytes == 4 * (4096 + 4096 + 4096 * 4096)


@pytest.mark.parametrize(("rows", "most"), [(9, 2), (10, 2), (33, 5), (8, 1), (1, 1)])
def test_uneven_shards_are_priced_by_the_largest(rows, most):
    found = load(call_of("matmul", f"f32[{rows}, 16](S(0))", "f32[16, 4](R)"), "m")
    assert found == Load(flops=pytest.approx(2 * most * 16 * 4), bytes=4 * (most * 16 + 16 * 4 + most * 4))


def test_chunks_nest_where_two_axes_shard_one_dim():
    mesh = Mesh(a=2, b=4)
    x, w = parse(f"f32[10, 3](S(0), S(0)) on {mesh}"), parse(f"f32[3, 5](R, R) on {mesh}")
    call = Call("matmul", (x, w), {"input": Ref(0), "other": Ref(1)})
    choices = find("matmul").rule(call)
    row = next(row for row in choices.rows if row.label == "m")
    # 10 over 2 are 5, over 4 are 2
    assert load_of(call, choices, [row, row], ["f32"]) == Load(
        flops=pytest.approx(2 * 2 * 3 * 5), bytes=4 * (6 + 15 + 10)
    )


def test_an_empty_tensor_costs_nothing():
    assert load(call_of("matmul", "f32[0, 16](S(0))", "f32[16, 0](R)"), "m") == Load(0.0, 0)


def test_the_price_of_a_plan_has_the_load_in_it():
    call = call_of("matmul", "f32[8, 1024](S(0))", "f32[1024, 1024](R)")
    assert plan(call, None, MACHINE).cost == pytest.approx(load(call, "m").bytes / MACHINE.memory_bandwidth)
