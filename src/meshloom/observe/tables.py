"""Where the time of a step goes: totals by module (equal layers folded), phase, axis, line or kind, and as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from meshloom.cost.step import Node
from meshloom.errors import BoundsError, closest
from meshloom.observe.timing import Slice


@dataclass
class Total:
    """What several nodes cost together on one device."""

    name: str
    calls: int = 0  # nodes
    compute: float = 0.0  # seconds
    communication: float = 0.0  # seconds of collectives, hidden ones included
    exposed: float = 0.0  # seconds of collectives in which the device only waits
    flops: float = 0.0  # of one device
    bytes: int = 0  # that one device receives
    modules: set[str] = field(default_factory=set)  # the modules that are folded into this line

    @property
    def time(self) -> float:
        """The seconds that it adds to the step: compute, and communication that nothing hides."""
        return self.compute + self.exposed

    @property
    def count(self) -> int:
        """How many equal modules the line stands for."""
        return max(len(self.modules), 1)

    def add(self, node: Node, slices: Iterable[Slice]) -> None:
        """One more node."""
        self.calls += 1
        self.flops += node.flops
        for each in slices:
            self.add_slice(each)

    def add_slice(self, each: Slice) -> None:
        """Time that a node takes, or a collective."""
        if each.stream == "compute":
            self.compute += each.duration
        else:
            self.communication += each.duration
            self.exposed += each.exposed
            self.bytes += each.bytes


@dataclass(frozen=True)
class Table:
    """Lines of totals, largest first; `str` of it is the text."""

    by: str
    rows: tuple[Total, ...]
    time: float  # of the whole step
    shown: int = 40  # lines that the text has

    def __getitem__(self, name: str) -> Total:
        """A line by its name."""
        for row in self.rows:
            if row.name == name:
                return row
        raise BoundsError(f"no line is called {name!r}", fix=closest(name, [row.name for row in self.rows]))

    def __iter__(self) -> Iterator[Total]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __str__(self) -> str:
        width = max([len(self.by), *(len(row.name) + 6 for row in self.rows[: self.shown])])
        columns = "".join(f" {each:>10}" for each in ("compute", "links", "waits", "GFLOP", "MB"))
        lines = [
            f"{self.by:<{width}} {'ms':>10} {'share':>6}{columns}",
            *(self._line(row, width) for row in self.rows[: self.shown]),
        ]
        left = len(self.rows) - self.shown
        return "\n".join([*lines, *([f"and {left} more lines, in .rows"] if left > 0 else [])])

    def _line(self, row: Total, width: int) -> str:
        name = row.name if row.count == 1 else f"{row.name} x{row.count}"
        share = 100 * row.time / self.time if self.time else 0.0
        times = f"{1e3 * row.time:10.3f} {share:5.1f}% {1e3 * row.compute:10.3f} {1e3 * row.communication:10.3f}"
        return f"{name:<{width}} {times} {1e3 * row.exposed:10.3f} {row.flops / 1e9:10.1f} {row.bytes / 1e6:10.2f}"


def total_by(key: Callable[[Node], str], nodes: Sequence[Node], slices: dict[int, list[Slice]]) -> dict[str, Total]:
    """Totals of the nodes with the same key."""
    found: dict[str, Total] = {}
    for node in nodes:
        name = key(node)
        total = found.setdefault(name, Total(name))
        total.add(node, slices.get(node.number, ()))
        total.modules.add(node.module)
    return found


@dataclass
class Branch:
    """A module in the tree of a model, with all that happens in it; equal layers are one branch with a count."""

    name: str  # the last part of the path
    path: str  # the whole path, with equal layers folded
    total: Total  # of the module and everything in it, all equal ones together
    children: dict[str, Branch] = field(default_factory=dict)
    ops: dict[str, Total] = field(default_factory=dict)  # what it does itself, by phase and op

    @property
    def count(self) -> int:
        """How many equal modules the branch stands for."""
        return self.total.count


def grow_tree(fold: Callable[[str], str], nodes: Sequence[Node], slices: dict[int, list[Slice]], root: str) -> Branch:
    """The modules of a step as a tree, from one root for all."""
    tree = Branch(root, "", Total(root))
    for node in nodes:
        parts, folded = node.module.split("."), fold(node.module).split(".")
        own = slices.get(node.number, ())
        tree.total.add(node, own)
        branch = tree
        for depth, part in enumerate(folded if node.module else ()):
            path = ".".join(folded[: depth + 1])
            branch = branch.children.setdefault(part, Branch(part, path, Total(path)))
            branch.total.add(node, own)
            branch.total.modules.add(".".join(parts[: depth + 1]))
        name = f"{node.op} ({node.phase})"
        branch.ops.setdefault(name, Total(name)).add(node, own)
    return tree
