"""Models that were built on `meta`: room on the mesh for their tensors, then values, by their own initialisers.

Random numbers of tensors on a mesh do not depend on placements (`tensor.random`), and each process draws the tiles that
it holds a part of: a model comes out the same on any mesh and on any number of processes, and nothing is communicated.
What no initialiser writes is refused by name: nothing is ever left to chance.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.errors import ArgumentError
from meshloom.mesh import Mesh
from meshloom.nn.patterns import fold
from meshloom.nn.tables import Axes
from meshloom.tensor.base import Tensor
from meshloom.tensor.creation import full

_FLAG = "_is_hf_initialized"  # transformers' mark of modules and tensors that have their values


def make_room(value: torch.Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """A tensor on the mesh without values: numbers that no initialiser writes, where the dtype has such."""
    nothing = math.nan if value.dtype.is_floating_point or value.dtype.is_complex else 0
    return full(tuple(value.shape), nothing, mesh=mesh, placements=axes, dtype=value.dtype)


@dataclass(frozen=True)
class _Mark:
    """What a tensor looked like before initialisers ran; its array is not kept alive, as it may be replaced."""

    tensor: Tensor
    array: weakref.ref[torch.Tensor]
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Mark:
        return cls(tensor, weakref.ref(tensor._data), tensor._data._version)

    @property
    def is_written(self) -> bool:
        """Whether somebody has written all of it; of integers, any of it."""
        now = self.tensor._data
        if now is self.array() and now._version == self.version:
            return False
        numbers = now.is_floating_point() or now.is_complex()
        return not (numbers and bool(self.tensor.isnan().any()))


def fill(module: torch.nn.Module, empty: Mapping[str, Tensor]) -> None:
    """Run a module's own initialisers for tensors that have no values; those that have some keep them."""
    marks = {name: _Mark.of(tensor) for name, tensor in empty.items()}
    lacking = {id(tensor) for tensor in empty.values()}
    with torch.no_grad():
        _initialise(module, lacking, _first_owners(module))
    missed = [name for name, mark in marks.items() if not mark.is_written]
    if missed:
        raise ArgumentError(
            f"no initialiser of this {type(module).__name__} on meta writes {fold(missed)}",
            fix="give their module a reset_parameters() that writes them, read them from files (weights=...), "
            "or build the module on the CPU",
        )


def _initialise(module: torch.nn.Module, lacking: set[int], first: Mapping[int, torch.nn.Module]) -> None:
    """Children first, as they are built; a model of transformers initialises all that is in it.

    A tied tensor is left to the module that has it first, or to modules around that one.
    """
    inside = set(module.modules())
    own = {key for key in lacking if first[key] in inside}
    if not own:
        return
    run = _initialiser(module)
    if run is None or not _is_pretrained(module):
        for child in module.children():
            _initialise(child, lacking, first)
    if run is not None:
        with _kept(module, own):
            run()


def _first_owners(module: torch.nn.Module) -> dict[int, torch.nn.Module]:
    found: dict[int, torch.nn.Module] = {}
    for owner in module.modules():
        for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False)):
            found.setdefault(id(tensor), owner)
    return found


def _is_pretrained(module: Any) -> bool:
    return callable(getattr(module, "initialize_weights", None)) and callable(getattr(module, "_init_weights", None))


def _initialiser(module: Any) -> Callable[[], object] | None:
    names = ("initialize_weights",) if _is_pretrained(module) else ("reset_parameters", "_reset_parameters")
    found = (getattr(module, name, None) for name in names)
    return next((each for each in found if callable(each)), None)


class _kept:
    """Tensors that have their values keep them while a module is initialised: by transformers' mark, or copied back."""

    def __init__(self, module: torch.nn.Module, lacking: set[int]) -> None:
        self.module = module
        tensors = {id(tensor): tensor for tensor in _tensors(module)}
        self.settled = [tensor for key, tensor in tensors.items() if key not in lacking]
        self.open = [tensor for key, tensor in tensors.items() if key in lacking]
        self.copies = [] if _is_pretrained(module) else [tensor.clone() for tensor in self.settled]

    def __enter__(self) -> None:
        for each in (*self.module.modules(), *self.open):
            vars(each).pop(_FLAG, None)
        if _is_pretrained(self.module):
            for tensor in self.settled:
                vars(tensor)[_FLAG] = True

    def __exit__(self, *error: object) -> None:
        for tensor, copy in zip(self.settled, self.copies, strict=False):
            tensor.copy_(copy)
        for tensor in self.settled:
            vars(tensor).pop(_FLAG, None)


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()
