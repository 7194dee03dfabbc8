"""Calls seen before: their plans and kernels, by key. The one cache that every way to call an op looks into."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from meshloom.engines.kernel import Function, Kernel
from meshloom.engines.layout import short_name, torch_dtype
from meshloom.mesh import Lease
from meshloom.ops import OPS
from meshloom.placement import Topology
from meshloom.planner import Plan
from meshloom.runtime import leases
from meshloom.tensor.base import Tensor, maker
from meshloom.tensor.binding import NUMBERS
from meshloom.tensor.gradient_sums import Back, follow

LIMIT = 1 << 14


class Entry:
    """A call seen before: its plan, its kernel and the topologies that come out."""

    __slots__ = (
        "_back", "communicates_back", "direct", "is_view", "kernel", "leased", "makers", "op", "out", "outs", "plan",
        "salt", "wrap",
    )  # fmt: skip

    def __init__(self, decided: Plan, kernel: Kernel, direct: Function | None) -> None:
        self.plan = decided
        self.kernel = kernel
        self.outs = decided.outs
        self.out = decided.outs[0]
        self.direct = direct
        self.op = decided.call.op
        self.is_view, self.leased = bool(OPS[self.op].view), decided.mesh.lease is not None
        dtype = torch_dtype(self.out.dtype)
        # tensors for a result of this dtype, without a gradient and with one
        self.makers = maker(self.out, dtype, False), maker(self.out, dtype, True), dtype
        self.wrap = _make_wrap(self)  # the results of the kernel as tensors
        self.salt = _salt(decided) if decided.mesh.is_split else 0  # of what this call makes of its operands' numbers
        self._back: Back | None = None
        self.communicates_back = True  # until the first call with a gradient has looked

    def back(self) -> Back:
        """What its backward communicates."""
        if self._back is None:
            plan, places = self.plan, range(len(self.plan.call.operands))
            lasts = tuple(self.kernel.ins[i].placements == plan.call.operands[i].placements for i in places)
            self._back = Back(plan.backward_results(), tuple(plan.backward(i) for i in places), lasts)
            self.communicates_back = bool(self._back)
        return self._back

    def follow(
        self,
        results: torch.Tensor | tuple[torch.Tensor, ...],
        tensors: Sequence[Tensor],
        is_written: bool = False,
        depth: int = 3,
    ) -> Any:
        """The results; if they have a backward that communicates, it is seen. `depth` is that of the program."""
        tracked = results.requires_grad if isinstance(results, torch.Tensor) else any(r.requires_grad for r in results)
        if tracked:
            back = self.back() if self._back is None else self._back
            if self.communicates_back:
                return follow(self.op, back, results, tensors, is_written, depth)
        return results


def _make_wrap(entry: Entry) -> Callable[[Any], Any]:
    out, leased, (free, tracked, dtype) = entry.out, entry.leased, entry.makers
    outs, pack = entry.outs, getattr(torch.return_types, entry.op.removesuffix("_dim"), tuple)  # torch's max_dim is max

    def wrap(results: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        if results.__class__ is torch.Tensor and results.is_cpu and results.dtype is dtype and not leased:
            made = tracked() if results.requires_grad else free()
            made._data, made.topology = results, out
            return made
        if isinstance(results, torch.Tensor):
            return wrap_array(out, results)
        return pack([wrap_array(topology, result) for topology, result in zip(outs, results, strict=True)])

    return wrap


def wrap_array(topology: Topology, data: torch.Tensor) -> Tensor:
    """An array as a tensor of a topology, in the dtype that it has: torch's default dtype is in no key."""
    return Tensor(topology.with_dtype(short_name(data.dtype)), data)


def _salt(decided: Plan) -> int:
    """A number of a call and its arguments that is the same in every process; 0 stands for one process."""
    call = decided.call
    plain = {name: each for name, each in call.arguments.items() if isinstance(each, (int, float, str, tuple))}
    return zlib.crc32(f"{call.op} {call.operands} {plain} {call.leaves}".encode()) or 1


def identity(salt: int, tensors: Iterable[Tensor], arguments: Iterable[object] = ()) -> int:
    """What a call makes of its operands: which tensors it works on, as a number that is the same in every process."""
    return hash((salt, *[tensor._number for tensor in tensors], *number_arguments(arguments))) & MASK


def number_arguments(arguments: Iterable[object]) -> list[int]:
    """The numbers among a call's arguments, as they count in `identity`."""
    return [hash(each) for each in arguments if each.__class__ in NUMBERS and each == each]


MASK = (1 << 63) - 1
CACHE: dict[Any, Entry] = {}
CACHES: list[dict[Any, Any]] = [CACHE]  # and the short ways to its entries
_LEASED: dict[Lease | None, set[Any]] = {}  # the keys of calls on meshes that end
_LOCK = threading.Lock()


def remember(key: object, entry: Entry) -> None:
    """Keep an entry; the oldest goes when the cache is full."""
    with _LOCK:
        if len(CACHE) >= LIMIT:
            oldest = next(iter(CACHE))
            _LEASED.get(CACHE.pop(oldest).plan.mesh.lease, set()).discard(oldest)
        CACHE[key] = entry
        lease = entry.plan.mesh.lease
        if lease is not None:
            _LEASED.setdefault(lease, set()).add(key)


def forget(lease: Lease) -> None:
    """Drop the entries of calls on a mesh that has come to its end."""
    with _LOCK:
        for key in _LEASED.pop(lease, ()):
            CACHE.pop(key, None)


def forget_all() -> None:
    """Drop every call that was seen: the next one like it is planned again."""
    with _LOCK:
        for each in CACHES:
            each.clear()
        _LEASED.clear()


leases.listen(forget)
