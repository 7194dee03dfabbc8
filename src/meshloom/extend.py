"""An op of your own: a rule by labels, a function on torch tensors, and the gradient that torch finds for it.

>>> import torch
>>> import meshloom as loom
>>> from meshloom import extend
>>> @extend.op("...d, ...d -> ...d")
... def swiglu(gate, x):
...     return torch.nn.functional.silu(gate) * x
>>> gate = loom.randn(6, 4, mesh=loom.open_mesh((2,), axes=("tp",)), placements="S(1)")
>>> swiglu(gate, gate).topology.notation
'f32[6, 4](S(1))'
>>> extend.check(swiglu, torch.randn(6, 4), torch.randn(6, 4))
('A: S(0), S(0) -> S(0)', 'd: S(1), S(1) -> S(1)')
>>> extend.remove("swiglu")

`op` adds the line to the op table that every op has, and the function to the engine: the planner, `explain`, `record`,
dry runs and runs on several processes then treat it like any other op. `check` runs a rule on separate devices. Do call
it once in a test: in one process all devices are one array, so that a wrong rule would still give the right numbers.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.engines.layout import short_name, torch_dtype
from meshloom.engines.torch_engine import FUNCTIONS, Local, aware
from meshloom.errors import ArgumentError, PlacementError, ShapeError, closest, expect
from meshloom.mesh import Mesh
from meshloom.ops import ALIASES, OPS, Call, Choices, Even, Op, Ref, Row
from meshloom.ops.binding import bind, refer
from meshloom.ops.labels import expand_labels
from meshloom.ops.rule import with_none
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology
from meshloom.tensor import methods as _attached  # noqa: F401  (attaches the ops to Tensor)
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import OVERLOADS, invoke
from meshloom.tensor.entries import forget_all
from meshloom.tensor.quick import call_quickly
from meshloom.types import Shape

__all__ = ["check", "op", "remove"]

Function = Callable[..., Any]
_ADDED: set[str] = set()
_LABELS = re.compile(r"(?:\.\.\.)?[a-z]*")


def op(
    labels: str, *, whole: str = "", sums: str = "", sees_padding: bool = False, name: str | None = None
) -> Callable[[Function], Function]:
    """Make a function on torch tensors an op that works on any mix of placements.

    `labels` name the dims of the first arguments and of the results, as einsum does: `"...qd, ...kd -> ...qk"`. On one
    mesh axis any label that all results have may be sharded; the function must treat what lies along it separately.

    - `whole`: labels of the result that must not be sharded, such as the dim that a softmax runs over.
    - `sums`: labels that the function sums over. The parts of several devices then add up to the whole.
    - Any other label that the result lacks stays whole. A label that only the result has stays whole too; its size is
      found by running the function on shapes.
    - `sees_padding`: zeros at the end of a sharded label do no harm, neither to values nor to gradients, and add
      nothing to a sum. Uneven shards then stay where they are in every case. Without it the function never sees
      padding, and uneven shards are gathered first between processes, and where the op has `sums`.

    The result has `output=` to ask for placements, as every op has. On plain torch tensors it is the function itself.
    """

    def register(function: Function) -> Function:
        known = name or function.__name__
        _refuse_known(known)
        spec = _read(known, labels, whole, sums, sees_padding)
        signature, names = _signature(known, function, len(spec.inputs))
        rule = functools.partial(_choices, spec, names, function)
        OPS[known] = Op(known, rule, signature, at_zero="finite" if sees_padding else "trimmed")
        FUNCTIONS[known] = _guard(function)
        _ADDED.add(known)
        return _public(known, function)

    return register


def remove(name: str) -> None:
    """Take an op of yours out of the table again; the name is then free."""
    if name not in _ADDED:
        raise ArgumentError(f"{name!r} is no op that was added with extend.op", fix=closest(name, _ADDED))
    _ADDED.discard(name)
    del OPS[name], FUNCTIONS[name]
    forget_all()


def check(op: Function, *args: object, devices: Sequence[int] = (2, 3), **kwargs: object) -> tuple[str, ...]:
    """Run every row of an op's rule on separate devices and compare with the whole: values, gradients and padding.

    Give it plain torch tensors in which every label has at least two elements. It returns the rows that were run, and
    raises `PlacementError` with the label at fault for a rule that does not hold.
    """
    if op.__name__ not in _ADDED:
        raise ArgumentError(f"{op.__name__!r} is no op that was added with extend.op", fix=closest(op.__name__, _ADDED))
    trial = _Trial(op, args, kwargs)
    found = [row for count in devices for row in trial.rows(count)]
    return tuple(dict.fromkeys(f"{row.label}: {row}" for row in found))


# The rule


@dataclass(frozen=True, slots=True)
class _Spec:
    """What an op says about its dims."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    whole: str
    sums: str
    sees_padding: bool


