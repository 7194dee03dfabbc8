"""What ranks run in `test_process_collectives.py`: every collective on a mesh that processes split, against the same
call on the same mesh held by one process.

Both are made from one array, drawn alike on every rank; a rank compares its box. `case(mode, number)` replays one.
"""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections import Counter
from typing import Any

import torch

import meshloom as loom
from meshloom import Mesh, Replicate, Tensor, Topology
from meshloom.collectives import ON_TENSORS
from meshloom.comms import WORLD, Group, group_of, literal, members_of, schedules
from meshloom.comms.deferred import collect
from meshloom.comms.modes import HostTrafficWarning
from meshloom.comms.schedules import Box
from meshloom.engines.layout import from_block, mask_of, short_name, to_block, torch_dtype
from meshloom.fabric import Fabric
from meshloom.mesh import HERE
from meshloom.processes import join
from oracle import assert_within, draw_placements, draw_values
from process_cases import Seeded, grids
from samples import Operand

NAMES = tuple(name for name in ON_TENSORS if name != "barrier")
DTYPES = (
    torch.float32,
    torch.float32,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.bool,
)
MESHES = ((2,), (4,), (6,), (8,), (2, 2), (2, 3), (4, 2), (2, 4), (1, 4), (4, 1), (2, 2, 2), (2, 1, 4))
MOVED = ("all_gather", "all_to_all", "broadcast", "gather", "scatter", "send_recv", "shift")  # nothing is added


def boxed(data: torch.Tensor, whole: Topology, split: Topology) -> torch.Tensor:
    """Of the stored array on the whole mesh what this process holds."""
    block, mesh = to_block(data, whole), split.mesh
    for axis, placement in enumerate(whole.placements):
        if not isinstance(placement, Replicate):
            block = block.narrow(axis, mesh.local_offset[axis], mesh.local_shape[axis])
    return from_block(block, split).clone()


