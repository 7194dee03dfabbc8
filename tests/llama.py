"""A Llama of plain torch modules with parameters on a mesh, without data if wanted, and what a step of it must cost.

The closed formulas count what one device holds and does by hand: parameters by their placements, and for every layer
the arrays that autograd keeps. They know nothing of how a dry run works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import meshloom as loom
from meshloom import Shard

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from plan_models import Gated


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, and of a step: `rows` sequences of `length` tokens for each group of `tp` devices."""

    width: int
    hidden: int
    heads: int
    groups: int  # heads of keys and values
    vocabulary: int
    layers: int
    dp: int
    tp: int
    rows: int = 1
    length: int = 2048

    @property
    def head(self) -> int:
        """The width of one head."""
        return self.width // self.heads

    @property
    def tokens(self) -> int:
        """The tokens of one device; those of a group of `tp` devices are the same."""
        return self.rows * self.length


SMALL_7B = {"width": 4096, "hidden": 11008, "heads": 32, "groups": 32, "vocabulary": 32000}
LARGE_70B = {"width": 8192, "hidden": 28672, "heads": 64, "groups": 8, "vocabulary": 32000}


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped heads."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, sizes.groups * sizes.head, bias=False)
        self.value = nn.Linear(sizes.width, sizes.groups * sizes.head, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x, cos, sin):
        """(batch, length, width) to the same."""
        query, key, value = (
            each(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.query, self.key, self.value)
        )
        query, key = (each * cos + turn(each) * sin for each in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def turn(x):
    """Each pair of features, turned by a right angle."""
    left, right = x.chunk(2, -1)
    return torch.cat([-right, left], -1)


class Layer(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(sizes.width, eps=1e-6), nn.RMSNorm(sizes.width, eps=1e-6)
        self.attention, self.feed = Attention(sizes), Gated(sizes)

    def forward(self, x, cos, sin):
        """(batch, length, width) to the same."""
        x = x + self.attention(self.first(x), cos, sin)
        return x + self.feed(self.second(x))


class Llama(nn.Module):
    """Tokens in, scores of the next token out."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=1e-6)
        self.scores = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens):
        """(batch, length) to (batch, length, vocabulary)."""
        cos, sin = angles(tokens.shape[1], self.sizes.head, self.norm.weight.dtype)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.scores(self.norm(x))


def angles(length: int, features: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The rotary tables, (length, features) each."""
    speed = 10000.0 ** (-torch.arange(0, features, 2) / features)
    angle = (torch.arange(length).unsqueeze(-1) * speed).repeat(1, 2)
    return angle.cos().to(dtype), angle.sin().to(dtype)


# Megatron's plan: columns, then rows; the vocabulary is split too
PLACED = {"query": 0, "key": 0, "value": 0, "gate_proj": 0, "up_proj": 0, "scores": 0, "out": 1, "down_proj": 1}


def place(model: nn.Module, mesh: loom.Mesh, placed: dict[str, int], axis: str = "tp") -> nn.Module:
    """Put every parameter on the mesh: those of named modules sharded on an axis, the others replicated."""
    for name, parameter in list(model.named_parameters()):
        path, _, which = name.rpartition(".")
        dim = placed.get(path.rpartition(".")[2])
        where = {} if dim is None else {axis: Shard(dim)}
        setattr(model.get_submodule(path), which, loom.Parameter(parameter.detach(), mesh, where))
    return model


def make_step(sizes: Sizes, device: str = "meta", dtype: torch.dtype = torch.bfloat16, **options) -> Callable[[], None]:
    """A training step with AdamW on a mesh of dp x tp devices; its model and optimizer are attributes."""
    mesh = loom.open_mesh((sizes.dp, sizes.tp), axes=("dp", "tp"))
    with torch.device(device):
        model = place(Llama(sizes).to(dtype), mesh, PLACED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    whole = torch.arange(sizes.dp * sizes.tokens).reshape(-1, sizes.length) % sizes.vocabulary
    tokens = loom.distribute(whole, mesh, {"dp": Shard(0)})

    step = partial(train, model, optimizer, tokens)
    step.model, step.optimizer = model, optimizer
    return step


def train(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    """A step of training on tokens, with these as labels."""
    scores = model(tokens)
    loss = F.cross_entropy(scores.flatten(0, 1), tokens.flatten())
    del scores
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def parameters_per_device(sizes: Sizes) -> int:
    """How many parameters one device holds."""
    width, hidden, keys, tp = sizes.width, sizes.hidden, sizes.groups * sizes.head, sizes.tp
    layer = 2 * width * width // tp + 2 * width * keys // tp + 3 * width * hidden // tp + 2 * width
    return sizes.vocabulary * width + sizes.layers * layer + width + sizes.vocabulary * width // tp


def saved_bytes(sizes: Sizes, item: int = 2) -> int:
    """The activations that autograd keeps on one device until backward, dtype of `item` bytes; norms compute in f32."""
    t, width, hidden, keys, tp = sizes.tokens, sizes.width, sizes.hidden, sizes.groups * sizes.head, sizes.tp
    norm = 2 * 4 * t * width + 4 * t + item * t * width  # x and x / rms in f32, 1 / rms, and the result for linear
    attention = item * t * (width + 2 * keys) // tp  # query, key and value
    attention += item * t * width // tp + 4 * t * sizes.heads // tp  # the result and the logarithms of its sums
    feed = 4 * item * t * hidden // tp  # gate, silu(gate), up, their product
    head = item * t * sizes.vocabulary // tp  # the logarithms of probabilities
    tables = 2 * item * sizes.length * sizes.head
    return sizes.layers * (2 * norm + attention + feed) + norm + head + tables


def forward_flops(sizes: Sizes) -> int:
    """The products of a forward pass on all devices; attention counts all pairs."""
    width, keys = sizes.width, sizes.groups * sizes.head
    weights = sizes.layers * (2 * width * (width + keys) + 3 * width * sizes.hidden) + width * sizes.vocabulary
    tokens = sizes.dp * sizes.tokens
    return 2 * weights * tokens + sizes.layers * 4 * tokens * sizes.length * width


def summarise_steps(sizes: Sizes) -> dict[str, object]:
    """The same of three steps, which agree; of activations the least: threads of torch hold messages for a while."""
    first, *others = found = [summarise_step(sizes) for _ in range(3)]
    least = min(each.pop("activations") for each in found)  # type: ignore[type-var]
    assert all(each == first for each in others)
    return {**first, "activations": least}


def summarise_step(sizes: Sizes) -> dict[str, object]:
    """What a dry run with data says of a step here: on one process, or on each of several that split the mesh."""
    with loom.dry_run("galaxy") as run:
        make_step(sizes, "cpu", torch.float32)()
    held = run.memory.peaks
    return {
        "flops": run.flops,
        "products": sum(node.flops for node in run.nodes if node.model_flops),
        "held": {what: held[what] for what in ("parameters", "gradients", "optimizer state")},
        "activations": held["activations"],
        "links": {axis: load.bytes for axis, load in run.links.items()},
    }
