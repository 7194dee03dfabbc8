"""Sample calls for every op of the table, the awkward ones included.

A sample draws operands (shape, dtype, range of values) and gives a function that works on dense torch tensors and on
ours alike. To add an op: one line in `SAMPLES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.bfloat16)
NUMBERS = (torch.float32, torch.bfloat16, torch.int64)
ALL = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)


@dataclass(frozen=True)
class Operand:
    """One operand to make: its shape, dtype, and which values it takes ("any", "nonzero", "below:N")."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    values: str = "any"
    gradient: bool = True


@dataclass(frozen=True)
class Case:
    """One call: operands and the function of them; `gradients` is False where torch has none."""

    operands: tuple[Operand, ...]
    run: Callable[..., Any]
    gradients: bool = True


Sample = Callable[["Draw"], Case]


def without_gradients(sample: Sample) -> Sample:
    return lambda d: dataclasses.replace(sample(d), gradients=False)


class Draw:
    """What a sample may ask of Hypothesis."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self._draw(st.integers(0, len(values) - 1))]

    def yes(self) -> bool:
        return bool(self._draw(st.booleans()))

    def number(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def size(self, empty: bool = True) -> int:
        return 0 if empty and self.number(0, 24) == 0 else int(self.pick(SIZES))

    def shape(self, low: int = 0, high: int = 3, empty: bool = True) -> tuple[int, ...]:
        return tuple(self.size(empty) for _ in range(self.number(low, high)))

    def dim(self, shape: Sequence[int]) -> int:
        """A dim of a shape, negative or not."""
        return self.number(-len(shape), len(shape) - 1)

    def broadcast_to(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to another: leading dims left off, some sizes 1."""
        start = self.number(0, len(shape))
        return tuple(1 if self.number(0, 3) == 0 else size for size in shape[start:])

    def scalar(self) -> Any:
        return self.pick((0, 1, 2, -3, 0.5, -2.0, float("inf"), True))


def unary(function: Callable[..., Any], dtypes: Sequence[torch.dtype] = FLOATS, values: str = "any") -> Sample:
    return lambda d: Case((Operand(d.shape(), d.pick(dtypes), values),), function)


def binary(
    function: Callable[..., Any],
    dtypes: Sequence[torch.dtype] = NUMBERS,
    second: str = "any",
    scalars: Sequence[Any] = (2, -1.5, 3),
    numbers: bool = True,
) -> Sample:
    def sample(d: Draw) -> Case:
        shape, dtype = d.shape(), d.pick(dtypes)
        kind = d.number(0, 3) if numbers else d.number(1, 3)
        if kind == 0:
            scalar = d.pick(scalars)
            return Case((Operand(shape, dtype),), lambda x: function(x, scalar))
        other = d.pick(dtypes) if d.number(0, 3) == 0 else dtype
        pair = (Operand(shape, dtype), Operand(d.broadcast_to(shape), other, second))
        if kind == 1:
            return Case((Operand(d.broadcast_to(shape), dtype), Operand(shape, other, second)), function)
        return Case(pair, function)

    return sample


def ternary(function: Callable[..., Any], dtypes: Sequence[torch.dtype] = FLOATS, third: str = "any") -> Sample:
    def sample(d: Draw) -> Case:
        shape, dtype = d.shape(), d.pick(dtypes)
        others = (Operand(d.broadcast_to(shape), dtype), Operand(d.broadcast_to(shape), dtype, third))
        return Case((Operand(shape, dtype), *others), function)

    return sample


def where(d: Draw) -> Case:
    shape, dtype = d.shape(), d.pick(ALL)
    cond = Operand(d.broadcast_to(shape), torch.bool)
    if d.yes():
        number = d.pick((0, 1.5, float("-inf")))
        return Case((cond, Operand(shape, torch.float32)), lambda c, x: torch.where(c, x, number))
    return Case((cond, Operand(shape, dtype), Operand(d.broadcast_to(shape), dtype)), torch.where)


def masked_fill(d: Draw) -> Case:
    shape = d.shape()
    value = d.pick((0.0, 2.0, float("-inf"), float("nan")))
    operands = (Operand(shape, d.pick(FLOATS)), Operand(d.broadcast_to(shape), torch.bool))
    return Case(operands, lambda x, m: torch.masked_fill(x, m, value))


def clamp(d: Draw) -> Case:
    bounds = d.pick(({"min": -0.5}, {"max": 0.5}, {"min": 0.25, "max": 1.0}, {"min": 2, "max": -1}, {"min": 1}))
    shape, dtype = d.shape(), d.pick(FLOATS)
    if d.number(0, 3) == 0:
        bound = Operand(d.broadcast_to(shape), dtype)
        return Case((Operand(shape, dtype), bound), lambda x, low: torch.clamp(x, min=low))
    return Case((Operand(shape, dtype),), lambda x: torch.clamp(x, **bounds))


