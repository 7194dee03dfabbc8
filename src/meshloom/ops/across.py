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

    Of attention all can but one: keys that lie apart while their queries do not are gathered.
    """
    return row.local or (op in ACROSS and row.label != "keys")
