"""What a hostile user does on real processes: late hooks, second derivatives, copies, children, one rank alone."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
import ranks
from meshloom.comms import WORLD
from meshloom.errors import GradientError
from meshloom.processes.health import Watch

Mesh = Any
TIES = [[1.0, 2.0], [3.0, 1.0], [3.0, 2.0], [0.0, 2.0], [3.0, 2.0]]


def _same(ours: Any, dense: torch.Tensor, what: str = "") -> None:
    torch.testing.assert_close(
        ours.to_torch(), dense, rtol=1e-5, atol=1e-5, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def _leaf(dense: torch.Tensor, mesh: Mesh, placements: str) -> Any:
    return loom.distribute(dense, mesh, placements).requires_grad_()


def _second(scalar: Callable[..., Any], leaves: list[Any]) -> list[Any]:
    """The gradient of the squared gradient."""
    first = torch.autograd.grad(scalar(*leaves), leaves, create_graph=True)
    sum((each**2).sum() for each in first).backward()
    return [leaf.grad for leaf in leaves]


def large_gradients(mesh: Mesh) -> None:
    """Gradients that travel alone, beside ones that travel together."""
    shapes = [(600, 600), (600, 500), (500,)]
    dense = [torch.randn(shape).div(25).requires_grad_() for shape in shapes]
    held = [loom.Parameter(each.detach(), mesh) for each in dense]
    x = torch.randn(7, 600)
    for (a, b, c), given in ((dense, x), (held, loom.distribute(x, mesh, "S(0), R"))):
        (given @ a @ b + c).tanh().sum().backward()
    for ours, theirs in zip(held, dense, strict=True):
        _same(ours.grad, theirs.grad)


def kept_graph(mesh: Mesh) -> None:
    """backward(create_graph=True), of several leaves."""
    given = [torch.randn(7, 4), torch.randn(4, 3), torch.randn(3)]
    found = []
    for leaves in ([each.clone().requires_grad_() for each in given], [_leaf(each, mesh, "R, R") for each in given]):
        x = leaves[0] if isinstance(leaves[0], torch.Tensor) else leaves[0].redistribute("S(0), R")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")  # torch's, of memory
            (x @ leaves[1] + leaves[2]).tanh().sum().backward(create_graph=True)
        total = sum((leaf.grad**2).sum() for leaf in leaves)
        found.append(torch.autograd.grad(total, leaves))
    for ours, theirs in zip(found[1], found[0], strict=True):
        _same(ours, theirs)


def hooks(mesh: Mesh) -> None:
    x = torch.randn(7, 4)
    held, dense = (
        make()
        for make in (lambda: loom.Parameter(torch.ones(4, 3), mesh), lambda: torch.nn.Parameter(torch.ones(4, 3)))
    )
    ours = loom.distribute(x, mesh, "S(0), R")
    seen: list[Any] = []
    for leaf, given in ((held, ours), (dense, x)):
        leaf.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad * 1))
        (given @ leaf).sum().backward()
        (given @ leaf).sum().backward()
    assert len(seen) == 4
    for mine, theirs in zip(seen[:2], seen[2:], strict=True):
        _same(mine, theirs)
    late = loom.Parameter(torch.ones(4, 3), mesh)
    loss = (ours @ late).sum()
    handle = late.register_hook(lambda g: g * 2)
    with pytest.raises(GradientError, match=r"a hook of a leaf of shape \[4, 3\] came after the leaf was used"):
        loss.backward()
    handle.remove()
    (ours @ late).sum().backward()
    _same(late.grad, x.sum(0).unsqueeze(1).expand(4, 3))


def second_derivatives(mesh: Mesh) -> None:
    ops: dict[str, Callable[[Any], Any]] = {
        "prod": lambda x: x.prod(0),
        "amax": lambda x: x.amax(0),
        "max": lambda x: x.max(0).values,
        "min": lambda x: x.amin(),
        "log_softmax": lambda x: x.log_softmax(0).sum(1)[:2],
    }
    for placements in ("S(0), R", "S(1), S(0)"):
        for name, op in ops.items():
            given = [torch.tensor(TIES), torch.tensor([[1.0, 2.0], [3.0, 4.0]])]
            theirs = _second(lambda x, w, op=op: ((op(x) * w) ** 2).sum(), [each.requires_grad_() for each in given])
            ours = _second(
                lambda x, w, op=op: ((op(x) * w) ** 2).sum(), [_leaf(each.detach(), mesh, placements) for each in given]
            )
            for mine, expected in zip(ours, theirs, strict=True):
                _same(mine, expected, f"{name} {placements}")
    query = _leaf(torch.randn(1, 2, 6, 4), mesh, "S(2), R")
    out = F.scaled_dot_product_attention(query, query, query)
    with pytest.raises(GradientError, match="no second derivative"):
        torch.autograd.grad(out.sum(), query, create_graph=True)


def nothing_counted(mesh: Mesh) -> None:
    """A mean over targets of which all are ignored: nan, and a gradient of zero."""
    target = torch.full((7,), -100)
    for placements in ("S(0), R", "S(1), R"):
        x = _leaf(torch.randn(7, 5), mesh, placements)
        loss = F.cross_entropy(x, loom.distribute(target, mesh, {}))
        loss.backward()
        assert loss.isnan().item()
        _same(x.grad, torch.zeros(7, 5), placements)


def copies(mesh: Mesh) -> None:
    """A copy of a parameter has no gradient, nor what one is still to be summed from."""
    held = loom.Parameter(torch.ones(4, 3), mesh)
    x = loom.randn(7, 4, mesh=mesh, placements="S(0), R")
    (x @ held).sum().backward()
    copied = copy.deepcopy(held)
    assert copied.grad is None
    (x @ copied).sum().backward()
    _same(copied.grad, held.grad.to_torch())


def one_alone(mesh: Mesh) -> None:
    """Only the first rank records and explains, also what needs groups that nobody has made yet."""
    first = loom.process().rank == 0
    x = loom.randn(8, 6, mesh=mesh, placements="S(0), R")
    plain = torch.ones(6, 2)
    if first:
        told = loom.explain(lambda: x.redistribute("R, S(1)") @ plain)
        assert "all_to_all" in str(told) or "all_gather" in str(told)
    with loom.record() if first else contextlib.nullcontext():
        total = x.sum().item()
    assert total == pytest.approx(x.to_torch().sum().item(), abs=1e-4)
    with contextlib.suppress(KeyError), loom.record():
        raise KeyError
    assert x.redistribute("R, S(1)").sum().item() == pytest.approx(total, abs=1e-4)


def recorded(mesh: Mesh) -> None:
    """A gradient is the same whether somebody watches or not, of a leaf and of what was made from one."""
    x, given = torch.randn(8, 6), torch.randn(3, 6, 6)
    weight = given.clone().requires_grad_()
    (torch.tanh(x @ weight[1]) @ (weight[2] * 2)).sum().backward()
    for placements in ("R, R", "S(0), R", "R, S(1)"):
        for watched in (contextlib.nullcontext, loom.record):
            held = loom.Parameter(given, mesh, placements)
            with watched():
                ours = loom.distribute(x, mesh, "S(0), R")
                (torch.tanh(ours @ held[1]) @ (held[2] * 2)).sum().backward()
                _same(held.grad, weight.grad, f"{placements} {watched.__name__}")


def losses_in_autocast(mesh: Mesh) -> None:
    """Autocast computes losses in float32, whoever holds which part of them."""
    x, target = torch.randn(8, 6).bfloat16(), torch.randint(6, (8,))
    losses: dict[str, Callable[[Any, Any], Any]] = {
        "cross_entropy": F.cross_entropy,
        "nll_loss": lambda x, target: F.nll_loss(x, target),
        "kl_div": lambda x, target: F.kl_div(x, x.softmax(1), reduction="batchmean"),
        "mse_loss": lambda x, target: F.mse_loss(x, x * 2),
    }
    for placements in ("S(0), R", "S(1), S(0)"):
        ours = loom.distribute(x, mesh, placements), loom.distribute(target, mesh, {})
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for name, loss in losses.items():
                found = loss(*ours)
                assert found.topology.dtype == "f32", name
                _same(found, loss(x, target), f"{name} {placements}")


def children(mesh: Mesh) -> None:
    """A child of a rank is no rank: it ends by itself, at once, and nobody hears of it."""
    assert _ended(lambda: sys.exit(3)) == 3
    assert _ended(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM
    assert loom.ones(8, mesh=mesh).sum().item() == 8


def _ended(act: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            act()
            time.sleep(60)
        except SystemExit as error:
            is_ours = isinstance(getattr(sys.excepthook, "__self__", None), Watch)
            os._exit(98 if is_ours else int(str(error.code)))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _scoped_programs(mesh: Mesh) -> dict[str, list[Callable[[], Any]]]:
    """Programs as phases: each phase runs in a scope of its own."""
    rows, weight, leaf = torch.randn(7, 4), torch.randn(4, 6), loom.Parameter(torch.randn(4, 6), mesh)
    x, w = loom.distribute(rows, mesh, "S(0), R"), _leaf(weight, mesh, "S(0), R")
    deep = _leaf(rows, mesh, "R, S(1)")
    optimizer = torch.optim.AdamW([leaf], lr=0.1, foreach=False)
    held: dict[str, Any] = {}

    def keep(name: str, value: Any) -> None:
        held[name] = value

    return {
        "a layer and its step": [
            lambda: keep("loss", (x @ leaf).square().sum()),
            lambda: held["loss"].backward(),
            lambda: optimizer.step(),
            lambda: leaf.grad.norm().item(),
        ],
        "a weight that is gathered": [lambda: keep("y", (x @ w).tanh().sum()), lambda: held["y"].backward()],
        "what was made of a leaf": [
            lambda: keep("y", (x @ (leaf * 2)).sum()),
            lambda: keep("g", torch.autograd.grad(held["y"], [leaf])),
        ],
        "redistribution": [
            lambda: keep("y", deep.redistribute("S(0), R")),
            lambda: held["y"].backward(torch.ones(7, 4)),
        ],
        "a dense loss": [lambda: keep("y", (x @ leaf).to_torch().sum()), lambda: held["y"].backward()],
        "a function without a rule": [
            lambda: keep("y", torch.renorm(x @ leaf, 2, 0, 1.0).sum()),
            lambda: held["y"].backward(),
        ],
        "softmax of a split dim": [
            lambda: keep("y", torch.softmax(w * 1, 0).square().sum()),
            lambda: held["y"].backward(),
        ],
        "explicit collectives": [
            lambda: keep("y", loom.collectives.all_reduce(w * 1, axis=mesh.axes[0])),
            lambda: held["y"].sum().backward(),
            lambda: keep("y", loom.collectives.all_gather(w * 1, 0, axis=mesh.axes[0])),
            lambda: held["y"].sum().backward(),
            lambda: keep("y", loom.collectives.reduce_scatter((leaf * 1), 0, axis=mesh.axes[0])),
            lambda: held["y"].sum().backward(),
        ],
        "values": [lambda: x.tolist(), lambda: bool((x == x).all()), lambda: x[3, 2].item(), lambda: repr(x)],
        "in place": [lambda: x.clone().add_(deep.detach()), lambda: x.clone().__setitem__(2, w.detach()[0, :4])],
        "accumulated": [lambda: _accumulated(x, leaf), lambda: loom.synchronize([leaf])],
    }


def _accumulated(x: Any, leaf: Any) -> None:
    with loom.accumulate():
        (x @ leaf).sum().backward()


def scopes(mesh: Mesh) -> None:
    """Whatever goes between processes in a scope is recorded there, and forbidden there before it goes."""
    names = [*_scoped_programs(mesh)]
    seen = 0
    for name in names:
        phases = len(_scoped_programs(mesh)[name])
        for stop in range(phases):
            for is_forbidden in (False, True):
                torch.manual_seed(0)
                program = _scoped_programs(mesh)[name]
                for phase in program[:stop]:
                    phase()
                before = WORLD.watch.number
                level = "forbid" if is_forbidden else "allow"
                with loom.record() as log, contextlib.suppress(loom.CommunicationError), loom.communication(level):
                    program[stop]()
                crossed = WORLD.watch.number - before
                assert not (is_forbidden and crossed), f"{name}, phase {stop}: {crossed} collectives were not forbidden"
                assert is_forbidden or not crossed or len(log), f"{name}, phase {stop}: {crossed} were not recorded"
                seen += crossed
                loom.synchronize()
    assert seen, "nothing crossed"


CHECKS = (
    one_alone, recorded, losses_in_autocast, large_gradients, kept_graph, hooks, second_derivatives, nothing_counted,
    copies, scopes, children,
)  # fmt: skip


def all_checks() -> int:
    """Every check on one start; which process this is, is known before a mesh is open."""
    before = loom.process()
    assert (before.rank, before.count) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    mesh = loom.open_mesh((2, 2), axes=("a", "b"), timeout=60)
    assert loom.process() == before
    for check in CHECKS:
        torch.manual_seed(0)
        check(mesh)
    return len(CHECKS)


@pytest.mark.parametrize("count", [2, 4])
def test_what_a_hostile_user_does_on_processes_equals_dense_or_is_refused(count: int) -> None:
    assert ranks.run(count, "test_process_hostile:all_checks") == [len(CHECKS)] * count
