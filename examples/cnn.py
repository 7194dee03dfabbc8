"""A small residual network in plain torch modules, data-parallel on a mesh, with batch norm over the whole batch.

    python examples/cnn.py
    python examples/cnn.py --devices 6 --steps 60

It learns which way the stripes of a noisy picture run. Each device has a part of the batch; batch norm computes the
statistics of all of it, so losses and running statistics are those of the dense model. Nothing in the model says so.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from transformer import Trainer, make_parser, train_both

import meshloom as loom
from meshloom import Plan, Shard

SIDE, CLASSES = 12, 4
PLAN = Plan(batch={"dp": Shard(0)})


class Residual(nn.Module):
    """Two convolutions with batch norm, added to the input; the input is projected where its shape changes."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(after) for _ in range(2))
        same = before == after and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        """(batch, before, height, width) to (batch, after, height / stride, width / stride)."""
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.around(x))


class ResNet(nn.Module):
    """Pictures in, scores of each direction out."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.stages = nn.Sequential(Residual(width, width), Residual(width, 2 * width, 2))
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, pictures):
        """(batch, 1, height, width) to (batch, classes)."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(pictures))), 2)
        return self.head(F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1))

    def loss(self, pictures, directions):
        """The cross-entropy of the direction of each picture's stripes."""
        return F.cross_entropy(self(pictures), directions)


def batches(count: int, rows: int, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pictures of stripes with random widths and places, in noise; and which way the stripes run."""
    draw = torch.Generator().manual_seed(seed)
    down, across = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    for _ in range(count):
        directions = torch.randint(CLASSES, (rows,), generator=draw)
        angle = (directions * (math.pi / CLASSES)).view(-1, 1, 1)
        pace, start = (torch.rand(rows, 1, 1, generator=draw) for _ in range(2))
        along = angle.cos() * down + angle.sin() * across
        stripes = torch.sin(along * (1 + pace) + 2 * math.pi * start)
        yield (stripes + torch.randn(stripes.shape, generator=draw)).unsqueeze(1), directions


def accuracy(model: nn.Module, pictures: torch.Tensor, directions: torch.Tensor) -> float:
    """How many of the pictures are told rightly, by the running statistics."""
    with torch.no_grad():
        return (model.eval()(pictures).argmax(-1) == directions).float().mean().item()


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """The running statistics by name."""
    return {name: each for name, each in model.named_buffers() if "running" in name}


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """How far apart the running statistics of two models are."""
    pairs = zip(statistics(one).values(), statistics(other).values(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


def main() -> None:
    """Train dense and on the mesh, side by side."""
    numbers = {"devices": (8, "devices that share the batch"), "steps": (60, "how many steps")}
    given = make_parser(__doc__, **numbers, rows=(64, "pictures per batch")).parse_args()
    torch.manual_seed(0)
    model, mesh = ResNet(), loom.open_mesh((given.devices,), axes=("dp",))
    dense, ours = Trainer(copy.deepcopy(model)), Trainer(model, mesh, PLAN)
    train_both(dense, ours, batches(given.steps, given.rows), given.steps, mesh)
    (unseen,) = batches(1, 256, seed=9)
    found = ours.dense()
    if loom.process().rank == 0:
        print(f"running statistics: largest difference {largest_difference(found, dense.model):.1e}")
        print(f"unseen pictures told rightly: {accuracy(found, *unseen):.0%}")


if __name__ == "__main__":
    main()
