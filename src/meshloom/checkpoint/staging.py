"""Copies for `torch.distributed.checkpoint.async_save`, whose own stager takes memory of tensors that torch made."""

from __future__ import annotations

import copy
from typing import Any


class CopyStager:
    """Copies a state before `async_save` writes it in a thread; a tensor on a mesh keeps its mesh and placements.

    `dcp.async_save(state, checkpoint_id=folder, async_stager=loom.checkpoint.CopyStager())`

    >>> import meshloom as loom
    >>> x = loom.ones(3, mesh=loom.open_mesh((2,)), placements="S(0)")
    >>> staged = CopyStager().stage({"x": x, "step": 7})
    >>> _ = x.zero_()
    >>> staged["x"].to_torch(), staged["step"]
    (tensor([1., 1., 1.]), 7)
    """

    should_synchronize_after_execute = False  # what is written is a copy: the program may go on at once

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state, in memory of its own."""
        return copy.deepcopy(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing is under way: `stage` returns when it has copied."""

    def close(self) -> None:
        """Nothing is kept."""
