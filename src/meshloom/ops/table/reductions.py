"""Reductions: a sharded dim gives a partial result, or statistics that are all-reduced."""

from __future__ import annotations

from meshloom.ops import reductions
from meshloom.ops.labels import identity_fill, reduction
from meshloom.ops.rule import Op

_OVER = "input, dim=None, keepdim=False"

REDUCTIONS: tuple[Op, ...] = (
    Op("sum", reduction("sum", "P(sum) -> P(sum)"), _OVER + ", *, dtype=None", result="accumulate"),
    Op("mean", reduction("mean", "P(sum) -> P(sum)"), _OVER + ", *, dtype=None"),  # sum / global count
    Op("amax", reduction("max", "P(max) -> P(max)", ties=True), _OVER, fill=identity_fill("max")),
    Op("amin", reduction("min", "P(min) -> P(min)", ties=True), _OVER, fill=identity_fill("min")),
    Op(
        "prod",
        reduction("prod", "P(prod) -> P(prod)"),
        _OVER + ", *, dtype=None",
        "finite",
        identity_fill("prod"),
        result="accumulate",
    ),
    Op("any", reduction("max"), _OVER, result="bool"),
    Op("all", reduction("min"), _OVER, "finite", identity_fill("prod"), result="bool"),
    Op("var", reductions.var, "input, dim=None, unbiased=None, keepdim=False, *, correction=None", "finite"),
    Op("argmax", reductions.arg_reduction, _OVER, result="i64"),
    Op("argmin", reductions.arg_reduction, _OVER, result="i64"),
    Op("max_dim", reductions.value_and_index, "input, dim, keepdim=False"),
    Op("min_dim", reductions.value_and_index, "input, dim, keepdim=False"),
)
