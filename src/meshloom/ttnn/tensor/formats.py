"""What one element is, and in which order a device keeps them: dtypes, layouts, tiles.

Every dtype names the torch dtype that its values are kept in (`store`). Formats that torch lacks are kept as values
already rounded to what the format can say, in a torch dtype that holds them exactly: `rounded` does the rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.runtime.geometry import Sizes
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.tensor import blockfloat

__all__ = (
    "DataType Layout MathFidelity Shape Tile ROW_MAJOR_LAYOUT TILE_LAYOUT TILE_SIZE bfloat16 float32 uint32 bfloat8_b "
    "bfloat4_b uint8 uint16 int32 int8 fp8_e4m3 element_size tile_size ttnn_dtype_to_torch_dtype"
).split()


class Shape(Sizes):
    """A shape; `==` takes lists and tuples too. In front of it there are ones, up to four dims.

    >>> Shape([1, 2]), Shape([1, 2]) == [1, 2], Shape([1, 2]).rank, Shape([5])[-3]
    (Shape([1, 2]), True, 2, 1)
    """

    __slots__ = ()
    __hash__ = tuple.__hash__

    @property
    def rank(self) -> int:
        return len(self)

    def to_rank(self, rank: int) -> Shape:
        """With ones put in front, or ones in front left out."""
        extra = len(self) - rank
        if extra > 0 and any(size != 1 for size in self[:extra]):
            raise ArgumentError(f"{self!r} has no {extra} leading ones to leave out")
        return Shape((1,) * -extra + tuple(self) if extra < 0 else tuple(self)[extra:])

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, tuple(other)) if isinstance(other, (list, tuple)) else NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __repr__(self) -> str:
        return f"Shape({list(self)})"


class DataType(Choice):
    """The dtype of a tensor."""

    BFLOAT16 = 0
    FLOAT32 = 1
    UINT32 = 2
    BFLOAT8_B = 3
    BFLOAT4_B = 4
    UINT8 = 5
    UINT16 = 6
    INT32 = 7
    FP8_E4M3 = 8
    INT8 = 9
    INVALID = 10

    @property
    def store(self) -> torch.dtype:
        """The torch dtype that values are kept in."""
        return _STORE[self]

    @property
    def is_float(self) -> bool:
        """Whether it has fractions."""
        return _STORE[self].is_floating_point

    @property
    def is_block_float(self) -> bool:
        """Whether 16 elements share an exponent."""
        return self in (DataType.BFLOAT8_B, DataType.BFLOAT4_B)


# The torch dtype that values are kept in, the one that `to_torch` gives, and the bytes of an element that has its own.
_FORMATS: dict[DataType, tuple[torch.dtype, torch.dtype, int | None]] = {
    DataType.BFLOAT16: (torch.bfloat16, torch.bfloat16, 2),
    DataType.FLOAT32: (torch.float32, torch.float32, 4),
    DataType.UINT32: (torch.int64, torch.uint32, 4),
    DataType.BFLOAT8_B: (torch.bfloat16, torch.float32, None),
    DataType.BFLOAT4_B: (torch.bfloat16, torch.float32, None),
    DataType.UINT8: (torch.uint8, torch.uint8, 1),
    DataType.UINT16: (torch.int32, torch.uint16, 2),
    DataType.INT32: (torch.int32, torch.int32, 4),
    DataType.FP8_E4M3: (torch.bfloat16, torch.float32, 1),
    DataType.INT8: (torch.int8, torch.int8, 1),
}
BITS = {DataType.BFLOAT8_B: 7, DataType.BFLOAT4_B: 3}  # of the mantissa of block floats
_STORE = {kind: store for kind, (store, _, _) in _FORMATS.items()}
_BYTES = {kind: size for kind, (_, _, size) in _FORMATS.items() if size is not None}

bfloat16, float32, uint32 = DataType.BFLOAT16, DataType.FLOAT32, DataType.UINT32
bfloat8_b, bfloat4_b = DataType.BFLOAT8_B, DataType.BFLOAT4_B
uint8, uint16, int32, int8 = DataType.UINT8, DataType.UINT16, DataType.INT32, DataType.INT8
fp8_e4m3 = DataType.FP8_E4M3


class Layout(Choice):
    """Rows one after the other, or 32x32 tiles of four 16x16 faces."""

    ROW_MAJOR, TILE, INVALID = 0, 1, 2


ROW_MAJOR_LAYOUT, TILE_LAYOUT = Layout.ROW_MAJOR, Layout.TILE
TILE_SIZE = 32


class MathFidelity(Choice):
    """With how many passes hardware multiplies; here products are exact as torch's."""

    LoFi, HiFi2, HiFi3, HiFi4, Invalid = 0, 2, 3, 4, 255


HEIGHTS, WIDTHS = (1, 2, 4, 8, 16, 32), (16, 32)


