"""Fronts of indexing, assignment and views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from meshloom.errors import ArgumentError, GradientError, UnsupportedError
from meshloom.ops import OPS
from meshloom.ops.labels import normal_dim
from meshloom.ops.shapes import spelled_index
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import Overload, invoke, pure, table_call
from meshloom.tensor.fallback import fallback
from meshloom.tensor.joining import called_from, notice
from meshloom.tensor.moving import shadow_of
from meshloom.tensor.views import turn
from meshloom.tensor.writing import assign, fill, rewrite, write, write_item, zero

_TURNING = "t transpose swapdims swapaxes squeeze unsqueeze".split()
_COUNTING = (torch.int8, torch.int16, torch.int32, torch.int64)


def _getitem(input: torch.Tensor, index: object) -> Any:
    if _is_basic(index):
        return table_call("getitem", input, index)
    found = _by_tensors(index, input.ndim)
    if found is None:
        return fallback(torch.Tensor.__getitem__, (input, index), {}, "getitem")
    basic, indices = found
    return table_call("index", input if basic is None else _cut(input, basic), indices)


def _cut(input: torch.Tensor, basic: tuple[object, ...]) -> Tensor:
    """The basic part of an index, which torch takes first; what was asked of the result does not concern it."""
    with state.changed(output=None):
        return table_call("getitem", input, basic)


def _by_tensors(index: object, ndim: int) -> tuple[tuple[Any, ...] | None, tuple[Any, ...]] | None:
    """An index with tensors of whole numbers as its basic part (None: takes everything) and one entry per dim left.

    None for what has no rule: boolean masks, whose result depends on values, and 0-d tensors among others.
    """
    parts = [_as_index(each) for each in (index if isinstance(index, tuple) else (index,))]
    if not all(_is_tensor(each) or (_is_basic(each) and not isinstance(each, tuple)) for each in parts):
        return None
    counted = [each for each in parts if _is_tensor(each)]
    if any(each.dtype not in _COUNTING or (not each.ndim and len(counted) > 1) for each in counted):
        return None
    spelled = spelled_index(tuple(parts), ndim)
    basic = tuple(slice(None) if _is_tensor(each) else each for each in spelled)
    indices = [each if _is_tensor(each) else None for each in spelled if not _is_int(each)]
    while indices[-1] is None:
        indices.pop()
    return (None if all(each == slice(None) for each in basic) else basic), tuple(indices)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _as_index(value: object) -> Any:
    """Whole numbers in a list, or in a tuple within an index, and an array count as a tensor."""
    if isinstance(value, numpy.ndarray) or (isinstance(value, (list, tuple)) and value and all(map(_is_int, value))):
        return torch.as_tensor(value)
    return value


def _copy_(input: torch.Tensor, src: object, non_blocking: bool = False) -> Any:
    if isinstance(input, Tensor):
        return assign(input, src)
    return fallback(torch.Tensor.copy_, (input, src), {}, "copy_")


def _fill_(input: torch.Tensor, value: Any) -> Any:
    if isinstance(input, Tensor) and not (_is_tensor(value) and value.ndim):
        return fill(input, value)
    return fallback(torch.Tensor.fill_, (input, value), {}, "fill_")


def _setitem(input: torch.Tensor, index: Any, value: Any) -> None:
    target = input
    if not isinstance(target, Tensor):
        fallback(torch.Tensor.__setitem__, (input, index, value), {}, "setitem")
    elif _is_basic(index):
        write_item(target, index, value)
    elif _is_mask(index, target) and _is_held(value, target.dtype):
        wide = (..., *(None,) * (target.ndim - index.ndim))
        write("masked_fill", target, (index[wide], value), {})
    else:
        _set_by_tensors(target, index, value)


def _set_by_tensors(target: Tensor, index: object, value: Any) -> None:
    found = _by_tensors(index, target.ndim)
    is_taken = value.dtype == target.dtype if _is_tensor(value) else _is_held(value, target.dtype)
    if found is None or found[0] is not None or not is_taken:
        fallback(torch.Tensor.__setitem__, (target, index, value), {}, "setitem")
        return
    content = value if _is_tensor(value) else torch.tensor(value, dtype=target.dtype)
    rewrite("index_put", target, (found[1], content), {})


def _is_mask(index: Any, target: Tensor) -> bool:
    """Whether an index is a boolean tensor over the target's first dims."""
    mask = index
    return _is_tensor(mask) and mask.dtype == torch.bool and mask.ndim > 0 and mask.shape == target.shape[: mask.ndim]


def _is_held(value: object, dtype: torch.dtype) -> bool:
    """Whether a dtype holds a number as it is."""
    return (type(value) is int and dtype != torch.bool) or (type(value) is float and dtype.is_floating_point)


def _rewriting(name: str) -> Overload:
    """The in-place form of an op that changes some elements."""

    def overload(input: torch.Tensor, *args: object, **kwargs: object) -> Any:
        target = input
        if not isinstance(target, Tensor):
            return fallback(getattr(torch.Tensor, f"{name}_"), (input, *args), kwargs, f"{name}_")
        return rewrite(name, target, args, kwargs)

    return overload


