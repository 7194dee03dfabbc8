"""Records of communication, and the per-thread state that dispatch looks at.

`state.plain` is all that the hot path reads: it is True while nobody watches, asks or forbids anything.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meshloom.collectives import Collective
from meshloom.errors import ArgumentError, CommunicationError, closest
from meshloom.fabric import VIRTUAL, Fabric, Machine
from meshloom.placement import Placements

LEVELS = ("allow", "warn", "forbid")


class CommunicationWarning(UserWarning):
    """Communication above the limit of `communication("warn")`."""


class FallbackWarning(UserWarning):
    """A function without a rule gathered its operands; said once per function and line."""


@dataclass(frozen=True, slots=True)
class Event:
    """One collective that an op caused, with the line of the program that called the op."""

    collective: Collective
    call: str
    where: str
    phase: str = "forward"
    host: int = 0  # bytes that went through the host

    @property
    def bytes(self) -> int:
        """The bytes that one device receives."""
        return self.collective.bytes

    @property
    def kind(self) -> str:
        """The collective's name."""
        return self.collective.kind

    @property
    def axis(self) -> str:
        """The mesh axis it goes over."""
        return self.collective.axis

    def __str__(self) -> str:
        backward = " backward" if self.phase == "backward" else ""
        return f"{self.collective} for {self.call}{backward} at {self.where}"


@dataclass(frozen=True, slots=True)
class HostTransfer:
    """Bytes between the host and cards that have memory of their own, with the line of the program that caused it.

    >>> print(HostTransfer("host read", 4096, 4, "softmax", "train.py:12"))
    host read of 4096 B from 4 cards for softmax at train.py:12
    """

    kind: str  # "host read" or "host write"
    bytes: int  # of all cards together
    cards: int
    call: str
    where: str
    phase: str = "forward"

    def __str__(self) -> str:
        way = "from" if self.kind == "host read" else "to"
        backward = " backward" if self.phase == "backward" else ""
        cards = f"{self.cards} card{'' if self.cards == 1 else 's'}"
        return f"{self.kind} of {self.bytes} B {way} {cards} for {self.call}{backward} at {self.where}"


@dataclass
class Log:
    """What happened while it was open.

    `calls` are the planned calls in order (plans, or a text for a call that went through the fallback), `pending` the
    sums of leaves that `accumulate` holds back, `transfers` what went between the host and cards with memory of their
    own.
    """

    events: list[Event] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    fallbacks: Counter[str] = field(default_factory=Counter)
    pending: list[Event] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)  # for each call, how many events there were before its own
    transfers: list[HostTransfer] = field(default_factory=list)
    assumed: dict[str, str] = field(default_factory=dict)  # what was taken for granted where there were no values

    def begin_call(self, call: object, where: str, tensors: Sequence[Any]) -> None:
        """A planned call is about to run; a log of collectives waits until it has."""

    def note_tensor(self, tensor: Any) -> None:
        """A tensor is about to be used outside of a planned call: moved, read, or in a list of an optimizer."""

    def note_call(self, call: object, where: str) -> None:
        """Write a call down before its events."""
        self.calls.append((call, where))
        self.marks.append(len(self.events))

    def end_call(self, results: Sequence[Any]) -> None:
        """The call has run and told its events; these are its arrays."""

    def begin_fallback(self, name: str, where: str, tensors: Sequence[Any]) -> None:
        """A function without a rule is about to run on these tensors, gathered: every device does all of it."""

    def end_fallback(self) -> None:
        """It has run, or failed."""

    def abandon_call(self) -> None:
        """The call did not come to its end: an error, or a checkpoint that has recomputed enough."""

    def note_events(self, events: Sequence[Event], of: Any = None, first: bool = False) -> None:
        """Write collectives down: `of` is the tensor that they move, or the graph node that waits for its gradient.

        In backward it is the leaf whose gradient they move, or the array of a leaf that they gather again.

        `first` says that the call itself waits for them.
        """
        self.events.extend(events)

    def note_move(self, tensor: Any, target: Any, data: Any) -> None:
        """The program has redistributed a tensor: to which topology, and the array that came of it."""

    def note_transfer(self, transfer: HostTransfer) -> None:
        """Bytes went between the host and cards."""
        self.transfers.append(transfer)

    def note_sent(self, kind: str, processes: int, size: int) -> None:
        """A collective between processes is about to run, of so many bytes of this one."""

    @property
    def bytes(self) -> int:
        """The bytes that one device received in all."""
        return sum(event.bytes for event in self.events)

    @property
    def host_bytes(self) -> int:
        """The bytes that went through the host."""
        return sum(event.host for event in self.events) + sum(each.bytes for each in self.transfers)

    def kinds(self) -> Counter[str]:
        """How often each collective ran."""
        return Counter(event.kind for event in self.events)

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __str__(self) -> str:
        lines = [str(event) for event in self.events]
        lines += [f"fallback: {name} x{count}" for name, count in self.fallbacks.items()]
        lines += map(str, self.transfers)
        return "\n".join([*lines, f"{len(self.events)} collectives, {self.bytes} B per device"])


