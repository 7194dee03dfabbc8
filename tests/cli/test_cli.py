"""The command line, as users run it: real processes. Figures are checked for sense, never for speed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import interpreters
from meshloom import FabricError, Machine
from meshloom.cli import COMMANDS, main
from meshloom.cli.host_measuring import STEPS
from meshloom.cli.measuring import Point, fit
from meshloom.fabric import catalogue, load_preset, preset
from meshloom.fabric.host import host_path, load_host


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return interpreters.run(["-m", "meshloom", *arguments], {**os.environ, **environment})


def test_help_lists_every_command():
    done = run("--help")
    assert done.returncode == 0, done.stderr
    for name, says in COMMANDS.items():
        assert name in done.stdout and says.split()[0] in done.stdout


def test_help_does_not_wait_for_torch():
    program = "import sys; from meshloom.cli import parser; parser(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_both_names_of_the_script_lead_to_main():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert 'meshloom = "meshloom.cli:main"' in text and 'loom = "meshloom.cli:main"' in text


def test_calibrate_says_what_it_takes():
    done = run("calibrate", "--help")
    assert done.returncode == 0
    for option in ("--out", "--shape", "--quick", "--busy"):
        assert option in done.stdout


@pytest.mark.parametrize("shape", ["4", "2x4"])
def test_calibrate_writes_a_preset_that_can_be_loaded_and_prints_it(tmp_path, shape):
    path = tmp_path / "new" / "machine.toml"
    done = run("calibrate", "--quick", "--shape", shape, "--out", str(path))
    assert done.returncode == 0, done.stderr
    assert path.read_text() == done.stdout
    found = load_preset(path)
    assert found.shape == tuple(map(int, shape.split("x")))
    assert found.fabric().shape == found.shape
    assert {name for name, _ in found.flops} == {"f32", "bf16"}
    assert "One small op on a block" in done.stdout and f"axis {len(found.shape) - 1}: all_gather" in done.stdout
    steps = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(steps) == 4 + len(found.shape) + STEPS and steps[0] == f"[1/{len(steps)}] memory copy"
    assert load_host(host_path(path)).name == "this-machine"
    assert steps[-1] == f"[{len(steps)}/{len(steps)}] what did not repeat"


def test_calibrate_refuses_a_busy_machine_and_writes_nothing_unless_it_is_told_to(tmp_path, monkeypatch, capsys):
    from meshloom.cli import host_measuring, measuring

    monkeypatch.setattr(measuring, "FULL", measuring.QUICK)
    monkeypatch.setattr(host_measuring, "FULL", host_measuring.QUICK)
    path = tmp_path / "machine.toml"
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        assert main(["calibrate", "--out", str(path)]) == 1
        assert not path.exists()
        told = capsys.readouterr().err
        assert re.search(r"meshloom calibrate: other work took [1-9]\d% of the cores", told) and "--busy" in told
        assert main(["calibrate", "--busy", "--out", str(path)]) == 0
    finally:
        for each in spinning:
            each.kill()
            each.wait()
    assert re.search(r"# Other work took [1-9]\d% of the cores meanwhile", path.read_text())


def test_the_time_of_this_process_is_no_other_work():
    from meshloom.cli.measuring import Clock

    before = Clock(wall=10.0, own=3.0, busy=100.0)
    now = Clock(wall=12.0, own=5.0, busy=102.0 + 0.4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "read", classmethod(lambda cls: now))
        patch.setattr(os, "cpu_count", lambda: 2)
        assert before.others() == pytest.approx(0.1)
        assert Clock(wall=10.0, own=3.0, busy=None).others() is None


@pytest.mark.parametrize("shape", ["0", "1x4", "2y4", "", "-2"])
def test_a_shape_without_links_is_refused(shape):
    done = run("calibrate", "--quick", f"--shape={shape}")
    assert done.returncode == 2
    assert "is not a mesh such as 8 or 2x4" in done.stderr


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["calibrate", "--quick", "--out", str(tmp_path / "file" / "machine.toml")]) == 1
    told = capsys.readouterr().err
    assert told.startswith("meshloom calibrate: ") and "memory copy" not in told


def test_this_machine_is_a_preset_once_it_was_measured(tmp_path, monkeypatch):
    path = tmp_path / "this-machine.toml"
    monkeypatch.setattr(catalogue, "THIS_MACHINE", str(path))
    with pytest.raises(FabricError, match="has not been measured"):
        preset("this-machine")
    path.write_text(preset("t3000").to_toml().replace('"t3000"', '"this-machine"'))
    assert preset("this-machine").shape == (2, 4)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_fit_finds_the_figures_that_made_the_times(devices):
    made = Machine("made", latency=3e-6, bandwidth=7e9, flops=1.0, memory_bandwidth=1.0)
    points = []
    for kind in ("all_reduce", "all_gather"):
        for size in (8 << 10, 8 << 20):
            point = Point(kind, devices, size, 1.0)
            points.append(Point(kind, devices, size, point.price(made)))
    assert fit(points) == pytest.approx((3e-6, 7e9), rel=1e-6)


def test_the_fit_of_times_that_shrink_with_size_still_gives_figures_above_zero():
    latency, bandwidth = fit([Point("all_reduce", 8, 8 << 10, 1e-3), Point("all_reduce", 8, 8 << 20, 1e-6)])
    assert latency > 0 and bandwidth > 0
    latency, bandwidth = fit([Point("all_reduce", 8, 8 << 10, 1e-9), Point("all_reduce", 8, 8 << 20, 1.0)])
    assert latency > 0 and bandwidth > 0


PROGRAM = """
import sys, torch, meshloom as loom
torch.set_num_threads(1)
w = loom.Parameter(torch.ones(64, 64), loom.open_mesh((4,)), "S(1)")
x = loom.ones(int(sys.argv[1]), 64, mesh=loom.open_mesh((4,)), placements="R")
def step():
    (x @ w).relu().sum().backward()
