"""The literal collectives on tensors: `comms.literal` with checked arguments, `out=` and results as tensors.

They act on what each device holds, whatever its placement says. `all_reduce_async` and its kind start one at once and
give a handle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch

from meshloom.comms import WORLD, group_of, wire
from meshloom.comms.handles import Delayed, Handle, Run, Stress, begin, poison, run_now
from meshloom.comms.literal import MODES, Axis, Call, Operand, Placed, check_member, check_mode
from meshloom.errors import ArgumentError, GradientError, ShapeError, ViewError
from meshloom.mesh import Mesh
from meshloom.ops.labels import normal_dim
from meshloom.placement import Replicate, Topology
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.card_collectives import place, sum_over_links
from meshloom.tensor.clients import sent
from meshloom.tensor.moving import same_storage, shadow_of
from meshloom.tensor.shadow import Shadows
from meshloom.tensor.views import moved_view

__all__ = ["MODES", "Axis"]


def _tensor(x: object) -> Tensor:
    tensor = x
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"a collective takes a meshloom tensor, not {type(x).__name__}", fix="loom.distribute it")
    return tensor


def _check(x: torch.Tensor, mode: str, op: str | None = None) -> Tensor:
    tensor = _tensor(x)
    check_mode(mode, op, tensor.topology)
    return shadow_of(tensor)


def _call(kind: str, x: torch.Tensor, axis: Axis, mode: str, op: str | None = None, **options: Any) -> Call:
    """One collective call on a tensor, checked and told to whoever watches."""
    tensor = _check(x, mode, op)
    return Call(kind, tensor.topology, tensor._data, axis, mode, op=op or "sum", number=tensor._number, **options)


def _operand(x: torch.Tensor, axis: Axis, mode: str) -> Operand:
    tensor = _check(x, mode)
    return Operand(tensor.topology, tensor._data, axis)


def _dim(x: torch.Tensor, dim: int) -> int:
    tensor = _tensor(x)
    if not tensor.topology.shape:
        raise ShapeError("a 0-d tensor has no dim to gather or cut along", tensor=tensor.topology, fix="unsqueeze it")
    return normal_dim(dim, tensor.ndim)


@sent("moves:all_reduce")
def all_reduce(
    x: torch.Tensor,
    axis: Axis = None,
    op: str = "sum",
    mode: str = "direct",
    *,
    out: Tensor | None = None,
    algorithm: str | None = None,
    precise: bool = False,
) -> Tensor:
    """Every member of each group holds the reduction of what its members hold.

    `algorithm` names a schedule for `mode="fabric"`; `precise` adds low precision in float32 where it goes from device
    to device, or from process to process.
    `out` is a tensor with the shape and placements of the result, to be written.

    >>> import meshloom as loom
    >>> x = loom.arange(8, mesh=loom.open_mesh((4,), axes=("d",)), placements="S(0)")
    >>> all_reduce(x)
    Tensor i64[2](R) on Mesh(d=4)
    tensor([12, 16])
    """
    call = _call("all_reduce", x, axis, mode, str(op), algorithm=algorithm, precise=precise)
    if out is None:
        over_links = sum_over_links(call, mode)
        return place(call, call.reduce) if over_links is None else over_links
    call.reduce_into(_room(out, call.target(), call))
    return out


def _room(out: object, target: Topology, call: Call) -> torch.Tensor:
    """The array of `out=`, if it is a tensor that holds just such a result and no gradient would be lost."""
    tensor = _tensor(out)
    if tensor.topology != target:
        raise ArgumentError(
            "out= is not placed as the result", out=tensor.topology, result=target, fix="loom.zeros one"
        )
    if torch.is_grad_enabled() and (call.operand.data.requires_grad or tensor.requires_grad):
        raise GradientError("out= has no gradient", tensor=target, fix="leave out= away, or use torch.no_grad()")
    if (view := moved_view(tensor)) is not None:
        raise ViewError(
            "out= is a view that does not share its base's memory: making the view moved data",
            view=tensor.topology,
            base=view.base.topology,
            fix="give a tensor of its own, and write it to the base: base[...] = value",
        )
    room = shadow_of(tensor)._data
    if same_storage(room, call.operand.data):
        raise ArgumentError("out= shares memory with what is reduced or gathered", fix="give a tensor of its own")
    return room


@sent("moves:all_gather")
def all_gather(
    x: torch.Tensor,
    dim: int,
    axis: Axis = None,
    mode: str = "direct",
    *,
    out: Tensor | None = None,
    algorithm: str | None = None,
) -> Tensor:
    """Every member of each group holds what all of them hold, one after the other along `dim`.

    `out` is a tensor with the shape and placements of the result, to be written.

    >>> import meshloom as loom
    >>> x = loom.arange(3, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> all_gather(x, 0)
    Tensor i64[3](R) on Mesh(d=2)
    tensor([0, 1, 2])
    """
    at = _dim(x, dim)
    call = _call("all_gather", x, axis, mode, grows="more", algorithm=algorithm)
    if out is None:
        return place(call, lambda: _make_own(call.gather(at), call))
    topology, data = call.gather(at)
    _room(out, topology, call).copy_(data)
    return out


def _make_own(found: Placed, call: Call) -> Placed:
    """A result that shares no memory with the operand: writing to the one leaves the other as it is."""
    topology, data = found
    return topology, data.clone() if same_storage(data, call.operand.data) else data


@sent("moves:reduce_scatter")
def reduce_scatter(
    x: torch.Tensor,
    dim: int,
    axis: Axis = None,
    op: str = "sum",
    mode: str = "direct",
    *,
    algorithm: str | None = None,
    precise: bool = False,
) -> Tensor:
    """Each member holds its chunk, along `dim`, of the reduction of what the members hold.

    >>> import meshloom as loom
    >>> x = loom.ones(4, mesh=loom.open_mesh((2,), axes=("d",)), placements="R")
    >>> reduce_scatter(x, 0)
    Tensor f32[4](S(0)) on Mesh(d=2)
    tensor([2., 2., 2., 2.])
    """
    at = _dim(x, dim)
    call = _call("reduce_scatter", x, axis, mode, str(op), algorithm=algorithm, precise=precise)
    return place(call, lambda: call.scatter(at))


@sent("moves:scatter")
def scatter(
    x: torch.Tensor, dim: int, root: int = 0, axis: Axis = None, mode: str = "direct", *, algorithm: str | None = None
) -> Tensor:
    """Each member holds its chunk, along `dim`, of what member `root` holds."""
    at = _dim(x, dim)
    call = _call("scatter", x, axis, mode, root=root, grows="less", algorithm=algorithm)
    return place(call, lambda: call.scatter(at))


@sent("moves:all_to_all")
def all_to_all(
    x: torch.Tensor,
    split_dim: int,
    concat_dim: int,
    axis: Axis = None,
    mode: str = "direct",
    *,
    algorithm: str | None = None,
) -> Tensor:
    """Each member cuts what it holds along `split_dim`, sends a piece to each, and joins what it gets.

    >>> import meshloom as loom
    >>> x = loom.ones(4, 6, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> all_to_all(x, 1, 0).topology.notation
    'f32[4, 6](S(1))'
    """
    split, concat = _dim(x, split_dim), _dim(x, concat_dim)
    if split == concat:
        raise ArgumentError(
            f"split_dim and concat_dim are both {split}",
            fix="use two dims; all_gather and reduce_scatter act along one",
        )
    call = _call("all_to_all", x, axis, mode, algorithm=algorithm)
    return place(call, lambda: _make_own(call.exchange(split, concat), call))


@sent("moves:broadcast")
def broadcast(
    x: torch.Tensor, root: int = 0, axis: Axis = None, mode: str = "direct", *, algorithm: str | None = None
) -> Tensor:
    """Every member of each group holds what its member number `root` holds.

    >>> import meshloom as loom
    >>> x = loom.arange(4, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> broadcast(x, root=1).to_torch()
    tensor([2, 3])
    """
    call = _call("broadcast", x, axis, mode, root=root, algorithm=algorithm)
    return place(call, call.broadcast)


@sent("moves:reduce")
def reduce(
    x: torch.Tensor,
    root: int = 0,
    axis: Axis = None,
    op: str = "sum",
    mode: str = "direct",
    *,
    algorithm: str | None = None,
    precise: bool = False,
) -> Tensor:
    """Member `root` of each group holds the reduction, the others hold zero: P(sum)."""
    call = _call("reduce", x, axis, mode, str(op), root=root, algorithm=algorithm, precise=precise)
    return place(call, lambda: call.at_root(call.reduce()))


@sent("moves:gather")
def gather(
    x: torch.Tensor, dim: int, root: int = 0, axis: Axis = None, mode: str = "direct", *, algorithm: str | None = None
) -> Tensor:
    """Member `root` of each group holds what all of them hold along `dim`, the others hold zero: P(sum)."""
    at = _dim(x, dim)
    call = _call("gather", x, axis, mode, root=root, grows="more", algorithm=algorithm)
    return place(call, lambda: call.at_root(call.gather(at)))


@sent("moves:send_recv")
def send_recv(x: torch.Tensor, source: int, destination: int, axis: Axis = None, mode: str = "direct") -> Tensor:
    """Member `destination` of each group holds what member `source` holds; the others keep what they have.

    >>> import meshloom as loom
    >>> x = loom.arange(4, mesh=loom.open_mesh((2,), axes=("d",)), placements="S(0)")
    >>> send_recv(x, 0, 1).to_torch()
    tensor([0, 1, 0, 1])
    """
    operand = _operand(x, axis, mode)
    check_member(operand, source, "source")
    check_member(operand, destination, "destination")
    order = [source if member == destination else member for member in range(operand.size)]
    return _rearrange("send_recv", x, axis, mode, order)


@sent("moves:shift")
def shift(x: torch.Tensor, offset: int = 1, axis: Axis = None, wrap: bool = True, mode: str = "direct") -> Tensor:
    """Each member holds what the member `offset` places before it holds; without `wrap` the first ones hold zero.

    >>> import meshloom as loom
    >>> x = loom.arange(3, mesh=loom.open_mesh((3,), axes=("d",)), placements="S(0)")
    >>> shift(x).to_torch()
    tensor([2, 0, 1])
    """
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise ArgumentError(f"shift takes a whole number of places, not {offset!r}")
    size = _operand(x, axis, mode).size
    order = [(member - offset) % size if wrap else member - offset for member in range(size)]
    return _rearrange("shift", x, axis, mode, [o if 0 <= o < size else None for o in order])


def _rearrange(kind: str, x: torch.Tensor, axis: Axis, mode: str, order: Sequence[int | None]) -> Tensor:
    """Each member's part replaced by another's: the placements stay, so the parts must have room for each other."""
    operand = _operand(x, axis, mode)
    topology = operand.topology
    along = [a for a in operand.axes if operand.mesh.shape[a] > 1]
    same = all(isinstance(topology.placements[a], Replicate) for a in along)
    if not same or None in order:
        if any(isinstance(topology.placements[a], Replicate) for a in along):
            raise ArgumentError(
                "members of the group would hold different values along a replicated axis, which no placement says",
                tensor=topology,
                fix="shard the tensor along the group, or leave the replicated axis out of it",
            )
        if any(a in operand.axes for d in topology.padded_dims for a in topology.axes_of[d]):
            raise ShapeError(
                "parts of different sizes cannot take each other's place",
                tensor=topology,
                fix="pad the dim to a multiple of the devices",
            )
    call = _call(kind, x, axis, mode)
    if same:  # or a group of one
        held = call.operand.data
        return Tensor(topology, held.clone() if None not in order else torch.zeros_like(held))
    return place(call, lambda: call.rearrange(order))


def barrier(mesh: Mesh) -> None:
    """Wait for every device: for every process that holds some; those of one process are always at the same line."""
    if not isinstance(mesh, Mesh):
        raise ArgumentError(f"barrier takes a mesh, not {type(mesh).__name__}")
    group = group_of(mesh, range(mesh.ndim)) if state.shadows is None else None
    if group is not None:
        WORLD.watch.begin("barrier()", mesh)
        wire.barrier(group)


# started, and waited for later


@sent("moves:start")
def start(name: str, x: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handle:
    """Start a collective; it is checked, and told to whoever watches, here and now."""
    function: Callable[..., Tensor] = globals()[name]
    stressed = kwargs.pop("stress", None)
    with state.changed(shadows=Shadows()):
        topology = function(x, *args, **kwargs).topology
    tracked = torch.is_grad_enabled()
    fabric = state.fabric

    def work() -> Tensor:
        with state.changed(fabric=fabric, logs=(), policy=None), torch.set_grad_enabled(tracked):
            return function(x, *args, **kwargs)

    running = Stress(int(stressed)) if stressed is not None and stressed is not False else state.stress
    if running is not None:
        return Delayed(name, topology, work, running, Tensor(topology, poison(topology)))
    return Handle(name, topology, work, _runner(function, x, args, kwargs))


def _runner(function: Callable[..., Tensor], x: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Run | None:
    """Who carries it out: between processes a thread once it has begun, or this one if it has many steps."""
    given = signature(function).bind(x, *args, **kwargs).arguments
    if not Operand(x.topology, x._data, given.get("axis")).group.crosses:
        return None
    return begin if given.get("mode", "direct") == "direct" else run_now


def _asynchronous(name: str) -> Callable[..., Handle]:
    def function(x: torch.Tensor, *args: object, **kwargs: object) -> Handle:
        return start(name, x, args, kwargs)

    function.__name__ = function.__qualname__ = f"{name}_async"
    function.__doc__ = f"`{name}`, started at once: a handle whose `wait()` gives the result."
    return function


all_reduce_async = _asynchronous("all_reduce")
all_gather_async = _asynchronous("all_gather")
reduce_scatter_async = _asynchronous("reduce_scatter")
all_to_all_async = _asynchronous("all_to_all")
broadcast_async = _asynchronous("broadcast")
reduce_async = _asynchronous("reduce")
gather_async = _asynchronous("gather")
scatter_async = _asynchronous("scatter")
send_recv_async = _asynchronous("send_recv")
shift_async = _asynchronous("shift")
