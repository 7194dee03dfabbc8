"""Parameters that a model lost when it went to a mesh or came back: an optimizer that still steps them is refused.

Such an optimizer was made before. Its steps would change nothing in the model, and nobody would hear of it. A parameter
that its place has again, or whose module is gone, may be stepped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from meshloom.errors import ArgumentError


class Place(NamedTuple):
    """Where a parameter was, and what took it away."""

    owner: weakref.ref[torch.nn.Module]
    attribute: str
    name: str
    by: str

    def has_another(self, parameter: torch.Tensor) -> bool:
        """Whether the module is still there and holds another parameter now."""
        owner = self.owner()
        return owner is not None and owner._parameters.get(self.attribute) is not parameter


_replaced = WeakTensorKeyDictionary()  # the places of each parameter
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # and at which change
_changes = 0
_is_hooked = False


def note_replaced(places: Iterable[tuple[torch.Tensor, torch.nn.Module, str, str]], by: str) -> None:
    """Remember what a model has lost: parameters with the module, the attribute and the name that they had."""
    global _changes, _is_hooked
    _changes += 1
    for parameter, owner, attribute, name in places:
        if isinstance(parameter, torch.nn.Parameter):
            _replaced.setdefault(parameter, []).append(Place(weakref.ref(owner), attribute, name, by))
    if not _is_hooked:
        register_optimizer_step_pre_hook(_check)
        _is_hooked = True


def _check(optimizer: Any, args: object, kwargs: object) -> None:
    """Before a step: look at the parameters of an optimizer, once after every change of a model."""
    if _checked.get(optimizer) == _changes:
        return
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        for place in _replaced.get(parameter, ()):
            if place.has_another(parameter):
                kind = type(optimizer).__name__
                raise ArgumentError(
                    f"this {kind} holds {place.name!r} as it was before {place.by}: its steps do not reach the model",
                    fix=f"make the optimizer after {place.by}: torch.optim.{kind}(model.parameters(), ...)",
                )
    _checked[optimizer] = _changes
