"""A topology as a picture for notebooks: the tensor cut into pieces, the devices in the colours of what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshloom.mesh import Coordinate
from meshloom.mesh.picture import EMPTY, Fill, box, colour, draw_devices, page, shown_places, svg, write
from meshloom.placement.pieces import Cut, Piece, cut
from meshloom.placement.placements import Partial, Shard
from meshloom.placement.topology import Topology

WIDTH, HEIGHT = 320, 160  # of the tensor


def draw_html(topology: Topology, state: str = "", values: str = "") -> str:
    """The topology as HTML: what is cut, who holds it, what each axis does; then the values, if any.

    >>> from meshloom.mesh import Mesh
    >>> draw_html(Topology(Mesh(dp=2, tp=4), (Shard(0), Shard(1)), (4, 8), "f32")).count("<rect")
    16
    """
    pictures = [_draw_tensor(cut(topology)), draw_devices(topology.mesh, _held_by(topology))]
    notes = [*(_does(topology, axis) for axis in range(topology.mesh.ndim)), _holds(topology)]
    return page(f"{topology}{state}", pictures, notes, values)


def _does(topology: Topology, axis: int) -> str:
    """What an axis does to the tensor, in words."""
    placement, size = topology.placements[axis], topology.mesh.shape[axis]
    if isinstance(placement, Shard):
        says = f"cuts dim {placement.dim}, of {topology.shape[placement.dim]}, in {size}"
    elif isinstance(placement, Partial):
        says = f"{size} parts, and the value is their {placement.op}"
    else:
        says = f"the same on all {size}"
    return f"{topology.mesh.axes[axis]}: {placement}, {says}"


def _holds(topology: Topology) -> str:
    padding = ", padding included" if topology.padded else ""
    return f"a device holds {list(topology.local_shape)}, {topology.local_bytes:,} B{padding}"


def _held_by(topology: Topology) -> Fill:
    def fill(place: Coordinate) -> tuple[str, str]:
        piece = Piece(topology, place)
        return (EMPTY, "nothing") if piece.is_empty else (colour(piece.number), piece.held)

    return fill


@dataclass(frozen=True, slots=True)
class _Span:
    """A stretch of a side of the picture; without a place where pieces are left out."""

    start: float
    length: float
    place: Coordinate | None


def _spans(places: Sequence[Coordinate | None], shares: Sequence[float], side: float) -> list[_Span]:
    """The side dealt out by shares; what is left out gets an average one."""
    known = [share for place, share in zip(places, shares, strict=True) if place is not None]
    weights = [sum(known) / len(known) if place is None else share for place, share in zip(places, shares, strict=True)]
    total, found, start = sum(weights), [], 1.0
    for place, weight in zip(places, weights, strict=True):
        length = side * weight / total if total else 0.0
        found.append(_Span(start, length, place))
        start += length
    return found


def _draw_tensor(whole: Cut) -> str:
    """The pieces, each as large as its share of the tensor: dim 0 down, all other dims across."""
    ndim = whole.topology.ndim
    tops, lefts = ([*shown_places(whole.shape(axes))] for axes in (whole.down, whole.across))
    first = (0,) * len(whole.down), (0,) * len(whole.across)
    heights = [whole.piece(top or first[0], first[1]).part(*range(min(ndim, 1))) for top in tops]
    widths = [whole.piece(first[0], left or first[1]).part(*range(1, ndim)) for left in lefts]
    rows, columns = _spans(tops, heights, HEIGHT), _spans(lefts, widths, WIDTH)
    parts = [_draw_piece(whole, row, column) for row in rows for column in columns if row.length and column.length]
    return svg("tensor", WIDTH + 2, HEIGHT + 2, parts or [write(WIDTH / 2, HEIGHT / 2, "no elements")])


def _draw_piece(whole: Cut, row: _Span, column: _Span) -> str:
    if row.place is None or column.place is None:
        return write(column.start + column.length / 2, row.start + row.length / 2, "…")
    piece = whole.piece(row.place, column.place)
    lines, partial = [piece.held, piece.owners], bool(whole.topology.partial_axes)
    fill, title = colour(piece.number), f"{piece.held} on {piece.owners}"
    return box(column.start, row.start, column.length, row.length, fill, lines, title, dashed=partial)
