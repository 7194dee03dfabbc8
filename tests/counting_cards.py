"""Cards with memory of their own, in numpy, that count every byte which crosses: for tests of tensors on any card."""

from __future__ import annotations

import inspect
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from meshloom.errors import DeviceError
from meshloom.runtime.card import CardInfo, Kernel, Part
from meshloom.runtime.chips import Chip, chip_of
from meshloom.runtime.compile_cache import link, translate


def to_bytes(data: torch.Tensor) -> numpy.ndarray:
    """The bytes of a tensor of any dtype, as a copy."""
    return data.detach().contiguous().flatten().view(torch.uint8).numpy().copy()


class Piece:
    """Memory of a card: bytes, with the shape and dtype that they mean."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.address, self.shape, self.dtype = address, tuple(shape), dtype
        self.bytes = numpy.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=numpy.uint8)
        self.freed = False

    def close(self) -> None:
        """Nobody uses it any more."""
        self.freed = True

    def array(self) -> torch.Tensor:
        """The memory as the card's own kernels see it."""
        return torch.from_numpy(self.bytes).view(self.dtype).view(self.shape)


# Kernels of the card's own: what the op needs for a step of a model and its gradients.


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(a, b, out=out)


def add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, alpha: float = 1) -> None:
    out.copy_(torch.add(a, b, alpha=alpha).view(out.shape))


