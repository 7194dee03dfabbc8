"""Samples of look-ups and of writes by index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.tensor.calling import table_call
from samples.drawing import ALL, FLOATS, NUMBERS, Case, Draw, Operand, Sample, without_gradients


def embedding(d: Draw) -> Case:
    rows, width = d.size(empty=False), d.size()
    padding = d.pick((None, 0, -1))
    operands = (Operand(d.shape(0, 2), torch.int64, f"below:{rows}"), Operand((rows, width), torch.float32))
    return Case(operands, lambda i, w: F.embedding(i, w, padding))


def _index(shape: tuple[int, ...], below: int) -> Operand:
    return Operand(shape, torch.int64, f"below:{below}")


def _along(d: Draw) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """A shape, a dim, and the shape of an index along it: as wide as the input elsewhere, or narrower."""
    shape = d.shape(1, 3, empty=False)
    dim = d.dim(shape)
    place = dim % len(shape)
    wide = [size if d.number(0, 3) else d.number(1, size) for size in shape]
    wide[place] = d.size()
    return shape, dim, tuple(wide)


def gather(d: Draw) -> Case:
    shape, dim, wide = _along(d)
    return Case((Operand(shape, d.pick(ALL)), _index(wide, shape[dim])), lambda x, i: torch.gather(x, dim, i))


def take_along_dim(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    dim = d.dim(shape)
    place = dim % len(shape)
    if d.number(0, 4) == 0:
        count = 1
        for size in shape:
            count *= size
        index = _index(d.shape(1, 2), count)
        return Case((Operand(shape, d.pick(ALL)), index), lambda x, i: torch.take_along_dim(x, i))
    wide = [1 if d.number(0, 3) == 0 else size for size in shape]
    own = tuple(1 if d.number(0, 4) == 0 and k != place else size for k, size in enumerate(shape))
    wide[place] = d.size()
    operands = (Operand(own, d.pick(ALL)), _index(tuple(wide), shape[dim]))
    return Case(operands, lambda x, i: torch.take_along_dim(x, i, dim))


def take(d: Draw) -> Case:
    shape = d.shape(0, 3, empty=False)
    count = 1
    for size in shape:
        count *= size
    return Case((Operand(shape, d.pick(ALL)), _index(d.shape(0, 2), count)), torch.take)


def index_select(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    dim = d.dim(shape)
    operands = (Operand(shape, d.pick(ALL)), _index((d.size(),), shape[dim]))
    return Case(operands, lambda x, i: torch.index_select(x, dim, i))


def take_rows(d: Draw) -> Case:
    lead, count, width, taken = d.shape(0, 2, empty=False), d.size(empty=False), d.size(), d.size()
    index = Operand((*lead, taken), torch.int64, f"numbers:{count}")

    def run(x: Any, i: Any) -> Any:
        if type(x) is not torch.Tensor:
            return table_call("take_rows", x, i)
        rows = torch.cat([x, torch.zeros_like(x[..., :1, :])], -2)
        return torch.take_along_dim(rows, torch.where(i < 0, count, i).unsqueeze(-1), -2)

    return Case((Operand((*lead, count, width), d.pick(ALL)), index), run)


def _lines(d: Draw, dtypes: Any) -> tuple[tuple[Operand, ...], int]:
    """A target, the numbers of lines, and lines for them."""
    shape = d.shape(1, 3, empty=False)
    dim = d.dim(shape)
    place, count, dtype = dim % len(shape), d.size(), d.pick(dtypes)
    source = (*shape[:place], count, *shape[place + 1 :])
    return (Operand(shape, dtype), _index((count,), shape[dim]), Operand(source, dtype)), dim


def index_add(d: Draw) -> Case:
    operands, dim = _lines(d, NUMBERS)
    alpha = d.pick((1, 2, -1))
    return Case(operands, lambda x, i, s: torch.index_add(x, dim, i, s, alpha=alpha))


def index_copy(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    dim = d.dim(shape)
    place, dtype, count = dim % len(shape), d.pick(ALL), d.number(1, shape[dim])
    # each line once: which of two writes to one place wins is nobody's promise
    lines = Operand((count,), torch.int64, f"distinct:{shape[dim]}")
    source = Operand((*shape[:place], count, *shape[place + 1 :]), dtype)
    return Case((Operand(shape, dtype), lines, source), lambda x, i, s: torch.index_copy(x, dim, i, s))


def index_fill(d: Draw) -> Case:
    operands, dim = _lines(d, ALL)
    value = d.pick((0, 1, -2))
    return Case(operands[:2], lambda x, i: torch.index_fill(x, dim, i, value))


def scattered(function: Callable[..., Any], dtypes: Any = ALL, wider: bool = False) -> Sample:
    """A scatter; torch has no gradient for a source that is wider than its index."""

    def sample(d: Draw) -> Case:
        shape, dim, wide = _along(d)
        dtype = d.pick(dtypes)
        source = tuple(size + (wider and d.number(0, 5) == 0) for size in wide)
        operands = (Operand(shape, dtype), _index(wide, shape[dim]), Operand(source, dtype))
        return Case(operands, lambda x, i, s: function(x, dim, i, s))

    return sample


def scatter(d: Draw) -> Case:
    if d.yes():
        return scattered(torch.scatter, wider=True)(d)
    shape, dim, wide = _along(d)
    value = d.pick((0, 1, -2))
    operands = (Operand(shape, d.pick(ALL)), _index(wide, shape[dim]))
    return Case(operands, lambda x, i: torch.scatter(x, dim, i, value))


def scatter_reduce(d: Draw) -> Case:
    how, own = d.pick(("sum", "prod", "mean", "amax", "amin")), d.yes()
    return scattered(lambda x, dim, i, s: torch.scatter_reduce(x, dim, i, s, how, include_self=own), (torch.float32,))(
        d
    )


def one_hot(d: Draw) -> Case:
    classes = d.number(1, 6)
    return Case((_index(d.shape(0, 2), classes),), lambda x: F.one_hot(x, classes))


def _indices(d: Draw) -> tuple[tuple[int, ...], list[int], tuple[tuple[int, ...], ...]]:
    """A shape, the dims that are indexed, and the indices' shapes, which broadcast."""
    shape = d.shape(1, 3, empty=False)
    dims = [k for k in range(len(shape)) if d.yes()] or [d.number(0, len(shape) - 1)]
    spread = d.shape(1, 2)
    return shape, dims, tuple(spread if len(dims) == 1 or d.yes() else d.broadcast_to(spread) for _ in dims)


