"""Five kinds of models in plain torch, three sizes each, to plan for: GPT, Llama with grouped heads, BERT, ViT and a
mixture of experts. None of them knows what mesh it is on.

    python examples/plan_models.py llama small     # its plans on a T3000
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshloom as loom


@dataclass(frozen=True)
class Sizes:
    """How large a model is."""

    width: int
    layers: int
    heads: int
    groups: int  # heads of keys and values
    hidden: int
    words: int  # in its vocabulary, or classes of pictures
    length: int  # tokens of a text, patches of a picture
    experts: int = 8


SIZES = {
    "tiny": Sizes(32, 1, 4, 2, 48, 64, 16, 4),
    "small": Sizes(512, 4, 8, 4, 2048, 8192, 512),
    "medium": Sizes(2048, 8, 16, 8, 8192, 32768, 1024),
    "large": Sizes(4096, 16, 32, 8, 11008, 32768, 2048),
}


class Attention(nn.Module):
    """Self-attention; heads of queries may share heads of keys and values."""

    def __init__(self, sizes: Sizes, groups: int, is_causal: bool, bias: bool) -> None:
        super().__init__()
        self.head, self.is_causal = sizes.width // sizes.heads, is_causal
        self.q_proj = nn.Linear(sizes.width, sizes.width, bias=bias)
        self.k_proj = nn.Linear(sizes.width, groups * self.head, bias=bias)
        self.v_proj = nn.Linear(sizes.width, groups * self.head, bias=bias)
        self.o_proj = nn.Linear(sizes.width, sizes.width, bias=bias)
        self.is_shared = groups != sizes.heads

    def forward(self, x):
        """(batch, length, width) to the same."""
        query, key, value = (
            each(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal, enable_gqa=self.is_shared)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Plain(nn.Module):
    """Two products with a GELU between them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(sizes.width, sizes.hidden), nn.Linear(sizes.hidden, sizes.width)

    def forward(self, x):
        """(..., width) to the same."""
        return self.fc2(F.gelu(self.fc1(x)))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down_proj = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x):
        """(..., width) to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and a net, each added to its input: after a norm of it, or before one."""

    def __init__(self, sizes: Sizes, attention: nn.Module, net: nn.Module, norm: type, norm_last: bool = False) -> None:
        super().__init__()
        self.attention, self.net, self.norm_last = attention, net, norm_last
        self.first, self.second = norm(sizes.width), norm(sizes.width)

    def forward(self, x):
        """(batch, length, width) to the same."""
        if self.norm_last:
            x = self.first(x + self.attention(x))
            return self.second(x + self.net(x))
        x = x + self.attention(self.first(x))
        return x + self.net(self.second(x))


class Text(nn.Module):
    """Tokens in, scores of words out; positions are learned, the head may be the embedding."""

    def __init__(self, sizes: Sizes, block: Callable[[], nn.Module], norm: type, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.words, sizes.width)
        self.positions = nn.Parameter(torch.randn(sizes.length, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(block() for _ in range(sizes.layers))
        self.norm = norm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        """(batch, length) to (batch, length, words)."""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Pictures(nn.Module):
    """Pictures in patches in, scores of classes out."""

    def __init__(self, sizes: Sizes, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.patches = nn.Linear(3 * 16 * 16, sizes.width)
        self.positions = nn.Parameter(torch.randn(sizes.length, sizes.width) * 0.02)
        self.blocks = nn.ModuleList(block() for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words)

    def forward(self, pictures):
        """(batch, patches, numbers of a patch) to (batch, classes)."""
        x = self.patches(pictures) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def gpt(sizes: Sizes) -> nn.Module:
    """Causal, norms first, the head tied to the embedding."""
    make = partial(Block, sizes, norm=nn.LayerNorm)
    return Text(
        sizes, lambda: make(Attention(sizes, sizes.heads, True, True), Plain(sizes)), nn.LayerNorm, is_tied=True
    )


def llama(sizes: Sizes) -> nn.Module:
    """Causal, with grouped heads, gates and a head of its own."""
    make = partial(Block, sizes, norm=nn.RMSNorm)
    return Text(
        sizes, lambda: make(Attention(sizes, sizes.groups, True, False), Gated(sizes)), nn.RMSNorm, is_tied=False
    )


def bert(sizes: Sizes) -> nn.Module:
    """Every token sees every other; norms last."""
    make = partial(Block, sizes, norm=nn.LayerNorm, norm_last=True)
    return Text(
        sizes, lambda: make(Attention(sizes, sizes.heads, False, True), Plain(sizes)), nn.LayerNorm, is_tied=True
    )


def vit(sizes: Sizes) -> nn.Module:
    """Pictures, a thousand classes."""
    found = replace(sizes, words=min(sizes.words, 1000), length=min(sizes.length, 256))
    return Pictures(found, lambda: Block(found, Attention(found, found.heads, False, True), Plain(found), nn.LayerNorm))


def mixture(sizes: Sizes) -> nn.Module:
    """A router and experts; each token goes to two of them."""
    return loom.experts.MoE(sizes.width, sizes.hidden, experts=sizes.experts, top_k=2)


def moe(sizes: Sizes) -> nn.Module:
    """A Llama whose nets are experts."""
    make = partial(Block, sizes, norm=nn.RMSNorm)
    return Text(
        sizes, lambda: make(Attention(sizes, sizes.groups, True, False), mixture(sizes)), nn.RMSNorm, is_tied=False
    )


MODELS = {"gpt": gpt, "llama": llama, "bert": bert, "vit": vit, "moe": moe}


def build(model: str, size: str, device: str = "meta", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """A model by its name and size; on meta it needs no memory."""
    with torch.device(device):
        return MODELS[model](SIZES[size]).to(dtype)


def example(model: str, size: str, rows: int, device: str = "meta", dtype: torch.dtype = torch.bfloat16) -> Any:
    """A batch: what goes in and what should come out."""
    sizes = SIZES[size]
    if model == "vit":
        patches = torch.randn(rows, min(sizes.length, 256), 3 * 16 * 16, device=device, dtype=dtype)
        return patches, torch.zeros(rows, dtype=torch.long, device=device)
    tokens = torch.arange(rows * sizes.length, device=device).reshape(rows, sizes.length) % sizes.words
    return tokens, tokens


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """The cross-entropy of what comes out."""
    given, wanted = batch
    scores = model(given)
    return F.cross_entropy(scores.flatten(0, -2).float(), wanted.flatten())


def main() -> None:
    """Print the plans of a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("--machine", default="t3000", help="a preset (default %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="rows of a batch (default %(default)s)")
    given = parser.parse_args()
    batch = example(given.model, given.size, given.rows)
    print(loom.autoplan(build(given.model, given.size), batch, given.machine, loss=loss))


if __name__ == "__main__":
    main()