def _index_put(
    input: torch.Tensor, indices: Sequence[Any], values: object, accumulate: bool = False, **kwargs: object
) -> Any:
    """Boolean masks have no rule: how many values they take depends on theirs."""
    if any(each is not None and each.dtype not in _COUNTING for each in indices):
        return fallback(torch.index_put, (input, indices, values, accumulate), {}, "index_put")
    return table_call("index_put", input, indices, values, accumulate, **kwargs)


def _index_put_(input: torch.Tensor, indices: Sequence[Any], values: object, accumulate: bool = False) -> Any:
    if not isinstance(input, Tensor) or any(each.dtype not in _COUNTING for each in indices):
        return fallback(torch.Tensor.index_put_, (input, indices, values, accumulate), {}, "index_put_")
    return rewrite("index_put", input, (indices, values, accumulate), {})


def _one_hot(input: torch.Tensor, num_classes: int = -1, **kwargs: object) -> Tensor:
    """Without a number of classes the largest value says it: one small reduction, and a read."""
    if num_classes == -1 and input.numel():
        num_classes = int(invoke("amax", (input,), {})) + 1
    return table_call("one_hot", input, num_classes, **kwargs)


def _select(input: torch.Tensor, dim: int, index: int) -> Tensor:
    place = normal_dim(dim, input.ndim)
    return table_call("getitem", input, (slice(None),) * place + (index,))


def _is_basic(index: object) -> bool:
    """Whether an index is made of ints, slices of ints, None and an ellipsis only."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(each is None or each is Ellipsis or _is_int(each) or _is_plain_slice(each) for each in parts)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_plain_slice(value: object) -> bool:
    return isinstance(value, slice) and all(p is None or _is_int(p) for p in (value.start, value.stop, value.step))


def _transposed_matrix(input: torch.Tensor) -> Any:
    if input.ndim > 2:
        raise ArgumentError(f"t() takes a tensor of at most 2 dims, not {input.ndim}", fix="use transpose or mT")
    return table_call("transpose", input, 0, 1) if input.ndim == 2 else input


def _make_turn_(name: str) -> Overload:
    """`t_` and its kind: the tensor becomes a view of what it was."""

    def overload(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        target = input
        tensor = shadow_of(target)
        if torch.is_grad_enabled() and tensor._data.requires_grad and tensor._data.is_leaf:
            raise GradientError(
                f"{name}_ would change a leaf that requires a gradient", tensor=tensor.topology, fix=f"use x.{name}()"
            )
        turn(tensor, lambda old: invoke(name, (old, *args), kwargs))
        return target

    return overload


def _fixed_shape(name: str) -> Overload:
    """What gives a tensor other memory or another shape: a topology does not change behind its tensor."""

    def overload(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        raise UnsupportedError(
            f"{name} is not for tensors on a mesh",
            tensor=input.topology,
            fix="make a new tensor, or x.copy_(value)",
        )

    return overload


def _set_(input: torch.Tensor, source: object = None, *rest: object, **kwargs: object) -> Any:
    """The memory of another tensor, as `x.data = source`; of storages and offsets a mesh knows nothing."""
    if rest or kwargs or not isinstance(source, Tensor) or source.dtype != input.dtype:
        return _fixed_shape("set_")(input)
    input.data = source
    return input


def _view(input: torch.Tensor, *shape: object, **kwargs: object) -> Any:
    if (shape and isinstance(shape[0], torch.dtype)) or isinstance(kwargs.get("dtype"), torch.dtype):
        return fallback(torch.Tensor.view, (input, *shape), kwargs, "view")
    return table_call("view", input, *shape, **kwargs)


def _narrow(input: torch.Tensor, dim: int, start: torch.Tensor | int, length: int) -> Tensor:
    return table_call("narrow", input, dim, int(start) if _is_tensor(start) else start, length)


def _view_as(input: Tensor, other: torch.Tensor) -> Tensor:
    """`Function.apply` makes a view of an operand that is given back as a result, and records its node there."""
    if input is other and called_from() == "torch.autograd.function":
        return notice(Tensor(input.topology, input._data.detach()))
    return table_call("view", input, *other.shape)


def _as(name: str) -> Callable[..., Tensor]:
    return lambda input, other: table_call(name, input, *other.shape)


INDEXING: dict[str, Overload] = {
    **pure({"getitem": _getitem, "__getitem__": _getitem, "select": _select, "narrow": _narrow}),
    **pure({"t": _transposed_matrix, "view": _view}),
    "__setitem__": _setitem,
    "expand_as": _as("expand"),
    "view_as": _view_as,
    "reshape_as": _as("reshape"),
    "copy_": _copy_,
    "fill_": _fill_,
    "zero_": lambda input: zero(input),
    "one_hot": _one_hot,
    "index_put": _index_put,
    "index_put_": _index_put_,
    **{f"{name}_": _rewriting(name) for name, op in OPS.items() if op.rewrites},
    **{f"{name}_": _make_turn_(name) for name in _TURNING},
    "set_": _set_,
    **{name: _fixed_shape(name) for name in ("resize_", "resize_as_", "as_strided_")},
}
