"""Sample calls for every op of the table, the awkward ones included, by the table's families.

A sample draws operands (shape, dtype, range of values) and gives a function that works on dense torch tensors and on
ours alike. To add an op: one line in its family.
"""

from __future__ import annotations

from samples.contractions import CONTRACTIONS
from samples.drawing import Case, Draw, Operand, Sample, Seeded
from samples.lookup import LOOKUP
from samples.matrices import MATRICES
from samples.order import ORDER
from samples.pointwise import POINTWISE
from samples.reductions import REDUCTIONS
from samples.shape import SHAPE
from samples.whole import WHOLE
from samples.windows import WINDOWS

SAMPLES: dict[str, Sample] = {
    **POINTWISE, **CONTRACTIONS, **REDUCTIONS, **WHOLE, **LOOKUP, **SHAPE, **ORDER, **WINDOWS, **MATRICES,
}  # fmt: skip

__all__ = ["SAMPLES", "Case", "Draw", "Operand", "Sample", "Seeded"]
