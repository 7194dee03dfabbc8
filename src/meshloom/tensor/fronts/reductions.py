"""Fronts of reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import Front, table_call


def _max(name: str) -> Callable[..., Any]:
    """max and min: all elements, along a dim, or of two tensors."""
    amax, pair = {"max": ("amax", "maximum"), "min": ("amin", "minimum")}[name]

    def front(input: Any, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, (Tensor, torch.Tensor)):
            return table_call(pair, input, other, **{k: v for k, v in kwargs.items() if k != "other"})
        if args or "dim" in kwargs or "axis" in kwargs:
            return table_call(f"{name}_dim", input, *args, **kwargs)
        return table_call(amax, input, **kwargs)

    return front


def _var(input: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], bool):
        return table_call("var", input, None, *args, **kwargs)
    return table_call("var", input, *args, **kwargs)


REDUCTIONS: dict[str, Front] = {
    "max": _max("max"),
    "min": _max("min"),
    "var": _var,
}
