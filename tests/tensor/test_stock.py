"""The stock of torch is torch's own: importing all of meshloom and training with it changes nothing in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLANTED = """
gone: torch.nn.modules.module.Module.half
new: torch.Tensor.__setattr__
new: torch.Tensor.grad
new: torch.nn.modules.module.Module.placements
other: torch.autograd.function.Function.apply
other: torch.matmul
other: torch.nn.functional.dropout
other: torch.nn.functional.layer_norm
other: torch.nn.functional.relu
"""


def run(*arguments: str) -> list[str]:
    """The lines that a fresh process prints."""
    command = [sys.executable, str(ROOT / "tests" / "stock.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.slow
def test_torch_is_unchanged_by_the_import_of_all_of_meshloom_and_by_training_steps():
    noted, imported, *rest = run()
    assert int(noted) > 5000 and int(imported) > 200
    modules = set(rest[: int(imported)])
    assert {"meshloom.ttnn", "meshloom.ttnn.models", "meshloom.distributed", "meshloom.tensor.joining"} <= modules
    assert rest[int(imported) :] == []


@pytest.mark.slow
def test_planted_patches_are_found_and_nothing_else():
    assert run("planted") == PLANTED.split("\n")[1:-1]
