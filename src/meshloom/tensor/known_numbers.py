"""Positions keep their values where everything else has none: programs branch on them.

A library around a model asks `torch.arange` for positions on the device of its activations, and looks at them: are
they one sequence or several packed together? On `meta` there would be nothing to look at. Inside of this mode such a
range is made with values, stays dense, and counts for its shape where it meets arrays without data.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshloom.engines import private

_META = torch.device("meta")
_DENSE = (torch.Tensor, torch.nn.Parameter)
_LISTS = (list, tuple)
_MOST = 1 << 22  # elements; a longer range is no positions


class KnownNumbers(TorchFunctionMode):
    """Ranges of whole numbers that are asked for on `meta` are made with their values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.arange and _is_on_meta(kwargs.get("device")):
            return _make_range(function, args, kwargs)
        if _is_mixed(args, kwargs):
            args, kwargs = private.tree_map_only(torch.Tensor, _without_data, (args, kwargs))
        return function(*args, **kwargs)


def _is_on_meta(device: Any) -> bool:
    return device is not None and torch.device(device) == _META


def _make_range(function: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = function(*args, **kwargs)
    known = not found.dtype.is_floating_point and found.numel() <= _MOST
    return function(*args, **{**kwargs, "device": "cpu"}) if known else found


def _is_dense(value: object) -> bool:
    return value.__class__ in _DENSE


def _is_mixed(args: Any, kwargs: Any) -> bool:
    """Whether dense tensors with and without data meet in one call."""
    kinds: set[bool] = set()
    _note_kinds(args, kinds)
    if kwargs:
        _note_kinds(kwargs.values(), kinds)
    return len(kinds) == 2


def _note_kinds(values: Iterable[Any], kinds: set[bool]) -> None:
    """Add whether dense tensors have data, also of those in lists; every call of a dry run comes here."""
    for each in values:
        kind = each.__class__
        if kind in _DENSE:
            if each.is_meta:
                kinds.add(True)
            elif each.ndim:
                kinds.add(False)
        elif kind in _LISTS:
            _note_kinds(each, kinds)
        elif kind is dict:
            _note_kinds(each.values(), kinds)


def _without_data(value: torch.Tensor) -> torch.Tensor:
    return value if value.is_meta or not _is_dense(value) else value.to(_META)
