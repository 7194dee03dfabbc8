"""Arguments of calls as JSON and back. Numbers, words, lists and None are themselves, the rest an object with one key.

    {"t": 7}  tensor 7          {"u": [1, 2]}  a tuple        {"s": [0, 5, null]}  a slice      {"e": 0}  ...
    {"y": "float32"}  a dtype   {"v": "cpu"}   a device       {"m": 1}  a mesh                  {"p": "Shard(0)"}
    {"z": [1, 2]}  complex      {"b": [[k, v]]}  a dict       {"o": "preserve_format"}  a memory format

What is none of these (a function, an object of the user) is refused: it would have to be pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from meshloom.errors import UnsupportedError
from meshloom.mesh import Mesh
from meshloom.placement import Partial, Replicate, Shard

_FORMATS = {str(each).removeprefix("torch."): each for each in (
    torch.preserve_format, torch.contiguous_format, torch.channels_last, torch.channels_last_3d,
)}  # fmt: skip
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_PLAIN = frozenset((int, float, bool, str, type(None)))


def encode(value: Any, tensor: Callable[[torch.Tensor], int], mesh: Callable[[Mesh], int]) -> Any:
    """An argument as JSON; `tensor` and `mesh` give the numbers of theirs."""
    kind = value.__class__
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return {"t": tensor(value)}
    if kind is list:
        return [encode(each, tensor, mesh) for each in value]
    if isinstance(value, tuple):
        return {"u": [encode(each, tensor, mesh) for each in value]}
    found = _encode_other(value)
    if found is not None:
        return found
    if kind is slice:
        return {"s": [encode(each, tensor, mesh) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, Mapping):
        return {"b": [[encode(k, tensor, mesh), encode(v, tensor, mesh)] for k, v in value.items()]}
    if isinstance(value, Mesh):
        return {"m": mesh(value)}
    if isinstance(value, numpy.ndarray):
        return {"t": tensor(torch.as_tensor(value))}
    if isinstance(value, numpy.generic):
        return encode(value.item(), tensor, mesh)
    if isinstance(value, (bool, int, float, str)):  # of a subclass, such as an enum of whole numbers
        return encode(next(base for base in (bool, int, float, str) if isinstance(value, base))(value), tensor, mesh)
    raise UnsupportedError(
        f"a {type(value).__name__} cannot be sent to workers: {value!r:.60}",
        reason="it would have to be pickled, and code of the client runs on the client only",
        fix="give numbers, words, tensors, and lists or dictionaries of them",
    )


def _encode_other(value: Any) -> dict[str, Any] | None:
    if isinstance(value, torch.dtype):
        return {"y": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"v": str(value)}
    if isinstance(value, torch.memory_format):
        return {"o": str(value).removeprefix("torch.")}
    if isinstance(value, torch.layout):
        return {"l": 0} if value is torch.strided else None
    if isinstance(value, complex):
        return {"z": [value.real, value.imag]}
    if value is Ellipsis:
        return {"e": 0}
    if isinstance(value, Shard):
        return {"p": ["Shard", value.dim]}
    if isinstance(value, Replicate):
        return {"p": ["Replicate"]}
    if isinstance(value, Partial):
        return {"p": ["Partial", value.op]}
    if isinstance(value, torch.Generator):
        return {"g": 0}  # the keys are drawn from it by the client
    return None


def decode(value: Any, tensors: Any, meshes: Any) -> Any:
    """An argument from JSON; tensors and meshes by their numbers."""
    kind = value.__class__
    if kind is dict:
        ((key, inner),) = value.items()
        if key == "t":
            return tensors[inner]
        if key == "u":
            return tuple([decode(each, tensors, meshes) for each in inner])
        return _DECODERS[key](inner, tensors, meshes)
    if kind is list:
        return [decode(each, tensors, meshes) for each in value]
    return value


PLACEMENTS: dict[str, Any] = {"Shard": Shard, "Replicate": Replicate, "Partial": Partial}
_DECODERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "s": lambda inner, tensors, meshes: slice(*[decode(each, tensors, meshes) for each in inner]),
    "e": lambda inner, tensors, meshes: Ellipsis,
    "y": lambda inner, tensors, meshes: _DTYPES[inner],
    "v": lambda inner, tensors, meshes: torch.device(inner),
    "o": lambda inner, tensors, meshes: _FORMATS[inner],
    "l": lambda inner, tensors, meshes: torch.strided,
    "z": lambda inner, tensors, meshes: complex(*inner),
    "m": lambda inner, tensors, meshes: meshes[inner],
    "p": lambda inner, tensors, meshes: PLACEMENTS[inner[0]](*inner[1:]),
    "b": lambda inner, tensors, meshes: {decode(k, tensors, meshes): decode(v, tensors, meshes) for k, v in inner},
    "g": lambda inner, tensors, meshes: None,
}
