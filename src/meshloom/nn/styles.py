"""Plans that others have written: transformers' tensor-parallel plans, and the styles of torch.distributed.tensor."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshloom.nn.plan import Plan


def from_huggingface(model: nn.Module, axis: str = "tp") -> Plan:
    raise NotImplementedError


def from_torch(styles: Any, axis: str = "tp") -> Plan:
    raise NotImplementedError
