"""One program on every process: ranks compare what they do before they do it together.

Every collective adds to a running hash: its number and kind, the op, which tensors it works on, shapes, random keys,
values of plain tensors. Before a collective that is checked, all processes exchange a frame of fixed size with that
hash; the data of a small collective travels in the same frame, so that the check costs no call of its own. The hash is
of everything since the start: what differed between two checks is found by the next one, or at the end of the program.
Different hashes are a `DivergenceError` on every process that shows both sides. `check="always"` compares every
collective and every call, "sample" the first ones and then some. Lines of the program are told and not compared: the
same call may stand in two places.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from meshloom.comms.group import WORLD, Group, Story, World
from meshloom.comms.wire import gather_into
from meshloom.engines.layout import view_bytes
from meshloom.errors import DivergenceError, where
from meshloom.mesh import HERE
from meshloom.processes.health import RECENT, Told

FIRST = 64  # collectives that "sample" compares one by one
EVERY = 64  # and then one of so many
ROOM = 1024  # bytes of data that a frame has room for
SAMPLED = 256  # elements of a plain tensor that are compared at every use
VIEWS = 256  # views of a plain tensor whose sums are kept
_HEAD = 16
SLICE = timedelta(seconds=0.25)  # how long a wait lasts before it looks whether another process has failed


STORY = WORLD.story


def is_listening(world: World = WORLD) -> bool:
    """Whether calls that do not communicate are written down too."""
    if world.watch is None or world.check == "off" or world.is_muted:
        return False
    return world.check == "always" or (world.story_of() if world.within else world.story).number < FIRST


def is_compared(world: World = WORLD) -> bool:
    """Whether this process compares what it does with others at all."""
    return world.watch is not None and world.check != "off" and not world.is_muted


def note(text: str, line: str, ranks: tuple[int, ...] = ()) -> None:
    """Write down something that all processes must do alike, or those of a submesh; the next check compares it."""
    WORLD.story_of(ranks).add(text)
    WORLD.watch.tell(text, line)


def note_collective(kind: str, sent: torch.Tensor, story: Story = STORY) -> None:
    """Write down the collective that begins."""
    text = f"{kind} {story.number} of {WORLD.watch.call} {STORY.identity:x} {sent.dtype} {tuple(sent.shape)}"
    story.add(text)


def note_data(what: str, data: torch.Tensor, ranks: tuple[int, ...] = ()) -> None:
    """Write down a plain tensor, which counts as replicated: its values must be the same everywhere.

    While every call is compared all of its values count, else some of them, so that it costs next to nothing.
    """
    is_whole = is_listening() or data.numel() <= SAMPLED
    if data.is_inference():  # whose versions nobody counts
        text = _describe_data(what, data, is_whole)
    else:
        told = _told_of(data)
        key = is_whole, what, data.data_ptr(), data.dtype, data.shape, data.stride()
        text = told[key] = told.get(key) or _describe_data(what, data, is_whole)
    note(text, where(), ranks)


def _told_of(data: torch.Tensor) -> dict[object, str]:
    """What was said of a tensor and of its views as it is now: what layer after layer uses is summed up once."""
    home: Any = data if data._base is None else data._base
    version, told = getattr(home, "_told", (None, {}))
    if version != data._version or len(told) >= VIEWS:
        version, told = home._told = data._version, {}
    return told


def _describe_data(what: str, data: torch.Tensor, is_whole: bool) -> str:
    return f"{PLAIN} {what} {tuple(data.shape)} {checksum(data if is_whole else some_of(data)):08x}"


def some_of(data: torch.Tensor) -> torch.Tensor:
    """Elements from all over a tensor, at a distance that no power of two divides."""
    flat = data.detach().reshape(-1) if data.is_contiguous() else data.detach().flatten()[: 1 << 16]
    return flat[:: (flat.numel() // SAMPLED) | 1]


def checksum(data: torch.Tensor) -> int:
    """A number that equal values share; 0.0 and -0.0 are equal.

    >>> checksum(torch.tensor([0.0])) == checksum(torch.tensor([-0.0]))
    True
    """
    if data.is_meta or data.layout != torch.strided:
        return 0
    values = data.detach().cpu().resolve_conj()
    values = values + 0.0 if values.is_floating_point() or values.is_complex() else values
    return zlib.crc32(view_bytes(values).numpy().data)


PLAIN = "plain tensor"


def is_checked(story: Story = STORY) -> bool:
    """Whether the collective that begins is compared."""
    if WORLD.check == "sample":
        return bool(story.number <= FIRST or story.number % EVERY == 0)
    return WORLD.check == "always"


class Frame:
    """What processes exchange before a checked collective: the hash, and the data itself where it is small."""

    def __init__(self, data: torch.Tensor, story: Story = STORY) -> None:
        size = data.numel() * data.element_size()
        self.carries = data.device.type == "cpu" and size <= ROOM
        self.like, self.size = data, size
        self.sent = torch.zeros(_HEAD + ROOM, dtype=torch.uint8)
        self.sent[:8] = torch.frombuffer(bytearray(story.hash.to_bytes(8, "little")), dtype=torch.uint8)
        self.sent[8] = self.carries
        if self.carries:
            self.sent[_HEAD : _HEAD + size] = view_bytes(data)
        self.ranks, self.number = story.ranks or tuple(range(HERE.count)), story.number  # who compares
        self.room = torch.empty(len(self.ranks), _HEAD + ROOM, dtype=torch.uint8)

    def start(self) -> Any:
        """Begin the exchange."""
        assert WORLD.control is not None
        is_part = self.ranks != WORLD.control.ranks
        handle = WORLD.connect(self.ranks, True, "check") if is_part else WORLD.control.handle
        return gather_into(self.room, self.sent, handle, self.ranks.index(HERE.rank))

    def compare(self) -> None:
        """An error on every process unless all do the same."""
        heads = {bytes(row[:9].tolist()) for row in self.room}
        if len(heads) > 1:
            found = {rank: bytes(row[:8].tolist()) for rank, row in zip(self.ranks, self.room, strict=True)}
            raise _divergence(found, self.number)

    def parts(self, group: Group) -> torch.Tensor:
        """The data of every process of a group, stacked."""
        rows = [self.room[self.ranks.index(rank)] for rank in group.ranks]
        held = [row[_HEAD : _HEAD + self.size].clone().view(self.like.dtype) for row in rows]
        return torch.stack(held).view(group.processes, *self.like.shape)


class UnderWay:
    """A collective that has begun: what it is called, and what ends it."""

    __slots__ = ("_said", "_work")

    def __init__(self, work: Any, watch: Any) -> None:
        self._work, self._said = work, watch.said()
        watch.works.append(work)  # until it has ended, or for good if it is given up

    def wait(self) -> None:
        """Return at its end, or raise with the story of all processes."""
        watch, work = WORLD.watch, self._work
        watch.return_to(self._said)
        try:
            wait(work, watch)
        except RuntimeError as error:
            raise watch.explained(error) from None
        watch.leave()

    def has_ended(self) -> bool:
        """Whether it has; nobody needs to wait for it then."""
        watch, work = WORLD.watch, self._work
        if work.is_completed() and work in watch.works:
            self.wait()
        return work not in watch.works


class Ended:
    """A collective that came with its check: it has ended."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


