"""Meshes with the placements of a tensor on them, in short: what tests of any placement go through."""

from __future__ import annotations

Layout = tuple[tuple[int, ...], str]


def layouts(*texts: str) -> list[Layout]:
    """The shape of a mesh and placements on it, for each text.

    >>> layouts("4 R", "2x4 S(1), S(0)")
    [((4,), 'R'), ((2, 4), 'S(1), S(0)')]
    """
    pairs = (text.split(" ", 1) for text in texts)
    return [(tuple(map(int, sizes.split("x"))), placements) for sizes, placements in pairs]
