"""The planner: which row on which axis, what the caller asked for, and the same plan for everybody."""

from __future__ import annotations

import itertools
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Machine, Mesh, Partial, Placement, Replicate, Shard, Topology
from meshloom.fabric import VIRTUAL
from meshloom.ops import OPS, Call, Ref
from meshloom.planner import STRATEGIES, Plan, consider, plan, retype, strategy_of
from meshloom.planner.pricing import Pricing

GRID = Mesh(dp=2, tp=4)


def topology(mesh: Mesh, text: str, *shape: int, dtype: str = "f32") -> Topology:
    return Topology(mesh, loom.parse(f"({text})"), shape, dtype)  # type: ignore[arg-type]


def matmul(mesh: Mesh, one: str, other: str, sizes: tuple[int, int, int] = (128, 64, 32), **options: Any) -> Plan:
    m, k, n = sizes
    operands = (topology(mesh, one, m, k), topology(mesh, other, k, n))
    return plan(Call("matmul", operands, {"input": Ref(0), "other": Ref(1)}, ()), **options)


def reduce(op: str, mesh: Mesh, one: str, dim: int | None = None) -> Plan:
    arguments = {"input": Ref(0), "dim": dim, "keepdim": False, "dtype": None}
    return plan(Call(op, (topology(mesh, one, 128, 64),), arguments, ()))


def labels(decided: Plan) -> tuple[str, ...]:
    return tuple(row.label for row in decided.rows)


# the three strategies, from the table itself


@pytest.mark.parametrize("line", STRATEGIES, ids=lambda line: f"{line.op} {line.sharding}")
@pytest.mark.parametrize("devices", [2, 4, 7])
def test_the_selector_follows_the_table_on_any_number_of_devices(line, devices):
    mesh = Mesh(w=devices)
    placed = line.sharding.split(", ")
    decided = matmul(mesh, *placed) if line.op == "matmul" else reduce(line.op, mesh, *placed)
    assert strategy_of(decided, "w") == line.number
    assert decided.rows[0].label == line.row
    assert tuple(step.kind for step in decided.forward) == line.communication


TABLE = {(line.op, line.sharding): line.number for line in STRATEGIES}


@pytest.mark.parametrize("one", ["R", "S(0)", "S(1)"])
@pytest.mark.parametrize("other", ["R", "S(0)", "S(1)"])
def test_every_matmul_sharding_that_the_table_has_is_selected_so(one, other):
    found = strategy_of(matmul(Mesh(w=4), one, other), "w")
    if (number := TABLE.get(("matmul", f"{one}, {other}"))) is not None:
        assert found == number
    if (one, other) == ("R", "R"):
        assert found is None


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_reduction_over_another_dim_than_the_sharded_one_needs_no_strategy(op):
    assert strategy_of(reduce(op, Mesh(w=4), "S(0)", dim=1), "w") is None
    assert reduce(op, Mesh(w=4), "S(0)", dim=1).forward == ()
    assert strategy_of(reduce(op, Mesh(w=4), "S(0)", dim=0), "w") == 2


def test_strategies_are_per_axis():
    decided = matmul(GRID, "S(0), S(1)", "R, S(0)")
    assert strategy_of(decided, "dp") == 1 and strategy_of(decided, "tp") == 3


# overriding


@pytest.mark.parametrize("row", ["m", "n", "k", "none"])
def test_a_chosen_row_is_taken(row):
    assert labels(matmul(Mesh(w=4), "S(0)", "R", chosen={"w": row})) == (row,)


@pytest.mark.parametrize(("name", "label"), [("row", "m"), ("column", "n"), ("inner", "k"), ("none", "none")])
def test_choose_speaks_in_words_and_the_result_stays_right(name, label):
    a, b = torch.randn(8, 6), torch.randn(6, 10)
    x, w = loom.distribute(a, GRID, "S(0), S(1)"), loom.distribute(b, GRID, "R, S(1)")
    with loom.choose(tp=name):
        assert labels(loom.explain(lambda: x @ w).plans[0])[1] == label
        torch.testing.assert_close((x @ w).to_torch(), a @ b, rtol=1e-4, atol=1e-5)


