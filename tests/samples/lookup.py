"""Samples of look-ups."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from samples.drawing import Case, Draw, Operand, Sample


def embedding(d: Draw) -> Case:
    rows, width = d.size(empty=False), d.size()
    padding = d.pick((None, 0, -1))
    operands = (Operand(d.shape(0, 2), torch.int64, f"below:{rows}"), Operand((rows, width), torch.float32))
    return Case(operands, lambda i, w: F.embedding(i, w, padding))


LOOKUP: dict[str, Sample] = {
    "embedding": embedding,
}
