"""Ops that look at a whole dim: softmax, norms, losses, attention."""

from __future__ import annotations

from meshloom.ops import attention, losses, normalisation
from meshloom.ops.rule import Op

_SOFTMAX = "input, dim=None, dtype=None, _stacklevel=3"
_LOSS = "input, target, size_average=None, reduce=None, reduction='mean'"
_FAR = 1e4  # exp(-1e4) is zero, and every float dtype can hold 1e4

WHOLE: tuple[Op, ...] = (
    Op("softmax", normalisation.softmax, _SOFTMAX, "finite", normalisation.softmax_fill),
    Op("log_softmax", normalisation.softmax, _SOFTMAX, "finite", normalisation.softmax_fill),
    Op(
        "layer_norm",
        normalisation.trailing_norm(2),
        "input, normalized_shape, weight=None, bias=None, eps=1e-05",
        "finite",
    ),
    Op("rms_norm", normalisation.trailing_norm(1), "input, normalized_shape, weight=None, eps=None", "finite"),
    Op("group_norm", normalisation.group_norm, "input, num_groups, weight=None, bias=None, eps=1e-05", "finite"),
    Op(
        "batch_norm",
        normalisation.batch_norm,
        "input, running_mean, running_var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-05",
        "finite",
        normalisation.batch_norm_fill,
    ),
    # losses
    Op("mse_loss", losses.of_elements(), _LOSS + ", weight=None", "finite"),
    Op("l1_loss", losses.of_elements(), _LOSS + ", weight=None", "finite", result="distance"),
    Op("smooth_l1_loss", losses.of_elements(), _LOSS + ", beta=1.0", "finite"),
    Op("huber_loss", losses.of_elements(), "input, target, reduction='mean', delta=1.0, weight=None", "finite"),
    Op("soft_margin_loss", losses.of_elements(floating=("input",)), _LOSS, "finite", losses.no_loss(_FAR, 1)),
    Op(
        "poisson_nll_loss",
        losses.of_elements(far=True),
        "input, target, log_input=True, full=False, size_average=None, eps=1e-08, reduce=None, reduction='mean'",
        "finite",
        losses.no_loss(-_FAR, 0, when=lambda call: bool(call.arguments["log_input"])),
        result="float",
    ),
    Op(
        "binary_cross_entropy",
        losses.of_elements(),
        "input, target, weight=None, size_average=None, reduce=None, reduction='mean'",
        "finite",
        losses.no_loss(0, 0),
    ),
    Op(
        "binary_cross_entropy_with_logits",
        losses.of_elements(),
        "input, target, weight=None, size_average=None, reduce=None, reduction='mean', pos_weight=None",
        "finite",
        losses.no_loss(-_FAR, 0),
    ),
    Op(
        "kl_div",
        losses.of_elements("batchmean", floating=("input", "target")),
        _LOSS + ", log_target=False",
        "finite",
        losses.no_loss(0, 1, when=lambda call: not call.arguments["log_target"]),
    ),
    Op(
        "nll_loss",
        losses.of_classes("sum"),
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean'",
        "finite",
        losses.cross_entropy_fill,
    ),
    Op(
        "cross_entropy",
        losses.of_classes("max", "sum", "sum"),
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
