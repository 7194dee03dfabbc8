"""Shapes and dtypes without torch: names, sizes and the short spelling used in the notation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from meshloom.errors import NotationError, closest

Shape = tuple[int, ...]
Dims = int | Sequence[int] | None  # one, several, or all of them

# The short name, the name in torch and numpy, and the bytes of one element.
_DTYPES = (
    ("f64", "float64", 8),
    ("f32", "float32", 4),
    ("f16", "float16", 2),
    ("bf16", "bfloat16", 2),
    ("i64", "int64", 8),
    ("i32", "int32", 4),
    ("i16", "int16", 2),
    ("i8", "int8", 1),
    ("u64", "uint64", 8),
    ("u32", "uint32", 4),
    ("u16", "uint16", 2),
    ("u8", "uint8", 1),
    ("bool", "bool", 1),
    ("c64", "complex64", 8),
    ("c128", "complex128", 16),
)
LONG_NAME = {short: long for short, long, _ in _DTYPES}
SHORT_NAME = {long: short for short, long, _ in _DTYPES}
_SIZE = {short: size for short, _, size in _DTYPES}
# Formats that devices compute in and tensors do not have, with the bytes of one element; 16 share a byte of exponent.
BLOCK_FORMATS = {"fp8": 1.0, "bfp8": 1 + 1 / 16, "bfp4": 1 / 2 + 1 / 16}


def short_dtype(name: str) -> str:
    """The short name of a dtype given by torch's or numpy's name.

    >>> short_dtype("torch.float32"), short_dtype("bool")
    ('f32', 'bool')
    """
    bare = name.removeprefix("torch.")
    return SHORT_NAME.get(bare, bare)


def check_dtype(name: str) -> str:
    """The short name that `name` stands for, or an error that lists the known ones."""
    short = short_dtype(name)
    if short not in LONG_NAME:
        raise NotationError(f"{name!r} is not a dtype", fix=closest(name, LONG_NAME))
    return short


def itemsize(short: str) -> int:
    """The bytes of one element; an unknown dtype counts as one byte.

    >>> itemsize("bf16")
    2
    """
    return _SIZE.get(short, 1)


def width(name: str) -> float:
    """The bytes of one element of a dtype, or of a format that only devices have.

    >>> width("bf16"), width("bfp8"), width("bfp4")
    (2.0, 1.0625, 0.5625)
    """
    if name in BLOCK_FORMATS:
        return BLOCK_FORMATS[name]
    return float(itemsize(check_dtype(name)))


def is_floating(short: str) -> bool:
    """Whether the dtype holds real or complex floating-point numbers."""
    return short[0] in "fc" or short.startswith("bf")


def spell_numbers(numbers: Iterable[int]) -> str:
    """Ascending numbers in short, such as ranks or layers.

    >>> spell_numbers([3]), spell_numbers([0, 2, 3, 7])
    ('3', '0,2-3,7')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def numel(shape: Iterable[int]) -> int:
    """The number of elements of a shape; a 0-d shape has one."""
    return math.prod(shape)
