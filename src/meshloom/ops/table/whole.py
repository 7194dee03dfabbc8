"""Ops that look at a whole dim: softmax, norms, losses, attention."""

from __future__ import annotations

from meshloom.ops import attention, losses, normalisation
from meshloom.ops.rule import Op

_SOFTMAX = "input, dim=None, dtype=None, _stacklevel=3"

WHOLE: tuple[Op, ...] = (
    Op("softmax", normalisation.softmax, _SOFTMAX, "finite", normalisation.softmax_fill),
    Op("log_softmax", normalisation.softmax, _SOFTMAX, "finite", normalisation.softmax_fill),
    Op("layer_norm", normalisation.layer_norm, "input, normalized_shape, weight=None, bias=None, eps=1e-05", "finite"),
    Op(
        "cross_entropy",
        losses.cross_entropy,
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
        "label_smoothing=0.0",
        "finite",
        losses.cross_entropy_fill,
    ),
    Op(
        "scaled_dot_product_attention",
        attention.attention,
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False",
        "finite",
        attention.attention_fill,
    ),
)
