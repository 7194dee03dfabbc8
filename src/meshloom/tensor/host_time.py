"""How long a piece of program takes on this machine, by its tables: every kernel priced, none of them timed.

On `device="meta"` nothing is computed; on data the program runs, and is not timed either.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from meshloom.context import Event, Log, state
from meshloom.cost.host import FRESH, Work, kernel_seconds, kind_of
from meshloom.engines import private
from meshloom.fabric.host import Host
from meshloom.tensor.kernel_work import EMPTY, Kernel, arrays_in
from meshloom.tensor.recording import Kernels


class HostTime(Log):
    """What a piece of program takes on a host, in seconds, by kind of kernel and by what calls cost besides."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self.host, self.kernels = host, 0
        self.by_kind: defaultdict[str, float] = defaultdict(float)
        self._is_inside = False

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.by_kind.values())

    def see(self, kernel: Kernel) -> None:
        """A kernel has run."""
        work = work_of(kernel)
        self.kernels += not work.is_view
        kind = "product" if work.product is not None else kind_of(work)
        self.by_kind[kind] += kernel_seconds(work, self.host)
        if private.current_node() is not None:
            self.by_kind["kernel"] += self.host.calls["kernel"]

    def begin_call(self, call: object, where: str, tensors: Sequence[Any]) -> None:
        """A planned call."""
        self._is_inside = True
        self.by_kind["op"] += self.host.calls["op"]

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


@contextmanager
def host_time(host: Host) -> Iterator[HostTime]:
    """The predicted time of what runs inside."""
    found = HostTime(host)
    with state.changed(logs=(*state.logs, found)), Kernels(found):
        yield found


def work_of(kernel: Kernel) -> Work:
    """A kernel as the tables know it."""
    name, inputs = kernel.name, kernel.inputs
    written = 0 if kernel.fresh else sum(_bytes(each) for each in kernel.written)
    read = {(each.data_ptr() or id(each), each.shape): each for each in inputs}.values()  # x + x reads x once
    touched = sum(map(_bytes, read)) + sum(map(_bytes, kernel.fresh)) + written
    items = next((len(each) for each in kernel.arguments if isinstance(each, list) and each), 0)
    return Work(
        name,
        touched,
        kernel.dtype or "f32",
        _product_of(kernel),
        kernel.flops,
        items if name.startswith(("_foreach", "_fused_ad", "_fused_sgd")) else 0,
        sum(each.nbytes for each in kernel.fresh if each.nbytes >= FRESH),
        rows=_rows_added(kernel),
        order=max(map(_order_of, inputs), default=""),
        is_across=name in _SOFTMAXES and kernel.arguments[_SOFTMAXES[name]] % inputs[0].ndim != inputs[0].ndim - 1,
        is_view=kernel.is_view or name in EMPTY,
    )


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


_SOFTMAXES = {"_softmax": 1, "_log_softmax": 1, "_softmax_backward_data": 2, "_log_softmax_backward_data": 2}


def _order_of(array: torch.Tensor) -> str:
    """Whether its elements lie apart in memory (or in runs shorter than a line of the cache), or in longer runs.

    Dims along which it repeats itself do not count.
    """
    dims = [(size, stride) for size, stride in zip(array.shape, array.stride(), strict=True) if stride and size > 1]
    run = 1
    for size, stride in reversed(dims):
        if stride != run:
            return "turned" if run * array.itemsize < LINE else "strided"
        run *= size
    return ""


LINE = 64  # bytes


def _rows_added(kernel: Kernel) -> int:
    """Of a reduction that keeps the last dim, how many rows become one; 0 of any other kernel."""
    if not kernel.inputs or kernel.inputs[0].ndim < 2 or len(kernel.arguments) < 2:
        return 0
    array, dims = kernel.inputs[0], kernel.arguments[1]
    listed = [dim % array.ndim for dim in (dims if isinstance(dims, (list, tuple)) else [dims]) if type(dim) is int]
    if not listed or array.ndim - 1 in listed:
        return 0
    return math.prod(array.shape[dim] for dim in listed)
