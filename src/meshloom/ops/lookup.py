"""Rules of ops that find elements by index, or put them there.

A dim that is looked up may be sharded: each device finds what it holds and zero elsewhere, and the sum has it all. So
may a dim that is written to: each device takes the writes that fall into its chunk. Neither gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshloom.errors import ArgumentError, ShapeError
from meshloom.ops.labels import SUM, R, broadcast, carried_placement, labels, normal_dim, others
from meshloom.ops.rule import Call, Choices, Ref, Row, named_row, with_none
from meshloom.placement import PARTIAL_OPS, Partial, Placement, Shard
from meshloom.types import Shape, numel


def embedding(call: Call) -> Choices:
    """A sharded vocabulary is a masked look-up: each device finds its own rows, the sum has them all."""
    ids, weight = call.shape("input"), call.shape("weight")
    if len(weight) != 2:
        raise ShapeError(f"embedding needs a weight of 2 dims and got {list(weight)}")
    first, second = call.index("input"), call.index("weight")

    def row(label: str, for_ids: Placement, for_weight: Placement, out: Placement, local: bool = True) -> Row:
        ins = (for_ids, for_weight) if first < second else (for_weight, for_ids)
        return Row(label, ins, (out,), local=local)

    rows = [row(f"dim {d}", Shard(d), R, Shard(d)) for d in range(len(ids))]
    rows.append(row("width", R, Shard(1), Shard(len(ids))))
    rows.append(row("vocabulary", R, Shard(0), looked_up(call, "weight"), local=False))
    return with_none(call, [ids + (weight[1],)], rows)


def looked_up(call: Call, name: str = "input") -> Placement:
    """What a masked look-up leaves: a sum of one value and zeros; for bool, which has no sum, the largest."""
    return Partial("max") if call.operands[call.index(name)].dtype == "bool" else SUM


def masked_row(call: Call, dim: int) -> Row:
    """A look-up in a sharded dim: each device finds its own, and must know its offset."""
    return replace(named_row(call, f"dim {dim}", (looked_up(call),), input=Shard(dim)), local=False)


def picked_partials(call: Call) -> list[Row]:
    """Picking elements commutes with every reduction over devices."""
    return [named_row(call, f"P({op})", (Partial(op),), input=Partial(op)) for op in PARTIAL_OPS]


def along_dim(call: Call, *names: str) -> int:
    """The dim of a look-up; its operands must have as many dims as the input."""
    ndim = len(call.shape("input"))
    for name in names:
        if max(len(call.shape(name)), 1) != max(ndim, 1):
            raise ShapeError(
                f"{call.op} needs as many dims in {name} as in input",
                shapes=f"{list(call.shape(name))} and {list(call.shape('input'))}",
            )
    return normal_dim(call.arguments["dim"], ndim)


def shared_dims(call: Call, dim: int, *names: str) -> list[int]:
    """The dims besides `dim` in which these operands have the input's size, so that their chunks go together."""
    shape = call.shape("input")
    for name in names:
        for d in others(min(len(shape), len(call.shape(name))), dim):
            if name == "index" and call.shape(name)[d] > shape[d]:
                raise ShapeError(
                    f"the index has size {call.shape(name)[d]} in dim {d} and the input has {shape[d]}",
                    shapes=f"{list(call.shape(name))} and {list(shape)}",
                    fix=f"index at most {shape[d]} lines of dim {d}",
                )
    return [d for d in others(len(shape), dim) if all(call.shape(name)[d] == shape[d] for name in names)]


def gather(call: Call) -> Choices:
    """`gather(dim, index)`: an element of the result finds one of the input along `dim`."""
    shape, index = call.shape("input"), call.shape("index")
    if not shape or not index or not numel(index):
        return with_none(call, [index], picked_partials(call))
    dim = along_dim(call, "index")
    rows = [
        named_row(call, f"dim {d}", (Shard(d),), input=Shard(d), index=Shard(d))
        for d in shared_dims(call, dim, "index")
    ]
    rows.append(named_row(call, "index", (Shard(dim),), index=Shard(dim)))
    rows.append(masked_row(call, dim))
    return with_none(call, [index], [*rows, *picked_partials(call)])


def take_along_dim(call: Call) -> Choices:
    """`take_along_dim(indices, dim)`: a gather whose operands broadcast in the other dims; without a dim, of all."""
    shape, index = call.shape("input"), call.shape("indices")
    if call.arguments["dim"] is None:
        return take(call, "indices", (numel(index),))
    dim = along_dim(call, "indices")
    if not shape:
        return with_none(call, [index], picked_partials(call))
    out = list(broadcast([shape[:dim] + (1,) + shape[dim + 1 :], index[:dim] + (1,) + index[dim + 1 :]]))
    out[dim] = index[dim]
    found = tuple(out)
    rows = []
    for d in others(len(found), dim):
        both = (carried_placement(shape, found, d), carried_placement(index, found, d))
        rows.append(named_row(call, f"dim {d}", (Shard(d),), input=both[0], indices=both[1]))
    rows.append(named_row(call, "index", (Shard(dim),), indices=Shard(dim)))
    rows.append(masked_row(call, dim))
    return with_none(call, [found], [*rows, *picked_partials(call)])


