"""A small GPT in plain torch modules, trained on a mesh with `loom.parallelize`: one model, several plans.

    python examples/transformer.py                   # tensor-parallel on (2, 4), beside the dense model
    python examples/transformer.py --plan sequence   # the same model, another table of placements
    python examples/transformer.py --steps 400 --sample 200

The model knows nothing of meshes. A plan is a table from patterns of parameter names to placements, and a placement of
the batch. Everything else (which collectives, where, how many) follows.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import meshloom as loom
from meshloom import Plan, Shard

TEXT = Path(__file__).with_name("text.txt")
MESH = (2, 4)
Batch = tuple[torch.Tensor, torch.Tensor]


class Attention(nn.Module):
    """Causal self-attention with rotary positions. Query, key and value of a head lie side by side in one weight, so
    that heads can be dealt out to devices."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        mixed = self.qkv(x).view(batch, length, self.heads, 3, width // self.heads)
        query, key, value = (each.transpose(1, 2) for each in mixed.unbind(3))
        mixed = F.scaled_dot_product_attention(turned(query, cos, sin), turned(key, cos, sin), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def turned(x, cos, sin):
    """Pairs of features turned by an angle that grows with the position."""
    half = x.shape[-1] // 2
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class FeedForward(nn.Module):
    """SwiGLU; gate and value of a unit lie side by side in one weight."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        """(..., width) to the same."""
        gate, value = self.up(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention, self.feed = Attention(width, heads), FeedForward(width, hidden)

    def forward(self, x, cos, sin):
        """(batch, length, width) to the same."""
        x = x + self.attention(self.first(x), cos, sin)
        return x + self.feed(self.second(x))


class GPT(nn.Module):
    """Characters in, scores of the next character out; the head is the embedding."""

    def __init__(self, letters: int, width: int = 64, heads: int = 4, hidden: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.embedding = nn.Embedding(letters, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, letters):
        """(batch, length) to (batch, length, letters)."""
        cos, sin = angles(letters.shape[1], self.width // self.heads)
        x = self.embedding(letters)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, letters, following):
        """The cross-entropy of what follows each letter."""
        return F.cross_entropy(self(letters).transpose(1, 2), following)


def angles(length: int, features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary tables, (length, features / 2) each."""
    speed = 10000.0 ** (-torch.arange(0, features, 2) / features)
    turn = torch.arange(length).unsqueeze(-1) * speed
    return turn.cos(), turn.sin()


# nn.Linear keeps its weight as (out, in): S(0) splits what comes out (columns), S(1) what goes in (rows).
PLANS = {
    "data": Plan(batch={"dp": Shard(0), "tp": Shard(0)}),
    "tensor": Plan(
        {"**.{qkv,up}.weight": {"tp": Shard(0)}, "**.{out,down}.weight": {"tp": Shard(1)}},
        batch={"dp": Shard(0)},
    ),
    "sequence": Plan(batch={"dp": Shard(0), "tp": Shard(1)}),
    "tensor-2d": Plan(
        {
            "**.{qkv,up}.weight": {"dp": Shard(1), "tp": Shard(0)},
            "**.{out,down}.weight": {"dp": Shard(0), "tp": Shard(1)},
        }
    ),
}


class Text:
    """The text that the repository ships, as numbers."""

    def __init__(self, path: Path = TEXT) -> None:
        self.text = path.read_text()
        self.letters = sorted(set(self.text))
        self.numbers = torch.tensor([self.letters.index(each) for each in self.text])

    def batches(self, count: int, rows: int, length: int, seed: int = 1) -> Iterator[Batch]:
        """Random stretches of the text, and the same moved by one."""
        draw = torch.Generator().manual_seed(seed)
        for _ in range(count):
            starts = torch.randint(len(self.numbers) - length - 1, (rows,), generator=draw)
            places = starts.unsqueeze(-1) + torch.arange(length + 1)
            yield self.numbers[places[:, :-1]], self.numbers[places[:, 1:]]

    def sample(self, model: GPT, begin: str, count: int, length: int, seed: int = 2) -> str:
        """The beginning, continued letter by letter."""
        draw = torch.Generator().manual_seed(seed)
        numbers = [self.letters.index(each) for each in begin]
        with torch.no_grad():
            for _ in range(count):
                scores = model(torch.tensor([numbers[-length:]]))[0, -1]
                chances = torch.softmax(scores / 0.7, -1)
                numbers.append(int(torch.multinomial(chances, 1, generator=draw)))
        return "".join(self.letters[each] for each in numbers)


class Trainer:
    """A model with its optimizer; on a mesh if it has a plan."""

    def __init__(self, model: GPT, mesh: loom.Mesh | None = None, plan: Plan | None = None) -> None:
        self.mesh, self.plan = mesh, plan
        self.model = model if mesh is None else loom.parallelize(copy.deepcopy(model), mesh, plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, foreach=False)

    def placed(self, letters: torch.Tensor):
        """A batch where the plan wants it."""
        if self.mesh is None or self.plan is None:
            return letters
        return loom.distribute(letters, self.mesh, self.plan.batch)

    def step(self, letters: torch.Tensor, following: torch.Tensor) -> float:
        """One update; the loss before it."""
        loss = self.model.loss(self.placed(letters), self.placed(following))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def dense(self) -> GPT:
        """The model as it is now, off the mesh."""
        found = copy.deepcopy(self.model)
        return found if self.mesh is None else loom.unparallelize(found)


def make_parser(text: str | None, **numbers: tuple[int, str]) -> argparse.ArgumentParser:
    """A command line with numbers: their defaults, and what they are."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, what) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    return parser


def train_both(dense: Trainer, ours: Trainer, batches: Iterable[Batch], steps: int, name: object) -> None:
    """The same steps dense and on the mesh; every tenth loss and the last one are shown."""
    for step, batch in enumerate(batches):
        losses = dense.step(*batch), ours.step(*batch)
        if loom.process().rank == 0 and (step % 10 == 0 or step == steps - 1):
            print(f"step {step:4}  dense {losses[0]:.5f}  {name} {losses[1]:.5f}", flush=True)


def main() -> None:
    """Train dense and on the mesh, side by side."""
    parser = make_parser(
        __doc__,
        steps=(100, "how many steps"),
        rows=(16, "stretches of text per batch"),
        length=(64, "letters per stretch"),
        sample=(120, "letters to write at the end"),
    )
    parser.add_argument("--plan", choices=PLANS, default="tensor", help="which table of placements (default tensor)")
    given = parser.parse_args()
    torch.manual_seed(0)
    text = Text()
    model = GPT(len(text.letters))
    mesh = loom.open_mesh(MESH, axes=("dp", "tp"))
    dense, ours = Trainer(copy.deepcopy(model)), Trainer(model, mesh, PLANS[given.plan])
    train_both(dense, ours, text.batches(given.steps, given.rows, given.length), given.steps, given.plan)
    written = text.sample(ours.dense(), "The ", given.sample, given.length)
    if loom.process().rank == 0:
        print(written)


if __name__ == "__main__":
    main()
