"""What a kernel on arrays does: which arrays it reads and writes, and how much arithmetic, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from meshloom.engines import private
from meshloom.engines.layout import short_name

# Kernels that give memory and touch none of it.
EMPTY = frozenset("empty empty_like new_empty new_empty_strided empty_strided".split())


class Kernel:
    """One kernel that has run, with its arguments and its result."""

    __slots__ = ("arguments", "fresh", "function", "inputs", "name", "named", "result")

    def __init__(self, function: Any, arguments: Sequence[Any], named: dict[str, Any], result: Any) -> None:
        self.function, self.arguments, self.named, self.result = function, arguments, named, result
        self.inputs = [*arrays_in(arguments), *arrays_in(named.values())]
        known = {address_of(each) for each in self.inputs}
        self.fresh = [each for each in arrays_in((result,)) if address_of(each) not in known]  # memory that it made
        self.name: str = function._schema.name.partition("::")[2]

    @property
    def is_view(self) -> bool:
        """Whether it only looks at memory in another way."""
        return not self.fresh and not self.function._schema.is_mutable

    @property
    def written(self) -> list[torch.Tensor]:
        """The arrays among its arguments that it writes into."""
        return [*arrays_in(_pick(self.arguments, self.named, _places_written(self.function)))]

    @property
    def flops(self) -> float:
        """Its arithmetic, if it is a product; the rest is measured by what it touches."""
        counter = _FLOPS.get(self.function._overloadpacket)
        return float(counter(*self.arguments, **self.named, out_val=self.result)) if counter is not None else 0.0

    @property
    def dtype(self) -> str:
        """The dtype of its arithmetic: the widest floating one of its arguments."""
        floating = [each.dtype for each in self.inputs if each.dtype.is_floating_point or each.dtype.is_complex]
        return short_name(max(floating, key=lambda each: each.itemsize)) if floating else ""


@cache
def _places_written(function: Any) -> tuple[tuple[int, str], ...]:
    """Which arguments a kernel writes into. Fused optimizers list gradients, which only a scaler makes them write."""
    listed = enumerate(function._schema.arguments)
    written = ((i, each.name) for i, each in listed if each.alias_info is not None and each.alias_info.is_write)
    return tuple(each for each in written if each[1] != "grads")


def _pick(arguments: Sequence[Any], named: dict[str, Any], places: Iterable[tuple[int, str]]) -> Iterator[Any]:
    for place, name in places:
        if place < len(arguments):
            yield arguments[place]
        elif name in named:
            yield named[name]


def arrays_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among values, those in lists included; sparse ones have no storage of their own."""
    for each in values:
        if isinstance(each, torch.Tensor):
            if each.layout is torch.strided:
                yield each
        elif isinstance(each, (list, tuple)):
            yield from arrays_in(each)


def address_of(array: torch.Tensor) -> int:
    """A number of an array's memory that no other memory has as long as it lives; on `meta` too."""
    address: int = array.untyped_storage()._cdata
    return address


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return flops


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)
    return flops


# torch's formulas, also for the kernel that attention takes on the CPU and on `meta`, which torch does not list
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    private.fused_attention: _attention,
    private.fused_attention_backward: _attention_backward,
}
