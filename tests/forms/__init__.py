"""Distributed forms in plain code: what each device does for a row that is more than the op on what it holds.

A form gets what every device holds and a net whose collectives are written down. To add one: a line in its family.
"""

from __future__ import annotations

from forms.lookup import LOOKUP
from forms.net import Form, Net, compute
from forms.reductions import REDUCTIONS
from forms.whole import WHOLE
from meshloom import Shard
from meshloom.ops import Call, Row

FORMS: dict[str, Form] = {**REDUCTIONS, **WHOLE, **LOOKUP}


def has_form(call: Call, row: Row) -> bool:
    """Smoothed and soft targets over sharded classes need sums of their own; the planner wants them even."""
    if call.op != "cross_entropy" or row.ins[0] != Shard(1):
        return True
    return not call.arguments["label_smoothing"] and call.operands[1].dtype == "i64"


__all__ = ["FORMS", "Form", "Net", "compute", "has_form"]
