"""Memory of arrays on cards that share none with this process: what they hold, and every byte that comes to the host.

A `CardStore` is what the tensors on one mesh device know of its cards. `Shards` are one value there: a handle on every
card at one address, written once and given back when nobody refers to them. A `Memory` is a cell that has a value: its
shards, or, inside of an op, an array on the host that no card has got yet. A write in place gives the cell other
shards, so that a card which fails in the middle leaves the old value as it was.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from meshloom.collectives.schedule import Schedule
from meshloom.context import HostTransfer, state
from meshloom.engines import private
from meshloom.errors import DeviceError, DeviceTimeoutError, UnsupportedError, where
from meshloom.mesh import Coordinate, Mesh
from meshloom.runtime.card import Card, EndableCard, FluentDriver, Kernel, footprint
from meshloom.runtime.card_layouts import Layout
from meshloom.runtime.memory import Region
from meshloom.runtime.program import Program
from meshloom.runtime.system import Failures, System
from meshloom.types import numel

LIMIT = 4096  # kernels and schedules that a store remembers


class _Here(threading.local):
    """What this thread is doing: for which call, whether the program asked for the transfer, what is still here."""

    call = ""
    asked = False
    pending: list[weakref.ref[Memory]] | None = None


HERE = _Here()


@contextmanager
def asked(call: str) -> Iterator[None]:
    """Transfers inside are what the program asked for, such as putting a tensor on cards or reading it."""
    before = HERE.call, HERE.asked
    HERE.call, HERE.asked = call, True
    try:
        yield
    finally:
        HERE.call, HERE.asked = before


@contextmanager
def named(call: str) -> Iterator[None]:
    """Transfers inside belong to a call, unless they belong to one already."""
    before = HERE.call
    HERE.call = before or call
    try:
        yield
    finally:
        HERE.call = before


@contextmanager
def one_op(call: str) -> Iterator[None]:
    """Arrays that are made inside stay on the host until the end; those that nobody refers to then never leave it."""
    if HERE.pending is not None:
        yield
        return
    before = HERE.call
    HERE.call, HERE.pending = call, []
    try:
        yield
        for each in HERE.pending:
            memory = each()
            if memory is not None:
                memory.leave_host()
    finally:
        HERE.call, HERE.pending = before, None


class CardStore:
    """The memory of the cards of one mesh device, for the arrays on it."""

    queue = -1  # in a log of what cards did: a tensor asked for it, on the caller's thread

    def __init__(self, system: System, mesh: Mesh, numbers: Sequence[int]) -> None:
        self.system, self.mesh = system, mesh
        self.numbers = dict(zip(mesh.device_ids, numbers, strict=True))  # the number of each device's card
        self.mask = sum(1 << number for number in self.numbers.values())
        self._lock = threading.Lock()
        self._left: deque[Callable[[], None]] = deque()
        self._live: weakref.WeakSet[Shards] = weakref.WeakSet()
        self.schedules: dict[object, list[Schedule] | None] = {}  # of sums over links, as `card_links` plans them
        self.has_broken_links = False
        self._programs: dict[int, Program] = {}  # by the id of their kernel, which they keep

    @property
    def fluent(self) -> FluentDriver | None:
        """The driver, if it has kernels of its own for some ops."""
        driver = self.system.driver
        return driver if isinstance(driver, FluentDriver) else None

    @property
    def cards(self) -> list[Card]:
        """The cards of this process."""
        return [self.card(place) for place in self.mesh.local_coordinates()]

    def card(self, place: Coordinate, mesh: Mesh | None = None) -> Card:
        """The card at a coordinate of this process, of the store's mesh or of another one over the same cards."""
        found = self.system.cards[self.numbers[(mesh or self.mesh).device_id(place)]]
        assert found is not None  # this process holds the coordinate
        return found

    def check(self) -> None:
        """An error if the mesh device was closed, or one of its cards is lost."""
        assert self.mesh.lease is not None
        self.mesh.lease.check_open()
        if self.mesh.is_split:
            raise UnsupportedError(
                "tensors do not lie on the cards of several processes yet",
                mesh=self.mesh,
                fix="open the cards in one process, or use create_mesh_buffer, queues and workloads",
            )
        self.system.launches.check_process()
        self.system.launches.check_cards(self.numbers.values())

    def each(
        self, what: str, layout: Layout, places: Sequence[Coordinate], act: Callable[[Coordinate, Card], None]
    ) -> None:
        """Do something on some cards, one after the other; what fails does not keep the others from it."""
        members = ((place, self.card(place, layout.mesh)) for place in places)
        self.speak(what, layout.mesh, len(places), lambda: self.system.each(members, act))

    def speak(self, what: str, mesh: Mesh, cards: int, act: Callable[[], None]) -> None:
        """Do something with cards; what fails on some of them is an error with their coordinates."""
        self.check()
        try:
            with self._lock:
                act()
        except Failures as failures:
            for place, error in failures.found:
                if isinstance(error, DeviceTimeoutError):
                    self._end(place, mesh, str(error).partition("\n")[0])
            raise _error(what, failures, cards) from failures.found[0][1]
        finally:
            self.tidy()

    def _end(self, place: Coordinate, mesh: Mesh, reason: str) -> None:
        """Something takes too long on a card: it ends it, or it may still be at it, and gets no more work."""
        card = self.card(place, mesh)
        if isinstance(card, EndableCard):
            card.end(reason)
        else:
            self.system.launches.lost[self.numbers[mesh.device_id(place)]] = f"at {tuple(place)}, {reason}"

    def allocate(self, layout: Layout, dtype: torch.dtype) -> Shards:
        """Memory on every card of a layout, at one address."""
        self.check()
        self.tidy()
        shape = layout.part_shape
        nbytes = footprint(self.cards, shape, dtype) if numel(shape) else 0
        text = f"array {str(dtype).removeprefix('torch.')}{list(layout.shape)}"
        region = self.system.memory["dram"].allocate(nbytes, self.mask, text, where())
        handles: dict[Coordinate, Any] = {}
        made = Shards(self, layout, dtype, handles, region)
        if made.part_bytes:

            def alloc(place: Coordinate, card: Card) -> None:
                handles[place] = card.alloc(region.address, shape, dtype)

            self.each("allocation", layout, list(layout.mesh.local_coordinates()), alloc)
        self._live.add(made)
        return made

    def put(self, array: torch.Tensor, layout: Layout) -> Shards:
        """An array of the host as shards on the cards; one without data is told of and moves nothing."""
        made = self.allocate(layout, array.dtype) if not array.is_meta else Shards(self, layout, array.dtype, {}, None)
        self.write(made, array)
        return made

    def write(self, shards: Shards, array: torch.Tensor) -> None:
        """Overwrite what the cards hold."""
        places = list(shards.layout.mesh.local_coordinates())
        size = len(places) * shards.part_bytes
        tell("write", size, len(places))
        if not size or array.is_meta:
            return
        parts = shards.layout.cut(array)

        def write(place: Coordinate, card: Card) -> None:
            card.write(shards.handles[place], _in_a_row(parts[place]).view(shards.part_shape))
            self.system.tell("write", [place], shards.part_bytes, self.queue, 1)

        self.each("write", shards.layout, places, write)

    def read(self, shards: Shards) -> torch.Tensor:
        """What the cards hold, put together, flat and contiguous."""
        layout, places = shards.layout, shards.layout.sources()
        size = len(places) * shards.part_bytes
        tell("read", size, len(places))
        found = torch.empty(numel(layout.shape), dtype=shards.dtype, device="meta" if shards.is_meta else "cpu")
        if not size or shards.is_meta:
            return found
        parts: dict[Coordinate, torch.Tensor] = {}

        def read(place: Coordinate, card: Card) -> None:
            parts[place] = card.read(shards.handles[place]).view(layout.part_shape)
            self.system.tell("read", [place], shards.part_bytes, self.queue, 1)

        self.each("read", layout, places, read)
        layout.join(parts, found)
        return found

    def launch(self, op: str, kernel: Kernel, operands: Sequence[Shards], args: Mapping[str, Any]) -> None:
        """Run a kernel of the driver on every card: on its part of each operand, the last of which it writes."""
        layout, tickets = operands[-1].layout, dict[Coordinate, Any]()
        if len(self._programs) >= LIMIT:  # a driver that makes another kernel for every call
            self._programs.clear()
        program = self._programs.setdefault(id(kernel), Program(kernel, name=op))

        def start(place: Coordinate, card: Card) -> None:
            handles = [each.handles[place] for each in operands]
            tickets[place] = card.launch(program.load(card, self.system), handles, args)
            self.system.tell("launch", [place], 0, self.queue, 1)

        timeout = self.system.launches.timeout

        def wait(place: Coordinate, card: Card) -> None:
            if not card.wait(tickets[place], timeout):
                raise DeviceTimeoutError(f"kernel {op} did not end within {timeout} s")

        places = list(layout.mesh.local_coordinates())
        self.each(f"kernel {op}", layout, places, start)
        self.each(f"kernel {op}", layout, places, wait)

    # the end of shards

    def leave(self, free: Callable[[], None]) -> None:
        """Shards are gone: free them now, or after what this store is doing, since that may be why we are here."""
        self._left.append(free)
        self.tidy()

    def tidy(self) -> None:
        """Free what was left, unless a card is being spoken to: then that call does it."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                while self._left:
                    self._left.popleft()()
            finally:
                self._lock.release()

    def close(self) -> None:
        """The mesh device is closed: all that lies on it is given back."""
        for shards in list(self._live):
            shards.free()


class Shards:
    """One value on the cards: a handle on each, at one address. Nobody writes to it again, unless it is a buffer's."""

    __slots__ = (
        "__weakref__",
        "dtype",
        "free",
        "handles",
        "is_borrowed",
        "is_meta",
        "layout",
        "part_bytes",
        "part_shape",
        "store",
    )

    def __init__(
        self,
        store: CardStore,
        layout: Layout,
        dtype: torch.dtype,
        handles: dict[Coordinate, Any],
        region: Region | None,
    ) -> None:
        self.store, self.layout, self.dtype, self.handles = store, layout, dtype, handles
        self.is_meta, self.is_borrowed = region is None and not handles, region is None and bool(handles)
        self.part_shape = layout.part_shape  # as the cards know it
        self.part_bytes = numel(layout.part_shape) * dtype.itemsize
        if region is not None:
            self.free = weakref.finalize(self, store.leave, _Free(store, layout, handles, region))
            self.free.atexit = False


