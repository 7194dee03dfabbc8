"""Rules of ops that repeat, turn, cut and pad: dims that they leave alone stay sharded."""

from __future__ import annotations

import math
from typing import Any

from meshloom.errors import ArgumentError, ShapeError
from meshloom.ops.labels import SUM, R, normal_dim, normal_dims, others
from meshloom.ops.rule import Call, Choices, Even, Row, with_none
from meshloom.ops.shapes import carried, filled_shape, partials, reshaped
from meshloom.placement import Shard
from meshloom.types import Shape, numel


def unflatten(call: Call) -> Choices:
    """`unflatten(dim, sizes)`."""
    shape = call.shape("input")
    if not shape:
        raise ShapeError("a 0-d tensor has no dim to unflatten")
    dim = normal_dim(call.arguments["dim"], len(shape))
    return reshaped(call, shape[:dim] + filled_shape(call.arguments["sizes"], shape[dim]) + shape[dim + 1 :])


def ravel(call: Call) -> Choices:
    """`ravel()`: one dim."""
    return reshaped(call, (numel(call.shape("input")),))


def as_complex(call: Call) -> Choices:
    """`view_as_complex`: the last dim, a real and an imaginary part, becomes one number."""
    shape = call.shape("input")
    if not shape or shape[-1] != 2:
        raise ShapeError(f"view_as_complex needs a last dim of size 2 and got {list(shape)}")
    return _linearly(call, shape[:-1])


def as_real(call: Call) -> Choices:
    """`view_as_real`: a last dim for the real and the imaginary part."""
    return _linearly(call, (*call.shape("input"), 2))


def _linearly(call: Call, out: Shape) -> Choices:
    """Dims stay where they are; sums of parts are parts of the sum, which products and complex quotients are not."""
    rows = [Row(f"dim {d}", (Shard(d),), (Shard(d),)) for d in range(min(len(out), len(call.shape("input"))))]
    return with_none(call, [out], [*rows, Row("P(sum)", (SUM,), (SUM,))])


def movedim(call: Call) -> Choices:
    """`movedim(source, destination)`: the other dims keep their order."""
    shape = call.shape("input")
    source, target = (_numbers(call, name, len(shape)) for name in ("source", "destination"))
    if len(source) != len(target):
        raise ShapeError(f"movedim moves {len(source)} dims to {len(target)} places")
    places = dict(zip(source, target, strict=True))
    free = iter(others(len(shape), *target))
    places.update((dim, next(free)) for dim in others(len(shape), *source))
    order = sorted(places, key=lambda dim: places[dim])
    return carried(call, [tuple(shape[dim] for dim in order)], places)


def _numbers(call: Call, name: str, ndim: int) -> tuple[int, ...]:
    given = call.arguments[name]
    listed = given if isinstance(given, (tuple, list)) else (given,)
    return normal_dims(tuple(listed), ndim) if listed else ()


def repeats_of(call: Call) -> tuple[int, ...]:
    """How often each dim of the result repeats the input's; `tile` may leave leading ones out."""
    shape, given = call.shape("input"), tuple(call.arguments["repeats"])
    if call.op == "tile":
        given = (1,) * (len(shape) - len(given)) + given
    if len(given) < len(shape) or any(count < 0 for count in given):
        raise ShapeError(f"repeats {list(given)} do not fit a tensor of {len(shape)} dims")
    return given


def repeat(call: Call) -> Choices:
    """`repeat`, `tile`: dims that are repeated once stay as they are."""
    shape, counts = call.shape("input"), repeats_of(call)
    lead = len(counts) - len(shape)
    out = tuple(size * count for size, count in zip((1,) * lead + shape, counts, strict=True))
    return carried(call, [out], {d: d + lead for d in range(len(shape)) if counts[d + lead] == 1})


def repeat_interleave(call: Call) -> Choices:
    """Each element several times in a row: chunks stay whole where shards divide the dim."""
    shape, count, dim = call.shape("input"), call.arguments["repeats"], call.arguments["dim"]
    if count < 0:
        raise ArgumentError(f"repeat_interleave takes repeats of 0 or more, not {count}")
    if dim is None:
        whole = (Row("dim 0", (Shard(0),), (Shard(0),), even=(Even(0, 0, shape[0]),)),) if shape else ()
        return carried(call, [(numel(shape) * count,)], {}, whole)
    place = normal_dim(dim, len(shape))
    if not shape:
        return carried(call, [(count,)], {})
    row = Row(f"dim {place}", (Shard(place),), (Shard(place),), even=(Even(0, place, shape[place]),))
    out = shape[:place] + (shape[place] * count,) + shape[place + 1 :]
    return carried(call, [out], {d: d for d in others(len(shape), place)}, [row])


