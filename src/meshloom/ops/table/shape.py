"""Ops that move elements about."""

from __future__ import annotations

from meshloom.ops import shapes
from meshloom.ops.rule import Op

SHAPE: tuple[Op, ...] = (
    Op("reshape", shapes.reshape, "input, *shape", is_view=True),
    Op("view", shapes.reshape, "input, *shape", is_view=True),
    Op("flatten", shapes.flatten, "input, start_dim=0, end_dim=-1", is_view=True),
    Op("squeeze", shapes.squeeze, "input, dim=None", is_view=True),
    Op("unsqueeze", shapes.unsqueeze, "input, dim", is_view=True),
    Op("permute", shapes.permute, "input, *dims", is_view=True),
    Op("transpose", shapes.transpose, "input, dim0, dim1", is_view=True),
    Op("expand", shapes.expand, "input, *size, implicit=False", is_view=True),
    Op("narrow", shapes.narrow, "input, dim, start, length", is_view=True),
    Op("getitem", shapes.getitem, "input, index", is_view=True),
    Op("split", shapes.split, "input, sections, dim=0", is_view=True),
    Op("chunk", shapes.split, "input, sections, dim=0", is_view=True),
    Op("cat", shapes.cat, "tensors, dim=0"),
    Op("stack", shapes.stack, "tensors, dim=0"),
)
