"""Distributed forms of look-ups."""

from __future__ import annotations

import torch

from forms.net import Form, Net
from meshloom.ops import Call, Row


def embedding_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    found, start = [], 0
    for ids, weight in held:
        mine = (ids >= start) & (ids < start + len(weight))
        rows = weight[torch.where(mine, ids - start, 0)]
        found.append(torch.where(mine.unsqueeze(-1), rows, 0))
        start += len(weight)
    return found


LOOKUP: dict[str, Form] = {
    "embedding": embedding_form,
}
