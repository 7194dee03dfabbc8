"""What each mesh axis does to a tensor, and what follows from it. Start with `Topology`."""

from meshloom.placement.extents import Extent, extents
from meshloom.placement.notation import parse
from meshloom.placement.pieces import Cut, Piece, cut
from meshloom.placement.placements import IDENTITY, PARTIAL_OPS, Partial, Placement, Replicate, Shard
from meshloom.placement.spelling import Placements, as_placements, read_placements, spell
from meshloom.placement.topology import Topology, can_be_partial, reduce_together

__all__ = [
    "IDENTITY",
    "PARTIAL_OPS",
    "Cut",
    "Extent",
    "Partial",
    "Piece",
    "Placement",
    "Placements",
    "Replicate",
    "Shard",
    "Topology",
    "as_placements",
    "can_be_partial",
    "cut",
    "extents",
    "parse",
    "read_placements",
    "reduce_together",
    "spell",
]
