"""What ranks do in tests of the loader."""

from __future__ import annotations

from typing import Any

import torch

import meshloom as loom
from meshloom.nn.data import Loader
from meshloom.processes import join
from test_data import Rows


def load(count: int) -> tuple[list[list[int]], bool, set[int], dict[str, Any]]:
    """Three batches: their labels, whether the rows are those of the labels, which samples were read, and the state."""
    join()
    rows = Rows(26)
    loader = Loader(rows, 6, loom.open_mesh((count, 2), axes=("dp", "tp")), {"dp": loom.Shard(0)}, seed=4)
    labels, is_equal = [], True
    for _, batch in zip(range(3), loader, strict=False):
        labels.append(batch["label"].to_torch().tolist())
        is_equal &= torch.equal(batch["row"].to_torch(), rows.values[labels[-1]])
    return labels, is_equal, rows.read, loader.state_dict()
