"""The methods and operators of `RemoteTensor`, one for each of `Tensor`: most go to the workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

from meshloom.controller import gradients, reading
from meshloom.controller.calls import forward, send
from meshloom.controller.functions import PROPERTIES, torch_names
from meshloom.controller.tensors import RemoteTensor
from meshloom.engines import private
from meshloom.errors import UnsupportedError
from meshloom.tensor.base import Tensor
from meshloom.tensor.functions import KNOWN, on_torch


def _method(name: str, function: Any) -> Callable[..., Any]:
    code = f"m:{name}"

    def method(self: RemoteTensor, *args: Any, **kwargs: Any) -> Any:
        return forward(code, function, (self, *args), kwargs)

    method.__name__, method.__doc__ = name, getattr(function, "__doc__", None)
    return method


def _operator(name: str, function: Any) -> Callable[..., Any]:
    code = f"m:{name}"

    def operator(self: RemoteTensor, other: Any) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return forward(code, function, (self, other), {})

    operator.__name__ = name
    return operator


_OPERANDS = (torch.Tensor, numpy.ndarray, numpy.generic, int, float, bool, complex)


def _property(name: str, settable: bool) -> property:
    def get(self: RemoteTensor) -> Any:
        return forward(f"get:{name}", lambda each: getattr(each, name), (self,), {})

    def put(self: RemoteTensor, value: Any) -> None:
        forward(f"set:{name}", lambda each, given: setattr(each, name, given), (self, value), {})

    return property(get, put if settable else None)


def _refuse(what: str, fix: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(f"{what} of a tensor whose values are in other processes", fix=fix)

    return refuse


def _refuse_hook(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedError(
        "a hook on a tensor of a cluster would have to run inside of a worker's backward",
        reason="code of the client runs on the client only",
        fix="look at x.grad after backward, or write the change as ops on it",
    )


def _torch_function(
    cls: type, function: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Everything of torch's on a tensor of a cluster."""
    named = kwargs or {}
    known = KNOWN.get(function)
    if known in _GRADIENTS:
        return _GRADIENTS[known](*args, **named)
    spelled = getattr(function, "__name__", "")
    if spelled in ("__get__", "__set__", "__delete__"):
        return _access(function, spelled, args)
    first = args[0] if args else None
    if spelled in _ANSWERED and isinstance(first, RemoteTensor):
        return getattr(first, spelled)(*args[1:], **named)
    if getattr(function, "__module__", "") == torch.nn.init.__name__:  # its own body, on our methods
        with private.DisableTorchFunctionSubclass():
            return function(*args, **named)
    name = torch_names().get(function)
    if name is None:
        raise UnsupportedError(
            f"workers do not know {spelled or function}", fix="fetch the tensor first: x.to_torch(), or use ops"
        )
    code = name if name.startswith("known:") else f"f:{name}"
    return forward(code, lambda *given, **rest: on_torch(Tensor, function, (), given, rest), args, named)


def _access(function: Any, kind: str, args: tuple[Any, ...]) -> Any:
    """An attribute of torch's class that ours does not define."""
    attribute = function.__self__.__name__
    if attribute in PROPERTIES and kind == "__get__":
        return forward(f"get:{attribute}", lambda each: getattr(each, attribute), args, {})
    with private.DisableTorchFunctionSubclass():
        return function(*args)


