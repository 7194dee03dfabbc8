"""A mesh, and how a tensor lies on it, drawn as tables: one for the last two axes, several for more axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from meshloom.errors import ArgumentError
from meshloom.mesh.process import number_of
from meshloom.runtime import MeshCoordinate
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.device.system import SystemMeshDescriptor
from meshloom.ttnn.tensor.composers import extents
from meshloom.ttnn.tensor.tensor import Tensor

__all__ = ["create_system_mesh_table", "visualize_mesh_device", "visualize_system_mesh", "visualize_tensor"]

COLORS = "cyan green yellow magenta blue red bright_cyan bright_green bright_yellow bright_magenta".split()

Cell = Callable[[MeshCoordinate], Text]


def _show(picture: Any) -> None:
    """Print a picture as wide as it is: a table that is folded to the window cannot be read."""
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=1 << 16), picture).maximum
    Console(width=max(console.width, needed)).print(picture)


def grid(shape: Sequence[int], cell: Cell, title: str) -> Group:
    """A table of cells for the last two axes of a mesh shape, one for each place on the axes before them."""
    sizes = (1,) * (2 - len(shape)) + tuple(shape)
    rank = len(shape)
    return Group(
        *(
            _table(front, sizes[-2:], lambda place: cell(MeshCoordinate(place[-rank:])), title)
            for front in itertools.product(*map(range, sizes[:-2]))
        )
    )


def _table(front: tuple[int, ...], sizes: Sequence[int], cell: Callable[[tuple[int, ...]], Text], title: str) -> Group:
    where = f" at ({', '.join(map(str, front))}, *, *)" if front else ""
    table = Table(show_header=False, show_lines=True, padding=(0, 1))
    for _ in range(sizes[1]):
        table.add_column(justify="center", no_wrap=True)
    for row in range(sizes[0]):
        table.add_row(*(cell((*front, row, column)) for column in range(sizes[1])))
    return Group(Text(title + where, style="bold"), table)


# meshes


def visualize_mesh_device(mesh_device: MeshDevice) -> None:
    """Print the devices of a mesh where they are."""
    if not isinstance(mesh_device, MeshDevice):
        raise ArgumentError(f"{mesh_device!r} is not a MeshDevice")
    _show(mesh_picture(mesh_device))


def mesh_picture(mesh_device: MeshDevice) -> Group:
    """The devices of a mesh where they are."""
    ids = mesh_device.get_device_ids()
    places = list(itertools.product(*map(range, mesh_device.shape)))
    numbers = dict(zip(places, ids, strict=True))
    title = f"MeshDevice({'x'.join(map(str, mesh_device.shape))})"
    if len(mesh_device.shape) == 2:
        title = f"MeshDevice(rows={mesh_device.shape[0]}, cols={mesh_device.shape[1]})"
    return grid(mesh_device.shape, lambda place: _device_cell(numbers[tuple(place)], place), title)


def _device_cell(number: int, place: MeshCoordinate) -> Text:
    return Text(f"Dev. ID: {number}\n({', '.join(map(str, place))})")


def create_system_mesh_table() -> Group:
    """All devices of the system where they are."""
    system = SystemMeshDescriptor()
    title = f"SystemMesh {list(system.shape())}"
    return grid(system.shape(), lambda place: _device_cell(system.get_device_id(place), place), title)


def visualize_system_mesh() -> None:
    """Print all devices of the system where they are."""
    _show(create_system_mesh_table())


# tensors


def visualize_tensor(tensor: Tensor) -> None:
    """Print how a tensor lies on its mesh: what each axis does, and the slice, shape and format of every device."""
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{tensor!r} is not a ttnn.Tensor")
    _show(tensor_picture(tensor))


def tensor_picture(tensor: Tensor) -> Group:
    """How a tensor lies on its mesh. Devices that hold the same have one color."""
    held, colors = set(tensor.device_coords()), _colors(tensor)

    def cell(place: MeshCoordinate) -> Text:
        return Text("\n".join(_lines(tensor, place)), style=colors(place)) if place in held else Text("nothing", "dim")

    where = "host" if tensor.device() is None else str(tensor.device())
    return Group(Panel(_label(tensor), title="placements", expand=False), grid(tensor.grid, cell, f"Tensor on {where}"))


def _label(tensor: Tensor) -> str:
    label = tensor.tensor_topology()
    shape = label.distribution_shape()
    axes = (f"axis {i} of {n}: {p}" for i, (n, p) in enumerate(zip(shape, label.placements(), strict=True)))
    return "\n".join([f"distribution shape {list(shape)} on a mesh of {list(tensor.grid)}", *axes])


def _lines(tensor: Tensor, place: MeshCoordinate) -> Iterator[str]:
    yield f"({', '.join(map(str, place))})"
    yield f"[{', '.join(f'{start}:{end}' for start, end in extents(tensor, place))}]"
    yield f"shape {list(tensor.shape)}"
    yield tensor.dtype.name
    yield tensor.layout.name


def _colors(tensor: Tensor) -> Callable[[MeshCoordinate], str]:
    """A color for each part that the tensor keeps: axes along which all hold the same do not count."""
    block = tensor.block if tensor.is_allocated() else None
    lead = block.shape[: len(tensor.grid)] if block is not None else (1,) * len(tensor.grid)

    def color(place: MeshCoordinate) -> str:
        number = number_of([c if size > 1 else 0 for c, size in zip(place, lead, strict=True)], lead)
        return COLORS[number % len(COLORS)]

    return color if math.prod(lead) > 1 else lambda _: COLORS[0]
