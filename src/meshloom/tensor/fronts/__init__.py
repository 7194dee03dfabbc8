"""The fronts by family: Python functions that sort out torch's overloads before the op table is asked."""

from __future__ import annotations

from meshloom.tensor.calling import FRONTS
from meshloom.tensor.fronts.arranging import ARRANGING
from meshloom.tensor.fronts.casting import CASTING
from meshloom.tensor.fronts.counting import COUNTING
from meshloom.tensor.fronts.creating import CREATING
from meshloom.tensor.fronts.gradients import GRADIENTS
from meshloom.tensor.fronts.indexing import INDEXING
from meshloom.tensor.fronts.matrices import MATRICES
from meshloom.tensor.fronts.order import ORDER
from meshloom.tensor.fronts.pointwise import POINTWISE
from meshloom.tensor.fronts.reductions import REDUCTIONS
from meshloom.tensor.fronts.whole import WHOLE
from meshloom.tensor.fronts.windows import WINDOWS

FRONTS.update({**ARRANGING, **MATRICES, **ORDER, **WINDOWS})
FRONTS.update({**CASTING, **CREATING, **GRADIENTS, **INDEXING, **POINTWISE, **REDUCTIONS, **WHOLE, **COUNTING})

__all__ = ["FRONTS"]