class Pair:
    """One tensor on a mesh of one process, and on the same mesh that processes split."""

    def __init__(self, d: Seeded, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        placements = draw_placements(d, mesh, shape, dtype, partial=True)
        self.whole = Topology(Mesh.of(mesh.shape, mesh.axes), placements, shape, short_name(dtype))
        self.split = Topology(mesh, placements, shape, short_name(dtype))
        data = drawn(d, self.whole, dtype)
        self.tracked = dtype.is_floating_point and d.number(0, 3) > 0
        self.leaves = (data, boxed(data, self.whole, self.split))
        for leaf in self.leaves:
            leaf.requires_grad_(self.tracked)
        self.one, self.many = Tensor(self.whole, self.leaves[0]), Tensor(self.split, self.leaves[1])


def drawn(d: Seeded, topology: Topology, dtype: torch.dtype) -> torch.Tensor:
    """A stored array whose padding is zero; some with equal values, some with nan."""
    data = draw_values(Operand(topology.stored_shape, dtype), d.number(0, 10_000))
    if dtype.is_floating_point and d.number(0, 2) == 0:
        data = data.round()
    if dtype.is_floating_point and d.number(0, 7) == 0:
        data = torch.where(data > 1, torch.nan, data)
    mask = mask_of(topology, data.device)
    return data if mask is None else data.masked_fill(~mask, 0)


def options(d: Seeded, name: str, ndim: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    ops = ["max", "min"] if dtype == torch.bool else ["sum", "sum", "max", "min", "prod"]
    found: dict[str, Any] = {}
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        found["op"] = d.pick([*ops, "mean"] if dtype.is_floating_point else ops)
    if name in ("all_gather", "reduce_scatter", "gather", "scatter"):
        found["dim"] = d.number(-ndim, ndim - 1)
    if name == "all_to_all":
        found["split_dim"] = d.number(0, ndim - 1)
        found["concat_dim"] = (found["split_dim"] + d.number(1, ndim - 1)) % ndim
    if name in ("broadcast", "reduce", "gather", "scatter"):
        found["root"] = d.number(0, size - 1)
    if name == "send_recv":
        found["source"], found["destination"] = d.number(0, size - 1), d.number(0, size - 1)
    if name == "shift":
        found["offset"], found["wrap"] = d.number(-3, 3), d.yes()
    return found


def check_case(d: Seeded, mode: str, name: str) -> str:
    shape, grid = d.pick(grids(HERE.count, MESHES))
    mesh = loom.open_mesh(shape, processes=grid)
    dtype, sizes = d.pick(DTYPES), d.shape(2 if name == "all_to_all" else 1, 3)
    pair = Pair(d, mesh, sizes, dtype)
    axes = [a for a in range(mesh.ndim) if d.yes()] or [d.number(0, mesh.ndim - 1)]
    axis = None if len(axes) == mesh.ndim and d.yes() else tuple(mesh.axes[a] for a in axes)
    given = options(d, name, len(sizes), math.prod(mesh.shape[a] for a in axes), dtype)
    given |= {"axis": axis, "mode": mode}
    if mode == "fabric" and "op" in given:
        given["precise"] = d.yes()
    called = d.pick([name, name, name + "_async"])
    what = f"{called} {given} of {pair.split} over {grid} processes"
    one, log_one = call(called, pair.one, given)
    many, log_many = call(called, pair.many, given)
    assert log_one == log_many, f"{what}: one process tells {log_one}, several {log_many}"
    if isinstance(one, str) or isinstance(many, str):
        assert one == many, f"{what}: one process says {one}, several {many}"
        return "refused"
    assert one.topology.notation == many.topology.notation, f"{what}: {one.topology} became {many.topology}"
    assert many.mesh == mesh
    exact = mode != "direct" or name in MOVED
    check_same(boxed(one._data.detach(), one.topology, many.topology), many._data.detach(), what, exact)
    if d.number(0, 3) == 0 and name in ("all_reduce", "all_gather"):
        check_out(name, pair, given, many, what)
    if pair.tracked:
        check_gradient(d, pair, one, many, what)
    crosses = any(grid[a] > 1 for a in axes)
    return f"{'tracked' if pair.tracked else 'plain'}, {'crossing' if crosses else 'local'}"


def call(name: str, x: Tensor, given: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The result, or the headline of the refusal; and what was recorded."""
    with loom.record() as log:
        try:
            found = getattr(loom.collectives, name)(x, **given)
            found = found.wait() if name.endswith("_async") else found
        except loom.MeshloomError as error:
            if isinstance(error, (loom.PeerLostError, loom.DivergenceError)):
                raise
            found = f"{type(error).__name__}: {error.headline}"
    return found, [(event.call, event.bytes, event.host, str(event.collective)) for event in log]


def check_same(wanted: torch.Tensor, found: torch.Tensor, what: str, exact: bool) -> None:
    close = {torch.bfloat16: (0.04, 0.04), torch.float32: (1e-5, 1e-5)}.get(wanted.dtype, (1e-12, 1e-12))
    rtol, atol = (0.0, 0.0) if exact else close
    scale = 1.0 if exact or not wanted.numel() else max(1.0, float(wanted.double().abs().nan_to_num(0, 0, 0).max()))
    assert_within(found, wanted, rtol, atol * scale, what)


def check_out(name: str, pair: Pair, given: dict[str, Any], many: Tensor, what: str) -> None:
    room = Tensor(many.topology, torch.ones_like(many._data.detach()))
    with torch.no_grad():
        assert getattr(loom.collectives, name)(pair.many, **given, out=room) is room
    check_same(many._data.detach(), room._data, f"{what}: out=", exact=True)


def check_gradient(d: Seeded, pair: Pair, one: Tensor, many: Tensor, what: str) -> None:
    """The gradient of every device's part, for a cotangent that is drawn for every device's result."""
    if not one._data.requires_grad:  # a shift by so much that nothing stays
        return
    assert many._data.requires_grad, f"{what}: the gradient is lost"
    weight = drawn(d, one.topology, torch_dtype(one.topology.dtype)).nan_to_num(1.0)
    one._data.backward(weight)
    many._data.backward(boxed(weight, one.topology, many.topology))
    collect()
    wanted, found = (leaf.grad for leaf in pair.leaves)
    assert (wanted is None) == (found is None), f"{what}: a gradient is missing"
    if wanted is not None:
        check_same(boxed(wanted, pair.whole, pair.split), found, f"{what}: gradient", exact=False)


def case(mode: str, name: str, number: int) -> str:
    """One case: mesh, grid, placements and values all follow from these."""
    try:
        return check_case(Seeded(f"{mode} {name} {number}"), mode, name)
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        raise AssertionError(f"case({mode!r}, {name!r}, {number}) on rank {HERE.rank} failed:\n{text}") from None


def cases(modes: tuple[str, ...], per_name: int, names: tuple[str, ...] = NAMES) -> Counter[tuple[str, str]]:
    """Cases of every collective in some modes: how many ran, and how."""
    warnings.simplefilter("ignore", HostTrafficWarning)
    join()
    ran: Counter[tuple[str, str]] = Counter()
    for mode in modes:
        for name in names:
            for number in range(per_name):
                ran[mode, case(mode, name, number)] += 1
    return ran


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "members are not put in order": (
        Group,
        "together",
        lambda self, stacked, place=0: stacked.flatten(place, place + 1),
    ),
    "gradients of what is held alike are not summed": (literal, "sum_gradient", lambda data, group: data),
    "chunks are cut by what one process holds": (Box, "before", lambda self, bound: min(bound, math.prod(self.held))),
    "the last step is left out": (schedules, "_shares", lambda *given: SHARES(*given)[:-1]),
}
SHARES = schedules._shares


def cases_with(fault: str, mode: str, names: tuple[str, ...]) -> None:
    """The cases, with a planted fault."""
    setattr(*FAULTS[fault])
    cases((mode,), 200, names)


class Listening:
    """A group of `torch.distributed` that writes down what is asked of it."""

    def __init__(self, handle: Any, heard: list[tuple[str, int | None]]) -> None:
        self._handle, self._heard = handle, heard

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._handle, name)

        def asked(*given: Any) -> Any:
            self._heard.append((name, given[1] if name in ("send", "recv") else None))
            return method(*given)

        return asked


def listen(mesh: Mesh, axes: tuple[int, ...]) -> list[tuple[str, int | None]]:
    """What will be asked of the processes along some axes of a mesh: calls, with the peer of a message."""
    heard: list[tuple[str, int | None]] = []
    group = group_of(mesh, axes)
    assert group is not None
    group.connect()
    listening = WORLD.handles[group.ranks] = Listening(group.handle, heard)
    for each in (group, members_of(mesh, axes)):
        each.use(listening)
    return heard


def count() -> int:
    """How many processes there are; they meet first."""
    join()
    return HERE.count


def calls_of_each() -> dict[str, list[str]]:
    """What each collective asks of torch.distributed directly, over an axis of which a process has two devices."""
    mesh = loom.open_mesh((2 * count(), 2), axes=("a", "b"), processes=(HERE.count, 1), check="off")
    heard = listen(mesh, (0,))
    x = loom.ones(16, 16, mesh=mesh, placements="S(0), S(1)")
    given: dict[str, dict[str, Any]] = {
        "all_gather": {"dim": 0}, "reduce_scatter": {"dim": 1}, "all_to_all": {"split_dim": 1, "concat_dim": 0},
        "gather": {"dim": 0}, "scatter": {"dim": 1}, "send_recv": {"source": 0, "destination": 2 * HERE.count - 1},
    }  # fmt: skip
    found = {}
    for name in NAMES:
        heard.clear()
        getattr(loom.collectives, name)(x, axis="a", **given.get(name, {}))
        found[name] = [call for call, _ in heard]
    heard.clear()
    for local in ("b", None):
        loom.collectives.all_reduce(x, axis="b" if local else ("a", "b"))
    found["all_reduce over b, then over both"] = [call for call, _ in heard]
    heard.clear()
    much = loom.ones(mesh.size << 19, mesh=mesh, placements="S(0), S(0)")
    for name, more in (("all_reduce", ()), ("all_gather", (0,))):
        heard.clear()
        getattr(loom.collectives, name)(much, *more, axis="a")
        found[f"{name} of much"] = [call for call, _ in heard]
    return found


def peers(kind: str) -> dict[str, Any]:
    """With whom this process exchanges messages over links of a kind, one device per process, and what it may."""
    mesh = loom.open_mesh((count(),), axes=("d",), check="off")
    heard = listen(mesh, (0,))
    fabric = Fabric.grid(mesh.shape, kind, latency=1e-6, bandwidth=1e9)
    x = loom.arange(float(16 * mesh.size), mesh=mesh, placements="S(0)")
    with loom.use_fabric(fabric):
        results = [
            loom.collectives.all_reduce(x, mode="fabric"),
            loom.collectives.all_gather(x, 0, mode="fabric"),
            loom.collectives.reduce_scatter(x, 0, mode="fabric"),
            loom.collectives.shift(x, mesh.size // 2, mode="fabric"),
        ]
    return {
        "calls": {call for call, _ in heard},
        "peers": {peer for _, peer in heard},
        "linked": {place[0] for place in fabric.neighbours((HERE.rank,))},
        "sums": [result.sum().item() for result in results],
    }


def explained_alone() -> list[str]:
    """Explaining asks nobody: rank 0 does it alone, and all go on afterwards."""
    mesh = loom.open_mesh((count(), 2), axes=("a", "b"))
    x = loom.ones(8, 8, mesh=mesh, placements="S(0), R")
    told = []
    if HERE.rank == 0:
        for mode in ("direct", "host", "fabric"):
            plan = loom.explain(lambda mode=mode: loom.collectives.all_reduce(x, mode=mode))
            told += [f"{event.call} {event.bytes}" for event in plan.log]
    loom.collectives.barrier(mesh)
    return told


def stressed(seeds: tuple[int, ...]) -> list[bool]:
    """Whether asynchronous collectives that complete in shuffled order give what one process gives."""
    mesh = loom.open_mesh((2 * count(),), axes=("d",))
    values = torch.arange(48.0).reshape(8, 6)
    calls = loom.collectives

    def results(on: Mesh, seed: int) -> list[torch.Tensor]:
        x = loom.distribute(values, on, "S(0)")
        with loom.stress(seed):
            handles = [calls.all_reduce_async(x), calls.shift_async(x, 1), calls.all_gather_async(x, 1)]
            handles.append(calls.all_reduce_async(x, op="max", mode="fabric"))
            return [handle.wait().to_torch() for handle in reversed(handles)]

    def are_alike(seed: int) -> bool:
        whole = results(Mesh.of(mesh.shape, mesh.axes), seed)
        return all(torch.equal(a, b) for a, b in zip(results(mesh, seed), whole, strict=True))

    return [are_alike(seed) for seed in seeds]


def lost(mode: str) -> str:
    """The last rank stays away from a collective: the others give up after the timeout, and say so."""
    mesh = loom.open_mesh((count(),), axes=("d",), timeout=3.0, check="off")
    x = loom.ones(4 * HERE.count, mesh=mesh, placements="S(0)")
    loom.collectives.all_reduce(x, mode=mode)
    try:
        if HERE.rank == HERE.count - 1:
            time.sleep(60)
        loom.collectives.all_reduce(x, mode=mode)
    except loom.PeerLostError as error:
        return str(error)
    return "nothing happened"
