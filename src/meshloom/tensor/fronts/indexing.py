"""Fronts of indexing, assignment and views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.errors import ArgumentError
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import Front, own, table_call
from meshloom.tensor.fallback import fallback
from meshloom.tensor.writing import assign, fill, write_item, zero


def _getitem(input: Any, index: Any) -> Any:
    if _is_basic(index):
        return table_call("getitem", input, index)
    return fallback(torch.Tensor.__getitem__, (input, index), {}, "getitem")


def _copy_(input: Any, src: Any, non_blocking: bool = False) -> Any:
    if isinstance(own(input), Tensor):
        return assign(own(input), own(src))
    return fallback(torch.Tensor.copy_, (input, src), {}, "copy_")


def _fill_(input: Any, value: Any) -> Any:
    if isinstance(own(input), Tensor):
        return fill(own(input), own(value))
    return fallback(torch.Tensor.fill_, (input, value), {}, "fill_")


def _setitem(input: Any, index: Any, value: Any) -> None:
    if _is_basic(index) and isinstance(own(input), Tensor):
        write_item(own(input), index, own(value))
    else:
        fallback(torch.Tensor.__setitem__, (input, index, value), {}, "setitem")


def _is_basic(index: Any) -> bool:
    """Whether an index is made of ints, slices of ints, None and an ellipsis only."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(each is None or each is Ellipsis or _is_int(each) or _is_plain_slice(each) for each in parts)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_plain_slice(value: Any) -> bool:
    return isinstance(value, slice) and all(p is None or _is_int(p) for p in (value.start, value.stop, value.step))


def _transposed_matrix(input: Any) -> Any:
    if own(input).ndim > 2:
        raise ArgumentError(f"t() takes a tensor of at most 2 dims, not {own(input).ndim}", fix="use transpose or mT")
    return table_call("transpose", input, 0, 1) if own(input).ndim == 2 else input


def _view(input: Any, *shape: Any, **kwargs: Any) -> Any:
    if (shape and isinstance(shape[0], torch.dtype)) or isinstance(kwargs.get("dtype"), torch.dtype):
        return fallback(torch.Tensor.view, (input, *shape), kwargs, "view")
    return table_call("view", input, *shape, **kwargs)


def _as(name: str) -> Callable[..., Any]:
    return lambda input, other: table_call(name, input, *own(other).shape)


INDEXING: dict[str, Front] = {
    "getitem": _getitem,
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "t": _transposed_matrix,
    "view": _view,
    "expand_as": _as("expand"),
    "view_as": _as("view"),
    "reshape_as": _as("reshape"),
    "copy_": _copy_,
    "fill_": _fill_,
    "zero_": lambda input: zero(own(input)),
}
