"""A mesh as a picture for notebooks: SVG in HTML, the last axis across, the others down. Start with `draw_devices`.

The pieces that pictures are made of (`box`, `svg`, `page`, `colour`) serve other rooms too. All text is escaped here,
and nothing is loaded from anywhere.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from meshloom.mesh.mesh import Coordinate, Mesh
from meshloom.mesh.process import place_of

MOST = 12  # rows and columns that are drawn; of more, the first and the last
INK, EMPTY = "#222222", "#ffffff"
WIDE, HIGH, LETTER, LINE = 44, 26, 6.1, 13  # a device; a letter and a line of text


def colour(number: int) -> str:
    """A light colour for each number; neighbours are far apart on the wheel.

    >>> colour(0), colour(1)
    ('#eba3a3', '#a3ebb8')
    """
    parts = colorsys.hls_to_rgb(number * 0.381966 % 1, 0.78, 0.64)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def places_to_draw(count: int) -> list[int | None]:
    """The places of a side that are drawn; None stands for all that are left out.

    >>> places_to_draw(3), places_to_draw(100)[4:9]
    ([0, 1, 2], [4, 5, None, 94, 95])
    """
    half = MOST // 2
    return list(range(count)) if count <= MOST else [*range(half), None, *range(count - half, count)]


def write(x: float, y: float, text: str, anchor: str = "middle") -> str:
    """A line of text around a point."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" dominant-baseline="central">{escape(text)}</text>'


def box(
    x: float, y: float, width: float, height: float, fill: str, lines: Sequence[str], title: str, dashed: bool = False
) -> str:
    """A filled rectangle, with its lines of text if they fit, and a title for who points at it."""
    fits = len(lines) * LINE <= height and max(map(len, lines), default=0) * LETTER <= width
    top = y + height / 2 - LINE * (len(lines) - 1) / 2
    said = "".join(write(x + width / 2, top + LINE * i, line) for i, line in enumerate(lines)) if fits else ""
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{INK}"{dash}/>'
    return f"<g><title>{escape(title)}</title>{shape}{said}</g>"


def svg(kind: str, width: float, height: float, parts: Iterable[str]) -> str:
    """Parts as one picture."""
    style = "margin:4px 16px 4px 0;vertical-align:top"
    size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    font = f'fill="{INK}" font-family="monospace" font-size="10"'
    return f'<svg class="meshloom-{kind}" {size} {font} style="{style}">{"".join(parts)}</svg>'


def page(caption: str, pictures: Iterable[str], notes: Iterable[str] = (), text: str = "") -> str:
    """Pictures under a caption, then notes, then text as it is."""
    style = f"color:{INK};background:{EMPTY};padding:6px;font-family:sans-serif;font-size:12px"
    said = "".join(f"<div>{escape(each)}</div>" for each in notes)
    after = f'<pre style="color:{INK};background:{EMPTY};margin:4px 0">{escape(text)}</pre>' if text else ""
    return f'<div style="{style}"><code>{escape(caption)}</code><div>{"".join(pictures)}</div>{said}{after}</div>'


Fill = Callable[[Coordinate], tuple[str, str]]


def draw_devices(mesh: Mesh, fill: Fill) -> str:
    """The devices of a mesh; `fill` gives the colour of each, and what it is said to hold.

    >>> draw_devices(Mesh(dp=2, tp=4), lambda place: (EMPTY, "nothing")).count("<rect")
    8
    """
    rows, columns = list(shown_places(mesh.shape[:-1])), places_to_draw(mesh.shape[-1] if mesh.ndim else 1)
    names = [_label(mesh.axes[:-1], place) for place in rows]
    left = 8 + LETTER * max(map(len, names), default=0)
    parts = [
        write(left + WIDE * (i + 0.5), 8, "…" if place is None else _label(mesh.axes[-1:], (place,)))
        for i, place in enumerate(columns)
    ]
    for row, (lead, name) in enumerate(zip(rows, names, strict=True)):
        y = 18 + HIGH * row
        parts.append(write(left - 4, y + HIGH / 2, name, "end"))
        for column, place in enumerate(columns):
            if lead is not None and place is not None:
                where = (*lead, place)[: mesh.ndim]
                parts.append(_device(mesh, where, left + WIDE * column, y, fill))
    return svg("mesh", left + WIDE * len(columns) + 2, 20 + HIGH * len(rows), parts)


def shown_places(shape: Sequence[int]) -> Iterator[Coordinate | None]:
    """The coordinates of some axes that are drawn, row-major; None stands for all that are left out.

    >>> list(shown_places((1, 2)))
    [(0, 0), (0, 1)]
    """
    for number in places_to_draw(math.prod(shape)):
        yield None if number is None else place_of(number, shape)


def _label(axes: Sequence[str], place: Coordinate | None) -> str:
    if place is None:
        return "…"
    return " ".join(f"{name}={each}" for name, each in zip(axes, place, strict=False))


def _device(mesh: Mesh, where: Coordinate, x: float, y: float, fill: Fill) -> str:
    number = mesh.device_id(where)
    inside, held = fill(where)
    return box(x, y, WIDE, HIGH, inside, [str(number)], f"device {number} at {where}: {held}", inside == EMPTY)


def draw_html(mesh: Mesh) -> str:
    """The mesh as HTML; where processes split it, a colour for each."""

    def fill(where: Coordinate) -> tuple[str, str]:
        return colour(mesh.owner(where)), f"process {mesh.owner(where)}"

    notes = [f"{mesh.size} device{'' if mesh.size == 1 else 's'}", *_split(mesh)]
    return page(str(mesh), [draw_devices(mesh, fill)], notes)


def _split(mesh: Mesh) -> Iterator[str]:
    if mesh.is_split:
        grid = ", ".join(f"{name}={count}" for name, count in zip(mesh.axes, mesh.processes, strict=True))
        yield f"split over processes: {grid}; each holds {mesh.local_shape}"
