"""Tenstorrent cards through blackhole-py, whose files of February 2026 this driver is written against.

That driver opens one card and has memory without an end, programs and a barrier. What a mesh needs beyond that is here:

    one owner per card       a lock on its node
    memory that comes back   addresses are the mesh's; capacity is looked at
    writes that arrive       each waits, since the next would overwrite the staging memory of a fast write
    programs that stay       a card keeps every program it has run, since the device knows them by id(program)
    errors                   SystemExit, time-outs and all else become errors of ours that name the card

A Python kernel runs on the host (`runtime/host_kernels.py`); a `SourceKernel` is compiled by blackhole-py and runs on
the card. Two files may lie beside blackhole-py and are used if they do: `ethernet.py` (links) and `meshloom_kernels.py`
(a table from ops to kernels). It has been run against a stand-in written from a description, and never on a card.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from meshloom.errors import (
    ArgumentError,
    ClosedError,
    DeviceError,
    DeviceTimeoutError,
    MeshloomError,
    OutOfMemoryError,
    expect,
    expect_seconds,
)
from meshloom.processes import discovery
from meshloom.runtime.card import CardInfo, Kernel, Part, SourceKernel
from meshloom.runtime.chips import BLACKHOLE, Chip, Grid
from meshloom.runtime.compile_cache import link, translate
from meshloom.runtime.drivers import blackhole_memory as memory
from meshloom.runtime.drivers.blackhole_memory import FIRST, Memory
from meshloom.runtime.drivers.blackhole_modules import FIX, Modules, find_folder, load
from meshloom.runtime.drivers.card_locks import CardLock, alone
from meshloom.runtime.host_kernels import run_on_host
from meshloom.types import Shape

TIMEOUT = 10.0  # seconds, of every wait but for a launch
FOREVER = 1e6
COMPILING = 300.0  # seconds for which another process may compile
BANKS, BANK_SIZE = 8, 4 << 30
SYSMEM = 1 << 30  # what a fast write has room for
PROCESSORS = {"reader": "ncrisc", "writer": "brisc"}
COMPUTE = "compute"


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A kernel on a card: a Python function for the host, or compiled sources for the card."""

    kernel: Any
    compiled: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A command of a card by its number; 0 is done already."""

    number: int


class BlackholeCard:
    """A card that this process owns."""

    def __init__(self, driver: BlackholeDriver, index: int) -> None:
        self._driver, self._index = driver, index
        self._lock = threading.RLock()
        self._lost = ""
        self._programs: dict[Any, tuple[Loaded, Any]] = {}
        self._clean: set[int] = set()  # addresses whose padding is zero
        self._given = self._done = 0
        self.closed = False
        self.host_bytes = 0  # what kernels moved that ran on the host
        self._path = str(discovery.CARDS / str(index))
        owner = CardLock(Path(self._path))
        try:
            with self._guarded("opening it"):
                self._device = driver.modules.Device(index)
        except BaseException:
            owner.release()
            raise
        self._release = weakref.finalize(self, _let_go, self._device, owner, os.getpid())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._index})"

    def info(self) -> CardInfo:
        return CardInfo(self._index, self._path, self._chip)

    @cached_property
    def _chip(self) -> Chip:
        device = self._device
        lost = getattr(device, "harvested_dram", None)
        banks = BANKS - (0 if lost is None else 1 if isinstance(lost, int) else len(lost))
        cores = _full_columns(device.dispatchable_cores)
        return Chip(BLACKHOLE.name, banks * (self._driver.bank_size - FIRST), banks, BLACKHOLE.l1, cores)

    # memory

    def footprint(self, shape: Shape, dtype: torch.dtype) -> int:
        return memory.footprint(shape, dtype, self._chip.banks)

    def alloc(self, address: int, shape: Shape, dtype: torch.dtype) -> Memory:
        self._check_not_closed()
        rounds = self.footprint(shape, dtype) // self._chip.banks
        if address + rounds > self._driver.bank_size - FIRST:
            raise OutOfMemoryError(
                f"{tuple(shape)} of {dtype} at {address:#x} does not fit into a bank of card {self._index}",
                fix="let the mesh choose the address: create_mesh_buffer(mesh, ...)",
            )
        page = memory.page_size(dtype)
        size = memory.pages(shape) * page
        made = self._driver.modules.DramBuffer(f"meshloom@{address:x}", FIRST + address, size, page)
        with self._lock:
            self._clean.discard(address)
        return Memory(tuple(shape), dtype, made)

    def free(self, handle: Memory) -> None:
        """Nothing to do: the mesh's allocator gives the address to somebody else."""

    def write(self, handle: Memory, data: torch.Tensor, index: Any = ...) -> None:
        with self._guarded("a write"):
            if index is not ...:
                whole = self.read(handle)
                whole[index] = data
                data = whole
            payload = memory.to_card(data.detach().to(handle.dtype).expand(handle.shape))
            for start, buffer in self._pieces(handle):
                self._device.dram.write(buffer, payload[start : start + buffer.size])
                self._sync(self._driver.timeout)  # the next write uses the same staging memory
            self._clean.add(handle.buffer.addr - FIRST)

    def read(self, handle: Memory, index: Any = ...) -> torch.Tensor:
        with self._guarded("a read"):
            self._sync(self._driver.timeout)  # a read waits too, but for as long as it likes
            parts = [self._device.dram.read(buffer) for _, buffer in self._pieces(handle)]
        return memory.from_card(b"".join(parts), handle.shape, handle.dtype)[index].clone()

    def _pieces(self, handle: Memory) -> Iterator[tuple[int, Any]]:
        """A buffer as buffers that fit into the staging memory, each with its place in it: whole rounds of the banks,
        so that each starts at one offset in all of them."""
        whole, banks = handle.buffer, self._chip.banks
        per_round = banks * whole.page_size
        step = max(1, self._driver.sysmem // per_round) * per_round
        for start in range(0, whole.size, step):
            size = min(step, whole.size - start)
            made = self._driver.modules.DramBuffer(whole.name, whole.addr + start // banks, size, whole.page_size)
            yield start, made

    # kernels

    def load(self, binary: bytes, kernel: Kernel | SourceKernel) -> Loaded:
        self._check_open()
        if not isinstance(kernel, SourceKernel):
            return Loaded(link(binary, kernel))
        return Loaded(kernel, pickle.loads(binary))  # of a cache that only this user can write to

    def launch(self, loaded: Loaded, handles: Sequence[Memory], args: Mapping[str, Any]) -> Ticket:
        if loaded.compiled is None:
            self._check_open()
            self.host_bytes += run_on_host(self, loaded.kernel, handles, args)
            return Ticket(0)
        with self._guarded("a launch"):
            program = self._program(loaded, handles, args)
            self._device.run(program, wait=False)
            self._clean.update(handle.buffer.addr - FIRST for handle in handles)
            return self._ticket()

    def _program(self, loaded: Loaded, handles: Sequence[Memory], args: Mapping[str, Any]) -> Any:
        """The program for these addresses and arguments. The device bakes them in, and knows it by its id: it stays."""
        try:
            key = (id(loaded), tuple(each.buffer for each in handles), tuple(sorted(args.items())))
            found = self._programs.get(key)
        except TypeError as error:
            raise ArgumentError(
                f"the arguments of {loaded.kernel.name!r} cannot be compared: {error}",
                fix="give numbers, texts and tuples",
            ) from None
        if found is None:
            assert loaded.compiled is not None
            found = self._programs[key] = loaded, loaded.kernel.build(loaded.compiled, handles, args)
        return found[1]

    def _ticket(self) -> Ticket:
        self._given += 1
        return Ticket(self._given)

    def wait(self, ticket: Ticket, timeout: float | None) -> bool:
        if ticket.number <= self._done:
            return True
        began = time.monotonic()
        try:
            with self._guarded("a wait"):
                self._sync(FOREVER if timeout is None else timeout)
        except DeviceTimeoutError:
            if timeout is None or time.monotonic() - began < timeout:  # it has given up for a reason of its own
                raise
            return False
        return True

    def _sync(self, timeout: float) -> None:
        """Wait for all that the card was given: it has no other barrier."""
        self._device.sync(timeout_s=timeout)
        self._done = self._given

    # the end, and what goes wrong

    def close(self) -> None:
        with self._lock:
            self.closed = True
            try:
                self._release()
            finally:
                self._programs.clear()

    def _check_not_closed(self) -> None:
        if self.closed:
            raise ClosedError(f"card {self._index} is closed", fix="open the mesh device again")

    def _check_open(self) -> None:
        self._check_not_closed()
        if self._lost:
            raise DeviceError(
                f"card {self._index} is lost: {self._lost}",
                fix="close the mesh device; reset the card before it is opened again",
            )

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """One call into blackhole-py at a time; whatever it raises is an error of ours."""
        with self._lock:
            self._check_open()
            try:
                yield
            except MeshloomError:
                raise
            except TimeoutError as error:  # what the card still does, nobody knows: its memory is not used again
                self._lost = f"{what} did not end in time: {error}"
                raise DeviceTimeoutError(f"card {self._index} timed out in {what}: {error}", card=self._path) from error
            except SystemExit as error:
                raise DeviceError(
                    f"card {self._index} cannot be used: blackhole-py wanted to end the program in {what}: {error}",
                    card=self._path,
                ) from error
            except Exception as error:
                raise DeviceError(
                    f"card {self._index} failed in {what}: {type(error).__name__}: {error}", card=self._path
                ) from error


class LinkedBlackholeCard(BlackholeCard):
    """A card with links, where a file `ethernet.py` beside blackhole-py drives them."""

    def peers(self) -> Sequence[int]:
        with self._guarded("looking for links"):
            return list(self._links.peers(self._device))

    def slots(self, peer: int) -> tuple[int, int]:
        with self._guarded("looking for slots"):
            count, size = self._links.slots(self._device, peer)
            return count, size

    def send(self, handle: Memory, index: Any, start: int, stop: int, peer: int, slot: int) -> Ticket:
        with self._guarded(f"a send to card {peer}"):
            self._links.send(self._device, handle.buffer, _runs(handle, index, start, stop), peer, slot)
            return self._ticket()

    def receive(
        self, handle: Memory, index: Any, start: int, stop: int, peer: int, slot: int, op: str | None
    ) -> Ticket:
        kind = str(handle.dtype).removeprefix("torch.")
        with self._guarded(f"a receive from card {peer}"):
            self._clear_padding(handle)
            runs = _runs(handle, index, start, stop)
            self._links.receive(self._device, handle.buffer, runs, peer, slot, op, kind)
            return self._ticket()

    def copy(self, source: Memory, source_index: Any, target: Memory, target_index: Any) -> Ticket:
        with self._guarded("a copy"):
            self._clear_padding(target)
            runs = [_runs(each, at, 0, None) for each, at in ((source, source_index), (target, target_index))]
            self._links.copy(self._device, source.buffer, runs[0], target.buffer, runs[1])
            return self._ticket()

    def _clear_padding(self, handle: Memory) -> None:
        """Kernels rely on padding that is zero, and memory may have had another owner."""
        address = handle.buffer.addr - FIRST
        if address not in self._clean and handle.buffer.size != handle.nbytes:
            self._links.clear(self._device, handle.buffer)
        self._clean.add(address)

    @property
    def _links(self) -> Any:
        return self._driver.modules.links


def _runs(handle: Memory, index: Any, start: int, stop: int | None) -> memory.Runs:
    return memory.runs_of(handle.shape, handle.dtype.itemsize, memory.index_key(index), start, stop)


class BlackholeDriver:
    """The Tenstorrent cards of this machine: `path` is the folder of blackhole-py.

    `timeout` is how many seconds a write, a read or a message may take. `kernels` is a table from ops to functions
    `(operands, result, args) -> SourceKernel | None`; without it, `OPS` of `meshloom_kernels.py` beside blackhole-py.
    """

    shares_memory = False

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        timeout: float = TIMEOUT,
        kernels: Mapping[str, Any] | None = None,
        bank_size: int = BANK_SIZE,
        sysmem: int = SYSMEM,
    ) -> None:
        expect_seconds("timeout", timeout, least=1e-9)
        expect("bank_size", bank_size, int)
        expect("sysmem", sysmem, int)
        self._given, self.timeout, self.bank_size, self.sysmem = path, timeout, bank_size, sysmem
        self._kernels = kernels

    @cached_property
    def modules(self) -> Modules:
        """blackhole-py, imported when the first card is opened."""
        return load(self._given)

    def enumerate(self) -> Sequence[int]:
        """The ids of the cards that this process sees, by their nodes and TT_VISIBLE_DEVICES."""
        return [device.id for device in discovery.find_cards()]

    def open(self, index: int) -> BlackholeCard:
        """The card of that id, for this process alone."""
        expect("index", index, int)
        kind = BlackholeCard if self.modules.links is None else LinkedBlackholeCard
        return kind(self, index)

    def lacks(self, index: int) -> dict[str, str]:
        """What is missing for a card, as details of an error."""
        node, found = discovery.CARDS / str(index), {}
        if not node.exists():
            found["node"] = f"{node} is not there: no such card, or its kernel module is not loaded"
        elif index not in self.enumerate():
            found["node"] = f"{node} is there, and TT_VISIBLE_DEVICES does not name it"
        if find_folder(self._given) is None:
            found["module"] = f"blackhole-py is not installed here; {FIX}"
        return {**found, "fix": "virtual cards are opened by ids, or by paths such as virtual:0"}

    def compile(self, kernel: Kernel | SourceKernel) -> bytes:
        """The kernel for all cards: sources by blackhole-py's compiler, a Python function as it is."""
        if not isinstance(kernel, SourceKernel):
            return translate(kernel)
        compiler = self.modules.Compiler()
        with alone(
            self._compile_lock, COMPILING
        ):  # its own cache of files would be read while another process writes it
            try:
                compiled = {role: _compile(compiler, role, source) for role, source in kernel.sources.items()}
            except (Exception, SystemExit) as error:
                raise DeviceError(
                    f"blackhole-py cannot compile kernel {kernel.name!r}: {type(error).__name__}: {error}"
                ) from error
        return pickle.dumps(compiled)

    @cached_property
    def _compile_lock(self) -> Path:
        name = hashlib.sha256(str(self.modules.folder).encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"meshloom-{os.geteuid()}-{name}.lock"

    @cached_property
    def fingerprint(self) -> str:
        """A name for this blackhole-py: what another one has compiled is not used."""
        found = hashlib.sha256()
        for file in sorted(self.modules.folder.glob("*.py")):
            found.update(file.name.encode() + b"\0" + file.read_bytes())
        return found.hexdigest()[:16]

    def is_plain(self) -> bool:
        """Cards are told one by one."""
        return False

    def kernel_of(
        self, op: str, operands: Sequence[Part], result: Part, args: Mapping[str, Any]
    ) -> SourceKernel | None:
        """The card's own kernel of an op, where the table has one for these operands."""
        made = self._table.get(op)
        return None if made is None else made(operands, result, args)

    @cached_property
    def _table(self) -> Mapping[str, Any]:
        if self._kernels is not None:
            return self._kernels
        return {} if self.modules.kernels is None else self.modules.kernels.OPS


def _compile(compiler: Any, role: str, source: str) -> Any:
    if role == COMPUTE:
        return compiler.compile_compute(source)
    if role not in PROCESSORS:
        raise ArgumentError(f"a kernel has no role {role!r}", fix=f"roles are {', '.join((*PROCESSORS, COMPUTE))}")
    return compiler.compile_dataflow(source, PROCESSORS[role])


def _full_columns(cores: Sequence[tuple[int, int]]) -> Grid:
    """The cores as a grid: those columns that have as many rows as the fullest one.

    >>> _full_columns([(1, 2), (1, 3), (2, 2), (2, 3), (3, 2)])
    Grid(x=2, y=2)
    """
    rows: dict[int, int] = {}
    for x, _ in cores:
        rows[x] = rows.get(x, 0) + 1
    most = max(rows.values(), default=1)
    return Grid(max(1, sum(count == most for count in rows.values())), most)


def _let_go(device: Any, owner: CardLock, process: int) -> None:
    """Close the device, and then give the card to whoever wants it; a forked child leaves both to its parent."""
    if os.getpid() != process:
        return
    try:
        device.close()
    except (Exception, SystemExit) as error:
        raise DeviceError(f"blackhole-py failed in closing the card: {type(error).__name__}: {error}") from error
    finally:
        owner.release()
