"""Equal layers once: modules whose paths differ in an index and which do the same are one line with a count.

`GPT.blocks.0.attention` to `GPT.blocks.31.attention` become `GPT.blocks.[0-31].attention` if the blocks do the same
calls on the same shapes with the same placements, in every phase; blocks that differ stay apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from meshloom.cost.step import Node
from meshloom.types import spell_numbers


class Folding:
    """How the paths of a step's modules are written with equal layers folded."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.labels: dict[str, str] = {}  # of each path that ends in an index, how that index is written
        self.known: dict[str, str] = {}
        for container, layers in _layers(nodes).items():
            for indices in _alike(layers):
                label = _write(indices)
                self.labels.update((f"{container}.{index}", label) for index in indices)

    def path(self, module: str) -> str:
        """A path with equal layers folded.

        >>> Folding([]).path("GPT.norm")
        'GPT.norm'
        """
        if module not in self.known:
            parts = module.split(".")
            written = [self.labels.get(".".join(parts[: i + 1]), part) for i, part in enumerate(parts)]
            self.known[module] = ".".join(written)
        return self.known[module]


def _layers(nodes: Iterable[Node]) -> dict[str, dict[int, list[object]]]:
    """For each path in front of an index: what the module of each index does."""
    found: dict[str, dict[int, list[object]]] = defaultdict(lambda: defaultdict(list))
    for node in nodes:
        parts = node.module.split(".")
        for place, part in enumerate(parts):
            if part.isdigit():
                does = (tuple(parts[place + 1 :]), _signature(node))
                found[".".join(parts[:place])][int(part)].append(does)
    return found


def _signature(node: Node) -> object:
    """What makes a node the same as another."""
    return (
        node.op, node.phase, node.where, node.operands, node.results, node.kernels, node.loads, node.before, node.after
    )  # fmt: skip


def _alike(layers: dict[int, list[object]]) -> list[list[int]]:
    """Indices of layers that do the same."""
    groups: dict[object, list[int]] = defaultdict(list)
    for index in sorted(layers):
        groups[tuple(layers[index])].append(index)
    return list(groups.values())


def _write(indices: Sequence[int]) -> str:
    """Indices in short.

    >>> _write([3]), _write([0, 1, 2, 3]), _write([0, 2, 3, 7])
    ('3', '[0-3]', '[0,2-3,7]')
    """
    return str(indices[0]) if len(indices) == 1 else f"[{spell_numbers(indices)}]"
