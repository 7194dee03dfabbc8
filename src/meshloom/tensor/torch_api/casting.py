"""Fronts of casts, copies and devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import Overload, pure, table_call
from meshloom.tensor.creation import checked_device
from meshloom.tensor.moving import shadow_of
from meshloom.tensor.views import detach_view


def cast(input: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`to(dtype)`, `to(device)`, `to(other)`, with torch's keywords."""
    tensor = shadow_of(input)
    target = args[0] if args else kwargs.get("other", kwargs.get("dtype", kwargs.get("device")))
    wanted, device = kwargs.get("dtype"), kwargs.get("device")
    if isinstance(target, torch.dtype):
        wanted = target
    elif isinstance(target, torch.Tensor):
        wanted = target.dtype
    elif args:
        device = target
        wanted = wanted or next((each for each in args[1:] if isinstance(each, torch.dtype)), None)
    flags = [each for each in args if isinstance(each, bool)]  # non_blocking, then copy
    copied = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
    if wanted is not None and (wanted != tensor.dtype or copied or state.output is not None):
        tensor = table_call("to", tensor, wanted)
    if device is not None and state.shadows is None and checked_device(device) != tensor.device:
        tensor = Tensor(tensor.topology, tensor._data.to(device))
    if copied and tensor._data is shadow_of(input)._data:
        tensor = table_call("clone", tensor)
    return input if tensor is input else tensor


def _cast(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    return lambda input, *args, **kwargs: cast(input, dtype)


def _type(input: torch.Tensor, dtype: torch.dtype | str | None = None, **kwargs: object) -> Any:
    if dtype is None:
        return torch.empty(0, dtype=input.dtype).type()
    return cast(input, dtype)


def _type_as(input: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return cast(input, other.dtype)


def _same(input: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return input


def _contiguous(input: Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """The tensor itself; a view with other strides is copied, as in torch, so that writes do not reach its base."""
    tensor = shadow_of(input)
    return input if tensor._view is None or tensor._data.is_contiguous() else tensor.clone()


def _detach(input: Tensor) -> torch.Tensor:
    tensor = shadow_of(input)
    return detach_view(tensor, Tensor(tensor.topology, tensor._data.detach()))


DTYPES = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16,
    "int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
    "bool": torch.bool,
}  # fmt: skip

CASTING: dict[str, Overload] = {
    **pure({"to": cast, **{name: _cast(dtype) for name, dtype in DTYPES.items()}}),
    "type": _type,
    "type_as": _type_as,
    "contiguous": _contiguous,
    "cuda": lambda input, device=None, *args, **kwargs: cast(input, "cuda" if device is None else torch.device(device)),
    "cpu": _same,
    "detach": _detach,
}
