"""What ranks do in tests of buckets: gradients of replicated leaves that are summed while backward goes on."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import meshloom as loom
from meshloom.comms import deferred, wire
from meshloom.mesh import HERE
from meshloom.processes import join

WIDTHS = (64, 700, 3000, 40)  # weights of 45 thousand elements, 2.1 million (large) and 120 thousand


def _model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    pairs = itertools.pairwise(WIDTHS)
    return torch.nn.Sequential(*(layer for a, b in pairs for layer in (torch.nn.Linear(a, b), torch.nn.Tanh())))


def _on_mesh(model: torch.nn.Module, mesh: loom.Mesh) -> torch.nn.Module:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, loom.Parameter(parameter.detach(), mesh, {}))
    return model


class Order:
    """When sums began, in the order of what backward did beside them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._begin, self._settle = wire.begin_sum, deferred.Bucket.settle

    def __enter__(self) -> list[str]:
        def begin(data: torch.Tensor, group: Any) -> Callable[[], torch.Tensor]:
            self.seen.append(f"sum of {data.numel()}")
            return self._begin(data, group)

        def settle(bucket: deferred.Bucket) -> None:
            self.seen.append("wait")
            self._settle(bucket)

        wire.begin_sum, deferred.Bucket.settle = begin, settle
        return self.seen

    def __exit__(self, *_: object) -> None:
        wire.begin_sum, deferred.Bucket.settle = self._begin, self._settle


def _backward(model: torch.nn.Module, x: Any, seen: list[str]) -> None:
    hidden = x
    for number, layer in enumerate(model):
        hidden = layer(hidden)
        if hidden.requires_grad and number in (1, 3):
            hidden.register_hook(lambda gradient, number=number: seen.append(f"layer {number}"))
    hidden.square().mean().backward()


def gradients() -> tuple[float, list[str]]:
    """The largest difference from dense over two backwards and one inside `accumulate`, and the order of a pass."""
    join()
    mesh = loom.open_mesh((HERE.count,), axes=("dp",))
    dense, ours = _model(), _on_mesh(_model(), mesh)
    x = torch.randn(4 * HERE.count, WIDTHS[0])
    placed = loom.distribute(x, mesh, "S(0)")
    with Order() as seen:
        _backward(ours, placed, seen)
    first = [*seen]
    with loom.accumulate():
        _backward(ours, placed, [])
    _backward(ours, placed, [])
    for _ in range(3):
        _backward(dense, x, [])
    return _difference(ours, dense), first


def _difference(ours: torch.nn.Module, dense: torch.nn.Module) -> float:
    pairs = zip(ours.parameters(), dense.parameters(), strict=True)
    return max(float((p.grad.to_torch() - q.grad).abs().max() / q.grad.abs().max()) for p, q in pairs)