def roll(call: Call) -> Choices:
    """`roll(shifts, dims)`: any dim that does not turn may be sharded; without dims all of it turns."""
    shape, dims = call.shape("input"), call.arguments["dims"]
    turned = _numbers(call, "dims", len(shape)) if dims is not None and dims != () else tuple(range(len(shape)))
    return carried(call, [shape], {d: d for d in others(len(shape), *turned)})


def flip(call: Call) -> Choices:
    """`flip(dims)`: any other dim may be sharded."""
    shape = call.shape("input")
    turned = _numbers(call, "dims", len(shape))
    return carried(call, [shape], {d: d for d in others(len(shape), *turned)})


def rot90(call: Call) -> Choices:
    """`rot90(k, dims)`: any dim outside the plane may be sharded, and all of them after a full turn."""
    shape, turns = call.shape("input"), call.arguments["k"] % 4
    plane = _numbers(call, "dims", len(shape))
    if len(plane) != 2:
        raise ShapeError(f"rot90 turns a plane of two dims, not {call.arguments['dims']}")
    out = list(shape)
    if turns % 2:
        out[plane[0]], out[plane[1]] = out[plane[1]], out[plane[0]]
    return carried(call, [tuple(out)], {d: d for d in range(len(shape)) if turns == 0 or d not in plane})


def padding_of(call: Call) -> list[tuple[int, int]]:
    """What a pad call adds before and after each dim; the last dim comes first in its argument."""
    shape, given = call.shape("input"), tuple(call.arguments["pad"])
    if len(given) % 2 or len(given) > 2 * len(shape):
        raise ShapeError(f"pad {list(given)} needs a pair for each of at most {len(shape)} dims")
    pairs = [(given[i], given[i + 1]) for i in range(0, len(given), 2)]
    return [(0, 0)] * (len(shape) - len(pairs)) + pairs[::-1]


def pad(call: Call) -> Choices:
    """`pad`: dims that nothing is added to may be sharded; zeros and copies commute with every reduction."""
    shape, added = call.shape("input"), padding_of(call)
    out = tuple(size + low + high for size, (low, high) in zip(shape, added, strict=True))
    if any(size < 0 for size in out):
        raise ShapeError(f"pad {list(call.arguments['pad'])} takes more off than {list(shape)} has")
    rows = [Row(f"dim {d}", (Shard(d),), (Shard(d),)) for d, pair in enumerate(added) if pair == (0, 0)]
    plain = call.arguments["mode"] != "constant" or not call.arguments["value"]
    return with_none(call, [out], [*rows, *(partials() if plain else ())])


def unbind(call: Call) -> Choices:
    """`unbind(dim)`: any other dim may be sharded."""
    shape = call.shape("input")
    if not shape:
        raise ShapeError("a 0-d tensor cannot be unbound")
    dim = normal_dim(call.arguments["dim"], len(shape))
    kept = others(len(shape), dim)
    return carried(call, [tuple(shape[d] for d in kept)] * shape[dim], {d: place for place, d in enumerate(kept)})


