"""explain, communication and record tell one story: the same collectives with the same bytes, in the same order."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Mesh, Partial, Replicate, Shard, Topology
from meshloom.cost import price
from meshloom.fabric import VIRTUAL
from meshloom.runtime import Event, state

MESH = Mesh(dp=2, tp=3)
Program = Callable[[], Any]


def put(placements: Any, *shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> loom.Tensor:
    dense = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype) / (
        7 if dtype.is_floating_point else 1
    )
    made = loom.distribute(dense.to(dtype), MESH, placements)
    return made.requires_grad_() if grad else made


def parameter(placements: Any, *shape: int) -> loom.Parameter:
    return loom.Parameter(put(placements, *shape))


def of(function: Callable[..., Any], *tensors: loom.Tensor) -> Program:
    """A function of some tensors."""
    held = list(tensors)
    return lambda: function(*held)


def backward(loss: Callable[..., loom.Tensor], *tensors: loom.Tensor) -> Program:
    """The gradients of a loss of some tensors."""
    held = list(tensors)

    def run() -> Any:
        loss(*held).backward()
        return [each.grad for each in held if each.requires_grad]

    return run


PROGRAMS: dict[str, Callable[[], Program]] = {  # each makes one on fresh tensors
    "local_add": lambda: of(lambda x, y: x + y, put("S(0), R", 8, 6), put("S(0), R", 8, 6)),
    "add_of_different_placements": lambda: of(lambda x, y: x + y, put("S(0), R", 8, 6), put("S(1), S(0)", 8, 6)),
    "row_matmul": lambda: of(lambda x, w: x @ w, put("S(0), R", 8, 6), put("R, R", 6, 4)),
    "inner_matmul": lambda: of(lambda x, w: x @ w, put("R, S(1)", 8, 6), put("R, S(0)", 6, 4)),
    "misaligned_matmul": lambda: of(lambda x, w: x @ w, put("S(1), R", 8, 6), put("R, S(0)", 6, 4)),
    "matmul_with_a_reduce_scatter": lambda: of(
        lambda x, w: loom.matmul(x, w, output={"tp": Shard(0)}), put("R, S(1)", 8, 6), put("R, S(0)", 6, 4)
    ),
    "matmul_kept_partial_then_read": lambda: of(
        lambda x, w: loom.matmul(x, w, output={"tp": Partial("sum")}).to_torch(),
        put("R, S(1)", 8, 6),
        put("R, S(0)", 6, 4),
    ),
    "sums_over_every_dim": lambda: of(lambda x: (x.sum(), x.sum(0), x.mean(1), x.amax()), put("S(0), S(1)", 7, 5)),
    "softmax_over_a_sharded_dim": lambda: of(lambda x: x.softmax(-1), put("S(0), S(1)", 8, 7)),
    "layer_norm_over_a_sharded_dim": lambda: of(
        lambda x, w: F.layer_norm(x, (6,), w), put("S(0), S(1)", 8, 6), put("R, S(0)", 6)
    ),
    "cross_entropy_over_sharded_classes": lambda: of(
        lambda x, t: F.cross_entropy(x[:6], t), put("S(0), S(1)", 8, 6), loom.arange(6, mesh=MESH, placements="R, R")
    ),
    "embedding_of_a_sharded_vocabulary": lambda: of(
        lambda ids, table: F.embedding(ids, table),
        loom.arange(6, mesh=MESH, placements="S(0), R"),
        put("R, S(0)", 9, 4),
    ),
    "argmax_and_var": lambda: of(lambda x: (x.argmax(1), x.var(0), x.max(0)), put("S(0), S(1)", 8, 6)),
    "redistributions": lambda: of(
        lambda x: x.redistribute("S(1), R").redistribute("R, S(0)").redistribute("R, R"), put("S(0), S(1)", 8, 7)
    ),
    "partial_sums_meet": lambda: of(
        lambda x, y: (x + y, (x + y).relu(), x * y), put("P(sum), R", 4, 4), put("P(sum), R", 4, 4)
    ),
    "reshape_and_slices_of_a_sharded_dim": lambda: of(
        lambda x: (x.reshape(48), x[1:5], x.reshape(2, 24), x[:, 2:4]), put("S(0), R", 8, 6)
    ),
    "cat_and_stack": lambda: of(
        lambda x, y: (loom.cat([x, y]), loom.stack([x, y], 1)), put("S(0), R", 8, 6), put("R, S(1)", 8, 6)
    ),
    "functions_without_a_rule": lambda: of(
        lambda x: (torch.renorm(x, 2, 0, 1.0), torch.trapezoid(x), torch.kron(x, x)), put("S(0), S(1)", 8, 6)
    ),
    "a_library_function_with_out": lambda: of(
        lambda x, y, z: torch.add(x, y, out=z), put("S(0), R", 8, 6), put("R, S(1)", 8, 6), put("S(1), R", 8, 6)
    ),
    "attention_with_a_sharded_sequence": lambda: of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *(put("S(0), S(1)", 2, 6, 4) for _ in range(3))
    ),
    "dropout_and_random": lambda: of(
        lambda x: (F.dropout(x, 0.5) @ loom.randn(6, 4, mesh=MESH, placements="S(0), R")).sum(), put("S(0), R", 8, 6)
    ),
    "backward_of_a_data_parallel_layer": lambda: backward(
        lambda x, w: (x @ w).square().mean(), put("S(0), R", 8, 6), parameter("R, R", 6, 4)
    ),
    "backward_through_redistribution": lambda: backward(
        lambda x: (x * 2).redistribute("S(1), R").square().sum(), put("S(0), R", 8, 6, grad=True)
    ),
    "backward_of_a_function_without_a_rule": lambda: backward(
        lambda x: torch.renorm(x * 2, 2, 0, 1.0).square().sum(), put("S(0), R", 8, 6, grad=True)
    ),
    "backward_of_a_broadcast_bias": lambda: backward(
        lambda x, b: (x + b).exp().sum(), put("S(0), S(1)", 8, 6), parameter("R, S(0)", 6)
    ),
}


def program(make: Callable[[], Program]) -> Callable[[], Program]:
    """A maker of one program on fresh tensors."""
    PROGRAMS[make.__name__] = make
    return make


@program
def in_place_updates():
    x, y = put("S(0), R", 8, 6), put("R, S(1)", 8, 6)

    def run() -> None:
        x.add_(y)
        x.mul_(2)
        x[0] = y[0]
        x.copy_(y)

    return run


@program
def chosen_and_requested():
    x, w = put("S(0), R", 8, 6), put("R, S(1)", 6, 4)

    def run() -> None:
        with loom.choose(tp="inner"):
            x @ w
        with loom.with_output({"tp": Shard(0)}):
            x.relu()

    return run


@program
def backward_of_a_tensor_parallel_mlp():
    x, up, down = put("S(0), R", 8, 6), parameter("R, S(1)", 6, 12), parameter("R, S(0)", 12, 4)
    return backward(lambda x, up, down: ((x @ up).relu() @ down).sum(), x, up, down)


@program
def backward_through_an_activation():
    def loss(x: Any, w: Any) -> Any:
        h = (w * 2).tanh()
        return ((x @ h) @ h).sum()

    return backward(loss, put("S(0), R", 8, 6), parameter("R, R", 6, 6))


@program
def backward_of_softmax_and_layer_norm():
    x, w = put("S(0), S(1)", 8, 6, grad=True), parameter("R, S(0)", 6)
    return backward(lambda x, w: F.layer_norm(x.softmax(-1), (6,), w).square().sum(), x, w)


@program
def accumulated_micro_batches_and_a_step():
    xs, w = [put("S(0), R", 8, 6) for _ in range(3)], parameter("R, R", 6, 4)
    optimizer = torch.optim.SGD([w], lr=0.1, foreach=False)

    def run() -> None:
        for x in xs:
            (x @ w).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


@program
def clipping_the_gradient():
    x, w = put("S(0), R", 8, 6), parameter("R, S(1)", 6, 6)

    def run() -> None:
        (x @ w).sum().backward()
        torch.nn.utils.clip_grad_norm_([w], 1.0, foreach=False)

    return run


def recorded(run: Program) -> list[Event]:
    with loom.record() as log:
        run()
    assert log.pending == []
    return log.events


def told(events: list[Event]) -> list[str]:
    return [str(event) for event in events]


def test_there_are_at_least_thirty_programs():
    assert len(PROGRAMS) >= 30
    assert sum(name.startswith("backward") for name in PROGRAMS) >= 7


@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_and_record_tell_the_same_collectives_in_order(name):
    make = PROGRAMS[name]
    explained = loom.explain(make())
    happened = recorded(make())
    assert told(explained.events) == told(happened)
    assert explained.bytes == sum(event.bytes for event in happened)


@pytest.mark.parametrize("name", PROGRAMS)
def test_forbid_raises_exactly_when_record_has_events(name):
    happened = recorded(PROGRAMS[name]())
    run = PROGRAMS[name]()
    if not happened:
        with loom.communication("forbid"):
            run()
        return
    with pytest.raises(loom.CommunicationError) as caught, loom.communication("forbid"):
        run()
    first = happened[0]
    headline, where, moves = str(caught.value).splitlines()[:3]
    assert headline.startswith(f"{first.call} would communicate ")
    assert where == f"  where  {first.where}"
    assert moves == f"  moves  {first.collective} ({first.phase})"
    assert first.where.startswith("test_observe.py:")


@pytest.mark.parametrize("name", PROGRAMS)
def test_warn_tells_of_the_same_bytes_as_record(name):
    happened = recorded(PROGRAMS[name]())
    with warnings.catch_warnings(record=True) as caught, loom.communication("warn"):
        warnings.simplefilter("always", loom.CommunicationWarning)
        PROGRAMS[name]()()
    texts = [str(each.message) for each in caught if each.category is loom.CommunicationWarning]
    assert sum(int(text.split(" communicates ")[1].split(" B")[0]) for text in texts) == sum(e.bytes for e in happened)


def test_some_programs_communicate_and_some_do_not():
    moved = {name: bool(recorded(make())) for name, make in PROGRAMS.items()}
    assert not moved["local_add"] and not moved["row_matmul"]
    assert sum(moved.values()) > 20


def test_explain_tells_the_sums_that_accumulate_holds_back():
    x, w = put("S(0), R", 8, 6), parameter("R, R", 6, 4)

    def run() -> None:
        with loom.accumulate():
            (x @ w).sum().backward()

    found = loom.explain(run)
    assert [str(event.collective) for event in found.log.pending] == ["all_reduce(sum) over dp of 2: 96 B"]
    assert "held back by accumulate:" in str(found)
    assert w.grad is None


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("backward")])
def test_backward_is_seen_and_forbidden_in_its_own_scope_wherever_the_forward_pass_ran(name, monkeypatch):
    """The backward events of a program are the same when only `backward` runs inside the scope."""
    whole = [event for event in recorded(PROGRAMS[name]()) if event.phase == "backward"]
    alone: list[Event] = []
    inner = loom.Tensor.backward

    def backward(self: Any, *args: Any, **kwargs: Any) -> None:
        with loom.record() as log:
            inner(self, *args, **kwargs)
        alone.extend(event for event in log if event.phase == "backward")

    monkeypatch.setattr(loom.Tensor, "backward", backward)
    PROGRAMS[name]()()
    monkeypatch.undo()
    assert told(alone) == told(whole)


def test_forbid_lets_everything_before_the_first_communication_happen():
    x = put("S(0), R", 8, 6)
    with pytest.raises(loom.CommunicationError), loom.communication("forbid"):
        x.mul_(2)
        x.sum()
    assert torch.equal(x.to_torch(), put("S(0), R", 8, 6).to_torch() * 2)


# explain runs nothing


def everything(tensors: list[loom.Tensor]) -> list[torch.Tensor]:
    return [tensor._data.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("name", PROGRAMS)
def test_explain_changes_no_data_no_gradient_and_no_random_state(name):
    run = PROGRAMS[name]()
    held = [cell.cell_contents for cell in run.__closure__ or ()]
    flat = [t for value in held for t in (value if isinstance(value, list) else [value])]
    tensors = [t for t in flat if isinstance(t, torch.Tensor)]
    assert tensors
    before, versions, seed = everything(tensors), [t._data._version for t in tensors], torch.get_rng_state()
    loom.explain(run)
    assert all(torch.equal(t._data, old) for t, old in zip(tensors, before, strict=True))
    assert [t._data._version for t in tensors] == versions
    assert all(t._data.grad is None for t in tensors) and not state.waiting
    assert torch.equal(torch.get_rng_state(), seed)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.ASGD])
def test_an_optimizer_that_was_explained_goes_on_as_if_it_had_not_been(make):
    mesh = loom.open_mesh((2,), axes=("dp",))
    x, found = loom.randn(4, 6, mesh=mesh), []
    for explained in (False, True):
        weight = loom.Parameter(torch.arange(18.0).view(6, 3) / 9, mesh, "S(0)")
        optimizer = make([weight], lr=0.1)

        def loss(weight=weight, optimizer=optimizer):
            optimizer.zero_grad()
            value = (x @ weight).square().mean()
            value.backward()
            return value

        for _ in range(3):
            if explained:
                plan = loom.explain(lambda loss=loss, optimizer=optimizer: optimizer.step(loss))
                assert plan.bytes > 0
            optimizer.step(loss)
        found.append(weight.to_torch().detach())
    assert torch.equal(*found)


def test_explain_gives_dense_tensors_their_value_back():
    mesh = loom.open_mesh((2,), axes=("dp",))
    norm, count, table = torch.nn.BatchNorm1d(3), torch.zeros(()), torch.nn.Parameter(torch.zeros(4, 3), False)
    x = loom.randn(8, 3, mesh=mesh)

    def program():
        nonlocal count
        count += 1
        table[1] = 7
        table.add_(1)
        assert count.item() == 1
        return norm(x)

    loom.explain(program)
    assert count.item() == norm.num_batches_tracked.item() == 0 and not table.any()
    with pytest.raises(KeyError):
        loom.explain(lambda: (table.add_(1), {}["missing"]))
    assert not table.any()


def test_explain_inside_record_leaks_no_event_and_no_call():
    x = put("S(0), R", 8, 6)
    with loom.record() as log:
        found = loom.explain(lambda: torch.cumsum(x, 0).sum())
        assert len(found.events) > 0
        x.sum(0)
    assert [event.call for event in log] == ["sum"]
    assert len(log.calls) == 1 and not log.fallbacks


def test_explain_is_possible_where_communication_is_forbidden():
    x = put("S(0), R", 8, 6)
    with loom.communication("forbid"):
        assert len(loom.explain(lambda: x.sum()).events) == 1
        with pytest.raises(loom.CommunicationError):
            x.sum()


def test_a_program_that_fails_inside_explain_leaves_the_scope_clean():
    x = put("S(0), R", 8, 6)
    with pytest.raises(loom.UnsupportedError):
        loom.explain(lambda: float(x.sum()))
    assert state.shadows is None and state.plain and state.logs == ()
    assert float(x.sum()) == pytest.approx(float(x.to_torch().sum()))


def test_explain_prints_rows_costs_reasons_and_moves():
    x, w = put("R, S(1)", 8, 6), put("R, S(0)", 6, 4)
    text = str(loom.explain(lambda: x @ w))
    lines = text.splitlines()
    assert lines[0].startswith("matmul(f32[8, 6](R, S(1)), f32[6, 4](R, S(0))) -> f32[8, 4](R, R) on Mesh(dp=2, tp=3)")
    chosen = [line.split() for line in lines if " chosen " in line]
    assert [(line[0], line[4]) for line in chosen] == [("dp", "none"), ("tp", "k")]
    assert all(line[3] == "us" and float(line[2]) >= 0 for line in chosen)
    assert sum(" rejected " in line for line in lines) >= 8
    assert "operands already line up" in text and "no operand is placed so; ask with output=" in text
    assert lines[-2].startswith("  moves all_reduce(sum) over tp of 3: 171 B, bidirectional_ring, ")
    assert lines[-1] == "1 collective, 171 B per device"


def test_explain_says_why_a_row_that_carries_a_partial_sum_was_not_taken():
    x = put("P(sum), R", 8, 6)
    lines = str(loom.explain(lambda: x + x)).splitlines()
    (reason,) = [line for line in lines if "dp rejected" in line and "P(sum), P(sum) -> P(sum)" in line]
    assert reason.endswith("partial operands are reduced first; ask with output=")


def test_explain_prints_rows_that_have_no_meaning_for_the_dtype():
    flags = put("S(0), R", 8, 6) > 0
    lines = str(loom.explain(lambda: flags.reshape(4, 12))).splitlines()
    (reason,) = [line for line in lines if "dp rejected" in line and " P(sum) -> P(sum)" in line]
    assert reason.endswith("has no meaning for these dtypes")


def test_reading_an_array_inside_explain_is_an_error_of_ours():
    x = put("S(0), R", 8, 6)
    with pytest.raises(loom.UnsupportedError, match=r"numpy\(\) needs values"):
        loom.explain(x.numpy)


def test_any_mapping_may_ask_for_an_output_and_leaves_other_axes_automatic():
    x = put("S(0), S(1)", 8, 6)
    with loom.with_output(MappingProxyType({"tp": Replicate()})):
        assert (x * 2).placements == (Shard(0), Replicate())


def test_explain_says_that_a_function_went_through_the_fallback():
    x = put("S(0), R", 8, 6)
    text = str(loom.explain(lambda: torch.renorm(x, 2, 0, 1.0)))
    assert text.startswith("renorm: no rule, gathered and computed dense  at test_observe.py:")
    assert text.endswith("1 collective, 96 B per device")


# record and warn


def test_record_keeps_op_axis_bytes_and_line_of_each_event():
    x = put("S(0), R", 8, 6)
    with loom.record() as log:
        x.sum()
    (event,) = log
    assert (event.kind, event.axis, event.bytes, event.call, event.phase) == ("all_reduce", "dp", 4, "sum", "forward")
    assert event.where.startswith("test_observe.py:")
    assert str(log).splitlines()[-1] == "1 collectives, 4 B per device"


def test_nested_records_each_see_what_happens_inside_them():
    x = put("S(0), R", 8, 6)
    with loom.record() as outer:
        x.sum()
        with loom.record() as inner:
            x.amax()
        x.sum(0)
    assert [event.call for event in outer] == ["sum", "amax", "sum"]
    assert [event.call for event in inner] == ["amax"]


def test_record_counts_fallbacks_by_name():
    x = put("S(0), R", 8, 6)
    with loom.record() as log:
        torch.renorm(x, 2, 0, 1.0)
        torch.renorm(x, 2, 1, 1.0)
        torch.kron(x, x)
    assert log.fallbacks == {"renorm": 2, "kron": 1}
    assert "fallback: renorm x2" in str(log)


def test_warn_speaks_above_its_limit_only():
    x = put("S(0), R", 8, 6)
    with loom.communication("warn", above=96):
        x.redistribute("R, R")  # 96 B
    with loom.communication("warn", above=95), pytest.warns(loom.CommunicationWarning) as caught:
        x.redistribute("R, R")
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("redistribute communicates 96 B at test_observe.py:")


def test_allow_inside_forbid_allows():
    x = put("S(0), R", 8, 6)
    with loom.communication("forbid"), loom.communication("allow"):
        assert x.sum().placements == (loom.Replicate(),) * 2


def test_threads_do_not_see_each_others_scopes():
    x = put("S(0), R", 8, 6)
    ready, done = threading.Event(), threading.Event()
    found: list[Any] = []

    def elsewhere() -> None:
        try:
            ready.wait(10)
            with loom.record() as log:
                x.sum()
            found.append([event.call for event in log])
        except BaseException as error:
            found.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    with loom.record() as log, loom.communication("forbid"):
        ready.set()
        assert done.wait(10)
    thread.join()
    assert found == [["sum"]]
    assert len(log) == 0


def test_backward_is_seen_by_the_thread_that_called_it():
    make = PROGRAMS["backward_through_an_activation"]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(told(recorded(make()))))
    with loom.record() as log:
        thread.start()
        thread.join()
    assert found == [told(recorded(make()))]
    assert len(log) == 0


# pictures


def test_draw_mesh_shows_ids_with_the_last_axis_across():
    assert loom.draw_mesh(Mesh.of((2, 2), ("a", "b"), device_ids=(7, 5, 3, 1))) == (
        "Mesh(a=2, b=2, ids=[7, 5, 3, 1])  4 devices\n  a\\b  0  1\n  0    7  5\n  1    3  1"
    )


def test_draw_mesh_of_three_axes_lists_the_leading_two_down():
    assert loom.draw_mesh(Mesh(a=2, b=1, c=2)) == (
        "Mesh(a=2, b=1, c=2)  4 devices\n  a,b\\c  0  1\n  0,0    0  1\n  1,0    2  3"
    )


def test_draw_shows_uneven_shards_with_their_extents():
    assert loom.draw(Topology(Mesh(dp=2, tp=2), (Shard(0), Shard(1)), (3, 5), "f32")) == (
        """f32[3, 5](S(0), S(1)) on Mesh(dp=2, tp=2)
  ┌──────────────┬──────────────┐
  │ 0:2, 0:3     │ 0:2, 3:5     │
  │ dp=0 tp=0    │ dp=0 tp=1    │
  ├──────────────┼──────────────┤
  │ 2:3, 0:3     │ 2:3, 3:5     │
  │ dp=1 tp=0    │ dp=1 tp=1    │
  └──────────────┴──────────────┘"""
    )


def test_draw_marks_partial_axes_with_a_plus_and_replicated_ones_with_a_star():
    assert loom.draw(loom.ones(2, mesh=MESH, placements="P(sum), R")).splitlines()[2:4] == [
        "  │ 0:2          │",
        "  │ dp=+ tp=*    │",
    ]


def test_draw_of_a_number_is_one_cell():
    assert "│ ()" in loom.draw(loom.ones((), mesh=MESH))


def test_the_communication_table_sums_by_op_and_axis():
    x = put("S(0), R", 8, 6)
    with loom.record() as log:
        x.sum()
        x.sum()
        x.redistribute("R, R")
    rows = [line.split() for line in loom.communication_table(log).splitlines() if "│" in line]
    cells = [[cell for cell in row if cell != "│"] for row in rows]
    assert cells == [
        ["sum", "forward", "all_reduce(sum)", "dp", "2", "8"],
        ["redistribute", "forward", "all_gather", "dp", "1", "96"],
        ["all", "3", "104"],
    ]


def test_what_the_results_of_one_call_cause_is_told_once_though_each_was_read_as_a_dense_tensor():
    mesh = Mesh(d=3)
    a, w = loom.Parameter(torch.randn(4, 4), mesh, "S(1)"), loom.Parameter(torch.randn(4, 4), mesh)
    first, second = (a @ w).split(2)
    loss = first.to_torch().sum() + second.to_torch().sum()
    with loom.record() as log:
        loss.backward()
    assert [(event.kind, event.call, event.phase) for event in log] == [("all_gather", "matmul", "backward")]


def test_what_explain_advises_costs_what_it_says_and_gives_the_same_values():
    mesh = loom.open_mesh((4,), axes=("tp",))
    x = loom.randn(256, 1024, mesh=mesh, placements="S(1)")
    v, w = (loom.randn(1024, 256, mesh=mesh, placements="S(0)") for _ in range(2))
    found = loom.explain(lambda: x @ v + x @ w)
    one, other, total = found.advice.changes

    def ask():
        parts = [loom.matmul(x, each, output=change.request) for each, change in ((v, one), (w, other))]
        return loom.add(*parts, output=total.request).redistribute(total.back)

    asked = loom.explain(ask)
    moved = sum(price(event.collective, VIRTUAL) for event in asked.events if event.call == "redistribute")
    assert asked.cost + moved == pytest.approx(found.advice.after)
    assert found.cost == pytest.approx(found.advice.before)
    torch.testing.assert_close(ask().to_torch(), (x @ v + x @ w).to_torch(), rtol=1e-4, atol=1e-3)


def test_explain_sees_that_a_result_is_sliced_at_once_and_advises_to_scatter_it():
    mesh = loom.open_mesh((4,), axes=("dp",))
    x = loom.randn(512, 2048, mesh=mesh, placements="S(1)")
    g = loom.randn(2048, 512, mesh=mesh, placements="S(0)")
    found = loom.explain(lambda: (x @ g).redistribute({"dp": Shard(0)}))
    (change,) = found.advice.changes
    assert change.request == (Shard(0),) and change.back is None
    with loom.record() as log:
        asked = loom.matmul(x, g, output={"dp": Shard(0)})
    assert log.kinds() == {"reduce_scatter": 1} and log.bytes < found.bytes
    torch.testing.assert_close(asked.to_torch(), (x @ g).to_torch(), rtol=1e-4, atol=1e-3)


def test_explain_advises_nothing_about_values_that_were_written_in_place():
    mesh = loom.open_mesh((4,), axes=("tp",))
    x = loom.randn(256, 1024, mesh=mesh, placements="S(1)")
    v, w = (loom.randn(1024, 256, mesh=mesh, placements="S(0)") for _ in range(2))

    def write():
        product = x @ v
        product.add_(1)
        return product + x @ w

    assert loom.explain(write).advice is None
    assert loom.explain(lambda: x @ v + x @ w).advice is not None


def test_explain_advises_nothing_where_only_latency_could_be_saved():
    x = loom.ones(8, 8, mesh=loom.open_mesh((4,), axes=("tp",)), placements="S(1)")
    assert loom.explain(lambda: (x + 1).sum(1)).advice is None


def test_programs_on_several_meshes_are_advised_as_each_would_be_alone() -> None:
    meshes = loom.open_mesh((2, 2), axes=("dp", "tp")), loom.open_mesh((4,), axes=("tp",))

    def add_products(mesh: loom.Mesh) -> Any:
        x = loom.empty(512, 512, mesh=mesh, placements={"tp": loom.Shard(1)})
        w = loom.empty(512, 512, mesh=mesh, placements={"tp": loom.Shard(0)})
        return lambda: x @ w + x @ w

    first, second = map(add_products, meshes)
    alone = [loom.explain(each).advice for each in (first, second)]
    for order in ((first, second), (second, first)):
        found = loom.explain(lambda order=order: [each() for each in order]).advice
        assert found.before == pytest.approx(sum(each.before for each in alone))
        assert found.after == pytest.approx(sum(each.after for each in alone))