class _Free:
    """Gives handles back to their cards, and their room to the allocator."""

    def __init__(self, store: CardStore, layout: Layout, handles: Mapping[Coordinate, Any], region: Region) -> None:
        self.store, self.handles, self.region = store, handles, region
        self.cards = {
            place: (store.numbers[layout.mesh.device_id(place)], store.card(place, layout.mesh))
            for place in layout.mesh.local_coordinates()
        }

    def __call__(self) -> None:
        lost = self.store.system.launches.lost
        for place, handle in self.handles.items():
            number, card = self.cards[place]
            if number not in lost:
                card.free(handle)
        self.store.system.memory["dram"].drop(self.region)


class Memory:
    """A cell with the value of an array and its views: on the cards, or for the length of an op on the host."""

    __slots__ = ("__weakref__", "_host", "_shards", "dtype", "store")

    def __init__(self, store: CardStore, dtype: torch.dtype) -> None:
        self.store, self.dtype = store, dtype
        self._host: tuple[torch.Tensor, Layout] | None = None
        self._shards: Shards | None = None

    @property
    def layout(self) -> Layout:
        """How it is cut, or will be."""
        if self._host is not None:
            return self._host[1]
        assert self._shards is not None
        return self._shards.layout

    @property
    def shards(self) -> Shards | None:
        """The value on the cards; None while it is on the host."""
        return self._shards if self._host is None else None

    def give(self, shards: Shards) -> None:
        """Take a value that the cards have."""
        self._shards, self._host = shards, None

    def set(self, array: torch.Tensor, layout: Layout) -> None:
        """A new value from the host: inside of an op it stays there until the end of it."""
        if HERE.pending is None:
            self._lay(array, layout)
        else:
            self._host = array, layout
            HERE.pending.append(weakref.ref(self))

    def read(self) -> torch.Tensor:
        """The value on the host, flat; of one that is there already not a copy."""
        if self._host is not None:
            return self._host[0]
        assert self._shards is not None
        return self.store.read(self._shards)

    def write(self, array: torch.Tensor) -> None:
        """Another value in place of the one it has, laid in the same way."""
        if self._host is not None:
            self._host = array, self._host[1]
        else:
            self._lay(array, self.layout)

    def lay(self, layout: Layout) -> None:
        """Let the cards hold it in a layout; what lies otherwise is read and written."""
        if self._host is not None:
            self._lay(self._host[0], layout)
        elif self.layout != layout:
            self._lay(self.read(), layout)

    def leave_host(self) -> None:
        """Let the cards hold it."""
        if self._host is not None:
            self._lay(*self._host)

    def _lay(self, array: torch.Tensor, layout: Layout) -> None:
        if self._shards is not None and self._shards.is_borrowed:
            self.store.write(self._shards, array)
        else:
            self._shards = self.store.put(array, layout)
        self._host = None


