"""What one device does for a call: its arithmetic and its memory traffic, on the local shapes of the fullest device.

Every operand is read once and every result written once, as large as the device holds it: a replicated or a partial
one whole, a sharded one by its chunk (9 rows over 8 devices are chunks of 2). The arithmetic is divided by the labels
that are sharded, likewise by chunks; where a row shards nothing, every device does all of it. A view costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from meshloom.fabric import Machine
from meshloom.ops import Call, Choices, Row, find
from meshloom.placement import Placement, Shard
from meshloom.types import Shape, itemsize, numel


@dataclass(frozen=True, slots=True)
class Load:
    """The arithmetic and the memory traffic of one device.

    >>> from meshloom.fabric import VIRTUAL
    >>> f"{Load(flops=65.5e9, bytes=288e3).seconds(VIRTUAL) * 1e3} ms"
    '1.0 ms'
    """

    flops: float
    bytes: float

    def seconds(self, machine: Machine) -> float:
        """What it takes on a machine, where arithmetic and traffic overlap."""
        return machine.compute(self.flops, self.bytes)


NOTHING = Load(0.0, 0.0)


def load_of(call: Call, choices: Choices, rows: Sequence[Row], dtypes: Sequence[str]) -> Load:
    """What the fullest device does under a row for each mesh axis; `dtypes` are those of the results.

    >>> from meshloom.mesh import Mesh
    >>> from meshloom.ops import Ref
    >>> from meshloom.placement import Replicate, Topology
    >>> mesh = Mesh.of((8,), ("tp",))
    >>> x, w = (Topology(mesh, (Replicate(),), shape, "f32") for shape in ((9, 4), (4, 5)))
    >>> call = Call("matmul", (x, w), {"input": Ref(0), "other": Ref(1)})
    >>> choices = find("matmul").rule(call)
    >>> rows = {row.label: row for row in choices.rows}
    >>> load_of(call, choices, [rows["m"]], ["f32"])  # chunks of 2 rows; w is read whole
    Load(flops=80.0, bytes=152)
    >>> load_of(call, choices, [rows["none"]], ["f32"])
    Load(flops=360.0, bytes=404)
    """
    if find(call.op).view:
        return NOTHING
    sizes = call.operands[0].mesh.shape
    traffic = 0
    for i, operand in enumerate(call.operands):
        held = numel(chunk(operand.shape, (row.ins[i] for row in rows), sizes))
        traffic += held * itemsize(operand.dtype)
    for i, (shape, dtype) in enumerate(zip(choices.shapes, dtypes, strict=True)):
        traffic += numel(chunk(shape, (row.outs[i] for row in rows), sizes)) * itemsize(dtype)
    return Load(choices.flops * _share(call, choices, rows, sizes), traffic)


def chunk(shape: Shape, placements: Iterable[Placement], sizes: Sequence[int]) -> Shape:
    """What the fullest device holds: chunks are ceil sized and nest, left mesh axis first."""
    left = list(shape)
    for placement, devices in zip(placements, sizes, strict=True):
        if placement.__class__ is Shard:
            dim = placement.dim
            left[dim] = -(-left[dim] // devices)
    return tuple(left)


def _share(call: Call, choices: Choices, rows: Sequence[Row], sizes: Sequence[int]) -> float:
    """Which part of the arithmetic the fullest device has: what it has of every dim that a row shards."""
    share = 1.0
    left: dict[tuple[int, int], int] = {}
    for row, devices in zip(rows, sizes, strict=True):
        found = cut_of(row)
        if found is None:
            continue
        place, dim = found
        shape = call.operands[place].shape if place >= 0 else choices.shapes[~place]
        before = left.get(found, shape[dim])
        left[found] = after = -(-before // devices)
        share *= after / before if before else 1.0
    return share


def cut_of(row: Row) -> tuple[int, int] | None:
    """The operand that a row shards, and its dim; a result, as ~number, if it shards no operand; None if neither."""
    for place, placement in enumerate(row.ins):
        if placement.__class__ is Shard:
            return place, placement.dim
    for place, placement in enumerate(row.outs):
        if placement.__class__ is Shard:
            return ~place, placement.dim
    return None
