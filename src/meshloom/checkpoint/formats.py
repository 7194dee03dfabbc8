"""Dtypes as safetensors spells them, in both directions."""

from __future__ import annotations

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
