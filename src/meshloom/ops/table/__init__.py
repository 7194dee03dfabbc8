"""The one table: a line per op, by family. `OPS` holds them all, `ALIASES` the other names.

To add an op: one line in its family here, one line in `engines.torch_engine`, sample arguments in `tests/samples`.
"""

from __future__ import annotations

from meshloom.ops.labels import table, unknown_op
from meshloom.ops.rule import Op
from meshloom.ops.table.contractions import CONTRACTIONS
from meshloom.ops.table.lookup import LOOKUP
from meshloom.ops.table.matrices import MATRICES
from meshloom.ops.table.order import ORDER
from meshloom.ops.table.pointwise import POINTWISE, POINTWISE_NAMES
from meshloom.ops.table.reductions import REDUCTIONS
from meshloom.ops.table.shape import SHAPE
from meshloom.ops.table.whole import WHOLE
from meshloom.ops.table.windows import WINDOWS

FAMILIES: dict[str, tuple[Op, ...]] = {
    "each element": POINTWISE,
    "products": CONTRACTIONS,
    "reductions and scans": REDUCTIONS,
    "softmax, norms, losses, attention": WHOLE,
    "look-up": LOOKUP,
    "shape": SHAPE,
    "order": ORDER,
    "windows": WINDOWS,
    "batches of matrices": MATRICES,
}

OPS: dict[str, Op] = table(*(op for family in FAMILIES.values() for op in family))

# Other names of the same ops, as torch and Python spell them.
ALIASES: dict[str, str] = {
    **POINTWISE_NAMES,
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
    "ger": "outer",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "special_expit": "sigmoid",
    "moveaxis": "movedim",
    "broadcast_to": "expand",
    "inverse": "linalg_inv",
    "det": "linalg_det",
    "slogdet": "linalg_slogdet",
    "matrix_power": "linalg_matrix_power",
    "matrix_exp": "linalg_matrix_exp",
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
