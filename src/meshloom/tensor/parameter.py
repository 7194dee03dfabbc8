"""Parameters and their gradients: torch tensors to `torch.nn` and `torch.optim`, meshloom tensors underneath.

Both are wrapper subclasses without storage: they carry shape, dtype and identity, and hand every call to the tensor
inside, so that modules register them and any optimizer updates them in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from meshloom.errors import ArgumentError, GradientError, MeshError
from meshloom.mesh import Mesh
from meshloom.mesh.mesh import Homes, _made
from meshloom.placement import Partial, Placements, Replicate, Shard, Topology, as_placements
from meshloom.tensor.base import Tensor, refuse_checkpoint, refuse_part
from meshloom.tensor.calling import invoke, own, torch_function
from meshloom.tensor.creation import distribute
from meshloom.tensor.dispatch import refuse_partial_leaf, transforms_refused
from meshloom.tensor.functions import KNOWN, on_torch
from meshloom.tensor.methods import gradient_of, set_gradient
from meshloom.tensor.moving import redistribute

_FORWARDED = (
    "topology placements mesh block T mT ndim is_meta is_leaf grad_fn to_torch redistribute shard_at tolist item numpy "
    "size numel nelement dim requires_grad_ register_hook retain_grad __len__ __bool__ __float__ __int__ "
    "__index__ __array__ __contains__ _repr_html_"
).split()


class Mirror(torch.Tensor):
    """A torch tensor that stands for a meshloom tensor; every call goes to the tensor inside."""

    _loom: Tensor

    @staticmethod
    def _mirror(cls: type, tensor: Tensor, requires_grad: bool) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, tensor.topology.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=requires_grad
        )
        made._loom = tensor
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in KNOWN and getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__"):
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        return on_torch(function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        result = invoke(name, args, kwargs or {}, torch_function(name))
        if isinstance(result, Tensor):  # torch's inside takes torch tensors only; transforms come this way
            raise transforms_refused()
        return result

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return self._loom.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype; a module that is cast changes it."""
        return self._loom.dtype

    @property
    def grad(self) -> Any:
        """The gradient, reduced."""
        found = gradient_of(self._loom)
        return None if found is None else Gradient(found)

    @grad.setter
    def grad(self, value: Any) -> None:
        set_gradient(self._loom, value)

    @grad.deleter
    def grad(self) -> None:
        set_gradient(self._loom, None)

    @property
    def data(self) -> Any:
        """The value without its gradient; shares memory."""
        return self._loom.data

    @data.setter
    def data(self, value: Any) -> None:
        setattr(self._loom, "data", own(value))  # noqa: B010

    @property
    def requires_grad(self) -> bool:
        """Whether backward gives it a gradient."""
        return self._loom._data.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._loom.requires_grad_(value)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """Call `hook` with this parameter when backward has added to its gradient."""
        return self._loom._data.register_post_accumulate_grad_hook(lambda _: hook(self))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__} containing:\n{self._loom!r}"

    def __format__(self, spec: str) -> str:
        return format(self._loom, spec)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loom)

    __hash__ = torch.Tensor.__hash__
    __create_write_items__ = property(refuse_checkpoint)
    __create_chunk_list__ = property(refuse_checkpoint)


def _forward(name: str) -> Any:
    if isinstance(getattr(Tensor, name), property) or name == "topology":
        return property(lambda self: getattr(self._loom, name))

    def method(self: Mirror, *args: Any, **kwargs: Any) -> Any:
        result = getattr(self._loom, name)(*args, **kwargs)
        return self if result is self._loom else result

    method.__name__ = name
    return method


for _name in _FORWARDED:
    setattr(Mirror, _name, _forward(_name))


