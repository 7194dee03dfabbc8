"""What ranks run in `test_checklist_processes.py`: each row on real processes, compared with one dense computation.

`rows` calls them in turn and returns what went wrong by row, so that one start of the processes serves all rows.
"""

from __future__ import annotations

import itertools
import os
import time
import traceback
from collections.abc import Callable

import numpy
import torch

import meshloom as loom
from meshloom import Partial, Replicate

ROWS: dict[str, Callable[[], None]] = {}


def row(function: Callable[[], None]) -> Callable[[], None]:
    """A row of the list, by the name of its function."""
    ROWS[function.__name__] = function
    return function


def rows() -> dict[str, str]:
    """What failed on this rank, by row."""
    failed = {}
    for name, function in ROWS.items():
        try:
            function()
        except Exception:
            failed[name] = traceback.format_exc()
    return failed


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def workers() -> loom.Mesh:
    return loom.open_mesh((4,), axes=("w",))


def check_split(mesh: loom.Mesh) -> None:
    """The processes share the mesh: none has all of it."""
    assert loom.process().count > 1 and numpy.prod(mesh.processes) == loom.process().count, mesh


@row
def row_23_one_script_on_meshes_of_every_size() -> None:
    x = values(40, 6)
    count = int(os.environ["WORLD_SIZE"])
    found = []
    for shape in ((1, count), (count, 5), (10 * count, 20)):
        mesh = loom.open_mesh(shape, axes=("a", "b"))
        check_split(mesh)
        found.append((loom.distribute(x, mesh, "S(0), S(1)") @ values(6, 3, seed=1)).tanh().sum(0).to_torch())
    for each in found:
        torch.testing.assert_close(each, (x @ values(6, 3, seed=1)).tanh().sum(0), rtol=1e-5, atol=1e-5)


@row
def row_60_processes_form_one_1x4_mesh_and_reduce_over_it() -> None:
    mesh = loom.open_mesh((1, 4), axes=("a", "b"))
    check_split(mesh)
    parts = {(0, b): values(3, 2, seed=b) for b in range(4)}
    mine = {place: part for place, part in parts.items() if mesh.is_here(place)}
    assert 0 < len(mine) < 4
    total = loom.collectives.all_reduce(loom.from_local(mine, mesh, "R, P(sum)"), axis="b")
    assert all(placement == Replicate() for placement in total.placements)
    torch.testing.assert_close(total.to_torch(), torch.stack(list(parts.values())).sum(0))


