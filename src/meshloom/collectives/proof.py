"""A schedule proven without devices: contributions instead of numbers, credits instead of time.

`prove` follows which member's contribution is in which slot. A slot holds, of its own chunk, a set of members; as a
number, bit m stands for member m. It ends with what the collective means or names the step and the send that is wrong:

- a send uses a link that exists, and is the only one on that link and direction in its step;
- what is sent is there; a reduce meets something, and nothing in it twice; no slot is written twice in one step, but by
  reduces alone, which may meet (they are combined in the order of the step);
- with one buffer per link and a credit for it, and sends posted in any order, nobody waits in a circle.

`cost` counts: steps, messages, bytes by link and device, bytes in a row and the predicted time.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshloom.collectives.schedule import Schedule, Send, Step
from meshloom.errors import ArgumentError, ScheduleError, closest
from meshloom.fabric import Fabric
from meshloom.mesh import Coordinate

Slot = tuple[Coordinate, int]
State = dict[Slot, int]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found out on the way: the most chunks on their way to one member in a step, and which step that is."""

    steps: int
    sends: int
    in_flight: int
    busiest: int


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a collective starts and ends with: for each chunk, the positions of those who hold it then."""

    start: Callable[[Schedule, int], Sequence[int]]
    end: Callable[[Schedule, int], Sequence[int]]
    reduces: bool = False


def _all(schedule: Schedule, chunk: int) -> Sequence[int]:
    return range(len(schedule.group))


def _root(schedule: Schedule, chunk: int) -> Sequence[int]:
    return (schedule.root,)


def _owner(schedule: Schedule, chunk: int) -> Sequence[int]:
    return (schedule.owners[chunk],)


def _sender(schedule: Schedule, chunk: int) -> Sequence[int]:
    return (chunk // len(schedule.group),)


MEANINGS: dict[str, Meaning] = {
    "all_reduce": Meaning(_all, _all, reduces=True),
    "reduce_scatter": Meaning(_all, _owner, reduces=True),
    "reduce": Meaning(_all, _root, reduces=True),
    "all_gather": Meaning(_owner, _all),
    "gather": Meaning(_owner, _root),
    "broadcast": Meaning(_root, _all),
    "scatter": Meaning(_root, _owner),
    "all_to_all": Meaning(_sender, _owner),
}


def prove(schedule: Schedule, fabric: Fabric, *, limit: int | None = None, orders: int = 2) -> Proof:
    """What a correct schedule needs, or a ScheduleError that names the step and the send.

    `limit` bounds the chunks on their way to one member in one step; `orders` is the number of shuffled orders of
    posting that are tried besides the listed one and its reverse.

    >>> pair, links = ((0,), (1,)), Fabric.grid((2,), "line", 1e-6, 1e9)
    >>> swap = (Send((0,), (1,), 0, True), Send((1,), (0,), 0, True))
    >>> prove(Schedule("all_reduce", "swap", pair, 1, (swap,)), links)
    Proof(steps=1, sends=2, in_flight=1, busiest=0)
    """
    check_form(schedule)
    check_links(schedule, fabric)
    check_contributions(schedule)
    check_credits(schedule, orders)
    return _measure(schedule, limit)


# --- form and links ---------------------------------------------------------------------------------------------


def check_form(schedule: Schedule) -> None:
    """Raise unless the schedule's names and numbers are in range."""
    if schedule.collective not in MEANINGS:
        fix = closest(schedule.collective, MEANINGS)
        raise ScheduleError(f"{schedule.collective!r} is not a collective with a meaning", fix=fix)
    if len(set(schedule.group)) < len(schedule.group):
        raise ScheduleError("a coordinate is in the group more than once", group=schedule.group)
    if not 0 <= schedule.root < len(schedule.group):
        raise ScheduleError(f"root {schedule.root} is not a position in a group of {len(schedule.group)}")
    _check_owners(schedule)
    members = set(schedule.group)
    for number, send in _number_sends(schedule):
        _check_send(schedule, members, number, send)


