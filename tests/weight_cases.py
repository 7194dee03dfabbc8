"""What ranks run in `test_weights.py`: models whose weights are sharded over processes and gathered for use.

All of it is compared with dense.
The batch is large against the weights, so that calls gather the weights; every case checks that they did.
"""

from __future__ import annotations

import copy
import gc
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import meshloom as loom
from meshloom import Mesh
from meshloom.comms import scatters, weights, wire
from meshloom.comms.scatters import SCATTERS
from meshloom.comms.weights import ORDER
from meshloom.mesh import HERE
from meshloom.processes import join, split_kernel

ROWS, WIDTH, HIDDEN, LETTERS, DEPTH = 1536, 12, 20, 30, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks that may be skipped or recomputed, and a head that may share the embedding's weight."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, LETTERS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.skipped: tuple[int, ...] = ()
        self.recomputed: bool | None = None  # with or without reentrance
        self.is_turned = False  # the head multiplies by a view of its weight

    def forward(self, letters: Any) -> Any:
        x = self.embedding(letters)
        for number, block in enumerate(self.blocks):
            if number in self.skipped:
                continue
            again = self.recomputed
            x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)
        return x @ self.head.weight.t() if self.is_turned else self.head(x)


def mesh_of(shape: tuple[int, ...], grid: tuple[int, ...], axes: tuple[str, ...] = ("fsdp",)) -> Mesh:
    join()
    return loom.open_mesh(shape, axes=axes, processes=grid)


def one(devices: int = 1) -> Mesh:
    """All processes along one axis, with some devices each."""
    join()
    return mesh_of((devices * HERE.count,), (HERE.count,))


def put(module: nn.Module, mesh: Mesh, placements: Any = "S(0)") -> nn.Module:
    """The parameters on a mesh; what is tied stays tied."""
    known: dict[int, Any] = {}
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            placed = placements(name, parameter) if callable(placements) else placements
            if id(parameter) not in known:
                known[id(parameter)] = loom.Parameter(parameter.detach(), mesh, placed, parameter.requires_grad)
            setattr(each, name, known[id(parameter)])
    return module


Batch = tuple[Any, Any]


def batch(mesh: Mesh | None = None, seed: int = 0, placements: Any = None) -> Batch:
    drawn = torch.Generator().manual_seed(seed)
    dense = tuple(torch.randint(LETTERS, (ROWS, 2), generator=drawn) for _ in range(2))
    if mesh is None:
        return dense
    return tuple(loom.distribute(each, mesh, placements or {mesh.axes[0]: loom.Shard(0)}) for each in dense)


def loss_of(model: nn.Module, data: Batch) -> Any:
    return F.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())


def pair(mesh: Mesh, placements: Any = "S(0)", tied: bool = False) -> tuple[Net, Net]:
    torch.manual_seed(1)
    dense = Net(tied)
    return put(copy.deepcopy(dense), mesh, placements), dense


def check_equal(ours: nn.Module, dense: nn.Module, what: str = "") -> int:
    """Gradients and values of all parameters are dense's; how many gradients there were."""
    count = 0
    for (name, p), q in zip(ours.named_parameters(), dense.parameters(), strict=True):
        close(p.detach().to_torch(), q.detach(), f"{what} {name}")
        assert (p.grad is None) == (q.grad is None), f"{what} gradient of {name}"
        if p.grad is not None:
            assert p.grad.placements == p.placements
            close(p.grad.to_torch(), q.grad, f"{what} gradient of {name}")
            count += 1
    return count


