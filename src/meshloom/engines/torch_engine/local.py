"""What a function of the engine may know of the call besides its arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from meshloom.engines.engine import Function, aware
from meshloom.engines.layout import mask_of, unpad
from meshloom.ops import Call
from meshloom.ops.labels import normal_dims
from meshloom.placement import Topology
from meshloom.types import Shape

__all__ = ["Function", "Local", "aware", "dims_of", "wide_dtype"]


@dataclass(frozen=True, slots=True)
class Local:
    """What a function may know of the call besides its arrays."""

    call: Call
    ins: tuple[Topology, ...]
    shapes: tuple[Shape, ...]
    memo: dict[str, Any] = field(default_factory=dict, compare=False)

    def once(self, name: str, work: Callable[[], Any]) -> Any:
        """Work that depends on the call alone, done on its first run."""
        if name not in self.memo:
            self.memo[name] = work()
        return self.memo[name]

    def count(self, dims: tuple[int, ...]) -> int:
        """The global number of elements along dims of the input."""
        return math.prod(self.call.shape("input")[dim] for dim in dims)

    def mask(self, data: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor | None:
        """True where the input holds an element along dims."""
        return mask_of(self.ins[self.call.index("input")], data.device, dims)

    def trimmed(self, name: str, data: torch.Tensor, dim: int) -> torch.Tensor:
        """The operand without its padding along a dim that is looked up by index: padding may be interior."""
        return unpad(data, dim, self.call.shape(name)[dim], self.ins[self.call.index(name)].shards[dim])

    def whole(self, name: str, data: torch.Tensor, dim: int) -> torch.Tensor:
        """`trimmed` for an op that runs without padding in one process, and with it elsewhere."""
        padded = data.dim() and data.shape[dim] > self.call.shape(name)[dim]
        return self.trimmed(name, data, dim) if padded else data


def dims_of(input: torch.Tensor, dim: Any) -> tuple[int, ...]:
    """Dims counted from the front; None means all."""
    return normal_dims(dim, input.dim())


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch adds up: half precision is summed in float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