def _check_owners(schedule: Schedule) -> None:
    meaning, p = MEANINGS[schedule.collective], len(schedule.group)
    if _owner in (meaning.start, meaning.end) and len(schedule.owners) != schedule.chunks:
        raise ScheduleError(f"{schedule.chunks} chunks have {len(schedule.owners)} owners")
    if any(not 0 <= owner < p for owner in schedule.owners):
        raise ScheduleError(f"an owner is not a position in a group of {p}", owners=schedule.owners)
    if schedule.collective == "all_to_all" and schedule.owners != tuple(i % p for i in range(p * p)):
        raise ScheduleError(f"chunk i*{p}+j of an all_to_all goes from i to j", owners=schedule.owners)


def _check_send(schedule: Schedule, members: set[Coordinate], number: int, send: Send) -> None:
    for place in (send.source, send.destination):
        if place not in members:
            raise _wrong(schedule, number, send, f"{place} is not in the group")
    if len(set(send.chunks)) < len(send.chunks):
        raise _wrong(schedule, number, send, "a chunk is in the message twice")
    for chunk in send.chunks:
        if not 0 <= chunk < schedule.chunks:
            raise _wrong(schedule, number, send, f"there is no chunk {chunk} of {schedule.chunks}")


def check_links(schedule: Schedule, fabric: Fabric) -> None:
    """Raise unless every send has a link, and the link to itself in its step."""
    for number, step in enumerate(schedule.steps):
        used: dict[tuple[Coordinate, Coordinate], Send] = {}
        for send in step:
            pair = (send.source, send.destination)
            if fabric.link(*pair) is None:
                way = " -> ".join(map(str, fabric.route(*pair)))
                raise _wrong(schedule, number, send, f"no link joins {pair[0]} to {pair[1]}", fix=f"go by {way}")
            if pair in used:
                raise _wrong(schedule, number, send, "the link carries two sends in one step", other=used[pair])
            used[pair] = send


def _number_sends(schedule: Schedule) -> Iterator[tuple[int, Send]]:
    return ((number, send) for number, step in enumerate(schedule.steps) for send in step)


def _wrong(schedule: Schedule, number: int, send: Send, what: str, **details: object) -> ScheduleError:
    return ScheduleError(f"step {number}, {send}: {what}", schedule=schedule, **details)


# --- contributions ----------------------------------------------------------------------------------------------


def check_contributions(schedule: Schedule) -> None:
    """Raise unless every member ends with what the collective means, each contribution once."""
    state = _start(schedule)
    for number, step in enumerate(schedule.steps):
        _advance(schedule, state, number, step)
    _check_end(schedule, state)


def _start(schedule: Schedule) -> State:
    holders = MEANINGS[schedule.collective].start
    group = schedule.group
    return {(group[m], chunk): 1 << m for chunk in range(schedule.chunks) for m in holders(schedule, chunk)}


def _advance(schedule: Schedule, state: State, number: int, step: Step) -> None:
    """One step: read everything, then write."""
    written: dict[Slot, Send] = {}
    arriving = [(send, chunk, _read(schedule, state, number, send, chunk)) for send in step for chunk in send.chunks]
    for send, chunk, value in arriving:
        slot = (send.destination, chunk)
        other = written.setdefault(slot, send)
        if other is not send and not (other.reduce and send.reduce):
            raise _wrong(
                schedule, number, send, f"chunk {chunk} at {slot[0]} is written twice in one step", other=other
            )
        state[slot] = _combine(schedule, state, number, send, chunk, value) if send.reduce else value


def _read(schedule: Schedule, state: State, number: int, send: Send, chunk: int) -> int:
    value = state.get((send.source, chunk), 0)
    if not value:
        raise _wrong(schedule, number, send, f"{send.source} holds nothing of chunk {chunk}")
    return value


