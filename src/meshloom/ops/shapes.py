"""Rules of ops that move dims about: a sharded dim may be kept where its chunks stay whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from meshloom.errors import ArgumentError, BoundsError, ShapeError
from meshloom.ops.labels import normal_dim, normal_dims, others
from meshloom.ops.rule import Call, Choices, Even, Row, with_none
from meshloom.placement import PARTIAL_OPS, Partial, Shard
from meshloom.types import Shape, numel


def partials(operands: int = 1, results: int = 1) -> list[Row]:
    """Rows that carry any P through: moving elements about commutes with every reduction over devices."""
    return [Row(f"P({op})", (Partial(op),) * operands, (Partial(op),) * results) for op in PARTIAL_OPS]


def carried(call: Call, shapes: Sequence[Shape], places: Mapping[int, int], extra: Iterable[Row] = ()) -> Choices:
    """Choices for one operand whose dim `i` becomes dim `places[i]` of every result."""
    rows = [Row(f"dim {i}", (Shard(i),), (Shard(j),) * len(shapes)) for i, j in places.items()]
    return with_none(call, shapes, [*rows, *extra, *partials(1, len(shapes))])


def merged_groups(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Runs of dims of both shapes that hold the same elements; lone dims of size 1 are left out.

    >>> list(merged_groups((4, 6, 5), (24, 1, 5)))
    [([0, 1], [0]), ([2], [2])]
    """
    i = j = 0
    while i < len(source) and j < len(target):
        if source[i] != target[j] and 1 in (source[i], target[j]):
            i, j = (i + 1, j) if source[i] == 1 else (i, j + 1)
            continue
        left, right = [i], [j]
        here, there = source[i], target[j]
        while here != there:
            if here < there:
                i += 1
                left.append(i)
                here *= source[i]
            else:
                j += 1
                right.append(j)
                there *= target[j]
        yield left, right
        i, j = i + 1, j + 1


