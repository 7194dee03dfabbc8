"""Fronts of pooling: where a maximum was has no rule."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from meshloom.tensor.calling import Overload, table_call
from meshloom.tensor.fallback import fallback


def _max_pool(name: str) -> Overload:
    def overload(input: object, *args: object, return_indices: bool = False, **kwargs: object) -> Any:
        if return_indices:
            return fallback(getattr(F, name), (input, *args), {**kwargs, "return_indices": True}, name)
        return table_call(name, input, *args, **kwargs)

    return overload


WINDOWS: dict[str, Overload] = {
    f"{kind}max_pool{n}d": _max_pool(f"{kind}max_pool{n}d") for kind in ("", "adaptive_") for n in (1, 2, 3)
}
