"""The arguments of a call as dispatch uses them: plain tensors become replicated ones, and all of them make a key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy
import torch

from meshloom.engines import private
from meshloom.engines.layout import short_name
from meshloom.errors import MeshError, UnsupportedError
from meshloom.mesh import Mesh
from meshloom.ops import OPS
from meshloom.placement import Replicate, Topology, as_placements
from meshloom.processes.divergence import is_compared, note_data
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.binding import NUMBERS, freeze, freeze_number
from meshloom.tensor.refusals import refuse_transforms


def autocast_key() -> Any:
    """What autocast changes about a call."""
    if not private.is_any_autocast_enabled():
        return None
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


class Reader:
    """Reads the arguments of one call: unwraps parameters, makes plain tensors replicated ones, builds the key."""

    __slots__ = ("_given", "_mesh", "key", "numbers", "plain", "shadows", "tensors")

    def __init__(self, name: str, args: Sequence[object], kwargs: dict[str, object], numbers_matter: bool) -> None:
        self._given = (name, args, kwargs)
        self._mesh: Mesh | None = None
        self.numbers = numbers_matter
        self.shadows = state.shadows
        self.tensors: list[Tensor] = []
        self.plain: list[Tensor] = []
        self.key: list[object] = [name]

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first of our tensors."""
        if self._mesh is None:
            name, args, kwargs = self._given
            self._mesh = find_mesh(args) or find_mesh(kwargs.values())
            if self._mesh is None:
                raise MeshError(f"{name} got no meshloom tensor", fix="put an operand on a mesh with loom.distribute")
        return self._mesh

    def read(self, value: Any) -> Any:
        """The argument as dispatch uses it."""
        kind = value.__class__
        if kind is Tensor or isinstance(value, Tensor):
            if value._is_remote:
                raise UnsupportedError(
                    f"{self.key[0]} was called on a tensor of a cluster by a function that works on arrays here",
                    tensor=value.topology,
                    fix="use ops of tensors, or x.to_torch()",
                )
            if self.shadows is not None:
                value = self.shadows.of(value)
        elif kind in NUMBERS:
            self.key.append(freeze_number(value) if self.numbers else kind)
            return value
        elif kind is tuple or kind is list:
            self.key.append(len(value))
            return tuple([self.read(each) for each in value])
        elif isinstance(value, torch.Tensor):
            made = as_tensor(value, self.mesh)
            if made._data is value or made._data._base is value:
                self.plain.append(made)
            value = made
        elif isinstance(value, numpy.ndarray):
            value = as_tensor(torch.as_tensor(value), self.mesh)
        elif isinstance(value, numpy.generic):
            # for a number torch takes numpy's truth values for 0.0 and 1.0
            return self.read(float(value) if kind is numpy.bool_ and not self.numbers else value.item())
        else:
            self.key.append(freeze(value))
            return tuple(value) if isinstance(value, tuple) else value
        self.tensors.append(value)
        self.key.append(value.topology)
        return value


def as_tensor(value: torch.Tensor, mesh: Mesh) -> Tensor:
    """A torch tensor as one of ours: a parameter's own, or a replicated one."""
    if isinstance(value, Tensor):
        return state.shadows.of(value) if state.shadows is not None else value
    refuse_transforms(value)
    if mesh.is_split and is_compared() and not value.is_meta and state.shadows is None:
        note_data("operand", value, mesh.ranks)
    if mesh.is_elsewhere and not value.is_meta:
        value = value.detach().to("meta")  # this process holds nothing of it
    if mesh.is_split and value.is_leaf and value.requires_grad:
        value = value.view_as(value)  # torch reads its gradient, not we: it is summed at each use
    made = Tensor(_replicate_on(mesh, value.shape, value.dtype), value)
    return state.shadows.of(made) if state.shadows is not None else made


@lru_cache(1 << 12)
def _replicate_on(mesh: Mesh, shape: torch.Size, dtype: torch.dtype) -> Topology:
    return Topology(mesh, (Replicate(),) * mesh.ndim, tuple(shape), short_name(dtype))


def find_mesh(values: Any) -> Mesh | None:
    """The mesh of the first meshloom tensor among arguments, lists included."""
    for value in values:
        if isinstance(value, Tensor):
            return value.topology.mesh
        if isinstance(value, (tuple, list)):
            found = find_mesh(value)
            if found is not None:
                return found
    return None


def follow_to_meta(plain: list[Tensor], tensors: list[Tensor]) -> None:
    """A plain tensor beside one without data is taken for its shape only: a dry run may have plain operands."""
    if any(tensor._data.is_meta for tensor in tensors):
        for tensor in plain:
            tensor._replace(tensor._data.to("meta"))


def read_number(op: str, key: str, value: object) -> Any:
    """torch takes `alpha=` (and `value=` of some ops) for a number: a tensor given there is read."""
    return value.item() if key == OPS[op].number and hasattr(value, "item") else value


def read_request(wanted: Any, mesh: Mesh) -> tuple[Any, ...]:
    full = as_placements(wanted, mesh)
    if not isinstance(wanted, Mapping):
        return full
    named = {mesh.axis(name) for name in wanted}
    return tuple(each if axis in named else None for axis, each in enumerate(full))
