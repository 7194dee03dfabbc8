"""What the mesh needs of a card, and nothing more. A driver finds and opens cards; a card has memory and runs kernels.

Buffers, workloads and queues speak to these two protocols alone, so that another card is plugged in by writing them:
firmware, launch messages and register maps are the driver's own business. `tests/runtime_conformance.py` is the suite
that any card must pass.

Three small protocols more are a driver's choice. A *sized* card says how much memory an array takes there, if that is
more than its elements (tiles, pages). A *linked* card sends to its neighbours without the host. A *fluent* driver has
kernels of its own for some ops. What a driver does not have goes through the host, and is counted.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from meshloom.runtime.chips import Chip
from meshloom.types import Shape

Kernel = Callable[..., None]  # or a kernel of the driver's own: see `SourceKernel`


@dataclass(frozen=True, slots=True)
class CardInfo:
    """What a card says of itself."""

    index: int
    path: str
    chip: Chip


@dataclass(frozen=True, slots=True)
class Part:
    """An array that a card holds, without its elements."""

    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class SourceKernel:
    """A kernel in the language of a driver. It goes wherever a Python kernel goes: `Program(kernel, reads=[x], ...)`.

    `sources` are compiled once, by role. `build(compiled, handles, args)` makes what the driver runs: `compiled` has
    the roles of `sources`, `handles` the memory of one card (reads, writes, updates), `args` the arguments by name.
    """

    name: str
    sources: Mapping[str, str]
    build: Callable[[Mapping[str, Any], Sequence[Any], Mapping[str, Any]], Any]
    language: str = "source"

    @property
    def fingerprint(self) -> str:
        """A name for what it does: equal for equal sources, in every process."""
        text = repr((self.language, sorted(self.sources.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@runtime_checkable
class Card(Protocol):
    """One device. A *handle* is whatever the card gives for memory, a *ticket* what it gives for a launch."""

    def info(self) -> CardInfo:
        """What it is."""

    def alloc(self, address: int, shape: Shape, dtype: torch.dtype) -> Any:
        """A handle for the memory at an address, which the mesh's allocator has chosen."""

    def free(self, handle: Any) -> None:
        """The memory is no longer used."""

    def write(self, handle: Any, data: torch.Tensor, index: Any = ...) -> None:
        """Copy host data into memory, or into the part of it that an index names."""

    def read(self, handle: Any, index: Any = ...) -> torch.Tensor:
        """A copy of the memory, or of the part that an index names, on the host."""

    def load(self, binary: bytes, kernel: Kernel) -> Any:
        """Make a compiled kernel ready to launch."""

    def launch(self, loaded: Any, handles: Sequence[Any], args: Mapping[str, Any]) -> Any:
        """Start a kernel on memory, with arguments; a ticket to wait for."""

    def wait(self, ticket: Any, timeout: float | None) -> bool:
        """Wait until a launch has ended; False if it has not within the timeout."""

    def close(self) -> None:
        """Let the card go."""


@runtime_checkable
class EndableCard(Protocol):
    """A card on which a launch that takes too long can be ended. Others may go on writing to memory: they are lost."""

    def end(self, reason: str) -> None:
        """End what is running. The card says the reason to whoever uses it, until it is reset."""


@runtime_checkable
class SizedCard(Protocol):
    """A card on which an array takes more than its elements."""

    def footprint(self, shape: Shape, dtype: torch.dtype) -> int:
        """The bytes that the mesh's allocator must set aside for an array, over all banks together."""


@runtime_checkable
class LinkedCard(Protocol):
    """A card with links to others. Each end of a link has a few *slots*; `runtime/links.py` says who may use one when.

    A message is the elements `start` to `stop` of what an index (of slices) names in memory, in row-major order.
    """

    def peers(self) -> Sequence[int]:
        """The ids of the cards that a link leads to."""

    def slots(self, peer: int) -> tuple[int, int]:
        """How many slots there are for messages from a peer, and how many bytes each one holds."""

    def send(self, handle: Any, index: Any, start: int, stop: int, peer: int, slot: int) -> Any:
        """Start to copy elements of this memory into a slot at the peer's end of the link; a ticket to wait for."""

    def receive(self, handle: Any, index: Any, start: int, stop: int, peer: int, slot: int, op: str | None) -> Any:
        """Start to copy what a peer has put into a slot here into memory, or with an `op` ("sum", "max", "min", "prod")
        to combine it with what is there; a ticket to wait for."""

    def copy(self, source: Any, source_index: Any, target: Any, target_index: Any) -> Any:
        """Start to copy elements of this card's memory to another place in it; a ticket to wait for."""


@runtime_checkable
class Driver(Protocol):
    """Finds and opens cards of one kind. Where `shares_memory`, handles are views of arrays in this process."""

    shares_memory: bool

    def enumerate(self) -> Sequence[int] | None:
        """The ids of the cards there are, or None if any number can be made."""

    def open(self, index: int) -> Card:
        """The card of that id."""

    def compile(self, kernel: Kernel) -> bytes:
        """A kernel as a binary that every card of the driver can load."""

    def is_plain(self) -> bool:
        """Whether no card of it is slow or faulty, so that one array call may stand for all of them."""


@runtime_checkable
class FluentDriver(Protocol):
    """A driver with kernels of its own for some ops."""

    def kernel_of(self, op: str, operands: Sequence[Part], result: Part, args: Mapping[str, Any]) -> Kernel | None:
        """The kernel of an op of the op table on one card, or None if there is none for these operands.

        It is launched with the handles of the operands, then that of the result, and with `args`."""


def footprint(cards: Sequence[Card], shape: Shape, dtype: torch.dtype) -> int:
    """The bytes that an array takes on the card where it takes most."""
    plain = math.prod(shape) * dtype.itemsize
    return max((card.footprint(shape, dtype) for card in cards if isinstance(card, SizedCard)), default=plain)