@dataclass(frozen=True, slots=True)
class Policy:
    """What `communication(...)` asked for."""

    level: str
    above: int = 0

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ArgumentError(f"communication level {self.level!r} is not known", fix=closest(self.level, LEVELS))

    def check(self, events: Iterable[Event]) -> None:
        """Raise or warn before anything moves."""
        found = [event for event in events if event.bytes > (self.above if self.level == "warn" else 0)]
        if not found or self.level == "allow":
            return
        size = sum(event.bytes for event in found)
        first = found[0]
        if self.level == "forbid":
            raise CommunicationError(
                f"{first.call} would communicate {size} B per device where communication is forbidden",
                where=first.where,
                moves="\n".join(str(event.collective) + f" ({event.phase})" for event in found),
                fix="place the operands so that they line up, ask for another output, or allow it here",
            )
        warnings.warn(f"{first.call} communicates {size} B at {first.where}", CommunicationWarning, stacklevel=3)

    def check_transfer(self, transfer: HostTransfer) -> None:
        """Raise or warn before an op goes through the host."""
        if self.level == "allow" or transfer.bytes <= (self.above if self.level == "warn" else 0):
            return
        if self.level == "forbid":
            raise CommunicationError(
                f"{transfer.call} would move {transfer.bytes} B through the host where communication is forbidden",
                where=transfer.where,
                moves=f"{transfer.kind} ({transfer.phase})",
                fix="use a driver that offers a kernel for it, place the operands so that its kernel fits, "
                "or allow it here",
            )
        warnings.warn(
            f"{transfer.call} moves {transfer.bytes} B through the host at {transfer.where}",
            CommunicationWarning,
            stacklevel=3,
        )


class State(threading.local):
    """What dispatch must know besides the call; one per thread."""

    plain = True
    policy: Policy | None = None
    logs: tuple[Log, ...] = ()
    shadows: Any = None
    output: Placements | None = None
    chosen: dict[str, str] | None = None
    machine: Machine = VIRTUAL
    fabric: Fabric | None = None
    stress: Any = None
    capture: Any = None  # the trace that array calls of this thread go into
    checked = False  # every call is compared with those of the other processes
    accumulating = False  # sums of gradients wait
    keeps_scores = False  # attention without data writes all scores down, as a machine without a fused kernel does
    waiting: dict[int, Any] = {}  # leaves with sums that are told and not carried out, by id, of all threads
    asked: dict[int, Any] | None = None  # the sums of leaves whose gradients `torch.autograd.grad` gives
    is_restricted = False  # communication may be refused or warned of
    watching = False  # communication is logged or restricted

    @contextmanager
    def changed(self, **values: object) -> Iterator[None]:
        """The state with other values for the length of a block."""
        before = {name: getattr(self, name) for name in values}
        self._set(values)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, values: dict[str, object]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.is_restricted = self.policy is not None and self.policy.level != "allow"
        self.watching = bool(self.logs) or self.is_restricted
        special = self.watching or self.shadows is not None or self.output is not None or bool(self.chosen)
        self.plain = not special and self.machine is VIRTUAL and not self.checked

    def check(self, events: Iterable[Event]) -> None:
        """Let the policy object before anything is done."""
        if self.policy is not None:
            self.policy.check(events)

    def tell_transfer(self, transfer: HostTransfer, is_asked: bool) -> None:
        """Bytes are about to go between the host and cards; those that the program asked for are never refused."""
        if self.policy is not None and not is_asked:
            self.policy.check_transfer(transfer)
        for log in self.logs:
            log.note_transfer(transfer)

    def assume(self, what: str, value: str) -> None:
        """Write into every open log what is taken for granted because there are no values to look at."""
        for log in self.logs:
            log.assumed[what] = value

    def log(self, events: Iterable[Event], of: Any = None, first: bool = False) -> None:
        """Write what was done into every open log; `of` and `first` as in `Log.note_events`."""
        listed = list(events)
        for log in self.logs:
            log.note_events(listed, of, first)


state = State()
