"""What ranks run in the tests of copies between meshes and of pipelines."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import meshloom as loom
from samples import Seeded


def copies() -> dict[str, object]:
    """What the tests of copies look at, in one run."""
    return {"program": program_on_two_submeshes(), "random": random_copies(12), "uses": use_from_elsewhere()}


def program_on_two_submeshes() -> dict[str, object]:
    """A program whose halves are on different processes: every process runs all of it."""
    mesh = loom.open_mesh((2, 4), axes=("pp", "tp"))
    first, second = mesh.submesh(pp=0), mesh.submesh(pp=1)
    torch.manual_seed(0)
    dense = [torch.randn(7, 6), torch.randn(6, 8), torch.randn(8, 3)]
    x = loom.distribute(dense[0], first, "S(0)")
    w = loom.Parameter(loom.distribute(dense[1], first, "S(1)"))
    v = loom.Parameter(loom.distribute(dense[2], second, "S(0)"))
    hidden = torch.relu(x @ w).redistribute("S(1)", mesh=second)
    loss = (hidden @ v).square().mean()
    loss.backward()
    plain = [each.clone().requires_grad_() for each in dense[1:]]
    expected = (torch.relu(dense[0] @ plain[0]) @ plain[1]).square().mean()
    expected.backward()
    torch.testing.assert_close(loss.detach().to_torch(), expected.detach())
    torch.testing.assert_close(w.grad.to_torch(), plain[0].grad)
    torch.testing.assert_close(v.grad.to_torch(), plain[1].grad)
    assert loss.item() == loss.item()
    optimizer = torch.optim.AdamW([w, v], lr=0.1)
    optimizer.step()
    other = torch.optim.AdamW(plain, lr=0.1)
    other.step()
    torch.testing.assert_close(w.detach().to_torch(), plain[0].detach())
    torch.testing.assert_close(v.detach().to_torch(), plain[1].detach())
    return {"elsewhere": (first.is_elsewhere, second.is_elsewhere), "data": (w._data.is_meta, v._data.is_meta)}


def random_copies(number: int) -> int:
    """Copies between all kinds of meshes of this run: values and gradients are those of the dense tensor."""
    d = Seeded("copies")
    whole = loom.open_mesh((4, 2), axes=("pp", "tp"))
    pair = whole.submesh(pp=slice(2, 4))
    meshes = [whole, whole.submesh(pp=0), whole.submesh(pp=3), pair, pair.reshape(x=4), loom.Mesh.of((3,), ("z",))]
    for _ in range(number):
        mesh, other = d.pick(meshes), d.pick(meshes)
        shape = tuple(d.number(0, 5) for _ in range(d.number(0, 2)))
        options = [loom.Replicate(), *map(loom.Shard, range(len(shape)))]
        dense, weights = torch.randn(shape), torch.randn(shape)
        x = loom.distribute(dense, mesh, tuple(d.pick(options) for _ in mesh.shape)).requires_grad_()
        placed = tuple(d.pick([*options, loom.Partial("sum")]) for _ in mesh.shape)
        y = x.redistribute(placed).redistribute(tuple(d.pick(options) for _ in other.shape), mesh=other)
        assert y._data.is_meta == other.is_elsewhere
        torch.testing.assert_close(y.detach().to_torch(), dense)
        (y * loom.distribute(weights, other, {})).sum().backward()
        torch.testing.assert_close(x.grad.to_torch(), weights)
    return number


def use_from_elsewhere() -> list[str]:
    """What every process may do with a tensor that one of them holds, whatever it holds itself; as text."""
    mesh = loom.open_mesh((2, 2), axes=("pp", "tp"))
    part = mesh.submesh(pp=0)
    torch.manual_seed(0)
    x = loom.randn(6, 4, mesh=part, placements="S(0)")
    x[0] = 1.0
    local = loom.from_local([torch.ones(2)] * len(list(part.local_coordinates())), part, "S(0)")
    dropped = torch.nn.functional.dropout(x, 0.5)
    found = [
        x.to_torch(), loom.collectives.all_reduce(x).to_torch(), x.sort(0).values.to_torch(), torch.unique(x).shape,
        loom.collectives.all_gather(x, 0, mode="fabric").to_torch(), loom.collectives.all_reduce_async(x).wait().shape,
        x.sum().item(), bool((x > -100).all()), repr(x), x.numpy().sum(), x.tolist()[0], local.to_torch(),
        dropped.shape,
        (x + torch.ones(4)).sum().item(), torch.rand(2), loom.explain(lambda: x.redistribute("R, R", mesh=mesh)).bytes,
    ]  # fmt: skip
    loom.collectives.barrier(part)
    for act in (lambda: pickle.dumps(x), lambda: x.shard_at((0,))):
        try:
            act()
            found.append("given")
        except loom.MeshloomError as error:
            found.append(error.headline)
    return [str(each) for each in found]


def copy_differently() -> None:
    """Rank 1 waits for another tensor than rank 0 sends."""
    mesh = loom.open_mesh((2,), axes=("pp",))
    shape = (4,) if loom.process().rank else (6,)
    x = loom.ones(*shape, mesh=mesh.submesh(pp=slice(0, 1)), placements="R")
    x.redistribute("R", mesh=mesh.submesh(pp=slice(1, 2)))


class Block(torch.nn.Module):
    """A block with a residual sum, as models have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 24),
            torch.nn.Linear(24, width),
        )

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """(rows, width) to the same."""
        return x + self.down(torch.relu(self.up(self.norm(x)))) * scale


