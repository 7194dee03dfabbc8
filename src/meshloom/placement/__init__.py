"""What each mesh axis does to a tensor, and what follows from it. Start with `Topology`."""

from meshloom.placement.notation import parse
from meshloom.placement.placements import PARTIAL_OPS, Partial, Placement, Replicate, Shard
from meshloom.placement.spelling import Placements, as_placements, read_placements, spell
from meshloom.placement.topology import Topology

__all__ = [
    "PARTIAL_OPS",
    "Partial",
    "Placement",
    "Placements",
    "Replicate",
    "Shard",
    "Topology",
    "as_placements",
    "parse",
    "read_placements",
    "spell",
]
