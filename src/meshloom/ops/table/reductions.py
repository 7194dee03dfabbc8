"""Reductions: a sharded dim gives a partial result, or statistics that are all-reduced."""

from __future__ import annotations

import math

from meshloom.ops import reductions
from meshloom.ops.labels import SUM, identity_fill, reduction
from meshloom.ops.rule import Op

_OVER = "input, dim=None, keepdim=False"
_QUANTILE = "input, q, dim=None, keepdim=False, *, interpolation='linear'"
_SCAN = "input, dim"

REDUCTIONS: tuple[Op, ...] = (
    Op("sum", reduction("sum", "P(sum) -> P(sum)"), _OVER + ", *, dtype=None", result="accumulate", is_fresh=True),
    Op("mean", reduction("mean", "P(sum) -> P(sum)"), _OVER + ", *, dtype=None", is_fresh=True),  # sum / global count
    Op("amax", reduction("max", "P(max) -> P(max) if untied", ties=True), _OVER, fill=identity_fill("max")),
    Op("amin", reduction("min", "P(min) -> P(min) if untied", ties=True), _OVER, fill=identity_fill("min")),
    Op(
        "prod",
        reduction("prod", "P(prod) -> P(prod)"),
        _OVER + ", *, dtype=None",
        "finite",
        identity_fill("prod"),
        result="accumulate",
    ),
    Op("any", reduction("max"), _OVER, result="truth"),
    Op("all", reduction("min"), _OVER, "finite", identity_fill("prod"), result="truth"),
    Op(
        "var",
        reductions.var,
        "input, dim=None, unbiased=None, keepdim=False, *, correction=None",
        "finite",
        result="real",
    ),
    Op(
        "std",
        reductions.var,
        "input, dim=None, unbiased=None, keepdim=False, *, correction=None",
        "finite",
        result="real",
    ),
    Op("nansum", reduction("sum"), _OVER + ", *, dtype=None", result="accumulate"),
    Op("nanmean", reductions.with_statistics("sum", "sum"), _OVER + ", *, dtype=None", "finite"),
    Op("count_nonzero", reduction("sum"), "input, dim=None", result="i64"),
    Op(
        "logsumexp",
        reductions.with_statistics("max", "sum"),
        "input, dim, keepdim=False",
        "finite",
        reductions.lowest_fill,
        result="float",
    ),
    Op(
        "linalg_vector_norm",
        reductions.vector_norm,
        "input, ord=2, dim=None, keepdim=False, *, dtype=None",
        "finite",
        reductions.norm_fill,
        result="real",
    ),
    Op("argmax", reductions.arg_reduction, _OVER, result="i64"),
    Op("argmin", reductions.arg_reduction, _OVER, result="i64"),
    Op("max_dim", reductions.value_and_index, "input, dim, keepdim=False", result="promote, i64", surface="inner"),
    Op("min_dim", reductions.value_and_index, "input, dim, keepdim=False", result="promote, i64", surface="inner"),
    # the dim whole
    Op("median", reductions.along_one_dim, "input, dim, keepdim=False", "finite", result="promote, i64"),
    Op("nanmedian", reductions.along_one_dim, "input, dim, keepdim=False", "finite", result="promote, i64"),
    Op("mode", reductions.along_one_dim, "input, dim=-1, keepdim=False", "finite", result="promote, i64"),
    Op("kthvalue", reductions.along_one_dim, "input, k, dim=-1, keepdim=False", "finite", result="promote, i64"),
    Op("quantile", reductions.quantile, _QUANTILE, "trimmed", result="input"),
    Op("nanquantile", reductions.quantile, _QUANTILE, "trimmed", result="input"),
    # scans
    Op("cumsum", reductions.scan(SUM), _SCAN + ", *, dtype=None", "finite", result="accumulate"),  # linear
    Op("cumprod", reductions.scan(), _SCAN + ", *, dtype=None", "finite", reductions.scan_fill(1), "accumulate"),
    Op("logcumsumexp", reductions.scan(), _SCAN, "finite", reductions.scan_fill(-math.inf)),
    Op("cummax", reductions.scan(indexed=True), _SCAN, "finite", result="promote, i64"),
    Op("cummin", reductions.scan(indexed=True), _SCAN, "finite", result="promote, i64"),
)
