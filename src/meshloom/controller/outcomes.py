"""What a call on the client leads to: decided once on shapes, then one look-up for every call like it.

The first call of a kind runs here on stand-ins without data, through the same dispatch as everywhere. What it shows is
kept: the topologies of the results, which operands they depend on, which were written to, the plans and how many random
keys were drawn. Calls whose results depend on values cannot be decided here; the workers are asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshloom.context import Event, Log
from meshloom.engines.layout import torch_dtype
from meshloom.errors import UnsupportedError
from meshloom.placement import Topology
from meshloom.runtime import state
from meshloom.tensor import random
from meshloom.tensor.base import Tensor


@dataclass(frozen=True, slots=True)
class Written:
    """Where a tensor lies after a call, whether it has a gradient, and of which operands."""

    topology: Topology
    is_tracked: bool
    parents: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class New(Written):
    """A result that is a new tensor."""

    view_of: int | None
    same_as: int | None  # the operand whose memory it is, seen in the same way, as `detach` gives it


@dataclass(frozen=True, slots=True)
class Same:
    """A result that is one of the operands."""

    place: int


@dataclass(frozen=True, slots=True)
class Many:
    """Results in a tuple, a list or a named tuple."""

    make: Callable[[list[Any]], Any]
    parts: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Constant:
    """A result that is no tensor: it follows from shapes."""

    value: Any


@dataclass(frozen=True, slots=True)
class Write(Written):
    """An operand that was written to."""

    place: int


@dataclass(slots=True)
class Outcome:
    """All that follows from a call's kind."""

    results: Any
    writes: tuple[Write, ...] = ()
    keys: int = 0
    plans: tuple[Any, ...] = ()
    events: tuple[Event, ...] = ()
    is_asked: bool = False
    is_unsure: bool = False  # of dtypes: torch casts tensors without data otherwise than those with data


# Nodes of torch whose backward may give nothing at all: the gradient of a norm with p=0 is None.
_PERHAPS_NONE = ("NormBackward", "LinalgVectorNormBackward", "DistBackward")

ASKED = Outcome(None, is_asked=True)


def warm_up() -> None:
    """Let torch load what it needs for tensors without data, which takes a second, while nobody waits for it."""
    torch.empty(1, device="meta").add(1)


def retype(found: Any, dtypes: Iterator[str]) -> Any:
    """Results with the dtypes that the workers gave them."""
    if isinstance(found, New):
        return replace(found, topology=found.topology.with_dtype(next(dtypes)))
    if isinstance(found, Same):
        next(dtypes)
    if isinstance(found, Many):
        return replace(found, parts=tuple(retype(each, dtypes) for each in found.parts))
    return found


def stand_in(topology: Topology, tracked: int) -> Tensor:
    """A tensor without data; `tracked` is 0 for none, 1 for a leaf with a gradient, 2 for what was computed."""
    dtype = torch_dtype(topology.dtype)
    data = torch.empty(topology.stored_shape, dtype=dtype, device="meta")
    if tracked:
        data.requires_grad_()
        if tracked == 2:
            with torch.enable_grad():
                data = data.clone()
    return Tensor(topology, data)


def decide(run: Callable[[], Any], operands: Sequence[Tensor]) -> tuple[Outcome, list[int]]:
    """Run a call on stand-ins and see what comes of it; the keys that it drew are given too."""
    log = Log()
    before = [(each._data, each._data._version, each.topology) for each in operands]
    roots = _roots([each._data for each in operands])
    keys: list[int] = []
    random.KEYS.drawn = keys
    try:
        with state.changed(logs=(log,), policy=None):
            result = run()
    except NotImplementedError:  # UnsupportedError is one: values are needed
        return ASKED, keys
    except RuntimeError as error:
        if type(error) is RuntimeError and "meta" in str(error):
            return ASKED, keys
        raise
    finally:
        random.KEYS.drawn = None
    reader = _Reader(list(operands), roots)
    try:
        results = reader.read(result)
    except UnsupportedError:
        return ASKED, keys
    writes = []
    for place, (each, (data, version, topology)) in enumerate(zip(operands, before, strict=True)):
        now = each._data
        if now is not data or now._version != version or each.topology is not topology:
            tracked = now.requires_grad
            writes.append(Write(each.topology, tracked, reader.parents(now) if tracked else (), place))
    plans = tuple(log.calls)
    return Outcome(results, tuple(writes), len(keys), plans, tuple(log.events)), keys


def _roots(datas: Sequence[torch.Tensor]) -> dict[Any, int]:
    """The graph nodes of operands, by node."""
    found: dict[Any, int] = {}
    for place, data in enumerate(datas):
        if data.requires_grad:
            found.setdefault(_accumulator(data) if data.grad_fn is None else data.grad_fn, place)
    return found


def _accumulator(leaf: torch.Tensor) -> Any:
    with torch.enable_grad():
        node: Any = leaf.view_as(leaf).grad_fn
    return node.next_functions[0][0]


class _Reader:
    """Results to what is kept of them."""

    def __init__(self, operands: list[Tensor], roots: dict[Any, int]) -> None:
        self.operands, self.roots = operands, roots

    def read(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            for place, operand in enumerate(self.operands):
                if operand is value:
                    return Same(place)
            data = value._data
            tracked = data.requires_grad
            parents = self.parents(data) if tracked else ()
            return New(value.topology, tracked, parents, self._base(value), self._same(value))
        if isinstance(value, torch.Tensor):
            raise UnsupportedError("a plain tensor comes from the workers")
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            kind: Any = type(value)
            return Many(lambda parts: kind(*parts), tuple(self.read(each) for each in value))
        if isinstance(value, tuple) and type(value) is not torch.Size:
            made: Any = type(value)  # torch.return_types take one sequence
            return Many(made, tuple(self.read(each) for each in value))
        if type(value) is list:
            return Many(list, tuple(self.read(each) for each in value))
        return Constant(value)

    def _base(self, value: Tensor) -> int | None:
        if value._view is None:
            return None
        base = value._view[0]
        return next((place for place, each in enumerate(self.operands) if each is base), None)

    def _same(self, value: Tensor) -> int | None:
        held = value._data.untyped_storage()._cdata
        for place, each in enumerate(self.operands):
            if each.topology is value.topology and each._data.untyped_storage()._cdata == held:
                return place
        return None

    def parents(self, data: torch.Tensor) -> tuple[int, ...]:
        """The operands from which a gradient would flow."""
        found: set[int] = set()
        seen: set[Any] = set()
        left: list[Any] = [data.grad_fn] if data.grad_fn is not None else []
        if not left and data.requires_grad:
            return tuple(place for place, each in enumerate(self.operands) if each._data is data)
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self.roots:
                found.add(self.roots[node])
                continue
            left += [each for each, _ in node.next_functions]
        if any(node.name().startswith(_PERHAPS_NONE) for node in seen):
            found = self._reached(data, found)
        return tuple(sorted(found))

    def _reached(self, data: torch.Tensor, places: set[int]) -> set[int]:
        """Those of some operands that a backward on tensors without data gives a gradient."""
        datas = [self.operands[place]._data for place in sorted(places)]
        seed = torch.empty_like(data)
        found = torch.autograd.grad(data, datas, seed, retain_graph=True, allow_unused=True)
        return {place for place, each in zip(sorted(places), found, strict=True) if each is not None}
