"""Rules by labels: an op says what its dims mean, einsum-like, and the sharding rules follow.

`"...mk, ...kn -> ...mn"`: on one mesh axis you may shard any one label. An operand that has the label is sharded on it,
one that does not is replicated; a result without the label is a partial sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from meshloom.errors import ArgumentError, DTypeError, ShapeError, closest
from meshloom.ops.rule import Call, Choices, Fill, Inner, Op, Ref, Row, Rule, with_none
from meshloom.placement import IDENTITY, Partial, Placement, Replicate, Shard, read_placements
from meshloom.types import Shape

SUM = Partial("sum")
R = Replicate()


def normal_dim(dim: int, ndim: int, name: str = "dim") -> int:
    """The dim counted from the front; 0-d tensors count as having one dim, as in torch."""
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise ArgumentError(f"{name} takes the number of a dim, not {dim!r}")
    dim = dim.__index__()
    limit = max(ndim, 1)
    if not -limit <= dim < limit:
        raise ShapeError(
            f"{name} {dim} is out of range for a tensor of {ndim} dims", fix=f"dims go from {-limit} to {limit - 1}"
        )
    return dim % limit


def others(ndim: int, *gone: int) -> tuple[int, ...]:
    """All dims but some.

    >>> others(3, 1)
    (0, 2)
    """
    return tuple(dim for dim in range(ndim) if dim not in gone)


def normal_dims(dim: object, ndim: int) -> tuple[int, ...]:
    """Dims counted from the front; None and () mean all of them."""
    if dim is None or dim == ():
        return tuple(range(ndim))
    given = dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = tuple(normal_dim(each, ndim) for each in given)
    if len(set(dims)) != len(dims):
        raise ShapeError(f"dim {max(dims, key=dims.count)} stands twice in {given}", fix="name every dim once")
    return dims if ndim else ()


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape that several shapes broadcast to.

    >>> broadcast([(4, 1), (3,)])
    (4, 3)
    """
    ndim = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    out = []
    for dim, sizes in enumerate(zip(*padded, strict=True)):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            raise ShapeError(
                f"sizes {' and '.join(map(str, sorted(wide)))} do not broadcast at dim {dim - ndim}",
                shapes=" and ".join(str(list(shape)) for shape in shapes),
                fix="make them equal, or one of them 1",
            )
        out.append(wide.pop() if wide else 1)
    return tuple(out)


def carried_placement(shape: Shape, out: Shape, dim: int) -> Placement:
    """How an operand lies where the result's dim is sharded: S of its own dim, or R if it is broadcast over it.

    >>> str(carried_placement((3,), (4, 3), 1)), str(carried_placement((3,), (4, 3), 0))
    ('S(0)', 'R')
    """
    own = dim - (len(out) - len(shape))
    carried = own >= 0 and shape[own] == out[dim]
    return Shard(own) if carried else R


def _partial_row(text: str) -> Row:
    """A row from its text, with what it needs after `if`.

    >>> str(_partial_row("P(max) -> P(min) if floating"))
    'P(max) -> P(min) if floating'
    """
    identity, _, when = text.partition(" if ")
    left, right = identity.split("->")
    return Row("", read_placements(left), read_placements(right), when=when)


def pointwise(*partials: str) -> Rule:
    """The rule of an op that acts on each element: any dim may be sharded; `partials` are its rows with P."""
    known = tuple(_partial_row(text) for text in partials)

    def rule(call: Call) -> Choices:
        shapes = [topology.shape for topology in call.operands]
        out = broadcast(shapes)
        rows = [
            Row(f"dim {dim}", tuple(carried_placement(shape, out, dim) for shape in shapes), (Shard(dim),))
            for dim in range(len(out))
        ]
        rows += _partial_rows(call, known, shapes)
        return with_none(call, [out], rows, flops=math.prod(out))

    return rule


def _partial_rows(call: Call, known: Iterable[Row], shapes: Sequence[Shape]) -> Iterable[Row]:
    """The rows with P that fit the call: a number counts as R, and a 0-d partial operand must be alone.

    A 0-d operand has weaker type promotion; the partial axis would give it a dim.
    """
    for row in known:
        if len(row.ins) != len(call.leaves):
            continue
        pairs = list(zip(row.ins, call.leaves, strict=True))
        if any(not isinstance(leaf, Ref) and placement != R for placement, leaf in pairs):
            continue
        kept = tuple(placement for placement, leaf in pairs if isinstance(leaf, Ref))
        if len(kept) != len(shapes):  # a tensor that was given by name, such as a bound of clamp
            continue
        if len(shapes) > 1 and any(p != R and not shape for p, shape in zip(kept, shapes, strict=True)):
            continue
        yield replace(row, label=" ".join(str(p) for p in kept if p != R), ins=kept)


