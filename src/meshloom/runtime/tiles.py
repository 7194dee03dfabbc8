"""Tiles: the order in which a card keeps a matrix, 32x32 tiles of four 16x16 faces, row-major at every level.

A reshape, a permutation and a copy; leading dims are a batch. Sides that are no multiple of 32 are padded with zeros if
you say so, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshloom.errors import ShapeError, expect

TILE, FACE = 32, 16
SQUARE = (TILE, TILE)


def tilize(data: torch.Tensor, *, pad: bool = False, tile: Sequence[int] = SQUARE) -> torch.Tensor:
    """The elements in the order of tiles, as one dim behind the batch. A tile may be less high, or half as wide.

    >>> tilize(torch.arange(32 * 32).view(32, 32))[14:18]
    tensor([14, 15, 32, 33])
    """
    expect("data", data, torch.Tensor)
    _check_matrix(data.shape)
    rows, cols = _padded(data.shape, tile)
    if (rows, cols) != tuple(data.shape[-2:]):
        if not pad:
            raise ShapeError(
                f"sides {list(data.shape[-2:])} are no multiples of {_name(tile)}",
                fix=f"pad=True fills up to {[rows, cols]} with zeros",
            )
        data = torch.constant_pad_nd(data, [0, cols - data.shape[-1], 0, rows - data.shape[-2]])
    batch, face = data.shape[:-2], min(FACE, tile[0])
    split = data.reshape(*batch, rows // tile[0], tile[0] // face, face, cols // tile[1], tile[1] // FACE, FACE)
    return split.movedim((-6, -3, -5, -2, -4, -1), (-6, -5, -4, -3, -2, -1)).reshape(*batch, rows * cols)


def untilize(tiles: torch.Tensor, shape: Sequence[int], tile: Sequence[int] = SQUARE) -> torch.Tensor:
    """The inverse of `tilize`: a tensor of that shape, without the padding.

    >>> x = torch.randn(2, 33, 40)
    >>> torch.equal(untilize(tilize(x, pad=True), x.shape), x)
    True
    """
    _check_matrix(shape)
    rows, cols = _padded(shape, tile)
    batch, face = tuple(shape)[:-2], min(FACE, tile[0])
    if tuple(tiles.shape) != (*batch, rows * cols):
        raise ShapeError(f"tiles of shape {list(tiles.shape)} do not make up {list(shape)}")
    split = tiles.reshape(*batch, rows // tile[0], cols // tile[1], tile[0] // face, tile[1] // FACE, face, FACE)
    dense = split.movedim((-6, -5, -4, -3, -2, -1), (-6, -3, -5, -2, -4, -1)).reshape(*batch, rows, cols)
    return dense[..., : tuple(shape)[-2], : tuple(shape)[-1]].contiguous()


def _padded(shape: Sequence[int], tile: Sequence[int]) -> list[int]:
    return [-(-size // side) * side for size, side in zip(tuple(shape)[-2:], tile, strict=True)]


def _name(tile: Sequence[int]) -> str:
    return str(tile[0]) if tile[0] == tile[1] else f"{tile[0]} and {tile[1]}"


def _check_matrix(shape: Sequence[int]) -> None:
    if len(shape) < 2:
        raise ShapeError(f"only matrices have tiles, not shape {list(shape)}", fix="add a dim: x.unsqueeze(0)")
