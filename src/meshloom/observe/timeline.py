"""What was simulated as spans on tracks, and as a file in Chrome's trace format, which Perfetto opens.

One track per device and one per link. Spans of a link never overlap; where those of a device do (a collective beside
compute), the device has as many lanes as it needs.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike

import numpy as np
from numpy.typing import NDArray

DEVICES, LINKS = 1, 2  # the two processes of the trace


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on a track: a message on a link, compute or a collective on a device; in seconds."""

    track: str
    name: str
    start: float
    duration: float
    bytes: int = 0


@dataclass(frozen=True)
class Spans:
    """Spans as columns: tracks and names by number, the first `links` tracks being links and the others devices."""

    tracks: tuple[str, ...]
    links: int
    names: tuple[str, ...]
    track: NDArray[np.int64]
    name: NDArray[np.int64]
    start: NDArray[np.float64]
    duration: NDArray[np.float64]
    bytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.track)

    def rows(self) -> Iterator[tuple[int, int, float, float, int]]:
        """Track, name, start, duration and bytes, in the order of time."""
        order = np.lexsort((self.track, self.start))
        columns = (self.track, self.name, self.start, self.duration, self.bytes)
        return zip(*(column[order].tolist() for column in columns), strict=True)

    def __iter__(self) -> Iterator[Span]:
        for track, name, start, duration, size in self.rows():
            yield Span(self.tracks[track], self.names[name], start, duration, size)


def write_trace(spans: Spans, path: str | PathLike[str]) -> None:
    """The spans as a JSON file of complete events with microseconds."""
    write_events(trace_events(spans), path)


def write_events(events: Iterable[dict[str, object]], path: str | PathLike[str]) -> None:
    """Events in Chrome's trace format as a JSON file; one line per event."""
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ns", "traceEvents": [\n')
        for number, event in enumerate(events):
            file.write((",\n" if number else "") + json.dumps(event))
        file.write("\n]}\n")


def trace_events(spans: Spans) -> Iterator[dict[str, object]]:
    """Names of processes and tracks, then every span."""
    rows = list(spans.rows())
    lanes, count = _lanes(spans, rows)
    first = _first_threads(spans, count)
    yield from _titles(spans, count, first)
    for (track, name, start, duration, size), lane in zip(rows, lanes, strict=True):
        kind, process = ("link", LINKS) if track < spans.links else ("device", DEVICES)
        place = {"pid": process, "tid": first[track] + lane, "ts": start * 1e6, "dur": duration * 1e6}
        yield {"ph": "X", "cat": kind, "name": spans.names[name], **place, "args": {"bytes": size}}


def _first_threads(spans: Spans, count: Sequence[int]) -> list[int]:
    """The number of each track's first lane: links from 1, devices from 1."""
    links, devices = count[: spans.links], count[spans.links :]
    return [1 + before for part in (links, devices) for before in [0, *itertools.accumulate(part)][:-1]]


def _titles(spans: Spans, count: Sequence[int], first: Sequence[int]) -> Iterator[dict[str, object]]:
    for process, title in ((DEVICES, "devices"), (LINKS, "links")):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": title}}
    for track, title in enumerate(spans.tracks):
        process = LINKS if track < spans.links else DEVICES
        for lane in range(count[track]):
            text = title if not lane else f"{title} #{lane + 1}"
            place = {"pid": process, "tid": first[track] + lane}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": text}}


def _lanes(spans: Spans, rows: Sequence[tuple[int, int, float, float, int]]) -> tuple[list[int], list[int]]:
    """For each span a lane of its track that is free by then, and how many lanes each track has."""
    ends: list[list[tuple[float, int]]] = [[] for _ in spans.tracks]
    count, lanes = [1] * len(spans.tracks), []
    for track, _, start, duration, _ in rows:
        busy = ends[track]
        if track < spans.links or not busy:
            lane = 0
        elif busy[0][0] <= start:
            lane = heapq.heappop(busy)[1]
        else:
            lane = len(busy)
        if track >= spans.links:
            heapq.heappush(busy, (start + duration, lane))
        count[track] = max(count[track], lane + 1)
        lanes.append(lane)
    return lanes, count
