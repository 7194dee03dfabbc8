"""The benchmark harness works: it measures, judges, reports and writes. No figure is asserted here."""

from __future__ import annotations

import importlib
import io
import itertools
import json
import mmap
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

import meshloom as loom

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(ROOT))

    def find(name: str) -> ModuleType:
        return importlib.import_module(f"benchmarks.{name}")

    return find


def test_a_run_writes_every_row_with_its_figures_and_its_goal(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert bench("run").main(["--quick", "--devices", "1,2", "--only", "add", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    assert set(found) == {
        "complete", "cores", "date", "load", "meshloom", "python", "quick", "rows", "threads", "torch",
    }  # fmt: skip
    assert (found["complete"], found["quick"], found["torch"]) == (True, True, torch.__version__)
    assert [(row["work"], row["devices"], row["mesh"]) for row in found["rows"]] == [("add", 1, [1]), ("add", 2, [2])]
    for row in found["rows"]:
        assert row["ours_us"] > 0 and row["dense_us"] > 0 and row["rounds"] >= 3
        assert row["extra_us"] == pytest.approx(row["ours_us"] - row["dense_us"], abs=0.01)
        assert row["goal"] == "<= +2 us" and isinstance(row["ok"], bool)


def test_a_run_names_no_machine_and_no_path(bench: Any, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    bench("run").main(["--quick", "--devices", "2", "--only", "memory", "--json", str(path)])
    assert "/" not in path.read_text()


def test_an_interrupted_run_keeps_the_rows_before(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = bench("run"), tmp_path / "results.json"
    measure, left = run.measure, [1]

    def interrupted(spec: Any, scale: float) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return measure(spec, scale)

    monkeypatch.setattr(run, "measure", interrupted)
    assert run.main(["--quick", "--devices", "1,2", "--only", "memory", "--json", str(path)]) == 130
    found = json.loads(path.read_text())
    assert found["complete"] is False and len(found["rows"]) == 1
    assert "stopped early" in capsys.readouterr().out


def test_every_work_has_a_row_on_every_number_of_devices_and_2d_works_on_more_than_one(bench: Any) -> None:
    works = bench("works").all_works((1, 8, 32, 128))
    meshes: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for spec in works:
        meshes.setdefault((spec.name, spec.detail), []).append(spec.mesh)
    special = {"matmul 2-D": [(2, 4), (4, 8), (8, 16)], "all-reduce": [(8,)], "all-gather": [(8,)]}
    for (name, _), found in meshes.items():
        assert found == special.get(name, [(1,), (8,), (32,), (128,)])
    assert {name for name, _ in meshes} >= {
        "add", "matmul row", "matmul column", "matmul batch", "matmul inner", "MLP step", "memory", "all-reduce",
        "all-gather",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["matmul row", "matmul inner", "matmul 2-D", "call"])
def test_a_work_gives_the_dense_answer_on_both_sides(bench: Any, name: str) -> None:
    works = [spec for spec in bench("works").all_works((8,)) if spec.name == name]
    assert works
    for spec in works:
        pair = spec.make()
        assert torch.allclose(pair.ours().to_torch(), pair.dense(), rtol=1e-4, atol=1e-3)


def test_first_calls_have_a_goal_by_the_number_of_axes_and_forget_what_was_before(bench: Any) -> None:
    first_calls = bench("first_calls")
    works = first_calls.works((8, 32))
    assert [(spec.detail, str(spec.goal)) for spec in works] == [
        ("a @ b, 2 axes", "<= +1000 us"), ("a + b, 2 axes", "<= +1000 us"),
        ("a @ b, 3 axes", "<= +4000 us"), ("a + b, 3 axes", "<= +4000 us"),
        ("a @ b, 5 axes", "<= +20000 us"), ("a + b, 5 axes", "<= +20000 us"),
    ]  # fmt: skip
    pair = works[0].make()
    pair.ours()
    assert first_calls.dispatch.CACHE
    first_calls.forget()
    assert not first_calls.dispatch.CACHE
    assert all(each.cache_info().currsize == 0 for each in first_calls._REMEMBERED)


def test_a_wrong_answer_is_caught_before_it_is_timed(bench: Any) -> None:
    works = bench("works")
    tensor = loom.ones(4, mesh=loom.open_mesh((2,)))
    with pytest.raises(works.WrongAnswer, match="differs from dense by 1"):
        works._check(tensor, torch.zeros(4), "ones")


def test_a_replicated_tensor_on_128_devices_is_stored_once(bench: Any) -> None:
    [spec] = [spec for spec in bench("works").all_works((128,)) if spec.name == "memory"]
    row = bench("run").measure(spec, 0.0)
    assert (row.copies, row.ok) == (1.0, True)


def test_a_goal_that_is_not_reached_is_a_miss_in_the_table(bench: Any) -> None:
    report, results = bench("report"), bench("results")
    row = results.Row(
        "meshloom", "add", "32x32 per device", (8,), 8, "extra_us", extra_us=4.5, goal="<= +4 us", ok=False
    )
    console = Console(width=120, file=io.StringIO())
    console.print(report.table([replace(row, devices=1, extra_us=0.8, ok=True), row]))
    text = console.file.getvalue()
    assert "+4.50 us" in text and "<= +4 us" in text and "MISS" in text


@pytest.fixture
def small(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives of 64 KB instead of 64 MB."""
    monkeypatch.setattr(bench("moves"), "BYTES", 64 << 10)


@pytest.mark.parametrize("name", ["all-reduce", "all-gather"])
def test_a_collective_is_measured_beside_a_copy_with_its_traffic(bench: Any, small: None, name: str) -> None:
    there, new = [spec for spec in bench("works").all_works((8,)) if spec.name == name]
    pair = there.make()
    first = pair.ours()
    assert pair.ours() is first, "both sides write into memory that is there"
    row = bench("run").measure(there, 0.0)
    assert row.goal == "<= 1.5x" and row.ratio == pytest.approx(row.ours_us / row.dense_us, rel=0.05)
    pair = new.make()
    assert pair.ours() is not pair.ours() and new.detail == f"{there.detail}, new result"


def test_the_copy_reads_every_part_and_writes_one(bench: Any) -> None:
    parts = torch.arange(12.0).view(3, 4)
    out, total = bench("moves").reduce_traffic(parts)()
    assert torch.equal(out, parts[0]) and total == parts[1:].sum()
    assert out.data_ptr() != parts.data_ptr()
    assert torch.equal(bench("moves").gather_traffic(parts)(), parts)


def test_predictions_stand_beside_what_was_measured(bench: Any, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "results.json"
    assert bench("run").main(["--quick", "--devices", "8", "--only", "predicted", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == bench("prediction").count(quick=True)
    ends = [number for number, row in enumerate(rows) if row["devices"] == 0]
    together = rows[ends[1] + 1 :]
    *points, median, most = rows[: ends[1] + 1]
    check_between(together)
    assert {"predicted all-reduce", "predicted matmul", "predicted MLP step"} <= {row["work"] for row in points}
    for row in points:
        assert row["error"] == pytest.approx(row["predicted_us"] / row["ours_us"] - 1, abs=0.01)
        assert re.search(r", spread \d+%$", row["detail"])
    errors = sorted(abs(row["error"]) for row in points)
    assert median["error"] == pytest.approx(statistics.median(errors), abs=1e-3) and most["error"] == errors[-1]
    assert median["ok"] == (median["error"] <= 0.15) and most["ok"] == (most["error"] <= 0.3)
    shown = capsys.readouterr().out
    assert "predicted with figures calibrated in this run" in shown and f"median of {len(points)} points" in shown


def check_between(rows: list[dict[str, Any]]) -> None:
    """Collectives and a step on two processes, and what lies in the middle."""
    *points, median, far = rows
    assert {row["devices"] for row in points} == {2}
    assert {"predicted all-reduce", "predicted all-to-all", "predicted MLP step"} <= {row["work"] for row in points}
    errors = [abs(row["error"]) for row in points]
    assert median["error"] == pytest.approx(statistics.median(errors), abs=1e-3)
    assert 0 <= far["error"] <= 1 and far["ok"] == (far["error"] == 0)


def test_no_point_of_the_prediction_was_measured_by_the_calibration(bench: Any) -> None:
    from meshloom.cli.host_measuring import FULL

    prediction = bench("prediction")
    assert not set(FULL.sizes) & set(prediction.SIZES)
    assert not any(set(sizes) <= set(FULL.steps) for sizes in prediction.PRODUCTS)
    assert not set(FULL.sent) & set(bench("prediction_ranks").SIZES)


def test_a_collective_is_given_the_bytes_that_its_label_says(bench: Any) -> None:
    prediction = bench("prediction")
    for kind in prediction.KINDS:
        for devices in (2, 4, 8):
            run = prediction.make_collective(kind, loom.open_mesh((devices,)), 1 << 16)
            (given, *_) = run.args
            assert given.topology.local_bytes == pytest.approx(4 << 16, rel=0.05), (kind, devices)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_peer_that_is_missing_gives_rows_that_say_why(
    bench: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    peers = bench("peers")
    monkeypatch.setattr(peers, "_lines", lambda command, limit: iter(["ModuleNotFoundError: No module named 'x'\n"]))
    peer = [*peers.ALL, peers.PROCESS_PEER][number]
    rows = list(peers.answers(peer, 8, 1.0))
    assert [(row.work, row.detail) for row in rows] == list(peer.works_on(8))
    assert {row.missing for row in rows} == {f"missing: ModuleNotFoundError: No module named 'x'{peer.hint}"}
    assert {bench("report").figure(row) for row in rows} == {"missing"}


def test_a_peer_is_held_to_a_multiple_of_our_time_on_the_same_work(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = bench("peers")
    details = ("64 MB per device", "64 MB per device, new result")
    lines = [json.dumps({"work": "all-reduce", "detail": each, "timing": [0.4, 0.1, 0.01, 3]}) for each in details]
    monkeypatch.setattr(peers, "_lines", lambda command, limit: iter(lines))
    first, second, *_ = peers.answers(peers.ALL[1], 8, 1.0)
    assert (first.times_ours, first.goal, first.ok) == (4.0, ">= 5x ours", False)
    assert (first.theirs_us, first.ours_us, first.dense_us, first.ratio) == (400_000, 100_000, 10_000, 40)
    assert second.detail == details[1] and second.times_ours == 4.0
    assert bench("report").figure(first) == "4.0x ours"


@pytest.mark.parametrize(("devices", "goal"), [(8, ">= 4x ours"), (32, ">= 10x ours"), (128, None)])
def test_a_peers_training_step_is_held_to_more_on_more_devices(
    bench: Any, monkeypatch: pytest.MonkeyPatch, devices: int, goal: str | None
) -> None:
    peers = bench("peers")
    lines = [
        json.dumps({"work": "memory", "detail": "replicated 4 MB", "copies": 8.0}),
        json.dumps({"work": "MLP step", "detail": "data-parallel", "timing": [0.5, 0.1, 0.1, 3]}),
    ]
    monkeypatch.setattr(peers, "_lines", lambda command, limit: iter(lines))
    memory, step = list(peers.answers(peers.ALL[1], devices, 1.0))[:2]
    assert (memory.copies, bench("report").figure(memory), memory.goal) == (8.0, "8.00", None)
    assert (step.times_ours, step.goal) == (5.0, goal)


def test_work_on_processes_has_a_table_of_its_own(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers, report = bench("peers"), bench("report")
    times = {"add": [1e-6, 10e-6, 5], "divergence check": [0.11, 0.1, 5]}
    lines = [
        json.dumps({"work": work, "detail": detail, "timing": times.get(work, [0.104, 0.1, 5])})
        for work, detail in peers.PROCESS_PEER.works
    ]
    monkeypatch.setattr(peers, "_lines", lambda command, limit: iter(lines))
    rows = list(peers.answers(peers.PROCESS_PEER, 2, 1.0))
    judged = {(row.work, row.detail): (row.ratio, row.goal, row.ok) for row in rows}
    assert judged["add", "DTensor, 32x32 per device"] == (0.1, "<= 0.333x", True)
    assert judged["MLP step", "DDP, data-parallel"] == (1.04, "<= 1.05x", True)
    assert judged["divergence check", "MLP step, sample against off"] == (1.1, "<= 1.05x", False)
    assert judged["divergence check", "MLP step, always against off"] == (1.1, None, None)
    console = Console(width=120, file=io.StringIO())
    report.show(console, rows, bench("results").setting(True), True)
    text = console.file.getvalue()
    assert "on 2 Gloo processes" in text and "theirs / ours" in text and "10.0x" in text and "MISS" in text


def test_the_processes_name_the_works_that_are_expected_of_them(bench: Any) -> None:
    assert bench("peers").PROCESS_PEER.works == bench("processes").WORKS
    assert bench("peers").HEAVY_PEER.works == bench("heavy").WORKS
    assert bench("peers").SHARDING_PEER.works == bench("sharding").WORKS
    assert bench("peers").LINK_PEER.works == bench("link").WORKS


def test_memory_on_processes_stands_beside_time_in_a_table_per_number_of_processes(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers, report, page = bench("peers"), bench("report"), bench("page")
    lines = [
        json.dumps({"work": work, "detail": detail, "timing": [0.09, 0.1, 5]})
        if work == "sharded step"
        else json.dumps({"work": work, "detail": detail, "megabytes": [30.0, 25.0]})
        for work, detail in peers.SHARDING_PEER.works
    ]
    monkeypatch.setattr(peers, "_lines", lambda command, limit: iter(lines))
    rows = [row for count in (2, 4) for row in peers.answers(peers.SHARDING_PEER, count, 1.0)]
    judged = {(row.work, row.devices): (row.ratio, row.goal, row.ok) for row in rows}
    assert judged["sharded step", 4] == (0.9, "<= 1.05x", True)
    assert judged["sharded peak", 2] == (1.2, "<= 1.05x", False)
    console = Console(width=120, file=io.StringIO())
    report.show(console, rows, bench("results").setting(True), True)
    text = console.file.getvalue()
    assert "on 2 Gloo processes" in text and "on 4 Gloo processes" in text and "30.0 MB" in text
    two, four = page._processes(rows, {"date": "2030-01-02T03:04", "load": 1.5})
    assert "### On 4 processes" in four and "25.0 MB" in four and "2030-01-02, load 1.5 before" in two
    assert "Measured by a run" not in page._processes(rows, None)[0]


def test_the_step_of_the_gpt_is_measured_on_both_plans(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt = bench("gpt")
    for name, value in {"WIDTH": 16, "HEADS": 4, "HIDDEN": 16, "LAYERS": 1, "ROWS": 8, "LENGTH": 8}.items():
        monkeypatch.setattr(gpt, name, value)
    specs = gpt.works((1, 8))
    found = [(spec.detail, spec.mesh, str(spec.goal)) for spec in specs]
    assert found == [
        ("data-parallel", (1,), "None"), ("data-parallel", (8,), "<= 1.1x"), ("tensor-parallel", (2, 4), "<= 1.25x"),
    ]  # fmt: skip
    for spec in specs:
        pair = spec.make()
        assert pair.ours().item() == pytest.approx(pair.dense().item(), rel=1e-4)


def test_the_page_and_its_plot_show_the_figures_of_the_results(bench: Any) -> None:
    page = bench("page")
    conditions, rows = page.read()
    assert page.PLOT.read_text() == page.plot(rows), "run python -m benchmarks.page"
    text = page.PAGE.read_text()
    assert text == page.filled(text, conditions, rows), "run python -m benchmarks.page"
    first = next(row for row in rows if row.work == "MLP step" and row.devices == 128)
    assert f"{first.ratio:.2f}x" in text


def test_every_prediction_is_on_the_page(bench: Any) -> None:
    page = bench("page")
    _, rows = page.read()
    predicted = [row for row in rows if row.shown == "error"]
    assert len(predicted) == bench("prediction").count(quick=False) > 100
    text = page.PAGE.read_text()
    for row in predicted:
        assert "| " + " | ".join(bench("report").prediction_line(row)) + " |" in text


@pytest.mark.parametrize("number", [27, 41, 68])
def test_row_027_and_041_and_068_the_committed_figures_reach_their_goals(bench: Any, number: int) -> None:
    _, rows = bench("page").read()
    works = bench("goals").CHECKLIST[number]
    assert bench("run").misses(rows, works) == []


@pytest.mark.parametrize(("number", "value"), [(27, 1.31), (41, 0.95), (68, 0.95)])
def test_a_figure_that_misses_its_goal_or_was_not_measured_is_found(bench: Any, number: int, value: float) -> None:
    _, rows = bench("page").read()
    works = bench("goals").CHECKLIST[number]
    slower = [replace(row, ratio=value) if (row.work, row.devices) == (works[-1], 32) else row for row in rows]
    told = bench("run").misses(slower, works)
    assert told and all(f"32 devices: {value}, goal <= " in each for each in told)
    absent = [row for row in rows if (row.work, row.devices) != (works[0], 128)]
    assert "128 devices: None, goal" in " ".join(bench("run").misses(absent, works))


def test_rounds_of_all_sides_take_turns(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timing, seen = bench("timing"), []
    monkeypatch.setattr(timing, "_calibrate", lambda side: 1)
    sides = [timing.Side(lambda name=name: seen.append(name)) for name in ("theirs", "ours", "dense")]
    best, rounds = timing.contest(sides, 0.0)
    assert len(best) == 3 and rounds == timing.MINIMUM_ROUNDS
    assert seen[0:12:2] == ["theirs", "ours", "dense", "ours", "dense", "theirs"]
    assert seen[1:12:2] == seen[0:12:2]  # one call before the clock, so that a round does not start cold


def test_rounds_go_on_while_no_other_comes_close_to_the_best(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = bench("timing")
    taken = iter([1.0, 5.0, 7.0, 1.02, 4.0, 1.01, 1.02])
    monkeypatch.setattr(timing, "_calibrate", lambda side: 1)
    monkeypatch.setattr(timing, "_round", lambda side, loops: next(taken))
    clock = itertools.count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock) * 0.6)
    assert timing.contest([timing.Side(lambda: None)], 1.0) == ([1.0], 6)  # 1.0, 1.01 and 1.02 are close
    assert timing._goes_on([[1.0, 1.01, 1.02]], 1.0, 1.0, within=0.01)  # but not for who asks for more
    assert not timing._goes_on([[1.0, 1.5, 2.0]], 1.0 * timing.LONGEST, 1.0)  # and not for ever


def test_a_peers_process_measures_ours_beside_it(bench: Any, small: None, capsys: pytest.CaptureFixture[str]) -> None:
    beside, moves, timing = bench("beside"), bench("moves"), bench("timing")
    for work in moves.WORKS:
        ours = beside.our_work(work, moves.DEVICES)
        beside.compare(work, timing.Side(lambda: None), ours, lambda: None, 0.0)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["work"], each["detail"]) for each in told] == list(moves.WORKS)
    assert all(len(each["timing"]) == 4 and each["timing"][1] > 0 for each in told)


def test_the_plot_has_a_point_for_every_system_and_number_of_devices(bench: Any) -> None:
    page, results = bench("page"), bench("results")
    who = {"meshloom": (1.0, 1.1), "DTensor LocalTensor": (5.0, 16.0), "JAX host devices": (3.0, 12.0)}
    rows = [
        results.Row(name, "MLP step", "data-parallel", (devices,), devices, "ratio", ratio=ratio)
        for name, ratios in who.items()
        for devices, ratio in zip((8, 32), ratios, strict=True)
    ]
    drawn = ElementTree.fromstring(page.plot(rows))
    told = [each.text for each in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert len(told) == 6 and "DTensor LocalTensor, 32 devices: 16.00x" in told
    heights = {each[0].text: float(each.get("cy", "nan")) for each in drawn.iter("{http://www.w3.org/2000/svg}circle")}
    assert heights["DTensor LocalTensor, 32 devices: 16.00x"] < heights["meshloom, 32 devices: 1.10x"], "up is slower"


def test_jax_is_measured_where_it_is_installed(bench: Any) -> None:
    pytest.importorskip("jax", reason="an optional extra")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.jaxdevices", "--ranks", "2", "--scale", "0"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = {(each["work"], each["detail"]) for each in map(json.loads, done.stdout.splitlines())}
    assert found == set(bench("peers").ALL[1].works_on(2))


def test_a_peer_process_that_fails_hands_over_its_last_line_without_paths(bench: Any) -> None:
    lines = bench("peers")._lines(
        [sys.executable, "-c", "raise ImportError('cannot import x from /some/where/lib.py')"], 60.0
    )
    assert list(lines) == ["ImportError: cannot import x from lib.py"]


@pytest.mark.parametrize("name", ["localtensor", "jaxdevices"])
def test_peers_and_their_process_name_the_same_works(bench: Any, name: str) -> None:
    if name == "localtensor":
        pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensor mode")
    peers, beside = bench("peers"), bench("beside")
    [peer] = [peer for peer in peers.ALL if peer.module == f"benchmarks.{name}"]
    for ranks in peer.ranks:
        assert {*beside.works_of(bench(name).MAKES, ranks), peers.MEMORY} == set(peer.works_on(ranks))


def test_ours_runs_in_the_process_of_jax_too(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    devices, work = bench("jaxdevices"), ("add", "32x32 per device")
    monkeypatch.setattr(devices, "Devices", lambda ranks: None)  # JAX itself is an optional extra
    monkeypatch.setattr(devices, "copies", lambda found: 2.0)
    monkeypatch.setattr(
        devices, "works_of", lambda makes, ranks: {work: (lambda found: (lambda: None, lambda: None), 0.0)}
    )
    devices.measure(2, 0.0)
    memory, add = map(json.loads, capsys.readouterr().out.splitlines())
    assert memory == {"work": "memory", "detail": "replicated 4 MB", "copies": 2.0}
    theirs, ours, _, _ = add["timing"]
    assert (add["work"], add["detail"]) == work and ours > theirs > 0


def test_localtensor_is_measured_with_ours_and_dense_in_one_process(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensor mode")
    localtensor, work = bench("localtensor"), ("add", "32x32 per device")
    make = localtensor.MAKES["add"]
    localtensor.measure_work(work, make, 2, 0.0)
    told = json.loads(capsys.readouterr().out)
    theirs, ours, dense, rounds = told["timing"]
    assert (told["work"], told["detail"], rounds) == (*work, 3) and min(theirs, ours, dense) > 0
    assert not torch.distributed.is_initialized(), "the fake group is gone"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "is not a list of device counts"),
        (["--devices", "two"], "is not a list of device counts"),
        (["--only", "addd"], "invalid choice: 'addd'"),
        (["--json", "no/such/directory/out.json"], "its directory must exist"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_measured(
    bench: Any, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench("run").main(arguments)
    assert message in capsys.readouterr().err


def touch_new_memory() -> None:
    """Use 64 MB that the process did not have; what others freed may lie about in its heap."""
    with mmap.mmap(-1, 1 << 26) as room:
        for start in range(0, 1 << 26, mmap.PAGESIZE):
            room[start] = 1


def test_a_checkpoint_of_a_few_bytes_is_saved_and_loaded_beside_the_same_bytes(bench: Any) -> None:
    checkpoints = bench("checkpoints")
    for deed in checkpoints.DEEDS:
        pair = checkpoints.pair(deed, 1 << 20)
        pair.ours()
        pair.dense()
    assert (checkpoints.place() / "checkpoint" / "index.json").is_file()
    assert (checkpoints.place() / "baseline").stat().st_size == 1 << 20
    assert checkpoints.peak_above(touch_new_memory) >= 1 << 25
    goals = {spec.detail: spec.goal and spec.goal.bound for spec in checkpoints.works((8,))}
    assert goals == {"save of 2 GB": 1.25, "save in a thread of 2 GB": None, "load of 2 GB": 1.25}


def test_works_of_cards_in_processes_run_and_are_held_to_a_speed(bench: Any) -> None:
    cards = bench("cards")
    for make in (cards.write, cards.read, cards.launch, cards.queue_write, cards.queue_read, cards.queue_launch):
        pair = make(1 << 10)
        pair.ours()
        pair.dense()
        assert pair.nbytes in (None, 4 << 10)
    goals = [(spec.name, spec.goal and str(spec.goal)) for spec in cards.works((1, 8))]
    assert goals[:3] == [
        ("card write", ">= 1000 MB/s"), ("card read", ">= 1000 MB/s"), ("card launch", "<= 150 us at most")
    ]  # fmt: skip
    assert not cards.works((8,))
