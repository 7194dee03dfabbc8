"""Dtypes as safetensors spells them, and arrays as bytes."""

from __future__ import annotations

from meshloom.types import Shape, itemsize, numel

# our names, and torch's where we have none of our own
_NAMES = {
    "F64": "f64",
    "F32": "f32",
    "F16": "f16",
    "BF16": "bf16",
    "I64": "i64",
    "I32": "i32",
    "I16": "i16",
    "I8": "i8",
    "U64": "u64",
    "U32": "u32",
    "U16": "u16",
    "U8": "u8",
    "BOOL": "bool",
    "C64": "c64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_SPELLED = {ours: theirs for theirs, ours in _NAMES.items()}


def read_dtype(spelled: str) -> str | None:
    """The dtype that a file names; None where tensors have no such dtype.

    >>> read_dtype("BF16"), read_dtype("F4")
    ('bf16', None)
    """
    return _NAMES.get(spelled)


def spell_dtype(dtype: str) -> str | None:
    """A dtype as files name it; None where they have no name for it.

    >>> spell_dtype("f32"), spell_dtype("c128")
    ('F32', None)
    """
    return _SPELLED.get(dtype)


def carry(dtype: str, shape: Shape) -> tuple[str, Shape] | None:
    """How a file names a tensor's elements: a dtype that files do not have is written as one that they have.

    >>> carry("f32", (3,)), carry("c128", (3,)), carry("quint8", (3,))
    (('F32', (3,)), ('F64', (3, 2)), None)
    """
    if dtype == "c128":
        return "F64", (*shape, 2)  # the real and the imaginary part
    spelled = spell_dtype(dtype)
    return None if spelled is None else (spelled, shape)


def is_known(dtype: str) -> bool:
    """Whether files can hold a dtype."""
    return carry(dtype, ()) is not None


def nbytes(dtype: str, shape: Shape) -> int:
    """The bytes of a tensor."""
    return numel(shape) * itemsize(dtype)
