"""A tensor that holds an array, and does nothing but unwrap and wrap: no mesh, no rules, no look-up.

What it costs over dense torch is about what any class of tensors written in Python costs on this machine: torch makes a
wrapper for every result and asks every tensor of a list for its class. It is written plainly, not tuned, so a tuned one
may cost less.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from meshloom.engines import private

_CPU = torch.device("cpu")
_LISTS = ("_foreach_", "_fused_")  # functions of lists; in place they return nothing that anybody uses


class Bare(torch.Tensor):
    """An array in a wrapper."""

    __slots__ = ("_data",)

    _data: torch.Tensor
    _is_param = False
    _kept: Any = (None, None)  # the gradient of the array, and its wrapper
    is_sparse = False

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What C++ calls by itself."""
        return _on_arrays(cls, function, types, args, kwargs)


def bare(array: torch.Tensor) -> Bare:
    """An array as a tensor of this class."""
    made: Bare = private.make_wrapper(
        Bare, array.shape, None, None, None, array.dtype, torch.strided, _CPU, False, array.requires_grad, None, False,
        False,
    )  # fmt: skip
    made._data = array
    return made


def bare_parameter(value: torch.Tensor) -> Bare:
    """A leaf that optimizers take."""
    made = bare(value.detach().clone().requires_grad_())
    made._is_param = True
    return made


def _wrap(result: Any) -> Any:
    if result.__class__ is torch.Tensor:
        return bare(result)
    return type(result)([_wrap(each) for each in result]) if isinstance(result, (tuple, list)) else result


def _unwrap(value: Any) -> Any:
    kind = value.__class__
    if kind is Bare:
        return value._data
    return kind([_unwrap(each) for each in value]) if kind is list or kind is tuple else value


def _on_arrays(cls: type, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    found = function(*map(_unwrap, args), **{name: _unwrap(each) for name, each in (kwargs or {}).items()})
    return None if function.__name__.startswith(_LISTS) and function.__name__.endswith("_") else _wrap(found)


def _method(name: str) -> Callable[..., Any]:
    function = getattr(torch.Tensor, name)

    def method(self: Bare, *args: Any, **kwargs: Any) -> Any:
        return _wrap(function(self._data, *[_unwrap(each) for each in args], **kwargs))

    def in_place(self: Bare, *args: Any, **kwargs: Any) -> Any:
        function(self._data, *[_unwrap(each) for each in args], **kwargs)
        private.increment_version((self,))
        return self

    return in_place if name.endswith("_") and not name.startswith("__") else method


def _gradient(self: Bare) -> Bare | None:
    found = self._data.grad
    if found is None:
        return None
    if self._kept[0] is not found:
        self._kept = (found, bare(found))
    return self._kept[1]  # type: ignore[no-any-return]


def _set_gradient(self: Bare, value: Any) -> None:
    self._data.grad = None if value is None else _unwrap(value)


for _name in (
    "__add__ __radd__ __mul__ __rmul__ __sub__ __truediv__ __neg__ __getitem__ __matmul__ view transpose reshape "
    "contiguous to float pow mean rsqrt sqrt expand unsqueeze squeeze detach mul_ add_ addcmul_ addcdiv_ lerp_ zero_"
).split():
    setattr(Bare, _name, _method(_name))
for _name, _value in {
    "__torch_function__": MethodType(_on_arrays, Bare),
    "__hash__": object.__hash__,
    "grad": property(_gradient, _set_gradient),
    "shape": property(lambda self: self._data.shape),
    "device": property(lambda self: _CPU),
    "dtype": property(lambda self: self._data.dtype),
    "requires_grad": property(lambda self: self._data.requires_grad),
    "backward": lambda self: self._data.backward(),
    "to_torch": lambda self: self._data.detach(),
}.items():
    setattr(Bare, _name, _value)
