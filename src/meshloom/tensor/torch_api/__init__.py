"""Overloads by family: Python functions that sort out the forms of torch's function before the op table is asked."""

from __future__ import annotations

from meshloom.tensor.calling import OVERLOADS
from meshloom.tensor.torch_api.arranging import ARRANGING
from meshloom.tensor.torch_api.casting import CASTING
from meshloom.tensor.torch_api.counting import COUNTING
from meshloom.tensor.torch_api.creating import CREATING
from meshloom.tensor.torch_api.drawing import DRAWING
from meshloom.tensor.torch_api.gradients import GRADIENTS
from meshloom.tensor.torch_api.indexing import INDEXING
from meshloom.tensor.torch_api.matrices import MATRICES
from meshloom.tensor.torch_api.pointwise import POINTWISE
from meshloom.tensor.torch_api.reductions import REDUCTIONS
from meshloom.tensor.torch_api.whole import WHOLE
from meshloom.tensor.torch_api.windows import WINDOWS

OVERLOADS.update({**ARRANGING, **DRAWING, **MATRICES, **WINDOWS})
OVERLOADS.update({**CASTING, **CREATING, **GRADIENTS, **INDEXING, **POINTWISE, **REDUCTIONS, **WHOLE, **COUNTING})

__all__ = ["OVERLOADS"]