def network(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return values(6, 16, seed=seed) / 3, values(16, 2, seed=seed + 1) / 4


def dense_training(steps: int) -> tuple[list[float], list[torch.Tensor]]:
    """One card, torch's autograd, the whole batch."""
    weights = [w.requires_grad_() for w in network(3)]
    x, target, losses = values(32, 6), values(32, 2, seed=9), []
    for _ in range(steps):
        loss = ((x @ weights[0]).relu() @ weights[1] - target).square().mean()
        gradients = torch.autograd.grad(loss, weights)
        weights = [(w - 0.2 * g).detach().requires_grad_() for w, g in zip(weights, gradients, strict=True)]
        losses.append(loss.item())
    return losses, [w.detach() for w in weights]


def host_training(steps: int) -> tuple[list[float], list[loom.Tensor]]:
    """Four cards, a quarter of the batch each; their gradients are reduced on the host, nothing else moves."""
    mesh = workers()
    check_split(mesh)
    x, target = (loom.distribute(each, mesh, "S(0)") for each in (values(32, 6), values(32, 2, seed=9)))
    up, down = (loom.distribute(w, mesh, "R") for w in network(3))
    losses = []
    for _ in range(steps):
        with loom.communication("forbid"):
            hidden = x @ up
            active = hidden.relu()
            wrong = active @ down - target
            error = wrong * (2 / 64)
            parts = (
                loom.sum(wrong.square(), output=Partial("sum")),
                loom.matmul(x.mT, (error @ down.mT) * (hidden > 0), output=Partial("sum")),
                loom.matmul(active.mT, error, output=Partial("sum")),
            )
        loss, *gradients = (loom.collectives.all_reduce(part, mode="host") for part in parts)
        up, down = (w - 0.2 * g for w, g in zip((up, down), gradients, strict=True))
        losses.append(loss.item() / 64)
    return losses, [up, down]


@row
def row_82_data_parallel_with_gradients_reduced_on_the_host_is_training_on_one_card() -> None:
    losses, weights = host_training(5)
    expected, dense = dense_training(5)
    numpy.testing.assert_allclose(losses, expected, rtol=1e-5)
    for found, w in zip(weights, dense, strict=True):
        torch.testing.assert_close(found.to_torch(), w, rtol=1e-5, atol=1e-6)


@row
def row_85_an_mlp_trains_with_host_collectives_only() -> None:
    losses, _ = host_training(25)
    assert losses[-1] < 0.7 * losses[0], losses


@row
def row_102_a_column_then_row_parallel_mlp_on_1x8_is_torchs() -> None:
    mesh = loom.open_mesh((1, 8), axes=("dp", "tp"))
    check_split(mesh)
    x, up, down = values(16, 12), values(12, 24, seed=1).requires_grad_(), values(24, 5, seed=2).requires_grad_()
    expected = torch.nn.functional.gelu(x @ up) @ down
    expected.square().sum().backward()
    column = loom.distribute(up.detach(), mesh, "R, S(1)").requires_grad_()
    rowwise = loom.distribute(down.detach(), mesh, "R, S(0)").requires_grad_()
    found = loom.gelu(loom.distribute(x, mesh, "R, R") @ column) @ rowwise
    found.square().sum().backward()
    torch.testing.assert_close(found.to_torch(), expected.detach(), rtol=1e-4, atol=1e-4)
    for tensor, dense in ((column, up), (rowwise, down)):
        assert tensor.grad.placements == tensor.placements
        torch.testing.assert_close(tensor.grad.to_torch(), dense.grad, rtol=1e-4, atol=1e-3)


@row
def row_148_mean_is_weighted_by_what_each_worker_holds() -> None:
    for length in (8, 10, 3, 1):
        dense = values(length, 5)
        x = loom.distribute(dense, workers(), "S(0)")
        torch.testing.assert_close(x.mean().to_torch(), dense.mean())
        torch.testing.assert_close(x.mean(0).to_torch(), dense.mean(0))


@row
def row_149_any_shard_axis_any_reduction_axis_and_keepdims_equal_numpy() -> None:
    dense, mesh = values(5, 6, 7), workers()
    for placement, op in itertools.product(("S(0)", "S(1)", "S(2)"), ("sum", "mean", "amax", "amin")):
        x = loom.distribute(dense, mesh, placement)
        for axis, keep in itertools.product((0, 1, 2, (0, 2), (0, 1, 2)), (False, True)):
            found = getattr(x, op)(dim=axis, keepdim=keep).to_torch().numpy()
            expected = getattr(numpy, op)(dense.numpy(), axis=axis, keepdims=keep)
            assert found.shape == expected.shape
            numpy.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@row
def row_150_every_worker_reads_the_result_without_a_transfer() -> None:
    mesh, dense = workers(), values(128, 64)
    total = loom.distribute(dense, mesh, "S(0)").sum(0)
    with loom.communication("forbid"):
        held = [total.shard_at((worker,)) for worker in range(4) if mesh.is_here((worker,))]
        found = total.to_torch()
    assert held and all(torch.equal(each, found) for each in held)
    torch.testing.assert_close(found, dense.sum(0), rtol=1e-4, atol=1e-4)


@row
def row_155_data_numpy_does_not_depend_on_the_order_of_arrival() -> None:
    mesh = workers()
    parts = {(w,): values(3, 2, seed=w) for w in range(4)}
    expected = torch.cat(list(parts.values())).numpy()
    for order in itertools.permutations(parts):
        mine = {place: parts[place] for place in order if mesh.is_here(place)}
        assert (loom.from_local(mine, mesh, "S(0)").data.numpy() == expected).all()


def matmul_spans(rounds: int, in_turn: bool) -> list[tuple[float, float]]:
    """When this rank multiplied its rows, on the clock that processes of one host share; `in_turn` plants the fault."""
    mesh = loom.open_mesh((2,), axes=("w",))
    check_split(mesh)
    a = loom.distribute(values(2048, 1024), mesh, "S(0)")
    b = loom.distribute(values(1024, 1024, seed=1), mesh, "R")
    waits, lets_go = (in_turn and loom.process().rank == rank for rank in (1, 0))
    spans = []
    for _ in range(rounds):
        torch.distributed.barrier()
        if waits:
            torch.distributed.barrier()
        start = time.monotonic()
        with loom.communication("forbid"):
            a @ b
        spans.append((start, time.monotonic()))
        if lets_go:
            torch.distributed.barrier()
    return spans
