"""Sums of shards over the links between cards: the schedules of the collectives, and not a byte by the host."""

from __future__ import annotations

from collections.abc import Sequence

from meshloom.collectives.algorithms import choose
from meshloom.collectives.schedule import Schedule, chunk_sizes
from meshloom.errors import FabricError
from meshloom.mesh import Mesh
from meshloom.runtime.buffer_collectives import cut_pieces, groups_of
from meshloom.runtime.card_memory import LIMIT, CardStore, Shards
from meshloom.runtime.card_schedules import run_schedule
from meshloom.runtime.links import discover_links
from meshloom.types import numel


def plan_sum(store: CardStore, mesh: Mesh, axes: Sequence[int], size: int) -> list[Schedule] | None:
    """The schedules that sum so many bytes along some axes; None where no links lead from card to card."""
    key = mesh, tuple(axes), size
    if store.has_broken_links:
        return None
    if key not in store.schedules:
        if len(store.schedules) >= LIMIT:
            store.schedules.clear()
        store.schedules[key] = _plan(store, mesh, axes, size)
    return store.schedules[key]


def _plan(store: CardStore, mesh: Mesh, axes: Sequence[int], size: int) -> list[Schedule] | None:
    try:
        fabric = discover_links({place: store.card(place, mesh) for place in mesh.coordinates()}, mesh.shape)
        return [choose("all_reduce", group, fabric, size)(group, fabric) for group in groups_of(mesh, tuple(axes))]
    except FabricError:
        return None


def run_sum(store: CardStore, shards: Shards, schedules: Sequence[Schedule]) -> None:
    """Let all cards of every group hold the sum of what they hold."""
    mesh, system = shards.layout.mesh, store.system
    cards = {place: store.card(place, mesh) for place in mesh.coordinates()}
    size, itemsize = numel(shards.layout.part_shape), shards.dtype.itemsize

    def run() -> None:
        for schedule in schedules:
            pieces, before = cut_pieces(..., chunk_sizes(size, schedule.chunks)), system.routes.bytes
            run_schedule(
                schedule, cards, shards.handles, pieces, itemsize, system.routes, timeout=system.launches.timeout
            )
            sent = system.routes.bytes - before
            system.tell("send", schedule.group, sent, store.queue, schedule.sends)

    try:
        store.speak("all_reduce", mesh, len(cards), run)
    except BaseException:
        store.has_broken_links = True  # nobody knows what is still in their slots
        raise
