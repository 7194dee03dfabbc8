"""Train a small Llama on this repository's own text, byte by byte, on a mesh: plan, dry run, checkpoints, sample.

    python examples/train_llama.py                                # fully sharded on 8 virtual devices
    python examples/train_llama.py --plan tensor --mesh 2x4       # the same model, divided otherwise
    meshloom run -n 4 examples/train_llama.py --plan fsdp         # the same script on four processes
    python examples/train_llama.py --checkpoints runs --every 20  # kill it at any moment ...
    python examples/train_llama.py --checkpoints runs --resume --plan tensor   # ... and go on, on another mesh

The model is plain torch and knows nothing of meshes. What is meshloom's: `parallelize` puts it on a mesh, `dry_run`
says before the first step what a step costs, the loader gives every process its rows, `save` and `load` go from any
mesh to any mesh. The loss curve is the same for every plan, mesh and number of processes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

import meshloom as loom

ROOT = Path(__file__).resolve().parents[1]
AXES = {
    "data": ("dp",),
    "fsdp": ("fsdp",),
    "hsdp": ("dp", "fsdp"),
    "tensor": ("dp", "tp"),
    "tensor+sequence": ("dp", "tp"),
    "fsdp+tensor": ("fsdp", "tp"),
    "context": ("dp", "cp"),
}
BYTES = 256
WIDTH = 110  # of the output where there is no terminal


# The model: Llama's parts in plain torch


@dataclass(frozen=True)
class Config:
    """The sizes of a model."""

    width: int = 256
    hidden: int = 688
    layers: int = 4
    heads: int = 8
    key_heads: int = 4
    length: int = 64


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads share a key head."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.size = config.width // config.heads
        keys = config.key_heads * self.size
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, keys, bias=False)
        self.v_proj = nn.Linear(config.width, keys, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(batch, length, width) to the same."""
        query, key, value = (self._split(each(x)) for each in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, *angles), rotate(key, *angles)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Pairs of features, turned by an angle that grows with the position."""
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., width) to the same."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and added to its input."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(config.width, eps=1e-6) for _ in range(2))
        self.self_attn, self.mlp = Attention(config), FeedForward(config)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(batch, length, width) to the same."""
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Bytes to the logits of the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(BYTES, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.lm_head = nn.Linear(config.width, BYTES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) to (batch, length, bytes)."""
        x = self.embed_tokens(tokens)
        angles = self._angles(tokens.shape[1])
        for layer in self.layers:
            x = layer(x, angles)
        return self.lm_head(self.norm(x))

    def _angles(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.config.width // self.config.heads // 2
        turns = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(half) / half))
        return turns.cos(), turns.sin()


# The text


class Windows:
    """Windows of a text and the bytes that follow, half a window apart."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8).long(), length

    def __len__(self) -> int:
        return 2 * ((len(self.text) - 1) // self.length) - 1

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = number * self.length // 2
        window = self.text[begin : begin + self.length + 1]
        return window[:-1], window[1:]


def read_text() -> bytes:
    """The documents of this repository."""
    return b"\n".join(each.read_bytes() for each in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])


# The run


class Trainer:
    """A model on a mesh with all that a training run consists of; everything that has a state is saved."""

    def __init__(self, given: argparse.Namespace, mesh: loom.Mesh) -> None:
        torch.manual_seed(given.seed)
        self.config = Config(length=given.length)
        with torch.device("meta"):  # no process ever holds all of it
            model = Llama(self.config)
        self.model = loom.parallelize(model, mesh, given.plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=given.rate, betas=(0.9, 0.95), weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, partial_rate(given.steps))
        batch = loom.nn.plan_of(self.model).batch
        self.loader = loom.data.Loader(Windows(read_text(), given.length), given.batch, mesh, batch, seed=given.seed)
        self.random, self.steps = loom.RandomState(), 0

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One epoch after the other."""
        while True:
            yield from self.loader

    def step(self, tokens: torch.Tensor, following: torch.Tensor) -> float:
        """One step of training: the loss before it."""
        self.optimizer.zero_grad()
        loss = find_loss(self.model, tokens, following)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1
        return loss.item()

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        parts = ("model", "optimizer", "scheduler", "loader", "random", "steps")
        return {name: getattr(self, name) for name in parts}

    def save(self, folder: Path, keep: int) -> None:
        """Write a checkpoint while training goes on; the last ones are kept."""
        loom.save(self.state, folder / f"step-{self.steps:06}", keep=keep, asynchronous=True, progress=False)

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint, whatever mesh wrote it."""
        self.steps = loom.load(folder, into=self.state, progress=False)["steps"]

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int) -> bytes:
        """The prompt, and what the model goes on with; every process draws the same bytes."""
        written = list(prompt)
        for _ in range(count):
            tokens = torch.tensor([written[-self.config.length :]])
            logits = self.model(tokens)[0, -1].to_torch()
            written.append(int(torch.multinomial(F.softmax(logits / 0.7, -1), 1)))
        return bytes(written)


