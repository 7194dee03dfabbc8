"""The torch engine: op name to function, by family. A function sees stored arrays, whose dims are the tensor's dims.

A function marked `aware` also gets the `Local` of the call, for what the arrays alone do not tell: global sizes, and
where padding is. Functions are called with the op's arguments by name, or as they came for pointwise ops.
"""

from __future__ import annotations

from meshloom.engines.torch_engine.contractions import CONTRACTIONS
from meshloom.engines.torch_engine.local import Function, Local, aware
from meshloom.engines.torch_engine.lookup import LOOKUP
from meshloom.engines.torch_engine.matrices import MATRICES
from meshloom.engines.torch_engine.order import ORDER
from meshloom.engines.torch_engine.plain import PLAIN
from meshloom.engines.torch_engine.pointwise import POINTWISE
from meshloom.engines.torch_engine.reductions import REDUCTIONS
from meshloom.engines.torch_engine.shape import SHAPE
from meshloom.engines.torch_engine.whole import WHOLE
from meshloom.engines.torch_engine.windows import WINDOWS

FUNCTIONS: dict[str, Function] = {
    **POINTWISE,
    **CONTRACTIONS,
    **REDUCTIONS,
    **WHOLE,
    **LOOKUP,
    **SHAPE,
    **ORDER,
    **WINDOWS,
    **MATRICES,
}

__all__ = ["FUNCTIONS", "PLAIN", "Function", "Local", "aware"]
