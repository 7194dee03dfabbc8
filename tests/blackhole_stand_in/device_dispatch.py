"""Programs, and what the cores do with them: a reader, a compute kernel and a writer, tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from codegen import CompiledKernel
from dram import DramAllocator, DramBuffer

Core = tuple[int, int]
ArgGen = Callable[[int, Core, int], list[int]]


@dataclass
class DataflowLaunch:
    """The kernels that move data on some cores, with their arguments."""

    cores: object
    reader_rt_args: list[int] | ArgGen
    writer_rt_args: list[int] | ArgGen
    reader: CompiledKernel | None
    writer: CompiledKernel | None


@dataclass
class Program:
    """What a card runs."""

    dataflow: list[DataflowLaunch]
    compute: tuple[CompiledKernel, CompiledKernel, CompiledKernel] | None
    compute_rt_args: list[int] | ArgGen
    cbs: list[int]
    tile_size: int
    num_pages: int
    cores: object = "all"
    num_sems: int = 0
    cb_config: dict[int, tuple[int, int]] | None = field(default=None)


def resolve_cores(cores: object, there: list[Core]) -> list[Core]:
    """A number of cores, or all of them, or those that are listed."""
    if cores == "all":
        return list(there)
    return there[:cores] if isinstance(cores, int) else list(cores)


def args_of(given: list[int] | ArgGen, number: int, core: Core, count: int) -> list[int]:
    """The arguments of one core."""
    return given(number, core, count) if callable(given) else list(given)


@dataclass
class CoreWork:
    """What one core does, with its arguments baked in."""

    op: str
    reader: list[int]
    compute: list[int]
    writer: list[int]


def bake(program: Program, there: list[Core]) -> list[CoreWork]:
    """The stream of a program: every core of it must be in exactly one launch."""
    cores, work, seen = resolve_cores(program.cores, there), [], []
    op = program.compute[1].source().strip() if program.compute is not None else "copy"
    for launch in program.dataflow:
        mine = resolve_cores(launch.cores, there)
        seen += mine
        for kernel in (launch.reader, launch.writer):
            if kernel is not None:
                kernel.source()
        for number, core in enumerate(mine):
            given = (launch.reader_rt_args, program.compute_rt_args, launch.writer_rt_args)
            work.append(CoreWork(op, *(args_of(each, number, core, len(mine)) for each in given)))
    if sorted(seen) != sorted(cores):
        raise RuntimeError("every core of a program must be in exactly one launch")
    return work


def to_numbers(data: np.ndarray, width: int) -> np.ndarray:
    """The numbers of a page: float32, or bfloat16 as float32."""
    if width == 4:
        return data.view(np.float32)
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def to_bytes(numbers: np.ndarray, width: int) -> np.ndarray:
    """The page of numbers, rounded to the nearest."""
    if width == 4:
        return np.ascontiguousarray(numbers, np.float32).view(np.uint8)
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16).view(np.uint8)


def unface(tile: np.ndarray) -> np.ndarray:
    """A tile of four faces as a matrix."""
    return tile.reshape(2, 2, 16, 16).transpose(0, 2, 1, 3).reshape(32, 32)


def face(matrix: np.ndarray) -> np.ndarray:
    """A matrix as a tile of four faces."""
    return matrix.reshape(2, 16, 2, 16).transpose(0, 2, 1, 3).reshape(-1)


class Cores:
    """Runs streams on the memory of one card."""

    def __init__(self, dram: DramAllocator) -> None:
        self.dram = dram

    def run(self, work: list[CoreWork]) -> None:
        """All cores of a stream."""
        for each in work:
            getattr(self, f"_{each.op}")(each)

    def _tile(self, addr: int, number: int, width: int) -> np.ndarray:
        page = 1024 * width
        buf = DramBuffer("", addr, (number + 1) * page, page)
        return to_numbers(self.dram.peek(buf)[-page:], width)

    def _put(self, addr: int, number: int, width: int, tile: np.ndarray) -> None:
        page = 1024 * width
        buf = DramBuffer("", addr, (number + 1) * page, page)
        self.dram.poke(buf, to_bytes(tile, width), np.arange(number * page, (number + 1) * page))

    def _add(self, work: CoreWork) -> None:
        (a, b, start, count), (width,), (out, *_) = work.reader, work.compute, work.writer
        for at in range(start, start + count):
            self._put(out, at, width, self._tile(a, at, width) + self._tile(b, at, width))

    def _add_row(self, work: CoreWork) -> None:
        (a, b, start, count), (width, columns), (out, *_) = work.reader, work.compute, work.writer
        for at in range(start, start + count):
            row = unface(self._tile(b, at % columns, width))[0]
            self._put(out, at, width, face(unface(self._tile(a, at, width)) + row))

    def _relu(self, work: CoreWork) -> None:
        (a, start, count), (width,), (out, *_) = work.reader, work.compute, work.writer
        for at in range(start, start + count):
            self._put(out, at, width, np.maximum(self._tile(a, at, width), 0))

    def _matmul(self, work: CoreWork) -> None:
        (a, b, start, count), (width, inner, columns), (out, *_) = work.reader, work.compute, work.writer
        for at in range(start, start + count):
            row, column = divmod(at, columns)
            total = np.zeros((32, 32), np.float32)
            for k in range(inner):
                left = unface(self._tile(a, row * inner + k, width))
                total += left @ unface(self._tile(b, k * columns + column, width))
            self._put(out, at, width, face(total))

    def _fill(self, work: CoreWork) -> None:
        (start, count), (width, bits), (out, *_) = work.reader, work.compute, work.writer
        value = np.array(bits, np.uint32).view(np.float32)
        for at in range(start, start + count):
            self._put(out, at, width, np.full(1024, value, np.float32))
