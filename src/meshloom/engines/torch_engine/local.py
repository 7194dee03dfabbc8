"""What a function of the engine may know of the call besides its arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from meshloom.engines.engine import Function, Marked, aware
from meshloom.engines.layout import box, mask_of, pad, unpad
from meshloom.engines.peers import ALONE, Peers
from meshloom.ops import Call
from meshloom.ops.labels import normal_dims
from meshloom.placement import Topology
from meshloom.types import Shape

__all__ = ["Function", "Local", "aware", "dims_of", "shared", "wide_dtype"]


def shared(function: Marked) -> Marked:
    """Mark an aware function that also works on a dim which its peers hold parts of."""
    function.is_shared = True  # type: ignore[attr-defined]
    return aware(function)


@dataclass(frozen=True, slots=True)
class Local:
    """What a function may know of the call besides its arrays. `peers` hold the other parts of what it works on."""

    call: Call
    ins: tuple[Topology, ...]
    shapes: tuple[Shape, ...]
    peers: Peers = ALONE
    memo: dict[Any, Any] = field(default_factory=dict, compare=False)

    def once(self, name: object, work: Callable[[], object]) -> Any:
        """Work that depends on the call alone, done on its first run."""
        if name not in self.memo:
            self.memo[name] = work()
        return self.memo[name]

    def topology(self, name: str) -> Topology:
        """Where the operand given as an argument lies when the op runs."""
        return self.ins[self.call.index(name)]

    def count(self, dims: tuple[int, ...]) -> int:
        """The global number of elements along dims of the input."""
        return math.prod(self.call.shape("input")[dim] for dim in dims)

    def mask(self, data: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor | None:
        """True where the input holds an element along dims."""
        return mask_of(self.topology("input"), data.device, dims)

    def positions(self, name: str, dim: int, rank: int | None = None) -> torch.Tensor:
        """The global index of each element that this process, or another rank, holds along a dim; -1 for padding."""

        def work() -> torch.Tensor:
            topology = self.topology(name)
            size = topology.shape[dim]
            return box(pad(torch.arange(1, size + 1), 0, size, topology.shards[dim]), topology, dim, 0, rank) - 1

        found: torch.Tensor = self.once(("positions", name, dim, rank), work)
        return found

    def held_places(self, name: str, dim: int, rank: int | None = None) -> torch.Tensor:
        """Where along a dim this process, or another rank, stores elements: all places but the padding."""
        found: torch.Tensor = self.once(
            ("held", name, dim, rank), lambda: torch.nonzero(self.positions(name, dim, rank) >= 0).squeeze(1)
        )
        return found

    def spots(self, name: str, dim: int) -> torch.Tensor:
        """For each global index along a dim where this process holds it; -1 where it does not."""

        def work() -> torch.Tensor:
            found, held = torch.full((self.topology(name).shape[dim],), -1), self.held_places(name, dim)
            found[self.positions(name, dim)[held]] = held
            return found

        found: torch.Tensor = self.once(("spots", name, dim), work)
        return found

    def trim(self, name: str, data: torch.Tensor, dim: int) -> torch.Tensor:
        """The operand without its padding along a dim that is looked up by index: padding may be interior."""
        topology = self.topology(name)
        if self.peers.alone or not topology.crosses(dim):
            return unpad(data, dim, topology.shape[dim], topology.shards[dim])
        held = self.held_places(name, dim)
        return data if len(held) == data.shape[dim] else data.index_select(dim, held.to(data.device))

    def whole(self, name: str, data: torch.Tensor, dim: int) -> torch.Tensor:
        """`trim` for an op that runs without padding in one process, and with it elsewhere."""
        padded = data.dim() and data.shape[dim] > self.call.shape(name)[dim]
        return self.trim(name, data, dim) if padded or not self.peers.alone else data

    def pad_like(self, name: str, data: torch.Tensor, dim: int, place: int | None = None) -> torch.Tensor:
        """An array with the padding of an operand's dim, at its own dim or another place: undoes `trim`."""
        topology = self.topology(name)
        return pad(data, dim if place is None else place, topology.shape[dim], topology.shards[dim])


def dims_of(input: torch.Tensor, dim: object) -> tuple[int, ...]:
    """Dims counted from the front; None means all."""
    return normal_dims(dim, input.dim())


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch adds up: half precision is summed in float32."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