def _read(name: str, labels: str, whole: str, sums: str, sees_padding: bool) -> _Spec:
    for argument, value in {"labels": labels, "whole": whole, "sums": sums}.items():
        expect(argument, value, str, fix='write letters, as in extend.op("...mk, ...kn -> ...mn", sums="k")')
    left, arrow, right = labels.replace(" ", "").partition("->")
    inputs, outputs = tuple(left.split(",")), tuple(right.split(","))
    if not arrow or not all(_LABELS.fullmatch(each) for each in (*inputs, *outputs)):
        raise ArgumentError(
            f"the labels of {name!r} cannot be read: {labels!r}",
            fix='write a letter for each dim, "..." first for any others: "...mk, ...kn -> ...mn"',
        )
    for label in whole + sums:
        if label not in left:
            raise ArgumentError(f"label {label!r} of {name!r} stands in no operand", labels=labels)
    for label in sums:
        if all(label in each for each in outputs):
            raise ArgumentError(f"label {label!r} of {name!r} is summed over, and every result has it", labels=labels)
    return _Spec(inputs, outputs, whole, sums, sees_padding)


def _choices(spec: _Spec, names: Sequence[str], function: Function, call: Call) -> Choices:
    """The rows: one for each label that may be sharded, and the replicated one."""
    given = [(call.index(name), text) for name, text in zip(names, spec.inputs, strict=True) if call.has(name)]
    if len(given) < len(call.operands):
        raise ArgumentError(
            f"{call.op} has labels for {len(names)} arguments and got a tensor besides",
            fix=f"its labels are for {', '.join(names)}: give the others labels too",
        )
    shapes = [call.operands[i].shape for i, _ in given]
    texts, letters, batch = expand_labels(call.op, [text for _, text in given], "...", shapes)
    sizes = {x: size for text, shape in zip(texts, shapes, strict=True) for x, size in zip(text, shape, strict=True)}
    sizes.update(zip(letters, batch, strict=True))
    outs = [text.replace("...", letters) for text in spec.outputs]
    results = [tuple(sizes[label] for label in text) for text in outs] if _covers(sizes, outs) else _run(function, call)
    labels = [label for label in dict.fromkeys("".join((*outs, *texts))) if _may_shard(label, spec, texts, outs)]
    rows = [_row(call, label, [(i, text) for (i, _), text in zip(given, texts, strict=True)], outs) for label in labels]
    if not spec.sees_padding and (spec.sums or call.operands[0].mesh.is_split):
        rows = [_evenly(row, call) for row in rows]
    return with_none(call, results, rows, flops=math.prod(sizes.values()))


def _covers(sizes: dict[str, int], outs: Sequence[str]) -> bool:
    return set("".join(outs)) <= set(sizes)


def _run(function: Function, call: Call) -> list[Shape]:
    """The shapes of the results, by running the function without data."""
    arrays = [torch.empty(t.shape, dtype=torch_dtype(t.dtype), device="meta") for t in call.operands]
    return [tuple(each.shape) for each in _as_tuple(function(**_substitute(call.arguments, arrays)))]


def _may_shard(label: str, spec: _Spec, texts: Sequence[str], outs: Sequence[str]) -> bool:
    """Whether devices may hold parts along a label: not of a diagonal, nor of what only the result has."""
    if label == "." or label in spec.whole or max((text.count(label) for text in texts), default=0) != 1:
        return False
    return label in spec.sums or all(label in text for text in outs)


def _row(call: Call, label: str, given: Sequence[tuple[int, str]], outs: Sequence[str]) -> Row:
    ins: list[Placement] = [Replicate()] * len(call.operands)
    for i, text in given:
        ins[i] = Shard(text.index(label)) if label in text else Replicate()
    return Row(label, tuple(ins), tuple(Shard(t.index(label)) if label in t else Partial("sum") for t in outs))


def _evenly(row: Row, call: Call) -> Row:
    """The row for shards that divide their dim, which have no padding."""
    pairs = enumerate(zip(row.ins, call.operands, strict=True))
    even = tuple(Even(i, p.dim, topology.shape[p.dim]) for i, (p, topology) in pairs if isinstance(p, Shard))
    return Row(row.label, row.ins, row.outs, even=even)


# Registration


def _refuse_known(name: str) -> None:
    if not name.isidentifier():
        raise ArgumentError(f"{name!r} is no name for an op", fix='give one: extend.op(..., name="my_op")')
    if name in OPS or name in ALIASES or name in OVERLOADS:
        again = f", or take the old one away first: extend.remove({name!r})" if name in _ADDED else ""
        raise ArgumentError(
            f"there is an op {name!r} already", fix=f'give yours another name: extend.op(..., name="my_{name}"){again}'
        )


