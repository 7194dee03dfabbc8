"""What each mesh axis does to a tensor, and what follows from it. Start with `Topology`."""

from meshloom.placement.extents import Extent, Part, extents
from meshloom.placement.notation import parse
from meshloom.placement.pieces import Cut, Piece, cut
from meshloom.placement.placements import IDENTITY, PARTIAL_OPS, Partial, Placement, Replicate, Shard
from meshloom.placement.spelling import Placements, as_placements, read_placements, spell
from meshloom.placement.topology import Topology, can_be_partial, reduce_together
from meshloom.placement.transfers import Box, Transfer, bytes_received, transfers

__all__ = [
    "IDENTITY",
    "PARTIAL_OPS",
    "Box",
    "Cut",
    "Extent",
    "Part",
    "Partial",
    "Piece",
    "Placement",
    "Placements",
    "Replicate",
    "Shard",
    "Topology",
    "Transfer",
    "as_placements",
    "bytes_received",
    "can_be_partial",
    "cut",
    "extents",
    "parse",
    "read_placements",
    "reduce_together",
    "spell",
    "transfers",
]
