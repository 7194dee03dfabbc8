"""Rules of ops that look through windows: convolution, pooling, interpolation.

Batch and channels are labels, as in a matmul. A dim that windows slide over is gathered, since a window may lie on two
chunks; unless windows lie side by side (the step is the window's size) and the shards divide their number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshloom.errors import ArgumentError, ShapeError
from meshloom.ops.labels import SUM
from meshloom.ops.rule import Call, Choices, Even, Row, named_row, with_none
from meshloom.placement import Shard
from meshloom.types import Shape


def slid_dims(op: str) -> int:
    """How many dims windows slide over, from the op's name.

    >>> slid_dims("conv_transpose2d")
    2
    """
    return int(op[-2])


def spread(value: object, count: int, name: str) -> tuple[int, ...]:
    """One number per dim.

    >>> spread(3, 2, "stride"), spread((1, 2), 2, "stride")
    ((3, 3), (1, 2))
    """
    listed = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(listed) not in (1, count):
        raise ShapeError(f"{name} {listed} needs one number, or one for each of {count} dims")
    return listed * count if len(listed) == 1 else listed


def _settings(call: Call, *names: str) -> list[tuple[int, ...]]:
    count = slid_dims(call.op)
    return [spread(call.arguments[name], count, name) for name in names]


def _check(call: Call, channels: int) -> tuple[Shape, int]:
    """The input's shape and its channel dim; channels that the weight expects."""
    shape, count = call.shape("input"), slid_dims(call.op)
    if len(shape) not in (count + 1, count + 2) or len(call.shape("weight")) != count + 2:
        raise ShapeError(
            f"{call.op} needs an input of {count + 1} or {count + 2} dims and a weight of {count + 2}",
            shapes=f"{list(shape)} and {list(call.shape('weight'))}",
        )
    place = len(shape) - count - 1
    if shape[place] != channels:
        raise ShapeError(
            f"{call.op} expects {channels} channels and dim {place} of the input has {shape[place]}",
            shapes=f"{list(shape)} and {list(call.shape('weight'))}",
        )
    return shape, place


def _sizes(op: str, sizes: Sequence[int]) -> Shape:
    if any(size < 1 for size in sizes):
        raise ShapeError(f"{op} leaves sizes {list(sizes)}: the windows are larger than the input")
    return tuple(sizes)


