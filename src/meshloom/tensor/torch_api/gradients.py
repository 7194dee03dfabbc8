"""`backward` and `torch.autograd` on our tensors."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.comms.deferred import deferred_gradients, sum_parts
from meshloom.errors import GradientError
from meshloom.tensor import creation
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import Overload
from meshloom.tensor.gradient_sums import asking, give, watch_backward
from meshloom.tensor.joining import gradient_tensor
from meshloom.tensor.moving import shadow_of


def _autograd_grad(*args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
    """`torch.autograd.grad` for our tensors: gradients have the placements of their values."""
    with asking():
        return _grad(*args, **kwargs)


def _grad(
    outputs: object, inputs: object, grad_outputs: object = None, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, ...]:
    ins = _as_list(inputs)
    start, seeded = _starts(outputs, grad_outputs)
    held = [_array_of(each) for each in ins]
    others = [[each.array for each in deferred_gradients(array)] for array in held]
    if not any(others):
        with watch_backward(start):
            found = torch.autograd.grad(start, held, seeded, *args, **kwargs)
        _give_all(ins)
        return tuple(_dual(value, each) for value, each in zip(ins, found, strict=True))
    flat = [*held, *(array for each in others for array in each)]
    with watch_backward(start):
        parts = iter(torch.autograd.grad(start, flat, seeded, *args, **{**kwargs, "allow_unused": True}))
    firsts = [next(parts) for _ in held]
    _give_all(ins)
    sums = [
        sum_parts(array, first, [next(parts) for _ in each])
        for array, first, each in zip(held, firsts, others, strict=True)
    ]
    allowed = kwargs.get("allow_unused") or kwargs.get("materialize_grads") or any(args[3:4])
    if not allowed and any(each is None for each in sums):
        raise GradientError("the outputs do not depend on one of the inputs", fix="allow_unused=True gives None for it")
    return tuple(_dual(value, each) for value, each in zip(ins, sums, strict=True))


def _give_all(inputs: list[object]) -> None:
    """The sums of the gradients that are given are carried out now."""
    for value in inputs:
        if isinstance(value, Tensor):
            give(shadow_of(value))


def _as_list(values: object) -> list[object]:
    return list(values) if isinstance(values, (tuple, list)) else [values]


def _dual(value: object, gradient: torch.Tensor | None) -> Any:
    if gradient is None or not isinstance(value, Tensor):
        return gradient
    return gradient_tensor(gradient, value.topology)


def _root(value: Any) -> torch.Tensor:
    """The array that backward starts from: a partial sum is reduced first."""
    if not isinstance(value, Tensor):
        result: torch.Tensor = value
        return result
    tensor = shadow_of(value)
    if tensor.topology.partial_axes:
        tensor = tensor.redistribute(tensor.topology.reduced.placements)
    return tensor._data


def _seed(seed: Any, out: Any) -> torch.Tensor:
    tensor = shadow_of(out)
    if isinstance(seed, Tensor):
        result: torch.Tensor = seed.redistribute(tensor.topology.reduced.placements)._data
        return result
    return creation.place(seed, tensor.mesh, tensor.topology.reduced.placements)._data


def _start(value: object, seed: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where backward starts from, and with what; a number starts with 1."""
    root = _root(value)
    if not isinstance(value, Tensor):
        return root, seed
    if seed is None and value.numel() != 1:
        raise GradientError(
            "backward starts from one number and this tensor has more",
            tensor=value.topology,
            fix="reduce it first, as in y.sum().backward(), or give backward(gradient=...)",
        )
    if seed is None and root.numel() != 1:
        seed = creation.ones_like(shadow_of(value))
    return root, None if seed is None else _seed(seed, value)


def _starts(outputs: object, seeds: object) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    outs = _as_list(outputs)
    given = [None] * len(outs) if seeds is None else _as_list(seeds)
    pairs = [_start(out, seed) for out, seed in zip(outs, given, strict=True)]
    return [root for root, _ in pairs], [seed for _, seed in pairs]


def backward(
    self: object,
    gradient: torch.Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: object = None,
) -> None:
    """Accumulate gradients in the leaves that this tensor was computed from."""
    _autograd_backward([self], [gradient], retain_graph, create_graph, inputs=inputs)


def _autograd_backward(
    tensors: object,
    grad_tensors: object = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: object = None,
    inputs: object = None,
) -> None:
    roots, seeds = _starts(tensors, grad_tensors)
    leaves = None if inputs is None else [_array_of(each) for each in _as_list(inputs)]
    if leaves is not None:
        leaves = [*leaves, *(each.array for leaf in leaves for each in deferred_gradients(leaf))]
    with watch_backward(roots):
        torch.autograd.backward(roots, seeds, retain_graph, create_graph, inputs=leaves)


def _array_of(value: Any) -> torch.Tensor:
    return shadow_of(value)._data if isinstance(value, Tensor) else value


GRADIENTS: dict[str, Overload] = {
    "backward": backward,
    "_autograd_grad": _autograd_grad,
    "_autograd_backward": _autograd_backward,
}