def _combine(schedule: Schedule, state: State, number: int, send: Send, chunk: int, value: int) -> int:
    held = state.get((send.destination, chunk), 0)
    if not held:
        raise _wrong(schedule, number, send, f"{send.destination} holds nothing of chunk {chunk} to combine with")
    if held & value:
        twice = _names(schedule, held & value)
        raise _wrong(schedule, number, send, f"{send.destination} has chunk {chunk} of {twice} already: counted twice")
    return held | value


def _check_end(schedule: Schedule, state: State) -> None:
    meaning, group = MEANINGS[schedule.collective], schedule.group
    everyone = (1 << len(group)) - 1
    for chunk in range(schedule.chunks):
        due = everyone if meaning.reduces else 1 << meaning.start(schedule, chunk)[0]
        for m in meaning.end(schedule, chunk):
            held = state.get((group[m], chunk), 0)
            if held != due:
                raise _short(schedule, group[m], chunk, held, due)


def _short(schedule: Schedule, place: Coordinate, chunk: int, held: int, due: int) -> ScheduleError:
    last = [
        (number, send) for number, send in _number_sends(schedule) if send.destination == place and chunk in send.chunks
    ]
    return ScheduleError(
        f"{place} ends without chunk {chunk} of {_names(schedule, due & ~held)}",
        schedule=schedule,
        holds=_names(schedule, held) if held else "nothing",
        last=f"step {last[-1][0]}, {last[-1][1]}" if last else "no send brings it there",
    )


def _names(schedule: Schedule, members: int) -> str:
    names = [str(place) for m, place in enumerate(schedule.group) if members >> m & 1]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# --- bounded buffers --------------------------------------------------------------------------------------------


def check_credits(schedule: Schedule, orders: int = 2, *, seed: int = 0) -> None:
    """Raise if members could wait in a circle with one buffer per link, for any of several orders of posting.

    A member posts the sends of a step one after the other, each waiting for its link's buffer to be empty, and only
    then takes what has arrived for the step, buffer by buffer. That is the least that a device can have. Once the order
    in which each member posts is fixed, who goes first makes no difference: a buffer has one writer and one reader.
    """
    for order in _orders(orders, seed):
        stuck = _run(schedule, order)
        if stuck:
            raise ScheduleError("with one buffer per link, members wait in a circle", schedule=schedule, waits=stuck)


Order = Callable[[list[Send]], list[Send]]
Wait = tuple[str, int, Send]


def _orders(shuffles: int, seed: int) -> Iterator[Order]:
    yield list
    yield lambda sends: sends[::-1]
    for i in range(shuffles):
        generator = random.Random(f"{seed}/{i}")
        yield lambda sends, generator=generator: generator.sample(sends, len(sends))  # type: ignore[misc]


def _programs(schedule: Schedule, order: Order) -> dict[Coordinate, list[Wait]]:
    """What each member does, one after the other: of every step first its sends, then its receives."""
    programs: dict[Coordinate, list[Wait]] = {}
    for number, step in enumerate(schedule.steps):
        for send in order(list(step)):
            programs.setdefault(send.source, []).append(("send", number, send))
        for send in order(list(step)):
            programs.setdefault(send.destination, []).append(("take", number, send))
    return programs


def _run(schedule: Schedule, order: Order) -> str:
    """Run all members until nobody can go on; what they wait for, if anything is left to do."""
    programs = _programs(schedule, order)
    at = dict.fromkeys(programs, 0)
    full: set[tuple[Coordinate, Coordinate]] = set()
    awake = list(programs)
    while awake:
        member = awake.pop()
        while at[member] < len(programs[member]):
            kind, _, send = programs[member][at[member]]
            pair = (send.source, send.destination)
            if (kind == "send") == (pair in full):
                break
            full.symmetric_difference_update({pair})
            awake.append(send.destination if kind == "send" else send.source)
            at[member] += 1
    waiting = {member: program[at[member]] for member, program in programs.items() if at[member] < len(program)}
    return _circle(waiting) if waiting else ""