def _spelled(dims: list[int], indices: Any) -> tuple[Any, ...]:
    found: list[Any] = [slice(None)] * (max(dims) + 1)
    for dim, index in zip(dims, indices, strict=True):
        found[dim] = index
    return tuple(found)


def index(d: Draw) -> Case:
    shape, dims, shapes = _indices(d)
    if len(dims) > 1:
        shapes = tuple(each or (1,) for each in shapes)
    operands = (Operand(shape, d.pick(ALL)), *(_index(s, shape[k]) for s, k in zip(shapes, dims, strict=True)))
    return Case(operands, lambda x, *indices: x[_spelled(dims, indices)])


def index_put(d: Draw) -> Case:
    shape, dims, shapes = _indices(d)
    dims = list(range(len(dims)))
    out = torch.broadcast_shapes(*shapes) + shape[len(dims) :]
    dtype = d.pick(FLOATS)
    accumulate = d.yes()
    values = Operand(tuple(out) if d.yes() else d.broadcast_to(tuple(out)), dtype)
    indices = tuple(_index(s, shape[k]) for s, k in zip(shapes, dims, strict=True))
    if accumulate:
        return Case(
            (Operand(shape, dtype), *indices, values), lambda x, *rest: torch.index_put(x, rest[:-1], rest[-1], True)
        )
    one = Operand((), dtype, gradient=False)  # written twice to one place, one value is one value
    return Case((Operand(shape, dtype), *indices, one), lambda x, *rest: torch.index_put(x, rest[:-1], rest[-1]))


LOOKUP: dict[str, Sample] = {
    "embedding": embedding,
    "gather": gather,
    "take_along_dim": take_along_dim,
    "take": take,
    "index_select": index_select,
    "take_rows": take_rows,
    "index": index,
    "index_put": index_put,
    "index_add": index_add,
    "index_copy": index_copy,
    "index_fill": index_fill,
    "scatter": without_gradients(scatter),
    "scatter_add": scattered(torch.scatter_add, NUMBERS),
    "scatter_reduce": scatter_reduce,
    "one_hot": one_hot,
}
