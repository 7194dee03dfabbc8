"""A worker: a rank that does what its client says, in the order in which the client said it.

Every worker gets the same commands and runs them on its own part of each tensor, as the ranks of a program under
`meshloom run` do. It ends with its client: a thread looks at the connection, also while a collective waits for others.
"""

from __future__ import annotations

import itertools
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple
from typing import Any

import torch

from meshloom import settings
from meshloom.checkpoint.loading import read_tensors
from meshloom.checkpoint.saving import save
from meshloom.checkpoint.state import Gathered
from meshloom.context import Log, Policy
from meshloom.controller import wire
from meshloom.controller.functions import find
from meshloom.controller.session import BEAT, REFUSED
from meshloom.controller.values import decode
from meshloom.engines.layout import empty_stored, short_name, view_bytes
from meshloom.errors import STARTED, ArgumentError, LaunchError, MeshloomError
from meshloom.mesh import Mesh
from meshloom.placement import Topology, extents
from meshloom.runtime import state
from meshloom.tensor import creation, random
from meshloom.tensor.base import Tensor
from meshloom.tensor.moving import redistribute

LOOK = 0.2  # seconds between two attempts to reach a client
FOREVER = 1e9
VARIABLE = "MESHLOOM_CONTROLLER"


class Failed:
    """Stands for a tensor whose call failed: whatever is made of it fails for the same reason."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Broken(Exception):
    """A call on a tensor that a failed call should have made; the client knows already."""


class Left(Exception):
    """The client is gone, and this worker stays."""


class Table(dict[int, Any]):
    """Tensors by number."""

    def __getitem__(self, number: int) -> Any:
        found = super().__getitem__(number)
        if found.__class__ is Failed:
            raise Broken(found.reason)
        return found


class Worker:
    """The commands, and what they work on."""

    def __init__(self, line: wire.Line, number: int) -> None:
        self.line, self.number = line, number
        self.tensors = Table()
        self.meshes: dict[int, Mesh] = {}
        self.done = 0
        self.began = 0.0  # when the command under way began
        self.call = self.where = ""
        self.calls = 0
        self._sending = threading.Lock()
        self._is_ended = False
        self.stays = False
        self.kept: dict[str, Any] = {}
        self.traces: dict[str, list[list[Any]]] = {}
        self.capturing: Any = None

    def send(self, kind: bytes, header: object, payload: memoryview | None = None) -> None:
        """A frame to the client; the thread that tells how we are may be sending too."""
        with self._sending:
            self.line.send(kind, header, payload)

    def serve(self) -> None:
        """Do what the client says until it says that it is done, or is gone."""
        while not self._is_ended:
            found = self.line.receive()
            if found is None:
                raise Left if self.stays else LaunchError("the client is gone")
            kind, header, payload = found
            if kind == b"call":
                for command in header:
                    self.perform(command)
                    self.done += command[0] != "d"  # drops are told beside what is counted
                self.send(b"tell", {"done": self.done})
            elif kind == b"data":
                self.take_data(header, payload)
                self.done += 1
            else:
                raise wire.WireError(f"a client does not send {kind.decode()} frames")

    def perform(self, command: list[Any]) -> None:
        """One command; an error is told to the client, and what it should have made stands for the error."""
        self.began, results = time.monotonic(), []
        try:
            name = command[0]
            if name == "c":
                _, self.call, _, _, results, self.where, _ = command
                STARTED.line = self.where
                self.calls += 1
                self._call(command)
            else:
                self.call, self.where = COMMANDS[name], ""
                getattr(self, "_do_" + COMMANDS[name])(*command[1:])
            if self.capturing is not None and name in ("c", "d", "x"):
                self.capturing[1].append(command)
        except Broken as error:
            self._fail_results(results, str(error))
        except (wire.WireError, Left, OSError):
            raise
        except Exception as error:
            self.tell_failure(error)
            self._fail_results(results, str(error).partition("\n")[0])
        self.began = 0.0

    def _fail_results(self, results: list[int], reason: str) -> None:
        for each in results if isinstance(results, list) else ():
            dict.__setitem__(self.tensors, each, Failed(reason))

    def tell_failure(self, error: BaseException) -> None:
        """What went wrong, with the class of the error by its name."""
        headline = error.headline if isinstance(error, MeshloomError) else str(error).partition("\n")[0]
        facts = {
            "worker": self.number, "number": self.done, "call": str(self.call), "line": str(self.where),
            "error": type(error).__name__, "headline": headline[:2000], "text": str(error)[:8000],
        }  # fmt: skip
        self.send(b"fail", facts)

    def _call(self, command: list[Any]) -> None:
        _, name, args, kwargs, results, _, keys = command
        if name.startswith(REFUSED):
            raise ArgumentError(
                f"the arguments of {name[len(REFUSED) :]} are too long to be sent: {args[0]}",
                fix="give lists of numbers as a tensor",
            )
        positional = [decode(each, self.tensors, self.meshes) for each in args]
        named = {key: decode(each, self.tensors, self.meshes) for key, each in kwargs.items()} if kwargs else {}
        if keys:
            with random.keys_given(keys):
                made = find(name)(*positional, **named)
        else:
            made = find(name)(*positional, **named)
        if results:
            self._bind(made, results)

    def _bind(self, made: Any, results: list[int]) -> None:
        if made.__class__ is Tensor:
            self.tensors[results[0]] = made
            return
        found = list(tensors_in(made))
        if len(found) != len(results):
            raise LaunchError(f"{self.call} gave {len(found)} tensors and the client expects {len(results)}")
        for number, tensor in zip(results, found, strict=True):
            self.tensors[number] = tensor

    # the other commands

    def _do_drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self.tensors.pop(number, None)

    def _do_open(self, number: int, shape: list[int], axes: list[str] | None, options: dict[str, Any]) -> None:
        self.meshes[number] = creation.open_mesh(tuple(shape), None if axes is None else tuple(axes), **options)

    def _do_set(self, context: dict[str, Any]) -> None:
        torch.set_grad_enabled(context["grad"])
        if torch.get_default_dtype() != (kind := getattr(torch, context["dtype"])):
            torch.set_default_dtype(kind)
        torch.set_autocast_enabled("cpu", context["cast"] is not None)
        if context["cast"] is not None:
            torch.set_autocast_dtype("cpu", getattr(torch, context["cast"]))
            torch.set_autocast_cache_enabled(False)  # nobody here would know when the client left its block
        state._set({
            "output": decode(context["output"], self.tensors, self.meshes),
            "chosen": context["chosen"], "accumulating": context["accumulating"],
            "policy": Policy("forbid") if context["forbid"] else None,
        })  # fmt: skip

    def _do_fetch(self, number: int, request: int) -> None:
        """Give what this worker holds of a tensor, if nobody before it holds the same."""
        try:
            tensor = self.tensors[number]
        except Broken as error:
            if not self.number:
                self.send(b"give", {"request": request, "value": {"broken": str(error)}})
            return
        if not isinstance(tensor, Tensor):
            if not self.number:
                self._give(request, tensor, None)
            return
        with torch.no_grad():
            if tensor.topology.partial_axes:
                tensor = redistribute(tensor, tensor.topology.reduced.placements)
            topology = tensor.topology
            if is_first(topology, self.number):
                array = tensor._data.detach()
                boxes = [[list(each.start), list(each.shape)] for each in extents(topology)]
                parts = [array[each.stored].reshape(-1) for each in extents(topology)]
                if len(parts) != 1:
                    joined = torch.cat(parts) if parts else array.new_empty(0)
                else:
                    joined = parts[0]
                self._give(request, joined, boxes)

    def _give(self, request: int, data: torch.Tensor, boxes: list[Any] | None) -> None:
        value = {"dtype": short_name(data.dtype), "shape": list(data.shape), "boxes": boxes}
        self.send(b"give", {"request": request, "value": value}, bytes_of(data))

    def _do_ask(
        self, name: str, args: list[Any], kwargs: Any, first: int, line: str, keys: list[int], request: int
    ) -> None:
        """A call whose results the client cannot know: they are described to it."""
        self.call, self.where = name, line
        STARTED.line = line
        positional = [decode(each, self.tensors, self.meshes) for each in args]
        named = {key: decode(each, self.tensors, self.meshes) for key, each in (kwargs or {}).items()}
        with random.keys_given(keys or ()):
            made = find(name)(*positional, **named)
        numbers = {id(self.tensors[each["t"]]): each["t"] for each in args if isinstance(each, dict) and "t" in each}
        described = self._describe(made, numbers, itertools.count(first))
        if not self.number:
            self.send(b"give", {"request": request, "value": described})

    def _describe(self, value: Any, known: dict[int, int], numbers: Iterator[int]) -> Any:
        if isinstance(value, torch.Tensor) and id(value) in known:
            return {"same": known[id(value)]}
        if isinstance(value, Tensor):
            number = next(numbers)
            self.tensors[number] = value
            topology = value.topology
            mesh = next(each for each, mesh in self.meshes.items() if mesh == topology.mesh)
            placed = [[type(each).__name__, *(getattr(each, name) for name in each.__slots__)] for each in
                      topology.placements]  # fmt: skip
            return {
                "tensor": number, "mesh": mesh, "placements": placed, "shape": list(topology.shape),
                "dtype": topology.dtype, "tracked": value._data.requires_grad,
            }  # fmt: skip
        if isinstance(value, torch.Tensor):
            number = next(numbers)
            self.tensors[number] = value
            return {"plain": number}
        if isinstance(value, tuple):
            return {"tuple": [self._describe(each, known, numbers) for each in value]}
        if isinstance(value, list):
            return [self._describe(each, known, numbers) for each in value]
        return value

    def _do_record(self, command: list[Any], request: int) -> None:
        """A call with all its collectives, which are told."""
        log = Log()
        self.call, self.where = command[1], command[5]
        STARTED.line = self.where
        try:
            with state.changed(logs=(log,)):
                self._call(command)
        finally:
            if not self.number:
                events = [
                    [list(astuple(each.collective)), each.call, each.where, each.phase, each.host] for each in log
                ]
                self.send(b"give", {"request": request, "value": events})

    def _do_answer(self, request: int) -> None:
        if not self.number:
            self.send(b"give", {"request": request, "value": None})

    def _do_count(self, request: int) -> None:
        held = [each for each in dict.values(self.tensors) if isinstance(each, torch.Tensor)]
        arrays = [each._data if isinstance(each, Tensor) else each for each in held]
        self.send(b"give", {"request": request, "value": {
            "worker": self.number, "calls": self.calls, "tensors": len(held), "memory": memory(), "pid": os.getpid(),
            "cpu": time.process_time(),
            "bytes": sum(each.numel() * each.itemsize for each in arrays),
        }})  # fmt: skip

    # checkpoints

    def _do_save(
        self, request: int, folder: str, keep: int | None, tree: dict[str, Any], names: dict[str, int]
    ) -> None:
        found: Any = Gathered(tree, {name: self.tensors[number] for name, number in names.items()})
        save(found, folder, keep=keep, progress=False)
        self._do_answer(request)

    def _do_load(self, request: int, folder: str, names: dict[str, int]) -> None:
        read_tensors(folder, {name: self.tensors[number] for name, number in names.items()})
        self._do_answer(request)

    # traces

    def _do_begin(self, name: str) -> None:
        self.capturing = (name, [])

    def _do_finish(self) -> None:
        name, calls = self.capturing
        self.traces[name], self.capturing = calls, None

    def _do_replay(self, name: str, times: int) -> None:
        """The calls of a trace again, with what their tensors hold now."""
        for _ in range(times):
            for command in self.traces[name]:
                if command[0] == "c":
                    self.call, self.where = command[1], command[5]
                    STARTED.line = self.where
                    self.calls += 1
                    self._call(command)
                else:
                    getattr(self, "_do_" + COMMANDS[command[0]])(*command[1:])

    # clients that come and go

    def _do_stay(self) -> None:
        self.stays = True

    def _do_keep(self, name: str, number: int) -> None:
        self.kept[name] = self.tensors[number]

    def _do_welcome(self, request: int) -> None:
        """Tell a new client what an earlier one kept."""
        numbers = itertools.count(1)
        told = {name: self._describe(tensor, {}, numbers) for name, tensor in self.kept.items()}
        meshes = [[number, list(mesh.shape), list(mesh.axes)] for number, mesh in self.meshes.items()]
        if not self.number:
            value = {"kept": told, "meshes": meshes, "next": len(told) + 1}
            self.send(b"give", {"request": request, "value": value})

    def _do_leave(self) -> None:
        raise Left

    def _do_end(self) -> None:
        self._is_ended = True

    def take_data(self, header: dict[str, Any], payload: int) -> None:
        """A tensor of the client, or the part of it that is for this worker."""
        data = torch.empty(tuple(header["shape"]), dtype=getattr(torch, header["dtype"]))
        if data.numel() * data.itemsize != payload:
            raise wire.WireError(f"{payload} bytes were sent for {header['dtype']}{header['shape']}")
        if payload:
            self.line.read_into(bytes_of(data))
        place = header["place"]
        self.tensors[header["id"]] = data if place is None else self._put(data, place)

    def _put(self, data: torch.Tensor, place: dict[str, Any]) -> Tensor:
        """What this worker holds of a tensor, from its boxes one after the other."""
        placements = decode(place["placements"], self.tensors, self.meshes)
        topology = Topology(self.meshes[place["mesh"]], placements, place["shape"], short_name(data.dtype))
        boxes = extents(topology)
        if len(boxes) == 1 and boxes[0].shape == topology.stored_shape:
            stored = data.view(topology.stored_shape)
        else:
            stored, at = empty_stored(topology), 0
            for each in boxes:
                stored[each.stored] = data[at : at + each.count].view(each.shape)
                at += each.count
        return creation._number(Tensor(topology, stored))

    # how we are

    def beat(self) -> None:
        """Tell the client how we are, from a thread of our own; end with the client."""
        line, poll = self.line, select.poll()
        poll.register(line.socket, select.POLLRDHUP | select.POLLERR | select.POLLHUP)
        while not self._is_ended and line is self.line:
            if poll.poll(BEAT * 1000):
                time.sleep(0.2)  # the other thread may be reading the last words
                if not self._is_ended and not self.stays:
                    os._exit(1)
                return
            began, now = self.began, time.monotonic()
            with suppress(OSError):  # seen at the next look
                self.send(b"beat", {
                    "worker": self.number, "done": self.done, "busy": now - began if began else 0.0,
                    "memory": memory(), "call": self.call, "line": self.where,
                })  # fmt: skip

    def begin_again(self, line: wire.Line) -> None:
        """Another client: what the last one did not keep is gone."""
        self.line, self.done, self.began = line, 0, 0.0
        self.tensors.clear()


COMMANDS = {
            "d": "drop", "m": "open", "x": "set", "f": "fetch", "a": "answer", "e": "end", "q": "ask", "r": "record",
            "n": "count", "b": "stay", "k": "keep", "w": "welcome", "l": "leave",
            "v": "save", "i": "load", "t": "begin", "u": "finish", "y": "replay"}  # fmt: skip


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)


def is_first(topology: Any, rank: int) -> bool:
    """Whether no process before this one holds the same part."""
    if not topology.mesh.is_split:
        return not rank
    own = extents(topology, rank)
    return all(extents(topology, before) != own for before in range(rank))


def bytes_of(data: torch.Tensor) -> memoryview:
    """The values of a dense tensor; where it is contiguous, its own memory."""
    if not data.numel():
        return memoryview(b"")
    array: Any = view_bytes(data.resolve_conj().resolve_neg()).numpy()
    return memoryview(array).cast("B")


def memory() -> int:
    """The bytes that this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def dial(address: str, secret: bytes, number: int, patience: float) -> wire.Line:
    """The connection to the client, when it is there."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + patience
    while True:
        try:
            connection = socket.create_connection((host, int(port)), timeout=10)
            wire.greet(connection, secret, number, time.monotonic() + 10)
        except (OSError, LaunchError):
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK)
            continue
        wire.tune(connection)
        return wire.Line(connection)


def main() -> None:
    """Serve a client, and if it leaves us running the next one."""
    address, text = settings.environment().pop(VARIABLE).split(" ")
    secret, number = bytes.fromhex(text), int(settings.read("RANK"))
    worker = Worker(dial(address, secret, number, 30), number)
    while not worker._is_ended:
        threading.Thread(target=worker.beat, daemon=True).start()
        try:
            worker.serve()
        except (Left, ConnectionError):
            worker.line.socket.close()
            if worker._is_ended:  # the client did not wait for the last words
                return
            if not worker.stays:
                raise
            worker.begin_again(dial(address, secret, number, FOREVER))
    worker.line.socket.close()


if __name__ == "__main__":
    main()
