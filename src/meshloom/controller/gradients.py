"""Gradients as the client sees them: who has one after a backward, which runs on the workers."""

from __future__ import annotations

import weakref
from typing import Any

from meshloom.controller.calls import Reading, issue, line_here, match_context, send
from meshloom.controller.tensors import (
    Node,
    RemoteTensor,
    lease_of,
    make_leaf,
    make_remote,
    nodes_from,
    set_tracked,
)
from meshloom.errors import GradientError, UnsupportedError
from meshloom.runtime import state
from meshloom.tensor.refusals import refuse_partial_leaf

_BACKWARD, _GRAD = "f:torch.autograd.backward", "f:torch.autograd.grad"


def requires_grad_(tensor: RemoteTensor, requires_grad: bool = True) -> RemoteTensor:
    """Ask for a gradient, or no longer."""
    tensor.topology.check_open()
    if bool(requires_grad) == bool(tensor._tracked):
        return tensor
    if requires_grad:
        refuse_partial_leaf(tensor.topology)
        if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
            raise GradientError(f"a tensor of {tensor.topology.dtype} has no gradient", fix="cast it: x.float()")
        make_leaf(tensor)
    elif tensor._tracked == 2:
        raise GradientError(
            "requires_grad of a tensor that was computed cannot be taken away", fix="x.detach() has no gradient"
        )
    else:
        set_tracked(tensor, 0, None)
    send(tensor, "m:requires_grad_", bool(requires_grad))
    return tensor


def retain_grad(tensor: RemoteTensor) -> None:
    """Keep the gradient of a tensor that was computed."""
    if not tensor._tracked:
        raise GradientError("retain_grad of a tensor without a gradient", tensor=tensor.topology)
    if tensor._tracked == 2:
        assert tensor._node is not None
        tensor._node.leaf, tensor._keeps_slope = weakref.ref(tensor), True
        send(tensor, "m:retain_grad")


def detach_(tensor: RemoteTensor) -> RemoteTensor:
    """Forget what it was computed from."""
    set_tracked(tensor, 0, None)
    send(tensor, "m:detach_")
    return tensor


def backward(
    self: RemoteTensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Accumulate gradients in the leaves that a tensor was computed from."""
    autograd_backward([self], [gradient], retain_graph, create_graph, inputs=inputs)


def autograd_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` on tensors of a cluster."""
    starts = _starts(tensors, grad_tensors)
    wanted = None if inputs is None else {id(each) for each in _as_list(inputs)}
    lease = lease_of(starts[0].topology)
    call = Reading(_BACKWARD, lease)
    with lease.session.lock:
        args = [call.read(each) for each in (starts, grad_tensors, retain_graph, bool(create_graph))]
        named = {"inputs": call.read(_as_list(inputs))} if inputs is not None else 0
        match_context(lease.session)
        issue(lease.session, ["c", _BACKWARD, args, named, [], line_here(3), 0], None)
    for leaf in _reached(starts):
        if wanted is None or id(leaf) in wanted:
            leaf._has_slope = leaf._is_old = True


def autograd_grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[RemoteTensor | None, ...]:
    """`torch.autograd.grad` on tensors of a cluster."""
    if is_grads_batched:
        raise UnsupportedError("is_grads_batched=True does not work on a mesh", fix="ask for one gradient at a time")
    starts, wanted = _starts(outputs, grad_outputs), _as_list(inputs)
    lease = lease_of(starts[0].topology)
    reached = {id(node) for node in nodes_from(_nodes(starts))}
    for each in wanted:
        if not isinstance(each, RemoteTensor):
            raise UnsupportedError("the gradient of a plain tensor does not come back from workers", fix=_FIX)
        if each._node is None:
            raise GradientError("one of the inputs does not require a gradient", tensor=each.topology)
    is_used = [id(each._node) in reached for each in wanted]
    if not all(is_used) and not allow_unused and not materialize_grads:
        raise GradientError("the outputs do not depend on one of the inputs", fix="allow_unused=True gives None for it")
    made = [
        make_remote(lease.session, each.topology.reduced) if used or materialize_grads else None
        for each, used in zip(wanted, is_used, strict=True)
    ]
    call = Reading(_GRAD, lease)
    with lease.session.lock:
        args = [call.read(each) for each in (starts, wanted, grad_outputs, retain_graph, bool(create_graph))]
        named = {"allow_unused": bool(allow_unused), "materialize_grads": bool(materialize_grads)}
        match_context(lease.session)
        numbers = [each._id for each in made if each is not None]
        issue(lease.session, ["c", _GRAD, args, named, numbers, line_here(3), 0], None)
    if create_graph:
        node = Node(tuple(_nodes([*starts, *_as_list(grad_outputs)])))
        for each in made:
            if each is not None:
                set_tracked(each, 2, Node((node,)))
    return tuple(made)


_FIX = "put it on the mesh: loom.Parameter(w, mesh, placements)"


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _nodes(tensors: list[Any]) -> list[Node]:
    return [each._node for each in tensors if isinstance(each, RemoteTensor) and each._node is not None]


def _starts(tensors: Any, seeds: Any) -> list[RemoteTensor]:
    starts = _as_list(tensors)
    given = _as_list(seeds) if seeds is not None else [None] * len(starts)
    for each, seed in zip(starts, given, strict=True):
        if not isinstance(each, RemoteTensor):
            raise UnsupportedError("backward starts from a plain tensor beside one of a cluster", fix=_FIX)
        if not each._tracked:
            raise GradientError(
                "backward starts from a tensor that does not require a gradient",
                tensor=each.topology,
                fix="call requires_grad_() on what it is computed from, outside of torch.no_grad()",
            )
        if seed is None and each.numel() != 1:
            raise GradientError(
                "backward starts from one number and this tensor has more",
                tensor=each.topology,
                fix="reduce it first, as in y.sum().backward(), or give backward(gradient=...)",
            )
    return starts


def _reached(starts: list[RemoteTensor]) -> list[RemoteTensor]:
    found = [node.leaf() for node in nodes_from(_nodes(starts)) if node.leaf is not None]
    return [each for each in found if each is not None and each._tracked]


def gradient_of(tensor: RemoteTensor) -> RemoteTensor | None:
    """The gradient of a leaf, as the workers have it; no value is fetched."""
    tensor.topology.check_open()
    if not tensor._has_slope or state.shadows is not None:
        return None
    if tensor._slope is None or tensor._is_old:
        tensor._slope = make_remote(tensor._session, tensor.topology.reduced)
        tensor._is_old = False
        send(tensor, "get:grad", results=[tensor._slope._id])
    return tensor._slope


def set_gradient(tensor: RemoteTensor, value: Any) -> None:
    """Replace a leaf's gradient; None takes it away."""
    tensor.topology.check_open()
    tensor._slope, tensor._has_slope, tensor._is_old = None, value is not None, True
    send(tensor, "set:grad", value)
