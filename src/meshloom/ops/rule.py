"""What a rule says, as values. A rule speaks of ONE mesh axis; products of axes and prices belong to the planner."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.errors import ArgumentError
from meshloom.placement import Placement, Replicate, Topology
from meshloom.types import Shape


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands in a call's arguments for tensor operand number `index`."""

    index: int


@dataclass(frozen=True, slots=True)
class Call:
    """One op call without data: the operands' topologies, and the arguments with a `Ref` for each tensor.

    `leaves` are the positional arguments of an op without a signature, as they came.
    """

    op: str
    operands: tuple[Topology, ...]
    arguments: dict[str, Any]
    leaves: tuple[Any, ...] = ()

    def shape(self, name: str) -> Shape:
        """The global shape of the operand given as argument `name`."""
        return self.operands[self.index(name)].shape

    def index(self, name: str) -> int:
        """The number of the operand given as argument `name`."""
        ref = self.arguments[name]
        if not isinstance(ref, Ref):
            raise ArgumentError(f"{self.op} takes a tensor for {name!r}, not {ref!r}")
        return ref.index

    def has(self, name: str) -> bool:
        """Whether argument `name` is a tensor."""
        return isinstance(self.arguments.get(name), Ref)


@dataclass(frozen=True, slots=True)
class Inner:
    """A collective inside a row, of a statistic that has dims `dims` of operand `operand`, `times` over.

    `kind` is `all_reduce` with `op`, `all_gather` (every device learns what each one has), or `shift` (what a device
    holds goes once around the ring: one shift less than there are devices).
    """

    op: str
    dims: tuple[int, ...]
    operand: int = 0
    indexed: bool = False  # an int64 index travels with each element
    kind: str = "all_reduce"
    times: int = 1

    def __str__(self) -> str:
        return f"{self.kind}({self.op})" if self.kind == "all_reduce" else self.kind


@dataclass(frozen=True, slots=True)
class Even:
    """The row holds only if the shards of `dim` of operand `operand` divide `units`.

    With `alone` only if one mesh axis cuts the dim, into just as many shards as there are units.
    """

    operand: int
    dim: int
    units: int
    alone: bool = False

    def holds(self, shards: Sequence[int]) -> bool:
        """Whether the sizes of the mesh axes that cut the dim are as the row needs them.

        >>> Even(0, 1, units=8).holds((2, 4)), Even(0, 1, units=8, alone=True).holds((2, 4))
        (True, False)
        """
        cuts = [each for each in shards if each > 1]
        return cuts in ([], [self.units]) if self.alone else self.units % math.prod(cuts) == 0


@dataclass(frozen=True, slots=True)
class Row:
    """On one mesh axis: the operands' placements, the results', and what is communicated inside, forward and backward.

    `when` names what the row needs besides, a word of `algebra.CONDITIONS`: an identity may hold for some dtypes only.
    `local` says that a device computes the row with the op itself on what it holds; otherwise it needs the statistics
    of `inner`, or its place on the mesh. `across` says whether several processes can carry it out.
    """

    label: str
    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    inner: tuple[Inner, ...] = ()
    backward: tuple[Inner, ...] = ()
    even: tuple[Even, ...] = ()
    local: bool = True
    when: str = ""
    across: bool = True

    def __str__(self) -> str:
        identity = f"{', '.join(map(str, self.ins))} -> {', '.join(map(str, self.outs))}"
        return f"{identity} if {self.when}" if self.when else identity


@dataclass(frozen=True, slots=True)
class Choices:
    """What a rule offers for a call: the results' global shapes, the rows, and the arithmetic of the whole op."""

    shapes: tuple[Shape, ...]
    rows: tuple[Row, ...]
    flops: int = 0


Rule = Callable[[Call], Choices]


@dataclass(frozen=True, slots=True)
class Fill:
    """Padding of an operand along `dims` must hold `value` before the op runs: a number, "lowest" or "highest"."""

    operand: int
    value: Any
    dims: tuple[int, ...]


def no_fill(call: Call) -> tuple[Fill, ...]:
    """Nothing to fill: the op takes zero padding as it is."""
    return ()


# How a result shares its operand's memory.
VIEWS = {
    "": "not at all",
    "elements": "it shows elements of the operand, each at most once",
    "order": "it shows all elements in their order",
    "order or copy": "the same, where the operand is contiguous; else it is a copy",
    "repeated": "it may show an element more than once",
    "several": "there are several results, each a part",
}


@dataclass(frozen=True, slots=True)
class Op:
    """One line of the op table.

    `signature` are torch's argument names, or None for an op that takes its arguments as they come (pointwise).
    `at_zero` says what the op does to padding, which is zero: `zero` (nothing to do while all operands are zero there),
    `finite` (mask the result), `singular` (fill the operands with 1 first, then mask the result), `trimmed` (take the
    padding off first and put it back after, for ops whose time grows with it: 16 rows over 128 devices are stored as
    128 and would cost a matmul 7x; taking rows off is a view).
    `fill` says what an operand's padding must hold before the op runs. `result` are the dtypes of the results, in the
    words of `dtypes.py`. `view` says how the result shares the operand's memory, in a word of `VIEWS`. `is_fresh` says
    that nobody else holds the result or has saved it for backward: its memory may take a sum. `is_cast` says that
    autocast changes the operator. `surface` says where users meet the name: as `method` and function, as `function`
    only, or not at all (`inner`). `in_place` says whether a pointwise op has such a form; `rewrites` that another has
    one because its result is its first operand with some elements changed. `number` is the keyword argument that is a
    number even if a tensor is given. `takes_out` says that the function can write its result into a given array.
    """

    name: str
    rule: Rule
    signature: str | None = None
    at_zero: str = "zero"
    fill: Callable[[Call], tuple[Fill, ...]] = no_fill
    result: str = "promote"
    view: str = ""
    is_fresh: bool = False
    is_cast: bool = False
    surface: str = "method"
    in_place: bool = True
    rewrites: bool = False
    number: str = "alpha"
    takes_out: bool = False

    def __post_init__(self) -> None:
        if self.view not in VIEWS:
            raise ValueError(f"view of {self.name} is {self.view!r}: use {', '.join(VIEWS)}")
        if self.at_zero not in ("zero", "finite", "singular", "trimmed"):
            raise ValueError(f"at_zero of {self.name} is {self.at_zero!r}: use zero, finite, singular or trimmed")


def replicated(operands: int, results: int = 1) -> Row:
    """The row that every op has: everything replicated."""
    same = Replicate()
    return Row("none", (same,) * operands, (same,) * results)


def with_none(call: Call, shapes: Sequence[Shape], rows: Sequence[Row], flops: int = 0) -> Choices:
    """Choices with the replicated row at the end."""
    return Choices(tuple(shapes), (*rows, replicated(len(call.operands), len(shapes))), flops)


def named_row(call: Call, label: str, outs: Sequence[Placement], **ins: Placement) -> Row:
    """A row with the operands' placements by argument name; those without a name here are R, absent ones left out."""
    found: list[Placement] = [Replicate()] * len(call.operands)
    for name, placement in ins.items():
        if call.has(name):
            found[call.index(name)] = placement
    return Row(label, tuple(found), tuple(outs))
