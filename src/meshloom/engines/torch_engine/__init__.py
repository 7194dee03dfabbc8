"""The torch engine: op name to function, by family. A function sees stored arrays, whose dims are the tensor's dims.

A function marked `aware` also gets the `Local` of the call, for what the arrays alone do not tell: global sizes, where
padding is. One marked `shared` also works on a dim that several processes hold: its formula asks `local.peers` for
sums, maxima and what the others have, and is the same where there are none. Functions are called with the op's
arguments by name, or as they came for pointwise ops.
"""

from __future__ import annotations

from meshloom.engines.torch_engine.attention import attention
from meshloom.engines.torch_engine.contractions import CONTRACTIONS
from meshloom.engines.torch_engine.local import Function, Local, aware
from meshloom.engines.torch_engine.lookup import LOOKUP
from meshloom.engines.torch_engine.losses import LOSSES
from meshloom.engines.torch_engine.matrices import MATRICES
from meshloom.engines.torch_engine.norms import NORMS
from meshloom.engines.torch_engine.order import ORDER
from meshloom.engines.torch_engine.plain import PLAIN
from meshloom.engines.torch_engine.pointwise import POINTWISE
from meshloom.engines.torch_engine.reductions import REDUCTIONS
from meshloom.engines.torch_engine.scans import SCANS
from meshloom.engines.torch_engine.shape import SHAPE
from meshloom.engines.torch_engine.windows import WINDOWS

FUNCTIONS: dict[str, Function] = {
    **POINTWISE,
    **CONTRACTIONS,
    **REDUCTIONS,
    **SCANS,
    **NORMS,
    **LOSSES,
    "scaled_dot_product_attention": attention,
    **LOOKUP,
    **SHAPE,
    **ORDER,
    **WINDOWS,
    **MATRICES,
}

__all__ = ["FUNCTIONS", "PLAIN", "Function", "Local", "aware"]
