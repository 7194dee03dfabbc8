"""Ops that find elements by index."""

from __future__ import annotations

from meshloom.ops import lookup
from meshloom.ops.rule import Op

LOOKUP: tuple[Op, ...] = (Op("embedding", lookup.embedding, "input, weight, padding_idx=None", "finite"),)