def close(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def both(ours: Net, dense: Net, mesh: Mesh, act: Callable[[Net, Batch], Any], seed: int = 0, **how: Any) -> None:
    """The same with both models."""
    found, expected = act(ours, batch(mesh, seed, **how)), act(dense, batch(None, seed))
    if isinstance(expected, torch.Tensor):
        close(found.detach().to_torch(), expected.detach(), "result")


def step(model: Net, data: Batch) -> Any:
    for p in model.parameters():
        p.grad = None
    loss = loss_of(model, data)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad
    return loss


@contextmanager
def sent() -> Iterator[Counter[str]]:
    """The collectives that begin inside."""
    found: Counter[str] = Counter()
    begin = wire.begin

    def count(kind: str, *rest: Any) -> Any:
        found[kind] += 1
        return begin(kind, *rest)

    with patch.object(wire, "begin", count):
        yield found


# meshes and placements


def _by_name(name: str, parameter: torch.Tensor) -> str:
    return "S(0), S(1)" if parameter.dim() == 2 else "S(0), R"


def layouts() -> dict[str, int]:
    """Steps on several meshes and placements; how many weights each gathered in a forward pass."""
    join()
    many, half = HERE.count, max(HERE.count // 2, 1)
    rows = {"dp": loom.Shard(0)}
    cases: dict[str, tuple[Mesh, Any, Any]] = {
        "one axis": (one(), "S(0)", None),
        "two devices each": (one(2), "S(0)", None),
        "odd": (one(3), "S(0)", None),
        "columns": (one(), lambda _, p: "S(1)" if p.dim() == 2 else "S(0)", None),
        "fsdp x tp": (mesh_of((many, 2), (many, 1), ("dp", "tp")), _by_name, rows),
        "both axes": (mesh_of((2, half), (2, half), ("dp", "tp")), "S(0), S(0)", "S(0), S(0)"),
        "hsdp": (mesh_of((half, 2), (half, 2), ("dp", "fsdp")), "R, S(0)", "S(0), S(0)"),
        "hsdp inside": (mesh_of((2, 2), (2, 1) if many == 2 else (2, 2), ("dp", "fsdp")), "S(0), R", "S(0), S(0)"),
    }
    found = {}
    for name, (mesh, placements, rows) in cases.items():
        ours, dense = pair(mesh, placements)
        before = len(TAKEN)
        with taken():
            for seed in range(3):
                both(ours, dense, mesh, step, seed, placements=rows)
                assert check_equal(ours, dense, f"{name} step {seed}") == len(list(dense.parameters()))
        found[name] = len(TAKEN) - before
    return found


TAKEN: list[Any] = []


@contextmanager
def taken() -> Iterator[None]:
    """Notes the weights that are gathered inside."""
    take = weights.Order.take

    def note(self: Any, weight: Any, leaf: torch.Tensor) -> torch.Tensor:
        TAKEN.append(weight)
        return take(self, weight, leaf)

    with patch.object(weights.Order, "take", note):
        yield


# memory


@contextmanager
def watched_storages() -> Iterator[list[StorageWeakRef]]:
    """The storages of all that is gathered inside, and of what is made of it for a call."""
    found: list[StorageWeakRef] = []
    wait, gather = weights.Flight.wait, wire.all_gather
    prepared = split_kernel.SplitKernel.prepared

    def note(data: torch.Tensor) -> torch.Tensor:
        found.append(StorageWeakRef(data.untyped_storage()))
        return data

    def prepare(self: Any, datas: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        ready = prepared(self, datas)
        for i in self.weights:
            if weights.is_held(datas[i]):
                note(ready[i])
        return ready

    with (
        patch.object(weights.Flight, "wait", lambda self: note(wait(self))),
        patch.object(wire, "all_gather", lambda *args: note(gather(*args))),
        patch.object(split_kernel.SplitKernel, "prepared", prepare),
    ):
        yield found


def living(found: list[StorageWeakRef]) -> int:
    """How many storages live; Gloo's thread lets go of an array a moment after whoever waited for it."""
    for _ in range(200):
        if all(each.expired() for each in found):
            return 0
        time.sleep(0.01)
    return sum(not each.expired() for each in found)


def nothing_kept(how: str) -> tuple[int, int, int]:
    """How many gathered storages there were in a forward pass, how many live after it, and how many after backward."""
    mesh = one()
    ours, dense = pair(mesh)
    if how == "frozen":
        for model in (ours, dense):
            for name, p in model.named_parameters():
                p.requires_grad_("norm" in name)
    ours.is_turned = dense.is_turned = how == "turned"
    if how == "recomputed":
        ours.recomputed = dense.recomputed = False
    for seed in range(3):
        both(ours, dense, mesh, step, seed)
    data = batch(mesh)
    loss_of(dense, batch()).backward()
    gc.disable()
    with watched_storages() as found:
        keeps = (lambda: False) if how == "kept" else weights.keeps_by_itself
        with patch.object(weights, "keeps_by_itself", keeps):
            loss = loss_of(ours, data)
        in_all, after_forward = len(found), living(found)
        loss.backward()
    after_backward = living(found)
    gc.enable()
    return in_all, after_forward, after_backward


def kept_under_autocast() -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The shapes of what calls that gather keep under autocast, and those of the weights, both ways round."""
    mesh = one()
    ours, _ = pair(mesh)
    shapes: set[tuple[int, ...]] = set()
    note = weights.Kept.__init__

    def keep(self: Any, saved: torch.Tensor) -> None:
        shapes.add(tuple(saved.shape))
        note(self, saved)

    with patch.object(weights.Kept, "__init__", keep), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(ours, batch(mesh))
    loss.backward()
    held = {tuple(p.shape) for p in ours.parameters() if p.dim() == 2}
    return shapes, held | {shape[::-1] for shape in held}


def evaluation() -> int:
    """No storage of a gathered weight lives after a forward pass without gradients; the values are dense's."""
    mesh = one()
    ours, dense = pair(mesh)
    with torch.no_grad(), watched_storages() as found:
        for seed in range(4):
            both(ours, dense, mesh, lambda model, data: model(data[0]), seed)
            assert found and living(found) == 0, f"pass {seed}"
    return len(found)


# one thing each


def _several_forwards(ours: Net, dense: Net, mesh: Mesh) -> None:
    both(ours, dense, mesh, lambda model, data: (loss_of(model, data) + loss_of(model, data[::-1])).backward())


def _retained(ours: Net, dense: Net, mesh: Mesh) -> None:
    def twice(model: Net, data: Batch) -> None:
        loss = loss_of(model, data)
        loss.backward(retain_graph=True)
        loss.backward()

    both(ours, dense, mesh, twice)


def _accumulated(ours: Net, dense: Net, mesh: Mesh) -> None:
    for seed in range(3):
        both(ours, dense, mesh, lambda model, data: loss_of(model, data).backward(), seed)


def _deferred(ours: Net, dense: Net, mesh: Mesh) -> None:
    with loom.accumulate():
        both(ours, dense, mesh, lambda model, data: loss_of(model, data).backward(), 0)
    both(ours, dense, mesh, lambda model, data: loss_of(model, data).backward(), 1)


def _asked(ours: Net, dense: Net, mesh: Mesh) -> None:
    def ask(model: Net, data: Batch) -> None:
        ps = list(model.parameters())
        for p, gradient in zip(ps, torch.autograd.grad(loss_of(model, data), ps), strict=True):
            assert p.grad is None
            p.grad = gradient

    both(ours, dense, mesh, ask)


def _some_inputs(ours: Net, dense: Net, mesh: Mesh) -> None:
    both(ours, dense, mesh, lambda m, data: loss_of(m, data).backward(inputs=[m.head.weight, m.blocks[1].up.weight]))


def _second_order(ours: Net, dense: Net, mesh: Mesh) -> None:
    def penalty(model: Net, data: Batch) -> Any:
        ps = list(model.parameters())
        gradients = torch.autograd.grad(loss_of(model, data), ps, create_graph=True)
        size = sum(each.square().sum() for each in gradients)
        size.backward()
        return size

    both(ours, dense, mesh, penalty)


def _created_graph(ours: Net, dense: Net, mesh: Mesh) -> None:
    def twice(model: Net, data: Batch) -> None:
        loss_of(model, data).backward(create_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        sum(each.square().sum() for each in first).backward()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True will create a reference cycle")
        both(ours, dense, mesh, twice)


def _turned(ours: Net, dense: Net, mesh: Mesh) -> None:
    ours.is_turned = dense.is_turned = True
    for seed in range(3):
        both(ours, dense, mesh, step, seed)
    _written_between(ours, dense, mesh, "head")


def _recomputed(ours: Net, dense: Net, mesh: Mesh) -> None:
    for again in (False, True, False):
        ours.recomputed = dense.recomputed = again
        both(ours, dense, mesh, step)


def _skipping(ours: Net, dense: Net, mesh: Mesh) -> None:
    for seed, skipped in enumerate(((), (), (1,), (), (0, 2), (1,), (1,), ())):
        ours.skipped = dense.skipped = skipped
        both(ours, dense, mesh, step, seed)
        check_equal(ours, dense, f"{skipped}")


def _hooked(ours: Net, dense: Net, mesh: Mesh) -> None:
    seen: list[list[Any]] = [[], []]
    for model, notes in zip((ours, dense), seen, strict=True):
        model.head.weight.register_hook(lambda g, notes=notes: notes.append(g.sum()) or g * 2)
        model.blocks[0].up.weight.register_post_accumulate_grad_hook(
            lambda p, notes=notes: notes.append(p.grad.square().sum())
        )
    both(ours, dense, mesh, step)
    assert len(seen[0]) == len(seen[1]) == 2
    for found, expected in zip(*seen, strict=True):
        close(found.detach().to_torch(), expected.detach(), "what a hook saw")


def _frozen(ours: Net, dense: Net, mesh: Mesh) -> None:
    for model in (ours, dense):
        for name, p in model.named_parameters():
            p.requires_grad_("up" in name)
    for seed in range(3):
        both(ours, dense, mesh, step, seed)


def _written_between(ours: Net, dense: Net, mesh: Mesh, name: str = "blocks.1.down") -> None:
    for model, data in ((ours, batch(mesh)), (dense, batch())):
        loss = loss_of(model, data)
        with torch.no_grad():
            model.get_submodule(name).weight.mul_(1.0)
        try:
            loss.backward()
        except RuntimeError as error:
            text = "one of the variables needed for gradient computation has been modified by an inplace operation"
            assert str(error).startswith(text), error
            assert "is at version" in str(error) and "expected version" in str(error), error
        else:
            raise AssertionError("a weight was written to between forward and backward, and nobody said so")
    both(ours, dense, mesh, step)


def _activation_written(ours: Net, dense: Net, mesh: Mesh) -> None:
    for model, data in ((ours, batch(mesh)), (dense, batch())):
        x = model.embedding(data[0])
        y = model.head(x)
        with torch.no_grad():
            x.mul_(1.0)
        try:
            y.sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
        else:
            raise AssertionError("an operand was written to between forward and backward, and nobody said so")
    both(ours, dense, mesh, step)


class _Broken(RuntimeError):
    pass


def _broken(ours: Net, dense: Net, mesh: Mesh) -> None:
    def fail(*_: Any) -> None:
        raise _Broken

    for place in ("forward", "backward", "forward"):
        module = ours.blocks[1]
        if place == "forward":
            handle = module.register_forward_hook(fail)
        else:
            handle = module.register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
        try:
            loss_of(ours, batch(mesh)).backward()
        except _Broken:
            handle.remove()
        else:
            raise AssertionError("the hook did not run")
        both(ours, dense, mesh, step)
        check_equal(ours, dense, f"after an error in {place}")


def _evaluated_between(ours: Net, dense: Net, mesh: Mesh) -> None:
    for seed in range(3):
        both(ours, dense, mesh, step, seed)
        with torch.no_grad():
            both(ours, dense, mesh, lambda model, data: model(data[0]), seed)
            both(ours, dense, mesh, lambda model, data: model.blocks[2](model.embedding(data[0])), seed)


def _autocast(ours: Net, dense: Net, mesh: Mesh) -> None:
    def cast(model: Net, data: Batch) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, data)
        loss.backward()

    both(ours, dense, mesh, cast)
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        close(p.grad.to_torch(), q.grad, "gradient under autocast", 2e-2)
        p.grad = q.grad = None
    both(ours, dense, mesh, step)


def _assigned(ours: Net, dense: Net, mesh: Mesh) -> None:
    """Memory that `data` was given between passes is gathered from then on."""
    for seed in range(3):
        both(ours, dense, mesh, step, seed)
        ours.head.weight.data = ours.head.weight.detach() * 0.5
        dense.head.weight.data = dense.head.weight.detach() * 0.5


CASES = (
    _several_forwards, _retained, _accumulated, _deferred, _asked, _some_inputs, _second_order, _created_graph,
    _turned, _recomputed, _skipping, _hooked, _frozen, _written_between, _activation_written, _broken,
    _evaluated_between, _autocast, _assigned,
)  # fmt: skip


def one_thing_each(devices: int, check: str) -> dict[str, int]:
    """Every case, with weights of its own and with tied ones; how many weights were gathered."""
    join(check=check)
    mesh = one(devices)
    found = {}
    for tied in (False, True):
        for case in CASES:
            ours, dense = pair(mesh, tied=tied)
            before = len(TAKEN)
            with taken():
                both(ours, dense, mesh, step)
                for model in (ours, dense):
                    for p in model.parameters():
                        p.grad = None
                try:
                    case(ours, dense, mesh)
                    check_equal(ours, dense, case.__name__)
                except Exception as error:
                    raise AssertionError(f"{case.__name__}, tied={tied}: {error}") from error
            found[f"{case.__name__} {tied}"] = len(TAKEN) - before
    assert not ORDER.flights and not SCATTERS.under_way and not SCATTERS.small
    return found


# order


def joined() -> list[dict[str, int]]:
    """The collectives of five steps: the first gathers one by one, later ones small weights together."""
    mesh = one()
    ours, dense = pair(mesh)
    told = []
    for seed in range(5):
        data = batch(mesh, seed)
        with sent() as found:
            step(ours, data)
        step(dense, batch(None, seed))
        told.append(dict(found))
    check_equal(ours, dense)
    return told


def ahead(in_units: bool = False) -> list[tuple[int, int, int]]:
    """Of large weights, at every use: whether it was on its way, the bytes of those that are, and of the largest unit.

    In units, two layers are one.
    """
    mesh = one()
    torch.manual_seed(0)
    dense = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(6)))
    ours = put(copy.deepcopy(dense), mesh)
    if in_units:
        pairs = nn.Sequential(*(nn.Sequential(dense[i], dense[i + 1]) for i in (0, 2, 4)))
        plan = loom.Plan({"**.weight": "fsdp=S(0)"}, batch="fsdp=S(0)", units=["*"])
        ours = loom.parallelize(copy.deepcopy(pairs), mesh, plan)
    x = torch.randn(400, 96)
    seen: list[tuple[int, int, int]] = []
    take = weights.Order.take

    def note(self: Any, weight: Any, leaf: torch.Tensor) -> torch.Tensor:
        is_there = weight in self.flights
        found = take(self, weight, leaf)
        seen.append((is_there, sum(each.bytes for each in self.flights), self.largest))
        return found

    with patch.multiple(weights, SMALL=0), patch.object(weights.Order, "take", note):
        for _ in range(3):
            for model, data in ((ours, loom.distribute(x, mesh, "S(0)")), (dense, x)):
                for p in model.parameters():
                    p.grad = None
                model(data).square().mean().backward()
    check_equal(ours, dense)
    return seen


def gone() -> int:
    """A model whose leaves go on one process and not yet on the other: both still do the same; what one kept."""
    join(check="always")
    mesh = one()
    first, dense = pair(mesh)
    second, _ = pair(mesh)
    data, kept = batch(mesh), []
    with torch.no_grad():
        for _ in range(3):
            first(data[0])
            second.blocks[0](first.embedding(data[0]))
        if HERE.rank == 1:
            kept = [p._data for p in second.parameters()]
        alive = weakref.ref(second.head.weight._data)
        del second
        gc.collect()
        assert (alive() is None) == (HERE.rank != 1)
        for _ in range(3):
            both(first, dense, mesh, lambda model, data: model(data[0]))
            both(first, dense, mesh, lambda model, data: model.embedding(data[0]))
    return len(kept)


def in_flight() -> int:
    """The most gradients that were under way at once."""
    mesh = one()
    torch.manual_seed(0)
    dense = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(8)))
    ours = put(copy.deepcopy(dense), mesh)
    x = torch.randn(400, 96)
    most = 0
    begin = type(SCATTERS)._begin

    def note(self: Any, *args: Any) -> None:
        nonlocal most
        begin(self, *args)
        most = max(most, len(self.under_way))

    with patch.multiple(scatters, SMALL=0), patch.object(type(SCATTERS), "_begin", note):
        for model, data in ((ours, loom.distribute(x, mesh, "S(0)")), (dense, x)):
            model(data).square().mean().backward()
    check_equal(ours, dense)
    assert not SCATTERS.under_way
    return most


