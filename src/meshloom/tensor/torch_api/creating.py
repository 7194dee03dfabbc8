"""Fronts that make tensors like others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshloom.placement import Replicate
from meshloom.tensor import creation, creation_random
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import Overload
from meshloom.tensor.moving import shadow_of


def _like(make: Callable[..., Tensor]) -> Callable[..., object]:
    return lambda input, *args, **kwargs: make(shadow_of(input), *args, **kwargs)


def _new(name: str) -> Callable[..., object]:
    """new_zeros and the like: replicated, since the shape says nothing about placement."""

    def overload(input: Tensor, size: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = input
        sizes = (size,) if isinstance(size, int) and name != "full" else size
        if isinstance(size, int) and args and name != "full":
            sizes, args = (size, *args), ()
        options = {"mesh": tensor.mesh, "placements": (Replicate(),) * tensor.mesh.ndim}
        kept = {
            key: value for key, value in kwargs.items() if key in ("fill_value", "dtype", "device", "requires_grad")
        }
        return getattr(creation, name)(sizes, *args, **options, **{"dtype": tensor.dtype, **kept})

    return overload


_LIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "randn_like", "rand_like")
CREATING: dict[str, Overload] = {
    **{name: _like(getattr(creation, name)) for name in _LIKE},
    "randint_like": _like(creation_random.randint_like),
    "bernoulli": creation_random.bernoulli,
    "multinomial": creation_random.multinomial,
    "normal": creation_random.normal,
    "new_zeros": _new("zeros"),
    "new_ones": _new("ones"),
    "new_empty": _new("zeros"),
    "new_full": _new("full"),
}