def test_choose_holds_inside_its_scope_only():
    x, w = loom.ones(8, 8, mesh=GRID, placements="S(0), R"), loom.ones(8, 8, mesh=GRID, placements="R, R")
    before = (x @ w).topology
    with loom.choose(dp="inner", tp="column"):
        assert (x @ w).topology.notation == "f32[8, 8](R, S(1))"
    assert (x @ w).topology is before


# what comes out


def rows_of_all_ops() -> list[tuple[str, Any]]:
    return [
        ("matmul", lambda x, y: x @ y),
        ("add", lambda x, y: x + y),
        ("sum", lambda x, y: x.sum()),
        ("softmax", lambda x, y: x.softmax(0)),
        ("layer_norm", lambda x, y: F.layer_norm(x, (12,))),
        ("cross_entropy", lambda x, y: F.cross_entropy(x, torch.arange(12, device=x.device))),
        ("embedding", lambda x, y: F.embedding(torch.arange(4, device=x.device), x)),
        ("reshape", lambda x, y: x.reshape(144)),
        ("cat", lambda x, y: loom.cat([x, y])),
        ("einsum", lambda x, y: loom.einsum("ij,jk->", x, y)),
        ("var", lambda x, y: x.var(1)),
        ("prod", lambda x, y: x.prod(0)),
        ("amax", lambda x, y: x.amax()),
        ("where", lambda x, y: loom.where(x > 0, x, y)),
        ("relu", lambda x, y: x.relu()),
        ("neg", lambda x, y: -x),
        ("clone", lambda x, y: x.clone()),
        ("mul", lambda x, y: x * 2),
    ]


KINDS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial("sum"))


@pytest.mark.parametrize(("name", "run"), rows_of_all_ops(), ids=lambda each: each if isinstance(each, str) else "")
def test_the_automatic_result_is_never_partial(name, run):
    for one, other in itertools.product(itertools.product(KINDS, repeat=2), repeat=2):
        x = loom.ones(12, 12, mesh=GRID, placements=one, device="meta")
        y = loom.ones(12, 12, mesh=GRID, placements=other, device="meta")
        out = run(x, y)
        assert not out.topology.partial_axes, f"{name} of {one} and {other}"


@pytest.mark.parametrize(("name", "run"), rows_of_all_ops(), ids=lambda each: each if isinstance(each, str) else "")
def test_replicated_operands_give_replicated_results_and_no_communication(name, run):
    x = loom.ones(12, 12, mesh=GRID, placements="R, R")
    with loom.communication("forbid"):
        out = run(x, x)
    assert out.placements == (Replicate(), Replicate())


def test_aligned_inner_shards_are_reduced_and_not_gathered():
    for sizes in [(4, 4096, 4096), (64, 4, 64), (4096, 4096, 4), (1, 8, 1)]:
        decided = matmul(Mesh(tp=4), "S(1)", "S(0)", sizes)
        assert labels(decided) == ("k",) and [step.kind for step in decided.forward] == ["all_reduce"]


def test_aligned_inner_shards_are_moved_where_their_reduction_costs_more_than_twice_as_much():
    for sizes in [(8192, 64, 8192), (4096, 4, 4096)]:
        decided = matmul(Mesh(tp=8), "S(1)", "S(0)", sizes)
        assert labels(decided) == ("m",) and [step.kind for step in decided.forward] == ["all_to_all", "all_gather"]
        reduced = matmul(Mesh(tp=8), "S(1)", "S(0)", sizes, chosen={"tp": "k"})
        assert labels(reduced) == ("k",) and decided.cost < reduced.cost / 20
        line = next(line for line in consider(decided) if line.row.label == "k")
        assert (line.cost, line.reason) == (reduced.cost, "more expensive")


def test_a_head_on_a_weight_sharded_by_hidden_moves_the_weight_and_not_the_logits():
    decided = matmul(Mesh(tp=8), "R", "S(0)", (4096, 4096, 32000))
    assert labels(decided) == ("n",) and [step.kind for step in decided.forward] == ["all_to_all"]
    assert decided.bytes < 4096 * 32000 * 4 / 8
    line = next(line for line in consider(decided) if line.row.label == "k")
    assert line.cost > 2 * decided.cost and line.reason == "what it communicates costs too much"


# output= and with_output


