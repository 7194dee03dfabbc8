"""Scopes around a piece of program: what may be communicated, what was, and what is asked of the ops inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from meshloom.context import CommunicationWarning, FallbackWarning
from meshloom.errors import ArgumentError, expect
from meshloom.fabric import Fabric, Machine
from meshloom.placement import Placements
from meshloom.runtime import Log, Policy, state

_ROWS = {"row": "m", "column": "n", "inner": "k"}


@contextmanager
def communication(level: str, above: int = 0) -> Iterator[None]:
    """Allow, warn about (above some bytes per op) or forbid communication inside, backward included.

    >>> import meshloom as loom
    >>> x = loom.ones(4, mesh=loom.open_mesh((2,)))
    >>> with communication("forbid"):
    ...     y = x * 2
    """
    if isinstance(above, bool) or not isinstance(above, (int, float)) or not above >= 0:
        raise ArgumentError(
            f"above={above!r} is no number of bytes", fix="give the bytes per op that are still allowed"
        )
    with state.changed(policy=Policy(level, above)):
        yield


@contextmanager
def record(step: bool = False) -> Iterator[Log]:
    """What did run inside: each collective with axis, bytes, op and source line.

    With `step=True` the record keeps the whole step, backward and optimizer too: `log.graph()` has its nodes and
    storages (`meshloom.cost.step`), on `meta` and on data alike.

    >>> import meshloom as loom
    >>> x = loom.ones(4, mesh=loom.open_mesh((2,), axes=("dp",)))
    >>> with record() as log:
    ...     total = x.sum()
    >>> [(event.kind, event.axis, event.bytes) for event in log]
    [('all_reduce', 'dp', 4)]
    """
    if step:
        from meshloom.tensor.recording import recording

        with recording() as recorder:
            yield recorder
        return
    log = Log()
    with state.changed(logs=(*state.logs, log)):
        yield log


@contextmanager
def with_output(placements: Placements) -> Iterator[None]:
    """Ask every op inside for a result with these placements; axes that a dict does not name stay automatic.

    >>> import meshloom as loom
    >>> x = loom.ones(4, mesh=loom.open_mesh((2,), axes=("dp",)))
    >>> with with_output({"dp": loom.Replicate()}):
    ...     print((x * 2).topology.notation)
    f32[4](R)
    """
    with state.changed(output=placements):
        yield


@contextmanager
def choose(**rows: str) -> Iterator[None]:
    """Take a certain row of the rule on a mesh axis: `choose(tp="inner")` for a matmul split on k.

    Rows go by the label that `explain` prints; `row`, `column` and `inner` stand for m, n and k.

    >>> import meshloom as loom
    >>> x = loom.ones(4, 4, mesh=loom.open_mesh((2,), axes=("tp",)), placements="R")
    >>> with choose(tp="row"):
    ...     print((x @ x).topology.notation)
    f32[4, 4](S(0))
    """
    if not rows:
        raise ArgumentError("choose needs an axis and a row", fix='write choose(tp="inner")')
    for axis, row in rows.items():
        expect(axis, row, str, fix='name a row: choose(tp="inner")')
    with state.changed(chosen={axis: _ROWS.get(row, row) for axis, row in rows.items()}):
        yield


@contextmanager
def use_machine(machine: Machine) -> Iterator[Machine]:
    """Plan with another machine's figures.

    >>> import meshloom as loom
    >>> x = loom.ones(4, mesh=loom.open_mesh((2,)))
    >>> with use_machine(Machine("slow", latency=1.0, bandwidth=1e9, flops=1e12, memory_bandwidth=1e11)):
    ...     print(round(loom.explain(lambda: x.sum()).cost), "seconds")
    2 seconds
    """
    if not isinstance(machine, Machine):
        raise ArgumentError(f"use_machine takes a Machine, not {machine!r}")
    with state.changed(machine=machine):
        yield machine


@contextmanager
def use_fabric(fabric: Fabric) -> Iterator[Fabric]:
    """Send over these links in `mode="fabric"`; without it every mesh axis is a ring.

    >>> from meshloom.fabric import Fabric
    >>> line = Fabric.grid((4,), "line", latency=1e-6, bandwidth=1e9)
    >>> import meshloom as loom
    >>> x = loom.arange(4, mesh=loom.open_mesh((4,), axes=("d",)))
    >>> with use_fabric(line):
    ...     loom.collectives.all_reduce(x, mode="fabric").to_torch()
    tensor([6])
    """
    if not isinstance(fabric, Fabric):
        raise ArgumentError(f"use_fabric takes a Fabric, not {fabric!r}")
    with state.changed(fabric=fabric):
        yield fabric


__all__ = [
    "CommunicationWarning",
    "FallbackWarning",
    "choose",
    "communication",
    "record",
    "use_fabric",
    "use_machine",
    "with_output",
]