def _torch_dispatch(cls: type, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
    """What C++ calls by itself."""
    if (
        function is torch.ops.prim.layout.default
    ):  # a Function gives it as a result; an error here would end the process
        args[0]._is_foreign = True
        return torch.strided
    if function is torch.ops.aten.detach.default:
        return args[0].detach()
    raise UnsupportedError(f"torch called {function} by itself on a tensor of a cluster", fix="x.to_torch() first")


def _mark(self: RemoteTensor, value: bool) -> None:
    self._is_marked = bool(value)
    if value:
        send(self, "mark:parameter")


def _copy(self: RemoteTensor, *memo: dict[int, object]) -> RemoteTensor:
    """`copy.deepcopy` has memory of its own, `copy.copy` the same."""
    copied: Any = self.detach().clone() if memo else self.detach()
    copied.requires_grad_(bool(self._tracked))
    if self._is_marked:
        copied._is_param = True
    if memo:
        memo[0][id(self)] = copied
    made: RemoteTensor = copied
    return made


def _set_requires_grad(self: RemoteTensor, value: bool) -> None:
    gradients.requires_grad_(self, bool(value))


def _show(self: RemoteTensor, **_: object) -> str:
    name = "Parameter containing:\nTensor" if self._is_marked else "Tensor"
    if self.topology.is_closed:
        return f"{name} {self.topology}"
    return f"{name} {self.topology}{self._state()}\n{self._value_text()}"


_GRADIENTS: dict[Any, Any] = {
    "backward": gradients.backward,
    "_autograd_backward": gradients.autograd_backward,
    "_autograd_grad": gradients.autograd_grad,
}

_OWN: dict[str, Any] = {
    # values
    "item": reading.item,
    "tolist": lambda self: reading.fetch(self, "tolist").tolist(),
    "numpy": lambda self, **_: reading.fetch(self, "numpy").numpy(),
    "to_torch": reading.to_torch,
    "_read": reading.fetch,
    "_value_text": lambda self: repr(reading.fetch(self, "repr")),
    "__repr__": _show,
    "__bool__": lambda self: bool(reading.item(self)),
    "__float__": lambda self: float(reading.item(self)),
    "__int__": lambda self: int(reading.item(self)),
    "__complex__": lambda self: complex(reading.item(self)),
    "__format__": lambda self, spec: format(reading.item(self), spec) if spec and not self.ndim else str(self),
    "__index__": lambda self: reading.fetch(self, "index").__index__(),
    "__array__": lambda self, dtype=None, copy=None: numpy.asarray(reading.fetch(self, "numpy").numpy(), dtype=dtype),
    # gradients
    "requires_grad_": gradients.requires_grad_,
    "requires_grad": property(lambda self: bool(self._tracked), _set_requires_grad),
    "is_leaf": property(lambda self: self._tracked != 2),
    "retain_grad": gradients.retain_grad,
    "retains_grad": property(lambda self: self._keeps_slope),
    "grad": property(gradients.gradient_of, gradients.set_gradient, lambda self: gradients.set_gradient(self, None)),
    "grad_fn": property(lambda self: self._node if self._tracked == 2 else None),
    "backward": gradients.backward,
    "detach_": gradients.detach_,
    "register_hook": _refuse_hook,
    "register_post_accumulate_grad_hook": _refuse_hook,
    # what the client knows
    "is_meta": False,
    "is_cpu": True,
    "is_cuda": False,
    "layout": torch.strided,
    "nbytes": property(lambda self: self.numel() * self.dtype.itemsize),
    "itemsize": property(lambda self: self.dtype.itemsize),
    "_version": property(lambda self: self._writes),
    "_is_param": property(lambda self: self._is_marked, _mark),
    "is_complex": lambda self: self.dtype.is_complex,
    "is_floating_point": lambda self: self.dtype.is_floating_point,
    "is_signed": lambda self: self.dtype.is_signed,
    "element_size": lambda self: self.dtype.itemsize,
    # what it does not have
    "data_ptr": _refuse("data_ptr()", "x.to_torch().data_ptr()"),
    "untyped_storage": _refuse("untyped_storage()", "x.to_torch().untyped_storage()"),
    "storage": _refuse("storage()", "x.to_torch().storage()"),
    "shard_at": _refuse("shard_at()", "x.to_torch() fetches the whole tensor; x.topology.extent(place) has the shape"),
    "block": property(_refuse("the block", "x.to_torch() fetches the whole tensor")),
    "__deepcopy__": _copy,
    "__copy__": _copy,
    "__torch_function__": classmethod(_torch_function),
    "__torch_dispatch__": classmethod(_torch_dispatch),
    "__hash__": object.__hash__,
}
# those of `Tensor` that ask no array, or are written with other methods
_INHERITED = frozenset(
    "size numel nelement dim ndimension is_contiguous is_same_size mesh placements shape ndim topology is_sparse "
    "__len__ __contains__ __dir__ __pos__ __neg__ __abs__ __invert__ __array_priority__ _guard _seen where "
    "_state _repr_html_ __new__ __init__ __doc__ __module__ __slots__ __dict__ __weakref__ __annotations__ __getattr__ "
    "__init_subclass__ __class_getitem__ __reduce_ex__ _data dtype device".split()
)
_ANSWERED = frozenset({*_OWN, *_INHERITED} - {"where"})
# what writes arrays of this process
_REFUSED = frozenset("_replace _become _mirror _mirror_to _mask_padding_ _check_summed _value".split())


def attach() -> None:
    """Give the class its methods."""
    for name, attribute in vars(Tensor).items():
        if name in _OWN or name in _INHERITED:
            continue
        if name in _REFUSED:
            setattr(RemoteTensor, name, _refuse(f"{name}()", "use ops"))
        elif isinstance(attribute, property):
            if name in PROPERTIES:
                setattr(RemoteTensor, name, _property(name, attribute.fset is not None))
        elif callable(attribute) and not isinstance(attribute, type):
            is_operator = name.startswith("__") and name not in ("__getitem__", "__setitem__")
            setattr(RemoteTensor, name, (_operator if is_operator else _method)(name, attribute))
    for name, attribute in _OWN.items():
        setattr(RemoteTensor, name, attribute)
    private.leave_uncompiled(_torch_function, *vars(RemoteTensor).values())
