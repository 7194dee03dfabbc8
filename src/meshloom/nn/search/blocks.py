"""A model with few of its equal blocks, without data, and how many of each kind the whole model has.

Blocks of one kind do the same work, so that time and memory of a step grow by the same amount with each: a model with
one block of each kind and one with two tell what one with eighty needs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from meshloom.nn.roles import blocks_of

_Module = TypeVar("_Module", bound=nn.Module)
Kind = tuple[str, int]  # the list that blocks are in, and which of its kinds of blocks


def copy_without_data(module: _Module) -> _Module:
    """The same module on `meta`: nothing is computed, and the given one is left alone.

    >>> copy_without_data(nn.Linear(2, 3)).weight
    Parameter containing:
    tensor(..., device='meta', size=(3, 2), requires_grad=True)
    """
    memo: dict[int, object] = {}
    for each in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(each, device="meta")
        is_parameter = isinstance(each, nn.Parameter)
        memo[id(each)] = nn.Parameter(empty, requires_grad=each.requires_grad) if is_parameter else empty
    return copy.deepcopy(module, memo)


class Folded:
    """A model without data, and models like it with fewer blocks."""

    def __init__(self, module: nn.Module) -> None:
        self.whole = copy_without_data(module)
        self._kept: dict[tuple[tuple[Kind, int], ...], nn.Module] = {}

    @cached_property
    def counts(self) -> dict[Kind, int]:
        """How many blocks of each kind the model has."""
        found: dict[Kind, int] = {}
        for kinds in self._kinds.values():
            for kind in kinds:
                found[kind] = found.get(kind, 0) + 1
        return found

    @cached_property
    def _kinds(self) -> dict[str, list[Kind]]:
        """For each list of blocks, the kind of each of them."""
        found = {}
        for name in blocks_of(self.whole):
            seen: dict[object, int] = {}
            children = self.whole.get_submodule(name).children()
            found[name] = [(name, seen.setdefault(_signature(each), len(seen))) for each in children]
        return found

    def with_blocks(self, counts: Mapping[Kind, int]) -> nn.Module:
        """A fresh copy of the model with the first so many blocks of each kind; kinds that are not named stay whole."""
        key = tuple(sorted(counts.items()))
        if key not in self._kept:
            self._kept[key] = self._cut(counts)
        return copy.deepcopy(self._kept[key])

    def _cut(self, counts: Mapping[Kind, int]) -> nn.Module:
        model = copy.deepcopy(self.whole)
        for name, kinds in self._kinds.items():
            left = dict(counts)
            blocks: Any = model.get_submodule(name)
            for place in reversed([*_surplus(kinds, left)]):
                del blocks[place]
        return model


def _surplus(kinds: Iterable[Kind], left: dict[Kind, int]) -> Iterable[int]:
    """The places of blocks of which there are enough already."""
    for place, kind in enumerate(kinds):
        if kind in left:
            if not left[kind]:
                yield place
            else:
                left[kind] -= 1


def _signature(block: nn.Module) -> object:
    """What makes two blocks do the same: the same modules with the same parameters and the same switches."""
    parameters = tuple(
        (name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in block.named_parameters()
    )
    switches = tuple((name, type(each).__name__, _switches(each)) for name, each in block.named_modules())
    return parameters, switches


def _switches(module: nn.Module) -> tuple[tuple[str, object], ...]:
    """What a module's own attributes choose. A number may be its place in the list; that there is one is a choice."""
    found = {name: each for name, each in vars(module).items() if not name.startswith("_")}
    chosen = {name: each for name, each in found.items() if each is None or isinstance(each, (bool, str, int, float))}
    plain = {name: "number" if type(each) in (int, float) else each for name, each in chosen.items()}
    return tuple(sorted(plain.items(), key=lambda pair: pair[0]))