def cast(d: Draw) -> Case:
    dtype = d.pick((torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64, torch.int32))
    return Case((Operand(d.shape(), d.pick(ALL)),), lambda x: x.to(dtype, copy=True))


def matmul(d: Draw) -> Case:
    m, k, n = d.size(), d.size(), d.size()
    batch = d.shape(0, 2)
    dtype = d.pick(FLOATS)
    kind = d.number(0, 5)
    left, right = (m, k), (k, n)
    if kind == 0:
        left = (k,)
    elif kind == 1:
        right = (k,)
    elif kind == 2:
        left, right = (k,), (k,)
    if len(left) == 2 and kind != 3:
        left = d.broadcast_to(batch) + left
    if len(right) == 2 and kind > 3:
        right = batch + right
    return Case((Operand(left, dtype), Operand(right, dtype)), torch.matmul)


def bmm(d: Draw) -> Case:
    b, m, k, n = (d.size() for _ in range(4))
    dtype = d.pick(FLOATS)
    return Case((Operand((b, m, k), dtype), Operand((b, k, n), dtype)), torch.bmm)


def mm(d: Draw) -> Case:
    m, k, n = (d.size() for _ in range(3))
    return Case((Operand((m, k), torch.float32), Operand((k, n), torch.float32)), torch.mm)


def mv(d: Draw) -> Case:
    m, k = d.size(), d.size()
    return Case((Operand((m, k), torch.float32), Operand((k,), torch.float32)), torch.mv)


def dot(d: Draw) -> Case:
    k = d.size()
    return Case((Operand((k,), torch.float32), Operand((k,), torch.float32)), torch.dot)


def linear(d: Draw) -> Case:
    k, n, dtype = d.size(), d.size(), d.pick(FLOATS)
    operands = [Operand((*d.shape(0, 2), k), dtype), Operand((n, k), dtype)]
    if d.yes():
        operands.append(Operand((n,), dtype))
    return Case(tuple(operands), F.linear)


def einsum(d: Draw) -> Case:
    sizes = {label: d.size() for label in "abcde"}
    text = d.pick(
        ("ab,bc->ac", "abc,cd->abd", "abc,abd->acd", "ab,ab->", "ab,cb->ca", "aab->b", "abc->ca", "ab,bc,cd->ad",
         "a,b->ab", "...ab,...bc->...ac", "ab->", "ab,b", "bca,cd->dab")
    )  # fmt: skip
    shapes = [_einsum_shape(part, sizes) for part in text.partition("->")[0].split(",")]
    return Case(tuple(Operand(shape, torch.float32) for shape in shapes), lambda *xs: torch.einsum(text, *xs))


def _einsum_shape(labels: str, sizes: dict[str, int]) -> tuple[int, ...]:
    batch = (sizes["e"],) if "..." in labels else ()
    return batch + tuple(sizes[label] for label in labels.replace("...", ""))


def reduction(
    function: Callable[..., Any], dtypes: Sequence[torch.dtype] = NUMBERS, several: bool = True, empty: bool = True
) -> Sample:
    def sample(d: Draw) -> Case:
        shape, dtype = d.shape(0, 3, empty), d.pick(dtypes)
        operand = (Operand(shape, dtype),)
        keep = d.yes()
        if not shape or d.number(0, 3) == 0:
            return Case(operand, function)
        dim: Any = d.dim(shape)
        if several and d.yes():
            dim = tuple(d.pick((i, i - len(shape))) for i in range(len(shape)) if d.yes()) or (dim,)
        return Case(operand, lambda x: function(x, dim=dim, keepdim=keep))

    return sample


def var(d: Draw) -> Case:
    shape, correction, keep = d.shape(1, 3, empty=False), d.pick((0, 1)), d.yes()
    dim = d.pick((None, d.dim(shape)))
    shape = tuple(size + 2 for size in shape)
    return Case((Operand(shape, torch.float32),), lambda x: torch.var(x, dim, correction=correction, keepdim=keep))


def along(function: Callable[..., Any], dtypes: Sequence[torch.dtype] = NUMBERS) -> Sample:
    """max and min along a dim, as (values, indices); values only, since ties have no fixed index."""

    def sample(d: Draw) -> Case:
        shape, keep = d.shape(1, 3, empty=False), d.yes()
        dim = d.dim(shape)
        return Case((Operand(shape, d.pick(dtypes)),), lambda x: tuple(function(x, dim, keep)))

    return sample


