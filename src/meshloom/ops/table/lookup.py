"""Ops that find elements by index, or put them there."""

from __future__ import annotations

from meshloom.ops import lookup
from meshloom.ops.rule import Op

LOOKUP: tuple[Op, ...] = (
    Op("embedding", lookup.embedding, "input, weight, padding_idx=None", "finite", result="value"),
    Op("gather", lookup.gather, "input, dim, index, *, sparse_grad=False", "trimmed", result="input"),
    Op("take_along_dim", lookup.take_along_dim, "input, indices, dim=None", "trimmed", result="input"),
    Op("take", lookup.take, "input, index", "trimmed", result="input"),
    Op("index_select", lookup.index_select, "input, dim, index", "trimmed", result="input"),
    Op("take_rows", lookup.take_rows, "input, index", "trimmed", result="input", surface="inner"),
    Op("index", lookup.index, "input, indices", "trimmed", result="input"),
    Op("index_put", lookup.index_put, "input, indices, values, accumulate=False", "trimmed", result="input"),
    Op(
        "index_add", lookup.index_add, "input, dim, index, source, *, alpha=1", "trimmed", result="input", rewrites=True
    ),
    Op("index_copy", lookup.index_write, "input, dim, index, source", "trimmed", result="input", rewrites=True),
    Op("index_fill", lookup.index_write, "input, dim, index, value", "trimmed", result="input", rewrites=True),
    Op(
        "scatter",
        lookup.scatter,
        "input, dim, index, src=None, *, value=None, reduce=None",
        "trimmed",
        result="input",
        rewrites=True,
    ),
    Op("scatter_add", lookup.scatter_add, "input, dim, index, src", "trimmed", result="input", rewrites=True),
    Op(
        "scatter_reduce",
        lookup.scatter,
        "input, dim, index, src, reduce, *, include_self=True",
        "trimmed",
        result="input",
        rewrites=True,
    ),
    Op("one_hot", lookup.one_hot, "input, num_classes=-1", "finite", result="i64"),
)