def stale() -> None:
    """A weight that was gathered ahead is gathered again if somebody wrote to it in between: must fail with a fault."""
    mesh = one()
    ours, dense = pair(mesh)

    def write_ahead(model: Net, data: Batch) -> Any:
        x = model.embedding(data[0])
        x = model.blocks[0](x)
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(1.5)
        return model.head(model.blocks[1](x)).sum()

    for seed in range(4):
        with torch.no_grad():
            both(ours, dense, mesh, write_ahead, seed)


def stale_with_a_fault() -> str:
    with patch.object(weights, "state_of", lambda leaf: (0, 0)):
        try:
            stale()
        except AssertionError as error:
            return str(error)
    return ""


def events() -> tuple[dict[tuple[str, str], int], set[str], str]:
    """What a record of a step tells of linear layers, the lines, and what forbidding it in backward says."""
    mesh = one()
    ours, _ = pair(mesh)
    data = batch(mesh)
    with loom.record() as log:
        loss = loss_of(ours, data)
        loss.backward()
    told = Counter((each.phase, each.kind) for each in log if each.call == "linear")
    loss = loss_of(ours, data)
    text = ""
    try:
        with loom.communication("forbid"):
            loss.backward()
    except loom.CommunicationError as error:
        text = str(error)
    return dict(told), {each.where.split(":")[0] for each in log}, text


