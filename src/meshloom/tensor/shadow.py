"""Stand-ins without data: while something is explained, every tensor is replaced by one on `meta`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from meshloom.runtime.card_array import CardArray, without_data
from meshloom.tensor.base import Tensor
from meshloom.tensor.lazy import STORED, ask
from meshloom.tensor.views import MovedView, moved_view


class Shadows:
    """The stand-in of each tensor that an explained program touches; one per tensor, so that writes are seen."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor; a tensor without data stands for itself."""
        if STORED.__get__(tensor).is_meta:
            return tensor
        found = self.known.get(id(tensor))
        if found is None:
            found = (tensor, self._make(tensor))
            self.known[id(tensor)] = found
        return found[1]

    def _make(self, tensor: Tensor) -> Tensor:
        data = STORED.__get__(tensor)  # as it is: nothing is made again for the sake of its shape
        if _has_known_values(tensor):
            return Tensor(tensor.topology, tensor._data.clone())
        shape = _without_data(data)
        if data.requires_grad:
            shape.requires_grad_()
            shape = shape if data.is_leaf else shape.view_as(shape)
        made = Tensor(tensor.topology, shape)
        if tensor._view is not None:
            view = moved_view(tensor)
            shared = view is not None or tensor._recipe is not None
            made._view = (self.of(tensor._view[0]) if shared else made, view is not None, None)
            made._recipe = tensor._recipe
            if view is not None:
                ask(made, MovedView(self.of(view.base), view.recipe, view.tracked))
        return made


def _without_data(data: torch.Tensor) -> torch.Tensor:
    if isinstance(data, CardArray):
        return without_data(data)
    return torch.empty_like(data, device="meta", requires_grad=False)


def _has_known_values(tensor: Tensor) -> bool:
    """Whether it is computed with while something is explained: whole numbers and masks, which programs branch on.

    On a mesh that processes split they would communicate, and there they have no values.
    """
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex or tensor.topology.mesh.is_split)


class Untouched(TorchFunctionMode):
    """Dense tensors that are written to meanwhile have their value afterwards: a count of steps, or of batches."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        target: Any = args[0] if args else None
        is_written = name == "__setitem__" or (name.endswith("_") and (name[:3] == "__i" or name[-2:] != "__"))
        if is_written and _is_dense(target) and id(target) not in self.kept:
            self.kept[id(target)] = (target, target.detach().clone())
        return function(*args, **(kwargs or {}))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for target, value in self.kept.values():
                target.copy_(value)


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and not isinstance(value, Tensor) and not value.is_meta


@contextmanager
def optimizers_kept() -> Iterator[None]:
    """Optimizers that step meanwhile are afterwards as before, without new averages."""
    kept: dict[Optimizer, dict[Any, dict[str, Any]]] = {}

    def keep(optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer not in kept:
            kept[optimizer] = {parameter: dict(table) for parameter, table in optimizer.state.items()}

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield
    finally:
        handle.remove()
        for optimizer, tables in kept.items():
            optimizer.state.clear()
            optimizer.state.update(tables)
