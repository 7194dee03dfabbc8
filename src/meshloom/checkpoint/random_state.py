"""The random numbers of a program as an object that can be saved: torch's, and on request Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from meshloom.errors import CheckpointError


class RandomState:
    """The state of torch's default generator, from which tensors on a mesh draw too; `python` and `numpy` add theirs.

    Put it into the state that is saved. It has the generators' state of the moment in which it is asked.

    >>> import meshloom as loom
    >>> state = RandomState()
    >>> kept = state.state_dict()
    >>> first = torch.rand(3)
    >>> state.load_state_dict(kept)
    >>> bool((torch.rand(3) == first).all())
    True
    """

    def __init__(self, *, python: bool = False, numpy: bool = False) -> None:
        self.python, self.numpy = python, numpy

    def state_dict(self) -> dict[str, Any]:
        """The state of the generators now."""
        found: dict[str, Any] = {"torch": torch.get_rng_state()}
        if self.python:
            found["python"] = random.getstate()
        if self.numpy:
            kind, words, *rest = numpy.random.get_state(legacy=True)
            found["numpy"] = [kind, torch.from_numpy(numpy.asarray(words).astype(numpy.int64)), *rest]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generators to a state."""
        wanted = {"torch", *(["python"] if self.python else []), *(["numpy"] if self.numpy else [])}
        if set(state) != wanted:
            raise CheckpointError(
                f"the random state has {', '.join(sorted(state))}, and {', '.join(sorted(wanted))} is asked for",
                fix="make it with the same arguments: loom.RandomState(python=..., numpy=...)",
            )
        torch.set_rng_state(state["torch"])
        if self.python:
            random.setstate(state["python"])
        if self.numpy:
            kind, words, *rest = state["numpy"]
            numpy.random.set_state((kind, words.numpy().astype(numpy.uint32), *rest))
