"""Ops that act on each element by itself. The comment is the identity that justifies a partial row."""

from __future__ import annotations

from meshloom.ops.labels import pointwise
from meshloom.ops.rule import Call, Op


def _true_division(call: Call) -> bool:
    return call.arguments.get("rounding_mode") is None


def _plain_bounds(call: Call) -> bool:
    return len(call.operands) == 1


POINTWISE: tuple[Op, ...] = (
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
)
