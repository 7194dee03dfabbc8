"""Fronts that fill a tensor with random numbers in place.

As everywhere, values come from tiles of the global index: they do not depend on placements, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.errors import DTypeError
from meshloom.tensor import creation, random
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import Overload
from meshloom.tensor.moving import shadow_of
from meshloom.tensor.writing import assign


def _fill(input: Tensor, name: str, draw: random.Draw, generator: torch.Generator | None) -> Tensor:
    tensor = shadow_of(input)
    if tensor._data.is_meta:
        if tensor.mesh.is_elsewhere and tensor is input:
            random.draw_key(generator)  # those that hold it draw one too
        return input
    probe = torch.empty(1, dtype=tensor.dtype)
    try:
        draw(probe, torch.Generator())  # torch's own refusals of dtypes and arguments, before a key is drawn
    except NotImplementedError as error:
        raise DTypeError(f"{name} cannot draw {tensor.topology.dtype}", fix="cast it first: x.float()") from error
    drawn = creation.draw_like(tensor.topology.reduced, draw, random.draw_key(generator), tensor.device)
    return assign(input, drawn, name)


def _draw_with(name: str) -> Callable[..., Tensor]:
    """`x.normal_(mean, std)` and its kind: torch's own on every tile."""
    method = getattr(torch.Tensor, name)

    def overload(input: Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> Tensor:
        def draw(out: torch.Tensor, tile: torch.Generator) -> torch.Tensor:
            drawn: torch.Tensor = method(out, *args, generator=tile, **kwargs)
            return drawn

        return _fill(input, name, draw, generator)

    return overload


def _exponential_(input: Tensor, lambd: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    def draw(out: torch.Tensor, tile: torch.Generator) -> torch.Tensor:
        if not out.is_floating_point():
            raise NotImplementedError
        return random.exponential(out, tile).div_(lambd)

    return _fill(input, "exponential_", draw, generator)


DRAWING: dict[str, Overload] = {
    **{name: _draw_with(name) for name in ("normal_", "uniform_", "random_", "log_normal_")},
    "exponential_": _exponential_,
}