def begin(
    kind: str, group: Group, sent: torch.Tensor, start: Callable[[], object], combine: Callable[[torch.Tensor], None]
) -> UnderWay | Ended:
    """Begin one collective; wait for what comes back, in the order of beginning or any other.

    `start` begins it in torch. A small one that is checked travels with the check: `combine` then makes the result of
    what every process of the group sent.
    """
    watch, story = WORLD.watch, WORLD.story_of(group.mesh.ranks)
    watch.enter(kind)
    story.number += 1
    watch.tell(describe(f"{kind} of {watch.of}", STORY.identity), watch.line)
    try:
        if is_compared():
            note_collective(kind, sent, story)
        if is_checked(story):
            frame = Frame(sent, story)
            watch.works.append(work := frame.start())
            wait(work, watch)
            frame.compare()
            if frame.carries:
                combine(frame.parts(group))
                watch.leave()
                return Ended()
        under_way = UnderWay(start(), watch)
    except RuntimeError as error:
        raise watch.explained(error) from None
    watch.leave()
    return under_way


def begin_message(kind: str, start: Callable[[], object]) -> UnderWay:
    """Begin a message between two processes; nothing is compared but what the message says of itself."""
    watch = WORLD.watch
    watch.enter(kind)
    try:
        under_way = UnderWay(start(), watch)
    except RuntimeError as error:
        raise watch.explained(error) from None
    watch.leave()
    return under_way


