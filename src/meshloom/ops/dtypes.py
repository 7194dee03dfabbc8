"""The dtypes of results, from an op's column in the table: a word for each result, the last one for all further ones.

| word | dtype |
|---|---|
| `promote` | by torch's promotion: tensors with dims before 0-d ones, these before numbers, within the highest kind |
| `input` | that of the first operand |
| `value` | that of the last operand |
| `floats` | that of the operands which are not integers, promoted: indices and masks do not count |
| `float` | promoted, f32 for integers |
| `accumulate` | promoted, i64 for integers |
| `real`, `real float` | promoted, f32 for c64; likewise, and f32 for integers |
| `real sum` | promoted, f32 for c64, i64 for integers |
| `distance` | `real`, or `real sum` if it is reduced |
| `einsum` | `accumulate` for the sum of one operand, else `promote` |
| `complex` | promoted, c64 for f32 |
| `number` | promoted, i64 for bool |
| `bounded` | promoted, with the numbers that are given by name |
| `quotient` | promoted, f32 for integers unless they are rounded |
| `truth` | bool, u8 for u8 |
| `index` | i64, i32 if `out_int32` is given |
| `double` | f64, c128 for complex numbers |
| `bool`, `i64` | that dtype, as any other by its short name |

An argument `dtype=` comes before them all. torch's default dtype is taken to be f32; under another one, and under
autocast, the engine has the last word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce

from meshloom.errors import DTypeError
from meshloom.ops.contractions import einsum_labels
from meshloom.ops.rule import Call, Op
from meshloom.types import LONG_NAME, is_floating, itemsize, short_dtype

_NUMBERS: dict[type, str] = {bool: "bool", int: "i64", float: "f32", complex: "c64"}
_REAL = {"c64": "f32", "c128": "f64"}
_COMPLEX = {"f32": "c64", "f64": "c128", "f16": "complex32", "bf16": "c64"}
_WIDER = {("i8", "u8"): "i16", ("bf16", "f16"): "f32"}


def result_dtypes(op: Op, call: Call, results: int) -> tuple[str, ...]:
    """The dtypes of so many results.

    >>> from meshloom.ops import OPS
    >>> from meshloom import Mesh, Replicate, Topology
    >>> x = Topology(Mesh(w=2), (Replicate(),), (4,), "i32")
    >>> result_dtypes(OPS["div"], Call("div", (x, x), {}), 1), result_dtypes(OPS["sort"], Call("sort", (x,), {}), 2)
    (('f32',), ('i32', 'i64'))
    """
    words = op.result.split(", ")
    words += words[-1:] * (results - len(words))
    asked = call.arguments.get("dtype")
    if asked is not None:
        words[0] = short_dtype(str(asked))
    return tuple(_read(word, call) for word in words[:results])


def _read(word: str, call: Call) -> str:
    if word in _BY_CALL:
        word = _BY_CALL[word][0](call)
    if word in LONG_NAME:
        return word
    take, convert = WORDS[word]
    return convert(take(call))


def check_floating(call: Call, *names: str, real: bool = False) -> None:
    """An error if one of the named operands, or of all, holds integers, which torch refuses; or complex numbers."""
    for name in names or call.arguments:
        dtype = call.operands[call.index(name)].dtype if call.has(name) else "f32"
        if not is_floating(dtype) or (real and dtype in _REAL):
            kind = "real floating-point" if real else "floating-point"
            fix = f"give it {name}.real or {name}.abs()" if dtype in _REAL else f"cast it: {name}.float()"
            raise DTypeError(f"{call.op} needs {kind} numbers and got {dtype} for {name!r}", fix=fix)


def keeps(word: str, dtype: str) -> bool:
    """Whether a result of operands of one dtype has that dtype.

    >>> keeps("accumulate", "i64"), keeps("accumulate", "i32"), keeps("bool", "f32")
    (True, False, False)
    """
    word = _BY_CALL[word][1] if word in _BY_CALL else word
    return word == dtype if word in LONG_NAME else WORDS[word][1](dtype) == dtype


def kind_number(dtype: str) -> int:
    """The place of a dtype among bool, integers, floating point and complex: a higher one holds a lower one."""
    if dtype == "bool":
        return 0
    return 1 if not is_floating(dtype) else 3 if dtype[0] == "c" else 2


def promote_pair(one: str, other: str) -> str:
    """The dtype that holds the values of both.

    >>> promote_pair("bf16", "f16"), promote_pair("i8", "u8"), promote_pair("f64", "c64")
    ('f32', 'i16', 'c128')
    """
    if one == other:
        return one
    low, high = sorted((one, other), key=lambda each: (kind_number(each), itemsize(each), each))
    if kind_number(high) == 3 and low == "f64":
        return "c128"
    if kind_number(low) != kind_number(high):
        return high
    known = _WIDER.get((min(low, high), max(low, high)))
    return known or high


def _promote_all(dtypes: Iterable[str]) -> str | None:
    found = list(dtypes)
    return reduce(promote_pair, found) if found else None


def _combine(strong: str | None, weak: str | None) -> str | None:
    """What comes of tensors beside weaker ones: the weaker only lift the kind."""
    if strong is None or weak is None:
        return strong or weak
    if kind_number(weak) <= kind_number(strong):
        return strong
    if kind_number(strong) == 2:
        return _COMPLEX[strong]
    return weak


def _promote(call: Call, *more: object) -> str:
    sized = _promote_all(each.dtype for each in call.operands if each.shape)
    single = _promote_all(each.dtype for each in call.operands if not each.shape)
    numbers = _promote_all(_NUMBERS[type(leaf)] for leaf in (*call.leaves, *more) if type(leaf) in _NUMBERS)
    found = _combine(_combine(sized, single), numbers)
    assert found is not None
    return found


def _floats(call: Call) -> str:
    found = [each for each in call.operands if is_floating(each.dtype)]
    return _promote(Call(call.op, tuple(found) or call.operands, {}))


def _sums(call: Call) -> bool:
    """Whether an einsum adds up the elements of one operand; products of several keep their dtype."""
    (first, *more), output = einsum_labels(call)
    return not more and any(label not in output for label in first)


WORDS: dict[str, tuple[Callable[[Call], str], Callable[[str], str]]] = {
    "promote": (_promote, lambda dtype: dtype),
    "input": (lambda call: call.operands[0].dtype, lambda dtype: dtype),
    "value": (lambda call: call.operands[-1].dtype, lambda dtype: dtype),
    "floats": (_floats, lambda dtype: dtype),
    "float": (_promote, lambda dtype: dtype if is_floating(dtype) else "f32"),
    "accumulate": (_promote, lambda dtype: dtype if is_floating(dtype) else "i64"),
    "real": (_promote, lambda dtype: _REAL.get(dtype, dtype)),
    "real float": (_promote, lambda dtype: _REAL.get(dtype, dtype) if is_floating(dtype) else "f32"),
    "real sum": (_promote, lambda dtype: _REAL.get(dtype, dtype) if is_floating(dtype) else "i64"),
    "complex": (_promote, lambda dtype: _COMPLEX.get(dtype, dtype)),
    "number": (_promote, lambda dtype: "i64" if dtype == "bool" else dtype),
    "bounded": (lambda call: _promote(call, *call.arguments.values()), lambda dtype: dtype),
    "truth": (lambda call: call.operands[0].dtype, lambda dtype: "u8" if dtype == "u8" else "bool"),
    "double": (_promote, lambda dtype: "c128" if dtype[0] == "c" else "f64"),
}

# Words that depend on the arguments: the word that counts for a call, and the one that holds for any.
_BY_CALL: dict[str, tuple[Callable[[Call], str], str]] = {
    "quotient": (lambda call: "promote" if call.arguments.get("rounding_mode") else "float", "float"),
    "index": (lambda call: "i32" if call.arguments.get("out_int32") else "i64", "i64"),
    "einsum": (lambda call: "accumulate" if _sums(call) else "promote", "accumulate"),
    "distance": (lambda call: "real" if call.arguments["reduction"] == "none" else "real sum", "real sum"),
}