def take(call: Call, name: str = "index", out: Shape | None = None) -> Choices:
    """`take(index)`: elements by their flat position."""
    index, ndim = call.shape(name), len(call.shape("input"))
    result = index if out is None else out
    kept = range(len(index)) if result == index else ()
    rows = [named_row(call, f"index {d}", (Shard(d),), **{name: Shard(d)}) for d in kept]
    rows += [masked_row(call, d) for d in range(ndim)]
    return with_none(call, [result], rows)


def take_rows(call: Call) -> Choices:
    """`take_rows(index)`: of every batch some rows by number, zeros for -1."""
    found = labels("...nh, ...m -> ...mh", "input", "index")(call)
    if call.shape("input")[:-2] != call.shape("index")[:-1]:
        raise ShapeError(
            "take_rows needs an index for every batch of rows",
            shapes=f"{list(call.shape('input'))} and {list(call.shape('index'))}",
        )
    kept = [row for row in found.rows if not any(isinstance(each, Partial) for each in (*row.ins, *row.outs))]
    return replace(found, rows=tuple(kept), flops=0)


def _line(call: Call) -> tuple[Shape, int, int]:
    """The input's shape, the dim, and the number of indices of an op that takes a line of them."""
    shape, index = call.shape("input"), call.shape("index")
    if len(index) > 1:
        raise ShapeError(f"{call.op} needs an index of one dim and got {list(index)}")
    return shape, normal_dim(call.arguments["dim"], len(shape)), numel(index)


def index_select(call: Call) -> Choices:
    """`index_select(dim, index)`: whole lines by their number."""
    shape, dim, count = _line(call)
    if not shape:
        return with_none(call, [shape], picked_partials(call))
    rows = [named_row(call, f"dim {d}", (Shard(d),), input=Shard(d)) for d in others(len(shape), dim)]
    if call.shape("index"):
        rows.append(named_row(call, "index", (Shard(dim),), index=Shard(0)))
    rows.append(masked_row(call, dim))
    return with_none(call, [shape[:dim] + (count,) + shape[dim + 1 :]], [*rows, *picked_partials(call)])


def index_write(call: Call) -> Choices:
    """`index_copy`, `index_fill`: whole lines are replaced."""
    shape, dim, count = _line(call)
    source = {"source": call.shape("source")} if call.has("source") else {}
    for given in source.values():
        expected = shape[:dim] + (count,) + shape[dim + 1 :] if shape else shape
        if given and given != expected:
            raise ShapeError(f"{call.op} needs a source of {list(expected)} and got {list(given)}")
    rows = [
        named_row(call, f"dim {d}", (Shard(d),), input=Shard(d), **_shard_each(source, d))
        for d in others(len(shape), dim)
    ]
    return with_none(call, [shape], [*rows, *_owner_rows(call, shape, dim)])


def _shard_each(shapes: dict[str, Shape], dim: int) -> dict[str, Placement]:
    return {name: Shard(dim) for name, shape in shapes.items() if shape}


def _owner_rows(call: Call, shape: Shape, dim: int) -> list[Row]:
    """Each device takes the writes that fall into its chunk."""
    row = named_row(call, f"dim {dim}", (Shard(dim),), input=Shard(dim))
    return [replace(row, local=False)] if shape else []


def index_add(call: Call) -> Choices:
    """`index_add(dim, index, source)`: sharded updates make partial sums, the input's own value counts once."""
    rows = list(index_write(call).rows[:-1])
    if call.shape("input") and call.shape("index"):
        dim = _line(call)[1]
        rows.append(named_row(call, "index", (SUM,), input=SUM, index=Shard(0), source=Shard(dim)))
    rows.append(named_row(call, "P(sum)", (SUM,), input=SUM, source=SUM))
    return with_none(call, [call.shape("input")], rows)


def scatter(call: Call) -> Choices:
    """`scatter`, `scatter_reduce`: an element of the source goes to the place that the index says."""
    shape = call.shape("input")
    names = ("index", "src") if call.has("src") else ("index",)
    if not numel(call.shape("index")):
        return with_none(call, [shape], [])
    dim = along_dim(call, *names)
    rows = []
    if shape and all(call.shape(name) for name in names):
        for d in shared_dims(call, dim, *names):
            rows.append(named_row(call, f"dim {d}", (Shard(d),), **dict.fromkeys(("input", *names), Shard(d))))
        rows += _owner_rows(call, shape, dim)
    return with_none(call, [shape], rows)


