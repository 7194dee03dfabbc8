"""Calls that a client sends to its workers instead of making them here.

Room order forbids that this room knows the controller. So it leaves a function here while a cluster is open, and the
functions that make tensors of nothing ask it first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

Take = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Clients:
    """Whoever takes calls on the meshes of a cluster: a function that returns `HERE` for calls on other meshes."""

    take: Take | None = None


HERE = object()


def sent(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function that goes to the workers if its mesh or one of its tensors is theirs; they know it by that name."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if Clients.take is not None:
                found = Clients.take(name, function, args, kwargs)
                if found is not HERE:
                    result: T = found
                    return result
            return function(*args, **kwargs)

        return call

    return decorate
