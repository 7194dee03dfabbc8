"""Stand-ins without data: while something is explained, every tensor is replaced by one on `meta`."""

from __future__ import annotations

import torch

from meshloom.tensor.base import Tensor


class Shadows:
    """The stand-in of each tensor that an explained program touches; one per tensor, so that writes are seen."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """The stand-in of a tensor; a tensor without data stands for itself."""
        if tensor._data.is_meta:
            return tensor
        found = self.known.get(id(tensor))
        if found is None:
            found = (tensor, self._make(tensor))
            self.known[id(tensor)] = found
        return found[1]

    def _make(self, tensor: Tensor) -> Tensor:
        data = tensor._data
        shape = torch.empty_like(data, device="meta", requires_grad=False)
        if data.requires_grad:
            shape.requires_grad_()
            shape = shape if data.is_leaf else shape.view_as(shape)
        made = Tensor(tensor.topology, shape)
        if tensor._view is not None:
            base, moved = tensor._view
            made._view = (self.of(base) if moved else made, moved)
        return made
