"""What kernels take on this machine: the arithmetic of its tables, and which kernels a program is made of."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
import ranks
from meshloom.cli.host_measuring import CALLS, COLLECTIVES, QUICK, _kernels, measure_host
from meshloom.cost.host import FRESH, RUNS, TOKENS, WEIGHED, WIDTHS, Work, kernel_seconds, kind_of
from meshloom.fabric.host import Curve, Host, Products, load_host, read_host
from meshloom.tensor.host_time import FEWEST, MEMORY, PAGE, host_time

RATE = 1e9  # bytes per second of every curve
KINDS = tuple(kind for kind, _ in _kernels())


def flat(**calls: float) -> Host:
    """A host on which a byte of any kernel takes a nanosecond, a product runs at 1 GFLOP/s and calls are free."""
    curve = Curve(((1.0, 1 / RATE), (1e9, 1.0)))
    steps = (1, 4096)
    rates = {(m, k, n): 1e9 for m in steps for k in steps for n in steps}
    figures = {**dict.fromkeys(CALLS, 0.0), **calls}
    return Host("flat", 1, dict.fromkeys(KINDS, curve), {"f32": Products(steps, rates)}, figures)


def seconds(run: Any, host: Host) -> float:
    with host_time(host) as found:
        run()
    return found.seconds


def test_a_size_between_two_points_lies_on_the_line_between_their_logarithms() -> None:
    curve = Curve(((1e3, 1e-6), (1e5, 1e-2)))
    assert curve.seconds(1e4) == pytest.approx(1e-4)
    assert curve.seconds(10) == 1e-6
    assert curve.seconds(1e6) == pytest.approx(1e-1)


@pytest.mark.parametrize("points", [(), ((2.0, 1.0), (1.0, 1.0)), ((1.0, 0.0),), ((1.0, 1.0), (1.0, 2.0))])
def test_a_curve_that_does_not_grow_is_refused(points: Any) -> None:
    with pytest.raises(loom.MeshloomError, match="points of growing sizes"):
        Curve(points)


def test_products_are_exact_on_the_grid_and_between_their_neighbours_elsewhere() -> None:
    steps = (16, 64, 256)
    rates = {(m, k, n): float(m * k * n) for m in steps for k in steps for n in steps}
    products = Products(steps, rates)
    assert products.rate((16, 64, 256)) == pytest.approx(16 * 64 * 256)
    assert products.rate((32, 64, 64)) == pytest.approx(32 * 64 * 64)  # a power law is a line between logarithms
    assert products.rate((1, 1, 1)) == pytest.approx(16**3) and products.rate((9999,) * 3) == pytest.approx(256**3)
    assert products.seconds(1, (16, 16, 16)) == pytest.approx(2)


def test_a_batch_of_products_starts_once() -> None:
    products = Products((1, 64), {(m, k, n): 2.0 * m * k * n for m in (1, 64) for k in (1, 64) for n in (1, 64)})
    assert products.seconds(1, (64, 64, 64)) == pytest.approx(1.0)  # every product of the table takes a second to start
    many = products.seconds(100, (64, 64, 64))
    assert many == pytest.approx(1.0 + 100 * 1.0)  # and no product runs faster than the fastest of the table
    assert products.seconds(100, (1, 1, 1)) == pytest.approx(1.0 + 100 / 64**3)


def test_tables_survive_their_text_and_a_wrong_one_is_refused_with_its_line() -> None:
    host = flat(op=1e-6)
    text = Host(host.name, 1, host.curves, host.products, dict.fromkeys(CALLS, 1e-6), {"tanh": 2.0}).to_toml()
    assert read_host(text, "x").to_toml() == text
    with pytest.raises(loom.FabricError, match=r"x, line \d+: host\.threads is 0"):
        read_host(text.replace("threads = 1", "threads = 0"), "x")
    with pytest.raises(loom.FabricError, match=r"host\.speed is not a key"):
        read_host(text.replace("threads = 1", "threads = 1\nspeed = 3"), "x")


def test_an_add_reads_two_arrays_and_writes_one_whatever_the_number_of_devices() -> None:
    for devices in (1, 8, 128):
        x, y = (loom.ones(1024, 4, mesh=loom.open_mesh((devices,)), placements="S(0)") for _ in range(2))
        assert seconds(lambda x=x, y=y: x + y, flat()) == pytest.approx(3 * 4096 * 4 / RATE)
        assert seconds(lambda x=x: x + x, flat()) == pytest.approx(2 * 4096 * 4 / RATE)


def test_replicated_work_is_priced_once_and_a_folded_reduction_costs_nothing() -> None:
    mesh = loom.open_mesh((8,))
    whole = loom.ones(64, 64, mesh=mesh, placements="R")
    columns, rows = (loom.ones(64, 64, mesh=mesh, placements=each) for each in ("S(1)", "S(0)"))
    once = 2 * 64**3 / 1e9
    assert seconds(lambda: whole @ whole, flat()) == pytest.approx(once)
    assert seconds(lambda: columns @ rows, flat()) == pytest.approx(once)


def test_backward_is_priced_by_the_kernels_that_run() -> None:
    w = loom.Parameter(torch.ones(32, 32), loom.open_mesh((4,)), "S(1)")
    x = loom.ones(16, 32, mesh=loom.open_mesh((4,)), placements="R")
    with host_time(flat()) as forward:
        loss = (x @ w).sum()
    with host_time(flat(kernel=1.0)) as backward:
        loss.backward()
    product = 2 * 16 * 32 * 32 / 1e9
    assert forward.by_kind["product"] == pytest.approx(product)
    assert backward.by_kind["product"] == pytest.approx(product)  # of the weight alone
    assert backward.by_kind["kernel"] >= 2.0


def test_on_meta_a_step_is_priced_as_on_data() -> None:
    found = []
    for device in ("cpu", "meta"):
        mesh = loom.open_mesh((2, 2))
        x = loom.empty(32, 16, mesh=mesh, placements="S(0), R", device=device)
        w = loom.empty(16, 16, mesh=mesh, placements="R, S(1)", device=device).requires_grad_()
        found.append(seconds(lambda x=x, w=w: F.gelu(x @ w).softmax(-1).sum().backward(), flat(op=1e-6, kernel=1e-6)))
    assert found[0] == pytest.approx(found[1]) and found[0] > 0


def test_calls_collectives_and_lists_have_a_price_of_their_own() -> None:
    mesh = loom.open_mesh((4,))
    x = loom.ones(8, mesh=mesh, placements="S(0)")
    assert seconds(lambda: (x + 1) * 2, flat(op=1.0)) == pytest.approx(2.0, abs=1e-3)
    assert seconds(lambda: x + 1 + 1, flat(op=1.0, again=0.25)) == pytest.approx(0.5, abs=1e-3)
    tracked = loom.ones(8, mesh=mesh, placements="S(0)").requires_grad_()
    assert seconds(lambda: tracked + 1, flat(op=1.0)) == pytest.approx(1.0, abs=1e-3)
    assert seconds(lambda: loom.collectives.all_reduce(x), flat(all_reduce=2.0)) == pytest.approx(2.0, abs=1e-3)
    parameters = [loom.Parameter(torch.ones(4), mesh, "R") for _ in range(5)]
    for each in parameters:
        each.grad = torch.ones(4)
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)
    assert seconds(optimizer.step, flat(item=1.0)) == pytest.approx(5.0, abs=1e-3)


def test_views_are_free_and_large_results_pay_for_memory_from_the_system() -> None:
    x = loom.ones(64, 64, mesh=loom.open_mesh((2,)), placements="R")
    assert seconds(lambda: x.view(32, 128).transpose(0, 1)[3:5], flat()) == 0.0
    assert kernel_seconds(Work("add", 12.0, fresh=FRESH), flat(fresh=1.0)) == pytest.approx(FRESH)


@pytest.mark.parametrize(("device", "faults", "pays"), [("cpu", 8192, True), ("cpu", 2, False), ("meta", 0, True)])
def test_a_large_result_pays_for_memory_from_the_system_unless_it_is_seen_to_come_from_the_heap(
    device: str, faults: int, pays: bool, monkeypatch: Any
) -> None:
    x = loom.empty(FRESH // 4, mesh=loom.open_mesh((2,)), placements="S(0)", device=device)
    _fault_once(monkeypatch, faults)
    touched = 2 * FRESH / RATE
    assert seconds(lambda: x + 1, flat(fresh=1.0)) == pytest.approx(touched + FRESH * pays)


@pytest.mark.parametrize(("faults", "given"), [(200, 200 * PAGE), (FEWEST - 1, 0)])
def test_a_small_result_pays_for_memory_that_the_heap_had_given_back(faults: int, given: int, monkeypatch: Any) -> None:
    x = loom.ones(1 << 18, mesh=loom.open_mesh((2,)), placements="S(0)")
    _fault_once(monkeypatch, faults)
    with host_time(flat(fresh=1.0)) as found:
        _ = x + 1
    assert found.by_kind.get(MEMORY, 0.0) == given
    assert found.seconds_without_fresh == pytest.approx(2 * x.nbytes / RATE, rel=1e-4)


def test_what_the_system_gives_after_the_last_kernel_is_paid_too(monkeypatch: Any) -> None:
    counted = itertools.chain([0, 0], itertools.repeat(100))
    monkeypatch.setattr("meshloom.tensor.host_time.page_faults", lambda: next(counted))
    x = loom.ones(8, mesh=loom.open_mesh((2,)))
    with host_time(flat(fresh=1.0)) as found:
        _ = x + 1
        assert MEMORY not in found.by_kind
    assert found.by_kind[MEMORY] == 100 * PAGE


def test_without_data_no_fault_of_this_process_is_priced(monkeypatch: Any) -> None:
    counted = itertools.count(0, 1000)
    monkeypatch.setattr("meshloom.tensor.host_time.page_faults", lambda: next(counted))
    x = loom.empty(8, mesh=loom.open_mesh((2,)), device="meta")
    with host_time(flat(fresh=1.0)) as found:
        (x + 1).add_(x)
    assert MEMORY not in found.by_kind


def _fault_once(monkeypatch: Any, faults: int) -> None:
    """The first kernel that is priced has caused so many faults, and nothing after it."""
    counted = itertools.chain([0], itertools.repeat(faults))
    monkeypatch.setattr("meshloom.tensor.host_time.page_faults", lambda: next(counted))


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda x: x.sum(0), "sum of rows"),
        (lambda x: x.sum(1), "sum"),
        (lambda x: x.softmax(0), "softmax across"),
        (lambda x: x.softmax(1), "softmax"),
        (lambda x: x.t().contiguous(), "turned copy"),
        (lambda x: F.layer_norm(x, (64,)), "norm"),
        (lambda x: x.tanh(), "pointwise"),
        (lambda x: x.t() * 2, "strided"),
        (lambda x: x[:, :8] * x[:, 8:16], "strided"),
        (lambda x: x[:, :8].clone(memory_format=torch.contiguous_format), "strided copy"),
        (lambda x: torch.cat([x, x], 1), "join"),
        (lambda x: torch.stack([x, x], -1), "join"),
        (lambda x: x.add_(1), "in place"),
        (lambda x: F.embedding(torch.arange(8), x), "look-up"),
    ],
)
def test_kernels_go_by_their_kind(run: Any, kind: str) -> None:
    with host_time(flat()) as found:
        run(loom.ones(32, 64, mesh=loom.open_mesh((1,)), placements="R"))
    assert kind in found.by_kind, found


def test_sums_of_rows_lie_between_the_curves_of_more_and_fewer_rows() -> None:
    host = flat()
    curves = {**host.curves, "sum of 8 rows": Curve(((1.0, 1.0), (2.0, 1.0))), "sum of 32 rows": Curve(((1.0, 4.0),))}
    skewed = Host("skewed", 1, curves, host.products, host.calls)
    assert kernel_seconds(Work("sum", 1.0, rows=16), skewed) == pytest.approx(2.0)
    assert kernel_seconds(Work("sum", 1.0, rows=8), skewed) == pytest.approx(1.0)


def test_short_runs_and_attention_lie_between_the_curves_of_their_neighbours() -> None:
    host, low, high = flat(), Curve(((1.0, 1.0),)), Curve(((1.0, 4.0),))
    first, second = RUNS[1:3]
    names = [f"attention {tokens}x{width}" for tokens in TOKENS[:2] for width in WIDTHS]
    skewed = {f"join {first}": low, f"join {second}": high, **dict(zip(names, (low, low, high, high), strict=True))}
    made = Host("skewed", 1, {**host.curves, **skewed}, host.products, host.calls)
    assert kernel_seconds(Work("cat", 1.0, run=second), made) == pytest.approx(4.0)
    assert 1.0 < kernel_seconds(Work("cat", 1.0, run=(first + second) // 2), made) < 4.0
    fused = Work("_scaled_dot_product_flash_attention_for_cpu", 9.0, flops=1.0, attention=(TOKENS[1], 30))
    assert kernel_seconds(fused, made) == pytest.approx(4.0)
    assert 1.0 < kernel_seconds(replace(fused, attention=(sum(TOKENS[:2]) // 2, 30)), made) < 4.0


def test_a_kernel_that_weighs_more_is_bound_by_arithmetic_until_memory_is_slower() -> None:
    host = flat()
    slow = Curve(((1.0, 1 / RATE), (float(WEIGHED), WEIGHED / RATE), (8.0 * WEIGHED, 80.0 * WEIGHED / RATE)))
    made = Host("slow", 1, {**host.curves, "pointwise": slow}, host.products, host.calls, {"tanh": 5.0, "neg": 0.5})
    assert kernel_seconds(Work("tanh", float(WEIGHED)), made) == pytest.approx(5 * WEIGHED / RATE, rel=1e-3)
    assert kernel_seconds(Work("tanh", 8.0 * WEIGHED), made) == pytest.approx(80 * WEIGHED / RATE, rel=1e-3)
    assert kernel_seconds(Work("neg", float(WEIGHED)), made) == pytest.approx(0.5 * WEIGHED / RATE, rel=1e-3)
    assert kernel_seconds(Work("neg", 8.0 * WEIGHED), made) == pytest.approx(79.5 * WEIGHED / RATE, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "dim", "times"), [((8, 512), 0, 3), ((8, 500), 0, 1), ((8, 512), 1, 1), ((8,), 0, 1)]
)
def test_a_softmax_whose_neighbours_share_places_in_the_cache_weighs_more(shape: Any, dim: int, times: int) -> None:
    host, x = flat(), loom.ones(*shape, mesh=loom.open_mesh((2,)), placements="R")
    made = Host("even", 1, host.curves, host.products, host.calls, {"even": 3.0})
    assert seconds(lambda: x.softmax(dim), made) == pytest.approx(times * 2 * x.nbytes / RATE)


def test_an_operand_that_was_used_long_ago_is_found_further_away() -> None:
    mesh, host = loom.open_mesh((2,)), flat()
    further = Curve(((1.0, 1 / RATE), (float(1 << 16), (1 << 16) / RATE), (float(1 << 22), 10 * (1 << 22) / RATE)))
    made = Host("cached", 1, {**host.curves, "sum": further}, host.products, host.calls)
    x, *others = (loom.ones(1 << 12, mesh=mesh, placements="S(0)") for _ in range(9))

    def run() -> None:
        _ = x + 1
        for each in others:
            _ = each + 1
        _ = x + 1

    assert seconds(run, host) == pytest.approx(10 * 2 * 4 * 4096 / RATE)
    assert seconds(run, made) > 1.5 * seconds(run, host)
    assert seconds(lambda: x + 1, made) == pytest.approx(seconds(lambda: x + 1, host))  # it was used just before


def test_parts_of_one_memory_are_found_where_each_was_used_last() -> None:
    host = flat()
    further = Curve(((1.0, 1 / RATE), (float(1 << 22), (1 << 22) / RATE), (float(1 << 26), 10 * (1 << 26) / RATE)))
    made = Host("cached", 1, {**host.curves, "sum": further}, host.products, host.calls)
    x = loom.ones(16, 1 << 18, mesh=loom.open_mesh((1,)), placements="R", device="meta")
    rows = [x[place] for place in range(16)]

    def price(*chosen: Any) -> float:
        return seconds(lambda: [row + 1 for row in chosen], made) / seconds(lambda: [row + 1 for row in chosen], host)

    assert price(*[rows[0]] * 16) == pytest.approx(1.0)  # used just before, though the others were not
    assert price(*rows) > 1.5


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (1,)])
def test_tensors_of_nothing_have_a_price(shape: Any) -> None:
    x = loom.ones(*shape, mesh=loom.open_mesh((3,)), placements="R")
    assert 0 <= seconds(lambda: (x + 1).softmax(-1).sum(), flat()) < 1e-6


def test_a_product_into_a_weights_gradient_weighs_more() -> None:
    host = flat()
    made = Host("turned", 1, host.curves, host.products, host.calls, {"transposed": 3.0})
    x, y = (loom.ones(64, 64, mesh=loom.open_mesh((2,)), placements="R") for _ in range(2))
    once = 2 * 64**3 / 1e9
    assert seconds(lambda: x @ y, made) == pytest.approx(once) and seconds(lambda: x @ y.t(), made) == pytest.approx(
        once
    )
    assert seconds(lambda: x.t() @ y, made) == pytest.approx(3 * once)


def test_a_machine_that_is_measured_has_every_table() -> None:
    host = measure_host(QUICK)
    assert set(host.curves) == set(KINDS) and set(host.calls) == set(CALLS) >= set(COLLECTIVES)
    assert all(math.isfinite(each) and each > 0 for each in (*host.calls.values(), *host.weights.values()))
    assert {kind_of(Work(name, 1.0)) for name in host.weights} <= set(KINDS)
    assert read_host(host.to_toml(), "x").threads == torch.get_num_threads()


@pytest.mark.parametrize("count", [2, 4])
def test_a_collective_between_processes_is_priced_at_what_it_took_its_kernels_included(count: int) -> None:
    for found in ranks.run(count, "host_ranks:price_what_was_measured", flat(), 1.0, 1 << 16):
        assert set(found) == set(COLLECTIVES)
        assert found == pytest.approx(dict.fromkeys(COLLECTIVES, 1.0), abs=1e-9)  # a kernel takes 1e-4 and more


def test_a_table_that_is_missing_is_named() -> None:
    host = Host("bare", 1, {"copy": Curve(((1.0, 1.0),))}, {}, dict.fromkeys(CALLS, 0.0))
    with pytest.raises(loom.MeshloomError, match="no curve for 'pointwise'"):
        kernel_seconds(Work("add", 12.0), host)
    with pytest.raises(loom.MeshloomError, match="was not measured for all_reduce on 2 processes"):
        host.between("all_reduce", 2)


TABLES = """[host]
name = "here"
threads = 1
[host.calls]
op = 2e-6
[host.curves]
copy = [[1024, 1e-6], [4096, 2e-6]]
[host.products]
f32 = [[16, 16, 16, 1e9]]
[host.processes]
"all_reduce 2" = [[1024, 1e-6]]
"""


@pytest.mark.parametrize(
    "right, wrong, said",
    [
        ("[[1024, 1e-6], [4096, 2e-6]]", "[[4096, 1e-6], [1024, 2e-6]]", "line 7: host.curves.copy is"),
        ("[16, 16, 16, 1e9]", "[16, 16, 32, 1e9]", "line 9: host.products.f32 is"),
        ("[16, 16, 16, 1e9]", "[16.5, 16, 16, 1e9]", "line 9: host.products.f32 is"),
        ("all_reduce 2", "all_reduce two", "host.processes.all_reduce two names no processes"),
        ("all_reduce 2", "all_reduce", "host.processes.all_reduce names no processes"),
        ("all_reduce 2", "all_reduce 0", "host.processes.all_reduce 0 names no processes"),
    ],
)
def test_tables_that_cannot_be_are_refused_with_file_and_key(right, wrong, said):
    read_host(TABLES, "here.toml")
    with pytest.raises(loom.FabricError, match=f"^here.toml, {said}|^here.toml, line [0-9]+: {said}"):
        read_host(TABLES.replace(right, wrong), "here.toml")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(loom.FabricError, match="is not UTF-8 text"):
        load_host(tmp_path / "bytes.toml")
    with pytest.raises(loom.FabricError, match="cannot be read"):
        load_host(tmp_path)


def test_a_grid_of_one_point_has_its_rate_everywhere():
    host = read_host(TABLES, "here.toml")
    assert host.products["f32"].seconds(1, (32, 32, 32)) == pytest.approx(2 * 32**3 / 1e9)


def test_names_with_quotes_are_read_back():
    host = read_host(TABLES.replace('"here"', "'a \"b\" \\'"), "here.toml")
    assert read_host(host.to_toml(), "here.toml") == host
    assert host.name == 'a "b" \\'