def _in_a_row(part: torch.Tensor) -> torch.Tensor:
    """A part whose elements follow each other, also by its strides: those of dims of size 1 may be anything."""
    part = part.contiguous()
    return part if not part.dim() or part.stride(-1) == 1 else part.clone(memory_format=torch.contiguous_format)


def tell(way: str, size: int, cards: int) -> None:
    """Bytes are about to go between host and cards: whoever watches is told, and may object."""
    if size and state.watching:
        phase = "forward" if private.current_graph_task_id() == -1 else "backward"
        state.tell_transfer(HostTransfer(f"host {way}", size, cards, HERE.call or "tensor", where(), phase), HERE.asked)


def _error(what: str, failures: Failures, places: int) -> Exception:
    """What some cards did not do, as one error with their coordinates; Ctrl-C stays what it is."""
    for _, error in failures.found:
        if isinstance(error, KeyboardInterrupt):
            raise error
    kind = DeviceTimeoutError if failures.timed_out else DeviceError
    lines = [f"{place}: {type(error).__name__}: {str(error).partition(chr(10))[0]}" for place, error in failures.found]
    return kind(
        f"{what} for {HERE.call or 'tensor'} at {where()} failed on {len(failures.found)} of {places} devices",
        devices="\n".join(lines),
        fix="the operands are as they were: run it again, or use the other cards",
    )
