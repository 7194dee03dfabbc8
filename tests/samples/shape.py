"""Samples of ops that move elements about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from samples.drawing import ALL, NUMBERS, Case, Draw, Operand, Sample


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


SHAPE: dict[str, Sample] = {
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
