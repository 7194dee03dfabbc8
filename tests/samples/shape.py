"""Samples of ops that move elements about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from samples.drawing import ALL, FLOATS, NUMBERS, Case, Draw, Operand, Sample


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
    count = d.number(0, len(shape))
    front = d.number(0, count) if d.number(0, 2) == 0 else count  # what comes after an ellipsis indexes the last dims
    for place, size in enumerate((*shape[:front], *shape[len(shape) - count + front :])):
        if place == front:
            index.append(Ellipsis)
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
    if Ellipsis not in index and d.yes():
        index.append(Ellipsis)
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


def tensor_split(d: Draw) -> Case:
    shape = d.shape(1, 3)
    dim, count = d.dim(shape), d.number(1, 5)
    return Case((Operand(shape, torch.float32),), lambda x: torch.tensor_split(x, count, dim))


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


def unflatten(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    dim = d.dim(shape)
    sizes = _factored(d, shape[dim])
    if d.yes():
        sizes = (*sizes[:-1], -1)
    return Case((Operand(shape, d.pick(ALL)),), lambda x: torch.unflatten(x, dim, sizes))


def movedim(d: Draw) -> Case:
    shape = d.shape(1, 3)
    if d.yes():
        source, target = d.dim(shape), d.dim(shape)
        return Case((Operand(shape, torch.float32),), lambda x: torch.movedim(x, source, target))
    left, right = list(range(len(shape))), list(range(len(shape)))
    count = d.number(1, len(shape))
    sources = tuple(left.pop(d.number(0, len(left) - 1)) for _ in range(count))
    targets = tuple(right.pop(d.number(0, len(right) - 1)) for _ in range(count))
    return Case((Operand(shape, torch.float32),), lambda x: torch.movedim(x, sources, targets))


def unbind(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    dim = d.dim(shape)
    return Case((Operand(shape, torch.float32),), lambda x: torch.unbind(x, dim))


def unfold(d: Draw) -> Case:
    shape = d.shape(1, 3, empty=False)
    dim = d.dim(shape)
    size, step = d.number(1, shape[dim]), d.number(1, 3)
    return Case((Operand(shape, torch.float32),), lambda x: x.unfold(dim, size, step))


def diagonal(d: Draw) -> Case:
    shape = d.shape(2, 3)
    first = d.number(0, len(shape) - 1)
    second = d.pick([k for k in range(len(shape)) if k != first]) - len(shape)
    offset = d.number(-2, 2)
    return Case((Operand(shape, torch.float32),), lambda x: torch.diagonal(x, offset, first, second))


def diag_embed(d: Draw) -> Case:
    shape = d.shape(1, 3)
    first = d.number(0, len(shape))
    second = d.pick([k for k in range(len(shape) + 1) if k != first])
    offset = d.number(-2, 2)
    return Case((Operand(shape, torch.float32),), lambda x: torch.diag_embed(x, offset, first, second))


def triangle(function: Callable[..., Any]) -> Sample:
    def sample(d: Draw) -> Case:
        diagonal = d.number(-3, 3)
        return Case((Operand(d.shape(2, 3), d.pick(ALL)),), lambda x: function(x, diagonal))

    return sample


def repeat(d: Draw) -> Case:
    shape = d.shape(0, 3)
    counts = tuple(d.pick((1, 1, 2, 3, 0)) for _ in range(len(shape) + d.number(0, 1)))
    return Case((Operand(shape, d.pick(ALL)),), lambda x: x.repeat(counts))


def tile(d: Draw) -> Case:
    shape = d.shape(1, 3)
    counts = tuple(d.pick((1, 1, 2, 3)) for _ in range(d.number(1, len(shape) + 1)))
    return Case((Operand(shape, d.pick(ALL)),), lambda x: torch.tile(x, counts))


def repeat_interleave(d: Draw) -> Case:
    shape, count = d.shape(1, 3), d.number(0, 3)
    dim = d.pick((None, d.dim(shape)))
    return Case((Operand(shape, d.pick(ALL)),), lambda x: torch.repeat_interleave(x, count, dim))


def roll(d: Draw) -> Case:
    shape = d.shape(1, 3)
    if d.number(0, 4) == 0:
        shift = d.number(-3, 9)
        return Case((Operand(shape, torch.float32),), lambda x: torch.roll(x, shift))
    dims = tuple(k for k in range(len(shape)) if d.yes()) or (d.dim(shape),)
    shifts = tuple(d.number(-3, 9) for _ in dims)
    return Case((Operand(shape, d.pick(ALL)),), lambda x: torch.roll(x, shifts, dims))


def flip(d: Draw) -> Case:
    shape = d.shape(1, 3)
    dims = tuple(d.pick((k, k - len(shape))) for k in range(len(shape)) if d.yes())
    return Case((Operand(shape, d.pick(ALL)),), lambda x: torch.flip(x, dims))


def rot90(d: Draw) -> Case:
    shape, turns = d.shape(2, 3), d.number(-4, 5)
    first = d.number(0, len(shape) - 1)
    second = d.pick([k for k in range(len(shape)) if k != first])
    return Case((Operand(shape, torch.float32),), lambda x: torch.rot90(x, turns, (first, second)))


def pad(d: Draw) -> Case:
    if d.number(0, 2) == 0:
        mode = d.pick(("reflect", "replicate", "circular"))
        shape = (d.size(empty=False), d.size(empty=False), d.number(2, 6))
        amounts = (d.number(0, 1), d.number(0, 1))
        return Case((Operand(shape, torch.float32),), lambda x: F.pad(x, amounts, mode))
    shape = d.shape(1, 3, empty=False)
    amounts = tuple(d.pick((0, 0, 1, 2, -1)) for _ in range(2 * d.number(0, len(shape))))
    shape = tuple(size + 2 for size in shape)
    value = d.pick((None, 0.0, 1.5, float("-inf")))
    return Case((Operand(shape, d.pick(FLOATS)),), lambda x: F.pad(x, amounts, "constant", value))


def meshgrid(d: Draw) -> Case:
    indexing = d.pick(("ij", "xy"))
    operands = tuple(Operand((d.size(),), torch.float32) for _ in range(d.number(1, 3)))
    return Case(operands, lambda *lines: torch.meshgrid(*lines, indexing=indexing))


def pixel_shuffle(d: Draw) -> Case:
    factor = d.number(1, 2)
    shape = (*d.shape(0, 2, empty=False), d.number(1, 4) * factor * factor, d.number(1, 4), d.number(1, 4))
    return Case((Operand(shape, torch.float32),), lambda x: F.pixel_shuffle(x, factor))


def pixel_unshuffle(d: Draw) -> Case:
    factor = d.number(1, 2)
    shape = (*d.shape(0, 2, empty=False), d.number(1, 4), d.number(1, 4) * factor, d.number(1, 4) * factor)
    return Case((Operand(shape, torch.float32),), lambda x: F.pixel_unshuffle(x, factor))


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
    "tensor_split": tensor_split,
    "cat": cat,
    "stack": stack,
    "unflatten": unflatten,
    "movedim": movedim,
    "unbind": unbind,
    "unfold": unfold,
    "diagonal": diagonal,
    "diag_embed": diag_embed,
    "repeat": repeat,
    "tile": tile,
    "repeat_interleave": repeat_interleave,
    "roll": roll,
    "flip": flip,
    "rot90": rot90,
    "pad": pad,
    "meshgrid": meshgrid,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "view_as_complex": lambda d: Case((Operand((*d.shape(), 2), torch.float32),), torch.view_as_complex),
    "view_as_real": lambda d: Case((Operand(d.shape(), torch.complex64, "complex"),), torch.view_as_real),
    "ravel": lambda d: Case((Operand(d.shape(), d.pick(ALL)),), torch.ravel),
    "tril": triangle(torch.tril),
    "triu": triangle(torch.triu),
}  # fmt: skip
