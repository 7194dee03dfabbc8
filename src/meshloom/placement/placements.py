"""The three placements: `Shard(dim)`, `Replicate()`, `Partial(op)`; printed `S(0)`, `R`, `P(sum)`."""

from __future__ import annotations

from dataclasses import dataclass

from meshloom.errors import PlacementError, closest

# The reductions of a Partial, with what changes none: a number, or an end of the dtype's range.
IDENTITY: dict[str, int | str] = {"sum": 0, "mean": 0, "max": "lowest", "min": "highest", "prod": 1}
PARTIAL_OPS = tuple(IDENTITY)


@dataclass(frozen=True, slots=True)
class Shard:
    """Each device along the axis holds a consecutive chunk of dim `dim`.

    >>> str(Shard(0))
    'S(0)'
    """

    dim: int

    def __post_init__(self) -> None:
        if isinstance(self.dim, bool) or not isinstance(self.dim, int):
            raise PlacementError(f"Shard takes the number of a dim, not {self.dim!r}", fix="write Shard(0)")

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every device along the axis holds the same value.

    >>> str(Replicate())
    'R'
    """

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction by `op` of what the devices along the axis hold.

    >>> str(Partial())
    'P(sum)'
    """

    op: str = "sum"

    def __post_init__(self) -> None:
        if self.op not in PARTIAL_OPS:
            raise PlacementError(f"Partial has no reduction {self.op!r}", fix=closest(self.op, PARTIAL_OPS))

    def __str__(self) -> str:
        return f"P({self.op})"


Placement = Shard | Replicate | Partial
