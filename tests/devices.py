"""Running a row of a rule for real: every device computes on what it holds, with nothing but the row's collectives.

This is the oracle of rules. The engine folds devices into one array call, so that a rule that forgets a collective
still gives the right number in one process; here it does not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

import meshloom as loom
from forms import FORMS, Net, compute
from meshloom import Mesh, Partial, Replicate, Shard, Topology
from meshloom.engines.layout import short_name
from meshloom.engines.reductions import REDUCTIONS
from meshloom.ops import OPS, Call, Choices, Inner, Row
from meshloom.placement import can_be_partial
from meshloom.planner import Plan
from oracle import check_close, draw_values
from samples import Case, Draw, Operand

Values = Callable[..., torch.Tensor]
_INDEXED = "argmax argmin max_dim min_dim median nanmedian mode kthvalue cummax cummin".split()


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
    with loom.record() as log:  # on data: torch infers the shapes of most ops in Python, ten times as slowly
        case.run(*tensors)
    plans = [each for each, _ in log.calls if isinstance(each, Plan)]
    assert plans, "the case made no planned call"
    return plans[-1].call


class Operands:
    """The operands of a row: dense, and what each device holds."""

    def __init__(
        self,
        operands: Sequence[Operand],
        row: Row,
        devices: int,
        seed: int,
        gradients: bool = False,
        draw: Values = draw_values,
    ) -> None:
        self.dense: list[torch.Tensor] = []
        self.held: list[list[torch.Tensor]] = [[] for _ in range(devices)]
        for number, (operand, placement) in enumerate(zip(operands, row.ins, strict=True)):
            wanted = gradients and operand.gradient and operand.dtype.is_floating_point
            parts = split(operand, placement, devices, seed + number, draw)
            self.dense.append(parts[0].detach().clone().requires_grad_(wanted))
            for device, part in enumerate(parts[1]):
                self.held[device].append(part.detach().clone().requires_grad_(wanted))


def split(
    operand: Operand, placement: Any, devices: int, seed: int, draw: Values = draw_values
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An operand dense, and one part per device."""
    if isinstance(placement, Partial):
        parts = draw(operand, seed, (devices,))
        return REDUCTIONS[placement.op].along(parts, 0), list(parts)
    dense = draw(operand, seed)
    if isinstance(placement, Replicate):
        return dense, [dense] * devices
    return dense, [dense.narrow(placement.dim, *chunk) for chunk in chunks(operand.shape, placement.dim, devices)]


@cache
def chunks(shape: tuple[int, ...], dim: int, devices: int) -> list[tuple[int, int]]:
    topology = Topology(Mesh(d=devices), (Shard(dim),), shape, "f32")
    return [topology.chunk((device,), dim) for device in range(devices)]


def specials(dtype: torch.dtype) -> list[Any]:
    """Values at which identities of real numbers fail; few and small, so that sums of them are exact."""
    if dtype == torch.bool:
        return [True, False]
    if dtype.is_floating_point:
        return [math.nan, math.inf, -math.inf, 0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5]
    info = torch.iinfo(dtype)
    return [info.min, info.max, info.min, info.max, info.max // 2 + 1, 100, 0, 1, 3]


def draw_specials(operand: Operand, seed: int, lead: tuple[int, ...] = ()) -> torch.Tensor:
    """Values that break things: nan, infinities, both zeros, the ends of the integers; indices stay what they are."""
    if operand.values != "any" or operand.dtype.is_complex:
        return draw_values(operand, seed, lead)
    shape, known = lead + operand.shape, torch.tensor(specials(operand.dtype), dtype=operand.dtype)
    return known[torch.randint(len(known), shape, generator=torch.Generator().manual_seed(seed))]


def check_identity(call: Call, choices: Choices, row: Row, case: Case, devices: int, seed: int) -> None:
    """A row with partial operands gives the dense result for special values, signs of zeros included."""
    what = f"{call.op} {row} of {[str(each.dtype) for each in case.operands]} on {devices} devices"
    made = Operands(case.operands, row, devices, seed, draw=draw_specials)
    dense = compute(call, made.dense, choices.shapes)
    results = [compute(call, made.held[i], local_shapes(choices, row, devices, i)) for i in range(devices)]
    for number, placement in enumerate(row.outs):
        found, expected = assemble([result[number] for result in results], placement, what), dense[number]
        check_close(found, expected, what)
        if expected.is_floating_point() and placement == Partial("sum"):
            zeros = (expected == 0) & (found == 0)
            assert torch.equal(found[zeros].signbit(), expected[zeros].signbit()), f"{what}: signs of zeros differ"


def is_runnable(row: Row, operands: Sequence[Operand], choices: Choices, devices: int) -> bool:
    """Whether the row's conditions hold and no device is left without an element."""
    if not all(even.holds((devices,)) for even in row.even):
        return False
    for placement, operand in zip(row.ins, operands, strict=True):
        if isinstance(placement, Partial) and not can_be_partial(placement, short_name(operand.dtype)):
            return False
    pairs = [*zip(row.ins, (each.shape for each in operands), strict=True), *zip(row.outs, choices.shapes, strict=True)]
    for placement, shape in pairs:
        if isinstance(placement, Shard) and any(not extent for _, extent in chunks(shape, placement.dim, devices)):
            return False
    return True


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
        return REDUCTIONS[placement.op].along(torch.stack([part.detach() for part in parts]), 0)
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
            seeded = cotangent.narrow(placement.dim, start, result[0].shape[placement.dim]).contiguous()
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
    claimed = [each for inner in row.inner for each in expected_log(inner, made.held[0], devices)]
    passed = [each for each in claimed if each[0] == "shift"]  # keys and values take turns
    assert net.log == claimed or (passed and sorted(net.log) == sorted(claimed)), (
        f"{what}: used {net.log}, the row names {claimed}"
    )


def expected_log(inner: Inner, held: Sequence[torch.Tensor], devices: int) -> list[tuple[str, tuple[int, ...]]]:
    """What a net writes down for one collective of a row; `times` counts elements and is checked as such."""
    shape = tuple(held[inner.operand].shape[dim] for dim in inner.dims) + ((inner.times,) if inner.times > 1 else ())
    if inner.kind == "all_reduce":
        return [(inner.op, shape)]
    return [(inner.kind, shape)] * (devices - 1 if inner.kind == "shift" else 1)


def rows_of(call: Call) -> Choices:
    return OPS[call.op].rule(call)


def draw_seed(d: Draw) -> int:
    return d.number(0, 10_000)
