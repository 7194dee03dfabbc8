"""A training step of fully sharded weights beside FSDP2, on the same processes: time in turn, memory by itself.

    python -m benchmarks.sharding --ranks 4

The models are like Llama: one of 41 MB with 512 tokens per process, so many that moving weights is cheaper than moving
activations, and a wide one of 72 MB with 8 tokens, so few that ours moves activations. A step is one of SGD. Times are
the best of many rounds, both sides in turn in the same processes. Memory is that of processes of its own for each side,
with the same allocator settings: the resident set above that before the step, after forward and at its highest.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.beside import tell
from benchmarks.memory import Watched, tell_heaviest, weigh_sides
from benchmarks.processes import best_of, launch


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model, and of a batch: rows and length, of every process."""

    width: int
    hidden: int
    layers: int
    vocabulary: int
    rows: int
    length: int
    rounds: int  # that are timed


HEAD = 64
TOKENS = {
    "many tokens": Sizes(width=256, hidden=704, layers=12, vocabulary=1024, rows=4, length=128, rounds=24),
    "few tokens": Sizes(width=512, hidden=1408, layers=5, vocabulary=2048, rows=1, length=8, rounds=60),
}
OURS, THEIRS = "ours", "FSDP2"
STEP, KEPT, PEAK = "sharded step", "sharded forward keeps", "sharded peak"
WORKS = tuple((work, f"{THEIRS}, {tokens}") for tokens in TOKENS for work in (STEP, KEPT, PEAK))

Batch = tuple[torch.Tensor, torch.Tensor]


class Layer(nn.Module):
    """Attention and a gated product, each after a norm."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, hidden = sizes.width, sizes.hidden
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The residual stream after this layer."""
        h = self.before(x)
        q, k, v = (each(h).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """Letters to scores of the letter that follows."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """A row of scores for every letter."""
        x = self.embedding(letters)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Step:
    """Forward, backward and an update of one side."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def forward(self) -> torch.Tensor:
        """The loss."""
        letters, following = self.batch
        return F.cross_entropy(self.model(letters).flatten(0, 1), following.flatten())

    def __call__(self) -> float:
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def ours(model: Model, batch: Batch, count: int) -> Step:
    """Every parameter and the batch sharded over the processes."""
    import meshloom as loom

    mesh = loom.open_mesh((count,), axes=("fsdp",))
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, loom.Parameter(parameter.detach(), mesh, "S(0)"))
    letters, following = (loom.distribute(each, mesh, "S(0)") for each in batch)
    return Step(model, (letters, following))


def theirs(model: Model, batch: Batch, count: int) -> Step:
    """`fully_shard` on every layer and on what is left."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (count,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = len(batch[0]) // count
    mine = slice(dist.get_rank() * rows, (dist.get_rank() + 1) * rows)
    return Step(model, (batch[0][mine], batch[1][mine]))


SIDES: dict[str, Callable[[Model, Batch, int], Step]] = {OURS: ours, THEIRS: theirs}


def make(side: str, tokens: str, count: int) -> Step:
    """A step of one side; both start from the same weights and see the same batch."""
    torch.manual_seed(0)
    sizes = TOKENS[tokens]
    letters = torch.randint(sizes.vocabulary, (sizes.rows * count, sizes.length + 1))
    return SIDES[side](Model(sizes), (letters[:, :-1].clone(), letters[:, 1:].clone()), count)


def weigh(side: str, tokens: str, count: int) -> tuple[float, float]:
    """MB above those before a step: what forward keeps, and the highest."""
    step = make(side, tokens, count)
    for _ in range(4):
        step()
    step.optimizer.zero_grad()
    with Watched() as memory:
        loss = step.forward()
        kept = memory.now()
        loss.backward()
        step.optimizer.step()
    return kept, memory.highest


def compare(count: int, scale: float) -> None:
    """Time both sides in turn."""
    for tokens, sizes in TOKENS.items():
        sides = tuple(make(side, tokens, count) for side in (OURS, THEIRS))
        losses = torch.tensor([side() for side in sides])
        dist.all_reduce(losses)  # FSDP2's is that of the rows of one process, ours that of all
        if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
            raise AssertionError(f"the losses differ: {losses.tolist()}")
        taken = max(3, int(sizes.rounds * scale))
        best = best_of(sides, 1, taken)
        if dist.get_rank() == 0:
            tell((STEP, f"{THEIRS}, {tokens}"), timing=(*best, taken))


def weigh_both(count: int) -> int:
    """Every side in processes of its own."""
    worst = 0
    for tokens in TOKENS:
        command = ["-m", "benchmarks.sharding", "--ranks", str(count), "--tokens", tokens, "--weigh"]
        failed, found = weigh_sides(command, tuple(SIDES), count)
        worst = max(worst, failed)
        for work, megabytes in zip((KEPT, PEAK), found, strict=False):
            tell((work, f"{THEIRS}, {tokens}"), megabytes=megabytes)
    return worst


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--weigh", choices=tuple(SIDES), help="one side's memory, in the processes that are there")
    parser.add_argument("--only", choices=("time", "memory"), help="one of the two")
    parser.add_argument("--tokens", choices=tuple(TOKENS), default="many tokens")
    given = parser.parse_args()
    if "RANK" not in os.environ:
        command = ["-m", "benchmarks.sharding", "--ranks", str(given.ranks), "--scale", str(given.scale)]
        failed = 0 if given.only == "memory" else launch(command, given.ranks)
        return failed or (0 if given.only == "time" else weigh_both(given.ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if given.weigh is not None:
        tell_heaviest(weigh(given.weigh, given.tokens, given.ranks))
    else:
        compare(given.ranks, given.scale)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