def find_loss(model: nn.Module, tokens: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the following bytes."""
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def partial_rate(steps: int) -> Any:
    """A schedule: ten steps of warm-up, then a cosine down to a tenth."""

    def rate(step: int) -> float:
        done = min(1.0, max(0.0, (step - 10) / max(1, steps - 10)))
        return min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * done))

    return rate


def predict(given: argparse.Namespace, mesh: loom.Mesh, console: Console) -> None:
    """What a step costs on hardware, before the first one runs: the same program without data."""
    with torch.device("meta"):
        model = Llama(Config(length=given.length))
        tokens = torch.zeros(given.batch, given.length, dtype=torch.long)
    loom.parallelize(model, mesh, given.plan, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = loom.nn.plan_of(model).batch
    tokens = loom.distribute(tokens, mesh, batch)
    with loom.dry_run(given.machine) as run:
        find_loss(model, tokens, tokens).backward()
        optimizer.step()
    size = sum(each.numel() for each in model.parameters())
    console.print(f"{size / 1e6:.1f}M parameters, plan {given.plan} on {mesh!r}", highlight=False)
    console.print(
        f"a step on {given.machine}, predicted: {run.time * 1e3:.2f} ms, {run.flops / 1e9:.1f} GFLOP, "
        f"{run.bytes / 1e6:.1f} MB and {run.memory.peak / 1e6:.1f} MB of memory per device",
        highlight=False,
    )
    if given.report is not None and loom.process().rank == 0:
        run.report(given.report)
        console.print(f"the whole step: {given.report}", highlight=False)


def train(given: argparse.Namespace, trainer: Trainer, console: Console) -> None:
    """Step by step under a progress bar; a line now and then where there is no terminal."""
    losses: list[float] = []
    with progress_bar(console, given.steps, trainer.steps) as (bar, task):
        batches = trainer.batches()
        while trainer.steps < given.steps:
            begin, waited = time.perf_counter(), loom.seconds_waited()
            losses.append(trainer.step(*next(batches)))
            seconds, exposed = time.perf_counter() - begin, loom.seconds_waited() - waited
            told = describe(losses[-1], given.batch * given.length / seconds, exposed / seconds)
            bar.update(task, completed=trainer.steps, description=told)
            note(given, trainer.steps, losses[-1])
            is_last = trainer.steps == given.steps
            if not console.is_terminal and (is_last or len(losses) % max(1, given.steps // 5) == 1):
                console.print(f"step {trainer.steps:>5}  {told}", highlight=False)
            if given.checkpoints is not None and (is_last or trainer.steps % given.every == 0):
                trainer.save(given.checkpoints, given.keep)
    if losses:
        console.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} at step {trainer.steps}", highlight=False)


def show_communication(trainer: Trainer, console: Console) -> None:
    """What one pass over a batch communicates, forward and backward; nothing is updated."""
    batch = next(trainer.batches())
    with loom.record() as log:
        find_loss(trainer.model, *batch).backward()
    trainer.optimizer.zero_grad()
    console.rule("what a step communicates")
    console.print(loom.communication_table(log), markup=False, highlight=False, soft_wrap=True)


def describe(loss: float, rate: float, exposed: float) -> str:
    """How it goes, in one line."""
    return f"loss {loss:.4f}  {rate:,.0f} tokens/s  exposed communication {exposed:.0%}"


@contextmanager
def progress_bar(console: Console, total: int, done: int) -> Iterator[tuple[Progress, Any]]:
    """A bar on a terminal."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task("", total=total, completed=done)


def note(given: argparse.Namespace, step: int, loss: float) -> None:
    """A line of the loss curve, for whoever asked for it."""
    if given.losses is not None and loom.process().rank == 0:
        with given.losses.open("a") as file:
            print(json.dumps({"step": step, "loss": loss}), file=file)


def open_mesh(given: argparse.Namespace) -> loom.Mesh:
    """The mesh that was asked for, or eight devices in the axes of the plan, more for more processes."""
    axes = AXES[given.plan]
    if given.mesh is None:
        count = loom.process().count
        devices = 8 if 8 % count == 0 else 2 * count
        given.mesh = (devices,) if len(axes) == 1 else (2, devices // 2)
    return loom.open_mesh(given.mesh, axes=axes)


def read_mesh(text: str) -> tuple[int, ...]:
    """A shape such as 2x4."""
    parts = text.split("x")
    if not all(each.isdecimal() and int(each) > 0 for each in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 8 or 2x4")
    return tuple(map(int, parts))


def read_count(text: str) -> int:
    """A number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)


def read_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--plan", choices=AXES, default="fsdp", help="how the model is divided (default fsdp)")
    add("--mesh", type=read_mesh, help="the shape of the mesh, such as 8 or 2x4 (default: eight devices)")
    add("--steps", type=read_count, default=60, help="train until this step (default 60)")
    add("--batch", type=read_count, default=16, help="rows of a batch, over all devices (default 16)")
    add("--length", type=read_count, default=64, help="bytes of a row (default 64)")
    add("--rate", type=float, default=3e-3, help="the highest learning rate (default 0.003)")
    add("--seed", type=int, default=0, help="of weights, order and samples (default 0)")
    add("--checkpoints", type=Path, metavar="FOLDER", help="write checkpoints there")
    add("--every", type=read_count, default=50, help="steps between two checkpoints (default 50)")
    add("--keep", type=read_count, default=2, help="checkpoints that are kept (default 2)")
    add("--resume", action="store_true", help="go on from the latest checkpoint")
    add("--machine", default="t3000", help="the hardware of the dry run (default t3000)")
    add("--report", metavar="FILE", help="write the dry run as a page")
    add("--losses", type=Path, metavar="FILE", help="write the loss curve as lines of JSON")
    add("--sample", type=int, default=160, help="bytes to write at the end (default 160)")
    given = parser.parse_args(arguments)
    if given.resume and given.checkpoints is None:
        parser.error("--resume goes on from --checkpoints FOLDER, which is not given")
    if given.mesh is not None and len(given.mesh) != len(AXES[given.plan]):
        parser.error(f"--mesh: plan {given.plan} has the axes {', '.join(AXES[given.plan])}, so give as many sizes")
    return given


def run(given: argparse.Namespace, console: Console) -> Trainer:
    """Predict, train, sample."""
    mesh = open_mesh(given)
    predict(given, mesh, console)
    trainer = Trainer(given, mesh)
    newest = loom.latest(given.checkpoints) if given.resume else None
    if newest is not None:
        trainer.load(newest)
        console.print(f"going on from {newest}", highlight=False)
    train(given, trainer, console)
    show_communication(trainer, console)
    if given.sample > 0:
        written = trainer.sample(b"The mesh ", given.sample).decode(errors="replace")
        console.rule("what it writes")
        console.print(written, markup=False, highlight=False, soft_wrap=True)
    return trainer


def main() -> None:
    """Read the arguments and run; the first process prints. Ctrl-C ends it with one line."""
    given = read_arguments()
    console = Console(quiet=loom.process().rank != 0)
    if not console.is_terminal:
        console.width = WIDTH
    try:
        run(given, console)
    except KeyboardInterrupt:
        console.print("stopped")
        sys.exit(130)


if __name__ == "__main__":
    main()
