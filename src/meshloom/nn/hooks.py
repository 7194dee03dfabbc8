"""What a parallelized module does around its forward: spreads plain tensors, asks for placements, computes again.

Everything here is a value or a function of a module, never a closure over one, so that a deep copy of a model has hooks
and forwards of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from meshloom.errors import ArgumentError
from meshloom.mesh import Mesh
from meshloom.nn.expert_forward import check_experts, forward_experts
from meshloom.nn.tables import Axes
from meshloom.placement import Placement, Shard
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.creation import distribute

_AROUND = "_meshloom_around"


@dataclass(frozen=True)
class Spread:
    """Puts the tensors that a module is called with where a plan wants them; dims that one does not have are left out.

    `moves` says whether tensors move that are on the mesh already: a batch stays as its owner laid it.
    """

    mesh: Mesh
    axes: Axes
    moves: bool

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._each(args), self._each(kwargs)

    def __deepcopy__(self, memo: object) -> Spread:
        return self

    def _each(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return lay(value, self.axes) if self.moves else value
        if isinstance(value, torch.Tensor):
            return distribute(value, self.mesh, fitting(self.axes, value.dim()))
        if type(value) in (list, tuple):
            return type(value)(self._each(each) for each in value)
        if type(value) is dict:
            return {key: self._each(each) for key, each in value.items()}
        return value


@dataclass(frozen=True)
class Lay:
    """Moves what a module returns to where a plan wants it."""

    axes: Axes

    def __call__(self, module: torch.nn.Module, args: Any, result: Any) -> Any:
        if isinstance(result, Tensor):
            return lay(result, self.axes)
        if type(result) in (list, tuple):
            return type(result)(self(module, args, each) for each in result)
        return result

    def __deepcopy__(self, memo: object) -> Lay:
        return self


def fitting(axes: Mapping[str, Placement], dims: int) -> dict[str, Placement]:
    """The placements whose dims a tensor has.

    >>> fitting({"dp": Shard(0), "cp": Shard(1)}, dims=1)
    {'dp': Shard(dim=0)}
    """
    return {axis: each for axis, each in axes.items() if not isinstance(each, Shard) or -dims <= each.dim < dims}


def lay(tensor: Tensor, axes: Axes) -> Tensor:
    """A tensor with other placements on some axes."""
    wanted = fitting(axes, tensor.ndim)
    if not wanted:
        return tensor
    kept = dict(zip(tensor.mesh.axes, tensor.placements, strict=True))
    result: Tensor = tensor.redistribute({**kept, **wanted})
    return result


@dataclass
class Around:
    """What stands around the forward of a module: a request for its result, whether it is computed again, and whether
    tokens travel to its experts.

    `inner` is a forward that the module had as an attribute of its own.
    """

    inner: Callable[..., Any] | None = None
    output: Axes | None = None
    is_recomputed: bool = False
    is_dispatched: bool = False


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module with something around it."""
    around: Around = vars(self)[_AROUND]
    call: Callable[..., Any] = around.inner or partial(type(self).forward, self)
    if around.is_dispatched:
        call = partial(forward_experts, self)
    if around.output is not None:
        call = partial(_ask, call, around.output)
    if around.is_recomputed and torch.is_grad_enabled():
        return checkpoint(call, *args, use_reentrant=False, **kwargs)
    return call(*args, **kwargs)


def _ask(call: Callable[..., Any], axes: Axes, *args: Any, **kwargs: Any) -> Any:
    """One op with a request: a product that is reduced and sharded at once is scattered, not reduced to all."""
    with state.changed(output=dict(axes)):
        return call(*args, **kwargs)


def surround(module: torch.nn.Module, **what: Any) -> None:
    """Put something around a module's forward."""
    around = vars(module).get(_AROUND)
    if around is None:
        around = vars(module)[_AROUND] = Around(vars(module).get("forward"))
        module.forward = MethodType(forward, module)
    for name, value in what.items():
        setattr(around, name, value)


def undo(module: torch.nn.Module) -> None:
    """Take away what stands around the forwards of a module and of the modules in it."""
    for each in module.modules():
        around = vars(each).pop(_AROUND, None)
        if around is not None:
            del each.forward
            if around.inner is not None:
                each.forward = around.inner


def attach(
    module: torch.nn.Module, plan: Any, taken: Mapping[str, Mapping[str, Any]], mesh: Mesh
) -> list[RemovableHandle]:
    """Hooks and forwards as a plan says; `taken` has the names of modules for each kind of line and its axes."""
    recomputed = [_runs_forward(module.get_submodule(name), name) for name in taken["recompute"]]  # errors come first
    dispatched = [check_experts(module.get_submodule(name), name) for name in taken["experts"]]
    handles = []
    if plan.batch:
        spread = Spread(mesh, plan.batch, moves=False)
        handles.append(module.register_forward_pre_hook(spread, with_kwargs=True, prepend=True))
    for name, axes in taken["input"].items():
        owner = module.get_submodule(name)
        handles.append(owner.register_forward_pre_hook(Spread(mesh, axes, moves=True), with_kwargs=True))
    for name, axes in taken["output"].items():
        owner = module.get_submodule(name)
        if type(owner) in (torch.nn.Linear, torch.nn.Embedding):  # one op, which can be asked
            surround(owner, output=axes)
        handles.append(owner.register_forward_hook(Lay(axes)))
    for owner in recomputed:
        surround(owner, is_recomputed=True)
    for owner in dispatched:
        surround(owner, is_dispatched=True)
    return handles


def _runs_forward(module: torch.nn.Module, name: str) -> torch.nn.Module:
    if type(module).forward is torch.nn.Module.forward:
        raise ArgumentError(
            f"{name!r} is a {type(module).__name__}, which is never called, so nothing of it can be computed again",
            fix=f"name the modules in it: {name + '.*'!r}",
        )
    return module