class Gradient(Mirror):
    """The gradient of a parameter; writing to it changes the gradient."""

    def __new__(cls, tensor: Tensor) -> Gradient:
        return Mirror._mirror(cls, tensor, False)

    def __copy__(self) -> Gradient:
        return Gradient(self._loom)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradient:
        return Gradient(copy.deepcopy(self._loom, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Gradient, (self._loom,)


class Parameter(Mirror, torch.nn.Parameter):
    """A trainable tensor on a mesh, for `torch.nn` modules and `torch.optim` optimizers.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((2, 2), axes=("dp", "tp"))
    >>> p = Parameter(torch.ones(4, 4), mesh, {"tp": loom.Shard(1)})
    >>> loss = (loom.ones(2, 4, mesh=mesh) @ p).sum()
    >>> loss.backward()
    >>> p.grad.to_torch()[0]
    tensor([2., 2., 2., 2.])
    """

    def __new__(
        cls,
        data: Any,
        mesh: Mesh | None = None,
        placements: Placements | None = None,
        requires_grad: bool = True,
    ) -> Parameter:
        tensor = own(data)
        if not isinstance(tensor, Tensor):
            if mesh is None:
                raise ArgumentError(
                    "a parameter needs a mesh", fix="loom.Parameter(loom.distribute(w, mesh, placements))"
                )
            tensor = distribute(tensor.detach(), mesh, placements if placements is not None else {})
        elif mesh is not None:
            tensor = _asked(tensor, mesh, placements)
        refuse_partial_leaf(tensor.topology)
        if requires_grad and not (tensor._data.is_floating_point() or tensor._data.is_complex()):
            fix = "cast it: x.float(), or give requires_grad=False"
            raise GradientError(f"a parameter of {tensor.topology.dtype} has no gradient", fix=fix)
        leaf = Tensor(tensor.topology, tensor._data.detach().requires_grad_(requires_grad))
        leaf._number = tensor._number
        return Mirror._mirror(cls, leaf, requires_grad)

    def __copy__(self) -> Parameter:
        return _rebuild(*self._value())

    def __deepcopy__(self, memo: dict[int, Any]) -> Parameter:
        """A copy without the gradient, as torch copies a parameter."""
        copied = _rebuild(self._loom.topology, self._loom._data.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        refuse_part(self._loom.topology)
        return _rebuild, self._value()

    def _value(self) -> tuple[Topology, torch.Tensor, bool]:
        return self._loom.topology, self._loom._data.detach(), self.requires_grad


def _asked(tensor: Tensor, mesh: Mesh, placements: Placements | None) -> Tensor:
    """A tensor that is on a mesh, where it is asked to lie."""
    if tensor.mesh != mesh:
        raise MeshError(
            "a parameter was asked for on another mesh than that of its tensor",
            tensor=tensor.topology,
            asked=mesh,
            fix="loom.Parameter(x.to_torch(), mesh, placements)",
        )
    return tensor if placements is None else redistribute(tensor, as_placements(placements, mesh, tensor.ndim))


def _rebuild(topology: Topology, data: torch.Tensor, requires_grad: bool) -> Parameter:
    return Parameter(Tensor(topology, data), requires_grad=requires_grad)


_torch_apply: Any = vars(torch.autograd.Function)["apply"].__func__


@wraps(_torch_apply)
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """`autograd.Function.apply` takes what is no torch tensor for a constant: a gradient would end there, unnoticed."""
    theirs = not cls.__module__.startswith(("torch.", "meshloom."))  # checkpoint hands ours on, and knows why
    if theirs and torch.is_grad_enabled():
        for each in args:
            if isinstance(each, (Tensor, Mirror)) and each.requires_grad:
                raise GradientError(
                    f"the autograd.Function {cls.__name__} would lose the gradient of a tensor on a mesh",
                    tensor=own(each).topology,
                    fix=f"apply it to what each device holds: parts = [{cls.__name__}.apply(x.shard_at(at)) "
                    "for at in x.mesh.local_coordinates()]; loom.from_local(parts, x.mesh, x.placements)",
                )
    return _torch_apply(cls, *args, **kwargs)


setattr(torch.autograd.Function, "apply", classmethod(_apply))  # noqa: B010

# plain values, so that `torch.load` reads tensors on a mesh as it reads dense ones
torch.serialization.add_safe_globals([Tensor, Gradient, _rebuild, Topology, Shard, Replicate, Partial, _made, Homes])
