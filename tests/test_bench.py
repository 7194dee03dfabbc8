"""The benchmark harness works: it measures, judges, reports and writes. No figure is asserted here."""

from __future__ import annotations

import importlib
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from rich.console import Console

import meshloom as loom

ROOT = Path(__file__).resolve().parents[1]


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
        assert row["goal"] == "<= +4 us" and isinstance(row["ok"], bool)


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
    for (name, _), found in meshes.items():
        assert found == ([(2, 4), (4, 8), (8, 16)] if name == "matmul 2-D" else [(1,), (8,), (32,), (128,)])
    assert {name for name, _ in meshes} >= {
        "add", "matmul row", "matmul column", "matmul batch", "matmul inner", "MLP step", "memory",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["matmul row", "matmul inner", "matmul 2-D", "call"])
def test_a_work_gives_the_dense_answer_on_both_sides(bench: Any, name: str) -> None:
    works = [spec for spec in bench("works").all_works((8,)) if spec.name == name]
    assert works
    for spec in works:
        pair = spec.make()
        assert torch.allclose(pair.ours().to_torch(), pair.dense(), rtol=1e-4, atol=1e-3)


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


def test_a_peer_that_is_missing_gives_rows_that_say_why(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = bench("peers")
    monkeypatch.setattr(peers, "_lines", lambda command: iter(["ModuleNotFoundError: No module named 'localtensor'"]))
    rows = list(peers.local_tensor(8, 1.0, ()))
    assert [(row.work, row.detail) for row in rows] == list(peers.WORKS)
    assert {row.missing for row in rows} == {"missing: ModuleNotFoundError: No module named 'localtensor'"}


def test_a_peer_process_that_fails_hands_over_its_last_line_without_paths(bench: Any) -> None:
    lines = bench("peers")._lines(
        [sys.executable, "-c", "raise ImportError('cannot import x from /some/where/lib.py')"]
    )
    assert list(lines) == ["ImportError: cannot import x from lib.py"]


def test_peers_and_their_process_name_the_same_works(bench: Any) -> None:
    pytest.importorskip("torch.distributed._local_tensor", reason="this torch has no LocalTensor mode")
    assert list(bench("localtensor").WORKS) == list(bench("peers").WORKS)


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