def relu(a: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(a.relu())


def relu_backward(gradient: torch.Tensor, result: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(gradient * (result > 0))


def transpose(a: torch.Tensor, out: torch.Tensor, dim0: int, dim1: int) -> None:
    out.copy_(a.transpose(dim0, dim1))


def sum_over(a: torch.Tensor, out: torch.Tensor, dim: tuple[int, ...]) -> None:
    out.copy_(a.sum(dim).view(out.shape))


KERNELS: dict[str, Kernel] = {
    "matmul": matmul, "add": add, "relu": relu, "threshold_backward": relu_backward, "transpose": transpose,
    "sum": sum_over,
}  # fmt: skip


class FilePiece(Piece):
    """The same in a file, so that the memory of this process does not grow with it."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.address, self.shape, self.dtype, self.freed = address, tuple(shape), dtype, False
        self.size = torch.Size(shape).numel() * dtype.itemsize
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  closed with the piece
        self._file.truncate(self.size)

    def close(self) -> None:
        self.freed = True
        self._file.close()

    @property
    def bytes(self) -> FileBytes:  # type: ignore[override]
        return FileBytes(self._file, self.size)

    def array(self) -> torch.Tensor:
        """A copy, which `store` puts back."""
        self._file.seek(0)
        data = numpy.frombuffer(bytearray(self._file.read()), dtype=numpy.uint8)
        return torch.from_numpy(data).view(self.dtype).view(self.shape)


class FileBytes:
    """The bytes of a file, to be replaced."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._size = file, size

    def __len__(self) -> int:
        return self._size

    def __setitem__(self, index: slice, data: numpy.ndarray) -> None:
        assert index == slice(None)
        self._file.seek(0)
        self._file.write(memoryview(data))
        self._file.flush()


class CountingCard:
    """A card whose memory nobody else sees. `fail` maps a command to how many of it still work."""

    def __init__(self, driver: CountingDriver, index: int) -> None:
        self.driver, self.index, self.closed = driver, index, False
        self.pieces: dict[int, Piece] = {}
        self.crossed: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self.fail: dict[str, int] = {}
        self.hangs = self.interrupts = False

    @property
    def used(self) -> int:
        """The bytes that it holds."""
        return sum(len(piece.bytes) for piece in self.pieces.values())

    def info(self) -> CardInfo:
        return CardInfo(self.index, f"counting:{self.index}", self.driver.chip)

    def alloc(self, address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Piece:
        self._begin("alloc")
        piece = self.driver.piece(address, shape, dtype)
        for other in self.pieces.values():
            lower, upper = sorted((piece, other), key=lambda each: each.address)
            assert lower.address * self.driver.chip.banks + len(lower.bytes) <= upper.address * self.driver.chip.banks
        assert address not in self.pieces, "two owners of one address"
        self.pieces[address] = piece
        return piece

    def free(self, handle: Piece) -> None:
        assert not handle.freed and not self.closed, "freed twice, or after the end"
        handle.close()
        del self.pieces[handle.address]

    def write(self, handle: Piece, data: torch.Tensor, index: Any = ...) -> None:
        self._begin("write", handle)
        assert data.dtype == handle.dtype
        self.crossed["write"] += data.numel() * data.element_size()
        if index is ...:
            assert tuple(data.shape) == handle.shape, f"{tuple(data.shape)} into {handle.shape}"
            handle.bytes[:] = to_bytes(data)
        else:
            handle.array()[index] = data

    def read(self, handle: Piece, index: Any = ...) -> torch.Tensor:
        self._begin("read", handle)
        found = handle.array()[index].clone()
        self.crossed["read"] += found.numel() * found.element_size()
        return found

    def load(self, binary: bytes, kernel: Kernel) -> Kernel:
        return link(binary, kernel)

    def launch(self, loaded: Kernel, handles: Sequence[Piece], args: Mapping[str, Any]) -> str:
        self._begin("launch", *handles)
        self.launched[loaded.__name__] += 1
        arrays = [handle.array() for handle in handles]
        loaded(*arrays, **args)
        handles[-1].bytes[:] = to_bytes(arrays[-1])
        return loaded.__name__

    def wait(self, ticket: str, timeout: float | None) -> bool:
        return not self.hangs

    def close(self) -> None:
        self.closed = True

    def _begin(self, command: str, *handles: Piece) -> None:
        assert not any(handle.freed for handle in handles), f"{command} of memory that was freed"
        if self.closed:
            raise DeviceError(f"card {self.index} is closed")
        if self.interrupts:
            raise KeyboardInterrupt
        left = self.fail.get(command)
        if left is not None:
            if left <= 0:
                raise DeviceError(f"card {self.index} failed in a {command}")
            self.fail[command] = left - 1


class LinkedCountingCard(CountingCard):
    """One with links to all others."""

    def peers(self) -> Sequence[int]:
        return [each for each in self.driver.cards if each != self.index]

    def slots(self, peer: int) -> tuple[int, int]:
        return 1, 256

    def send(self, handle: Piece, index: Any, start: int, stop: int, peer: int, slot: int) -> str:
        self._begin("send", handle)
        self.driver.links[self.index, peer, slot] = handle.array()[index].flatten()[start:stop].clone()
        return "send"

    def receive(self, handle: Piece, index: Any, start: int, stop: int, peer: int, slot: int, op: str | None) -> str:
        self._begin("receive", handle)
        assert index is ...
        arrived, target = self.driver.links.pop((peer, self.index, slot)), handle.array().view(-1)[start:stop]
        target.add_(arrived) if op == "sum" else target.copy_(arrived)
        return "receive"

    def copy(self, source: Piece, source_index: Any, target: Piece, target_index: Any) -> str:
        target.array()[target_index] = source.array()[source_index]
        return "copy"


class CountingDriver:
    """Cards that share no memory with this process."""

    shares_memory = False

    def __init__(
        self,
        kernels: Mapping[str, Kernel] | None = None,
        chip: Chip | None = None,
        *,
        linked: bool = True,
        piece: type[Piece] = Piece,
    ) -> None:
        self.piece, self.linked = piece, linked
        self.kernels = dict(kernels or {})
        self.links: dict[tuple[int, int, int], torch.Tensor] = {}
        self.chip = chip or chip_of("quietbox", None)
        self.cards: dict[int, CountingCard] = {}

    def enumerate(self) -> Sequence[int] | None:
        return None

    def open(self, index: int) -> CountingCard:
        kind = LinkedCountingCard if self.linked else CountingCard
        return self.cards.setdefault(index, kind(self, index))

    def compile(self, kernel: Kernel) -> bytes:
        return translate(kernel)

    def is_plain(self) -> bool:
        return not any(card.fail for card in self.cards.values())

    def kernel_of(self, op: str, operands: Sequence[Part], result: Part, args: Mapping[str, Any]) -> Kernel | None:
        kernel = self.kernels.get(op)
        if kernel is None or any(part.dtype != torch.float32 for part in (*operands, result)):
            return None
        try:
            inspect.signature(kernel).bind(*operands, result, **args)
        except TypeError:  # it does not take these
            return None
        return kernel

    @property
    def crossed(self) -> int:
        """The bytes that crossed between all cards and the host."""
        return sum(sum(card.crossed.values()) for card in self.cards.values())

    @property
    def used(self) -> list[int]:
        """The bytes that each card holds."""
        return [self.cards[index].used for index in sorted(self.cards)]
