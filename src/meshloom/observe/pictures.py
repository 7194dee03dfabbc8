"""Pictures for the terminal: a mesh, where a tensor's parts lie on it, and a table of what communicated."""

from __future__ import annotations

import io
import itertools
from typing import Any

from meshloom.mesh import Mesh
from meshloom.placement import Topology, cut
from meshloom.runtime import Log


def draw_mesh(mesh: Mesh) -> str:
    """The mesh as a grid of device ids: the last axis across, the others down.

    >>> print(draw_mesh(Mesh(dp=2, tp=3)))
    Mesh(dp=2, tp=3)  6 devices
      dp\\tp  0  1  2
      0      0  1  2
      1      3  4  5
    """
    lead = mesh.shape[:-1] if mesh.ndim else ()
    across = mesh.shape[-1] if mesh.ndim else 1
    corner = ",".join(mesh.axes[:-1]) + "\\" + (mesh.axes[-1] if mesh.ndim else "")
    rows = [[corner, *map(str, range(across))]]
    for place, start in zip(itertools.product(*map(range, lead)), range(0, mesh.size, across), strict=True):
        rows.append([",".join(map(str, place)), *map(str, mesh.device_ids[start : start + across])])
    widths = [max(len(row[column]) for row in rows) for column in range(across + 1)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([f"{mesh}  {mesh.size} device{'' if mesh.size == 1 else 's'}", *("  " + line for line in lines)])


def draw(tensor: Any) -> str:
    """A tensor (or a topology) cut into its shards: each cell says which coordinates hold it, `*` for all of an axis.

    >>> from meshloom.placement import Replicate, Shard
    >>> print(draw(Topology(Mesh(dp=2, tp=2), (Shard(0), Replicate()), (4, 6), "f32")))
    f32[4, 6](S(0), R) on Mesh(dp=2, tp=2)
      ┌──────────────┐
      │ 0:2, 0:6     │
      │ dp=0 tp=*    │
      ├──────────────┤
      │ 2:4, 0:6     │
      │ dp=1 tp=*    │
      └──────────────┘
    """
    topology = tensor if isinstance(tensor, Topology) else tensor.topology
    whole = cut(topology)
    down, across = (list(itertools.product(*map(range, whole.shape(axes)))) for axes in (whole.down, whole.across))
    pieces = [[whole.piece(top, left) for left in across] for top in down]
    cells = [[(piece.held, piece.owners) for piece in row] for row in pieces]
    width = max((len(line) for row in cells for cell in row for line in cell), default=4)
    width = max(width + 2, 14)
    bars = [start + middle.join(["─" * width] * len(across)) + end for start, middle, end in ("┌┬┐", "├┼┤", "└┴┘")]
    lines = [str(topology), "  " + bars[0]]
    for number, row in enumerate(cells):
        if number:
            lines.append("  " + bars[1])
        for texts in zip(*row, strict=True):
            lines.append("  │" + "│".join(f" {text}".ljust(width) for text in texts) + "│")
    return "\n".join([*lines, "  " + bars[2]])


def communication_table(log: Log) -> str:
    """What a log recorded, summed by op, collective and axis.

    >>> import meshloom as loom
    >>> with loom.record() as log:
    ...     total = loom.ones(4, mesh=loom.open_mesh((2,), axes=("dp",))).sum()
    >>> "all_reduce(sum)" in communication_table(log)
    True
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("op", "phase", "collective", "axis", "times", "bytes per device", title="communication")
    sums: dict[tuple[str, ...], list[int]] = {}
    for event in log:
        name = event.kind if event.collective.op is None else f"{event.kind}({event.collective.op})"
        entry = sums.setdefault((event.call, event.phase, name, event.axis), [0, 0])
        entry[0] += 1
        entry[1] += event.bytes
    for key, (times, size) in sums.items():
        table.add_row(*key, str(times), f"{size:,}")
    table.add_section()
    table.add_row("all", "", "", "", str(len(log)), f"{log.bytes:,}")
    out = io.StringIO()
    Console(file=out, width=100).print(table)
    return out.getvalue().rstrip()
