"""Which ops know how to work on a dim that several processes hold when a device alone cannot: see `backends.forms`.

Other rows that need statistics are not offered on such an axis: there the op gathers, and `explain` says so.
"""

from __future__ import annotations

from meshloom.ops.rule import Row

ACROSS = frozenset(
    "softmax log_softmax layer_norm var embedding argmax argmin max_dim min_dim cross_entropy "
    "scaled_dot_product_attention".split()
)


def works_across(op: str, row: Row) -> bool:
    """Whether a row can be carried out on an axis that several processes share.

    Of attention only the causal queries can: keys and values that lie apart are gathered there.
    """
    return row.local or (op in ACROSS and not (op == "scaled_dot_product_attention" and row.inner))
