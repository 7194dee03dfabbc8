"""The highest memory of a data-parallel step beside DDP and DTensor, every side in processes of its own.

    python -m benchmarks.heavy --ranks 4

A figure is that of the heaviest process in a step that is not the first, in MB above what it held before the side was
made: parameters, gradients, the optimizer's state, activations, and what a side keeps between steps (DDP its buckets,
which are as large as the gradients).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.beside import tell
from benchmarks.memory import Watched, tell_heaviest, weigh_sides
from benchmarks.processes import (
    DEEP,
    LLAMA,
    STEP,
    WORKS as TIMED,
    Make,
    deep_mlp,
    llama,
    ours,
    small_mlp,
    with_ddp,
    with_dtensor,
)
from benchmarks.works import language_step, training_step

OURS = "ours"
SIDES: dict[str, Callable[..., Any]] = {OURS: ours, "DDP": with_ddp, "DTensor": with_dtensor}
MODELS: dict[str, tuple[Callable[[int], Any], Make, str]] = {
    STEP: (lambda count: small_mlp(), training_step, "DTensor"),
    DEEP: (deep_mlp, training_step, "DDP"),
    LLAMA: (lambda count: llama(), language_step, "DDP"),
}
WORKS = tuple(
    (f"{work} peak", next(detail for name, detail in TIMED if name == work and detail.startswith(theirs)))
    for work, (_, _, theirs) in MODELS.items()
)


def weigh(work: str, side: str, count: int) -> float:
    """MB above those before the side was made, at the highest of a step."""
    import meshloom as loom

    torch.manual_seed(0)
    model, step, _ = MODELS[work]
    mesh = loom.open_mesh((count,), axes=("dp",))
    with Watched() as memory:
        placed = SIDES[side](*model(count), mesh)
        run = step(*placed)
        for _ in range(4):
            run()
        for parameter in placed[0].parameters():
            parameter.grad = None
        memory.forget()
        run()
    return memory.highest


def weigh_all(count: int) -> int:
    """Every work, ours and the other side."""
    worst = 0
    for told, (work, (_, _, theirs)) in zip(WORKS, MODELS.items(), strict=True):
        command = ["-m", "benchmarks.heavy", "--ranks", str(count), "--work", work, "--weigh"]
        failed, found = weigh_sides(command, (OURS, theirs), count)
        worst = max(worst, failed)
        for megabytes in found:
            tell(told, megabytes=megabytes)
    return worst


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="not used: memory is measured once")
    parser.add_argument("--work", choices=tuple(MODELS), default=DEEP)
    parser.add_argument("--weigh", choices=tuple(SIDES), help="one side's memory, in the processes that are there")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        return weigh_all(given.ranks)
    tell_heaviest([weigh(given.work, given.weigh, given.ranks)])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
