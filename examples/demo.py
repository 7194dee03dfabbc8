"""Train a small GPT tensor-parallel on a 2x4 mesh of virtual devices, and the same model dense beside it.

What `make demo` runs. Afterwards it shows the mesh, where the weights lie, what one step communicated and why, how the
loss and the time compare with dense, and what the model writes.

    python examples/demo.py
    python examples/demo.py --plan sequence --steps 300
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformer import GPT, MESH, PLANS, Text, Trainer

import meshloom as loom
from meshloom.planner import Plan
from meshloom.runtime import Event, Log

ROWS, LENGTH = 16, 64
WIDTH = 100  # of the output where there is no terminal


@dataclass
class Run:
    """A model in training, and what came of it."""

    trainer: Trainer
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """One step, timed."""
        begin = time.perf_counter()
        self.losses.append(self.trainer.step(*batch))
        self.seconds.append(time.perf_counter() - begin)


def train(console: Console, ours: Run, dense: Run, text: Text, steps: int) -> None:
    """Both runs step by step, in turn, under one progress bar; a line now and then where there is no terminal."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)
        for number, batch in enumerate(text.batches(steps, ROWS, LENGTH)):
            ours.step(batch)
            dense.step(batch)
            bar.update(task, advance=1, description=f"loss {ours.losses[-1]:.4f}")
            if not console.is_terminal and number % max(1, steps // 5) == 0:
                console.print(f"step {number:>4}  loss {ours.losses[-1]:.4f}")
    console.print(f"loss {ours.losses[0]:.4f} -> {ours.losses[-1]:.4f} in {steps} steps")


def show_comparison(console: Console, ours: Run, dense: Run) -> None:
    """The two runs side by side."""
    losses = max(abs(a - b) for a, b in zip(ours.losses, dense.losses, strict=True))
    pairs = zip(ours.trainer.dense().parameters(), dense.trainer.model.parameters(), strict=True)
    parameters = max((p - q).abs().max().item() for p, q in pairs)
    table = Table("", "2x4 mesh", "dense", "compared", title="the same training, twice")
    table.add_row("last loss", f"{ours.losses[-1]:.6f}", f"{dense.losses[-1]:.6f}", difference(losses))
    table.add_row("parameters", "", "", difference(parameters))
    mine, theirs = best(ours.seconds), best(dense.seconds)
    table.add_row("ms per step", f"{mine:.2f}", f"{theirs:.2f}", f"{mine / theirs:.2f}x dense")
    console.print(table)


def difference(largest: float) -> str:
    """A difference in words."""
    return f"largest difference {largest:.1e}" + (" (bit-equal)" if largest == 0 else "")


def best(seconds: list[float]) -> float:
    """Milliseconds of the fastest step: the one that nothing else on the machine disturbed."""
    return min(seconds) * 1e3


def show_placements(console: Console, trainer: Trainer) -> None:
    """The mesh, and where two weights lie on it."""
    say = raw(console)
    console.rule("the mesh")
    say(loom.draw_mesh(trainer.mesh))
    console.rule("two weights: rows down, columns across")
    for name in ("attention.qkv", "attention.out"):
        say(f"{name}: {loom.draw(trainer.model.blocks[0].get_submodule(name).weight)}")


def show_communication(console: Console, trainer: Trainer, text: Text) -> None:
    """What one more step communicates, and why."""
    say = raw(console)
    (batch,) = text.batches(1, ROWS, LENGTH)
    with loom.record() as log:
        trainer.step(*batch)
    console.rule("one step")
    say(loom.communication_table(log))
    calls = moving(log)
    table = Table("line", "op", "what each axis does", "so it needs", title="why, going forward")
    for (where, op), plan in calls.items():
        axes = zip(plan.mesh.axes, plan.rows, strict=True)
        rows = "\n".join(f"{axis}: {row.label}, {row}" for axis, row in axes)
        table.add_row(where, op, rows, "\n".join(sorted({str(each) for each in plan.forward})))
    console.print(table)
    (where, _), plan = next(iter(calls.items()))
    console.rule("the first of them, with what was considered")
    say(str(loom.Explanation(Log([Event(each, plan.call.op, where) for each in plan.forward], [(plan, where)]))))


def moving(log: Log) -> dict[tuple[str, str], Plan]:
    """The different calls that moved something, by line and op."""
    found: dict[tuple[str, str], Plan] = {}
    for plan, where in log.calls:
        if isinstance(plan, Plan) and plan.forward:
            found.setdefault((where, plan.call.op), plan)
    return found


def show_text(console: Console, trainer: Trainer, text: Text, count: int) -> None:
    """What the trained model writes."""
    console.rule("what it writes")
    raw(console)(text.sample(trainer.dense(), "The ", count, LENGTH))


def raw(console: Console) -> Callable[[str], None]:
    """Printing of text that has brackets of its own and is as wide as it is."""
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


def read_arguments() -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", choices=PLANS, default="tensor", help="how the model is divided (default tensor)")
    parser.add_argument("--steps", type=int, default=220, help="steps of training (default 220)")
    parser.add_argument("--sample", type=int, default=160, help="letters to write at the end (default 160)")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps {given.steps}: train at least one step")
    return given


def run(given: argparse.Namespace, console: Console) -> None:
    """Train, compare, show."""
    torch.manual_seed(0)
    text = Text()
    model, mesh = GPT(len(text.letters)), loom.open_mesh(MESH, axes=("dp", "tp"))
    ours, dense = Run(Trainer(copy.deepcopy(model), mesh, PLANS[given.plan])), Run(Trainer(model))
    train(console, ours, dense, text, given.steps)
    show_placements(console, ours.trainer)
    show_comparison(console, ours, dense)
    show_communication(console, ours.trainer, text)
    show_text(console, ours.trainer, text, given.sample)


def main() -> None:
    """Read the arguments and run; Ctrl-C ends it with one line."""
    given = read_arguments()
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    try:
        run(given, console)
    except KeyboardInterrupt:
        console.print("stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()
