"""The op table: what each op accepts on one mesh axis and what comes out. Start with `table.OPS`."""

from meshloom.ops.algebra import CONDITIONS, holds
from meshloom.ops.dtypes import result_dtypes
from meshloom.ops.rule import Call, Choices, Even, Fill, Inner, Op, Ref, Row
from meshloom.ops.table import ALIASES, OPS, find

__all__ = [
    "ALIASES",
    "CONDITIONS",
    "OPS",
    "Call",
    "Choices",
    "Even",
    "Fill",
    "Inner",
    "Op",
    "Ref",
    "Row",
    "find",
    "holds",
    "result_dtypes",
]
