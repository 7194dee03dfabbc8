"""Links between cards: bounded slots, a credit for each, and sequence numbers.

A `Channel` is one direction of a link. At its end there are a few slots. Who sends needs a credit, of which there are
as many as slots; who receives gives it back when the slot is empty again. So nothing that is still needed is ever
overwritten, however slow either side is. Messages are numbered, and one that is not the next is an error. No data comes
near the host: it tells the two cards when, and waits for them.

    sender                                          receiver
    wait for a credit
    copy into slot n % slots, wait for the card
    post "arrived"            ------------------>   wait for "arrived"
                                                    check number and length
                                                    copy (or add) out of the slot, wait for the card
                              <------------------   post the credit
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from meshloom.errors import DeviceError, DeviceTimeoutError, FabricError
from meshloom.fabric import VIRTUAL, Fabric, Link
from meshloom.mesh import Coordinate
from meshloom.runtime.card import LinkedCard


class Semaphore:
    """A number that one side posts to and the other takes from, never below zero.

    >>> credits = Semaphore(1)
    >>> credits.take(), credits.value, credits.is_ready
    (None, 0, False)
    """

    def __init__(self, value: int = 0) -> None:
        self._value = value
        self._changed = threading.Condition()

    @property
    def value(self) -> int:
        """How often it can be taken now."""
        return self._value

    @property
    def is_ready(self) -> bool:
        """Whether taking would not wait."""
        return self._value > 0

    def post(self) -> None:
        """One more."""
        with self._changed:
            self._value += 1
            self._changed.notify()

    def take(self, timeout: float | None = None, what: str = "a post") -> None:
        """One less, as soon as there is one."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._value > 0, timeout):
                raise DeviceTimeoutError(f"{what} did not come within {timeout:g} s")
            self._value -= 1


@dataclass(frozen=True, slots=True)
class Message:
    """What is known of a message without its data: its number, the slot it is in, and how many elements it has."""

    sequence: int
    slot: int
    elements: int


class Channel:
    """One direction of a link between two cards. One thread may send while another receives."""

    def __init__(self, source: Any, destination: Any) -> None:
        self.source, self.destination = source, destination
        self._from, self._to = source.info().index, destination.info().index
        self.slots, self.slot_size = destination.slots(self._from)
        self.credits, self.arrived = Semaphore(self.slots), Semaphore(0)
        self._sent = self._taken = 0
        self._messages: deque[Message] = deque()
        self._broken = ""

    def __repr__(self) -> str:
        return f"Channel(card {self._from} to card {self._to}, {self.slots} slots of {self.slot_size} B)"

    def start_send(
        self, handle: Any, index: Any, start: int, stop: int, timeout: float | None = None
    ) -> Callable[[], None]:
        """Wait for a credit and start a message; the function that comes back waits for it and posts its arrival."""
        self._check()
        self.credits.take(timeout, f"a free slot from card {self._from} to card {self._to}")
        message = Message(self._sent, self._sent % self.slots, stop - start)
        self._sent += 1
        with _Breaking(self):
            ticket = self.source.send(handle, index, start, stop, self._to, message.slot)

        def finish() -> None:
            with _Breaking(self):
                self._wait(self.source, ticket, timeout, f"message {message.sequence}")
            self._messages.append(message)
            self.arrived.post()

        return finish

    def send(self, handle: Any, index: Any, start: int, stop: int, timeout: float | None = None) -> None:
        """Send elements `start` to `stop` of what an index names in memory, as soon as there is room."""
        self.start_send(handle, index, start, stop, timeout)()

    def receive(
        self, handle: Any, index: Any, start: int, stop: int, op: str | None = None, timeout: float | None = None
    ) -> None:
        """Take the next message into memory, as soon as it is there; with an `op`, combine it with what is there."""
        self._check()
        self.arrived.take(timeout, f"message {self._taken} from card {self._from} to card {self._to}")
        message = self._messages.popleft()
        with _Breaking(self):
            if (message.sequence, message.elements) != (self._taken, stop - start):
                raise DeviceError(
                    f"card {self._to} expected message {self._taken} of {stop - start} elements from card {self._from}"
                    f" and got message {message.sequence} of {message.elements}",
                    fix="send and receive in the same order and sizes on both sides",
                )
            ticket = self.destination.receive(handle, index, start, stop, self._from, message.slot, op)
            self._wait(self.destination, ticket, timeout, f"message {message.sequence}")
        self._taken += 1
        self.credits.post()

    def _wait(self, card: Any, ticket: Any, timeout: float | None, what: str) -> None:
        if not card.wait(ticket, timeout):
            late = "" if timeout is None else f" within {timeout:g} s"
            raise DeviceTimeoutError(f"{what} from card {self._from} to card {self._to} did not end{late}")

    def _check(self) -> None:
        if self._broken:
            raise DeviceError(
                f"the link from card {self._from} to card {self._to} is broken: {self._broken}",
                fix="close the mesh device and open it again",
            )


class _Breaking:
    """Whoever fails inside leaves the channel broken: nobody knows what is in its slots."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._channel._broken = str(error).partition("\n")[0]


class Routes:
    """The channels between cards, made when they are first used, and what went over them."""

    def __init__(self) -> None:
        self._channels: dict[tuple[Any, Any], Channel] = {}
        self.messages = self.bytes = 0
        self.lock = threading.RLock()  # one collective at a time: two queues may want to use a link

    def channel(self, source: Any, destination: Any) -> Channel:
        """The channel from one card to another."""
        pair = (source, destination)
        if pair not in self._channels:
            self._channels[pair] = Channel(source, destination)
        return self._channels[pair]


def discover_links(cards: Mapping[Coordinate, Any], shape: tuple[int, ...]) -> Fabric:
    """The links between the cards of a mesh, as they say themselves; one that has no way back is an error."""
    places = {card.info().index: place for place, card in cards.items()}
    found: set[tuple[Coordinate, Coordinate]] = set()
    for place, card in cards.items():
        if not isinstance(card, LinkedCard):
            raise FabricError(f"the card at {place} has no links", card=card.info().path, fix='use mode="host"')
        found |= {(place, places[peer]) for peer in card.peers() if peer in places}
    for one, other in sorted(found):
        if (other, one) not in found:
            raise FabricError(f"the card at {one} has a link to {other}, and the one there has none back")
    links = [Link(one, other, VIRTUAL.latency, VIRTUAL.bandwidth) for one, other in sorted(found)]
    return Fabric.of(shape, links, name="cards")
