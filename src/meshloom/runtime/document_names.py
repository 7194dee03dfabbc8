"""The names under which the plan for blackhole-py knows the classes of this room.

`MeshBufferPy` and `MeshWorkloadPy` are the classes; every mesh device is a `MeshDevicePy`, which can also be made of
cards that are open already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshloom.errors import ArgumentError, MeshError, expect
from meshloom.mesh import Mesh
from meshloom.runtime.buffer import MeshBuffer
from meshloom.runtime.card import Card, Driver, Kernel
from meshloom.runtime.compile_cache import translate
from meshloom.runtime.device import MeshDevice
from meshloom.runtime.geometry import MeshShape
from meshloom.runtime.opening import TIMEOUT
from meshloom.runtime.system import System
from meshloom.runtime.workload import MeshWorkload

MeshBufferPy, MeshWorkloadPy = MeshBuffer, MeshWorkload


class OpenCards:
    """A driver of cards that somebody has opened."""

    shares_memory = False

    def __init__(self, cards: Sequence[Card]) -> None:
        self._cards = {card.info().index: card for card in cards}

    def enumerate(self) -> Sequence[int]:
        """Their ids."""
        return list(self._cards)

    def open(self, index: int) -> Card:
        """The card of that id."""
        return self._cards[index]

    def compile(self, kernel: Kernel) -> bytes:
        """A Python kernel as it is."""
        return translate(kernel)

    def is_plain(self) -> bool:
        """Nobody knows."""
        return False


class _AnyMeshDevice(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, MeshDevice)


class MeshDevicePy(MeshDevice, metaclass=_AnyMeshDevice):
    """A grid of cards that are open: whatever satisfies the protocol of a card, row-major. Closing it closes them.

    `driver` compiles kernels; without one they are Python functions, which the cards must be able to run.

    >>> from meshloom.runtime import VirtualDriver, open_mesh_device
    >>> driver = VirtualDriver()
    >>> with MeshDevicePy([driver.open(3), driver.open(5)], (1, 2), driver=driver) as mesh:
    ...     mesh, mesh.get_device_ids()
    (MeshDevice(1x2, 2 devices), [3, 5])
    >>> with open_mesh_device((2, 2)) as mesh:
    ...     isinstance(mesh, MeshDevicePy)
    True
    """

    def __init__(
        self,
        cards: Sequence[Card],
        shape: Sequence[int] | None = None,
        *,
        driver: Driver | None = None,
        num_command_queues: int = 1,
        timeout: float | None = TIMEOUT,
        **options: Any,
    ) -> None:
        expect("cards", cards, Sequence, fix="give a list of cards")
        for card in cards:
            if not isinstance(card, Card):
                raise ArgumentError(f"{card!r} is no card", fix="see meshloom.runtime.card.Card for what one must do")
        sizes = MeshShape(shape if shape is not None else (len(cards),))
        if sizes.mesh_size() != len(cards):
            raise MeshError(f"a mesh of shape {tuple(sizes)} needs {sizes.mesh_size()} cards, not {len(cards)}")
        mesh = Mesh.of(sizes, None, [card.info().index for card in cards], None, None)
        settings = {"check": None, "dispatch": "fast", "stress": None, "cache": None, **options}
        system = System(driver if driver is not None else OpenCards(cards), cards, timeout=timeout, **settings)
        super().__init__(mesh, range(len(cards)), system, num_command_queues, None)
