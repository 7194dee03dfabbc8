"""What a form may know of its call, besides the arrays that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.comms.group import Group, group_of
from meshloom.engines.layout import box, pad
from meshloom.engines.torch_engine import Local
from meshloom.placement import Topology
from meshloom.planner import Plan


@dataclass(frozen=True)
class Across:
    """What a form may know: the call, the plan, and the processes that share the op's statistics."""

    local: Local
    plan: Plan
    group: Group

    def topology(self, name: str) -> Topology:
        """Where the operand given as an argument lies when the op runs."""
        return self.local.ins[self.plan.call.index(name)]

    def positions(self, name: str, dim: int, rank: int | None = None) -> torch.Tensor:
        """The global index of each element that this process, or another rank, holds along a dim; -1 for padding."""

        def work() -> torch.Tensor:
            topology = self.topology(name)
            size = topology.shape[dim]
            line = pad(torch.arange(1, size + 1), 0, size, topology.shards[dim])
            return box(line, topology, dim, 0, rank) - 1

        return self._once("positions", work, name, dim, rank)

    def spots(self, name: str, dim: int) -> torch.Tensor:
        """For each global index along a dim where this process holds it; -1 where it does not."""

        def work() -> torch.Tensor:
            found, held = torch.full((self.topology(name).shape[dim],), -1), self.held(name, dim)
            found[self.positions(name, dim)[held]] = held
            return found

        return self._once("spots", work, name, dim)

    def held(self, name: str, dim: int, rank: int | None = None) -> torch.Tensor:
        """Where along a dim this process, or another rank, stores elements: all places but the padding."""
        return self._once(
            "held", lambda: torch.nonzero(self.positions(name, dim, rank) >= 0).squeeze(1), name, dim, rank
        )

    def _once(self, what: str, work: Callable[[], torch.Tensor], *of: Any) -> torch.Tensor:
        """What follows from the call alone is worked out on its first run."""
        found: torch.Tensor = self.local.once(f"{what} {of}", work)
        return found

    def trimmed(self, name: str, data: torch.Tensor, dim: int) -> torch.Tensor:
        """What this process holds of an operand without the padding along a dim."""
        held = self.held(name, dim)
        return data if len(held) == data.shape[dim] else data.index_select(dim, held.to(data.device))

    def along(self, name: str, dim: int) -> Group | None:
        """The processes that hold parts of a dim."""
        return group_of(self.plan.mesh, self.topology(name).axes_of[dim])
