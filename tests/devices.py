"""Running a row of a rule for real: every device computes on what it holds, with nothing but the row's collectives.

This is the oracle of rules. The engine folds devices into one array call, so that a rule that forgets a collective
still gives the right number in one process; here it does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import meshloom as loom
from meshloom import Mesh, Partial, Replicate, Shard, Topology
from meshloom.engines.layout import short_name
from meshloom.engines.torch_engine import FUNCTIONS, Local
from meshloom.ops import OPS, Call, Choices, Ref, Row
from meshloom.placement import can_be_partial
from oracle import REDUCE, check_close, draw_values
from samples import Case, Draw, Operand

_INDEXED = ("argmax", "argmin", "max_dim", "min_dim")


def exact(case: Case, name: str) -> Case:
    """The case without low precision, and without ties where an index would have to be chosen among them."""
    rounded = (torch.bfloat16, torch.int64) if name in _INDEXED else (torch.bfloat16,)
    operands = (
        dataclasses.replace(each, dtype=torch.float32) if each.dtype in rounded else each for each in case.operands
    )
    return dataclasses.replace(case, operands=tuple(operands))


def describe(case: Case, devices: int) -> Call:
    """The call that a case makes, on a mesh of one axis with everything replicated."""
    mesh = Mesh(d=devices)
    tensors = [loom.distribute(draw_values(each, 0), mesh, "R") for each in case.operands]
    plans = loom.explain(lambda: case.run(*tensors)).plans
    assert plans, "the case made no planned call"
    return plans[-1].call


class Net:
    """The only way for devices to learn from each other: an all-reduce that is written down."""

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
        self.log.append((op, tuple(parts[0].shape)))
        return REDUCE[op](torch.stack(list(parts)))

    def best(self, values: Sequence[torch.Tensor], indices: Sequence[torch.Tensor], largest: bool) -> tuple[Any, Any]:
        """The best value with its index; of equal values the first device's."""
        self.log.append(("max", tuple(values[0].shape)))
        stacked = torch.stack(list(values))
        winner = (stacked.max(0) if largest else stacked.min(0)).indices
        pick = winner.unsqueeze(0)
        return stacked.gather(0, pick)[0], torch.stack(list(indices)).gather(0, pick)[0]


class Operands:
    """The operands of a row: dense, and what each device holds."""

    def __init__(self, operands: Sequence[Operand], row: Row, devices: int, seed: int, gradients: bool = False) -> None:
        self.dense: list[torch.Tensor] = []
        self.held: list[list[torch.Tensor]] = [[] for _ in range(devices)]
        for number, (operand, placement) in enumerate(zip(operands, row.ins, strict=True)):
            wanted = gradients and operand.gradient and operand.dtype.is_floating_point
            parts = split(operand, placement, devices, seed + number)
            self.dense.append(parts[0].detach().clone().requires_grad_(wanted))
            for device, part in enumerate(parts[1]):
                self.held[device].append(part.detach().clone().requires_grad_(wanted))


