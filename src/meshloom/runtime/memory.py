"""Memory of the devices: one address on all of them, first fit, freed pieces joined again.

An address is an offset in every bank: a buffer of n bytes on a chip with b banks takes ceil(n / b) bytes of each, from
the same offset (pages go round the banks). Lock-step means that it also has the same address on every device it is on.
Which devices those are is a bit mask, so submeshes that overlap share one account and can never be given the same
bytes. The lowest address that is free on all of them wins: the same calls give the same addresses, always.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy

from meshloom.errors import ArgumentError, OutOfMemoryError, place_name
from meshloom.runtime.chips import ALIGNMENT

LISTED = 5  # how many owners an error names
_next_number = count().__next__
Where = str | tuple[str, int]  # a line as text, or its file and number: a text only when somebody reads it


class Region:
    """Bytes that somebody has: `size` in each bank from `address` on, on the devices of `mask`."""

    __slots__ = ("_where", "address", "freed", "mask", "number", "owner", "size")

    address: int
    size: int
    mask: int
    owner: Any
    number: int  # that no other has
    freed: bool
    _where: Where

    @property
    def where(self) -> str:
        """The line that it was allocated on; empty if nobody knows."""
        return line_text(self._where)

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.size

    def __lt__(self, other: Region) -> bool:
        return (self.address, self.number) < (other.address, other.number)

    def overlaps(self, other: Region) -> bool:
        """Whether some device has bytes of both."""
        return bool(self.mask & other.mask) and self.address < other.end and other.address < self.end


def make_region(address: int, size: int, mask: int, owner: Any, where: Where) -> Region:
    """Bytes that are not booked yet, under a number of their own."""
    made = _blank(Region)
    made.address, made.size, made.mask, made.owner, made._where = address, size, mask, owner, where
    made.number, made.freed = _next_number(), False
    return made


_blank = object.__new__


@dataclass(frozen=True, slots=True)
class Usage:
    """The memory of one device in bytes: in use, free, the most that ever was in use, the largest free piece.

    >>> print(Usage(used=1 << 20, free=3 << 20, peak=2 << 20, largest_free=3 << 20))
    1.0 MiB used, 3.0 MiB free, 2.0 MiB at most, largest free piece 3.0 MiB
    """

    used: int
    free: int
    peak: int
    largest_free: int

    def __str__(self) -> str:
        used, free, peak, largest = map(size_text, (self.used, self.free, self.peak, self.largest_free))
        return f"{used} used, {free} free, {peak} at most, largest free piece {largest}"


def line_text(where: Where) -> str:
    """A line for people.

    >>> line_text(("project/train.py", 12)), line_text("train.py:12")
    ('train.py:12', 'train.py:12')
    """
    return where if isinstance(where, str) else place_name(where) or "unknown line"


def size_text(size: float) -> str:
    """Bytes for people.

    >>> size_text(100), size_text(1536), size_text(12 * 10**9)
    ('100 B', '1.5 KiB', '11.2 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def align(size: int) -> int:
    """The size rounded up to the alignment; nothing takes a whole piece too, so that addresses differ.

    >>> align(1), align(64), align(0)
    (64, 64, 64)
    """
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT


class Gaps:
    """The free pieces between regions, sorted and never adjacent: freeing joins neighbours.

    >>> gaps = Gaps(256)
    >>> gaps.fit(100), gaps.take(0, 128), gaps.fit(100)
    (0, None, 128)
    >>> gaps.give(0, 128); gaps.pieces
    [(0, 256)]
    """

    __slots__ = ("pieces",)

    def __init__(self, capacity: int) -> None:
        self.pieces: list[tuple[int, int]] = [(0, capacity)] if capacity else []

    def fit(self, size: int, from_top: bool = False) -> int | None:
        """The lowest address with that much room, or the highest."""
        for start, end in reversed(self.pieces) if from_top else self.pieces:
            if end - start >= size:
                return end - size if from_top else start
        return None

    def holds(self, start: int, end: int) -> bool:
        """Whether all of a piece is free."""
        place = bisect_left(self.pieces, (start + 1,)) - 1
        return place >= 0 and self.pieces[place][1] >= end

    def take(self, start: int, end: int) -> None:
        """Cut a piece out; what of it is not free stays so."""
        pieces = self.pieces
        place = bisect_left(pieces, (start,))
        if place < len(pieces) and pieces[place][0] == start and pieces[place][1] > end:  # the usual first fit
            pieces[place] = (end, pieces[place][1])
            return
        if place and pieces[place - 1][1] == end:  # the usual fit from the top
            pieces[place - 1] = (pieces[place - 1][0], start)
            return
        first = max(0, place - 1)
        last = bisect_left(self.pieces, (end,))
        left = []
        for low, high in self.pieces[first:last]:
            left += [(a, b) for a, b in ((low, min(high, start)), (max(low, end), high)) if a < b]
        self.pieces[first:last] = left

    def give(self, start: int, end: int) -> None:
        """Put a piece back and join it with its neighbours."""
        pieces = self.pieces
        place = bisect_left(pieces, (start,))
        if place and pieces[place - 1][1] == start:
            place -= 1
            start = pieces.pop(place)[0]
        if place < len(pieces) and pieces[place][0] == end:
            pieces[place] = (start, pieces[place][1])
        else:
            pieces.insert(place, (start, end))

    @property
    def largest(self) -> int:
        """The size of the largest piece."""
        return max((end - start for start, end in self.pieces), default=0)


class Allocator:
    """First fit over devices in lock-step. `drop` may be called from anywhere, even a finalizer: it only makes a note.

    >>> memory = Allocator("DRAM", 4096, banks=1, devices=2)
    >>> a, b = memory.allocate(1000, 0b11, "a"), memory.allocate(100, 0b01, "b")
    >>> a.address, b.address, memory.allocate(64, 0b10, "c").address
    (0, 1024, 1024)
    >>> memory.release(a); memory.allocate(64, 0b11, "d").address
    0
    """

    def __init__(self, kind: str, capacity: int, banks: int, devices: int) -> None:
        self.kind, self.banks, self.devices = kind, banks, devices
        self.bank_size = capacity // banks // ALIGNMENT * ALIGNMENT
        self._regions: dict[int, Region] = {}  # by number
        self._lock = threading.Lock()
        self._dropped: deque[Region] = deque()
        self.drop = self._dropped.append  # frees a region at the next call: what a finalizer may do, wherever it runs
        self._gaps: dict[int, Gaps] = {}
        self._members: dict[int, numpy.ndarray] = {}
        self._used = numpy.zeros(devices, dtype=numpy.int64)  # of regions on some devices only
        self._peak = numpy.zeros(devices, dtype=numpy.int64)
        self._all = (1 << devices) - 1
        self._common = self._most = 0  # of regions on all devices: now, and at most since `_used` last changed

    def allocate(
        self,
        nbytes: int,
        mask: int,
        owner: Any,
        where: Where = "",
        address: int | None = None,
        *,
        from_top: bool = False,
    ) -> Region:
        """Room for `nbytes` on every device of the mask: lowest address, highest, or the one that was asked for."""
        size = (-(-nbytes // (self.banks * ALIGNMENT)) or 1) * ALIGNMENT  # align(-(-nbytes // self.banks))
        with self._lock:
            if len(self._dropped) == 1 and address is None:
                made = self._hand_on(self._dropped[0], size, mask, owner, where, from_top)
                if made is not None:
                    return made
            if self._dropped:
                self._drain()
            gaps = self._gaps.get(mask) or self._gaps_of(mask)
            found = (
                gaps.fit(size, from_top) if address is None else self._check_address(address, size, mask, owner, gaps)
            )
            if found is None:
                raise self._full(nbytes, mask, owner, where, gaps)
            return self._put(make_region(found, size, mask, owner, where))

    def _hand_on(self, region: Region, size: int, mask: int, owner: Any, where: Where, from_top: bool) -> Region | None:
        """The bytes of a region that was just dropped for the next owner, if they are what first fit would find once
        they are free: what is free and what is used stays as it is."""
        gaps = self._gaps.get(mask)
        if region.freed or region.size != size or region.mask != mask or gaps is None:
            return None
        low, high = region.address, region.address + size
        for start, end in reversed(gaps.pieces) if from_top else gaps.pieces:
            if end < high if from_top else start > low:
                break  # this one and all that follow come after it
            if end - start >= size or (start == high if from_top else end == low):
                return None
        self._dropped.popleft()
        region.freed = True
        del self._regions[region.number]
        made = make_region(low, size, mask, owner, where)
        self._regions[made.number] = made
        return made

    def resize(self, region: Region, nbytes: int) -> Region:
        """The region with another size: in place if what follows is free, else moved to the first fit."""
        size = align(-(-nbytes // self.banks))
        with self._lock:
            self._drain()
            if size > region.size and not self._gaps_of(region.mask).holds(region.end, region.address + size):
                place = None
            else:
                place = region.address
        if place is None:
            made = self.allocate(nbytes, region.mask, region.owner, region.where)
            self.release(region)
            return made
        self.release(region)
        return self.allocate(nbytes, region.mask, region.owner, region.where, place)

    def release(self, region: Region) -> None:
        """Free a region; a second time does nothing."""
        self.drop(region)
        with self._lock:
            self._drain()

    def settle(self) -> None:
        """Free what was dropped."""
        with self._lock:
            self._drain()

    def usage(self) -> list[Usage]:
        """The memory of every device."""
        with self._lock:
            self._drain()
            total = self.bank_size * self.banks
            largest = [self._gaps_of(1 << device).largest * self.banks for device in range(self.devices)]
            return [
                Usage(used, total - used, peak, free)
                for used, peak, free in zip(
                    (self._used + self._common).tolist(), self._peaks().tolist(), largest, strict=True
                )
            ]

    def live(self) -> list[Region]:
        """The regions that are in use, by address."""
        with self._lock:
            self._drain()
            return sorted(self._regions.values())

    def _put(self, region: Region) -> Region:
        self._regions[region.number] = region
        start, end = region.address, region.address + region.size
        for mask, gaps in self._gaps.items():
            if mask & region.mask:
                gaps.take(start, end)
        self._count(region.mask, region.size * self.banks)
        return region

    def _count(self, mask: int, change: int) -> None:
        """Add to what devices use. What all of them use is one number: most regions are on all."""
        if mask == self._all:
            self._common += change
            if self._common > self._most:
                self._most = self._common
        else:
            self._peaks()
            self._used[self._members_of(mask)] += change
            self._peaks()

    def _peaks(self) -> numpy.ndarray:
        """The most that every device has used."""
        numpy.maximum(self._peak, self._used + self._most, out=self._peak)
        self._most = self._common
        return self._peak

    def _drain(self) -> None:
        while self._dropped:
            region = self._dropped.popleft()
            if not region.freed:
                region.freed = True
                self._take_back(region)

    def _take_back(self, region: Region) -> None:
        del self._regions[region.number]
        self._count(region.mask, -region.size * self.banks)
        start, end = region.address, region.address + region.size
        for mask, gaps in tuple(self._gaps.items()):
            if not mask & ~region.mask:
                gaps.give(start, end)
            elif mask & region.mask:  # another region may still be there on the other devices
                del self._gaps[mask]

    def _gaps_of(self, mask: int) -> Gaps:
        found = self._gaps.get(mask)
        if found is None:
            found = self._gaps[mask] = Gaps(self.bank_size)
            for region in self._on(mask):
                found.take(region.address, region.end)
        return found

    def _on(self, mask: int) -> Iterable[Region]:
        return (region for region in self._regions.values() if region.mask & mask)

    def _members_of(self, mask: int) -> numpy.ndarray:
        found = self._members.get(mask)
        if found is None:
            listed = [device for device in range(self.devices) if mask >> device & 1]
            found = self._members[mask] = numpy.array(listed, dtype=numpy.intp)
        return found

    def _check_address(self, address: int, size: int, mask: int, owner: Any, gaps: Gaps) -> int:
        if address < 0 or address % ALIGNMENT or address + size > self.bank_size:
            raise ArgumentError(
                f"address {address:#x} is not one of {self.kind}",
                fix=f"addresses are multiples of {ALIGNMENT} from 0 to {self.bank_size - size:#x}",
            )
        if not gaps.holds(address, address + size):
            wanted = make_region(address, size, mask, owner, "")
            taken = next(region for region in self._on(mask) if region.overlaps(wanted))
            raise OutOfMemoryError(
                f"{owner} cannot have address {address:#x}: {taken.owner} is there",
                held=f"{taken.address:#x} to {taken.end:#x}, since {taken.where or 'unknown line'}",
                fix="leave address= out, or free what is there first",
            )
        return address

    def _full(self, nbytes: int, mask: int, owner: Any, where: Where, gaps: Gaps) -> OutOfMemoryError:
        held = sorted(self._on(mask), key=lambda region: (-region.size, region.address))
        used = int(self._used[self._members_of(mask)].max()) + self._common
        total = self.bank_size * self.banks
        lines = [f"{size_text(r.size * self.banks):>10}  {r.owner}, since {r.where or 'unknown line'}" for r in held]
        more = [f"{'':>10}  and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
        return OutOfMemoryError(
            f"{owner} of {size_text(nbytes)} does not fit into {self.kind} of {size_text(total)} per device",
            where=line_text(where) or None,
            memory=f"{size_text(used)} in use, {size_text(total - used)} free, "
            f"largest free piece {size_text(gaps.largest * self.banks)}",
            owners="\n".join([*lines[:LISTED], *more]) or "nobody holds any of it",
            fix=_advice(nbytes, total, total - used),
        )


def _advice(nbytes: int, total: int, free: int) -> str:
    if nbytes > total:
        return f"shard it over {-(-nbytes // total)} devices or more: no single one can hold it"
    if nbytes <= free:
        return "free memory is in pieces: free a neighbour of the largest one, or allocate large buffers first"
    return "free an owner, or shard over more devices"