def _paddings(call: Call, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """What padding adds to each dim in all."""
    asked = call.arguments["padding"]
    if asked == "valid":
        return (0,) * len(kernel)
    if asked == "same":
        return tuple(d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    if isinstance(asked, str):
        raise ArgumentError(f"padding {asked!r} is not known", fix="use 'same', 'valid' or numbers")
    return tuple(2 * each for each in spread(asked, len(kernel), "padding"))


def conv(call: Call) -> Choices:
    """input [n, in, ...], weight [out, in / groups, ...]: in is contracted, n and out are kept, groups go together."""
    weight, groups = call.shape("weight"), call.arguments["groups"]
    shape, place = _check(call, weight[1] * groups)
    kernel = weight[2:]
    stride, dilation = _settings(call, "stride", "dilation")
    added = _paddings(call, kernel, dilation)
    slid = [
        (size + more - d * (k - 1) - 1) // s + 1
        for size, more, k, s, d in zip(shape[place + 1 :], added, kernel, stride, dilation, strict=True)
    ]
    out = (*shape[:place], weight[0], *_sizes(call.op, slid))
    rows = _channel_rows(call, place, groups, out_dim=0, in_dim=1)
    for i, (k, s, d, more) in enumerate(zip(kernel, stride, dilation, added, strict=True)):
        size = shape[place + 1 + i]
        if k == s and not more and (d == 1 or k == 1) and size % k == 0:
            even = () if k == 1 else (Even(call.index("input"), place + 1 + i, size // k),)
            rows.append(_slid_row(call, place + 1 + i, even))
    flops = 2 * math.prod(out) * math.prod(weight[1:])
    return with_none(call, [out], [*rows, *_linear(call)], flops=flops)


def conv_transpose(call: Call) -> Choices:
    """input [n, in, ...], weight [in, out / groups, ...]."""
    weight, groups = call.shape("weight"), call.arguments["groups"]
    shape, place = _check(call, weight[0])
    stride, padding, dilation, more = _settings(call, "stride", "padding", "dilation", "output_padding")
    kernel, sizes = weight[2:], shape[place + 1 :]
    slid = [
        (size - 1) * s - 2 * p + d * (k - 1) + o + 1
        for size, s, p, d, k, o in zip(sizes, stride, padding, dilation, kernel, more, strict=True)
    ]
    out = (*shape[:place], weight[1] * groups, *_sizes(call.op, slid))
    rows = _channel_rows(call, place, groups, out_dim=1, in_dim=0)
    for i, size in enumerate(sizes):
        if slid[i] == size * kernel[i] and kernel[i] == stride[i] and not padding[i] and not more[i]:
            even = () if kernel[i] == 1 else (Even(call.index("input"), place + 1 + i, size),)
            rows.append(_slid_row(call, place + 1 + i, even))
    flops = 2 * math.prod(shape) * math.prod(weight[1:])
    return with_none(call, [out], [*rows, *_linear(call)], flops=flops)


def _channel_rows(call: Call, place: int, groups: int, out_dim: int, in_dim: int) -> list[Row]:
    """The labels of batch and channels; a partial result takes the bias once."""
    channels = Shard(place)
    rows = [named_row(call, "batch", (Shard(0),), input=Shard(0))] if place else []
    if groups == 1:
        rows.append(named_row(call, "out", (channels,), weight=Shard(out_dim), bias=Shard(0)))
        rows.append(named_row(call, "in", (SUM,), input=channels, weight=Shard(in_dim), bias=SUM))
    else:
        even = (Even(call.index("input"), place, groups),)
        row = named_row(call, "groups", (channels,), input=channels, weight=Shard(0), bias=Shard(0))
        rows.append(replace(row, even=even))
    return rows


def _slid_row(call: Call, dim: int, even: Sequence[Even]) -> Row:
    return replace(named_row(call, f"dim {dim}", (Shard(dim),), input=Shard(dim)), even=tuple(even))


def _linear(call: Call) -> list[Row]:
    """Linear in the input and in the weight, of which the other may hold infinity unless it is of integers."""
    rows = [named_row(call, "P(sum)", (SUM,), bias=SUM, **{name: SUM}) for name in ("input", "weight")]
    return [replace(row, when="whole") for row in rows]


def _pooled_lead(call: Call, count: int) -> Shape:
    shape = call.shape("input")
    if len(shape) not in (count + 1, count + 2):
        raise ShapeError(f"{call.op} needs an input of {count + 1} or {count + 2} dims and got {list(shape)}")
    return shape[: len(shape) - count]


def pooled_size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """How many windows fit; with `ceil` the last one may stick out, but not start in the padding.

    >>> pooled_size(5, 2, 2, 0, 1, False), pooled_size(5, 2, 2, 0, 1, True)
    (2, 3)
    """
    room = size + 2 * padding - dilation * (kernel - 1) - 1
    found = (-(-room // stride) if ceil else room // stride) + 1
    return found - 1 if ceil and (found - 1) * stride >= size + padding else found


def pool(call: Call) -> Choices:
    """Batch and channels stay as they are; a mean is linear."""
    count, arguments = slid_dims(call.op), call.arguments
    lead, (kernel, padding) = _pooled_lead(call, count), _settings(call, "kernel_size", "padding")
    asked = arguments["stride"]
    stride = kernel if asked is None or asked == () else spread(asked, count, "stride")
    dilation = spread(arguments.get("dilation", 1), count, "dilation")
    ceil = bool(arguments["ceil_mode"])
    sizes = call.shape("input")[len(lead) :]
    slid = [pooled_size(*each, ceil) for each in zip(sizes, kernel, stride, padding, dilation, strict=True)]
    rows = _lead_rows(lead)
    for i, (size, k, s, p, d) in enumerate(zip(sizes, kernel, stride, padding, dilation, strict=True)):
        if k == s and not p and d == 1 and size % k == 0:
            rows.append(_slid_row(call, len(lead) + i, (Even(0, len(lead) + i, size // k),)))
    return _pool_choices(call, (*lead, *_sizes(call.op, slid)), rows, math.prod(kernel))


def adaptive_pool(call: Call) -> Choices:
    """As `pool`, with the result's size given: windows lie side by side where it divides the input's."""
    count, asked = slid_dims(call.op), call.arguments["output_size"]
    lead = _pooled_lead(call, count)
    sizes = call.shape("input")[len(lead) :]
    listed = tuple(asked) if isinstance(asked, (tuple, list)) else (asked,) * count
    if len(listed) != count:
        raise ShapeError(f"output_size {listed} needs one number, or one for each of {count} dims")
    slid = tuple(size if want is None else want for size, want in zip(sizes, listed, strict=True))
    rows = _lead_rows(lead)
    for i, (size, want) in enumerate(zip(sizes, slid, strict=True)):
        if want and size % want == 0:
            rows.append(_slid_row(call, len(lead) + i, (Even(0, len(lead) + i, want),)))
    return _pool_choices(call, lead + slid, rows, math.prod(sizes) // max(math.prod(slid), 1))


def _lead_rows(lead: Shape) -> list[Row]:
    return [Row(f"dim {d}", (Shard(d),), (Shard(d),)) for d in range(len(lead))]


def _pool_choices(call: Call, out: Shape, rows: list[Row], window: int) -> Choices:
    if "max" not in call.op:  # a mean of integers is rounded; of equal ones in several parts each would be the largest
        rows.append(Row(str(SUM), (SUM,), (SUM,), when="floating"))
    return with_none(call, [out], rows, flops=math.prod(out) * window)


def interpolate(call: Call) -> Choices:
    """Batch and channels stay as they are; linear in the input."""
    shape = call.shape("input")
    if len(shape) < 3:
        raise ShapeError(f"interpolate needs [n, channels, ...] and got {list(shape)}")
    out = shape[:2] + interpolated_sizes(call)
    rows = _lead_rows(shape[:2])
    if call.arguments["mode"] != "bicubic":  # some of its weights are negative, and -1 * 0 is lost in a sum of parts
        rows.append(Row("P(sum)", (SUM,), (SUM,)))
    return with_none(call, [out], rows, flops=4 * math.prod(out))


def interpolated_sizes(call: Call) -> Shape:
    """The sizes that an interpolation gives: as asked, or scaled and rounded down."""
    sizes = call.shape("input")[2:]
    size, scale = call.arguments["size"], call.arguments["scale_factor"]
    if (size is None) == (scale is None):
        raise ArgumentError("interpolate takes either size or scale_factor")
    if size is not None:
        return spread(size, len(sizes), "size")
    listed = tuple(scale) if isinstance(scale, (tuple, list)) else (scale,) * len(sizes)
    if len(listed) != len(sizes):
        raise ShapeError(f"scale_factor {listed} needs one number, or one for each of {len(sizes)} dims")
    return tuple(math.floor(float(each) * factor) for each, factor in zip(sizes, listed, strict=True))
