"""How long a piece of program takes on this machine, by its tables: every kernel priced, none of them timed.

On `device="meta"` nothing is computed; on data the program runs, and is not timed either. There it is seen how much
memory came from the system; on `meta` it is assumed of large results.
"""

from __future__ import annotations

import math
import mmap
import resource
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from meshloom.context import Event, Log, state
from meshloom.cost.host import EVEN, FRESH, Work, cold_seconds, kernel_seconds, kind_of
from meshloom.engines import private
from meshloom.fabric.host import Host
from meshloom.tensor.kernel_work import EMPTY, Kernel, address_of, arrays_in
from meshloom.tensor.recording import Kernels

Piece = tuple[int, int]  # a storage, and which piece of it


class HostTime(Log):
    """What a piece of program takes on a host, in seconds, by kind of kernel and by what calls cost besides."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host, self.kernels = host, 0
        self.by_kind: defaultdict[str, float] = defaultdict(float)
        self._is_inside = False
        self._is_on_data = False  # the last kernel was
        self._faults = page_faults()  # so far
        self._ops: list[str] = []  # without gradients; empty of those with gradients
        self._touched = 0.0  # bytes, so far, without those that the kernel before had touched
        self._held: set[tuple[Piece, ...]] = set()  # what the last kernel touched
        self._used: dict[Piece, float] = {}  # the bytes that had been touched after its last use
        self._first: list[tuple[Piece, float, float, float]] = []  # uses of what was not used here before

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.by_kind.values()) + self._first_seconds()

    def _first_seconds(self) -> float:
        """What the first call and the first use of each piece cost, in a program that comes round again."""
        first = self._call_seconds(0) if self._ops else 0.0
        return first + sum(
            cold_seconds(size, self._touched - self._used[key] + before, own, self.host)
            for key, before, size, own in self._first
        )

    def _find(self, kernel: Kernel, work: Work) -> None:
        """Where a kernel finds its operands: the more was touched since their last use, the further away."""
        read = {_pieces(each): _bytes(each) for each in kernel.inputs}
        held = {**read, **{_pieces(each): each.nbytes for each in kernel.fresh}}
        own = sum(held.values())
        for pieces, size in read.items():
            key = pieces[len(pieces) // 2]
            if key in self._used:
                since = self._touched - self._used[key] + own
                self.by_kind["memory"] += cold_seconds(size, since, own, self.host)
            else:
                self._first.append((key, self._touched + own, size, own))
        self._touched += sum(size for pieces, size in held.items() if pieces not in self._held)
        self._held = set(held)
        for pieces in held:
            self._used.update(dict.fromkeys(pieces, self._touched))

    def see(self, kernel: Kernel) -> None:
        """A kernel has run."""
        work = work_of(kernel)
        self._is_on_data = not any(each.is_meta for each in (*kernel.fresh, *kernel.inputs))
        self._charge_fresh(work.fresh)
        work = replace(work, fresh=0)
        self.kernels += not work.is_view
        kind = "product" if work.product is not None else kind_of(work)
        self.by_kind[kind] += kernel_seconds(work, self.host)
        if not work.is_view:
            self._find(kernel, work)
        if private.current_node() is not None:
            self.by_kind["kernel"] += self.host.calls["kernel"]

    def _charge_fresh(self, large: int = 0) -> None:
        """Memory from the system since the last kernel; `large` are bytes of results too large for the heap.

        Of results on data it is seen: the C library may have had large ones in its heap, and may have given the memory
        of small ones back. Which it is depends on all that the process did before.
        """
        before, self._faults = self._faults, page_faults()
        size = bytes_given(self._faults - before, large) if self._is_on_data else large
        if size:
            self.by_kind[MEMORY] += size * self.host.calls["fresh"]

    @property
    def seconds_without_fresh(self) -> float:
        """All of it but what memory from the system costs."""
        return self.seconds - self.by_kind.get(MEMORY, 0.0)

    def end(self) -> None:
        """The program has run: what was given since its last kernel belongs to it."""
        self._charge_fresh()

    def begin_call(self, call: Any, where: str, tensors: Sequence[Any]) -> None:
        """A planned call."""
        self._is_inside = True
        is_tracked = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
        self._ops.append("" if is_tracked else call.call.op)
        if len(self._ops) > 1:
            self.by_kind["op"] += self._call_seconds(-1)

    def _call_seconds(self, place: int) -> float:
        """What a call costs besides its kernels: less if the one before was the same; the last is before the first."""
        op = self._ops[place]
        return self.host.calls["again" if op and self._ops[place - 1] == op else "op"]

    def end_call(self, results: Sequence[Any]) -> None:
        """The call has run."""
        self._is_inside = False

    def abandon_call(self) -> None:
        """The call did not come to its end."""
        self._is_inside = False

    def note_events(self, events: Sequence[Event], of: Any = None, first: bool = False) -> None:
        """A collective or a redistribution that the program asked for is a call too."""
        super().note_events(events, of, first)
        if events and not self._is_inside and events[0].phase == "forward":
            self.by_kind["collective"] += self.host.calls.get(events[0].kind, self.host.calls["broadcast"])

    def note_sent(self, kind: str, processes: int, size: int) -> None:
        """A collective between processes, by the curve of its kind."""
        self.by_kind[f"{kind} between processes"] += self.host.between(kind, processes).seconds(size)

    def __str__(self) -> str:
        listed = sorted(self.by_kind.items(), key=lambda each: -each[1])
        lines = [f"{self.seconds * 1e3:.3f} ms on {self.host.name}, {self.kernels} kernels"]
        lines += [f"  {kind:<20} {seconds * 1e3:10.3f} ms" for kind, seconds in listed]
        return "\n".join(lines)


MEMORY = "memory from the system"
PAGE = mmap.PAGESIZE  # bytes of memory that one fault brings
LARGEST_PAGE = 2 << 20  # bytes that it may bring, for results that are large enough
PIECE = 1 << 20  # bytes of memory of which it is known together when they were used
FEWEST = 16  # faults that mean something: Python's own lists and frames cause some


def page_faults() -> int:
    """How often this process has been given memory by the system, so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def bytes_given(faults: int, large: int = 0) -> int:
    """The bytes that so many faults brought; `large` are those of results that may have come in large pages.

    >>> bytes_given(100) == 100 * PAGE, bytes_given(3), bytes_given(16, 32 << 20) == 32 << 20
    (True, 0, True)
    """
    given = faults * PAGE if faults >= FEWEST else 0
    return max(given, large) if faults * LARGEST_PAGE >= large else given


