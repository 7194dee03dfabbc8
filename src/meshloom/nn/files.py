"""The values of a model in safetensors files: which tensors are there, and each read as it will lie on the mesh."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import torch

from meshloom.checkpoint import open_weights
from meshloom.errors import ArgumentError, ShapeError, closest
from meshloom.mesh import Mesh
from meshloom.nn.patterns import fold
from meshloom.nn.tables import Axes
from meshloom.placement import Topology, as_placements
from meshloom.tensor.base import Tensor


@dataclass(frozen=True)
class Files:
    """A reader, and the name under which the files have each tensor of a module; tied ones have one."""

    reader: Any
    names: dict[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def read(self, name: str, dense: torch.Tensor, mesh: Mesh, axes: Axes) -> Tensor:
        """A tensor where it will lie; this process reads its own part."""
        there = self.names[name]
        shape = tuple(self.reader.shape(there))
        if shape != tuple(dense.shape):
            raise ShapeError(
                f"{there!r} has the shape {list(shape)} in the files and {list(dense.shape)} in the module",
                fix="build the module with the configuration that the files were written with",
            )
        placed = as_placements(axes, mesh, len(shape))
        read: Tensor = self.reader.read(there, Topology(mesh, placed, shape, self.reader.dtype(there)))
        return read if read.dtype == dense.dtype else cast(Tensor, read.to(dense.dtype))


def open_files(path: str | os.PathLike[str], module: torch.nn.Module) -> Files:
    """The files of a model, or an error that lists what they do not have."""
    reader = open_weights(path)
    there = frozenset(reader.names())
    saved = module.state_dict(keep_vars=True).keys()
    names: dict[str, str] = {}
    missing = []
    for aliases in _aliases(module):
        found = next((name for name in aliases if name in there), None)
        if found is not None:
            names.update(dict.fromkeys(aliases, found))
        elif any(name in saved for name in aliases):
            missing.append(aliases[0])
    if missing:
        raise ArgumentError(
            f"{os.fspath(path)} lacks {len(missing)} tensors of this {type(module).__name__}",
            missing=fold(missing),
            files=fold(sorted(there - set(names.values()))) or None,
            fix=closest(missing[0], sorted(there)),
        )
    return Files(reader, names)


def _aliases(module: torch.nn.Module) -> list[list[str]]:
    """The names of each parameter and buffer, tied ones together."""
    found: dict[int, list[str]] = {}
    for table in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in table:
            found.setdefault(id(tensor), []).append(name)
    return list(found.values())