@dataclass(frozen=True, init=False)
class Tile:
    """The shape of a tile: 32x32, or less high, or half as wide. Faces are 16 wide and at most 16 high.

    >>> Tile((16, 32)).num_faces, Tile([4, 32]).face_shape, Tile((32, 32)).get_tile_size(DataType.BFLOAT8_B)
    (2, Shape([4, 16]), 1088)
    """

    tile_shape: Shape
    transpose_tile: bool

    def __init__(self, tile_shape: Sequence[int] = (32, 32), transpose_tile: bool = False) -> None:
        sizes = Shape(tile_shape)
        if len(sizes) != 2 or sizes[0] not in HEIGHTS or sizes[1] not in WIDTHS:
            raise OperandError(
                f"Tile size is not valid for our hardware: {list(sizes)}",
                fix=f"a height of {', '.join(map(str, HEIGHTS))} and a width of 16 or 32",
            )
        if transpose_tile and sizes[0] < TILE_SIZE // 2:
            raise OperandError(f"Tile with height {sizes[0]} cannot be transposed", fix="a height of 16 or 32")
        object.__setattr__(self, "tile_shape", sizes)
        object.__setattr__(self, "transpose_tile", transpose_tile)

    @property
    def face_shape(self) -> Shape:
        return Shape((min(self.tile_shape[0], 16), 16))

    @property
    def num_faces(self) -> int:
        return math.prod(self.tile_shape) // math.prod(self.face_shape)

    @property
    def partial_face(self) -> int:
        """1 if faces are less than 16 high."""
        return int(self.tile_shape[0] < 16)

    @property
    def narrow_tile(self) -> int:
        """1 if it is 16 wide."""
        return int(self.tile_shape[1] < TILE_SIZE)

    @property
    def transpose_within_face(self) -> bool:
        """Whether each face is kept transposed."""
        return self.transpose_tile

    @property
    def transpose_of_faces(self) -> bool:
        """Whether faces are kept in transposed order."""
        return self.transpose_tile

    def get_tile_size(self, dtype: DataType) -> int:
        """The bytes of one tile: for block floats beside the mantissas one exponent per 16 elements, in words of 16.

        >>> Tile((1, 32)).get_tile_size(DataType.BFLOAT8_B), Tile((32, 32)).get_tile_size(DataType.BFLOAT4_B)
        (48, 576)
        """
        elements = math.prod(self.tile_shape)
        exponents = elements // blockfloat.BLOCK if dtype.is_block_float else 0
        return bytes_of(elements, dtype) + -exponents % blockfloat.WORD

    def __repr__(self) -> str:
        return f"Tile with shape: {list(self.tile_shape)}"


def bytes_of(elements: int, dtype: DataType) -> int:
    """The bytes that a device needs for so many elements.

    >>> bytes_of(1024, DataType.BFLOAT8_B), bytes_of(1024, DataType.BFLOAT4_B), bytes_of(1024, DataType.BFLOAT16)
    (1088, 576, 2048)
    """
    exponents = elements // 16
    special = {DataType.BFLOAT8_B: elements + exponents, DataType.BFLOAT4_B: elements // 2 + exponents}
    return special[dtype] if dtype in special else elements * _BYTES[dtype]


def element_size(dtype: DataType) -> int:
    """The bytes of one element, where elements have bytes of their own.

    >>> element_size(DataType.BFLOAT16), element_size(DataType.UINT32), element_size(DataType.BFLOAT8_B)
    (2, 4, 1)
    """
    if dtype.is_block_float:
        return 1  # what programs reckon with; `tile_size` tells the truth
    if dtype not in _BYTES:
        raise OperandError(f"{dtype} has no size")
    return _BYTES[dtype]


def tile_size(dtype: DataType) -> int:
    """The bytes of a tile of 32x32.

    >>> tile_size(DataType.BFLOAT8_B), tile_size(DataType.FLOAT32)
    (1088, 4096)
    """
    return bytes_of(TILE_SIZE * TILE_SIZE, dtype)


def ttnn_dtype_to_torch_dtype(dtype: DataType) -> torch.dtype:
    """The torch dtype that `to_torch` gives.

    >>> ttnn_dtype_to_torch_dtype(DataType.BFLOAT8_B), ttnn_dtype_to_torch_dtype(DataType.UINT16)
    (torch.float32, torch.uint16)
    """
    if dtype not in _FORMATS:
        raise OperandError(f"{dtype} has no counterpart in torch")
    return _FORMATS[dtype][1]


def padded_shape(shape: Sequence[int], layout: Layout, tile: Tile, row: int = 1) -> tuple[int, ...]:
    """The shape with the padding that whole tiles need, or rows of so many elements, where cores hold pieces of rows.

    >>> padded_shape((1, 1, 40, 10), Layout.TILE, Tile()), padded_shape((5,), Layout.TILE, Tile())
    ((1, 1, 64, 32), (32, 32))
    >>> padded_shape((7, 7), Layout.ROW_MAJOR, Tile(), row=32)
    (7, 32)
    """
    sizes = tuple(shape)
    if layout is Layout.ROW_MAJOR:
        sizes = sizes or (1,)
        return sizes if row == 1 else (*sizes[:-1], -(-sizes[-1] // row) * row)
    sizes = (1,) * (2 - len(sizes)) + sizes
    ends = (-(-size // side) * side for size, side in zip(sizes[-2:], tile.tile_shape, strict=True))
    return (*sizes[:-2], *ends)


CAST = (DataType.BFLOAT16, DataType.FLOAT32, DataType.INT32)  # whose values `rounded` only casts


def rounded(values: torch.Tensor, dtype: DataType, filled_with: float = 0.0) -> torch.Tensor:
    """Values as a dtype can say them, in its `store`: block floats share exponents along rows, with what fills up the
    last block of a row; integers wrap."""
    if dtype in CAST:
        return values.to(_STORE[dtype])
    if dtype in BITS:
        return blockfloat.round_blocks(values, BITS[dtype], torch.bfloat16, filled_with)
    if dtype is DataType.FP8_E4M3:
        return values.to(torch.float8_e4m3fn).to(dtype.store)
    if dtype is DataType.UINT32:
        return values.to(torch.int64) & 0xFFFFFFFF
    if dtype is DataType.UINT16:
        return values.to(torch.int32) & 0xFFFF
    return values.to(dtype.store)
