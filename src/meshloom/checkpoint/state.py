"""A state as a tree of plain values and a table of tensors by name: what `save` writes and `load` walks beside its own.

Modules, optimizers, generators, tensors and objects with `state_dict` are leaves with a tag. A parameter has the name
that its module gives it, and an optimizer's tensors are kept under that name: `optimizer/model/up.weight/exp_avg`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from meshloom.checkpoint.formats import is_known
from meshloom.checkpoint.values import Path, encode_container, encode_scalar, is_scalar, refusal, spell
from meshloom.comms.group import check_joined
from meshloom.engines.layout import short_name
from meshloom.errors import ArgumentError
from meshloom.tensor.base import Tensor
from meshloom.tensor.lazy import Lazy

EXTRA = "_extra_state"  # torch's key of what a module keeps besides tensors


@dataclass
class Gathered:
    """A state, taken apart: the tree, and each tensor once, by name."""

    tree: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def gather(state: Any) -> Gathered:
    """A state, taken apart; the client of a cluster has done that for its workers."""
    if isinstance(state, Gathered):
        return state
    check_state(state)
    return _Gathering(state).run()


def check_state(state: Any) -> None:
    """An error unless a state is a dict with names."""
    if type(state) not in (dict, OrderedDict):
        raise ArgumentError(
            f"a state is a dict with names, not a {type(state).__name__}",
            fix='{"model": model, "optimizer": optimizer, "step": step}',
        )
    for key in state:
        if type(key) is not str:
            raise ArgumentError(f"the state has a key {key!r}, which is no name", fix=f"use text: {str(key)!r}")


def is_object(value: Any) -> bool:
    """Whether a value has a state of its own, such as a scheduler or a loader."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_live(value: Any) -> bool:
    """Whether a value, or something inside of it, takes its state in place; all else is replaced as a whole."""
    if isinstance(value, (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator)) or is_object(value):
        return True
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return any(is_live(each) for each in inside)


def find_modules(state: Any, path: Path = ()) -> Iterator[tuple[Path, torch.nn.Module]]:
    """The modules of a state, with their places."""
    if isinstance(state, torch.nn.Module):
        yield path, state
    elif isinstance(state, (dict, OrderedDict)):
        for key, each in state.items():
            yield from find_modules(each, (*path, key))
    elif isinstance(state, (list, tuple)):
        for number, each in enumerate(state):
            yield from find_modules(each, (*path, number))


def name_parameters(state: Any) -> dict[int, str]:
    """The name of every parameter of the modules in a state, by its identity; a tied one has its first name."""
    found: dict[int, str] = {}
    taken: dict[str, int] = {}
    for path, module in find_modules(state):
        for name, parameter in module.named_parameters():
            whole = found.setdefault(id(parameter), join((*path, name)))
            if taken.setdefault(whole, id(parameter)) != id(parameter):
                raise ArgumentError(f"two parameters of the state are called {whole!r}", fix="use keys without slashes")
    return found


def join(path: Path) -> str:
    """The name of a tensor in the index: its path with slashes."""
    return "/".join(str(key) for key in path)


def name_of(parameter: torch.Tensor, names: Mapping[int, str], path: Path) -> str:
    """The name of an optimizer's parameter; one that no module of the state has is refused."""
    name = names.get(id(parameter))
    if name is None:
        where = parameter.topology if isinstance(parameter, Tensor) else list(parameter.shape)
        raise ArgumentError(
            f"{spell(path)} has a parameter that no module in the state has, so that it has no name",
            parameter=where,
            fix='put the module beside it: {"model": model, "optimizer": optimizer}; make the optimizer after the '
            "parameters were put on the mesh",
        )
    return name


def identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors share if they are the same memory seen in the same way.

    The array of a lazy tensor may be made at every use, so that its address says nothing.
    """
    if isinstance(tensor, Lazy):
        return (id(tensor),)
    if isinstance(tensor, Tensor) and tensor._is_remote:
        return (tensor._memory_key,)
    array = tensor._data if isinstance(tensor, Tensor) else tensor
    topology = tensor.topology if isinstance(tensor, Tensor) else None
    if topology is not None and topology.mesh.is_elsewhere:
        return (id(array),)
    return array.data_ptr(), array.dtype, tuple(array.shape), array.stride(), topology


def check_tensor(tensor: torch.Tensor, path: Path) -> None:
    """An error unless a tensor has values that a file can hold."""
    if torch.nn.parameter.is_lazy(tensor):
        raise ArgumentError(f"{spell(path)} is not initialised yet", fix="run the module once, or give it its sizes")
    if hasattr(tensor, "device_mesh"):
        raise ArgumentError(f"{spell(path)} is a DTensor", fix="loom.from_dtensor(d) takes it with its placements")
    if tensor.is_quantized or tensor.is_nested or tensor.layout is not torch.strided:
        raise refusal(tensor, path)
    if isinstance(tensor, Tensor) and tensor.mesh.is_split:
        check_joined(tensor.mesh)
    array = tensor._data if isinstance(tensor, Tensor) else tensor
    is_elsewhere = isinstance(tensor, Tensor) and (tensor._is_remote or tensor.mesh.is_elsewhere)
    if array.is_meta and not is_elsewhere:
        raise ArgumentError(f"{spell(path)} has no values: it lies on meta", fix="materialise it first")
    if not is_known(short_name(tensor.dtype)):
        raise ArgumentError(f"{spell(path)} has dtype {tensor.dtype}, which files do not have", fix="cast it first")


class _Gathering:
    """One walk through a state."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.state, self.found = state, Gathered()
        self.names = name_parameters(state)
        self.known: dict[tuple[Any, ...], str] = {}

    def run(self) -> Gathered:
        self.found.tree = {key: self.encode(each, (key,)) for key, each in self.state.items()}
        return self.found

    def encode(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path)
        if isinstance(value, torch.nn.Module):
            return {"$module": self.module(value, path)}
        if isinstance(value, torch.optim.Optimizer):
            return {"$optimizer": self.optimizer(value, path)}
        if isinstance(value, torch.Generator):
            return {"$generator": self.tensor(value.get_state(), path)}
        if is_scalar(value):
            return encode_scalar(value, path)
        if type(value) not in (dict, OrderedDict, Counter, list, tuple, torch.Size) and is_object(value):
            return {"$object": self.encode(value.state_dict(), path)}
        return encode_container(value, path, self.encode)

    def tensor(self, tensor: torch.Tensor, path: Path) -> dict[str, str]:
        check_tensor(tensor, path)
        key = identity(tensor)
        name = self.known.get(key) if tensor.numel() else None
        if name is None:
            name = self.fresh_name(path)
            self.known[key] = name
            self.found.tensors[name] = tensor
        return {"$tensor" if isinstance(tensor, Tensor) else "$dense": name}

    def fresh_name(self, path: Path) -> str:
        name, number = join(path), 2
        while name in self.found.tensors:
            name, number = f"{join(path)}~{number}", number + 1
        return name

    def module(self, module: torch.nn.Module, path: Path) -> dict[str, Any]:
        found = {}
        for key, each in module.state_dict().items():
            if not isinstance(each, torch.Tensor) and key.rpartition(".")[2] != EXTRA:
                raise ArgumentError(
                    f"{spell((*path, key))} is a {type(each).__name__}, and a module's state has tensors",
                    fix="give the module get_extra_state() and set_extra_state() for what is not a tensor",
                )
            found[key] = self.encode(each, (*path, key))
        return found

    def optimizer(self, optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Any]:
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            options = {key: each for key, each in group.items() if key not in ("params", "param_names")}
            place = (*path, "param_groups", number)
            params = [name_of(each, self.names, path) for each in group["params"]]
            groups.append({"params": params, "options": self.encode(options, place)})
        state = {name_of(parameter, self.names, path): each for parameter, each in optimizer.state.items()}
        kept = {
            name: {key: self.encode(v, (*path, name, key)) for key, v in each.items()} for name, each in state.items()
        }
        return {"class": type(optimizer).__name__, "groups": groups, "state": kept}