def told_by_a_dry_run(device: str = "cpu") -> dict[str, dict[tuple[str, ...], int]]:
    """For models of every kind, how often a dry run of a step tells of each collective: by this process or by several.

    The mesh has two devices, whatever the number of processes.
    """
    mesh, rows = mesh_of((2,), (HERE.count,)), {"fsdp": loom.Shard(0)}
    found = {}
    for how in ("trained", "tied", "turned", "frozen", "recomputed", "columns"):
        columns = how == "columns"
        ours = Net(tied=how == "tied")
        ours.is_turned = how == "turned"
        ours.recomputed = False if how == "recomputed" else None
        ours.blocks[0].requires_grad_(how != "frozen")
        ours = put(ours.to(device), mesh, lambda _, p, last=columns: "S(1)" if last and p.dim() == 2 else "S(0)")
        data = tuple(loom.distribute(each.to(device), mesh, rows) for each in batch())
        with loom.dry_run() as run:
            loss_of(ours, data).backward()
        told = Counter((each.phase, each.kind, each.axis, str(each.bytes)) for each in run.log)
        nodes = Counter((each.kind, each.axis, str(each.bytes)) for node in run.nodes for each in node.collectives)
        assert nodes == Counter((each.kind, each.axis, str(each.bytes)) for each in run.log), how
        found[how] = dict(told)
    return found
