"""`loom.matmul`, `loom.softmax`, ...: the ops of the table as functions with `output=`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshloom.runtime import state
from meshloom.tensor import methods as _attached  # noqa: F401  (attaches the ops to Tensor)
from meshloom.tensor.calling import invoke
from meshloom.tensor.quick import call_quickly
from meshloom.tensor.signatures import describe


def find_named(name: str) -> Callable[..., Any]:
    """The op of that name as a function; `output=` asks for the placements of its result."""

    head = "loom", name

    def function(*args: object, output: object = None, **kwargs: object) -> Any:
        if output is None:
            return call_quickly(head, name, args, kwargs)
        with state.changed(output=output):
            return invoke(name, args, kwargs)

    function.__name__ = function.__qualname__ = name
    return describe(function)
