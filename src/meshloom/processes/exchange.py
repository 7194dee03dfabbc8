"""Short notes that every process shows to all others, and failures that all of them raise together."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from meshloom.comms import wire
from meshloom.comms.group import WORLD
from meshloom.errors import MeshloomError


def exchange(what: str, note: Any) -> list[Any]:
    """The note of every process, in the order of ranks; a note is what JSON can hold. All processes call it.

    >>> exchange("save", {"step": 3})
    [{'step': 3}]
    """
    if not WORLD.is_joined:
        return [note]
    assert WORLD.control is not None
    WORLD.watch.begin(what, WORLD.control.mesh)
    own = json.dumps(note).encode()
    sizes = wire.all_gather(torch.tensor([len(own)]), WORLD.control).flatten().tolist()
    room = torch.zeros(max(sizes), dtype=torch.uint8)
    room[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    told = wire.all_gather(room, WORLD.control)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(told, sizes, strict=True)]


def agree(what: str, act: Callable[[], Any], error: type[MeshloomError]) -> list[Any]:
    """What `act` gives on every process; if it fails on one, that one raises what it raised and the others `error`.

    >>> agree("save", lambda: "ready", MeshloomError)
    ['ready']
    """
    failure: Exception | None = None
    note: dict[str, Any] = {}
    try:
        note["result"] = act()
    except Exception as raised:
        failure, note["failed"] = raised, str(raised) or type(raised).__name__
    told = exchange(what, note)
    if failure is not None:
        raise failure
    for rank, each in enumerate(told):
        if "failed" in each:
            headline, *rest = each["failed"].splitlines()
            raise error(f"rank {rank} failed in {what}: {headline}", there="\n".join(rest) or None)
    return [each["result"] for each in told]