def arg(function: Callable[..., Any]) -> Sample:
    def sample(d: Draw) -> Case:
        shape, keep = d.shape(1, 3, empty=False), d.yes()
        dim = d.pick((None, d.dim(shape)))
        return Case((Operand(shape, d.pick((torch.float32, torch.int64))),), lambda x: function(x, dim, keepdim=keep))

    return sample


def softmax(function: Callable[..., Any]) -> Sample:
    def sample(d: Draw) -> Case:
        shape = d.shape(1, 3)
        dim = d.dim(shape)
        return Case((Operand(shape, d.pick(FLOATS)),), lambda x: function(x, dim=dim))

    return sample


def layer_norm(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    tail = shape[d.number(0, len(shape) - 1) :]
    operands = [Operand(shape, torch.float32)]
    if d.yes():
        operands.append(Operand(tail, torch.float32))
        if d.yes():
            operands.append(Operand(tail, torch.float32))
    return Case(tuple(operands), lambda x, w=None, b=None: F.layer_norm(x, tail, w, b))


def cross_entropy(d: Draw) -> Case:
    n, c = d.size(empty=False), d.size(empty=False)
    extra = d.shape(0, 1, empty=False)
    reduction = d.pick(("mean", "sum", "none"))
    smoothing = d.pick((0.0, 0.0, 0.1))
    ignore = d.pick((-100, 0))
    logits = Operand((n, c, *extra), torch.float32)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    if d.number(0, 3) == 0:
        target = Operand((n, c, *extra), torch.float32)
        return Case((logits, target), lambda x, t: F.cross_entropy(x, t, **options))
    target = Operand((n, *extra), torch.int64, f"below:{c}")
    options["ignore_index"] = ignore
    if d.yes():
        weight = Operand((c,), torch.float32, "positive", gradient=False)
        return Case((logits, target, weight), lambda x, t, w: F.cross_entropy(x, t, w, **options))
    return Case((logits, target), lambda x, t: F.cross_entropy(x, t, **options))


def embedding(d: Draw) -> Case:
    rows, width = d.size(empty=False), d.size()
    padding = d.pick((None, 0, -1))
    operands = (Operand(d.shape(0, 2), torch.int64, f"below:{rows}"), Operand((rows, width), torch.float32))
    return Case(operands, lambda i, w: F.embedding(i, w, padding))


def attention(d: Draw) -> Case:
    batch = d.shape(0, 2, empty=False)
    queries, keys, width, out = (d.size(empty=False) for _ in range(4))
    qkv = [
        Operand((*batch, queries, width), torch.float32),
        Operand((*batch, keys, width), torch.float32),
        Operand((*batch, keys, out), torch.float32),
    ]
    kind = d.number(0, 3)
    if kind == 0:
        return Case(tuple(qkv), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    if kind == 1:
        mask = Operand(d.pick(((queries, keys), (*batch, queries, keys), (1, keys))), torch.float32)
        return Case((*qkv, mask), F.scaled_dot_product_attention)
    if kind == 2:
        mask = Operand(d.pick(((queries, keys), (*batch, queries, keys))), torch.bool, "mostly")
        return Case((*qkv, mask), F.scaled_dot_product_attention)
    scale = d.pick((None, 0.5))
    return Case(tuple(qkv), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=scale))


def _factored(d: Draw, count: int) -> tuple[int, ...]:
    """A random shape with as many elements."""
    shape = []
    while count > 1 and len(shape) < 3:
        divisors = [k for k in range(1, count + 1) if count % k == 0]
        size = d.pick(divisors)
        shape.append(size)
        count //= size
    return (*shape, count)


def reshape(function: Callable[..., Any]) -> Sample:
    def sample(d: Draw) -> Case:
        shape = d.shape(0, 3)
        count = 1
        for size in shape:
            count *= size
        target = _factored(d, count) if count else d.pick((shape, (0,), (*shape, 1)))
        if count and d.yes():
            place = d.number(0, len(target) - 1)
            target = (*target[:place], -1, *target[place + 1 :])
        return Case((Operand(shape, d.pick(ALL)),), lambda x: function(x, target))

    return sample


def flatten(d: Draw) -> Case:
    shape = d.shape(1, 3)
    first = d.number(0, len(shape) - 1)
    last = d.number(first, len(shape) - 1)
    return Case((Operand(shape, torch.float32),), lambda x: torch.flatten(x, first, last))


def squeeze(d: Draw) -> Case:
    shape = tuple(1 if d.yes() else size for size in d.shape(1, 3))
    dim = d.pick((None, d.dim(shape)))
    return Case((Operand(shape, torch.float32),), lambda x: x.squeeze() if dim is None else x.squeeze(dim))


def unsqueeze(d: Draw) -> Case:
    shape = d.shape(0, 3)
    dim = d.number(-len(shape) - 1, len(shape))
    return Case((Operand(shape, torch.float32),), lambda x: x.unsqueeze(dim))


def permute(d: Draw) -> Case:
    shape = d.shape(1, 3)
    left = list(range(len(shape)))
    order = tuple(left.pop(d.number(0, len(left) - 1)) for _ in range(len(shape)))
    return Case((Operand(shape, torch.float32),), lambda x: x.permute(order))


def transpose(d: Draw) -> Case:
    shape = d.shape(1, 3)
    first, second = d.dim(shape), d.dim(shape)
    return Case((Operand(shape, torch.float32),), lambda x: x.transpose(first, second))


def expand(d: Draw) -> Case:
    target = d.shape(1, 3)
    shape = d.broadcast_to(target)
    asked = tuple(
        -1 if i >= len(target) - len(shape) and size == shape[i - len(target)] and d.yes() else size
        for i, size in enumerate(target)
    )
    return Case((Operand(shape, torch.float32),), lambda x: x.expand(asked))


def narrow(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    dim = d.dim(shape)
    start = d.number(0, shape[dim])
    length = d.number(0, shape[dim] - start)
    return Case((Operand(shape, torch.float32),), lambda x: x.narrow(dim, start, length))


def getitem(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    index: list[Any] = []
    for size in shape[: d.number(0, len(shape))]:
        kind = d.number(0, 4)
        if kind == 0:
            index.append(d.number(-size, size - 1))
        elif kind == 1:
            index.append(slice(None))
        else:
            low, high = d.number(-size - 1, size), d.number(-size, size + 2)
            index.append(slice(d.pick((None, low)), d.pick((None, high)), d.pick((None, 1, 2, 3))))
        if d.number(0, 4) == 0:
            index.append(None)
    if d.number(0, 2) == 0:
        index.insert(d.number(0, len(index)), Ellipsis)
    found = tuple(index)
    return Case((Operand(shape, d.pick(ALL)),), lambda x: x[found])


def split(d: Draw) -> Case:
    shape = d.shape(1, 3)
    dim = d.dim(shape)
    size = d.number(1, 5)
    if d.yes():
        first = d.number(0, shape[dim])
        return Case((Operand(shape, torch.float32),), lambda x: torch.split(x, [first, shape[dim] - first], dim))
    return Case((Operand(shape, torch.float32),), lambda x: torch.split(x, size, dim))


def chunk(d: Draw) -> Case:
    shape = d.shape(1, 3)
    dim, count = d.dim(shape), d.number(1, 5)
    return Case((Operand(shape, torch.float32),), lambda x: torch.chunk(x, count, dim))


def cat(d: Draw) -> Case:
    shape = d.shape(1, 3)
    dim = d.dim(shape)
    place = dim % len(shape)
    shapes = [(*shape[:place], d.size(), *shape[place + 1 :]) for _ in range(d.number(1, 3))]
    dtype = d.pick(NUMBERS)
    return Case(tuple(Operand(each, dtype) for each in shapes), lambda *xs: torch.cat(xs, dim))


def stack(d: Draw) -> Case:
    shape = d.shape(0, 2)
    dim = d.number(-len(shape) - 1, len(shape))
    return Case((Operand(shape, torch.float32),) * d.number(1, 3), lambda *xs: torch.stack(xs, dim))


def _value(d: Draw) -> float:
    return float(d.pick((-1.0, 0.5, 2.0)))


def addc(function: Callable[..., Any], third: str = "any") -> Sample:
    def sample(d: Draw) -> Case:
        value = _value(d)
        return ternary(lambda x, a, b: function(x, a, b, value=value), FLOATS, third)(d)

    return sample


INTEGRAL = (torch.int64, torch.bool)

SAMPLES: dict[str, Sample] = {
    "add": lambda d: binary((lambda a: lambda x, y: torch.add(x, y, alpha=a))(d.pick((1, 2, -1))))(d),
    "sub": binary(torch.sub),
    "mul": binary(torch.mul, ALL, scalars=(2, 0.5, True)),
    "div": lambda d: binary(
        (lambda mode: lambda x, y: torch.div(x, y, rounding_mode=mode))(d.pick((None, None, "floor", "trunc"))),
        (torch.float32,), "nonzero",
    )(d),
    "floor_divide": without_gradients(binary(torch.floor_divide, (torch.float32, torch.int64), "nonzero")),
    "remainder": binary(torch.remainder, (torch.float32, torch.int64), "nonzero"),
    "fmod": binary(torch.fmod, (torch.float32, torch.int64), "nonzero"),
    "pow": binary(torch.pow, (torch.float32,), scalars=(2, 0.5, -1, 0)),
    "neg": unary(torch.neg, NUMBERS),
    "abs": unary(torch.abs, NUMBERS),
    "square": unary(torch.square, NUMBERS),
    "sign": unary(torch.sign, NUMBERS),
    "reciprocal": unary(torch.reciprocal, FLOATS, "nonzero"),
    "maximum": binary(torch.maximum, NUMBERS, numbers=False),
    "minimum": binary(torch.minimum, NUMBERS, numbers=False),
    "lerp": ternary(torch.lerp),
    "addcmul": addc(torch.addcmul),
    "addcdiv": addc(torch.addcdiv, "nonzero"),
    "eq": binary(torch.eq, ALL),
    "ne": binary(torch.ne, ALL),
    "lt": binary(torch.lt, ALL),
    "le": binary(torch.le, ALL),
    "gt": binary(torch.gt, ALL),
    "ge": binary(torch.ge, ALL),
    "logical_and": binary(torch.logical_and, ALL, numbers=False),
    "logical_or": binary(torch.logical_or, ALL, numbers=False),
    "logical_xor": binary(torch.logical_xor, ALL, numbers=False),
    "logical_not": unary(torch.logical_not, ALL),
    "bitwise_and": binary(torch.bitwise_and, INTEGRAL, scalars=(1, 3, True)),
    "bitwise_or": binary(torch.bitwise_or, INTEGRAL, scalars=(1, 3, True)),
    "bitwise_xor": binary(torch.bitwise_xor, INTEGRAL, scalars=(1, 3, True)),
    "bitwise_not": unary(torch.bitwise_not, INTEGRAL),
    "isnan": unary(torch.isnan, ALL),
    "isinf": unary(torch.isinf, ALL),
    "isfinite": unary(torch.isfinite, ALL),
    "where": where,
    "masked_fill": masked_fill,
    "clamp": clamp,
    "exp": unary(torch.exp),
    "log": unary(torch.log),
    "log1p": unary(torch.log1p),
    "expm1": unary(torch.expm1),
    "sqrt": unary(torch.sqrt),
    "rsqrt": unary(torch.rsqrt),
    "sin": unary(torch.sin),
    "cos": unary(torch.cos),
    "tanh": unary(torch.tanh),
    "sigmoid": unary(torch.sigmoid),
    "relu": unary(torch.relu, NUMBERS),
    "gelu": lambda d: unary((lambda a: lambda x: F.gelu(x, approximate=a))(d.pick(("none", "tanh"))))(d),
    "silu": unary(F.silu),
    "erf": unary(torch.erf),
    "floor": unary(torch.floor),
    "ceil": unary(torch.ceil),
    "round": unary(torch.round),
    "to": cast,
    "clone": unary(torch.clone, ALL),
    "matmul": matmul,
    "mm": mm,
    "bmm": bmm,
    "mv": mv,
    "dot": dot,
    "linear": linear,
    "einsum": einsum,
    "sum": reduction(torch.sum, ALL),
    "mean": reduction(torch.mean, FLOATS),
    "amax": reduction(torch.amax, ALL, empty=False),
    "amin": reduction(torch.amin, ALL, empty=False),
    "prod": reduction(torch.prod, NUMBERS, several=False),
    "any": reduction(torch.any, ALL),
    "all": reduction(torch.all, ALL),
    "var": var,
    "argmax": arg(torch.argmax),
    "argmin": arg(torch.argmin),
    "max_dim": along(torch.max),
    "min_dim": along(torch.min),
    "softmax": softmax(torch.softmax),
    "log_softmax": softmax(F.log_softmax),
    "layer_norm": layer_norm,
    "cross_entropy": cross_entropy,
    "embedding": embedding,
    "scaled_dot_product_attention": attention,
    "reshape": reshape(torch.reshape),
    "view": reshape(lambda x, shape: x.view(shape)),
    "flatten": flatten,
    "squeeze": squeeze,
    "unsqueeze": unsqueeze,
    "permute": permute,
    "transpose": transpose,
    "expand": expand,
    "narrow": narrow,
    "getitem": getitem,
    "split": split,
    "chunk": chunk,
    "cat": cat,
    "stack": stack,
}  # fmt: skip
