"""Checkpoints of a client: it takes its state apart, and the workers write and read the tensors that they hold."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from meshloom.checkpoint.folders import as_folder
from meshloom.checkpoint.index import Index
from meshloom.checkpoint.loading import Plan, carry_out, make_plan
from meshloom.checkpoint.progress import check_progress
from meshloom.checkpoint.saving import Saving
from meshloom.checkpoint.state import gather
from meshloom.controller.calls import send_plain
from meshloom.controller.session import Session
from meshloom.controller.tensors import RemoteTensor, lease_of
from meshloom.tensor.clients import HERE


def save(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`loom.save`, by the workers; it returns when the folder is in place."""
    state, folder = _first_two(args, kwargs, ("state", "folder"))
    gathered = gather(state)
    remote = [each for each in gathered.tensors.values() if isinstance(each, RemoteTensor)]
    if not remote:
        return HERE
    session = lease_of(remote[0].topology).session
    numbers = {
        name: each._id if isinstance(each, RemoteTensor) else send_plain(session, each)[0]
        for name, each in gathered.tensors.items()
    }
    place = os.path.abspath(folder)
    session.ask(lambda request: ["v", request, place, kwargs.get("keep"), gathered.tree, numbers])
    saving = Saving(Path(place))
    saving._run(lambda: None)
    return saving


def load(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`loom.load`: plain values into the client's objects, tensors by the workers."""
    folder, into = args[0] if args else kwargs["folder"], kwargs["into"]
    progress = kwargs.get("progress")
    check_progress(progress)
    place = os.path.abspath(as_folder(folder))

    def plan(index: Index) -> Plan:
        made = make_plan(index, into)
        remote = [each for each in made.reads if isinstance(each.target, RemoteTensor)]
        if remote:
            names = {id(saved): name for name, saved in index.tensors.items()}
            targets: dict[str, Any] = {}
            for each in remote:
                targets.setdefault(names[id(each.saved)], each.target)
            session = lease_of(remote[0].target.topology).session  # type: ignore[attr-defined]
            made.reads[:] = [each for each in made.reads if not isinstance(each.target, RemoteTensor)]
            made.acts.insert(0, partial(_read_there, session, place, targets))
        return made

    carry_out(place, plan, progress)
    return into


def _read_there(session: Session, place: str, targets: dict[str, RemoteTensor]) -> None:
    numbers = {name: target._id for name, target in targets.items()}
    session.ask(lambda request: ["i", request, place, numbers])


def _first_two(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, str]) -> tuple[Any, Any]:
    given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
    return given[names[0]], given[names[1]]
