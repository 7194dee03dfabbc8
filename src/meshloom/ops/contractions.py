"""Labels of contractions that depend on the call: matmul by the ranks of its operands, tensordot, einsum."""

from __future__ import annotations

import math
from dataclasses import replace

from meshloom.errors import ShapeError
from meshloom.ops.labels import SUM, contraction_rows, fresh_labels, labels, normal_dim
from meshloom.ops.rule import Call, Choices, Even, named_row, with_none
from meshloom.placement import Partial, Shard
from meshloom.types import Shape


def matmul_spec(call: Call) -> str:
    """The labels of matmul for the ranks of its operands."""
    left, right = len(call.shape("input")), len(call.shape("other"))
    if not left or not right:
        raise ShapeError("matmul needs operands of one dim or more", fix="multiply by a 0-d tensor with *")
    vectors = {(True, True): "k, k -> ", (True, False): "k, ...kn -> ...n", (False, True): "...mk, k -> ...m"}
    return vectors.get((left == 1, right == 1), "...mk, ...kn -> ...mn")


def inner_spec(call: Call) -> str:
    """The labels of inner: the last dims meet, all others stay."""
    left, right = len(call.shape("input")), len(call.shape("other"))
    if not left or not right:  # a product with one number
        letters = fresh_labels(left + right, "")
        return f"{letters[:left]}, {letters[left:]} -> {letters}"
    letters = fresh_labels(left + right - 2, "")
    first, second = letters[: left - 1], letters[left - 1 :]
    return f"{first}k, {second}k -> {first}{second}"


def grouped_mm(call: Call) -> Choices:
    """`_grouped_mm(tokens, experts, offs)`: expert i takes the tokens up to `offs[i]`.

    Experts may lie apart: a device computes the tokens of its own ones and has zeros elsewhere, which add up.
    """
    tokens, experts = call.shape("input"), call.shape("mat2")
    if len(tokens) != 2 or len(experts) != 3 or tokens[1] != experts[1]:
        raise ShapeError(
            "grouped_mm needs tokens [m, k] and experts [e, k, n]", shapes=f"{list(tokens)} and {list(experts)}"
        )
    rows = [
        named_row(call, "n", (Shard(1),), mat2=Shard(2)),
        named_row(call, "k", (SUM,), input=Shard(1), mat2=Shard(1)),
        replace(named_row(call, "experts", (SUM,), mat2=Shard(0)), local=False),
    ]
    return with_none(call, [(tokens[0], experts[2])], rows, flops=2 * tokens[0] * tokens[1] * experts[2])


def expert_mm(call: Call) -> Choices:
    """`expert_mm(rows, experts, number)`: rows [..., d, c, k] in d parts, each with as many experts of [e, k, n].

    Row (d, c) meets expert `d * ceil(e / d) + number[d, c]`, none if the number is -1. So a device that has some parts
    and their experts needs no others; if experts do not divide, a part is what one device has.
    """
    parts, experts = call.shape("input")[-3:-2], call.shape("mat2")[:1]
    found = labels("...dck, ekn, ...dc -> ...dcn", "input", "mat2", "number")(call)
    place, own = len(call.shape("input")) - 3, call.index("mat2")
    kept = [row for row in found.rows if row.label != "e" and not any(isinstance(each, Partial) for each in row.ins)]
    even = Even(call.index("input"), place, parts[0], alone=bool(experts[0] % parts[0]) if parts[0] else True)
    rows = [
        replace(row, ins=row.ins[:own] + (Shard(0),) + row.ins[own + 1 :], even=(even,)) if row.label == "d" else row
        for row in kept
    ]
    return replace(found, rows=tuple(rows), flops=2 * math.prod(found.shapes[0]) * call.shape("mat2")[1])


def cdist(call: Call) -> Choices:
    """Distances between the lines of two batches: lines may be sharded, and batches; their elements may not."""
    found = labels("...pm, ...rm -> ...pr", "x1", "x2")(call)
    rows = [row for row in found.rows if not any(isinstance(each, Partial) for each in (*row.ins, *row.outs))]
    return replace(found, rows=tuple(rows))


