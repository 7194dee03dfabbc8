"""Train a small network data- and tensor-parallel; the same script in one process, in several, and on several hosts.

    python examples/train.py
    torchrun --nproc-per-node 4 examples/train.py
    meshloom run --nproc 4 examples/train.py

Every way prints the same losses: bit for bit where sums are added in the same order, else within float32 rounding.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import meshloom as loom
from meshloom import Shard

FEATURES, HIDDEN, CLASSES, BATCH = 32, 64, 10, 64


class Network(nn.Module):
    """Two linear layers with dropout between them; it knows nothing of meshes or processes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(FEATURES, HIDDEN)
        self.down = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x):
        """The scores of each class."""
        return self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training))


# nn.Linear keeps its weight as (out, in): S(0) splits what comes out, S(1) what goes in.
PLAN = loom.Plan(
    {
        "up.*": {"tp": Shard(0)},
        "down.weight": {"tp": Shard(1)},
    },
    batch={"dp": Shard(0)},
)


def batches(mesh: loom.Mesh, count: int):
    """Points whose class is the largest of ten projections, sharded over the data-parallel axis."""
    projection = torch.randn(FEATURES, CLASSES)
    for _ in range(count):
        x = torch.randn(BATCH, FEATURES)
        yield (
            loom.distribute(x, mesh, {"dp": Shard(0)}),
            loom.distribute((x @ projection).argmax(-1), mesh, {"dp": Shard(0)}),
        )


def train(steps: int, rows: int, columns: int) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(0)
    mesh = loom.open_mesh((rows, columns), axes=("dp", "tp"))
    model = loom.parallelize(Network(), mesh, PLAN)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, start = [], time.perf_counter()
    for step, (x, target) in enumerate(batches(mesh, steps)):
        loss = F.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if loom.process().rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:4}  loss {losses[-1]:.6f}  {time.perf_counter() - start:6.2f} s", flush=True)
    return losses


def main() -> None:
    """Read the arguments, train, and keep the losses if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="how many steps (default 50)")
    parser.add_argument("--mesh", default="2x4", help="rows x columns: data-parallel x tensor-parallel (default 2x4)")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this file")
    given = parser.parse_args()
    rows, columns = map(int, given.mesh.split("x"))
    losses = train(given.steps, rows, columns)
    here = loom.process()
    if here.rank == 0:
        print(f"{here.count} process{'es' * (here.count > 1)}, mesh {given.mesh}: {losses[0]:.6f} to {losses[-1]:.6f}")
        if given.losses:
            given.losses.write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
