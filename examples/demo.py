"""Train a small network data- and tensor-parallel on a 2x4 mesh of virtual devices, and the same one dense beside it.

What `make demo` runs. Afterwards it shows the mesh, where the parameters lie, what one step communicated and why, and
the time per step against dense.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import meshloom as loom
from meshloom import Shard

FEATURES, HIDDEN, CLASSES, BATCH = 512, 1024, 32, 512
WIDTH = 100


class MLP(nn.Module):
    """Two linear layers; it knows nothing of meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        """The scores of each class."""
        return self.down(F.gelu(self.up(x)))


# nn.Linear keeps its weight as (out, in): S(0) splits what comes out (columns), S(1) what goes in (rows).
PLACEMENTS = {
    "up.weight": {"tp": Shard(0)},
    "up.bias": {"tp": Shard(0)},
    "down.weight": {"tp": Shard(1)},
    "down.bias": {},
}


def put_on_mesh(model: nn.Module, mesh: loom.Mesh) -> nn.Module:
    """The same model with every parameter on the mesh."""
    placed = copy.deepcopy(model)
    for name, placements in PLACEMENTS.items():
        layer, _, which = name.rpartition(".")
        module = placed.get_submodule(layer)
        setattr(module, which, loom.Parameter(getattr(module, which).detach(), mesh, placements))
    return placed


def make_task(batches: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Points labelled by a network that the student has to imitate."""
    teacher = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, CLASSES))
    points = [torch.randn(BATCH, FEATURES) for _ in range(batches)]
    with torch.no_grad():
        return [(x, teacher(3 * x).argmax(-1)) for x in points]


@dataclass
class Run:
    """A model with its optimizer, its data and what came of it."""

    model: nn.Module
    data: list
    losses: list[float]
    seconds: list[float]

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)

    def step(self, number: int) -> None:
        """One step of training, timed."""
        x, labels = self.data[number % len(self.data)]
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), labels)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - begin)


def train(console: Console, ours: Run, dense: Run, steps: int) -> None:
    """Both runs step by step, in turn, under one progress bar; a line now and then where there is no terminal."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)
        for number in range(steps):
            ours.step(number)
            dense.step(number)
            bar.update(task, advance=1, description=f"loss {ours.losses[-1]:.4f}")
            if not console.is_terminal and number % max(1, steps // 5) == 0:
                console.print(f"step {number:>4}  loss {ours.losses[-1]:.4f}")
    console.print(f"loss {ours.losses[0]:.4f} -> {ours.losses[-1]:.4f} in {steps} steps")


def largest_differences(ours: Run, dense: Run) -> tuple[float, float]:
    """How far the run on the mesh is from the dense one: in any loss, and in any element of any parameter."""
    losses = max(abs(a - b) for a, b in zip(ours.losses, dense.losses, strict=True))
    pairs = zip(ours.model.parameters(), dense.model.parameters(), strict=True)
    parameters = max((p.to_torch() - q).abs().max().item() for p, q in pairs)
    return losses, parameters


def difference(largest: float) -> str:
    """A difference in words."""
    return f"largest difference {largest:.1e}" + (" (bit-equal)" if largest == 0 else "")


def best(seconds: list[float]) -> float:
    """Milliseconds of the fastest step: the one that nothing else on the machine disturbed."""
    return min(seconds) * 1e3


def show_comparison(console: Console, ours: Run, dense: Run) -> None:
    """The two runs side by side."""
    losses, parameters = largest_differences(ours, dense)
    table = Table("", "2x4 mesh", "dense", "compared", title="the same training, twice")
    table.add_row("last loss", f"{ours.losses[-1]:.6f}", f"{dense.losses[-1]:.6f}", difference(losses))
    table.add_row("parameters", "", "", difference(parameters))
    fast, slow = best(dense.seconds), best(ours.seconds)
    table.add_row("ms per step", f"{slow:.2f}", f"{fast:.2f}", f"{slow / fast:.2f}x dense")
    console.print(table)


def show_placements(console: Console, ours: Run) -> None:
    """The mesh, and where a batch and the two weights lie on it."""
    say = raw(console)
    console.rule("the mesh")
    say(loom.draw_mesh(ours.data[0][0].mesh))
    console.rule("a batch, and the weights: rows down, columns across")
    for name, tensor in (("x", ours.data[0][0]), ("up", ours.model.up.weight), ("down", ours.model.down.weight)):
        say(f"{name}: {loom.draw(tensor)}")


def show_communication(console: Console, ours: Run) -> None:
    """What one more step communicates, and why the second layer does."""
    say = raw(console)
    with loom.record() as log:
        ours.step(0)
    console.rule("one step")
    say(loom.communication_table(log))
    console.rule("why: the second layer, explained without running it")
    hidden = loom.zeros(BATCH, HIDDEN, mesh=ours.data[0][0].mesh, placements="S(0), S(1)")
    say(str(loom.explain(lambda: ours.model.down(hidden))))


def raw(console: Console) -> Callable[[str], None]:
    """Printing of text that has brackets of its own and is as wide as it is."""
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)


def main() -> None:
    """Train, compare, show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80, help="steps of training (default 80)")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps {steps}: train at least one step")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    torch.manual_seed(0)
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    model, task = MLP(), make_task()
    on_mesh = [tuple(loom.distribute(each, mesh, {"dp": Shard(0)}) for each in pair) for pair in task]
    ours, dense = Run(put_on_mesh(model, mesh), on_mesh, [], []), Run(model, task, [], [])
    train(console, ours, dense, steps)
    show_comparison(console, ours, dense)
    show_placements(console, ours)
    show_communication(console, ours)


if __name__ == "__main__":
    main()
