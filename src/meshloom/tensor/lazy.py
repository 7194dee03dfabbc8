"""Tensors whose array is looked for at every use: over a buffer, views that had to move, results of torch's own graph.

They are of a class of their own, so that every other tensor reads its array and asks nobody.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from meshloom.tensor.base import Tensor

STORED: Any = vars(Tensor)["_data"]  # where a tensor keeps its array


class Finder(Protocol):
    """Who knows the array of a tensor."""

    def find(self, tensor: Tensor) -> torch.Tensor:
        """The array as it is now."""


class Lazy(Tensor):
    """A tensor that asks its finder for its array; a new array makes it an ordinary one."""

    __slots__ = ()

    @property
    def _data(self) -> torch.Tensor:
        finder: Finder = self._finder
        return finder.find(self)

    @_data.setter
    def _data(self, value: torch.Tensor) -> None:
        settle(self, value)


def ask(tensor: Tensor, finder: Finder) -> Tensor:
    """Let a tensor ask for its array from now on."""
    tensor.__class__ = Lazy
    tensor._finder = finder
    return tensor


def settle(tensor: Tensor, data: torch.Tensor) -> torch.Tensor:
    """Make a tensor an ordinary one, with this array."""
    STORED.__set__(tensor, data)
    tensor.__class__ = Tensor
    vars(tensor).pop("_finder", None)
    return data
