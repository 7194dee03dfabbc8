"""The oracle: the same call on dense tensors. `check_case` raises if values, gradients, dtype or padding differ."""

from __future__ import annotations

from typing import Any

import torch

import meshloom as loom
from meshloom import Mesh, Partial, Placement, Replicate, Shard, Tensor, Topology
from meshloom.comms import move
from meshloom.engines.layout import mask_of, short_name
from meshloom.placement import can_be_partial
from samples import Case, Draw, Operand

MESHES = (
    (1,), (2,), (3,), (4,), (5,), (8,), (16,), (1, 3), (2, 1), (2, 2), (2, 3), (3, 2), (2, 4), (4, 4), (2, 2, 2),
    (2, 3, 2), (1, 2, 3), (4, 2, 2),
)  # fmt: skip
REDUCE = {
    "sum": lambda x: x.sum(0, dtype=x.dtype),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "prod": lambda x: x.prod(0, dtype=x.dtype),
}
TOLERANCE = {
    torch.float32: (2e-4, 2e-4),
    torch.bfloat16: (5e-2, 5e-2),
    torch.float64: (1e-6, 1e-6),
    torch.complex64: (2e-4, 2e-4),
    torch.complex128: (1e-6, 1e-6),
}


def draw_mesh(d: Draw) -> Mesh:
    return Mesh.of(d.pick(MESHES))


def draw_values(operand: Operand, seed: int, lead: tuple[int, ...] = ()) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = lead + operand.shape
    if operand.values.startswith("below:"):
        return torch.randint(0, int(operand.values[6:]), shape, generator=generator)
    if operand.values.startswith("numbers:"):  # -1 means nothing
        return torch.randint(-1, int(operand.values[8:]), shape, generator=generator)
    if operand.values.startswith("distinct:"):
        return torch.randperm(int(operand.values[9:]), generator=generator)[: shape[0]]
    if operand.values.startswith("ends:"):
        last = int(operand.values[5:])
        ends = torch.randint(0, last + 1, shape[:1], generator=generator, dtype=torch.int32).sort().values
        ends[-1] = last
        return ends
    if operand.values in ("regular", "definite"):
        return draw_matrices(operand, generator)
    if operand.values == "sorted":
        return draw_values(Operand(operand.shape, operand.dtype), seed).sort().values
    if operand.dtype == torch.bool:
        return torch.rand(shape, generator=generator) < (0.9 if operand.values == "mostly" else 0.5)
    if operand.dtype.is_complex:
        return torch.randn(shape, dtype=operand.dtype, generator=generator)
    if operand.dtype.is_floating_point:
        values = torch.randn(shape, generator=generator)
        if operand.values == "nonzero":
            values = values.sign() * (values.abs() + 0.5) + (values == 0)
        if operand.values == "small":
            values = values / 4
        if operand.values == "positive":
            values = values.abs() + 0.1
        if operand.values == "unit":
            values = values.sigmoid()
        if operand.values == "wild":
            values = (values / (values.abs() > 0.5)).where(values.abs() > 0.2, torch.nan)
        return values.to(operand.dtype)
    values = torch.randint(-3, 4, shape, generator=generator)
    if operand.values == "nonzero":
        values = torch.where(values == 0, 1, values)
    return values.to(operand.dtype)


def draw_matrices(operand: Operand, generator: torch.Generator) -> torch.Tensor:
    """Matrices that are far from singular: with a heavy diagonal, or symmetric and positive."""
    values = torch.randn(operand.shape, generator=generator)
    m, n = operand.shape[-2:]
    if operand.values == "definite":
        return values @ values.mT + torch.diag(torch.arange(1.0, n + 1))
    return values + 3 * torch.eye(m, n) * torch.arange(1.0, n + 1)


