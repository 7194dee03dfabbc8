"""Carrying out a schedule on arrays: every step moves chunks between neighbours, all sends of a step at once.

Memory is one array of slots, (members, chunks, elements). A step reads all its messages first, then writes them, so
that sends of one step do not see each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from meshloom.collectives.schedule import Schedule, waves
from meshloom.engines.reductions import REDUCTIONS

Indices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Wave = tuple[torch.Tensor, Indices, bool]


@lru_cache(maxsize=256)
def _compiled(schedule: Schedule) -> tuple[tuple[Indices, tuple[Wave, ...]], ...]:
    """Each step as index arrays: what is read (member, chunk), and in waves what is written where."""
    number = {place: i for i, place in enumerate(schedule.group)}
    steps = []
    for step in schedule.steps:
        sends: list[tuple[int, int, int]] = []
        written = []
        for wave in waves(step):
            for reduce in (True, False):
                chosen = [send for send in wave if send.reduce == reduce]
                rows = [(number[s.source], number[s.destination], chunk) for s in chosen for chunk in s.chunks]
                if rows:
                    written.append((range(len(sends), len(sends) + len(rows)), _columns(rows), reduce))
                    sends += rows
        steps.append((_columns(sends), tuple((torch.tensor(r), columns, reduce) for r, columns, reduce in written)))
    return tuple(steps)


def _columns(rows: list[tuple[int, int, int]]) -> Indices:
    table = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def send_all(schedule: Schedule, slots: torch.Tensor, op: str = "sum") -> torch.Tensor:
    """Carry out every step on the slots, in place."""
    combine = REDUCTIONS[op].combine
    for (source, _, chunk), written in _compiled(schedule):
        messages = slots[source, chunk]
        for rows, (_, destination, place), reduce in written:
            arrived = messages[rows]
            slots[destination, place] = combine(slots[destination, place], arrived) if reduce else arrived
    return slots


def _cut(vectors: torch.Tensor, pieces: int) -> torch.Tensor:
    """(..., n) to (..., pieces, ceil(n / pieces)), the end filled with zeros."""
    width = -(-vectors.shape[-1] // pieces)
    missing = pieces * width - vectors.shape[-1]
    return torch.nn.functional.pad(vectors, (0, missing)).unflatten(-1, (pieces, width))


def owned(schedule: Schedule) -> list[list[int]]:
    """The chunks of each member, in order."""
    found: list[list[int]] = [[] for _ in schedule.group]
    for chunk, owner in enumerate(schedule.owners):
        found[owner].append(chunk)
    return found


def reduce_all(schedule: Schedule, vectors: torch.Tensor, op: str) -> torch.Tensor:
    """All-reduce, reduce and broadcast: (members, n) in, what every member holds afterwards, (members, n), out."""
    slots = _cut(vectors, schedule.chunks).clone()
    return send_all(schedule, slots, op).flatten(1)[:, : vectors.shape[1]]


def gather_all(schedule: Schedule, vectors: torch.Tensor) -> torch.Tensor:
    """All-gather and gather: (members, n) in; (members, members, n), who holds whose, out."""
    chunks_of = owned(schedule)
    pieces = len(chunks_of[0])
    cut = _cut(vectors, pieces)
    slots = vectors.new_zeros(len(chunks_of), schedule.chunks, cut.shape[-1])
    for member, chunks in enumerate(chunks_of):
        slots[member, chunks] = cut[member]
    done = send_all(schedule, slots)
    order = torch.tensor([chunk for chunks in chunks_of for chunk in chunks])
    return done[:, order].unflatten(1, (len(chunks_of), pieces)).flatten(2)[..., : vectors.shape[1]]


def scatter_all(schedule: Schedule, vectors: torch.Tensor, op: str) -> torch.Tensor:
    """Reduce-scatter and scatter: (members, members, n), what each has for each, in; (members, n) out."""
    chunks_of = owned(schedule)
    pieces = len(chunks_of[0])
    cut = _cut(vectors, pieces)
    slots = vectors.new_zeros(len(chunks_of), schedule.chunks, cut.shape[-1])
    for member, chunks in enumerate(chunks_of):
        slots[:, chunks] = cut[:, member]
    done = send_all(schedule, slots, op)
    kept = torch.stack([done[member, chunks] for member, chunks in enumerate(chunks_of)])
    return kept.flatten(1)[:, : vectors.shape[2]]


def exchange_all(schedule: Schedule, vectors: torch.Tensor) -> torch.Tensor:
    """All-to-all: (members, members, n), what each has for each, in; (members, members, n), from whom, out."""
    members = len(schedule.group)
    slots = vectors.new_zeros(members, members * members, vectors.shape[2])
    for member in range(members):
        slots[member, member * members : (member + 1) * members] = vectors[member]
    done = send_all(schedule, slots)
    return torch.stack([done[member, member::members] for member in range(members)])


def route_all(schedule: Schedule, vectors: torch.Tensor, order: Sequence[int | None]) -> torch.Tensor:
    """Messages along routes, chunk i to member i from the one that `order` names: (members, n) in and out."""
    members = len(order)
    slots = vectors.new_zeros(members, members, vectors.shape[1])
    for to, o in enumerate(order):
        if o is not None:
            slots[o, to] = vectors[o]
    done = send_all(schedule, slots)
    return torch.stack([done[to, to] for to in range(members)])