def seconds_waited() -> float:
    """How long this process has waited for collectives with others, in all: communication that no work has hidden.

    The difference over a step is its exposed communication; one process alone never waits.

    >>> seconds_waited()
    0.0
    """
    return float(WORLD.watch.waited) if WORLD.watch is not None else 0.0


def wait(work: Any, watch: Any) -> None:
    """Wait for the end of a collective, a slice at a time, for as long as nobody has failed."""
    begin = time.monotonic()
    while True:
        try:
            work.wait(SLICE)
            break
        except RuntimeError as error:
            if work.is_completed() and "timed out" not in str(error).lower():
                raise
            if work.is_completed():
                work.wait()
                break
            watch.look(begin)
    watch.works.remove(work)
    watch.waited += time.monotonic() - begin


def _divergence(hashes: dict[int, bytes], number: int) -> DivergenceError:
    told = _told_apart(WORLD.watch.stories(number, tuple(hashes)))
    is_plain = any(PLAIN in text for text, _ in told.values())
    plainly = {rank: (text.split(_TENSOR)[0], line) for rank, (text, line) in told.items()}
    what = "a plain tensor, which counts as replicated, differs" if is_plain else "the processes do different things"
    if len({text for text, _ in plainly.values()}) == 1 and not is_plain:
        what = "the processes do the same on different tensors"
    else:
        told = plainly
    calls = {rank: f"rank {rank}: {_spell(*told.get(rank, ('silent', '')))}" for rank in hashes}
    sides = [[rank for rank, each in hashes.items() if each == side] for side in dict.fromkeys(hashes.values())]
    error: DivergenceError = WORLD.watch.diverged(
        f"{what}: {', but '.join(calls[side[0]] for side in sides)}",
        sides=" against ".join(_ranks(side) for side in sides),
        calls="\n".join(calls.values()),
        fix=_FIX_DATA if is_plain else _FIX_CALLS,
    )
    return error


def compare_at_end() -> None:
    """Compare what came after the last check; who leaves last sees all. An exit code says so: the program has ended."""
    watch = WORLD.watch
    if not is_compared() or watch.failure is not None:
        return
    ends = watch.ends(f"{STORY.number} collectives, hash {STORY.hash:08x}")
    if len({*ends.values()}) > 1:
        error = watch.diverged(
            "the processes did different things after the last check",
            ends="\n".join(f"rank {rank}: {told}" for rank, told in ends.items()),
            fix='check="always" (or MESHLOOM_CHECK=always) finds the first call that differs',
        )
        print(f"DivergenceError: {error}", file=sys.stderr, flush=True)
        os._exit(1)


_TENSOR = " of tensor "


def describe(text: str, identity: int) -> str:
    """A call with the tensors that it works on, as stories are compared."""
    return f"{text}{_TENSOR}{identity:x}" if identity else text


def _spell(text: str, line: str) -> str:
    return f"{text} at {line}" if line else text


_FIX_DATA = "give what each process holds to loom.from_local, or make it the same everywhere: seed every rank alike"
_FIX_CALLS = "every rank runs the same calls in the same order; branch on values that all of them share"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _told_apart(stories: dict[int, list[Told]]) -> dict[int, tuple[str, str]]:
    """For each process the first call in which the stories differ, and its line, from where all of them remember.

    >>> _told_apart({0: [(1, "sum", "a.py:1"), (1, "amax", "a.py:2")], 1: [(1, "sum", ""), (1, "amin", "a.py:2")]})
    {0: ('amax', 'a.py:2'), 1: ('amin', 'a.py:2')}
    """
    start = max((_count_remembered(each) for each in stories.values()), default=0)
    kept = {rank: [(text, line) for number, text, line in each if number >= start] for rank, each in stories.items()}
    longest = max((len(each) for each in kept.values()), default=0)
    for i in range(longest):
        here = {rank: each[i] if i < len(each) else ("nothing more", "") for rank, each in kept.items()}
        if len({text for text, _ in here.values()}) > 1:
            return here
    return {rank: each[-1] if each else ("nothing", "") for rank, each in kept.items()}


def _count_remembered(story: list[Told]) -> int:
    """The first collective of which a story has everything; a full one has lost the beginning of its oldest."""
    oldest = story[0][0] if story else 0
    return oldest + 1 if len(story) >= RECENT else oldest
