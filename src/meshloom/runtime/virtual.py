"""Virtual cards of this process: memory is torch's, a kernel is a Python function, and speed and faults are up to you.

A card without delays and faults is *plain*: the mesh may then do one array call on the block for all cards at once.
A card that is slowed down is busy for that long after each command, beside the others, without a thread of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from meshloom.engines.reductions import REDUCTIONS
from meshloom.errors import ArgumentError, DeviceError, closest, expect, expect_seconds
from meshloom.runtime.card import CardInfo, Kernel
from meshloom.runtime.chips import HOST, Chip
from meshloom.runtime.compile_cache import link, translate
from meshloom.types import Shape

COMMANDS = ("write", "read", "launch", "send", "receive")
SLOTS, SLOT_SIZE = 2, 1 << 20
KINDS = ("raise", "hang", "kill")


@dataclass
class Fault:
    """What goes wrong: on which command, after how many good ones, how often; it raises, never ends, or kills the card.

    Only a card in a process of its own can be killed.
    """

    on: str
    kind: str = "raise"
    after: int = 0
    times: int | None = None

    def __post_init__(self) -> None:
        for value, known in ((self.on, COMMANDS), (self.kind, KINDS)):
            if value not in known:
                raise ArgumentError(f"there is no fault {value!r}", fix=closest(value, known))

    def strikes(self) -> bool:
        """Whether it happens now; every call counts."""
        if self.after:
            self.after -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return self.times is None or self.times >= 0


@dataclass(slots=True)
class Ticket:
    """A launch: when it ends, by the card's clock."""

    ends: float


class Clock:
    """The time that cards go by: this machine's."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


class SimulatedClock(Clock):
    """Time that passes only when somebody waits: figures that do not depend on how busy this machine is.

    >>> clock = SimulatedClock()
    >>> clock.sleep(3600); clock.now()
    3600.0
    """

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds


class ImitatedCard:
    """What all virtual cards have, wherever they live: a driver, an id, faults and delays."""

    def __init__(self, driver: ImitatedDriver, index: int) -> None:
        self._driver, self._index = driver, index
        self._faults: list[Fault] = []
        self._delays: dict[str, float] = {}
        self.closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._index})"

    def info(self) -> CardInfo:
        """What it is."""
        return CardInfo(self._index, f"{self._driver.name}:{self._index}", self._driver.chip)

    def inject(self, fault: Fault) -> None:
        """Let something go wrong from now on."""
        self._faults.append(fault)
        self._driver.special.add(self._index)

    def slow_down(self, **seconds: float) -> None:
        """Let each command of a kind take so long: `slow_down(launch=0.01)`."""
        for name in seconds:
            if name not in COMMANDS:
                raise ArgumentError(f"a card has no command {name!r}", fix=closest(name, COMMANDS))
            expect_seconds(name, seconds[name])
        self._delays.update(seconds)
        self._driver.special.add(self._index)

    def recover(self) -> None:
        """No faults and no delays any more."""
        self._faults.clear()
        self._delays.clear()
        self._driver.special.discard(self._index)

    def _check_open(self) -> None:
        if self.closed:
            raise DeviceError(f"card {self._index} is closed")


class VirtualCard(ImitatedCard):
    """A device in this process.

    >>> card = VirtualDriver().open(0)
    >>> memory = card.alloc(0, (2,), torch.float32)
    >>> card.write(memory, torch.tensor([1.0, 2.0]))
    >>> double = card.load(translate(lambda x: x.mul_(2)), lambda x: x.mul_(2))
    >>> card.wait(card.launch(double, [memory], {}), timeout=1.0), card.read(memory)
    (True, tensor([2., 4.]))
    """

    _driver: VirtualDriver

    def __init__(self, driver: VirtualDriver, index: int) -> None:
        super().__init__(driver, index)
        self._clock = driver.clock
        self._busy_until = 0.0
        self.hangs = False

    def alloc(self, address: int, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        self._check_open()
        return torch.zeros(shape, dtype=dtype)

    def free(self, handle: torch.Tensor) -> None:
        """Nothing to do: the array goes with its last reference."""

    def write(self, handle: torch.Tensor, data: torch.Tensor, index: Any = ...) -> None:
        self._begin("write")
        handle[index] = data

    def read(self, handle: torch.Tensor, index: Any = ...) -> torch.Tensor:
        self._begin("read")
        return handle[index].clone()

    def load(self, binary: bytes, kernel: Kernel) -> Kernel:
        return link(binary, kernel)

    def launch(self, loaded: Kernel, handles: Sequence[torch.Tensor], args: Mapping[str, object]) -> Ticket:
        ends = self._begin("launch")
        if not self.hangs:
            loaded(*handles, **args)
        return Ticket(ends)

    def wait(self, ticket: Ticket, timeout: float | None) -> bool:
        left = ticket.ends - self._clock.now()
        if timeout is not None and left > timeout:
            self._clock.sleep(timeout)
            return False
        if left > 0:
            self._clock.sleep(left)
        return True

    def close(self) -> None:
        self.closed = True
        self.reset()

    # links: every card has one to every other of its driver

    def peers(self) -> Sequence[int]:
        return [index for index in self._driver.opened if index != self._index]

    def slots(self, peer: int) -> tuple[int, int]:
        return SLOTS, SLOT_SIZE

    def send(self, handle: torch.Tensor, index: Any, start: int, stop: int, peer: int, slot: int) -> Ticket:
        ends = self._begin("send")
        self._driver.messages[self._index, peer, slot] = handle[index].reshape(-1)[start:stop].clone()
        return Ticket(ends)

    def receive(
        self, handle: torch.Tensor, index: Any, start: int, stop: int, peer: int, slot: int, op: str | None
    ) -> Ticket:
        ends = self._begin("receive")
        message = self._driver.messages.pop((peer, self._index, slot), None)
        if message is None:
            raise DeviceError(f"card {self._index} has no message of card {peer} in slot {slot}")
        take_message(handle[index], start, stop, message, op)
        return Ticket(ends)

    def copy(self, source: torch.Tensor, source_index: Any, target: torch.Tensor, target_index: Any) -> Ticket:
        ends = self._begin("launch")
        target[target_index] = source[source_index]
        return Ticket(ends)

    # what only a virtual card can do

    def inject(self, fault: Fault) -> None:
        """Let something go wrong from now on."""
        if fault.kind == "kill":
            raise ArgumentError(f"card {self._index} lives in this process", fix='open it with driver="processes"')
        super().inject(fault)

    def reset(self) -> None:
        """A card as new: no faults, no delays, nothing running."""
        self.recover()
        self.hangs, self._busy_until = False, 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a command is running on it."""
        return self._busy_until > self._clock.now()

    def _begin(self, command: str) -> float:
        """When the command ends: after what the card is doing, and after its own delay. Or a fault."""
        self._check_open()
        if self.hangs:
            raise DeviceError(f"card {self._index} hangs in an earlier launch", fix="reset it: card.reset()")
        self._busy_until = max(self._busy_until, self._clock.now()) + self._delays.get(command, 0.0)
        for fault in self._faults:
            if fault.on == command and fault.strikes():
                self._strike(fault, command)
        if command != "launch" and self.is_busy:
            self._clock.sleep(max(0.0, self._busy_until - self._clock.now()))
        return self._busy_until

    def _strike(self, fault: Fault, command: str) -> None:
        if fault.kind == "raise":
            raise DeviceError(f"card {self._index} failed in a {command}")
        self.hangs, self._busy_until = True, float("inf")
        if command != "launch":
            raise DeviceError(f"card {self._index} does not answer to a {command}", fix="reset it: card.reset()")


