"""A function with a backward of its own, as a node of torch's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch


class Node(torch.autograd.Function):
    """torch's own; it does not say that `apply` gives what `forward` gives: a tensor, in all of ours."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: object, **kwargs: object) -> torch.Tensor: ...
