"""Buffers on a mesh: an address, a layout, and memory on every device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from meshloom.engines.layout import torch_dtype
from meshloom.errors import ArgumentError, ClosedError, UnsupportedError, closest, expect, where
from meshloom.mesh import Coordinate
from meshloom.placement import Topology
from meshloom.runtime.card import Driver, footprint
from meshloom.runtime.layouts import (
    LAYOUTS,
    Config,
    ReplicatedBufferConfig,
    ShardedBufferConfig,
    layout_of,
    need_topology,
)
from meshloom.runtime.memory import Allocator, Region
from meshloom.runtime.storage import Block, Scattered
from meshloom.types import short_dtype

if TYPE_CHECKING:
    from meshloom.runtime.device import MeshDevice
    from meshloom.runtime.queue import MeshCommandQueue

MEMORIES = ("dram", "l1")
_numbers = count()


class MeshBuffer:
    """Memory on every device of a mesh, at one address. It is freed by `free()`, or when nobody refers to it.

    `shape` is that of the whole; `local_shape` and `size`, in bytes, are of what one device holds. `dtype` is a short
    name.
    """

    def __init__(
        self,
        device: MeshDevice,
        config: Config,
        *,
        buffer_type: str = "dram",
        address: int | None = None,
        name: str | None = None,
    ) -> None:
        if address is not None:
            expect("address", address, int, fix="leave it out, and the allocator chooses one")
        device.check_open()
        if buffer_type not in MEMORIES:
            raise ArgumentError(f"there is no memory {buffer_type!r}", fix=closest(buffer_type, MEMORIES))
        self.device, self.config = device, config
        layout = layout_of(config, device.mesh.with_lease(None))  # a value: caches know it on other devices too
        self.layout, self.shape, self.local_shape, self.dtype = layout, layout.shape, layout.local_shape, layout.dtype
        self.size = layout.local_bytes
        self.buffer_type = buffer_type
        self.name = name or f"buffer{next(_numbers)}"
        self.where = where()
        system, self._allocator = device.system, device.system.memory[buffer_type]
        self._lock = threading.Lock()
        self._last: dict[MeshCommandQueue, int] = {}
        self._watchers: list[Callable[[], bool]] = []
        size = self.size
        if not system.driver.shares_memory:
            _check_memory(buffer_type, system.driver)
            size = footprint(device.cards, self.local_shape, torch_dtype(self.dtype))
        self.region = self._allocator.allocate(size, device.mask, f"buffer {self.name}", self.where, address)
        self._release = weakref.finalize(self, _drop, self._allocator, self.region)
        self._release.atexit = False
        if system.races is not None:
            system.races.note_allocation(self.region)
        self.storage: Block | Scattered = (
            Block(self.layout, system.races is not None)
            if system.driver.shares_memory
            else Scattered(self.layout, device.cards, self.region.address)
        )
        self._on_cards = None
        if isinstance(self.storage, Scattered):
            self._on_cards = weakref.finalize(self, self.storage.free)
            self._on_cards.atexit = False
        device.adopt(self)

    @property
    def address(self) -> int:
        """Where it is, on every device."""
        return self.region.address

    @property
    def topology(self) -> Topology:
        """The placements that say the same as the layout, or an error if none do."""
        found = need_topology(self.layout)
        return Topology(self.device.mesh, found.placements, found.shape, found.dtype)

    @property
    def is_allocated(self) -> bool:
        """Whether it still has memory."""
        return self._release.alive and not self.device.closed

    def free(self) -> None:
        """Give the memory back; a second time does nothing. What a live trace uses keeps its place until release. Cards
        that hold memory of their own first finish the commands that use it."""
        if self._release.alive:
            if self.device.is_held(self):
                self._release.detach()
                self.device.free_later(self)
            else:
                self._drain()
                self._release()
                self.tell_cards()

    deallocate = free

    def tell_cards(self) -> None:
        """Let cards that hold their parts themselves know that nobody uses them any more."""
        if self._on_cards is not None:
            self._on_cards()

    def _drain(self) -> None:
        """Wait for the commands that use memory which cards would give to others; their errors stay for later."""
        if isinstance(self.storage, Scattered) and not self.device.is_closing:
            with self._lock:
                pending = dict(self._last)
            for queue, number in pending.items():
                queue.wait(number)

    def handle(self, *place: Any) -> Any:
        """What the card at a coordinate calls its part: `handle(r, c)`."""
        self.check()
        found = self.device.mesh.check(place[0] if len(place) == 1 and not _is_int(place[0]) else place)
        self.device.card(found)  # an error if another process holds it
        return self.storage.at(found)

    def check(self) -> None:
        """An error if it has been freed or its mesh closed."""
        self.device.check_open()
        if not self._release.alive:
            raise ClosedError(
                f"{self.name} has been freed",
                buffer=self,
                allocated=self.where,
                fix="keep the buffer until its last use, or allocate another",
            )

    def cards(self, places: Iterable[Coordinate]) -> dict[int, Coordinate]:
        """The numbers of the cards at some coordinates."""
        device = self.device
        return {device.numbers[device.mesh.index(place)]: place for place in places}

    # who waits for whom

    def note_use(self, queue: MeshCommandQueue, number: int) -> None:
        """A queue has been given a command that uses it."""
        with self._lock:
            self._last[queue] = number
        if self._watchers:
            self._watchers = [watcher for watcher in self._watchers if watcher()]

    def watch(self, watcher: Callable[[], bool]) -> None:
        """Call somebody whenever a queue is given a command that uses the buffer, as long as he answers True."""
        self._watchers.append(watcher)

    def wait(self) -> None:
        """Wait for all commands so far that use it, on every queue; their errors are raised here."""
        with self._lock:
            pending, self._last = self._last, {}
        for queue, number in pending.items():
            queue.settle(number)

    def take(self) -> None:
        """Let the host have it: wait for all commands that use it; what comes after is ordered after the host."""
        self.check()
        self.wait()
        self.device.system.launches.check_cards(self.device.numbers)
        if self.device.system.races is not None:
            self.device.system.races.note_host_write(self.region, self.device.numbers)

    def __repr__(self) -> str:
        state = f"at {self.address:#x}" if self.is_allocated else "freed"
        return f"MeshBuffer({self.name}: {self.layout}, {state} in {self.buffer_type})"


def _check_memory(buffer_type: str, driver: Driver) -> None:
    if buffer_type != "dram":
        raise UnsupportedError(
            f"cards of {type(driver).__name__} keep buffers in DRAM, not in {buffer_type}",
            fix="leave buffer_type= out",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int)


def _drop(allocator: Allocator, region: Region) -> None:
    allocator.drop(region)


def create_mesh_buffer(
    mesh: MeshDevice,
    layout: str | Config = "replicated",
    global_shape: Sequence[int] | None = None,
    shard_shape: Sequence[int] | None = None,
    *,
    dtype: object = None,
    orientation: str = "row_major",
    global_size: int | None = None,
    buffer_type: str = "dram",
    address: int | None = None,
    name: str | None = None,
) -> MeshBuffer:
    """A buffer on every device of a mesh: `layout="replicated"`, `layout="sharded"`, or a config.

    >>> from meshloom.runtime import open_mesh_device
    >>> with open_mesh_device((2, 2)) as mesh:
    ...     create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(2, 2), name="x")
    MeshBuffer(x: f32[4, 4] shards [2, 2], at 0x0 in dram)
    """
    if not hasattr(mesh, "adopt"):
        raise ArgumentError(f"a buffer is on a MeshDevice, not on {mesh!r:.80}", fix="mesh = open_mesh_device((2, 4))")
    if isinstance(layout, (ReplicatedBufferConfig, ShardedBufferConfig)):
        config: Config = layout
    else:
        kind = "" if dtype is None else short_dtype(str(dtype))
        config = _config(layout, global_shape, shard_shape, kind, orientation, global_size)
    return MeshBuffer(mesh, config, buffer_type=buffer_type, address=address, name=name)


def _config(layout: str, whole: Any, shard: Any, dtype: str, orientation: str, size: int | None) -> Config:
    if layout not in LAYOUTS:
        raise ArgumentError(f"there is no layout {layout!r}", fix=closest(layout, LAYOUTS))
    if layout == "replicated":
        if shard is not None:
            raise ArgumentError("a replicated buffer has no shard_shape", fix='use layout="sharded", or leave it out')
        return ReplicatedBufferConfig(size, None if whole is None else tuple(whole), dtype)
    if whole is None or shard is None:
        raise ArgumentError("a sharded buffer needs global_shape and shard_shape")
    return ShardedBufferConfig(size, tuple(whole), tuple(shard), orientation, dtype)
