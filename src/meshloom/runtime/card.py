"""What the mesh needs of a card, and nothing more. A driver finds and opens cards; a card has memory and runs kernels.

Buffers, workloads and queues speak to these two protocols alone, so that another card is plugged in by writing them:
firmware, launch messages and register maps are the driver's own business. `tests/runtime_conformance.py` is the suite
that any card must pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from meshloom.runtime.chips import Chip
from meshloom.types import Shape

Kernel = Callable[..., None]


@dataclass(frozen=True, slots=True)
class CardInfo:
    """What a card says of itself."""

    index: int
    path: str
    chip: Chip


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
