"""Ops that need statistics of a dim which several processes hold: each works on its own part, small sums are shared.

A form is called with the op's arguments on what this process holds, padding filled as the op's line of the table says.
`AllReduce` is a sum that all processes then hold alike; `statistic` is one with which split work goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshloom.backends.forms.across import Across
from meshloom.backends.forms.attention import attention
from meshloom.backends.forms.lookup import LOOKUP
from meshloom.backends.forms.losses import LOSSES
from meshloom.backends.forms.norms import NORMS
from meshloom.backends.forms.order import ORDER
from meshloom.backends.forms.reductions import REDUCTIONS
from meshloom.backends.forms.scans import SCANS
from meshloom.backends.forms.shape import SHAPE

__all__ = ["FORMS", "Across"]

FORMS: dict[str, Callable[..., Any]] = {
    **NORMS,
    **REDUCTIONS,
    **SCANS,
    **SHAPE,
    **LOOKUP,
    **ORDER,
    **LOSSES,
    "scaled_dot_product_attention": attention,
}
