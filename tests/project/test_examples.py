"""The examples run as a user would run them, and none of those for beginners calls a collective."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import interpreters

ROOT = Path(__file__).resolve().parents[2]
EASE_OF_USE = ("first.py", "strategies.py", "scale.py", "train_llama.py", "transformer.py", "cnn.py", "train.py")
COLLECTIVES = frozenset(
    "all_reduce all_gather reduce_scatter all_to_all broadcast reduce gather scatter send recv send_recv shift "
    "all_gather_into_tensor reduce_scatter_tensor all_to_all_single barrier isend irecv".split()
)
ENVIRONMENT = {**os.environ, "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}


def run_example(name: str, *arguments: str) -> str:
    done = interpreters.run([str(ROOT / "examples" / name), *arguments], ENVIRONMENT, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_example_gives_the_dense_product():
    printed = run_example("first.py")
    assert "communicated: 0 bytes" in printed
    assert "equal to the dense product" in printed


def test_the_three_strategies_give_the_dense_values_with_the_communication_that_they_name():
    printed = run_example("strategies.py")
    one, two, _mean, three, scattered = printed.strip().split("\n\n")
    assert "0 bytes per worker" in one
    assert "all_reduce(sum)" in two and "all_reduce(sum)" in three
    assert "reduce_scatter(sum)" in scattered


def test_one_program_gives_one_answer_on_2_and_20_and_200_devices():
    printed = run_example("scale.py")
    assert [line.split()[0] for line in printed.splitlines()[:3]] == ["2", "20", "200"]
    assert "the same answer on every mesh" in printed


LLAMA = ("train_llama.py", "--batch", "6", "--length", "16", "--sample", "0")


def _curve(file: Path) -> dict[int, float]:
    return {each["step"]: each["loss"] for each in map(json.loads, file.read_text().splitlines())}


@pytest.mark.slow
def test_the_demo_predicts_trains_samples_and_shows_what_it_communicates(tmp_path):
    report = tmp_path / "report.html"
    printed = run_example(*LLAMA, "--steps", "6", "--sample", "20", "--plan", "tensor", "--report", str(report))
    first, last = map(float, re.search(r"loss (\S+) -> (\S+) at step 6", printed).groups())
    assert last < first
    for shown in (
        "plan tensor on Mesh(dp=2, tp=4)",
        "predicted",
        "tokens/s",
        "exposed communication",
        "all_reduce(sum)",
    ):
        assert shown in printed
    assert "The mesh " in printed[printed.index("what it writes") :]
    assert "<html" in report.read_text()


def test_the_demo_tells_its_options_and_refuses_bad_ones():
    printed = run_example("train_llama.py", "--help")
    assert "--checkpoints" in printed and "fsdp+tensor" in printed
    for wrong, said in (
        (["--steps", "0"], "'0' is no number of at least 1"),
        (["--mesh", "2xy"], "'2xy' is no shape such as 8 or 2x4"),
        (["--mesh", "8", "--plan", "tensor"], "plan tensor has the axes dp, tp, so give as many sizes"),
        (["--resume"], "--resume goes on from --checkpoints FOLDER"),
    ):
        with pytest.raises(AssertionError, match=re.escape(said)):
            run_example("train_llama.py", *wrong)


@pytest.mark.slow
def test_a_killed_run_goes_on_on_another_mesh_and_other_processes_with_the_same_losses(tmp_path):
    whole, resumed, runs = (tmp_path / name for name in ("whole", "resumed", "runs"))
    steps = ("--steps", "24")
    run_example(*LLAMA, *steps, "--losses", str(whole), "--plan", "tensor")
    command = [sys.executable, str(ROOT / "examples" / LLAMA[0]), *LLAMA[1:], *steps, "--every", "3"]
    command += ["--checkpoints", str(runs)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    try:
        while not (runs / "step-000003").is_dir():
            assert process.poll() is None
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    launcher = [sys.executable, "-m", "meshloom", "run", "-n", "2", str(ROOT / "examples" / LLAMA[0]), *LLAMA[1:]]
    again = (*steps, "--checkpoints", str(runs), "--resume", "--losses", str(resumed), "--every", "100")
    done = subprocess.run(
        [*launcher, *again, "--plan", "fsdp"], capture_output=True, text=True, env=ENVIRONMENT, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found, expected = _curve(resumed), _curve(whole)
    assert 4 <= min(found) < max(found) == 24
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=1e-5), step


@pytest.mark.slow
def test_an_interrupted_demo_stops_without_a_traceback():
    command = [sys.executable, str(ROOT / "examples" / LLAMA[0]), *LLAMA[1:], "--steps", "5000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        for line in process.stdout:
            if line.startswith("step     1"):
                break
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, errors) == (130, "")
    assert said.endswith("stopped\n")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="no nbclient here")
@pytest.mark.parametrize("name, words", [("train_llama", "the same losses"), ("cluster", "the same random numbers")])
def test_the_notebook_runs_from_top_to_bottom(name, words):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(ROOT / "examples")}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.get("text", "") for output in outputs)
    assert words in printed
    assert not [each for each in outputs if each.output_type == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data", "sequence"])
def test_the_transformer_trains_on_a_plan_and_writes(plan):
    printed = run_example(
        "transformer.py", "--plan", plan, "--steps", "2", "--rows", "8", "--length", "16", "--sample", "5"
    )
    steps = re.findall(rf"step +(\d) +dense (\S+) +{plan} (\S+)", printed)
    assert [step for step, _, _ in steps] == ["0", "1"] and all(ours == dense for _, dense, ours in steps)
    assert len(printed[printed.index("\nThe ") + 1 :].rstrip("\n")) == len("The ") + 5


@pytest.mark.slow
def test_the_residual_network_trains_on_parts_that_are_not_equal():
    printed = run_example("cnn.py", "--devices", "3", "--steps", "2", "--rows", "16")
    assert re.search(r"step +1 +dense \S+ +Mesh\(dp=3\) ", printed)
    assert float(re.search(r"running statistics: largest difference (\S+)", printed)[1]) < 1e-5
    assert "unseen pictures told rightly" in printed


def test_the_fabric_example_compares_three_machines_and_writes_a_timeline(tmp_path):
    out = tmp_path / "timeline.json"
    printed = run_example("fabric.py", "--side", "4", "--out", str(out))
    rows = [line for line in printed.splitlines() if re.search(r"(ring|tree|2-D) \(", line)]
    assert len(rows) == 9
    for shown in ("T3000, 2x4", "Galaxy, 8x4", "torus, 4x4", str(out)):
        assert shown in printed
    spans = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"device", "link"} and len(spans) > 1000
    assert "--out" in run_example("fabric.py", "--help")


def called_collectives(source: str) -> set[str]:
    """The collectives that a program calls by name; strings and comparisons do not count."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in calls}
    imports = (node for node in ast.walk(ast.parse(source)) if isinstance(node, (ast.Import, ast.ImportFrom)))
    modules = {alias.name for node in imports for alias in node.names} | set(re.findall(r"torch\.distributed", source))
    return (names | modules) & (COLLECTIVES | {"torch.distributed", "distributed"})


@pytest.mark.parametrize("name", EASE_OF_USE)
def test_no_example_of_the_ease_of_use_set_calls_a_collective(name):
    assert not called_collectives((ROOT / "examples" / name).read_text())


def test_a_collective_called_by_hand_would_be_found():
    assert called_collectives("import torch.distributed as dist\ndist.all_reduce(x)") == {
        "torch.distributed",
        "all_reduce",
    }
    assert called_collectives("kinds = ['all_reduce']") == set()


def unmentioned(examples: list[str], tests: list[str]) -> list[str]:
    """The examples whose names stand in no test."""
    return [name for name in examples if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in tests)]


def test_every_example_is_named_by_a_test():
    tests = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    examples = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert len(examples) > 8 and unmentioned(examples, tests) == []
    assert unmentioned(["nobody" + ".py"], tests) == ["nobody" + ".py"]