def partial_ops(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bool:
        return ("max", "min")
    return ("sum", "mean", "max", "min", "prod") if dtype.is_floating_point else ("sum", "max", "min", "prod")


def draw_placements(
    d: Draw, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype, partial: bool
) -> tuple[Placement, ...]:
    op = d.pick(partial_ops(dtype))
    found: list[Placement] = []
    for _ in range(mesh.ndim):
        kind = d.number(0, 9)
        if kind >= 8 and partial:
            found.append(Partial(op))
        elif kind >= 3 and shape:
            found.append(Shard(d.number(0, len(shape) - 1)))
        else:
            found.append(Replicate())
    return tuple(found)


class Made:
    """An operand made twice: dense and on the mesh; with a gradient where it can have one."""

    def __init__(self, d: Draw, mesh: Mesh, operand: Operand, gradients: bool) -> None:
        given = operand.values != "any"
        placements = draw_placements(d, mesh, operand.shape, operand.dtype, partial=not given)
        seed = d.number(0, 10_000)
        partial = any(isinstance(each, Partial) for each in placements)
        self.differentiable = gradients and operand.gradient and operand.dtype.is_floating_point
        self.topology = Topology(mesh, placements, operand.shape, short_name(operand.dtype))
        if partial and d.yes() and not rounds_between_processes(self.topology):
            self.differentiable = False
            self.dense, self.tensor = _from_parts(operand, seed, self.topology)
            return
        self.dense = draw_values(operand, seed).requires_grad_(self.differentiable)
        self.leaf = loom.distribute(self.dense.detach(), mesh, self.topology.reduced.placements)
        if self.differentiable:
            self.leaf.requires_grad_()
        self.tensor = self.leaf.redistribute(placements)


def rounds_between_processes(topology: Topology) -> bool:
    """Whether parts in half precision are rounded more often than by one process: once for every process that adds."""
    return topology.mesh.is_split and topology.dtype == "bf16"


def _from_parts(operand: Operand, seed: int, topology: Topology) -> tuple[torch.Tensor, Tensor]:
    """Parts that differ on every device along the partial axes, and what they reduce to."""
    axes = topology.partial_axes
    parts = draw_values(operand, seed, tuple(topology.mesh.shape[axis] for axis in axes))
    dense = parts
    for axis in axes:
        dense = REDUCE[topology.placements[axis].op](dense)
    whole = topology.with_placements(tuple(p if isinstance(p, Partial) else Replicate() for p in topology.placements))
    for place, axis in enumerate(axes):  # where processes split the mesh, those of this one's box
        parts = parts.narrow(place, topology.mesh.local_offset[axis], topology.mesh.local_shape[axis])
    return dense, Tensor(topology, move(parts, whole, topology).clone())


def assert_within(found: torch.Tensor, wanted: torch.Tensor, rtol: float, atol: float, what: str) -> None:
    """Equal within tolerances; shape and dtype exactly, strides not at all."""
    is_comparable = found.dtype == wanted.dtype != torch.complex32 and found.shape == wanted.shape
    if is_comparable and torch.equal(found, wanted):
        return  # most are, and to see it takes a tenth of the time
    torch.testing.assert_close(
        found,
        wanted,
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        check_stride=False,
        msg=lambda text: f"{what}: {text}",
    )


def check_close(ours: torch.Tensor, dense: torch.Tensor, what: str) -> None:
    """Equal within rounding; shape and dtype exactly."""
    rtol, atol = TOLERANCE.get(dense.dtype, (0, 0))
    scale = max(1.0, float(dense.detach().abs().nan_to_num(0, 0, 0).max()) if dense.numel() and rtol else 1.0)
    assert_within(ours, dense, rtol, atol * scale, what)


def check_padding(tensor: Tensor, what: str) -> None:
    """Padding is always zero."""
    mask = mask_of(tensor.topology, tensor._data.device)
    if mask is not None:
        data = tensor._data.detach()
        outside = torch.where(mask, data.new_zeros(()), data)  # torch fills no wide unsigned integers
        assert not outside.any() and not outside.isnan().any(), f"{what}: padding is not zero in {tensor.topology}"


def check_raw_gradient(leaf: Tensor, what: str) -> None:
    """Before it is read, a gradient may hold numbers in its padding, but neither nan nor inf: they would spread."""
    mask = mask_of(leaf.topology, leaf._data.device)
    if mask is not None and leaf._data.grad is not None:
        outside = leaf._data.grad.masked_fill(mask, 0)
        assert outside.isfinite().all(), f"{what}: padding of the gradient is not finite"


def check_result(ours: Any, dense: torch.Tensor, what: str) -> None:
    """One result against the dense one."""
    assert isinstance(ours, Tensor), f"{what}: got {type(ours).__name__}"
    assert tuple(ours.shape) == tuple(dense.shape), f"{what}: shape {tuple(ours.shape)} for {tuple(dense.shape)}"
    assert ours.topology.dtype == short_name(dense.dtype) == short_name(ours._data.dtype), f"{what}: {ours.topology}"
    assert tuple(ours._data.shape) == ours.topology.stored_shape, f"{what}: stored {tuple(ours._data.shape)}"
    check_padding(ours, what)
    check_close(ours.to_torch().detach(), dense.detach(), what)


def _listed(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def draw_request(d: Draw, made: list[Made], results: tuple[torch.Tensor, ...]) -> dict[str, Placement] | None:
    """Placements to ask of the result, sometimes; partial ones rather where an operand is partial."""
    if d.yes() or len(results) != 1:
        return None
    mesh, shape = made[0].topology.mesh, tuple(results[0].shape)
    given = [p.op for each in made for p in each.topology.placements if isinstance(p, Partial)]
    partial = Partial(d.pick((*given, "sum")))
    asked: dict[str, Placement] = {}
    for axis, name in enumerate(mesh.axes):
        kind = d.number(0, 5)
        carried = any(isinstance(each.topology.placements[axis], Partial) for each in made)
        if kind >= (3 if carried else 5) and can_be_partial(partial, short_name(results[0].dtype)):
            asked[name] = partial
        elif kind == 0:
            asked[name] = Replicate()
        elif kind == 1 and shape:
            asked[name] = Shard(d.number(0, len(shape) - 1))
    return asked or None


def check_case(d: Draw, case: Case, mesh: Mesh | None = None) -> None:
    """Draw a mesh, placements and values; run the case on both; compare values, gradients, padding, placements."""
    mesh = draw_mesh(d) if mesh is None else mesh
    made = [Made(d, mesh, operand, case.gradients) for operand in case.operands]
    dense = _listed(case.run(*(each.dense for each in made)))
    request = draw_request(d, made, dense)
    what = f"{[str(each.tensor.topology) for each in made]} asked {request}"
    if request is None:
        first = _listed(case.run(*(each.tensor for each in made)))
        ours = first if mesh.is_split else _listed(case.run(*(each.tensor for each in made)))
        check_same_again(first, ours, what)
    else:
        with loom.with_output(request):
            ours = _listed(case.run(*(each.tensor for each in made)))
    assert len(ours) == len(dense), what
    for mine, theirs in zip(ours, dense, strict=True):
        check_result(mine, theirs, what)
        check_placements(mine, request, what)
    check_gradients(d, made, ours, dense, what)


def check_same_again(first: tuple[Any, ...], again: tuple[Any, ...], what: str) -> None:
    """A call seen before, which goes another way, gives the bits of the first."""
    for one, other in zip(first, again, strict=True):
        assert one.topology is other.topology, f"{what}: first {one.topology}, then {other.topology}"
        torch.testing.assert_close(
            other._data, one._data, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: the second time {text}"
        )


def check_placements(ours: Tensor, request: dict[str, Placement] | None, what: str) -> None:
    """What was asked for is there, and nothing is Partial that nobody asked to be."""
    for axis, placement in zip(ours.mesh.axes, ours.placements, strict=True):
        asked = (request or {}).get(axis)
        if asked is None:
            assert not isinstance(placement, Partial), f"{what}: {ours.topology} is partial on {axis}"
        else:
            assert placement == asked, f"{what}: {ours.topology} on {axis}"


def check_gradients(
    d: Draw, made: list[Any], ours: tuple[Any, ...], dense: tuple[Any, ...], what: str, is_here: bool = True
) -> None:
    """Gradients of every leaf against the dense ones, with the placements of their values; padding if it is here."""
    seeds = d.number(0, 10_000)
    for place, (mine, theirs) in enumerate(zip(ours, dense, strict=True)):
        assert mine.requires_grad == theirs.requires_grad, f"{what}: requires_grad {mine.requires_grad}"
        if theirs.requires_grad:
            seed = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(seeds + place)).to(theirs.dtype)
            theirs.backward(seed, retain_graph=True)
            mine.backward(seed, retain_graph=True)
    for number, each in enumerate(made):
        if each.differentiable and each.dense.grad is not None:
            if is_here:
                check_raw_gradient(each.leaf, f"{what}: gradient of {number}")
            found = each.leaf.grad
            assert found is not None, f"{what}: operand {number} has no gradient"
            assert found.placements == each.leaf.placements, f"{what}: gradient of {number} is {found.topology}"
            if is_here:
                check_padding(found, f"{what}: gradient of {number}")
            check_close(found.to_torch(), each.dense.grad, f"{what}: gradient of {number}")
        elif each.differentiable:
            assert each.leaf.grad is None, f"{what}: operand {number} has a gradient and should have none"
