"""The one table: a line per op, with the identity that justifies its partial rows as a comment.

To add an op: one line here, one line in `engines.torch_engine`, sample arguments in `tests/samples.py`.
"""

from __future__ import annotations

from meshloom.ops import shapes, special
from meshloom.ops.labels import identity_fill, labels, pointwise, reduction, table, unknown_op
from meshloom.ops.rule import Call, Op

_SCAN = "input, dim=None, keepdim=False"
_SOFTMAX = "input, dim=None, dtype=None, _stacklevel=3"


def _true_division(call: Call) -> bool:
    return call.arguments.get("rounding_mode") is None


def _plain_bounds(call: Call) -> bool:
    return len(call.operands) == 1


OPS: dict[str, Op] = table(
    # arithmetic
    Op("add", pointwise("P(sum), P(sum) -> P(sum)")),  # sum(a) + sum(b) = sum(a + b)
    Op("sub", pointwise("P(sum), P(sum) -> P(sum)")),  # sum(a) - sum(b) = sum(a - b)
    Op("mul", pointwise("P(sum), R -> P(sum)", "R, P(sum) -> P(sum)")),  # sum(a) * b = sum(a * b)
    Op("div", pointwise("P(sum), R -> P(sum)", when=_true_division), at_zero="singular"),  # sum(a) / b = sum(a / b)
    Op("floor_divide", pointwise(), at_zero="singular"),
    Op("remainder", pointwise(), at_zero="singular"),
    Op("fmod", pointwise(), at_zero="singular"),
    Op("pow", pointwise(), at_zero="singular"),  # x ** 0.5 and x ** -1 have no derivative at 0
    Op("neg", pointwise("P(sum) -> P(sum)", "P(max) -> P(min)", "P(min) -> P(max)")),  # -max(a, b) = min(-a, -b)
    Op("abs", pointwise()),
    Op("square", pointwise()),
    Op("sign", pointwise()),
    Op("reciprocal", pointwise(), at_zero="singular"),
    Op("maximum", pointwise("P(max), P(max) -> P(max)", "P(max), R -> P(max)", "R, P(max) -> P(max)")),
    Op("minimum", pointwise("P(min), P(min) -> P(min)", "P(min), R -> P(min)", "R, P(min) -> P(min)")),
    Op("lerp", pointwise()),
    Op("addcmul", pointwise()),
    Op("addcdiv", pointwise(), at_zero="singular"),
    # comparison and logic
    Op("eq", pointwise(), at_zero="finite", result="bool"),
    Op("ne", pointwise(), result="bool"),
    Op("lt", pointwise(), result="bool"),
    Op("le", pointwise(), at_zero="finite", result="bool"),
    Op("gt", pointwise(), result="bool"),
    Op("ge", pointwise(), at_zero="finite", result="bool"),
    Op("logical_and", pointwise(), result="bool"),
    Op("logical_or", pointwise(), result="bool"),
    Op("logical_xor", pointwise(), result="bool"),
    Op("logical_not", pointwise(), at_zero="finite", result="bool"),
    Op("bitwise_and", pointwise()),
    Op("bitwise_or", pointwise()),
    Op("bitwise_xor", pointwise()),
    Op("bitwise_not", pointwise(), at_zero="finite"),
    Op("isnan", pointwise(), result="bool"),
    Op("isinf", pointwise(), result="bool"),
    Op("isfinite", pointwise(), at_zero="finite", result="bool"),
    # choice and range
    Op("where", pointwise("R, P(sum), P(sum) -> P(sum)", "R, P(max), P(max) -> P(max)", "R, P(min), P(min) -> P(min)")),
    Op("masked_fill", pointwise()),
    Op("clamp", pointwise("P(max) -> P(max)", "P(min) -> P(min)", when=_plain_bounds), at_zero="finite"),  # monotone
    # functions of one number; the monotone ones that are defined everywhere commute with max and min
    Op("exp", pointwise("P(max) -> P(max)", "P(min) -> P(min)"), at_zero="finite"),
    Op("log", pointwise(), at_zero="singular"),
    Op("log1p", pointwise()),
    Op("expm1", pointwise()),
    Op("sqrt", pointwise(), at_zero="singular"),  # its derivative at 0 is inf
    Op("rsqrt", pointwise(), at_zero="singular"),
    Op("sin", pointwise()),
    Op("cos", pointwise(), at_zero="finite"),
    Op("tanh", pointwise("P(max) -> P(max)", "P(min) -> P(min)")),
    Op("sigmoid", pointwise("P(max) -> P(max)", "P(min) -> P(min)"), at_zero="finite"),
    Op("relu", pointwise("P(max) -> P(max)", "P(min) -> P(min)")),  # relu(max(a, b)) = max(relu(a), relu(b))
    Op("gelu", pointwise()),
    Op("silu", pointwise()),
    Op("erf", pointwise()),
    Op("floor", pointwise()),
    Op("ceil", pointwise()),
    Op("round", pointwise()),
    Op("to", pointwise(), "input, dtype"),
    Op("clone", pointwise("P(sum) -> P(sum)", "P(max) -> P(max)", "P(min) -> P(min)")),
    # contractions
    Op("matmul", labels(special.matmul_spec, "input", "other"), "input, other", "trimmed"),
    Op("mm", labels("mk, kn -> mn", "input", "mat2"), "input, mat2", "trimmed"),
    Op("bmm", labels("bmk, bkn -> bmn", "input", "mat2"), "input, mat2", "trimmed"),
    Op("mv", labels("mk, k -> m", "input", "vec"), "input, vec", "trimmed"),
    Op("dot", labels("k, k -> ", "input", "tensor"), "input, tensor"),
    Op("linear", labels("...k, nk -> ...n", "input", "weight", bias="bias"), "input, weight, bias=None", "trimmed"),
    Op("einsum", special.einsum, "equation, *operands", "trimmed"),
    # reductions: a sharded dim gives a partial result
    Op("sum", reduction("sum", "P(sum) -> P(sum)"), _SCAN + ", *, dtype=None", result="accumulate"),
    Op("mean", reduction("mean", "P(sum) -> P(sum)"), _SCAN + ", *, dtype=None"),  # sum / global count
    Op("amax", reduction("max", "P(max) -> P(max)", ties=True), _SCAN, fill=identity_fill("max")),
    Op("amin", reduction("min", "P(min) -> P(min)", ties=True), _SCAN, fill=identity_fill("min")),
    Op(
        "prod",
        reduction("prod", "P(prod) -> P(prod)"),
        _SCAN + ", *, dtype=None",
        "finite",
        identity_fill("prod"),
        result="accumulate",
    ),
    Op("any", reduction("max"), _SCAN, result="bool"),
    Op("all", reduction("min"), _SCAN, "finite", identity_fill("prod"), result="bool"),
    Op("var", special.var, "input, dim=None, unbiased=None, keepdim=False, *, correction=None", "finite"),
    Op("argmax", special.arg_reduction, _SCAN, result="i64"),
    Op("argmin", special.arg_reduction, _SCAN, result="i64"),
    Op("max_dim", special.value_and_index, "input, dim, keepdim=False"),
    Op("min_dim", special.value_and_index, "input, dim, keepdim=False"),
    # a whole dim at a time
    Op("softmax", special.softmax, _SOFTMAX, "finite", special.softmax_fill),
    Op("log_softmax", special.softmax, _SOFTMAX, "finite", special.softmax_fill),
    Op("layer_norm", special.layer_norm, "input, normalized_shape, weight=None, bias=None, eps=1e-05", "finite"),
    Op(
        "cross_entropy",
        special.cross_entropy,
        "input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', "
        "label_smoothing=0.0",
        "finite",
        special.cross_entropy_fill,
    ),
    Op("embedding", special.embedding, "input, weight, padding_idx=None", "finite"),
    Op(
        "scaled_dot_product_attention",
        special.attention,
        "query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False",
        "finite",
        special.attention_fill,
    ),
    # shape
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

# Other names of the same ops, as torch and Python spell them.
ALIASES: dict[str, str] = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "not_equal": "ne",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "special_expit": "sigmoid",
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__div__": "div",
    "__floordiv__": "floor_divide",
    "__mod__": "remainder",
    "__pow__": "pow",
    "__neg__": "neg",
    "__abs__": "abs",
    "__eq__": "eq",
    "__ne__": "ne",
    "__lt__": "lt",
    "__le__": "le",
    "__gt__": "gt",
    "__ge__": "ge",
    "__and__": "bitwise_and",
    "__rand__": "bitwise_and",
    "__or__": "bitwise_or",
    "__ror__": "bitwise_or",
    "__xor__": "bitwise_xor",
    "__rxor__": "bitwise_xor",
    "__invert__": "bitwise_not",
    "__matmul__": "matmul",
    "__getitem__": "getitem",
}


def find(name: str) -> Op:
    """The op of that name or alias, or an error that lists the closest names.

    >>> find("multiply").name
    'mul'
    """
    op = OPS.get(ALIASES.get(name, name))
    if op is None:
        raise unknown_op(name, OPS)
    return op