def contraction_rows(inputs: Sequence[str], output: str, refs: Sequence[int], operands: int) -> list[Row]:
    """Rows for einsum labels: one per label that may be sharded, then P(sum) carried through each operand.

    A label that stands twice in one operand is a diagonal and cannot be sharded. Sums are carried for integers only:
    the other operand may hold infinity, and infinity times the zeros of a sum is nan.
    """
    order = dict.fromkeys(output + "".join(inputs))
    rows = []
    for label in order:
        if any(text.count(label) > 1 for text in inputs):
            continue
        ins: list[Placement] = [R] * operands
        for ref, text in zip(refs, inputs, strict=True):
            ins[ref] = Shard(text.index(label)) if label in text else R
        out = Shard(output.index(label)) if label in output else SUM
        rows.append(Row(label, tuple(ins), (out,)))
    for ref in refs:
        ins = [R] * operands
        ins[ref] = SUM
        rows.append(Row("P(sum)", tuple(ins), (SUM,), when="whole"))
    return rows


def label_sizes(inputs: Sequence[str], shapes: Sequence[Shape]) -> dict[str, int]:
    """The size of every label; sizes must agree."""
    sizes: dict[str, int] = {}
    for text, shape in zip(inputs, shapes, strict=True):
        for label, size in zip(text, shape, strict=True):
            if sizes.setdefault(label, size) != size:
                raise ShapeError(
                    f"label {label!r} has size {sizes[label]} and size {size}",
                    shapes=" and ".join(str(list(each)) for each in shapes),
                    fix=f"make the dims called {label!r} equal",
                )
    return sizes


def fresh_labels(count: int, taken: str) -> str:
    """Capitals for the dims that `...` stands for, none of them in use."""
    return "".join([c for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if c not in taken][:count])


def _check_ranks(op: str, inputs: Sequence[str], shapes: Sequence[Shape]) -> None:
    for text, shape in zip(inputs, shapes, strict=True):
        least, exact = len(text.replace("...", "")), "..." not in text
        if len(shape) < least or (exact and len(shape) != least):
            raise ShapeError(
                f"{op} needs an operand of {least} dims{'' if exact else ' or more'} and got {list(shape)}",
                labels=", ".join(inputs),
            )


def expand_labels(op: str, inputs: Sequence[str], output: str, shapes: Sequence[Shape]) -> tuple[list[str], str, Shape]:
    """Labels with `...` written out for these shapes, and the result's shape.

    Batch dims of size 1 that broadcast lose their label, which makes them R on a mesh axis that shards it.
    """
    _check_ranks(op, inputs, shapes)
    batches = [
        shape[: len(shape) - len(text.replace("...", ""))] if "..." in text else ()
        for text, shape in zip(inputs, shapes, strict=True)
    ]
    batch = broadcast(batches)
    letters = fresh_labels(len(batch), "".join(inputs))
    spelled = []
    for text, own in zip(inputs, batches, strict=True):
        tail = letters[len(letters) - len(own) :]
        kept = [
            x if size == full else "." for x, size, full in zip(tail, own, batch[len(batch) - len(own) :], strict=True)
        ]
        spelled.append(text.replace("...", "".join(kept)))
    sizes = label_sizes(
        [t.replace(".", "") for t in spelled],
        [tuple(s for s, x in zip(shape, t, strict=True) if x != ".") for shape, t in zip(shapes, spelled, strict=True)],
    )
    out = output.replace("...", letters)
    sizes.update(zip(letters, batch, strict=True))
    return spelled, out, tuple(sizes[label] for label in out)


