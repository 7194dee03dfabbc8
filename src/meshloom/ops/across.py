"""Which ops know how to work on a dim that several processes hold when a device alone cannot: see `backends.forms`.

Other rows that need statistics are not offered on such an axis: there the op gathers, and `explain` says so.
"""

ACROSS = frozenset(
    "softmax log_softmax layer_norm var embedding argmax argmin max_dim min_dim cross_entropy "
    "scaled_dot_product_attention".split()
)
