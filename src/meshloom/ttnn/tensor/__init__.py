"""What every device holds: the tensor, its formats and label, the ways to it from torch and back, files.

`ttnn.tensor.name` answers from `tensor.py`, as the original's module of that name does.
"""

from __future__ import annotations

from meshloom.ttnn.surface import stand_in

__getattr__ = stand_in(__name__, __path__, "tensor")
