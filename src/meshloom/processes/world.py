"""The processes that run this program together meet here, and make torch's groups of them.

`join` is called by `open_mesh` and does nothing outside of torchrun's environment. Inside it, the processes meet once
through `torch.distributed`: Gloo on CPU, NCCL beside it where this process has a GPU.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshloom import settings
from meshloom.comms.group import WORLD, Group, World
from meshloom.comms.wire import settle_messages
from meshloom.context import state
from meshloom.engines import private
from meshloom.errors import ArgumentError, PeerLostError, closest, where
from meshloom.mesh import HERE, Mesh
from meshloom.processes.bindings import process, read_place
from meshloom.processes.divergence import begin, begin_message, compare_at_end
from meshloom.processes.health import Watch
from meshloom.processes.store import MARGIN, Board, bounded, meet

CHECKS = ("always", "sample", "off")
LONGEST = 1e6  # seconds, 11 days


def join(timeout: float | None = None, check: str | None = None) -> World:
    """Meet the other processes of this run, once; alone, nothing happens."""
    if timeout is not None or not WORLD.is_joined:
        WORLD.timeout = _seconds(timeout if timeout is not None else settings.read("MESHLOOM_TIMEOUT"))
    if check is not None or not WORLD.is_joined:
        WORLD.check = _check(check if check is not None else _asked_for())
    if not WORLD.is_joined and (dist.is_initialized() or process().count > 1):
        _meet()
    if WORLD.is_joined:
        state._set({"checked": WORLD.check == "always"})
    return WORLD


def _seconds(value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds <= LONGEST:
        raise ArgumentError(
            f"timeout {value!r} is not a number of seconds", fix=f"give one above 0 and up to {LONGEST:g}, such as 60"
        )
    return seconds


def _asked_for() -> str:
    """How processes are compared, of the words in MESHLOOM_CHECK: "races" among them is for the queues of devices."""
    words = [word for word in settings.read("MESHLOOM_CHECK").split(",") if word not in ("", "races")]
    return words[0] if words else "sample"


def _check(value: str) -> str:
    if value not in CHECKS:
        raise ArgumentError(f"check {value!r} is not known", fix=closest(value, CHECKS))
    return value


def _meet() -> None:
    WORLD.device = _device()
    is_theirs = dist.is_initialized()
    board = Board.beside(private.default_store()) if is_theirs else _initialize(where())
    leave = partial(_leave, is_theirs)
    atexit.register(leave)
    os.register_at_fork(after_in_child=lambda: atexit.unregister(leave))
    HERE.rank, HERE.count = dist.get_rank(), dist.get_world_size()
    if HERE.count == 1:
        return
    ranks = tuple(range(HERE.count))
    WORLD.handles[ranks] = dist.group.WORLD
    WORLD.watch = Watch(WORLD, board)
    WORLD.connect, WORLD.begin, WORLD.message = _handle, begin, begin_message
    WORLD.watch.start()
    private.set_group_timeout(_patience(10), dist.group.WORLD)  # ours is the one that reports
    if HERE.rank == 0:
        board.write("random", [torch.initial_seed(), bytes(torch.get_rng_state().tolist()).hex()], WORLD.timeout)
    board.write(f"binding {HERE.rank}", read_place(), WORLD.timeout)
    control = Group(Mesh.of((HERE.count,), processes=(HERE.count,)), (0,))
    control.use(_new_handle(ranks, backend="gloo"))
    WORLD.control = control
    names = ["random", *(f"binding {rank}" for rank in ranks)]  # written before the processes made their first group
    random, *WORLD.bindings = board.read_all(names, WORLD.timeout)
    _share_random(*random)


def _share_random(seed: int, state: str) -> None:
    """Random numbers are the same on every process: where seeds differ, as of processes that nobody seeded, the first
    one's state holds."""
    if seed != torch.initial_seed():
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(state)), dtype=torch.uint8))