def scatter_add(call: Call) -> Choices:
    """Sharded updates make partial sums, the input's own value counts once."""
    rows, shape = list(scatter(call).rows[:-1]), call.shape("input")
    index, src = call.shape("index"), call.shape("src")
    if shape and index and index == src and numel(index):
        dim = along_dim(call)
        rows.append(named_row(call, "index", (SUM,), input=SUM, index=Shard(dim), src=Shard(dim)))
    rows.append(named_row(call, "P(sum)", (SUM,), input=SUM, src=SUM))
    return with_none(call, [shape], rows)


def one_hot(call: Call) -> Choices:
    """`one_hot(num_classes)`: the new dim is replicated."""
    shape, classes = call.shape("input"), call.arguments["num_classes"]
    if classes < 1:
        raise ArgumentError(f"one_hot needs the number of classes, not {classes}", fix="write one_hot(x, num_classes)")
    return with_none(call, [(*shape, classes)], [Row(f"dim {d}", (Shard(d),), (Shard(d),)) for d in range(len(shape))])


def index_refs(call: Call) -> dict[int, int]:
    """For each dim of the input that is indexed by a tensor, the number of that operand."""
    indices = call.arguments["indices"]
    shape = call.shape("input")
    if len(indices) > len(shape):
        raise ShapeError(f"{len(indices)} indices for {len(shape)} dims", fix=f"give at most {len(shape)}")
    return {dim: each.index for dim, each in enumerate(indices) if isinstance(each, Ref)}


def indexed_places(call: Call) -> tuple[Shape, int, dict[int, int], Shape]:
    """Where dims go when tensors index: the index's shape, its place, the place of every other dim, and the result.

    Indices that stand side by side leave their dims where they were; otherwise these come first.
    """
    shape, refs = call.shape("input"), index_refs(call)
    spread = broadcast([call.operands[ref].shape for ref in refs.values()])
    dims = sorted(refs)
    adjacent = dims == list(range(dims[0], dims[0] + len(dims))) if dims else True
    start = dims[0] if dims and adjacent else 0
    kept = others(len(shape), *dims)
    places = {d: k if k < start else k + len(spread) for k, d in enumerate(kept)}
    rest = tuple(shape[d] for d in kept)
    return spread, start, places, rest[:start] + spread + rest[start:]


def _index_row(call: Call, label: str, outs: Sequence[Placement], place: int, spread: Shape) -> Row:
    """A row that shards dim `place` of the broadcast index."""
    row = named_row(call, label, outs)
    ins = list(row.ins)
    for ref in index_refs(call).values():
        ins[ref] = carried_placement(call.operands[ref].shape, spread, place)
    return Row(label, tuple(ins), row.outs)


def index(call: Call) -> Choices:
    """`x[i, j]` with integer tensors: dims that are not indexed stay, the index's own dims may be sharded."""
    spread, start, places, out = indexed_places(call)
    rows = [named_row(call, f"dim {d}", (Shard(place),), input=Shard(d)) for d, place in places.items()]
    rows += [_index_row(call, f"index {i}", (Shard(start + i),), i, spread) for i in range(len(spread))]
    rows += [masked_row(call, d) for d in sorted(index_refs(call))]
    return with_none(call, [out], [*rows, *picked_partials(call)])


def index_put(call: Call) -> Choices:
    """`x[i, j] = values`: each device takes the writes into its chunk; what is accumulated may be a partial sum."""
    shape = call.shape("input")
    spread, start, places, out = indexed_places(call)
    values = call.shape("values")
    if broadcast([values, out]) != out:
        raise ShapeError(f"values of {list(values)} do not fit into x[indices] of {list(out)}")
    rows = [
        named_row(call, f"dim {d}", (Shard(d),), input=Shard(d), values=carried_placement(values, out, place))
        for d, place in places.items()
    ]
    for d in sorted(index_refs(call)):
        rows += _owner_rows(call, shape, d)
    if call.arguments["accumulate"]:
        rows += _accumulating_rows(call, spread, start, out)
    return with_none(call, [shape], rows)


def _accumulating_rows(call: Call, spread: Shape, start: int, out: Shape) -> list[Row]:
    """x + y = y + x: updates may be sharded where every index has a value of its own, or be partial sums."""
    rows, values = [], call.shape("values")
    for i in range(len(spread)):
        placed = carried_placement(values, out, start + i)
        if isinstance(placed, Shard):
            ins = list(_index_row(call, "", (SUM,), i, spread).ins)
            ins[call.index("input")], ins[call.index("values")] = SUM, placed
            rows.append(Row(f"index {i}", tuple(ins), (SUM,)))
    rows.append(named_row(call, "P(sum)", (SUM,), input=SUM, values=SUM))
    return rows