def _signature(name: str, function: Function, operands: int) -> tuple[str, tuple[str, ...]]:
    """The function's parameters as the op table writes them, and the names of those that have labels."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        raise ArgumentError(f"{name!r} does not tell its parameters", fix="wrap it: def own(x): return ...") from None
    for each in parameters:
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) or each.name == "output":
            raise ArgumentError(
                f"an op cannot have the parameter {each}", op=name, fix="name its parameters one by one"
            )
        if each.default is not each.empty:
            _check_literal(name, each)
    if len(parameters) < operands:
        raise ArgumentError(f"{name!r} has labels for {operands} arguments and takes {len(parameters)}")
    placed = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    named = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    words = [*map(_spell, placed), *(["*"] if named else []), *map(_spell, named)]
    return ", ".join(words), tuple(each.name for each in parameters)[:operands]


def _spell(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"


def _check_literal(name: str, parameter: inspect.Parameter) -> None:
    try:
        ast.literal_eval(repr(parameter.default))
    except (ValueError, SyntaxError):
        raise ArgumentError(
            f"the default of {parameter.name!r} is no plain value: {parameter.default!r}",
            op=name,
            fix="use None, and put the value in its place inside the function",
        ) from None


def _guard(function: Function) -> Function:
    """The function for the engine; the first result of each plan is held against the labels."""

    @aware
    def run(local: Local, **arguments: Any) -> Any:
        results = function(**arguments)
        local.once("checked", lambda: _check_shapes(local, _as_tuple(results)))
        return results

    return run


def _check_shapes(local: Local, results: Sequence[torch.Tensor]) -> bool:
    """Whether the function gives what the labels say, with padding or without."""
    said = OPS[local.call.op].rule(local.call).shapes
    found = tuple(tuple(each.shape) for each in results)
    if found not in (tuple(local.shapes), tuple(said)):
        raise ShapeError(
            f"the labels of {local.call.op!r} say {_show_shapes(said)}, and the function gives {_show_shapes(found)}",
            fix="write the result's labels in the order of its dims",
        )
    return True


def _show_shapes(shapes: Sequence[Shape]) -> str:
    return " and ".join(str(list(shape)) for shape in shapes)


def _public(name: str, function: Function) -> Function:
    head = ("extend", name)

    @functools.wraps(function)
    def run(*args: Any, output: Any = None, **kwargs: Any) -> Any:
        if not any(isinstance(each, Tensor) for each in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        if output is None:
            return call_quickly(head, name, args, kwargs, function)
        return invoke(name, args, {**kwargs, "output": output}, function)

    run.__name__ = run.__qualname__ = name
    return run


def _as_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


def _substitute(arguments: dict[str, object], arrays: Sequence[torch.Tensor]) -> dict[str, object]:
    return {name: arrays[each.index] if isinstance(each, Ref) else each for name, each in arguments.items()}


# Checking


class _Trial:
    """A call on sample tensors, run whole and in parts."""

    def __init__(self, op: Function, args: Sequence[object], kwargs: dict[str, object]) -> None:
        self.name, self.function = op.__name__, op.__wrapped__  # type: ignore[attr-defined]
        self.op = OPS[self.name]
        tensors: list[torch.Tensor] = []
        spelled = tuple(refer(each, tensors, torch.Tensor) for each in args)
        named = {key: refer(each, tensors, torch.Tensor) for key, each in kwargs.items()}
        self.arguments = bind(self.op, spelled, named)
        self.operands = [_leaf(each) for each in tensors]
        self.results = self.run(self.operands)
        generator = torch.Generator().manual_seed(0)
        self.seeds = [torch.randn(each.shape, generator=generator).to(each) for each in self.results]
        self.gradients = self.differentiate(self.results, self.operands)

    def run(self, arrays: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return _as_tuple(self.function(**_substitute(self.arguments, arrays)))

    def differentiate(
        self, results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The gradient of each operand that can have one."""
        pairs = [(each, seed) for each, seed in zip(results, self.seeds, strict=True) if each.requires_grad]
        leaves = [each for each in operands if each.requires_grad]
        if not pairs or not leaves:
            return [None] * len(operands)
        outputs, seeds = zip(*pairs, strict=True)
        found = iter(torch.autograd.grad(outputs, leaves, seeds, allow_unused=True, retain_graph=True))
        return [next(found) if each.requires_grad else None for each in operands]

    def rows(self, devices: int) -> list[Row]:
        """The rows that were run on so many devices."""
        mesh = Mesh(devices=devices)
        topologies = (Topology(mesh, (Replicate(),), tuple(x.shape), short_name(x.dtype)) for x in self.operands)
        choices = self.op.rule(Call(self.name, tuple(topologies), self.arguments))
        if (found := tuple(tuple(each.shape) for each in self.results)) != choices.shapes:
            raise ShapeError(
                f"the labels of {self.name!r} say {_show_shapes(choices.shapes)} and it gives {_show_shapes(found)}"
            )
        rows = choices.rows[:-1]  # the last one is replicated
        for row in rows:
            self.check_parts(row, devices)
            if self.op.at_zero == "finite":
                self.check_padding(row)
        return list(rows)

    def check_parts(self, row: Row, devices: int) -> None:
        """Each device on what it holds; joined, the results are those of the whole."""
        held = [_split(x, placement, devices) for x, placement in zip(self.operands, row.ins, strict=True)]
        count = max(len(each) for each in held)
        if count < 2:
            raise ArgumentError(
                f"label {row.label!r} of {self.name!r} has one element in these samples", fix="give two"
            )
        parts = [self.run([each[i % len(each)] for each in held]) for i in range(count)]
        results = [_join(each, placement) for each, placement in zip(zip(*parts, strict=True), row.outs, strict=True)]
        self.compare(f"sharded over {count} devices", row, results, self.differentiate(results, self.operands))

    def check_padding(self, row: Row) -> None:
        """Zeros at the end of a label change neither the results nor a gradient."""
        padded = [_leaf(_pad(x, placement)) for x, placement in zip(self.operands, row.ins, strict=True)]
        results = [_trim(x, w, p) for x, w, p in zip(self.run(padded), self.results, row.outs, strict=True)]
        gradients = self.differentiate(results, padded)
        for gradient in gradients:
            if gradient is not None and not gradient.isfinite().all():
                raise self.error("padded with zeros", row, "a gradient is not finite")
        kept = [g if g is None else _trim(g, x, p) for g, x, p in zip(gradients, self.operands, row.ins, strict=True)]
        self.compare("padded with zeros", row, results, kept)

    def compare(
        self, how: str, row: Row, results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Results and gradients beside those of the whole."""
        for found, whole in zip(results, self.results, strict=True):
            if not _is_close(found, whole):
                raise self.error(how, row, f"the result differs by up to {_distance(found, whole):.3g}")
        names = sorted((each.index, name) for name, each in self.arguments.items() if isinstance(each, Ref))
        for (_, name), gradient, expected in zip(names, gradients, self.gradients, strict=True):
            if gradient is None or expected is None:
                if gradient is not expected:
                    raise self.error(how, row, f"the gradient of {name!r} is missing")
            elif not _is_close(gradient, expected):
                off = _distance(gradient, expected)
                raise self.error(how, row, f"the gradient of {name!r} differs by up to {off:.3g}")

    def error(self, how: str, row: Row, what: str) -> PlacementError:
        summed = any(isinstance(each, Partial) for each in row.outs)
        fix = f"take {row.label!r} out of sums" if summed else f'say that it must stay whole: whole="{row.label}"'
        if how.startswith("padded"):
            fix = "leave sees_padding out"
        return PlacementError(
            f"the rule of {self.name!r} does not hold where label {row.label!r} is {how}", row=row, found=what, fix=fix
        )


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_(x.is_floating_point() or x.is_complex())


def _split(x: torch.Tensor, placement: Placement, devices: int) -> Sequence[torch.Tensor]:
    return x.chunk(devices, placement.dim) if isinstance(placement, Shard) else (x,)


def _join(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    return torch.cat(list(parts), placement.dim) if isinstance(placement, Shard) else torch.stack(list(parts)).sum(0)


def _pad(x: torch.Tensor, placement: Placement) -> torch.Tensor:
    if not isinstance(placement, Shard):
        return x
    shape = (*x.shape[: placement.dim], 2, *x.shape[placement.dim + 1 :])
    return torch.cat([x, x.new_zeros(shape)], placement.dim)


def _trim(x: torch.Tensor, like: torch.Tensor, placement: Placement) -> torch.Tensor:
    return x.narrow(placement.dim, 0, like.shape[placement.dim]) if isinstance(placement, Shard) else x


def _is_close(found: torch.Tensor, whole: torch.Tensor) -> bool:
    """Equal but for rounding: half of the digits that the dtype has."""
    if found.shape != whole.shape or found.dtype != whole.dtype:
        return False
    if not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(found, whole)
    digits = torch.finfo(whole.dtype).eps ** 0.5
    scale = float(whole.detach().abs().nan_to_num(0, 0, 0).max()) if whole.numel() else 0.0
    return torch.allclose(found, whole, rtol=digits, atol=digits * max(1.0, scale), equal_nan=True)


def _distance(found: torch.Tensor, whole: torch.Tensor) -> float:
    return (
        float((found.detach().double() - whole.detach().double()).abs().max())
        if found.shape == whole.shape
        else math.inf
    )
