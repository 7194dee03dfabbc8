"""How long an all-reduce takes by ring, tree and in two dimensions: on a T3000, a Galaxy and a torus of 1024 devices.

Nothing is sent: the schedules are simulated on the links of each machine. The chosen timeline opens in Perfetto.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

import meshloom as loom
from meshloom import FabricError
from meshloom.collectives.algorithms import ALGORITHMS
from meshloom.collectives.schedule import Schedule
from meshloom.fabric import Fabric, preset

SIZES = {"4 KB": 4 << 10, "256 KB": 256 << 10, "16 MB": 16 << 20, "1 GB": 1 << 30}
# For each idea the algorithms to take, the first one that the links allow.
IDEAS = {
    "ring": ("bidirectional_ring", "ring"),
    "tree": ("tree", "spanning_tree"),
    "2-D": ("torus_split", "grid_split", "grid"),
}


def machines(side: int) -> Iterator[tuple[str, Fabric]]:
    """The fabrics to compare; the large torus has the links of a Galaxy."""
    yield "T3000, 2x4", preset("t3000").fabric()
    yield "Galaxy, 8x4", preset("galaxy").fabric()
    yield f"torus, {side}x{side}", preset("galaxy").fabric((side, side), "ring")


def first_that_fits(names: tuple[str, ...], fabric: Fabric) -> Schedule:
    """The schedule of the first algorithm whose links the fabric has."""
    for name in names:
        try:
            return ALGORITHMS["all_reduce", name](fabric.coordinates(), fabric)
        except FabricError as error:
            refused = error
    raise refused


def compare(side: int, out: Path) -> Table:
    """A row for each machine and idea, a column for each size; the 2-D run on the Galaxy becomes the timeline."""
    table = Table("machine", "all-reduce by", "steps", *SIZES, title="predicted microseconds")
    for title, fabric in machines(side):
        for idea, names in IDEAS.items():
            schedule = first_that_fits(names, fabric)
            found = [loom.simulate(schedule, fabric, size) for size in SIZES.values()]
            times = (f"{each.time * 1e6:,.1f}" for each in found)
            table.add_row(title, f"{idea} ({schedule.algorithm})", str(len(schedule.steps)), *times)
            if idea == "2-D" and title.startswith("Galaxy"):
                found[1].timeline(out)
        table.add_section()
    return table


def main() -> None:
    """Print the table and write the timeline."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fabric-timeline.json"), help="where the timeline goes")
    parser.add_argument("--side", type=int, default=32, help="the torus has side x side devices (default 32)")
    arguments = parser.parse_args()
    if arguments.side < 3:
        parser.error("a torus needs a side of at least 3")
    table = compare(arguments.side, arguments.out)
    Console(width=110).print(table)
    print(f"timeline of the 2-D all-reduce of 256 KB on the Galaxy: {arguments.out}")
    print("open it at ui.perfetto.dev")


if __name__ == "__main__":
    main()