OUTPUTS = [
    *("R, R", "S(0), R", "R, S(1)", "S(0), S(1)", "S(1), S(0)", "S(0), S(0)"),
    *("R, S(-1)", "S(-2), R", "P(sum), R", "R, P(sum)"),
]
OPS_WITH_OUTPUT = {
    "matmul": (lambda a, b, **o: loom.matmul(a, b, **o), lambda a, b: a @ b),
    "add": (lambda a, b, **o: loom.add(a, b.T, **o), lambda a, b: a + b.T),
    "softmax": (lambda a, b, **o: loom.softmax(a, 1, **o), lambda a, b: a.softmax(1)),
    "transpose": (lambda a, b, **o: loom.transpose(a, 0, 1, **o), lambda a, b: a.T),
    "sum": (lambda a, b, **o: loom.sum(a, 0, keepdim=True, **o), lambda a, b: a.sum(0, keepdim=True)),
    "relu": (lambda a, b, **o: loom.relu(a, **o), lambda a, b: a.relu()),
    "einsum": (lambda a, b, **o: loom.einsum("ij,jk->ki", a, b, **o), lambda a, b: (a @ b).T),
    "embedding": (
        lambda a, b, **o: loom.embedding(torch.tensor([5, 0, 2]), a, **o),
        lambda a, b: a[torch.tensor([5, 0, 2])],
    ),
    "cat": (lambda a, b, **o: loom.cat([a, b.T], 0, **o), lambda a, b: torch.cat([a, b.T])),
    "reshape": (lambda a, b, **o: loom.reshape(a, 10, 6, **o), lambda a, b: a.reshape(10, 6)),
}


@pytest.mark.parametrize("name", OPS_WITH_OUTPUT)
@pytest.mark.parametrize("asked", OUTPUTS)
def test_any_op_gives_the_placements_that_were_asked_for(name, asked):
    run, dense = OPS_WITH_OUTPUT[name]
    a, b = torch.randn(6, 10), torch.randn(10, 6)
    expected = dense(a, b)
    counted = loom.parse(f"({asked})")
    wanted = tuple(Shard(p.dim % 2) if isinstance(p, Shard) else p for p in counted)
    for one, other in itertools.product(["S(0), S(1)", "R, S(1)", "P(sum), R"], ["R, S(0)", "S(1), R"]):
        x, w = loom.distribute(a, GRID, one), loom.distribute(b, GRID, other)
        found = run(x, w, output=asked)
        assert found.placements == wanted
        torch.testing.assert_close(found.to_torch(), expected, rtol=1e-4, atol=1e-5)
        with loom.with_output(asked):
            assert run(x, w).placements == wanted


def test_axes_that_a_request_does_not_name_stay_automatic():
    x = loom.ones(8, 8, mesh=GRID, placements="S(0), S(1)")
    assert loom.relu(x, output={"tp": Replicate()}).placements == (Shard(0), Replicate())


def test_a_request_decides_between_an_all_reduce_and_a_reduce_scatter():
    def kinds(**options: Any) -> list[str]:
        request = options.get("request")
        return [step.kind for step in matmul(Mesh(w=4), "S(1)", "S(0)", request=request).forward]

    assert kinds() == ["all_reduce"]
    assert kinds(request=(Shard(0),)) == ["reduce_scatter"]
    assert kinds(request=(Partial("sum"),)) == []


def test_a_sharded_request_shards_what_is_replicated_for_free():
    decided = matmul(Mesh(w=4), "R", "R", request=(Shard(1),))
    assert labels(decided) == ("n",) and decided.forward == ()


# prices


def test_another_machine_changes_the_choice():
    """A wide gather in few steps against a small reduction in many: latency decides one way, bandwidth the other."""
    fast = Machine("no latency", latency=1e-12, bandwidth=1e9, flops=1e15, memory_bandwidth=1e15)
    near = Machine("no bandwidth limit", latency=1.0, bandwidth=1e18, flops=1e15, memory_bandwidth=1e15)
    found = {m.name: labels(matmul(Mesh(w=4), "S(1)", "S(1)", (8, 512, 8), machine=m)) for m in (fast, near)}
    prices = {
        (m.name, row): matmul(Mesh(w=4), "S(1)", "S(1)", (8, 512, 8), machine=m, chosen={"w": row}).cost
        for m, row in itertools.product((fast, near), ("m", "n", "k", "none"))
    }
    assert found["no latency"] != found["no bandwidth limit"]
    for m in (fast, near):
        best = min(cost for (name, _), cost in prices.items() if name == m.name)
        assert prices[m.name, found[m.name][0]] <= best * (1 + 1e-6)


