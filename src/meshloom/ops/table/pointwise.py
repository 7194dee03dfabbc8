"""Ops that act on each element by itself. The comment is the identity that justifies a partial row.

The word after `if` is what the identity needs to hold for every value of the dtype (`algebra.CONDITIONS`).
"""

from __future__ import annotations

from meshloom.ops import activations
from meshloom.ops.labels import pointwise
from meshloom.ops.rule import Op

_LINEAR = ("P(sum) -> P(sum)",)
_BOUNDED = ("P(max) -> P(max) if bounded", "P(min) -> P(min) if bounded")
_MONOTONE = ("P(max) -> P(max)", "P(min) -> P(min)")  # f(max(a, b)) = max(f(a), f(b))

POINTWISE: tuple[Op, ...] = (
    # arithmetic
    Op("add", pointwise("P(sum), P(sum) -> P(sum)")),  # sum(a) + sum(b) = sum(a + b)
    Op("sub", pointwise("P(sum), P(sum) -> P(sum) if whole")),  # sum(a) - sum(b) = sum(a - b)
    Op("mul", pointwise("P(sum), R -> P(sum) if scaled", "R, P(sum) -> P(sum) if scaled")),  # sum(a) * b = sum(a * b)
    Op(
        "div", pointwise("P(sum), R -> P(sum) if divided"), at_zero="singular", result="quotient"
    ),  # sum(a)/b = sum(a/b)
    Op("floor_divide", pointwise(), at_zero="singular"),
    Op("remainder", pointwise(), at_zero="singular"),
    Op("fmod", pointwise(), at_zero="singular"),
    Op("pow", pointwise(), at_zero="singular", is_cast=True),  # x ** 0.5 and x ** -1 have no derivative at 0
    Op(
        "neg",  # -max(a, b) = min(-a, -b)
        pointwise("P(sum) -> P(sum) if whole", "P(max) -> P(min) if floating", "P(min) -> P(max) if floating"),
    ),
    Op("abs", pointwise(), result="real"),
    Op("positive", pointwise(*_LINEAR, *_MONOTONE)),
    Op("square", pointwise(), result="number"),
    Op("sign", pointwise("P(max) -> P(max) if whole", "P(min) -> P(min) if whole")),  # of nan it is 0
    Op("sgn", pointwise()),
    Op("angle", pointwise(), result="real float"),
    Op("conj_physical", pointwise()),
    Op("complex", pointwise(), result="complex"),
    Op("reciprocal", pointwise(), at_zero="singular", result="float"),
    Op("float_power", pointwise(), at_zero="singular", result="double"),
    Op("ldexp", pointwise(), result="float"),  # 2**b may be infinite
    Op("maximum", pointwise(*(f"{each} -> P(max) if untied" for each in ("P(max), P(max)", "P(max), R", "R, P(max)")))),
    Op("minimum", pointwise(*(f"{each} -> P(min) if untied" for each in ("P(min), P(min)", "P(min), R", "R, P(min)")))),
    Op("fmax", pointwise()),
    Op("fmin", pointwise()),
    Op("gcd", pointwise()),
    Op("lcm", pointwise()),
    Op("copysign", pointwise(), result="float"),
    Op("nextafter", pointwise()),
    Op("heaviside", pointwise()),
    Op("hypot", pointwise(), at_zero="singular"),  # the derivative is x / hypot(x, y)
    Op("atan2", pointwise(), at_zero="singular", result="float"),
    Op("xlogy", pointwise(), at_zero="singular", result="float"),
    Op("special_xlog1py", pointwise(), result="float"),
    Op("logaddexp", pointwise(), at_zero="finite"),
    Op("logaddexp2", pointwise(), at_zero="finite"),
    Op("igamma", pointwise(), at_zero="singular"),
    Op("igammac", pointwise(), at_zero="singular"),
    Op("special_zeta", pointwise(), at_zero="singular", result="float"),
    Op("lerp", pointwise()),
    Op("addcmul", pointwise(), number="value"),
    Op("addcdiv", pointwise(), at_zero="singular", number="value"),
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
    Op("bitwise_left_shift", pointwise()),
    Op("bitwise_right_shift", pointwise()),
    Op("isclose", pointwise(), at_zero="finite", result="bool"),
    Op("signbit", pointwise(), at_zero="finite", result="bool"),  # padding may be -0
    Op("isreal", pointwise(), at_zero="finite", result="bool"),
    Op("isposinf", pointwise(), result="bool"),
    Op("isneginf", pointwise(), result="bool"),
    Op("isnan", pointwise(), result="bool"),
    Op("isinf", pointwise(), result="bool"),
    Op("isfinite", pointwise(), at_zero="finite", result="bool"),
    # choice and range
    Op(
        "where",
        pointwise("R, P(sum), P(sum) -> P(sum)", "R, P(max), P(max) -> P(max)", "R, P(min), P(min) -> P(min)"),
        surface="function",
        in_place=False,
    ),
    Op("masked_fill", pointwise(), result="input"),
    Op("clamp", pointwise(*_BOUNDED), at_zero="finite", result="bounded"),  # monotone
    Op("clamp_min", pointwise(*_BOUNDED), at_zero="finite"),
    Op("clamp_max", pointwise(*_BOUNDED), at_zero="finite"),
    Op("nan_to_num", pointwise()),
    # functions of one number; the monotone ones that are defined everywhere commute with max and min
    Op("exp", pointwise(*_MONOTONE), at_zero="finite", result="float"),
    Op("exp2", pointwise(*_MONOTONE), at_zero="finite", result="float"),
    Op("expm1", pointwise(*_MONOTONE), result="float"),
    Op("log", pointwise(), at_zero="singular", result="float"),
    Op("log2", pointwise(), at_zero="singular", result="float"),
    Op("log10", pointwise(), at_zero="singular", result="float"),
    Op("log1p", pointwise(), result="float"),
    Op("logit", pointwise(), at_zero="singular", result="float"),
    Op("sqrt", pointwise(), at_zero="singular", result="float"),  # its derivative at 0 is inf
    Op("rsqrt", pointwise(), at_zero="singular", result="float"),
    Op("sin", pointwise(), result="float"),
    Op("cos", pointwise(), at_zero="finite", result="float"),
    Op("tan", pointwise(), result="float"),
    Op("asin", pointwise(), result="float"),
    Op("acos", pointwise(), at_zero="finite", result="float"),
    Op("atan", pointwise(*_MONOTONE), result="float"),
    Op("sinh", pointwise(*_MONOTONE), result="float"),
    Op("cosh", pointwise(), at_zero="finite", result="float"),
    Op("tanh", pointwise(*_MONOTONE), result="float"),
    Op("asinh", pointwise(*_MONOTONE), result="float"),
    Op("acosh", pointwise(), at_zero="singular", result="float"),
    Op("atanh", pointwise(), result="float"),
    Op("sinc", pointwise(), at_zero="finite", result="float"),
    Op("deg2rad", pointwise(*_LINEAR, *_MONOTONE), result="float"),
    Op("rad2deg", pointwise(*_LINEAR, *_MONOTONE), result="float"),
    Op("floor", pointwise(*_MONOTONE)),
    Op("ceil", pointwise(*_MONOTONE)),
    Op("round", pointwise(*_MONOTONE)),
    Op("trunc", pointwise(*_MONOTONE)),
    Op("frac", pointwise()),
    Op("erf", pointwise(), result="float"),
    Op("erfc", pointwise(), at_zero="finite", result="float"),
    Op("erfinv", pointwise(), result="float"),
    Op("lgamma", pointwise(), at_zero="singular", result="float"),
    Op("digamma", pointwise(), at_zero="singular", result="float"),
    Op("i0", pointwise(), at_zero="finite", result="float"),
    Op("special_i0e", pointwise(), at_zero="finite", result="float"),
    Op("special_i1", pointwise(), result="float"),
    Op("special_i1e", pointwise(), result="float"),
    Op("special_entr", pointwise(), at_zero="singular", result="float"),
    Op("special_erfcx", pointwise(), at_zero="finite", result="float"),
    Op("special_ndtr", pointwise(*_MONOTONE), at_zero="finite", result="float"),
    Op("special_ndtri", pointwise(), at_zero="singular", result="float"),
    Op("special_log_ndtr", pointwise(), at_zero="finite", result="float"),
    Op("special_bessel_j0", pointwise(), at_zero="finite", result="float"),
    Op("special_bessel_j1", pointwise(), result="float"),
    Op("special_bessel_y0", pointwise(), at_zero="singular", result="float"),
    Op("special_bessel_y1", pointwise(), at_zero="singular", result="float"),
    Op("special_modified_bessel_i0", pointwise(), at_zero="finite", result="float"),
    Op("special_modified_bessel_i1", pointwise(), result="float"),
    Op("special_modified_bessel_k0", pointwise(), at_zero="singular", result="float"),
    Op("special_modified_bessel_k1", pointwise(), at_zero="singular", result="float"),
    Op("special_scaled_modified_bessel_k0", pointwise(), at_zero="singular", result="float"),
    Op("special_scaled_modified_bessel_k1", pointwise(), at_zero="singular", result="float"),
    Op("special_spherical_bessel_j0", pointwise(), at_zero="finite", result="float"),
    Op("special_airy_ai", pointwise(), at_zero="finite", result="float"),
    # activations
    Op("sigmoid", pointwise(*_MONOTONE), at_zero="finite", result="float"),
    Op("logsigmoid", pointwise(*_MONOTONE), at_zero="finite"),
    Op("relu", pointwise(*_MONOTONE)),  # relu(max(a, b)) = max(relu(a), relu(b))
    Op("relu6", pointwise(*_MONOTONE)),
    Op("gelu", pointwise()),
    Op("silu", pointwise()),
    Op("mish", pointwise()),
    Op("elu", pointwise()),
    Op("celu", pointwise()),
    Op("selu", pointwise(*_MONOTONE)),
    Op("leaky_relu", pointwise()),  # a negative slope is not monotone
    Op("prelu", activations.prelu, "input, weight"),
    Op("softplus", pointwise(), at_zero="finite"),
    Op("softsign", pointwise(), result="float"),  # inf / (1 + inf) is nan
    Op("softshrink", pointwise()),
    Op("hardshrink", pointwise()),
    Op("tanhshrink", pointwise(*_MONOTONE), result="float"),
    Op("hardtanh", pointwise(), at_zero="finite"),  # 0 may lie outside its bounds
    Op("hardsigmoid", pointwise(*_MONOTONE), at_zero="finite"),
    Op("hardswish", pointwise()),
    Op("threshold", pointwise(), at_zero="finite", result="input"),
    Op("glu", activations.glu, "input, dim=-1"),
    # copies
    Op("to", pointwise(), "input, dtype"),
    Op("clone", pointwise("P(sum) -> P(sum)", "P(max) -> P(max)", "P(min) -> P(min)"), in_place=False),
)

# Other names of the same ops, as torch spells them.
POINTWISE_NAMES: dict[str, str] = {
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "fix": "trunc",
    "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift",
    "special_gammainc": "igamma",
    "special_gammaincc": "igammac",
    "special_gammaln": "lgamma",
    "special_psi": "digamma",
}