@contextmanager
def host_time(host: Host) -> Iterator[HostTime]:
    """The predicted time of what runs inside."""
    found = HostTime(host)
    with state.changed(logs=(*state.logs, found)), Kernels(found):
        yield found
        found.end()


def work_of(kernel: Kernel) -> Work:
    """A kernel as the tables know it."""
    name, inputs = kernel.name, kernel.inputs
    written = 0 if kernel.fresh else sum(_bytes(each) for each in kernel.written)
    read = {(each.data_ptr() or id(each), each.shape): each for each in inputs}.values()  # x + x reads x once
    touched = sum(map(_bytes, read)) + sum(map(_bytes, kernel.fresh)) + written
    items = next((len(each) for each in kernel.arguments if isinstance(each, list) and each), 0)
    run, is_turned = _run_of(kernel)
    apart = _apart(kernel)
    if run and not name.startswith("_foreach"):  # an element is worked on by itself, however often it is there
        touched = sum(each.nbytes for each in (*inputs, *kernel.fresh)) + written
    return Work(
        name,
        touched,
        kernel.dtype or "f32",
        _product_of(kernel),
        kernel.flops,
        items if name.startswith(("_foreach", "_fused_ad", "_fused_sgd")) else 0,
        sum(each.nbytes for each in kernel.fresh if each.nbytes >= FRESH),
        rows=_rows_added(kernel),
        run=run,
        is_turned=is_turned,
        attention=(kernel.inputs[0].shape[-2], kernel.inputs[0].shape[-1]) if name.startswith(_ATTENTION) else (0, 0),
        is_transposed=_is_transposed(kernel),
        is_across=bool(apart),
        is_even=apart > 0 and apart % EVEN == 0,
        is_view=kernel.is_view or name in EMPTY,
    )