def _circle(waiting: Mapping[Coordinate, Wait]) -> str:
    """Who waits for whom, from one member until it comes round."""
    member, story, seen = next(iter(waiting)), [], set()
    while member in waiting and member not in seen:
        seen.add(member)
        kind, number, send = waiting[member]
        other = send.destination if kind == "send" else send.source
        story.append(f"{member} waits for {other} to {'take' if kind == 'send' else 'send'}: step {number}, {send}")
        member = other
    return "\n".join(story)


# --- counting ---------------------------------------------------------------------------------------------------


def _measure(schedule: Schedule, limit: int | None) -> Proof:
    most, busiest = 0, 0
    for number, step in enumerate(schedule.steps):
        arriving: Counter[Coordinate] = Counter()
        for send in step:
            arriving[send.destination] += len(send.chunks)
            if limit is not None and arriving[send.destination] > limit:
                count = arriving[send.destination]
                raise _wrong(schedule, number, send, f"{count} chunks are on their way to {send.destination} at once")
        if arriving and max(arriving.values()) > most:
            most, busiest = max(arriving.values()), number
    return Proof(len(schedule.steps), schedule.sends, most, busiest)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a schedule takes: `bytes` in a row (the sum over steps of the largest message) and `seconds` (of the slowest
    link); by link and by device what goes over it, out of it and into it."""

    steps: int
    messages: int
    bytes: int
    seconds: float
    links: Mapping[tuple[Coordinate, Coordinate], int]
    sent: Mapping[Coordinate, int]
    received: Mapping[Coordinate, int]


def cost(schedule: Schedule, fabric: Fabric, sizes: Sequence[int]) -> Cost:
    """Steps, messages, bytes and predicted time of a schedule whose chunks have these bytes.

    >>> pair, links = ((0,), (1,)), Fabric.grid((2,), "line", 1e-6, 1e9)
    >>> found = cost(Schedule("broadcast", "one", pair, 1, ((Send((0,), (1,), 0),),)), links, [1000])
    >>> found.steps, found.bytes, found.seconds, found.received
    (1, 1000, 2e-06, {(1,): 1000})
    """
    if len(sizes) != schedule.chunks:
        raise ArgumentError(f"{len(sizes)} sizes for {schedule.chunks} chunks", fix="give the bytes of each chunk")
    links: dict[tuple[Coordinate, Coordinate], int] = {}
    row, seconds = 0, 0.0
    for number, step in enumerate(schedule.steps):
        messages = [(send, _size(send, sizes)) for send in step]
        row += max((size for _, size in messages), default=0)
        seconds += max((_seconds(schedule, fabric, number, send, size) for send, size in messages), default=0.0)
        for send, size in messages:
            pair = (send.source, send.destination)
            links[pair] = links.get(pair, 0) + size
    sent, received = _by_device(links)
    return Cost(len(schedule.steps), schedule.sends, row, seconds, links, sent, received)


def _size(send: Send, sizes: Sequence[int]) -> int:
    return sum(sizes[chunk] for chunk in send.chunks)


def _seconds(schedule: Schedule, fabric: Fabric, number: int, send: Send, size: int) -> float:
    link = fabric.link(send.source, send.destination)
    if link is None:
        raise _wrong(schedule, number, send, f"no link joins {send.source} to {send.destination}")
    return link.time(size)


def _by_device(
    links: Mapping[tuple[Coordinate, Coordinate], int],
) -> tuple[dict[Coordinate, int], dict[Coordinate, int]]:
    sent: dict[Coordinate, int] = {}
    received: dict[Coordinate, int] = {}
    for (source, destination), size in links.items():
        sent[source] = sent.get(source, 0) + size
        received[destination] = received.get(destination, 0) + size
    return sent, received