class _Failure(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        raise ValueError("in the middle of backward")


def failure() -> tuple[bool, float]:
    """Backward fails with sums under way: whether the gradients said so, and how far off the next pass is."""
    join()
    mesh = loom.open_mesh((HERE.count,), axes=("dp",))
    dense, ours = _model(), _on_mesh(_model(), mesh)
    x = torch.randn(4 * HERE.count, WIDTHS[0])
    placed = loom.distribute(x, mesh, "S(0)")
    try:
        ours[2:](_Failure.apply(ours[:2](placed))).square().mean().backward()
        raise AssertionError("backward did not fail")
    except ValueError:
        pass
    try:
        is_told = ours[2].weight.grad is not None and False
    except loom.GradientError as error:
        is_told = "synchronize" in str(error)
    for parameter in ours.parameters():
        parameter.grad = None
    _backward(ours, placed, [])
    _backward(dense, x, [])
    return is_told, _difference(ours, dense)


def kept() -> tuple[bool, bool, bool]:
    """Whether a kept gradient has the sum of two passes, is the tensor's still, and stays so under create_graph."""
    join()
    mesh = loom.open_mesh((HERE.count,), axes=("dp",))
    w = loom.Parameter(torch.ones(3, 2), mesh, {})
    x = loom.distribute(torch.arange(6.0 * HERE.count).view(-1, 3), mesh, "S(0)")
    (x @ w).sum().backward()
    held, first = w.grad, w.grad.to_torch().clone()
    (x @ w).sum().backward()
    has_sum, is_same = torch.equal(held.to_torch(), 2 * first), w.grad._data.data_ptr() == held._data.data_ptr()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of the cycle that create_graph makes
        (x @ w).square().sum().backward(create_graph=True)
    return has_sum, is_same, torch.equal(held.to_torch(), 2 * first)


def rooms() -> list[bool]:
    """Whether small gradients have the memory of the pass before: if it is free, if one is kept, if its memory is."""
    join()
    mesh = loom.open_mesh((HERE.count,), axes=("dp",))
    model = _on_mesh(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)), mesh)
    x = loom.ones(2 * HERE.count, 16, mesh=mesh, placements="S(0)")

    def step(scale: float) -> tuple[int, torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad = None
        (model(x) * scale).sum().backward()
        array = model[1].bias.grad._data
        assert array.tolist() == [2 * HERE.count * scale] * 16
        return array.untyped_storage().data_ptr(), array

    place = step(1.0)[0]
    found = [step(2.0)[0] == place]
    kept = step(3.0)[1].view(4, 4)
    place = kept.untyped_storage().data_ptr()
    found.append(step(4.0)[0] == place)
    assert kept.flatten().tolist() == [2 * HERE.count * 3.0] * 16
    storage = step(5.0)[1].untyped_storage()
    found.append(step(6.0)[0] == storage.data_ptr())
    held = deferred._begin_sum
    flights: list[Any] = []

    def begin(part: torch.Tensor, group: Any) -> Callable[[], torch.Tensor]:
        flights.append(part)  # as a sum that was begun and never waited for holds it
        return held(part, group)

    deferred._begin_sum = begin
    place = step(7.0)[0]
    return [*found, step(8.0)[0] == place]


def forbidden() -> list[str]:
    """Nothing is sent where communication is forbidden, large gradients included."""
    join()
    mesh = loom.open_mesh((HERE.count,), axes=("dp",))
    model = _on_mesh(_model(), mesh)
    loss = model(loom.ones(2 * HERE.count, WIDTHS[0], mesh=mesh, placements="S(0)")).square().sum()
    with Order() as seen:
        try:
            with loom.communication("forbid"):
                loss.backward()
            raise AssertionError("backward communicated")
        except loom.CommunicationError:
            pass
    return seen


def small_buckets(elements: int) -> tuple[float, int]:
    """Many small gradients in buckets of so many elements: the difference from dense, and how many buckets."""
    deferred.BUCKET = elements
    join()
    mesh = loom.open_mesh((HERE.count,), axes=("dp",))
    torch.manual_seed(1)
    dense = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8)))
    torch.manual_seed(1)
    ours = _on_mesh(torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(8))), mesh)
    x = torch.randn(2 * HERE.count, 16)
    with Order() as seen:
        ours(loom.distribute(x, mesh, "S(0)")).square().mean().backward()
    dense(x).square().mean().backward()
    return _difference(ours, dense), len([each for each in seen if each.startswith("sum")])


def overlap(folder: str) -> tuple[list[float], bool]:
    """Rank 0 begins two collectives before rank 1 begins any: their values, and whether they came by themselves."""
    join()
    mesh = loom.open_mesh((HERE.count,), axes=("dp",))
    x = loom.from_local(torch.full((1 << 16,), float(HERE.rank + 1)), mesh, "P(sum)")
    y = loom.from_local(torch.full((1 << 16,), 3.0), mesh, "S(0)")
    loom.collectives.all_reduce(x)  # the groups are made
    note = Path(folder) / "begun"
    if HERE.rank == 1:
        _wait_for(note.exists)
    first = loom.collectives.all_reduce_async(x)
    second = loom.collectives.all_gather_async(y, 0)
    if HERE.rank == 0:
        note.touch()
    between = loom.collectives.all_reduce(x)  # one that is waited for comes after those that have begun
    _wait_for(lambda: first.done() and second.done())
    found = [float(each.to_torch().max()) for each in (between, first.wait(), second.wait())]
    return found, first.done()


def _wait_for(is_there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def late() -> str:
    """An error of a collective that was begun comes out where it is waited for, with its line."""
    join(timeout=3)
    mesh = loom.open_mesh((HERE.count,), axes=("dp",))
    x = loom.from_local(torch.ones(1 << 16), mesh, "P(sum)")
    loom.collectives.all_reduce(x)
    if HERE.rank == 1:
        time.sleep(30)
        return ""
    handle = loom.collectives.all_reduce_async(x)
    try:
        handle.wait()
    except loom.PeerLostError as error:
        print(str(error))
        raise
    return "no error"