def filled_shape(wanted: Sequence[int], count: int) -> Shape:
    """The shape with its -1 worked out.

    >>> filled_shape((2, -1), 12)
    (2, 6)
    """
    sizes = tuple(wanted)
    if sizes.count(-1) > 1:
        raise ShapeError(f"only one dim of {list(sizes)} may be -1")
    if any(size < -1 for size in sizes):
        raise ShapeError(f"a shape has no negative sizes but -1, and {list(sizes)} does")
    rest = math.prod(size for size in sizes if size != -1)
    if -1 in sizes and rest and count % rest == 0:
        sizes = tuple(count // rest if size == -1 else size for size in sizes)
    if -1 in sizes or numel(sizes) != count:
        raise ShapeError(f"{count} elements do not fill shape {list(wanted)}", fix="use a shape with as many elements")
    return sizes


def reshaped(call: Call, shape: Shape) -> Choices:
    """Choices for a reshape: a dim that stays whole is carried; the first dim of a merged run if its shards divide."""
    source = call.shape("input")
    places: dict[int, int] = {}
    split: list[Row] = []
    if numel(source):
        for left, right in merged_groups(source, shape):
            i, j = left[0], right[0]
            if len(left) == len(right) == 1:
                places[i] = j
            else:
                even = (Even(0, i, math.gcd(source[i], shape[j])),)
                split.append(Row(f"dim {i}", (Shard(i),), (Shard(j),), even=even))
    return carried(call, [shape], places, split)


def reshape(call: Call) -> Choices:
    """`reshape`, `view`."""
    return reshaped(call, filled_shape(call.arguments["shape"], numel(call.shape("input"))))


def flatten(call: Call) -> Choices:
    """`flatten(start_dim, end_dim)`."""
    shape = call.shape("input")
    first = normal_dim(call.arguments["start_dim"], len(shape), "start_dim")
    last = normal_dim(call.arguments["end_dim"], len(shape), "end_dim")
    if first > last:
        raise ShapeError(f"start_dim {first} comes after end_dim {last}")
    return reshaped(call, shape[:first] + (numel(shape[first : last + 1]),) + shape[last + 1 :])


def permute(call: Call) -> Choices:
    """`permute(dims)`."""
    shape, dims = call.shape("input"), call.arguments["dims"]
    order = tuple(normal_dim(dim, len(shape)) for dim in dims)
    if sorted(order) != list(range(len(shape))):
        raise ShapeError(f"permute needs each of {len(shape)} dims once and got {tuple(dims)}")
    return carried(call, [tuple(shape[dim] for dim in order)], {dim: place for place, dim in enumerate(order)})


def transpose(call: Call) -> Choices:
    """`transpose(dim0, dim1)`."""
    shape = call.shape("input")
    if not shape:
        return carried(call, [shape], {})
    first, second = (normal_dim(call.arguments[name], len(shape), name) for name in ("dim0", "dim1"))
    order = list(range(len(shape)))
    order[first], order[second] = second, first
    return carried(call, [tuple(shape[dim] for dim in order)], {dim: place for place, dim in enumerate(order)})


def squeezed_dims(call: Call) -> tuple[int, ...]:
    """The dims of size 1 that a squeeze call takes away."""
    shape, dim = call.shape("input"), call.arguments["dim"]
    asked = normal_dims(dim, len(shape)) if dim != () else ()
    return tuple(each for each in asked if shape[each] == 1)


def squeeze(call: Call) -> Choices:
    """`squeeze(dim=None)`."""
    shape, gone = call.shape("input"), squeezed_dims(call)
    kept = others(len(shape), *gone)
    return carried(call, [tuple(shape[dim] for dim in kept)], {dim: place for place, dim in enumerate(kept)})


def unsqueeze(call: Call) -> Choices:
    """`unsqueeze(dim)`."""
    shape = call.shape("input")
    place = normal_dim(call.arguments["dim"], len(shape) + 1)
    new = shape[:place] + (1,) + shape[place:]
    return carried(call, [new], {dim: dim + (dim >= place) for dim in range(len(shape))})


def expand(call: Call) -> Choices:
    """`expand(sizes)`: -1 keeps a size, dims of size 1 are repeated without a copy."""
    shape, sizes = call.shape("input"), tuple(call.arguments["size"])
    lead = len(sizes) - len(shape)
    if lead < 0:
        raise ShapeError(f"expand to {list(sizes)} has fewer dims than {list(shape)}")
    own = (None,) * lead + shape
    for dim, (old, new) in enumerate(zip(own, sizes, strict=True)):
        if (old is None and new < 0) or (old not in (None, 1, new) and new != -1):
            raise ShapeError(f"dim {dim} of size {old} does not expand to {new}", asked=list(sizes))
    out = tuple(size if new == -1 and size is not None else new for size, new in zip(own, sizes, strict=True))
    return carried(call, [out], {d: d + lead for d, size in enumerate(shape) if out[d + lead] == size})


def cat(call: Call) -> Choices:
    """`cat(tensors, dim)`: any other dim may be sharded."""
    shapes = [topology.shape for topology in call.operands]
    dim = normal_dim(call.arguments["dim"], len(shapes[0]))
    for shape in shapes:
        if len(shape) != len(shapes[0]) or any(
            a != b for d, (a, b) in enumerate(zip(shape, shapes[0], strict=True)) if d != dim
        ):
            raise ShapeError(
                f"cat along dim {dim} needs equal sizes elsewhere",
                shapes=" and ".join(str(list(each)) for each in shapes),
                fix=f"make them equal in every dim but {dim}",
            )
    if not shapes[0]:
        raise ShapeError("0-d tensors cannot be concatenated", fix="use stack")
    out = shapes[0][:dim] + (sum(shape[dim] for shape in shapes),) + shapes[0][dim + 1 :]
    others = [Row(f"dim {d}", (Shard(d),) * len(shapes), (Shard(d),)) for d in range(len(out)) if d != dim]
    return with_none(call, [out], [*others, *partials(len(shapes))])


def stack(call: Call) -> Choices:
    """`stack(tensors, dim)`: the new dim is replicated, the others stay as they are."""
    shapes = [topology.shape for topology in call.operands]
    if any(shape != shapes[0] for shape in shapes):
        raise ShapeError("stack needs equal shapes", shapes=" and ".join(str(list(each)) for each in shapes))
    place = normal_dim(call.arguments["dim"], len(shapes[0]) + 1)
    out = shapes[0][:place] + (len(shapes),) + shapes[0][place:]
    rows = [Row(f"dim {d}", (Shard(d),) * len(shapes), (Shard(d + (d >= place)),)) for d in range(len(shapes[0]))]
    return with_none(call, [out], [*rows, *partials(len(shapes))])


def split_sizes(size: int, asked: int | Sequence[int]) -> Shape | None:
    """The sizes of `tensor_split`: as equal as can be, or cut at indices; None where the pieces overlap.

    >>> split_sizes(7, 3), split_sizes(5, (2, 9)), split_sizes(5, (4, 2))
    ((3, 2, 2), (2, 3, 0), None)
    """
    if isinstance(asked, int):
        if asked < 1:
            raise ShapeError(f"tensor_split takes a number of sections above 0, not {asked}")
        return tuple(size // asked + (i < size % asked) for i in range(asked))
    cuts = [range(size)[: index if index is not None else 0].stop for index in asked]
    edges = [0, *cuts, size]
    if any(low > high for low, high in pairwise(edges)):
        return None
    return tuple(high - low for low, high in pairwise(edges))


def section_sizes(call: Call) -> tuple[int, tuple[int, ...]]:
    """The dim and the sizes that `split`, `chunk` or `tensor_split` cuts it into."""
    shape = call.shape("input")
    dim = normal_dim(call.arguments["dim"], len(shape))
    if not shape:
        raise ShapeError("a 0-d tensor cannot be split")
    size, asked = shape[dim], call.arguments["sections"]
    if call.op == "tensor_split":
        return dim, split_sizes(size, asked) or ()
    if isinstance(asked, (tuple, list)):
        if sum(asked) != size or any(part < 0 for part in asked):
            raise ShapeError(f"sections {list(asked)} do not add up to dim {dim} of size {size}")
        return dim, tuple(asked)
    if asked < 0 or (asked == 0 and (size or call.op == "chunk")):
        raise ShapeError(f"{call.op} takes a number above 0, not {asked}")
    step = -(-size // asked) if call.op == "chunk" else asked
    if not size:
        return dim, (0,) * (asked if call.op == "chunk" else 1)
    return dim, tuple(min(step, size - start) for start in range(0, size, step))


def split(call: Call) -> Choices:
    """`split(size or sections, dim)`, `chunk(chunks, dim)`: any other dim may be sharded."""
    shape = call.shape("input")
    dim, sizes = section_sizes(call)
    outs = [shape[:dim] + (size,) + shape[dim + 1 :] for size in sizes]
    return carried(call, outs, {d: d for d in range(len(shape)) if d != dim})


def narrow(call: Call) -> Choices:
    """`narrow(dim, start, length)`: any other dim may be sharded."""
    shape, start, length = call.shape("input"), call.arguments["start"], call.arguments["length"]
    dim = normal_dim(call.arguments["dim"], len(shape))
    size = shape[dim] if shape else 0
    begin = start + size if start < 0 else start
    if not shape or length < 0 or not 0 <= begin <= size or begin + length > size:
        raise ShapeError(f"start {start} and length {length} do not fit dim {dim} of size {size}")
    kept = {d: d for d in range(len(shape)) if d != dim or length == size}
    return carried(call, [shape[:dim] + (length,) + shape[dim + 1 :]], kept)


def spelled_index(index: object, ndim: int) -> tuple[Any, ...]:
    """An index with its ellipsis written out: one entry per dim (an int or a slice), and None for new dims."""
    given = index if isinstance(index, tuple) else (index,)
    used = sum(1 for each in given if each is not None and each is not Ellipsis)
    if used > ndim:
        raise BoundsError(f"{used} indices for {ndim} dims", fix=f"give at most {ndim}; None adds a dim")
    if sum(1 for each in given if each is Ellipsis) > 1:
        raise ArgumentError("an index may have one ellipsis")
    fill = (slice(None),) * (ndim - used)
    if not any(each is Ellipsis for each in given):
        return (*given, *fill)
    place = next(i for i, each in enumerate(given) if each is Ellipsis)
    return given[:place] + fill + given[place + 1 :]


def indexed_dims(index: object, shape: Shape) -> Iterator[tuple[Any, int | None]]:
    """Each entry of an index, checked, with the dim that it takes from; a None takes from no dim.

    >>> list(indexed_dims((..., None, -1), (4, 3)))
    [(slice(None, None, None), 0), (None, None), (-1, 1)]
    """
    dim = 0
    for each in spelled_index(index, len(shape)):
        if each is None:
            yield None, None
            continue
        size = shape[dim]
        if not isinstance(each, slice) and not -size <= each < size:
            fix = f"indices go from {-size} to {size - 1}" if size else "the dim is empty"
            raise BoundsError(f"index {each} is out of range for dim {dim} of size {size}", fix=fix)
        yield each, dim
        dim += 1


def bounds(index: slice, size: int) -> range:
    """The positions that a slice takes, in torch's manner: no negative steps."""
    if index.step is not None and index.step <= 0:
        raise ArgumentError(f"a slice step must be above 0, not {index.step}", fix="flip the tensor instead")
    return range(size)[index]


def is_whole(index: object, size: int) -> bool:
    """Whether an entry of an index takes all of a dim in order."""
    return isinstance(index, slice) and bounds(index, size) == range(size)


def getitem(call: Call) -> Choices:
    """Indexing by ints, slices, None and an ellipsis: dims taken whole may stay sharded."""
    shape = call.shape("input")
    out: list[int] = []
    places: dict[int, int] = {}
    for each, dim in indexed_dims(call.arguments["index"], shape):
        if dim is None:
            out.append(1)
        elif isinstance(each, slice):
            if is_whole(each, shape[dim]):
                places[dim] = len(out)
            out.append(len(bounds(each, shape[dim])))
    return carried(call, [tuple(out)], places)