def take_message(region: torch.Tensor, start: int, stop: int, message: torch.Tensor, op: str | None) -> None:
    """Put a message into the elements `start` to `stop` of some memory, or combine it with what is there."""
    flat = region.view(-1) if region.is_contiguous() else region.reshape(-1).clone()
    flat[start:stop] = message if op is None else REDUCTIONS[op].combine(flat[start:stop], message)
    if not region.is_contiguous():
        region.copy_(flat.view(region.shape))


class ImitatedDriver:
    """What all drivers of virtual cards have: ids or no end of them, and a chip."""

    name: ClassVar[str]

    def __init__(self, ids: Iterable[int] | None, chip: Chip) -> None:
        if ids is not None:
            expect("ids", ids, Iterable, fix="give the ids of the cards, such as range(4)")
        self.ids = None if ids is None else tuple(ids)
        self.chip = chip
        self.special: set[int] = set()
        self.opened: dict[int, None] = {}  # the ids of cards that were opened, in order

    def enumerate(self) -> Sequence[int] | None:
        """The ids there are; None if there is no end of them."""
        return self.ids

    def admit(self, index: int) -> None:
        """A card is being opened: an error unless there is one of that id."""
        expect("index", index, int)
        if index < 0 or (self.ids is not None and index not in self.ids):
            raise DeviceError(f"there is no card {index}", cards=self.ids)
        self.opened[index] = None

    def compile(self, kernel: Kernel) -> bytes:
        """The kernel's code, to be cached and loaded."""
        return translate(kernel)


class VirtualDriver(ImitatedDriver):
    """As many cards as you ask for, or exactly those of some ids.

    >>> VirtualDriver(range(4)).enumerate(), VirtualDriver().enumerate()
    ((0, 1, 2, 3), None)
    """

    name = "virtual"
    shares_memory = True

    def __init__(self, ids: Iterable[int] | None = None, chip: Chip = HOST, clock: Clock | None = None) -> None:
        super().__init__(ids, chip)
        self.clock = clock or Clock()
        self.messages: dict[tuple[int, int, int], torch.Tensor] = {}  # by sender, receiver and slot

    def open(self, index: int) -> VirtualCard:
        """The card of that id."""
        self.admit(index)
        return VirtualCard(self, index)

    def is_plain(self) -> bool:
        """Whether no card is slow or faulty."""
        return not self.special
