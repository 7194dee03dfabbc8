"""The peers of an op whose operand several processes hold."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from meshloom.comms import wire
from meshloom.comms.gradients import AllGather, AllReduce, SumGradient
from meshloom.comms.group import Group, group_of
from meshloom.engines.peers import ALONE, Peers
from meshloom.mesh import Mesh


class ProcessPeers(Peers):
    """The processes of a group."""

    alone = False

    def __init__(self, group: Group) -> None:
        self.group, self.ranks, self.index = group, group.ranks, group.index

    def along(self, mesh: Mesh, axes: Iterable[int]) -> Peers:
        return peers_of(mesh, axes)

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        return AllReduce.apply(parts, self.group)

    def share(self, value: torch.Tensor) -> torch.Tensor:
        return SumGradient.apply(value, self.group)

    def reduce(self, parts: torch.Tensor, op: str) -> torch.Tensor:
        return wire.all_reduce(parts.detach(), self.group, op)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return AllGather.apply(part, self.group)

    def pass_on(self, block: torch.Tensor) -> torch.Tensor:
        size = self.group.processes
        leaving: list[list[int]] = [[] for _ in range(size)]
        leaving[(self.index + 1) % size] = [0]
        return wire.exchange_rows(block.unsqueeze(0), leaving, [((self.index - 1) % size, 0)], self.group)[0]


def peers_of(mesh: Mesh, axes: Iterable[int]) -> Peers:
    """Who holds parts along some axes of a mesh: other processes, or nobody else."""
    group = group_of(mesh, axes)
    return ALONE if group is None else ProcessPeers(group)
