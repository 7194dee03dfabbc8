"""The methods and operators of `Tensor`, attached from the op table and the overloads.

The operators hold the hot path: while nothing special is going on, a call seen before is one look-up and the kernel.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy
import torch

from meshloom.comms.deferred import drop, is_waiting
from meshloom.engines import private
from meshloom.engines.kernel import function_of
from meshloom.engines.layout import fill
from meshloom.errors import ArgumentError, GradientError
from meshloom.ops import ALIASES, OPS
from meshloom.placement import Topology
from meshloom.processes.divergence import STORY
from meshloom.runtime import state
from meshloom.tensor import distributed_checkpoint, dtensors
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import INPLACE, OVERLOADS, invoke, is_written
from meshloom.tensor.creation import place
from meshloom.tensor.dispatch import call
from meshloom.tensor.entries import CACHE, MASK, Entry, identity
from meshloom.tensor.fallback import fallback
from meshloom.tensor.functions import on_torch
from meshloom.tensor.gradient_sums import discard, watch_dense
from meshloom.tensor.joining import (
    callers,
    cotangent,
    gradient_array,
    gradient_tensor,
    is_noticed,
    native,
    notice,
    refuse_plain_results,
)
from meshloom.tensor.memory import data_ptr, storage, untyped_storage
from meshloom.tensor.moving import read, redistribute, same_storage, shadow_of, to_dense, to_torch
from meshloom.tensor.quick import call_quickly, write_quickly
from meshloom.tensor.reading import as_tensor
from meshloom.tensor.refusals import refuse_partial_leaf, refuse_several, transforms_refused

_any_autocast = private.is_any_autocast_enabled


def _binary(name: str) -> Callable[[Tensor, object], Any]:
    get, is_cast = CACHE.get, OPS[name].is_cast

    def operator(self: Tensor, other: object) -> Any:
        if other.__class__ is Tensor and state.plain and not (is_cast and _any_autocast()):
            entry = get((name, self.topology, other.topology))
            if entry is not None:
                if entry.salt:
                    return run_split(name, entry, self, other)
                direct = entry.direct
                if direct is not None:
                    try:
                        result = direct(self._data, other._data)
                    except RuntimeError:  # in the general way: beside one without data, or with a better error
                        return call(name, (self, other), {})
                else:
                    kernel = entry.kernel
                    function = kernel.bound if kernel.bound is not None else function_of(name)
                    result = kernel.run((self._data, other._data), function)
                if entry.communicates_back and result.requires_grad:
                    result = entry.follow(result, (self, other))
                return entry.wrap(result)
        elif other.__class__ in _NUMBERS:
            if state.plain and not (is_cast and _any_autocast()):
                entry = get((name, self.topology, other.__class__))
                if entry is not None and entry.direct is not None:
                    made = entry.wrap(entry.direct(self._data, other))
                    if entry.salt:
                        made._number = identity(entry.salt, (self,), (other,))
                    return made
        elif other.__class__ is torch.Tensor and state.plain:
            return operator(self, as_tensor(other, self.topology.mesh))
        elif not isinstance(other, _OPERANDS):
            return NotImplemented
        return call(name, (self, other), {})

    return operator


def run_split(name: str, entry: Entry, first: Tensor, second: Tensor) -> Tensor:
    """A call seen before, of two tensors on a mesh that processes split: what it works on is told."""
    number = hash((entry.salt, first._number, second._number)) & MASK  # as `identity`, a call less
    direct = entry.direct
    if direct is not None:
        result = direct(first._data, second._data)
    else:
        kernel = entry.kernel
        STORY.identity = number
        result = kernel.run((first._data, second._data), kernel.bound or function_of(name))
        STORY.identity = 0
    if entry.communicates_back and result.requires_grad:
        result = entry.follow(result, (first, second))
    free, tracked, dtype = entry.makers
    if result.__class__ is torch.Tensor and result.dtype is dtype and result.is_cpu and not entry.leased:  # as `wrap`
        made: Tensor = tracked() if result.requires_grad else free()
        made._data, made.topology = result, entry.out
    else:
        made = entry.wrap(result)
    made._number = number
    return made


_OPERANDS = (torch.Tensor, numpy.ndarray, numpy.generic, int, float, bool, complex)


_NUMBERS = frozenset((int, float))


def _operator(name: str) -> Callable[..., object]:
    def operator(self: Tensor, other: object) -> Any:
        if not isinstance(other, _OPERANDS):
            return NotImplemented
        return invoke(name, (self, other), {})

    return operator


def _describe(method: Callable[..., object], name: str) -> Callable[..., object]:
    method.__name__ = name
    method.__doc__ = f"As `torch.Tensor.{name}`, on a mesh."
    return method


def _method(name: str) -> Callable[..., object]:
    head = name if name in OVERLOADS else ALIASES.get(name, name)

    def method(self: Tensor, *args: object, **kwargs: object) -> Any:
        return call_quickly(head, name, (self, *args), kwargs)

    return _describe(method, name)


def _itself_or(name: str, is_itself: Callable[[Tensor, tuple[object, ...]], bool]) -> Callable[..., object]:
    """A method whose result often is the tensor: that is asked first."""

    def method(self: Tensor, *args: object, **kwargs: object) -> Any:
        if self.__class__ is Tensor and state.plain and not kwargs and is_itself(self, args):
            self.topology.check_open()
            return self
        return call_quickly(name, name, (self, *args), kwargs)

    return _describe(method, name)


def _writing_method(name: str) -> Callable[..., object]:
    """An in-place form of a pointwise op."""
    function = getattr(torch.Tensor, name, None)

    def method(self: Tensor, *args: object, **kwargs: object) -> Any:
        return write_quickly(name, function, (self, *args), kwargs)

    return _describe(method, name)


def _unary(name: str) -> Callable[..., object]:
    """A pointwise op of the table: without further arguments it has a short way too."""
    get = CACHE.get

    def method(self: Tensor, *args: object, **kwargs: object) -> Any:
        if not args and not kwargs and state.plain and not _any_autocast():
            entry = get((name, self.topology))
            if entry is not None and entry.direct is not None:
                made = entry.wrap(entry.direct(self._data))
                if entry.salt:
                    made._number = identity(entry.salt, (self,))
                return made
        return call_quickly(name, name, (self, *args), kwargs)

    return _describe(method, name)


def _attach() -> None:
    binary = {dunder: name for dunder, name in ALIASES.items() if dunder.startswith("__") and dunder not in _OWN}
    reverse = "__rsub__ __rtruediv__ __rpow__ __rmod__ __rfloordiv__ __rmatmul__ __rlshift__ __rrshift__".split()
    for dunder, name in binary.items():
        setattr(Tensor, dunder, _binary(name))
    for dunder in (*reverse, *INPLACE):
        setattr(Tensor, dunder, _operator(dunder))
    written = {op + "_" for op in OPS if is_written(op + "_") and hasattr(torch.Tensor, op + "_")} - {*OVERLOADS}
    for name in {*OPS, *ALIASES, *OVERLOADS, *written, *(op + "_" for op in OPS if is_written(op + "_"))}:
        if not name.startswith("_") and (name not in OPS or OPS[name].surface == "method"):
            pointwise = name in OPS and OPS[name].signature is None
            make = _unary if pointwise else _writing_method if name in written else _method
            setattr(Tensor, name, make(name))
    for name, attribute in _OWN.items():
        setattr(Tensor, name, attribute)
    private.leave_uncompiled(on_torch, *vars(Tensor).values())


def _size(self: Tensor, dim: int | None = None) -> Any:
    return self.shape if dim is None else self.shape[dim]


def _item(self: Tensor) -> Any:
    refuse_several(self.topology)
    return read(self, "item").item()


def _numpy(self: Tensor, **_: object) -> numpy.ndarray:
    found = read(self, "numpy")
    return (found.clone() if same_storage(found, self._data) else found).numpy()


def _array(self: Tensor, dtype: numpy.dtype | None = None, copy: bool | None = None) -> numpy.ndarray:
    found = read(self, "numpy").numpy()
    return found.astype(dtype) if dtype is not None else numpy.array(found)


def _len(self: Tensor) -> int:
    if not self.topology.shape:
        raise ArgumentError(
            "len() of a 0-d tensor",
            fix="x.item() reads it; torch.tensor and torch.as_tensor take no tensor on a mesh: use x.to_torch()",
        )
    return self.topology.shape[0]


def _item_at(self: Tensor, index: object) -> Any:
    """Indexing, and iteration too: with `__iter__` a tensor would pass for a list in `Optimizer.load_state_dict`."""
    if not self.topology.shape and isinstance(index, int):
        raise ArgumentError("a 0-d tensor has nothing to index or iterate over", fix="use x.item()")
    return call_quickly("getitem", "__getitem__", (self, index), {})


def _bool(self: Tensor) -> bool:
    if self.numel() != 1:
        raise ArgumentError(
            f"the truth of a tensor of {self.numel()} elements is ambiguous",
            tensor=self.topology,
            fix="use x.any() or x.all()",
        )
    return bool(read(self, "bool").item())


def _requires_grad_(self: Tensor, requires_grad: bool = True) -> Tensor:
    """Ask for a gradient; a Partial tensor cannot be a leaf."""
    if requires_grad and not self._data.requires_grad:
        refuse_partial_leaf(self.topology)
        if not (self._data.is_floating_point() or self._data.is_complex()):
            raise GradientError(f"a tensor of {self.topology.dtype} has no gradient", fix="cast it: x.float()")
        if self._data._is_view():  # torch looks for the gradient of a view that is written at the end of the chain
            self._replace(self._data.detach())
    self._data.requires_grad_(requires_grad)
    self._mirror()
    return self


def _set_requires_grad(self: Tensor, value: bool) -> None:
    _requires_grad_(self, bool(value))


def _share_memory_(self: Tensor) -> Tensor:
    self._data.share_memory_()
    return self


def gradient_of(tensor: Tensor) -> Tensor | None:
    """The gradient of a leaf, placed as the leaf is, its padding zero; backward has summed it."""
    kept = tensor._gradient
    if kept is not None and kept[2] and state.plain and not state.waiting:
        data = tensor._data
        if data.is_leaf and data.grad is kept[0] and not (kept[3] and is_waiting(data)):
            return kept[1]
    if state.shadows is not None:
        tensor = shadow_of(tensor)
    if state.waiting or tensor.topology.mesh.is_split:
        tensor._check_summed()
    data = tensor._data
    if not (data.is_leaf or data.retains_grad):
        return None
    found = data.grad
    if found is None:
        return None
    kept = tensor._gradient
    if kept is not None and kept[0] is found:
        if tensor.topology.padded:  # backward may have added to it since
            with torch.no_grad():
                kept[1]._mask_padding_()
        return kept[1]
    if found._is_zerotensor():
        found = tensor._data.grad = found.clone()
    if found.requires_grad:  # of create_graph: the mask belongs to the graph
        found = fill(found, tensor.topology.reduced, 0)
        tensor._data.grad = found
    made = Tensor(tensor.topology.reduced, cotangent(found, tensor.topology))
    made._number = tensor._number + 1
    if tensor.topology.padded:
        with torch.no_grad():
            made._mask_padding_()
    if found is made._data:
        topology = tensor.topology  # the same tensor as long as it is the same array
        is_simple = not (topology.padded or topology.mesh.lease is not None)
        tensor._gradient = (found, made, is_simple, topology.mesh.is_split)
    return made


def _place_like(value: Any, like: Topology) -> Tensor:
    """A tensor, of any mesh or a dense one, with the mesh and the placements of another."""
    if isinstance(value, Tensor) and value.mesh == like.mesh:
        return redistribute(value, like.placements)
    dense = to_dense(value, "to_torch", on_host=True) if isinstance(value, Tensor) else value
    return place(dense, like.mesh, like.placements)


def set_gradient(tensor: Tensor, value: object) -> None:
    """Replace a leaf's gradient; None takes it away."""
    if value is None and state.plain and not state.waiting:
        if tensor.topology.mesh.is_split:
            drop(tensor._data)
        tensor._gradient = tensor._data.grad = None
        return
    tensor = shadow_of(tensor)
    discard(tensor)
    tensor._gradient = None  # nobody else may keep the old one in memory
    if value is None:
        tensor._data.grad = None
        return
    tensor._data.grad = _place_like(value, tensor.topology.reduced)._data