"""


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "here.toml"
    done = run("calibrate", "--quick", "--out", str(path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return path.with_suffix(".host.toml")


def test_predict_prices_a_step_and_checks_it_against_the_clock(tmp_path, tables):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    options = ["--host", str(tables), "--check", "--seconds", "0.1", "--args", "32"]
    done = run("predict", str(script), *options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    first, *rest = done.stdout.splitlines()
    assert re.fullmatch(r"\d+\.\d{3} ms on this-machine, \d+ kernels", first)
    assert any(line.split()[0] == "product" for line in rest)
    measured, predicted = rest[-2:]
    took, said = (float(line.split()[1]) for line in (measured, predicted))
    assert took > 0 and said == pytest.approx(float(first.split()[0])) and predicted.endswith("%")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1", "defines no function step"),
        (None, "there is no script"),
        ("def step(batch): ...", "cannot be called as step()"),
        ("async def step(): ...", "cannot be called as step()"),
    ],
    ids=["no step", "no script", "arguments", "coroutine"],
)
def test_predict_refuses_a_script_without_a_step(text, says, tmp_path, tables, capsys):
    script = tmp_path / "script.py"
    if text is not None:
        script.write_text(text)
    assert main(["predict", "--host", str(tables), str(script)]) == 1
    assert says in capsys.readouterr().err


def test_predict_without_tables_says_how_to_make_them(tmp_path, capsys):
    assert main(["predict", "--host", str(tmp_path / "none.toml"), "script.py"]) == 1
    told = capsys.readouterr().err
    assert "no tables of this machine" in told and "meshloom calibrate" in told


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["predict", "--seconds", "nan", "script.py"], "'nan' is not a time above 0"),
        (["calibrate", "--processes", "1"], "'1' is not a number of processes"),
        (["calibrate", "--processes", "0"], "'0' is not a number of processes"),
    ],
)
def test_numbers_that_mean_nothing_are_refused_before_anything_is_measured(given, says, capsys):
    with pytest.raises(SystemExit):
        main(given)
    assert says in capsys.readouterr().err


def test_calibrate_does_not_measure_for_a_folder(tmp_path, capsys):
    assert main(["calibrate", "--quick", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "is a folder" in told and "[1/" not in told
