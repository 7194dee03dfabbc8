"""Torch's own graph over our tensors, joined to the graph of their arrays.

`autograd.Function.apply` and what C++ calls by itself record nodes on the tensor, not on its array: full backward hooks
and reentrant checkpoints do. Torch asks such a result for its layout when it records it, and there we notice it. At
its first use the piece of torch's graph behind it, down to tensors of ours, becomes one node of the arrays' graph,
whose backward runs that piece. A Function that hands a plain tensor out of our tensors has no such use: where a tensor
is read while gradients are off, its own graph gets a hook that refuses.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from meshloom.engines import private
from meshloom.engines.layout import fill
from meshloom.errors import GradientError
from meshloom.placement import Partial, Topology
from meshloom.tensor.base import Tensor
from meshloom.tensor.lazy import STORED, Lazy, ask, settle

_base: Any = private.TensorBase


class _Here(threading.local):
    """The results that torch told of last, and whether a joined piece of its graph is running."""

    def __init__(self) -> None:
        self.recent: deque[weakref.ref[Tensor]] = deque(maxlen=64)
        self.running = 0


_here = _Here()


def native(tensor: Tensor, name: str) -> Any:
    """What torch itself knows of a tensor under this name."""
    with private.DisableTorchFunctionSubclass():
        return getattr(_base, name).__get__(tensor)


def callers() -> Iterator[str]:
    """The modules that led here, the nearest first."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        yield frame.f_globals.get("__name__", "")
        frame = frame.f_back


def called_from() -> str:
    """The module outside of this package that called into it."""
    return next((name for name in callers() if not name.startswith("meshloom.")), "")


class FromTorch:
    """The array of what torch may have given a node of its own."""

    def find(self, tensor: Tensor) -> torch.Tensor:
        """The array, joined to torch's graph if there is one."""
        node = native(tensor, "grad_fn")
        if node is None:
            return settle(tensor, STORED.__get__(tensor))
        _join(node)
        if tensor.__class__ is Lazy:
            raise GradientError("torch gave a result of an autograd.Function another node than it was noticed with")
        found: torch.Tensor = STORED.__get__(tensor)
        return found


FROM_TORCH = FromTorch()


def notice(tensor: Tensor) -> Tensor:
    """Torch is about to record a node for this tensor, or may have done so."""
    if tensor.__class__ is Lazy:
        if vars(tensor)["_finder"] is FROM_TORCH:
            return tensor
        settle(tensor, tensor._data)
    ask(tensor, FROM_TORCH)
    _here.recent.append(weakref.ref(tensor))
    return tensor


def is_noticed(tensor: Tensor) -> bool:
    """Whether a tensor has a node of torch's own that is not joined yet."""
    return tensor.__class__ is Lazy and vars(tensor)["_finder"] is FROM_TORCH


def _join(node: object) -> None:
    """Give all living results of a node arrays whose graph leads through the node."""
    results = [each for each in (ref() for ref in _here.recent) if each is not None and is_noticed(each)]
    results = [each for each in results if native(each, "grad_fn") is node]
    piece = Piece(node, results)
    with torch.enable_grad():
        arrays = Join.apply(piece, *piece.inputs)  # type: ignore[no-untyped-call]
    piece.arrays, piece.inputs = (), ()
    for result, array in zip(results, arrays, strict=True):
        settle(result, _expand_to(array, result.topology))
        with private.DisableTorchFunctionSubclass():
            if not _base._is_view(result):
                _base.detach_(result)
                _base.requires_grad.__set__(result, True)


def _ends_of(node: Any) -> list[Any]:
    """The nodes of leaves, ours and plain, that torch's graph ends at."""
    found: list[Any] = []
    known, nodes = {node}, [node]
    while nodes:
        each = nodes.pop()
        if hasattr(each, "variable"):
            found.append(each)
        for behind, _ in each.next_functions:
            if behind is not None and behind not in known:
                known.add(behind)
                nodes.append(behind)
    return found