def unfold(call: Call) -> Choices:
    """`unfold(dimension, size, step)`: windows of a dim, in a new last dim; any other dim may be sharded."""
    shape, size, step = call.shape("input"), call.arguments["size"], call.arguments["step"]
    dim = normal_dim(call.arguments["dimension"], len(shape), "dimension")
    full = shape[dim] if shape else 1
    if not 0 <= size <= full or step < 1:
        raise ShapeError(f"windows of {size} by steps of {step} do not fit dim {dim} of size {full}")
    out = shape[:dim] + ((full - size) // step + 1,) + shape[dim + 1 :] + (size,) if shape else (size,)
    return carried(call, [out], {d: d for d in others(len(shape), dim)})


def _plane(call: Call, ndim: int) -> tuple[int, int]:
    first, second = (normal_dim(call.arguments[name], ndim, name) for name in ("dim1", "dim2"))
    if first == second:
        raise ShapeError(f"dim1 and dim2 are both {first}", fix="name two dims")
    return first, second


def diagonal(call: Call) -> Choices:
    """`diagonal(offset, dim1, dim2)`: the diagonal becomes the last dim; any other dim may be sharded."""
    shape, offset = call.shape("input"), call.arguments["offset"]
    if len(shape) < 2:
        raise ShapeError(f"a diagonal needs two dims and got {list(shape)}")
    first, second = _plane(call, len(shape))
    length = min(shape[first] + min(offset, 0), shape[second] - max(offset, 0))
    kept = others(len(shape), first, second)
    out = (*(shape[d] for d in kept), max(length, 0))
    return carried(call, [out], {d: place for place, d in enumerate(kept)})


def diag_embed(call: Call) -> Choices:
    """`diag_embed(offset, dim1, dim2)`: the last dim becomes a diagonal; any other dim may be sharded."""
    shape = call.shape("input")
    if not shape:
        raise ShapeError("a 0-d tensor has no diagonal to embed")
    first, second = _plane(call, len(shape) + 1)
    size = shape[-1] + abs(call.arguments["offset"])
    kept = others(len(shape) + 1, first, second)
    out = [size] * (len(shape) + 1)
    for d, place in enumerate(kept):
        out[place] = shape[d]
    return carried(call, [tuple(out)], dict(enumerate(kept)))


def triangle(call: Call) -> Choices:
    """`tril`, `triu`: batch dims may be sharded, and so may rows and columns: a device knows its offset."""
    shape = call.shape("input")
    if len(shape) < 2:
        raise ShapeError(f"{call.op} needs two dims or more and got {list(shape)}")
    batch = len(shape) - 2
    rows = [Row(f"dim {d}", (Shard(d),), (Shard(d),), local=d < batch) for d in range(len(shape))]
    return with_none(call, [shape], [*rows, *partials()])


def meshgrid(call: Call) -> Choices:
    """Each line becomes a dim of every result; where it is sharded, the others are replicated."""
    lines = [topology.shape for topology in call.operands]
    if any(len(line) > 1 for line in lines):
        raise ShapeError("meshgrid needs lines", shapes=" and ".join(str(list(line)) for line in lines))
    sizes = [numel(line) for line in lines]
    order = list(range(len(sizes)))
    if _indexing(call) == "xy" and len(order) > 1:
        order[0], order[1] = 1, 0
    out = tuple(sizes[i] for i in order)
    rows = [
        Row(f"line {i}", tuple(Shard(0) if i == j else R for j in range(len(sizes))), (Shard(order[i]),) * len(sizes))
        for i in range(len(sizes))
        if lines[i]
    ]
    return with_none(call, [out] * len(sizes), rows)


def _indexing(call: Call) -> Any:
    asked = call.arguments["indexing"] or "ij"
    if asked not in ("ij", "xy"):
        raise ArgumentError(f"indexing {asked!r} is not known", fix="use 'ij' or 'xy'")
    return asked


def pixel_shuffle(call: Call) -> Choices:
    """Channels become pixels, or pixels channels: batch dims stay, the others where shards divide them."""
    shape, down = call.shape("input"), call.op == "pixel_unshuffle"
    factor = call.arguments["downscale_factor" if down else "upscale_factor"]
    if len(shape) < 3 or factor < 1:
        raise ShapeError(f"{call.op} by {factor} needs [..., channels, height, width] and got {list(shape)}")
    *batch, channels, height, width = shape
    if (down and (height % factor or width % factor)) or (not down and channels % (factor * factor)):
        raise ShapeError(f"{call.op} by {factor} does not divide {list(shape)}")
    if down:
        tail = (channels * factor * factor, height // factor, width // factor)
    else:
        tail = (channels // (factor * factor), height * factor, width * factor)
    whole = [_even_row(len(batch) + i, size, new) for i, (size, new) in enumerate(zip(shape[-3:], tail, strict=True))]
    return carried(call, [(*batch, *tail)], {d: d for d in range(len(batch))}, whole)


def _even_row(dim: int, size: int, new: int) -> Row:
    """Chunks of a dim that is stretched or shrunk stay whole where the shards divide both sizes."""
    return Row(f"dim {dim}", (Shard(dim),), (Shard(dim),), even=(Even(0, dim, math.gcd(size, new)),))
