"""Sums of shards over the links between cards, without the host: each part goes to the first card of its group, which
adds in a fixed order and sends the sum back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshloom.mesh import Coordinate
from meshloom.runtime.card_memory import CardStore, Shards
from meshloom.types import numel


def all_reduce(store: CardStore, shards: Shards, axes: Sequence[int]) -> None:
    """Let all cards along some axes hold the sum of what they hold."""
    groups: dict[Coordinate, list[Coordinate]] = {}
    for place in shards.layout.mesh.coordinates():
        groups.setdefault(tuple(c for axis, c in enumerate(place) if axis not in axes), []).append(place)
    for first, *others in groups.values():
        for other in others:
            _send(store, shards, other, first, "sum")
        for other in others:
            _send(store, shards, first, other, None)


def _send(store: CardStore, shards: Shards, source: Coordinate, target: Coordinate, op: str | None) -> None:
    """Send what one card holds to another, message by message."""
    mesh = shards.layout.mesh
    sender: Any = store.card(source, mesh)
    receiver: Any = store.card(target, mesh)
    _, size = receiver.slots(sender.info().index)
    step, total = size // shards.dtype.itemsize, numel(shards.layout.part_shape)
    timeout = store.system.launches.timeout

    def send(place: Coordinate, card: Any) -> None:
        for start in range(0, total, step):
            stop = min(start + step, total)
            there, here = sender.info().index, receiver.info().index
            sender.wait(sender.send(shards.handles[source], ..., start, stop, here, 0), timeout)
            receiver.wait(receiver.receive(shards.handles[target], ..., start, stop, there, 0, op), timeout)

    store.each("link", shards.layout, [target], send)