class Net(torch.nn.Module):
    """A model that is no Sequential: an embedding, blocks that take a second tensor, and a head; Python in between."""

    def __init__(self, blocks: int = 4, width: int = 12) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(rows, length) to (rows, length, 11)."""
        x = self.embedding(tokens)
        scale = x.mean() + 1.0  # of the first stage, for all others
        for block in self.blocks:
            x = block(x, scale)
        return self.head(x * 0.5)


def loss_of(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each token."""
    return torch.nn.functional.cross_entropy(scores.transpose(1, 2), tokens)


def check_pipeline(
    stages: int, schedule: str, shape: tuple[int, ...], plan: str, batches: int = 4, steps: int = 2
) -> str:
    """Steps of a pipeline beside the dense model: losses, gradients, weights; order and micro-batches alive."""
    axes = ("pp", "dp", "tp")[: len(shape)]
    mesh = loom.open_mesh(shape, axes=axes)
    torch.manual_seed(3)
    dense = Net()
    ours = copy.deepcopy(dense)
    pipe = loom.pipeline(ours, stages, mesh, schedule, micro_batches=batches, plan=plan, loss=loss_of)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (ours, dense)]
    for _ in range(steps):
        tokens, target = torch.randint(11, (10, 3)), torch.randint(11, (10, 3))
        for each in optimizers:
            each.zero_grad()
        # sums of a batch in parts: scale is a mean over the micro-batch, so the dense model takes micro-batches too
        expected = sum(
            loss_of(dense(x), y) * (len(x) / 10) for x, y in zip(tokens.split(3), target.split(3), strict=True)
        )
        expected.backward()
        loss = pipe.step(tokens, target=target)
        torch.testing.assert_close(loss.to_torch(), expected.detach())
        check_gradients(ours, dense)
        check_report(pipe, schedule)
        norms = pipe.clip_grad_norm_(0.1), torch.nn.utils.clip_grad_norm_(dense.parameters(), 0.1)
        torch.testing.assert_close(*norms)
        check_gradients(ours, dense)
        for each in optimizers:
            each.step()
    scores = torch.cat([dense(each) for each in tokens.split(3)]).detach()
    torch.testing.assert_close(pipe(tokens).to_torch(), scores, rtol=1e-4, atol=1e-4)
    back = pipe.unparallelize()
    for (name, p), q in zip(back.named_parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p, q, msg=partial("{}: {}".format, name), rtol=1e-4, atol=1e-5)
    return f"{stages} {schedule} {shape} {plan}"


def check_gradients(ours: torch.nn.Module, dense: torch.nn.Module) -> None:
    """Gradients are those of the dense model, asked for in every process."""
    for (name, p), q in zip(ours.named_parameters(), dense.parameters(), strict=True):
        assert p.grad._data.is_meta == p.mesh.is_elsewhere
        told = partial("{}: {}".format, name)
        torch.testing.assert_close(p.grad.to_torch(), q.grad, msg=told, rtol=1e-4, atol=1e-5)


