"""Stand-ins without data: while something is explained, every tensor is replaced by one on `meta`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from meshloom.tensor.base import Tensor


class Shadows:
    """The stand-in of each tensor that an explained program touches; one per tensor, so that writes are seen."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor; a tensor without data stands for itself."""
        if tensor._data.is_meta:
            return tensor
        found = self.known.get(id(tensor))
        if found is None:
            found = (tensor, self._make(tensor))
            self.known[id(tensor)] = found
        return found[1]

    def _make(self, tensor: Tensor) -> Tensor:
        data = tensor._data
        shape = torch.empty_like(data, device="meta", requires_grad=False)
        if data.requires_grad:
            shape.requires_grad_()
            shape = shape if data.is_leaf else shape.view_as(shape)
        made = Tensor(tensor.topology, shape)
        if tensor._view is not None:
            base, moved = tensor._view
            made._view = (self.of(base) if moved else made, moved)
        return made


@contextmanager
def optimizers_kept() -> Iterator[None]:
    """Optimizers that step meanwhile are afterwards as before: without new averages, their steps not counted."""
    kept: dict[Optimizer, dict[Any, dict[str, Any]]] = {}

    def keep(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in kept:
            tables = optimizer.state.items()
            kept[optimizer] = {p: {name: _copied(value) for name, value in each.items()} for p, each in tables}

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()
        for optimizer, tables in kept.items():
            optimizer.state.clear()
            optimizer.state.update(tables)


def _copied(value: Any) -> Any:
    """A copy of a dense count, which a step changes in place; tensors on a mesh have stand-ins meanwhile."""
    return value.clone() if isinstance(value, torch.Tensor) else value