def split(operand: Operand, placement: Any, devices: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An operand dense, and one part per device."""
    if isinstance(placement, Partial):
        parts = draw_values(operand, seed, (devices,))
        return REDUCE[placement.op](parts), list(parts)
    dense = draw_values(operand, seed)
    if isinstance(placement, Replicate):
        return dense, [dense] * devices
    return dense, [dense.narrow(placement.dim, *chunk) for chunk in chunks(operand.shape, placement.dim, devices)]


def chunks(shape: Sequence[int], dim: int, devices: int) -> list[tuple[int, int]]:
    topology = Topology(Mesh(d=devices), (Shard(dim),), tuple(shape), "f32")
    return [topology.chunk((device,), dim) for device in range(devices)]


def is_runnable(row: Row, operands: Sequence[Operand], choices: Choices, devices: int) -> bool:
    """Whether the row's conditions hold and no device is left without an element."""
    if any(even.units % devices for even in row.even):
        return False
    for placement, operand in zip(row.ins, operands, strict=True):
        if isinstance(placement, Partial) and not can_be_partial(placement, short_name(operand.dtype)):
            return False
    pairs = [*zip(row.ins, (each.shape for each in operands), strict=True), *zip(row.outs, choices.shapes, strict=True)]
    for placement, shape in pairs:
        if isinstance(placement, Shard) and any(not extent for _, extent in chunks(shape, placement.dim, devices)):
            return False
    return True


def compute(call: Call, datas: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    """The engine's function on what one device holds."""
    function = FUNCTIONS[call.op]

    def value(each: Any) -> Any:
        if isinstance(each, Ref):
            return datas[each.index]
        return tuple(value(part) for part in each) if isinstance(each, tuple) else each

    named = {name: value(each) for name, each in call.arguments.items()}
    if OPS[call.op].signature is None:
        result = function(*(value(each) for each in call.leaves), **named)
    else:
        lead = (Local(call, call.operands, tuple(shapes)),) if getattr(function, "is_aware", False) else ()
        result = function(*lead, **named)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def local_shapes(choices: Choices, row: Row, devices: int, device: int) -> list[tuple[int, ...]]:
    found = []
    for shape, placement in zip(choices.shapes, row.outs, strict=True):
        if isinstance(placement, Shard):
            _, extent = chunks(shape, placement.dim, devices)[device]
            shape = shape[: placement.dim] + (extent,) + shape[placement.dim + 1 :]
        found.append(shape)
    return found


def assemble(parts: Sequence[torch.Tensor], placement: Any, what: str) -> torch.Tensor:
    """One tensor from the parts that devices hold; replicated parts must agree."""
    if isinstance(placement, Partial):
        return REDUCE[placement.op](torch.stack([part.detach() for part in parts]))
    if isinstance(placement, Shard):
        return torch.cat([part.detach() for part in parts], placement.dim)
    for part in parts[1:]:
        check_close(part.detach(), parts[0].detach(), f"{what}: devices disagree")
    return parts[0].detach()


def check_row(call: Call, choices: Choices, row: Row, case: Case, devices: int, seed: int) -> None:
    """Every device runs the op on what it holds; the parts make up the dense result, and so do the gradients."""
    what = f"{call.op} {row} on {devices} devices"
    made = Operands(case.operands, row, devices, seed, case.gradients)
    dense = compute(call, made.dense, choices.shapes)
    results = [compute(call, made.held[i], local_shapes(choices, row, devices, i)) for i in range(devices)]
    for number, placement in enumerate(row.outs):
        found = assemble([result[number] for result in results], placement, what)
        check_close(found.to(dense[number].dtype), dense[number].detach(), what)
    if all(not isinstance(p, Partial) or p.op == "sum" for p in (*row.ins, *row.outs)) and row.label != "none":
        check_row_gradients(row, made, dense, results, seed, what)


def check_row_gradients(row: Row, made: Operands, dense: Any, results: Any, seed: int, what: str) -> None:
    """S: the chunk of the gradient; R: the parts add up; P(sum): every device has all of it."""
    if not dense[0].requires_grad:
        return
    cotangent = torch.randn(dense[0].shape, generator=torch.Generator().manual_seed(seed)).to(dense[0].dtype)
    dense[0].backward(cotangent)
    placement = row.outs[0]
    start = 0
    for result in results:
        seeded = cotangent
        if isinstance(placement, Shard):
            seeded = cotangent.narrow(placement.dim, start, result[0].shape[placement.dim])
            start += result[0].shape[placement.dim]
        result[0].backward(seeded)
    for number, wanted in enumerate(row.ins):
        expected = made.dense[number].grad
        if expected is None:
            continue
        parts = [
            torch.zeros_like(held[number]) if held[number].grad is None else held[number].grad for held in made.held
        ]
        if isinstance(wanted, Replicate):
            found = torch.stack(parts).sum(0)
        else:
            found = torch.cat(parts, wanted.dim) if isinstance(wanted, Shard) else parts[-1]
        check_close(found.to(expected.dtype), expected, f"{what}: gradient of operand {number}")


Form = Callable[[Call, Row, list[list[torch.Tensor]], Net], list[torch.Tensor]]


def _dim(row: Row, operand: int = 0) -> int:
    placement = row.ins[operand]
    assert isinstance(placement, Shard)
    return placement.dim


def softmax_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    dim = _dim(row)
    high = net.all_reduce([x.amax(dim) for (x,) in held], "max").unsqueeze(dim)
    exps = [(x - high).exp() for (x,) in held]
    total = net.all_reduce([e.sum(dim) for e in exps], "sum").unsqueeze(dim)
    if call.op == "log_softmax":
        return [x - high - total.log() for (x,) in held]
    return [e / total for e in exps]


def layer_norm_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    tail = call.arguments["normalized_shape"]
    dims = tuple(range(-len(tail), 0))
    count = math.prod(tail)
    total = net.all_reduce([h[0].sum(dims) for h in held], "sum")
    square = net.all_reduce([h[0].square().sum(dims) for h in held], "sum")
    mean = (total / count).reshape(total.shape + (1,) * len(tail))
    scale = torch.rsqrt((square / count).reshape(mean.shape) - mean.square() + call.arguments["eps"])
    return [_affine((h[0] - mean) * scale, *h[1:]) for h in held]


def _affine(x: torch.Tensor, weight: Any = None, bias: Any = None) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def var_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    shape, dim = call.shape("input"), call.arguments["dim"]
    dims = tuple(range(len(shape))) if dim is None else (dim % len(shape),)
    count = math.prod(shape[d] for d in dims)
    mean = net.all_reduce([x.sum(dims) for (x,) in held], "sum") / count
    for d in dims:
        mean = mean.unsqueeze(d)
    spread = net.all_reduce([(x - mean).square().sum(dims) for (x,) in held], "sum")
    found = spread / (count - call.arguments["correction"])
    return [_kept(found, dims, call.arguments["keepdim"])] * len(held)


def _kept(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    for d in sorted(dims) if keepdim else ():
        x = x.unsqueeze(d)
    return x


def embedding_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    found, start = [], 0
    for ids, weight in held:
        mine = (ids >= start) & (ids < start + len(weight))
        rows = weight[torch.where(mine, ids - start, 0)]
        found.append(torch.where(mine.unsqueeze(-1), rows, 0))
        start += len(weight)
    return found


def index_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[Any]:
    shape, dim, largest = call.shape("input"), call.arguments["dim"], call.op in ("argmax", "max_dim")
    keepdim, sharded = call.arguments["keepdim"], _dim(row)
    dims = tuple(range(len(shape))) if dim is None else (dim % len(shape),)
    positions = torch.arange(math.prod(shape)).view(shape)
    if dim is not None:
        positions = (
            torch.arange(shape[dims[0]]).view([-1 if d == dims[0] else 1 for d in range(len(shape))]).expand(shape)
        )
    values, indices, start = [], [], 0
    for (x,) in held:
        place = positions.narrow(sharded, start, x.shape[sharded])
        start += x.shape[sharded]
        kept = [d for d in range(x.dim()) if d not in dims]
        flat = x.permute(*kept, *dims).flatten(len(kept))
        spots = place.permute(*kept, *dims).flatten(len(kept))
        best = (flat.max(-1) if largest else flat.min(-1)).indices.unsqueeze(-1)
        values.append(flat.gather(-1, best).squeeze(-1))
        indices.append(spots.gather(-1, best).squeeze(-1))
    value, index = (_kept(each, dims, keepdim) for each in net.best(values, indices, largest))
    return [index if call.op.startswith("arg") else (value, index)] * len(held)


def cross_entropy_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    classes = 1 if len(call.shape("input")) > 1 else 0
    if row.ins[0] == Shard(classes):
        return _by_classes(call, classes, held, net)
    options = {**call.arguments, "reduction": "sum"}
    described = Call(call.op, call.operands, options)
    sums = net.all_reduce([compute(described, h, [()])[0] for h in held], "sum")
    weights = [_weight(call, h) for h in held]
    return [sums / net.all_reduce(weights, "sum")] * len(held)


def _weight(call: Call, held: list[torch.Tensor]) -> torch.Tensor:
    target = held[1]
    if target.is_floating_point():
        return torch.tensor(float(target.numel() // target.shape[1]))
    kept = target != call.arguments["ignore_index"]
    each = held[2][torch.where(kept, target, 0)] if len(held) > 2 else torch.ones(target.shape)
    return torch.where(kept, each, 0).sum()


def _by_classes(call: Call, classes: int, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Plain targets only: log of the sum of exps, minus the target's logit, weighted."""
    target = held[0][1]
    high = net.all_reduce([h[0].amax(classes) for h in held], "max")
    total = net.all_reduce([(h[0] - high.unsqueeze(classes)).exp().sum(classes) for h in held], "sum")
    found, start = [], 0
    for h in held:
        width = h[0].shape[classes]
        mine = (target >= start) & (target < start + width)
        local = torch.where(mine, target - start, 0)
        logit = h[0].gather(classes, local.unsqueeze(classes)).squeeze(classes) - high - total.log()
        weight = h[2][local] if len(h) > 2 else torch.ones(target.shape)
        found.append(torch.stack([torch.where(mine, logit * weight, 0), torch.where(mine, weight, 0)]))
        start += width
    net.log.append(("sum", tuple(target.shape)))
    losses, weights = torch.stack(found).sum(0)
    kept = target != call.arguments["ignore_index"]
    losses, weights = torch.where(kept, -losses, 0), torch.where(kept, weights, 0)
    how = call.arguments["reduction"]
    out = losses if how == "none" else losses.sum() if how == "sum" else losses.sum() / weights.sum()
    return [out] * len(held)


def attention_form(call: Call, row: Row, held: list[list[torch.Tensor]], net: Net) -> list[torch.Tensor]:
    """Causal attention of a device's own queries: its mask starts at its own offset."""
    found, start = [], 0
    for query, key, value in held:
        rows = torch.arange(query.shape[-2]).unsqueeze(-1) + start
        mask = rows >= torch.arange(key.shape[-2])
        found.append(torch.nn.functional.scaled_dot_product_attention(query, key, value, mask))
        start += query.shape[-2]
    return found


FORMS: dict[str, Form] = {
    "softmax": softmax_form,
    "log_softmax": softmax_form,
    "layer_norm": layer_norm_form,
    "var": var_form,
    "embedding": embedding_form,
    "argmax": index_form,
    "argmin": index_form,
    "max_dim": index_form,
    "min_dim": index_form,
    "cross_entropy": cross_entropy_form,
    "scaled_dot_product_attention": attention_form,
}


def has_form(call: Call, row: Row) -> bool:
    """Smoothed and soft targets over sharded classes need sums of their own; the planner wants them even."""
    if call.op != "cross_entropy" or row.ins[0] != Shard(1):
        return True
    return not call.arguments["label_smoothing"] and call.operands[1].dtype == "i64"


def check_form(call: Call, choices: Choices, row: Row, case: Case, devices: int, seed: int) -> None:
    """The distributed form gives the dense result with exactly the statistics that the row names."""
    what = f"{call.op} {row} on {devices} devices"
    made = Operands(case.operands, row, devices, seed)
    net = Net()
    found = FORMS[call.op](call, row, made.held, net)
    dense = compute(call, made.dense, choices.shapes)
    for number, placement in enumerate(row.outs):
        parts = [part[number] if isinstance(part, tuple) else part for part in found]
        check_close(assemble(parts, placement, what).to(dense[number].dtype), dense[number], what)
    shape = case.operands[0].shape
    claimed = [(inner.op, tuple(shape[dim] for dim in inner.dims)) for inner in row.inner]
    assert net.log == claimed, f"{what}: used {net.log}, the row names {claimed}"


def rows_of(call: Call) -> Choices:
    return OPS[call.op].rule(call)


def draw_seed(d: Draw) -> int:
    return d.number(0, 10_000)