def check_report(pipe: loom.Pipeline, schedule: str) -> None:
    """Each stage that is here did its row in order, and kept no more micro-batches than the schedule says."""
    report = pipe.report
    assert report is not None
    for stage in pipe.stages:
        if stage.is_here:
            assert report.order(stage.number) == report.schedule.rows[stage.number]
            assert report.alive[stage.number] == report.schedule.alive(stage.number)
            assert schedule != "1f1b" or report.alive[stage.number] <= len(pipe.stages)
        else:
            assert not report.order(stage.number)


def matrix(cases: list[tuple[Any, ...]]) -> list[str]:
    """Pipelines of all kinds; what was checked."""
    return [check_pipeline(*each) for each in cases]


def save_and_load(folder: str) -> list[str]:
    """A pipeline with its optimizer goes to files and comes back on other stages; the names that were compared."""
    mesh = loom.open_mesh((2, 2), axes=("pp", "tp"))
    torch.manual_seed(3)
    pipe = loom.pipeline(Net(), 2, mesh, micro_batches=2, plan="tensor", loss=loss_of)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    tokens = torch.randint(11, (4, 3))
    pipe.step(tokens, target=tokens)
    optimizer.step()
    loom.save({"model": pipe.module, "optimizer": optimizer}, folder)
    torch.manual_seed(4)
    other = loom.pipeline(Net(), ["blocks.0"], mesh, micro_batches=2, plan="data", loss=loss_of)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    loom.load(folder, into={"model": other.module, "optimizer": again})
    for p, q in zip(pipe.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.detach().to_torch(), q.detach().to_torch())
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[p][key].to_torch(), again.state[q][key].to_torch())
    losses = [each.step(tokens, target=tokens).item() for each in (pipe, other)]
    assert abs(losses[0] - losses[1]) < 1e-5
    return [name for name, _ in pipe.module.named_parameters()]


class Napping(torch.nn.Linear):
    """Sleeps in both passes, except on shapes alone."""

    seconds = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, 4) to the same."""
        made = super().forward(x)
        if not made._data.is_meta:
            time.sleep(self.seconds)
            made.register_hook(lambda gradient: time.sleep(self.seconds))
        return made


def sleep_in_stages(seconds: float) -> tuple[float, int]:
    """How long a step of two sleeping stages takes, and how often both of them sleep in it."""
    mesh = loom.open_mesh((2,), axes=("pp",))
    net = torch.nn.Sequential(Napping(4, 4), Napping(4, 4))
    pipe = loom.pipeline(net, 2, mesh, micro_batches=6, loss=torch.nn.functional.mse_loss)
    x = torch.ones(6, 4)
    pipe.step(x, target=x)
    Napping.seconds = seconds
    pipe.step(x, target=x)
    assert pipe.report is not None
    assert len(pipe.report.done) == 12
    return pipe.report.seconds, 24


def fail_in_a_stage() -> None:
    """The second stage fails at its second micro-batch."""
    pipe, x = _stages(lambda count: 1 // (2 - count))
    pipe.step(x, target=x)


def interrupt_a_stage() -> None:
    """Somebody presses Ctrl-C where the second stage runs."""
    pipe, x = _stages(lambda count: os.kill(os.getpid(), signal.SIGINT) if count == 2 else None)
    pipe.step(x, target=x)


def _stages(act: Callable[[int], object]) -> tuple[loom.Pipeline, torch.Tensor]:
    class Acting(torch.nn.Linear):
        count = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not x._data.is_meta:
                self.count += 1
                try:
                    act(self.count)
                except ZeroDivisionError:
                    raise ZeroDivisionError("no luck") from None
            return super().forward(x)

    mesh = loom.open_mesh((2,), axes=("pp",), timeout=20)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), Acting(4, 4))
    pipe = loom.pipeline(net, 2, mesh, micro_batches=4, loss=torch.nn.functional.mse_loss)
    return pipe, torch.ones(8, 4)