def _initialize(line: str) -> Board:
    here = process()
    rank, count = here.rank, here.count
    store, board = meet(rank, count, WORLD.timeout, line)
    try:
        bounded(
            WORLD.timeout + MARGIN,
            lambda: dist.init_process_group(
                _backend(WORLD.device), store=store, rank=rank, world_size=count, timeout=_patience(1)
            ),
        )
    except RuntimeError as error:
        raise PeerLostError(
            f"rank {rank} lost others in open_mesh at {line}: all {count} came, and then some did not connect",
            reason=str(error).splitlines()[0],
            fix="look at the rank that failed; between hosts, set GLOO_SOCKET_IFNAME to the interface that joins them",
        ) from None
    return board


def _patience(times: int) -> timedelta:
    return timedelta(seconds=times * WORLD.timeout)


def _backend(device: torch.device) -> str:
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _device() -> torch.device:
    """Where this process holds its blocks: its own GPU if it has one, else the CPU."""
    local = int(settings.read("LOCAL_RANK"))
    wanted = settings.read("MESHLOOM_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if wanted == "cpu" or local >= torch.cuda.device_count():
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _leave(is_theirs: bool) -> None:
    """End our threads and torch's before the interpreter does; a group that the program made is its own to end."""
    if WORLD.watch is not None:
        _settle()
        compare_at_end()
        WORLD.watch.stop()
    for group in WORLD.connected:
        object.__setattr__(group, "handle", None)
    WORLD.handles.clear()
    WORLD.stories.clear()
    WORLD.device_meshes.clear()
    if not is_theirs and dist.is_initialized() and not (WORLD.watch is not None and WORLD.watch.failure):
        dist.destroy_process_group()


def _settle() -> None:
    """Messages to others arrive before this process goes; an exit code says if they cannot."""
    if WORLD.watch.failure is None:
        try:
            settle_messages()
        except PeerLostError as error:
            print(f"PeerLostError: {error}", file=sys.stderr, flush=True)
            os._exit(1)


def _handle(ranks: tuple[int, ...], alone: bool = False, use: str = "") -> Any:
    """torch's group of these ranks, made once for each use; `alone` says that only they make it."""
    key = (ranks, use) if alone else ranks
    if key not in WORLD.handles:
        make = partial(_connect_alone, ranks, use)
        WORLD.handles[key] = _await_all(make) if alone else _new_handle(ranks)
    return WORLD.handles[key]


def _connect_alone(ranks: tuple[int, ...], use: str) -> Any:
    """A group that its members make and nobody else hears of: torch's own are named by how many a process has made."""
    store = dist.PrefixStore(f"meshloom {use} {ranks}", private.default_store())
    handle: Any = dist.ProcessGroupGloo(store, ranks.index(HERE.rank), len(ranks), _patience(10))
    handle.allreduce([torch.zeros(1)]).wait(_patience(1))
    return handle


def _connect(ranks: tuple[int, ...], backend: str | None) -> Any:
    handle = dist.new_group(list(ranks), timeout=_patience(1), backend=backend)
    if HERE.rank in ranks:
        handle.allreduce([torch.zeros(1)]).wait(_patience(1))
    return handle


def _new_handle(ranks: tuple[int, ...], backend: str | None = None) -> Any:
    """A new group, which all processes make together."""
    handle = _await_all(partial(_connect, ranks, backend))
    _be_patient(ranks, handle)
    return handle


def _await_all(make: Callable[[], Any]) -> Any:
    """Make a group; nobody goes on, or away, before all members are connected."""
    WORLD.watch.enter("new_group")
    try:
        handle = bounded(WORLD.timeout + MARGIN, make)
    except RuntimeError as error:
        raise WORLD.watch.explained(error) from None
    WORLD.watch.leave()
    return handle


def _be_patient(ranks: tuple[int, ...], handle: Any) -> None:
    """Our own timeouts are the ones that report."""
    if HERE.rank in ranks:
        private.set_group_timeout(_patience(10), handle)