def _pieces(array: torch.Tensor) -> tuple[Piece, ...]:
    """The pieces of memory that an array lies in, on `meta` too."""
    last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
    start = array.storage_offset() * array.itemsize
    end = start + max(last, 0) * array.itemsize
    return tuple((address_of(array), place) for place in range(start // PIECE, end // PIECE + 1))


def _bytes(array: torch.Tensor) -> int:
    """The bytes of an array, those that several elements share counted once."""
    elements = 1
    for size, stride in zip(array.shape, array.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * array.itemsize


_FIRST = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "mv": 0}


def _product_of(kernel: Kernel) -> tuple[int, int, int, int] | None:
    """Batch, m, k and n of a product of matrices, or of a convolution as one."""
    place = _FIRST.get(kernel.name)
    if place is not None:
        one, other = kernel.arguments[place : place + 2]
        m, k = one.shape[-2:]
        return one.shape[0] if one.ndim == 3 else 1, m, k, other.shape[-1] if other.ndim > 1 else 1
    if kernel.name == "convolution" and kernel.flops:
        weight, (result,) = kernel.arguments[1], [*arrays_in((kernel.result,))]
        inner = max(1, weight[0].numel())
        return 1, max(1, result.numel() // weight.shape[0]), inner, weight.shape[0]
    if kernel.name == "convolution_backward" and kernel.flops:
        gradient, _, weight = kernel.arguments[:3]
        passes = round(kernel.flops / (2 * gradient.numel() * max(1, weight[0].numel()))) or 1
        return passes, gradient.numel() // weight.shape[0], max(1, weight[0].numel()), weight.shape[0]
    return None


def _apart(kernel: Kernel) -> int:
    """Of a softmax over another dim than the last: how many bytes its neighbours lie apart; 0 of any other kernel."""
    if kernel.name not in _SOFTMAXES:
        return 0
    array, dim = kernel.inputs[0], kernel.arguments[_SOFTMAXES[kernel.name]]
    is_last = array.ndim < 2 or dim % array.ndim == array.ndim - 1
    return 0 if is_last else array.stride(dim) * array.itemsize


_SOFTMAXES = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2}


_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
_JOINS = {"cat": 1, "stack": 1}


def _run_of(kernel: Kernel) -> tuple[int, bool]:
    """How many elements lie in a row where they do not all, and whether the next ones lie in another line of the cache.

    Of a function of one array that repeats itself along its last dim it is one. What is joined lies in rows in the
    result.
    """
    found = [each for each in map(_row_of, kernel.inputs) if each[0]]
    if kernel.name in _JOINS and kernel.inputs:
        array = kernel.inputs[0]
        place = kernel.arguments[1] if len(kernel.arguments) > 1 else kernel.named.get("dim", 0)
        dim = place % (array.ndim + (kernel.name == "stack")) if array.ndim else 0
        found.append((math.prod(array.shape[dim:]), False))
    if len(kernel.inputs) == 1 and kernel.inputs[0].ndim and kernel.inputs[0].shape[-1] > 1:
        found += [(1, False)] * (kernel.inputs[0].stride(-1) == 0)
    return min(found, default=(0, False))


def _row_of(array: torch.Tensor) -> tuple[int, bool]:
    """The elements of an array that lie in a row, 0 if all of them; dims along which it repeats itself do not count."""
    dims = [(size, stride) for size, stride in zip(array.shape, array.stride(), strict=True) if stride and size > 1]
    run = 1
    for size, stride in reversed(dims):
        if stride != run:
            return run, run == 1 and stride * array.itemsize >= LINE
        run *= size
    return 0, False


LINE = 64  # bytes


def _is_transposed(kernel: Kernel) -> bool:
    """Whether the first operand of a product lies by columns, as that of a weight's gradient does."""
    if kernel.name not in _FIRST:
        return False
    one: torch.Tensor = kernel.arguments[_FIRST[kernel.name]]
    return one.shape[-1] > 1 and one.shape[-2] > 1 and one.stride(-1) != 1 and one.stride(-2) == 1


def _rows_added(kernel: Kernel) -> int:
    """Of a reduction that keeps the last dim, how many rows become one; 0 of any other kernel."""
    if not kernel.inputs or kernel.inputs[0].ndim < 2 or len(kernel.arguments) < 2:
        return 0
    array, dims = kernel.inputs[0], kernel.arguments[1]
    listed = [dim % array.ndim for dim in (dims if isinstance(dims, (list, tuple)) else [dims]) if type(dim) is int]
    if not listed or array.ndim - 1 in listed:
        return 0
    return math.prod(array.shape[dim] for dim in listed)