def test_use_machine_changes_the_plan_of_ops_inside():
    dear = Machine("dear", latency=5.0, bandwidth=1e3, flops=1e12, memory_bandwidth=1e11)
    x = loom.ones(8, 8, mesh=GRID, placements="S(0), R")
    cheap = loom.explain(lambda: x.softmax(0)).cost
    with loom.use_machine(dear) as machine:
        assert machine is dear
        assert loom.explain(lambda: x.softmax(0)).cost > 1000 * cheap
        assert loom.explain(lambda: x.softmax(0)).plans[0].machine is dear
    assert loom.explain(lambda: x.softmax(0)).plans[0].machine is VIRTUAL


def test_the_chosen_row_is_the_cheapest_of_those_considered():
    for one, other in itertools.product(["R, R", "S(0), S(1)", "S(1), R", "R, S(0)"], repeat=2):
        decided = matmul(GRID, one, other)
        lines = consider(decided)
        for axis in GRID.axes:
            chosen = [line for line in lines if line.axis == axis and line.chosen]
            assert len({line.row for line in chosen}) == 1
            dearer = [line for line in lines if line.axis == axis and line.reason == "more expensive"]
            assert all(line.cost is not None and line.cost >= decided.cost * (1 - 1e-6) for line in dearer)


def test_a_plan_is_a_frozen_value_whose_bytes_add_up():
    decided = matmul(GRID, "S(0), S(1)", "S(1), R")
    assert decided == matmul(GRID, "S(0), S(1)", "S(1), R")
    assert decided.bytes == sum(step.bytes for step in decided.forward)
    with pytest.raises(AttributeError):
        decided.cost = 0.0  # type: ignore[misc]


def test_autocast_changes_dtypes_and_bytes_only():
    decided = matmul(Mesh(w=4), "S(1)", "S(0)")
    half = retype(decided, ("bf16",))
    assert half.outs[0].dtype == "bf16" and half.rows == decided.rows
    assert half.bytes * 2 == decided.bytes


# the same for everybody


PROGRAM = """
import itertools
from meshloom import Mesh, Shard, Replicate, Partial, Topology
from meshloom.ops import Call, Ref
from meshloom.planner import plan
kinds = (Replicate(), Shard(0), Shard(1), Partial("sum"))
mesh = Mesh(a=2, b=3)
for one, other in itertools.product(itertools.product(kinds, repeat=2), repeat=2):
    operands = (Topology(mesh, one, (12, 10), "f32"), Topology(mesh, other, (10, 8), "f32"))
    p = plan(Call("matmul", operands, {"input": Ref(0), "other": Ref(1)}, ()))
    print([str(row) for row in p.rows], [str(step) for step in p.forward], p.outs[0], repr(p.cost))
"""


def test_two_processes_make_the_same_plans():
    texts = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "4242")
    ]
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) == 256


def test_a_mesh_of_five_axes_is_planned_with_few_prices(monkeypatch):
    counted = []
    price = Pricing.held_against
    monkeypatch.setattr(Pricing, "held_against", lambda *args: counted.append(1) or price(*args))
    mesh = Mesh(a=2, b=2, c=2, d=2, e=2)
    decided = matmul(mesh, "S(0), S(1), R, S(0), S(1)", "S(0), S(1), S(0), R, S(1)", (64, 64, 64))
    assert 0 < len(counted) <= 50
    assert decided.outs[0].mesh == mesh


def test_a_tensor_on_five_axes_computes_right():
    mesh = Mesh(a=2, b=2, c=2, d=2, e=2)
    a, b = torch.randn(12, 20), torch.randn(20, 9)
    x = loom.distribute(a, mesh, "S(0), S(1), R, S(0), P(sum)")
    w = loom.distribute(b, mesh, "S(0), S(1), S(0), R, R")
    torch.testing.assert_close((x @ w).to_torch(), a @ b, rtol=1e-4, atol=1e-4)


def test_every_rule_can_be_planned_without_an_engine():
    mesh = Mesh(w=2)
    for name in ("relu", "exp", "clone", "neg"):
        call = Call(name, (topology(mesh, "S(0)", 4, 4),), {}, (Ref(0),))
        assert plan(call).outs[0].notation == "f32[4, 4](S(0))"
    assert len(OPS) >= 60
