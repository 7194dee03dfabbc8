"""Who else holds parts of what an op works on. A formula is told its peers, and is the same alone and among them.

Alone, a sum is a total already and nobody has another maximum: every method is the identity. Between processes
`comms.peers` communicates. What is the op's own (a mask, the global position of an element) is in `Local`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from meshloom.mesh import Mesh


class Peers:
    """Those who hold parts, in order, and which of them this process is: here nobody but this one."""

    ranks: tuple[int, ...] = (0,)
    index = 0
    alone = True

    def along(self, mesh: Mesh, axes: Iterable[int]) -> Peers:
        """Those who hold parts along some axes of the mesh."""
        return self

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum of what all have. It is one value: each has the whole gradient of it."""
        return parts

    def share(self, value: torch.Tensor) -> torch.Tensor:
        """A value that all hold alike, with which each goes on for its own part: the gradients of the parts add up."""
        return value

    def statistic(self, parts: torch.Tensor) -> torch.Tensor:
        """The sum of what all have, with which each goes on for its own part."""
        return self.share(self.sum(parts))

    def reduce(self, parts: torch.Tensor, op: str) -> torch.Tensor:
        """The reduction of what all have, by any op; it has no gradient."""
        return parts

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """What each of them has, stacked in their order."""
        return part.unsqueeze(0)

    def pass_on(self, block: torch.Tensor) -> torch.Tensor:
        """The block of the one before; this one's goes to the next. It has no gradient."""
        return block


ALONE = Peers()
