"""Ops that put elements in order."""

from __future__ import annotations

from meshloom.ops import order
from meshloom.ops.rule import Op

_LINE = "*, out_int32=False, right=False"

ORDER: tuple[Op, ...] = (
    Op("sort", order.sort, "input, dim=-1, descending=False, stable=False", "trimmed", result="promote, i64"),
    Op("argsort", order.argsort, "input, dim=-1, descending=False, stable=False", "trimmed", result="i64"),
    Op("topk", order.topk, "input, k, dim=-1, largest=True, sorted=True", "trimmed", result="promote, i64"),
    Op(
        "searchsorted",
        order.searchsorted,
        f"sorted_sequence, input, {_LINE}, side=None, sorter=None",
        "trimmed",
        result="index",
    ),
    Op("bucketize", order.bucketize, f"input, boundaries, {_LINE}", "trimmed", result="index"),
)
