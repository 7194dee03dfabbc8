"""What the process of a card runs: messages come in, kernels run on the shared memory, and each says how it ended.

It does one thing at a time, in the order of the messages. It ends when its owner closes the line, when the server is
gone, or by whatever a kernel does to it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from meshloom.processes.orphans import end_with
from meshloom.runtime.card import Kernel
from meshloom.runtime.drivers.process import arena, moves
from meshloom.runtime.drivers.process.frames import Frames
from meshloom.runtime.drivers.process.pickling import load_kernel

PRELOADED = (moves,)  # once, in the server
LONGEST = 20_000  # characters of a traceback that are told
FOREVER = 1e9


Bytes = bytes | tuple[int, int]  # themselves, or where they begin and end in the arena


class Array(NamedTuple):
    """An array for a kernel: in which memory (the card's own, or that of links), from which byte on, and what it is."""

    memory: int
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Load(NamedTuple):
    """A kernel, to be launched by its number."""

    kernel: int
    message: Bytes


class Launch(NamedTuple):
    """A kernel on pieces of memory. It takes `seconds` at least; `fault` is what is to go wrong instead."""

    ticket: int
    kernel: int
    pieces: tuple[Array, ...]
    arguments: Bytes
    seconds: float
    fault: str
    unused: tuple[int, ...]  # kernels that nobody will launch again


class Ended(NamedTuple):
    """How a launch ended: well, or with an error, which may be one that only its own process can load."""

    ticket: int
    error: bytes | None = None
    told: str = ""
    traceback: str = ""


class Settings(NamedTuple):
    """How a card's process is to live."""

    card: int
    sizes: list[int]  # of its memory, and of that of links
    threads: int
    limit: int | None  # bytes that it may have beside the arena
    path: list[str]  # where modules are
    folder: str  # in which the owner works


def live(line: socket.socket, memories: Sequence[int], settings: Settings, server: int) -> None:
    """The whole life of the process."""
    end_with(server)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if settings.limit is not None:
        limit_memory(settings.limit)
    with contextlib.suppress(OSError):  # not on this system: the kernel then chooses among all processes
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.path[:] = settings.path
    with contextlib.suppress(OSError):  # it is gone, and was of no use to the owner either
        os.chdir(settings.folder)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.card)
    os.register_at_fork(after_in_child=line.close)
    shared = [arena.map_file(each, size) for each, size in zip(memories, settings.sizes, strict=True)]
    for each in memories:
        os.close(each)
    with contextlib.suppress(EOFError):  # the owner has closed the line
        serve(Frames(line), shared)


def limit_memory(more: int) -> None:
    """Let this process have so many bytes more than it has, beside what is shared."""
    pages = Path("/proc/self/statm")
    held = int(pages.read_text().split()[5]) * mmap.PAGESIZE if pages.exists() else 0
    resource.setrlimit(resource.RLIMIT_DATA, (held + more, held + more))


def serve(frames: Frames, memories: Sequence[mmap.mmap]) -> None:
    """Do what the messages say, for ever."""
    kernels: dict[int, bytes | Kernel] = {}
    while True:
        message = frames.receive(None)
        assert message is not None
        verb: Load | Launch = pickle.loads(message)
        if isinstance(verb, Load):
            kernels[verb.kernel] = fetch(memories[0], verb.message)
        else:
            drop(kernels, verb.unused)
            frames.send(pickle.dumps(run(verb, kernels, memories)), None)


def drop(kernels: dict[int, bytes | Kernel], unused: Iterable[int]) -> None:
    """Forget kernels."""
    for number in unused:
        kernels.pop(number, None)


def fetch(memory: mmap.mmap, given: Bytes) -> bytes:
    """Bytes that came with a message, or beside it."""
    return given if isinstance(given, bytes) else memory[slice(*given)]


def run(launch: Launch, kernels: dict[int, bytes | Kernel], memories: Sequence[mmap.mmap]) -> Ended:
    """Run a kernel and say how it ended."""
    began = time.monotonic()
    try:
        if launch.fault:
            strike(launch.fault)
        kernel = kernels[launch.kernel]
        if isinstance(kernel, bytes):
            kernel = kernels[launch.kernel] = load_kernel(kernel)
        arrays = [arena.view(memories[each.memory], *each[1:]) for each in launch.pieces]
        kernel(*arrays, **pickle.loads(fetch(memories[0], launch.arguments)))
    except BaseException as error:  # a kernel may raise what ends programs; the card goes on
        ended = tell(launch.ticket, error)
    else:
        ended = Ended(launch.ticket)
    with contextlib.suppress(OSError, ValueError):  # nobody reads what kernels print any more, or they closed it
        sys.stdout.flush()
        sys.stderr.flush()
    left = launch.seconds - (time.monotonic() - began)
    if left > 0:
        time.sleep(left)
    return ended


def strike(fault: str) -> None:
    """Go wrong."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(FOREVER)


def tell(ticket: int, error: BaseException) -> Ended:
    """An error for another process."""
    text = "".join(traceback.format_exception(error))[-LONGEST:]
    told = f"{type(error).__name__}: {str(error)[:LONGEST]}"
    try:
        dumped = pickle.dumps(error)
        pickle.loads(dumped)  # some can be written and not read
    except Exception:
        return Ended(ticket, b"", told, text)
    return Ended(ticket, dumped if len(dumped) <= LONGEST else b"", told, text)