def _register_hook(self: Tensor, hook: Callable[[Tensor | None], object]) -> Any:
    # not the tensor, which would keep itself and its graph for ever
    topology, shape = self.topology, tuple(self._data.shape)

    def on_array(gradient: torch.Tensor | None) -> torch.Tensor | None:
        result = hook(None if gradient is None else gradient_tensor(gradient, topology))
        return None if result is None else gradient_array(result, topology, shape)

    return self._data.register_hook(on_array)


def _register_post_hook(self: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Call `hook` with the tensor when backward has added to its gradient."""
    here = weakref.ref(self)

    def on_array(_: torch.Tensor) -> None:
        tensor = here()
        if tensor is not None:
            hook(tensor)

    return self._data.register_post_accumulate_grad_hook(on_array)


def _detach_(self: Tensor) -> Tensor:
    self._replace(self._data.detach())  # what we hold may be a view, which torch would not detach in place
    return self


def _transpose_all(self: Tensor) -> torch.Tensor:
    return self.permute(tuple(reversed(range(self.ndim))))


def _matrix_transposed(self: Tensor) -> torch.Tensor:
    return self.transpose(-2, -1)


def _data_of(self: Tensor) -> Tensor:
    result: Tensor = invoke("detach", (self,), {})
    return result


def _set_data(self: Tensor, value: Any) -> None:
    """Another value, of another shape and dtype as well; it has our placements where it has our dims."""
    placed = _place_like(value, self.topology) if value.ndim == self.ndim else _as_it_is(value, self.mesh)
    self._data.data = placed._data.detach()
    vars(self).pop("_dense", None)
    if placed.dtype != native(self, "dtype") or placed.shape != native(self, "shape"):
        with private.DisableTorchFunctionSubclass():
            private.TensorBase.data.__set__(self, placed.detach())
    self.topology = placed.topology


def _as_it_is(value: Any, mesh: Any) -> Tensor:
    on_mesh = isinstance(value, Tensor) and value.mesh == mesh
    return (
        value
        if on_mesh
        else place(to_dense(value, "to_torch", on_host=True) if isinstance(value, Tensor) else value, mesh, {})
    )


def _torch_dispatch(cls: type, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
    """What C++ calls by itself: a question about a result that it records, or a function on our tensors."""
    if function is torch.ops.prim.layout.default:
        notice(args[0])
        return torch.strided
    if _is_transformed():
        raise transforms_refused()
    if function is torch.ops.aten.detach.default:
        tensor = args[0]
        return notice(Tensor(tensor.topology, tensor._data.detach()))
    return fallback(function, args, kwargs or {}, function.overloadpacket.__name__)


def _is_transformed() -> bool:
    """Whether a transform of torch.func is under way: it calls from Python, further up."""
    return any(name.startswith("torch._functorch.") for name in callers())


_OWN: dict[str, Any] = {
    "to": _itself_or("to", lambda self, args: len(args) == 1 and args[0] is self._data.dtype),
    "contiguous": _itself_or(
        "contiguous", lambda self, args: not args and (self._view is None or self._data.is_contiguous())
    ),
    "resolve_conj": _itself_or("resolve_conj", lambda self, args: not self._data.is_conj()),
    "resolve_neg": _itself_or("resolve_neg", lambda self, args: not self._data.is_neg()),
    "share_memory_": _share_memory_,
    "size": _size,
    "numel": lambda self: math.prod(self.topology.shape),
    "nelement": lambda self: math.prod(self.topology.shape),
    "dim": lambda self: len(self.topology.shape),
    "ndimension": lambda self: len(self.topology.shape),
    "is_complex": lambda self: self._data.is_complex(),
    "is_floating_point": lambda self: self._data.is_floating_point(),
    "is_signed": lambda self: self._data.is_signed(),
    "is_contiguous": lambda self, **_: True,
    "is_same_size": lambda self, other: self.shape == other.shape,
    "element_size": lambda self: self._data.element_size(),
    "_read": lambda self, call: to_dense(shadow_of(self), call, on_host=True).detach(),
    "_seen": staticmethod(watch_dense),
    "data_ptr": data_ptr,
    "untyped_storage": untyped_storage,
    "storage": storage,
    "_guard": refuse_plain_results,
    "item": _item,
    "tolist": lambda self: read(self, "tolist").tolist(),
    "numpy": _numpy,
    "to_torch": to_torch,
    "redistribute": redistribute,
    "requires_grad_": _requires_grad_,
    "retain_grad": lambda self: self._data.retain_grad(),
    "register_hook": _register_hook,
    "register_post_accumulate_grad_hook": _register_post_hook,
    "detach_": _detach_,
    "T": property(_transpose_all),
    "mT": property(_matrix_transposed),
    "data": property(_data_of, _set_data),
    "grad": property(gradient_of, set_gradient, lambda self: set_gradient(self, None)),
    "grad_fn": property(lambda self: native(self, "grad_fn") if is_noticed(self) else shadow_of(self)._data.grad_fn),
    "is_leaf": property(lambda self: self._data.is_leaf),
    "is_meta": property(lambda self: self._data.is_meta),
    "is_cpu": property(lambda self: self._data.is_cpu),
    "is_cuda": property(lambda self: self._data.is_cuda),
    "is_sparse": False,
    "layout": property(lambda self: self._data.layout),
    "retains_grad": property(lambda self: self._data.retains_grad),
    "nbytes": property(lambda self: self.numel() * self._data.itemsize),
    "itemsize": property(lambda self: self._data.itemsize),
    "_version": property(lambda self: self._data._version),
    "requires_grad": property(lambda self: self._data.requires_grad, _set_requires_grad),
    "__len__": _len,
    "__bool__": _bool,
    "__float__": lambda self: float(_item(self)),
    "__int__": lambda self: int(_item(self)),
    "__complex__": lambda self: complex(_item(self)),
    "__index__": lambda self: read(self, "index").__index__(),
    "__format__": lambda self, spec: format(_item(self), spec) if not self.topology.shape and spec else str(self),
    "__contains__": lambda self, value: bool((self == value).any()),
    "__array__": _array,
    "__array_priority__": 1000,
    "__hash__": object.__hash__,
    "__dir__": object.__dir__,
    "__neg__": lambda self: self.neg(),
    "__pos__": lambda self: self,
    "__abs__": lambda self: self.abs(),
    "__invert__": lambda self: self.bitwise_not(),
    "__getitem__": _item_at,
    "__setitem__": lambda self, index, value: invoke("__setitem__", (self, index, value), {}),
    "__torch_function__": MethodType(on_torch, Tensor),  # torch asks every tensor of a list for it: bound beforehand
    "__torch_dispatch__": classmethod(_torch_dispatch),
    "where": lambda self, condition, other: invoke("where", (condition, self, other), {}),
    **dtensors.METHODS,
    **distributed_checkpoint.METHODS,
}

_attach()