def labels(spec: str | Callable[[Call], str], *names: str, bias: str | None = None) -> Rule:
    """The rule of a multilinear op from its labels; `names` are the arguments that the labels speak of, in order.

    `bias` names an argument that is added along the last label of the result: where the result is a partial sum, the
    bias is given to one device only, as P(sum).
    """

    def rule(call: Call) -> Choices:
        text = spec if isinstance(spec, str) else spec(call)
        left, output = (side.strip() for side in text.split("->"))
        inputs = [each.strip() for each in left.split(",")]
        shapes = [call.shape(name) for name in names]
        spelled, out, shape = expand_labels(call.op, inputs, output, shapes)
        rows = contraction_rows(
            [t.replace(".", "\0") for t in spelled], out, [call.index(name) for name in names], len(call.operands)
        )
        rows = [row for row in rows if row.label != "\0"]
        if bias is not None and call.has(bias):
            rows = [_with_bias(row, call.index(bias), call.shape(bias), shape) for row in rows]
        contracted = {
            x: n for t, s in zip(spelled, shapes, strict=True) for x, n in zip(t, s, strict=True) if x not in out
        }
        contracted.pop(".", None)
        flops = 2 * math.prod(shape) * math.prod(contracted.values())
        return with_none(call, [shape], rows, flops=flops)

    return rule


def _with_bias(row: Row, index: int, shape: Shape, out: Shape) -> Row:
    if broadcast([shape, out]) != out:
        raise ShapeError(f"a bias of shape {list(shape)} does not add to a result of shape {list(out)}")
    result = row.outs[0]
    own: Placement = carried_placement(shape, out, result.dim) if isinstance(result, Shard) else result
    return replace(row, ins=row.ins[:index] + (own,) + row.ins[index + 1 :])


REDUCED_BY = {"sum": SUM, "mean": SUM, "max": Partial("max"), "min": Partial("min"), "prod": Partial("prod")}


def reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims that a reduction call takes away."""
    return normal_dims(call.arguments.get("dim"), len(call.shape("input")))


def reduced_shape(shape: Shape, dims: Sequence[int], keepdim: bool) -> Shape:
    """The shape after a reduction.

    >>> reduced_shape((2, 3, 4), (1,), True)
    (2, 1, 4)
    """
    if keepdim:
        return tuple(1 if dim in dims else size for dim, size in enumerate(shape))
    return tuple(size for dim, size in enumerate(shape) if dim not in dims)


def kept_rows(call: Call, dims: Sequence[int], keepdim: bool, results: int = 1) -> list[Row]:
    """Rows that shard a dim which a one-operand reduction keeps."""
    kept = others(len(call.shape("input")), *dims)
    places = {dim: dim if keepdim else place for place, dim in enumerate(kept)}
    return [Row(f"dim {dim}", (Shard(dim),), (Shard(places[dim]),) * results) for dim in kept]


def reduction(op: str, *partials: str, ties: bool = False) -> Rule:
    """The rule of a reduction: a reduced dim that is sharded gives P(op); a kept one stays sharded.

    `ties` says that equal elements share the gradient: backward counts them over the axis, so no part is left alone.
    """
    known = tuple(_partial_row(text) for text in partials)

    def rule(call: Call) -> Choices:
        shape, dims = call.shape("input"), reduced_dims(call)
        keepdim = bool(call.arguments.get("keepdim"))
        if ties and call.operands[call.index("input")].dtype[0] == "c":
            raise DTypeError("complex numbers have no order", fix="compare x.abs() or x.real")
        rows = kept_rows(call, dims, keepdim)
        rows += [extreme_row(call, op, dim, dims) if ties else Row(f"dim {dim}", (Shard(dim),), (REDUCED_BY[op],))
                 for dim in dims]  # fmt: skip
        rows += [replace(row, label=str(row.ins[0])) for row in known]
        return with_none(call, [reduced_shape(shape, dims, keepdim)], rows, flops=math.prod(shape))

    return rule


def extreme_row(call: Call, op: str, dim: int, dims: Sequence[int]) -> Row:
    """A reduced dim that is sharded, of a maximum or minimum: reduced at once, and counted at once in backward."""
    kept = others(len(call.shape("input")), *dims)
    found, count = Inner(op, kept), Inner("sum", kept)
    return Row(f"dim {dim}", (Shard(dim),), (R,), (found,), backward=(count,), local=False)


def identity_fill(op: str) -> Callable[[Call], tuple[Fill, ...]]:
    """Fill padding of the reduced dims with the reduction's identity."""
    return lambda call: (Fill(call.index("input"), IDENTITY[op], reduced_dims(call)),)


def table(*ops: Op) -> dict[str, Op]:
    """The ops by name; a name may stand once."""
    found: dict[str, Op] = {}
    for op in ops:
        if op.name in found:
            raise ValueError(f"op {op.name!r} stands twice in the table")
        found[op.name] = op
    return found


def unknown_op(name: str, known: Iterable[str]) -> ArgumentError:
    """The error for an op that the table does not have."""
    return ArgumentError(f"the op table has no {name!r}", fix=closest(name, known))