def tensordot_dims(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dims of both operands that tensordot contracts, pair by pair."""
    dims, left, right = call.arguments["dims"], len(call.shape("a")), len(call.shape("b"))
    if isinstance(dims, int):
        if not 0 <= dims <= min(left, right):
            raise ShapeError(f"tensordot over {dims} dims of operands that have {left} and {right}")
        return tuple(range(left - dims, left)), tuple(range(dims))
    first, second = ((each,) if isinstance(each, int) else tuple(each) for each in dims)
    if len(first) != len(second):
        raise ShapeError(f"tensordot pairs dims {list(first)} with dims {list(second)}")
    return tuple(normal_dim(d, left) for d in first), tuple(normal_dim(d, right) for d in second)


def tensordot_spec(call: Call) -> str:
    """The labels of tensordot: paired dims share theirs."""
    first, second = tensordot_dims(call)
    left = fresh_labels(len(call.shape("a")), "")
    right = list(fresh_labels(len(call.shape("b")), left))
    for here, there in zip(first, second, strict=True):
        right[there] = left[here]
    kept = [x for x in left if x not in right] + [x for x in right if x not in left]
    return f"{left}, {''.join(right)} -> {''.join(kept)}"


def einsum_labels(call: Call) -> tuple[list[str], str]:
    """The operands' labels and the result's, with `...` written out in capitals that the equation does not use."""
    text = call.arguments["equation"].replace(" ", "")
    left, arrow, output = text.partition("->")
    inputs = left.split(",")
    shapes = [topology.shape for topology in call.operands]
    if len(inputs) != len(shapes):
        raise ShapeError(f"the equation {text!r} names {len(inputs)} operands and got {len(shapes)}")
    ranks = [len(shape) - len(t.replace("...", "")) for t, shape in zip(inputs, shapes, strict=True)]
    deepest = max((rank for t, rank in zip(inputs, ranks, strict=True) if "..." in t), default=0)
    batch = fresh_labels(max(deepest, 0), text)
    spelled = [
        t.replace("...", batch[len(batch) - rank :] if rank > 0 else "") for t, rank in zip(inputs, ranks, strict=True)
    ]
    if not arrow:
        named = "".join(spelled)
        output = batch + "".join(sorted(c for c in set(named) if named.count(c) == 1 and c not in batch))
    return spelled, output.replace("...", batch)


def einsum(call: Call) -> Choices:
    """Any label that stands once in each operand may be sharded; sizes of 1 in a batch dim are left to the op."""
    inputs, output = einsum_labels(call)
    shapes = [topology.shape for topology in call.operands]
    wide = _wide_labels(inputs, shapes)
    unknown = [label for label in output if label not in wide]
    if unknown:
        raise ShapeError(f"the result's label {unknown[0]!r} stands in no operand")
    rows = contraction_rows(inputs, output, range(len(shapes)), len(shapes))
    narrow = {x for t, s in zip(inputs, shapes, strict=True) for x, n in zip(t, s, strict=True) if n != wide[x]}
    rows = [row for row in rows if row.label not in narrow]
    out = tuple(wide[label] for label in output)
    return with_none(call, [out], rows, flops=2 * math.prod(wide.values()))


def _wide_labels(inputs: list[str], shapes: list[Shape]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for text, shape in zip(inputs, shapes, strict=True):
        if len(text) != len(shape):
            raise ShapeError(f"labels {text!r} need {len(text)} dims and the operand has {list(shape)}")
        for label, size in zip(text, shape, strict=True):
            known = sizes.get(label, 1)
            if 1 not in (known, size) and known != size:
                raise ShapeError(
                    f"label {label!r} has size {known} and size {size}",
                    labels=", ".join(inputs),
                    fix=f"make the dims called {label!r} equal",
                )
            sizes[label] = size if known == 1 else known
    return sizes
