"""`meshloom plan`, as users run it: a script and a machine become a list of plans and a page."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest
import torch

import meshloom as loom
from meshloom.cli import main
from meshloom.cli.plan import call_of, read_size
from meshloom.nn.search.staging import Stages

SCRIPT = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to("meta")
def batch(): return torch.empty(8, 64, device="meta")
"""


def write_script(folder: Path, text: str = SCRIPT) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


def figures(path: Path) -> dict:
    return json.loads(re.search(r'id="figures">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL)[1])


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """What the command printed, and the folder with what it wrote."""
    folder = tmp_path_factory.mktemp("plan")
    out, toml = folder / "page.html", folder / "plan.toml"
    script = write_script(folder)
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: said.extend(map(str, words)))
        words = ["--machine", "t3000", "--devices", "4", "--out", str(out), "--toml", str(toml)]
        assert main(["plan", script, *words]) == 0
    return "\n".join(said), folder


def test_plans_are_printed_in_order_with_progress(planned):
    said, folder = planned
    assert "plans priced; the best by now" in said and "verified" in said
    assert "plans, the fastest first" in said and "the first plan" in said
    assert f"wrote {folder / 'page.html'}" in said


def test_the_call_of_a_pipeline_has_its_stages():
    found = argparse.Namespace(stages=Stages(("blocks.2",), 4), mesh=loom.Mesh(pp=2))
    assert call_of(found, "a.toml") == (
        "loom.pipeline(model, ['blocks.2'], Mesh(pp=2), micro_batches=4, plan='a.toml', batch_loss=loss)"
    )


def test_the_page_has_the_plans_side_by_side(planned):
    found = figures(planned[1] / "page.html")
    times = [each["time"] for each in found["plans"]]
    assert times == sorted(times) and len(times) == 5
    assert found["totals"]["time"] == times[0] and found["plans"][0]["why"] == ""
    assert sum(each["seconds"] for each in found["plans"][1]["bounds"]) == pytest.approx(times[1])
    assert {"title", "mesh", "plan", "memory", "bytes", "mfu"} <= set(found["plans"][0])


def test_the_plan_that_was_written_can_be_applied(planned):
    said, folder = planned
    mesh = eval(re.search(r"parallelize\(model, (Mesh\(.*?\))", said)[1], {"Mesh": loom.Mesh})
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    assert loom.parallelize(model, mesh, folder / "plan.toml")(torch.ones(8, 64)).shape == (8, 64)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("model = 3", (), "defines no batch"),
        ("batch = 3", (), "defines no model"),
        ("model = batch = 3", (), "module=3"),
        (SCRIPT, ("--mode", "trian"), "train"),
        (SCRIPT, ("--memory", "1K"), "no plan fits"),
    ],
)
def test_what_cannot_be_planned_is_told(text, words, said, tmp_path, capsys):
    out = tmp_path / "page.html"
    assert (
        main(["plan", write_script(tmp_path, text), "--machine", "t3000", "--devices", "2", "--out", str(out), *words])
        == 1
    )
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("text", ["", "G", "-1", "0", "12X", "nan", "inf"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="not a number of bytes"):
        read_size(text)