class Piece:
    """A piece of torch's graph: where it starts, with which topologies, and the leaves that it ends at."""

    def __init__(self, node: Any, results: Sequence[Tensor]) -> None:
        ends = _ends_of(node)
        leaves = [each.variable for each in ends]
        self.starts = [GradientEdge(node, native(each, "output_nr")) for each in results]
        self.ends = [GradientEdge(each, 0) for each in ends]
        self.is_checkpoint = node.name() == "CheckpointFunctionBackward"
        self.topologies = [_meeting_topology(each.topology) for each in results]
        self.arrays: Sequence[torch.Tensor] = [
            _array_at_meeting(Tensor(each.topology, STORED.__get__(each))) for each in results
        ]
        with torch.enable_grad():
            self.inputs: Sequence[torch.Tensor] = [_array_at_meeting(x) if isinstance(x, Tensor) else x for x in leaves]
        self.held = [
            (_meeting_topology(each.topology), tuple(array.shape)) if isinstance(each, Tensor) else None
            for each, array in zip(leaves, self.inputs, strict=True)
        ]
        self.metadata = node.metadata
        self.metadata["joins"] = self.metadata.get("joins", 0) + 1

    def run(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Its backward: from gradients of the results' arrays to those of the leaves' arrays."""
        given = [
            (edge, gradient_tensor(gradient, topology))
            for edge, gradient, topology in zip(self.starts, gradients, self.topologies, strict=True)
            if gradient is not None
        ]
        _here.running += 1
        try:
            found = self._run(tuple(edge for edge, _ in given), tuple(each for _, each in given))
        finally:
            _here.running -= 1
        return [
            each if each is None or held is None else gradient_array(each, *held)
            for each, held in zip(found, self.held, strict=True)
        ]

    def _run(self, starts: tuple[object, ...], gradients: tuple[object, ...]) -> Sequence[Any]:
        """Torch's own backward through the piece. A reentrant checkpoint wants one that accumulates."""
        graph = torch.is_grad_enabled()
        # a result that backward unpacks is joined once more: then two nodes run one
        is_shared = self.metadata["joins"] > 1
        keep = private.keeps_graph() or graph or is_shared
        engine: Any = private.engine
        if not (self.is_checkpoint and private.is_checkpoint_valid()):
            found: Sequence[Any] = engine.run_backward(
                starts, gradients, keep, graph, tuple(self.ends), allow_unreachable=True, accumulate_grad=False
            )
            return found
        engine.run_backward(starts, gradients, keep, graph, (), allow_unreachable=True, accumulate_grad=True)
        return [_take_gradient(getattr(edge.node, "variable")) for edge in self.ends]  # noqa: B009


def _take_gradient(leaf: object) -> Any:
    """The gradient that torch left at a tensor of ours, taken away; a plain leaf keeps its own."""
    if not isinstance(leaf, Tensor):
        return None
    found = native(leaf, "grad")
    with private.DisableTorchFunctionSubclass():
        _base.grad.__set__(leaf, None)
    return found


def _meeting_topology(topology: Topology) -> Topology:
    """Where torch's graph and the arrays' meet: the parts of a mean or of a maximum have no gradient of their own."""
    is_sum = all(topology.placements[axis] == Partial("sum") for axis in topology.partial_axes)
    return topology if is_sum else topology.reduced


def _array_at_meeting(tensor: Tensor) -> torch.Tensor:
    """The array of a tensor where the graphs meet."""
    from meshloom.tensor.moving import carry

    return carry(tensor, _meeting_topology(tensor.topology), "autograd.Function")


def _expand_to(array: torch.Tensor, topology: Topology) -> torch.Tensor:
    """The array of a result, placed as the result is, from that of its value."""
    from meshloom.tensor.moving import carry

    with torch.enable_grad():
        return carry(Tensor(_meeting_topology(topology), array), topology, "autograd.Function")


class Join(torch.autograd.Function):
    """A piece of torch's graph as one node of the arrays' graph."""

    @staticmethod
    def forward(ctx: Any, piece: Piece, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The results' arrays."""
        ctx.piece = piece
        ctx.set_materialize_grads(False)
        return tuple(array.detach() for array in piece.arrays)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The gradients of the leaves' arrays."""
        return None, *ctx.piece.run(gradients)


def cotangent(gradient: torch.Tensor, topology: Topology) -> torch.Tensor:
    """A value's gradient from its array's: a partial sum has the same one on every device, and it is taken once."""
    if gradient._is_zerotensor():  # torch's zero without memory, as of sgn
        gradient = gradient.clone()
    for axis in topology.partial_axes:
        if topology.placements[axis] != Partial("sum"):
            raise GradientError(
                f"a tensor that is {topology.placements[axis]} has no gradient of its own",
                tensor=topology,
                fix=f"redistribute it first: x.redistribute({{{topology.mesh.axes[axis]!r}: Replicate()}})",
            )
        gradient = gradient[0]
    return gradient


def gradient_tensor(gradient: torch.Tensor, topology: Topology) -> Tensor:
    """The gradient of a tensor, from that of its array."""
    return Tensor(topology.reduced, fill(cotangent(gradient, topology), topology.reduced, 0))


def gradient_array(gradient: Any, topology: Topology, shape: tuple[int, ...]) -> torch.Tensor:
    """The gradient of a tensor's array, from that of the tensor: one of ours, or a plain one."""
    from meshloom.tensor.creation import place

    target = topology.reduced
    if not isinstance(gradient, Tensor):
        gradient = place(gradient, target.mesh, target.placements)
    data: torch.Tensor = gradient.redistribute(target.placements)._data
    return data.expand(shape)


def refuse_plain_results(tensor: Tensor) -> None:
    """A tensor is read while gradients are off: if a Function does, and gives a plain tensor, its backward refuses."""
    if not torch.is_grad_enabled():
        for each in (tensor, *_operands()):
            if each._data.requires_grad and "_guarded" not in vars(each):
                _guard(each)


def _operands() -> Iterator[Tensor]:
    """The tensors of ours that were given to the Functions whose forward is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_globals.get("__name__") == "torch.autograd.function":
            yield from (each for each in frame.f_locals.get("args", ()) if isinstance(each, Tensor))
        frame = frame.f_back


def _guard(tensor: Tensor) -> None:
    topology = tensor.topology
    tensor._guarded = True

    def refuse(gradient: torch.Tensor) -> None:
        if not _here.running:
            raise GradientError(
                "an autograd.Function took a tensor on a mesh and gave a plain one: its gradient would be lost",
                tensor=topology,
                fix="let the Function work on and give tensors on the mesh, or apply it to what each device holds: "
                "x.shard_at(at) and loom.from_local",
            )

    with private.DisableTorchFunctionSubclass():  # torch's register_hook would look at the array's node
        _base._backward_hooks.__set__(tensor, {0: refuse})
