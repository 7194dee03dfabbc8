"""Literal collectives in every mode against plain Python on what each device holds: values, placements, gradients."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import meshloom as loom
from meshloom import Mesh, Partial, Replicate, Tensor, Topology
from meshloom.collectives import ON_TENSORS
from oracle import Made, check_close, draw_mesh
from samples import Draw, Operand

CASES = int(os.environ.get("MESHLOOM_CASES", "0")) or 220
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
PAIR: dict[str, Callable[[Any, Any], Any]] = {
    "sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul,
}  # fmt: skip


class Reference:
    """Every device with the part it holds; dims that a group shares with other axes count their padding as elements."""

    def __init__(
        self, dense: torch.Tensor, topology: Topology, axes: tuple[int, ...], parts: Any, lengthened: set[int]
    ) -> None:
        self.mesh, self.axes, self.topology, self.lengthened = topology.mesh, axes, topology, lengthened
        self.held: dict[Any, torch.Tensor] = {}
        self.valid: dict[Any, torch.Tensor] = {}
        for place in self.mesh.coordinates():
            whole = dense if parts is None else parts[tuple(place[a] for a in topology.partial_axes)]
            self.held[place], self.valid[place] = self._part(whole, place)

    def _part(self, whole: torch.Tensor, place: Any) -> tuple[torch.Tensor, torch.Tensor]:
        valid = torch.ones(whole.shape, dtype=torch.bool)
        for dim in range(whole.dim()):
            start, extent = self.topology.chunk(place, dim)
            whole, valid = whole.narrow(dim, start, extent), valid.narrow(dim, start, extent)
            if self._grouped(dim) or (dim in self.lengthened and self.topology.axes_of[dim]):
                missing = self.topology.local_shape[dim] - extent
                whole, valid = lengthened(whole, dim, missing), lengthened(valid, dim, missing)
        return whole, valid

    def _grouped(self, dim: int) -> bool:
        return any(a in self.axes for a in self.topology.axes_of[dim])

    def alone(self, dim: int) -> bool:
        return self.topology.axes_of[dim] == self.axes

    def groups(self) -> list[list[Any]]:
        others = [range(n) if a not in self.axes else (None,) for a, n in enumerate(self.mesh.shape)]
        members = list(itertools.product(*(range(self.mesh.shape[a]) for a in self.axes)))
        found = []
        for other in itertools.product(*others):
            found.append([self._merge(other, member) for member in members])
        return found

    def _merge(self, other: Any, member: Any) -> Any:
        place = list(other)
        for axis, at in zip(self.axes, member, strict=True):
            place[axis] = at
        return tuple(place)


def lengthened(x: torch.Tensor, dim: int, missing: int) -> torch.Tensor:
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim) if missing else x


def reduced(ref: Reference, group: list[Any], op: str) -> torch.Tensor:
    """Element by element over the members that hold one; where nobody does, zero."""
    total, seen = None, None
    for place in group:
        held, valid = ref.held[place], ref.valid[place]
        if total is None:
            total, seen = held, valid
            continue
        both = PAIR[op](total, held)
        total = torch.where(seen & valid, both, torch.where(valid, held, total))
        seen = seen | valid
    total = torch.where(seen, total, torch.zeros((), dtype=total.dtype))
    return total / len(group) if op == "mean" else total


def joined(ref: Reference, group: list[Any], dim: int) -> torch.Tensor:
    parts = [ref.held[place] for place in group]
    if ref.alone(dim):
        extents = [ref.topology.chunk(place, dim)[1] for place in group]
        parts = [part.narrow(dim, 0, extent) for part, extent in zip(parts, extents, strict=True)]
    return torch.cat(parts, dim)


def cut(whole: torch.Tensor, ref: Reference, dim: int, member: int) -> torch.Tensor:
    sizes = tuple(ref.mesh.shape[a] for a in ref.axes)
    names = tuple(f"a{i}" for i in range(len(sizes)))
    grid = Mesh.of(sizes, names)
    topology = Topology(grid, (loom.Shard(dim),) * grid.ndim, tuple(whole.shape), "f32")
    start, extent = topology.chunk(list(grid.coordinates())[member], dim)
    part = whole.narrow(dim, start, extent)
    shared = any(a not in ref.axes and ref.mesh.shape[a] > 1 for a in ref.topology.axes_of[dim])
    return lengthened(part, dim, topology.local_shape[dim] - extent) if shared else part


def expected(name: str, ref: Reference, options: dict[str, Any]) -> dict[Any, torch.Tensor]:
    """What every device holds afterwards."""
    result = {}
    for group in ref.groups():
        for member, place in enumerate(group):
            result[place] = after(name, ref, group, member, options)
    return result


def after(name: str, ref: Reference, group: list[Any], member: int, o: dict[str, Any]) -> torch.Tensor:
    if name == "all_reduce":
        return reduced(ref, group, o["op"])
    if name == "all_gather":
        return joined(ref, group, o["dim"])
    if name == "reduce_scatter":
        return cut(reduced(ref, group, o["op"]), ref, o["dim"], member)
    if name == "all_to_all":
        return cut(joined(ref, group, o["concat_dim"]), ref, o["split_dim"], member)
    if name == "broadcast":
        return ref.held[group[o["root"]]]
    if name == "scatter":
        return cut(ref.held[group[o["root"]]], ref, o["dim"], member)
    whole = reduced(ref, group, o["op"]) if name == "reduce" else joined(ref, group, o["dim"])
    return whole if member == o["root"] else torch.zeros_like(whole)


def draw_options(d: Draw, name: str, ndim: int, size: int, dtype: torch.dtype) -> dict[str, Any]:
    ops = ["max", "min"] if dtype == torch.bool else ["sum", "max", "min", "prod"]
    options: dict[str, Any] = {}
    if name in ("all_reduce", "reduce_scatter", "reduce"):
        options["op"] = d.pick([*ops, "mean"] if dtype.is_floating_point else ops)
    if name in ("all_gather", "reduce_scatter", "gather", "scatter"):
        options["dim"] = d.number(0, ndim - 1)
    if name == "all_to_all":
        options["split_dim"] = d.number(0, ndim - 1)
        options["concat_dim"] = (options["split_dim"] + d.number(1, ndim - 1)) % ndim
    if name in ("broadcast", "reduce", "gather", "scatter"):
        options["root"] = d.number(0, size - 1)
    return options


def group_size(mesh: Mesh, axes: tuple[int, ...]) -> int:
    size = 1
    for axis in axes:
        size *= mesh.shape[axis]
    return size


def check_collective(d: Draw, name: str, mode: str) -> None:
    mesh = draw_mesh(d)
    shape, dtype = d.shape(2 if name == "all_to_all" else 1, 3, empty=False), d.pick(DTYPES)
    made = Made(d, mesh, Operand(shape, dtype), gradients=True)
    axes = tuple(a for a in range(mesh.ndim) if d.yes()) or (d.number(0, mesh.ndim - 1),)
    axis = None if len(axes) == mesh.ndim and d.yes() else tuple(mesh.axes[a] for a in axes)
    if name in ("reduce", "gather") and not can_lie_at_root(made.topology, axes):
        return
    options = draw_options(d, name, len(shape), group_size(mesh, axes), dtype)
    what = f"{name} {options} over {axis} of {made.tensor.topology}"
    touched = {options[key] for key in ("dim", "split_dim", "concat_dim") if key in options}
    ref = Reference(made.dense, made.topology, axes, genuine_parts(made), touched)
    wanted = expected(name, ref, options)
    found = getattr(loom.collectives, name)(made.tensor, axis=axis, mode=mode, **options)
    check_held(found, wanted, axes, what)
    if made.differentiable and found.requires_grad:
        check_gradient(d, made, found, wanted, what)


def can_lie_at_root(topology: Topology, axes: tuple[int, ...]) -> bool:
    """A value at the root is P(sum) (P(max) for bool) along the group, which must go with the other axes."""
    own = "max" if topology.dtype == "bool" else "sum"
    kinds = {p.op for a, p in enumerate(topology.placements) if isinstance(p, Partial) and a not in axes}
    return kinds <= ({"max"} if own == "max" else {"sum", "mean"})


def genuine_parts(made: Made) -> Any:
    """What each device holds of a partial tensor, by its place on the partial axes, before any dim is cut."""
    topology = made.topology
    if not topology.partial_axes:
        return None
    whole = topology.with_placements(tuple(p if isinstance(p, Partial) else Replicate() for p in topology.placements))
    data = made.tensor.redistribute(whole.placements)._data
    sizes = data.shape[: len(topology.partial_axes)]
    return {place: data[place] for place in itertools.product(*(range(n) for n in sizes))}


def check_held(found: Tensor, wanted: dict[Any, torch.Tensor], axes: tuple[int, ...], what: str) -> None:
    for place, part in wanted.items():
        held = found.shard_at(place)
        assert held.shape == part.shape, f"{what}: {place} holds {tuple(held.shape)}, not {tuple(part.shape)}"
        check_close(held.detach(), part.detach().to(held.dtype), f"{what} at {place}")


def check_gradient(d: Draw, made: Made, found: Tensor, wanted: dict[Any, torch.Tensor], what: str) -> None:
    """A replicated result counts once: the derivative of the parts that the block stores."""
    seed = d.number(0, 1000)
    total, ours = 0.0, 0.0
    for number, place in enumerate(stored_places(found, wanted)):
        part = wanted[place]
        weight = torch.randn(part.shape, generator=torch.Generator().manual_seed(seed + number)).to(part.dtype)
        total = total + (part * weight).sum()
        ours = ours + (found.shard_at(place) * weight).sum()
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return
    total.backward()
    ours.backward()
    if made.dense.grad is not None:
        check_close(made.leaf.grad.to_torch(), made.dense.grad, f"{what}: gradient")


def stored_places(found: Tensor, places: Any) -> list[Any]:
    """The coordinates whose parts a block stores: 0 on every replicated axis."""
    fixed = [axis for axis, each in enumerate(found.placements) if isinstance(each, Replicate)]
    return [place for place in places if all(place[axis] == 0 for axis in fixed)]


CHECKED = [name for name in ON_TENSORS if name not in ("send_recv", "shift", "barrier")]


@pytest.mark.filterwarnings("ignore::meshloom.comms.modes.HostTrafficWarning")
@pytest.mark.parametrize("mode", ["direct", "host", "fabric"])
@pytest.mark.parametrize("name", CHECKED)
def test_a_collective_does_what_plain_python_does_with_the_parts(name: str, mode: str) -> None:
    @settings(
        max_examples=CASES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        check_collective(Draw(data), name, mode)

    run()


@pytest.mark.filterwarnings("ignore::meshloom.comms.modes.HostTrafficWarning")
@pytest.mark.parametrize("mode", ["direct", "host", "fabric"])
@pytest.mark.parametrize("shape", [(8, 8), (7, 5)])
@pytest.mark.parametrize("placements", ["S(0), S(1)", "S(0), S(0)", "R, S(1)"])
def test_out_holds_what_would_have_been_returned(placements: str, shape: tuple[int, int], mode: str) -> None:
    mesh = loom.open_mesh((2, 4), axes=("a", "b"))
    x = loom.distribute(torch.randn(shape), mesh, placements)
    calls: list[Callable[..., Tensor]] = [
        lambda axis, **to: loom.collectives.all_gather(x, 1, axis, mode, **to),
        *(lambda axis, op=op, **to: loom.collectives.all_reduce(x, axis, op, mode, **to) for op in PAIR),
    ]
    for axis in ("a", "b", None):
        for call in calls:
            found = call(axis)
            room = loom.full_like(found, 7.0)
            assert call(axis, out=room) is room
            assert torch.equal(room.to_torch(), found.to_torch())


def test_out_that_does_not_fit_shares_memory_or_loses_a_gradient_is_refused() -> None:
    mesh = loom.open_mesh((4,), axes=("d",))
    x = loom.ones(8, mesh=mesh, placements="S(0)")
    room = loom.zeros(2, mesh=mesh, placements="R")
    with pytest.raises(loom.ArgumentError, match="out= is not placed as the result"):
        loom.collectives.all_reduce(x, out=loom.zeros(8, mesh=mesh, placements="R"))
    with pytest.raises(loom.ArgumentError, match="shares memory"):
        same = loom.ones(4, mesh=mesh, placements="R")
        loom.collectives.all_reduce(same, out=same)
    with pytest.raises(loom.GradientError, match="out= has no gradient"):
        loom.collectives.all_reduce(x.requires_grad_(), out=room)


@pytest.mark.parametrize("devices", [1, 4])
def test_writing_to_a_result_leaves_the_operand_as_it_was(devices: int) -> None:
    mesh = loom.open_mesh((devices,), axes=("d",))
    x = loom.ones(8, 8, mesh=mesh, placements="S(0)")
    calls = loom.collectives
    for found in (calls.all_gather(x, 0), calls.all_reduce(x), calls.all_to_all(x, 1, 0), calls.reduce_scatter(x, 0)):
        found.add_(1)
        assert torch.equal(x.to_torch(), torch.ones(8, 8))


def test_explaining_a_collective_with_out_writes_nothing() -> None:
    mesh = loom.open_mesh((4,), axes=("d",))
    x, room = loom.ones(8, mesh=mesh, placements="S(0)"), loom.zeros(2, mesh=mesh, placements="R")
    assert len(loom.explain(lambda: loom.collectives.all_reduce(x, out=room)).log) == 1
    assert torch.equal(room.to_torch(), torch.zeros(2))


@pytest.mark.parametrize("mode", ["direct", "host", "fabric"])
def test_a_shift_without_wrap_along_an_axis_of_one_device_leaves_zeros(mode: str) -> None:
    x = loom.arange(1.0, 4.0, mesh=loom.open_mesh((1, 3), axes=("one", "d")), placements="R, S(0)")
    assert loom.collectives.shift(x, 1, "one", wrap=False, mode=mode).to_torch().tolist() == [0, 0, 0]
    assert loom.collectives.shift(x, 1, "one", mode=mode).to_torch().tolist() == [1, 2, 3]
