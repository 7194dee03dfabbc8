"""`parallelize` and `unparallelize`: a model goes to a mesh, in place, and comes back.

Everything is decided first (`Plan.check`), then every new tensor is made, and only then the module is changed: an error
on the way leaves it as it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils.hooks import RemovableHandle

from meshloom.comms.weights import declare_unit
from meshloom.errors import ArgumentError, expect
from meshloom.mesh import Mesh
from meshloom.nn import hooks, plans
from meshloom.nn.assignment import Assignment
from meshloom.nn.files import open_files
from meshloom.nn.materialise import fill, make_room
from meshloom.nn.plan import Plan
from meshloom.nn.replaced import note_replaced
from meshloom.nn.tables import Axes, Table
from meshloom.tensor.base import Tensor
from meshloom.tensor.creation import distribute
from meshloom.tensor.moving import same_storage
from meshloom.tensor.parameter import Parameter

_MARK = "_meshloom_placed"
_Module = TypeVar("_Module", bound=torch.nn.Module)


@dataclass
class Placed:
    """What a parallelized module remembers: its plan, its mesh, and the hooks that go when it goes back."""

    plan: Plan
    mesh: Mesh
    handles: list[RemovableHandle] = field(default_factory=list)


@dataclass(frozen=True)
class Slot:
    """A place in a module that holds a parameter or a buffer."""

    owner: torch.nn.Module
    attribute: str
    name: str

    def put(self, value: torch.Tensor) -> None:
        """Fill the place, as an assignment would: modules that keep lists of their weights follow."""
        setattr(self.owner, self.attribute, value)


def parallelize(
    module: _Module,
    mesh: Mesh,
    plan: Plan | str | os.PathLike[str] | Mapping[str, Any],
    *,
    weights: str | os.PathLike[str] | None = None,
    device: str | None = None,
) -> _Module:
    """Put a model on a mesh, in place: its parameters lie as the plan says, its buffers are replicated.

    `plan` is a `Plan`, a name (`loom.plans.NAMES`), a dict from patterns to placements, or the path of a TOML file.
    Afterwards call the model with plain tensors: the whole batch, the same in every process. Make optimizers
    afterwards, since the parameters are new ones.

    A module on `meta` is made on the mesh, shard by shard: by its own initialisers, or from the safetensors files that
    `weights` names, of which each process reads its part. With `device="meta"` it stays without data, for a dry run.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    >>> model = loom.parallelize(model, mesh, "tensor")
    >>> model[0].weight.topology.notation, model[2].weight.topology.notation
    ('f32[32, 8](R, S(0))', 'f32[4, 32](R, S(1))')
    >>> model(torch.ones(6, 8)).topology.notation
    'f32[6, 4](S(0), R)'
    """
    expect("module", module, torch.nn.Module, fix="give a torch.nn.Module")
    place = getattr(mesh, "mesh", mesh)
    expect("mesh", place, Mesh, fix='open one: mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))')
    refuse_placed(module)
    chosen = plans.as_plan(plan, module, place)
    found = chosen.check(module, place)
    _check_tensors(module)
    made = _make(module, place, found, _Source.of(module, weights, device))
    placed, swap = Placed(chosen, place), _swap(module, made.tensors)
    with swap:
        if made.empty:
            fill(module, made.empty)
        placed.handles += hooks.attach(module, chosen, _taken(found), place)
    _declare_units(module, found)
    _note(swap.before, "loom.parallelize")
    vars(module)[_MARK] = placed
    return module


def unparallelize(module: _Module) -> _Module:
    """Take a model off its mesh, in place: dense parameters, gradients and buffers, whole in every process.

    >>> import meshloom as loom
    >>> model = loom.parallelize(torch.nn.Linear(2, 2), loom.open_mesh((2,)), "fsdp")
    >>> type(loom.unparallelize(model).weight)
    <class 'torch.nn.parameter.Parameter'>
    """
    placed = _placed(module)
    if placed is None:
        raise ArgumentError(
            f"this {type(module).__name__} was not put on a mesh by parallelize",
            fix="give the module that parallelize was given",
        )
    made = {key: _dense(tensor) for key, tensor in _tensors(module).items() if isinstance(tensor, Tensor)}
    before = [(slot, tensor) for slot, tensor in _slots(module) if id(tensor) in made]
    for slot, tensor in before:
        slot.put(made[id(tensor)])
    _note(before, "loom.unparallelize")
    for handle in placed.handles:
        handle.remove()
    hooks.undo(module)
    del vars(module)[_MARK]
    return module


def plan_of(module: torch.nn.Module) -> Plan | None:
    """The plan that a module was parallelized with, or None.

    >>> import meshloom as loom
    >>> model = loom.parallelize(torch.nn.Linear(2, 2), loom.open_mesh((2,), axes=("fsdp",)), {"weight": "fsdp=S(0)"})
    >>> print(plan_of(model))
    parameter  weight  fsdp=S(0)
    """
    placed = _placed(module)
    return None if placed is None else placed.plan


def mesh_of(module: torch.nn.Module) -> Mesh | None:
    """The mesh that a module was parallelized on, or None."""
    placed = _placed(module)
    return None if placed is None else placed.mesh


def _placed(module: torch.nn.Module) -> Placed | None:
    found: Placed | None = vars(module).get(_MARK)
    return found


# Deciding


def refuse_placed(module: torch.nn.Module) -> None:
    """An error if a module, or a part of it, is on a mesh."""
    for name, each in module.named_modules():
        if _placed(each) is not None:
            what = f"its part {name!r}" if name else f"this {type(module).__name__}"
            raise ArgumentError(
                f"{what} is on a mesh already",
                mesh=mesh_of(each),
                fix="loom.unparallelize(module) first, or a fresh copy of the model",
            )
    for slot, tensor in _slots(module):
        if isinstance(tensor, Tensor):
            raise ArgumentError(
                f"{slot.name!r} is on a mesh already", tensor=tensor.topology, fix="give a module of dense tensors"
            )


def _check_tensors(module: torch.nn.Module) -> None:
    for slot, tensor in _slots(module):
        if torch.nn.parameter.is_lazy(tensor):
            raise ArgumentError(
                f"{slot.name!r} has no shape yet: its module is lazy",
                fix="call the model once with a batch, then put it",
            )


def _taken(found: Assignment) -> dict[str, dict[str, Axes | None]]:
    """The modules of each kind of line, the first line first."""
    taken: dict[str, dict[str, Axes | None]] = {"input": {}, "output": {}, "recompute": {}, "experts": {}}
    for line in found.lines:
        if line.word in taken:
            for name in line.takes:
                taken[line.word].setdefault(name, line.axes)
    return taken


# Doing


def _declare_units(module: torch.nn.Module, found: Assignment) -> None:
    """Processes that gather weights for a use have those of the next unit on their way."""
    for name in [name for line in found.lines if line.word == "unit" for name in line.takes]:
        held = [each._data for each in module.get_submodule(name).parameters() if isinstance(each, Tensor)]
        declare_unit(held)


def _note(before: list[tuple[Slot, torch.Tensor]], by: str) -> None:
    note_replaced(((tensor, slot.owner, slot.attribute, slot.name) for slot, tensor in before), by)


def _slots(module: torch.nn.Module) -> Iterator[tuple[Slot, torch.Tensor]]:
    """Every place that holds a parameter or a buffer; tied ones more than once."""
    for prefix, owner in module.named_modules():
        for table in (owner._parameters, owner._buffers):
            for attribute, tensor in table.items():
                if tensor is not None:
                    yield Slot(owner, attribute, f"{prefix}.{attribute}".lstrip(".")), tensor


def _tensors(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Every parameter and buffer, once, by its id."""
    return {id(tensor): tensor for _, tensor in _slots(module)}


@dataclass
class _Source:
    """Where values come from: the module itself, files, or nowhere."""

    device: str | None
    files: Any = None

    @classmethod
    def of(cls, module: torch.nn.Module, weights: str | os.PathLike[str] | None, device: str | None) -> _Source:
        if device not in (None, "meta") or (device and weights):
            fix = 'device="meta" keeps a model without data; leave it out otherwise, and with weights'
            raise ArgumentError(f"device={device!r} and weights={weights!r} do not go together here", fix=fix)
        return cls(device, None if weights is None else open_files(weights, module))


@dataclass
class _Made:
    """New tensors by the ids of those that they replace, and by name those that wait for values."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    empty: dict[str, Tensor] = field(default_factory=dict)


def _make(module: torch.nn.Module, mesh: Mesh, found: Assignment, source: _Source) -> _Made:
    """A tensor on the mesh for each parameter and buffer."""
    made = _Made()
    for slot, tensor in _slots(module):
        if id(tensor) not in made.tensors:
            axes = found.parameters.get(slot.name, Table({}))
            value = _value(slot.name, tensor.detach(), mesh, axes, source)
            new = value if not isinstance(tensor, torch.nn.Parameter) else _parameter(value, tensor, mesh, axes)
            made.tensors[id(tensor)] = new
            if tensor.is_meta and not new.is_meta and (source.files is None or slot.name not in source.files):
                made.empty[slot.name] = new
    return made


def _value(name: str, dense: torch.Tensor, mesh: Mesh, axes: Axes, source: _Source) -> Tensor:
    if source.files is not None and name in source.files:
        read: Tensor = source.files.read(name, dense, mesh, axes)
        return read
    if source.device == "meta":
        return distribute(dense.to("meta"), mesh, axes)
    return make_room(dense, mesh, axes) if dense.is_meta else distribute(dense, mesh, axes)


def _parameter(value: Tensor, dense: torch.Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    parameter = Parameter(value, requires_grad=dense.requires_grad)
    vars(parameter).update({key: each for key, each in vars(dense).items() if key not in _OURS})
    if dense.grad is not None:
        parameter.grad = distribute(dense.grad.detach(), mesh, axes)
    return parameter


_OURS = frozenset(Tensor.__annotations__)  # what tensors on a mesh keep for themselves


class _swap:
    """Every place of a module filled with what was made for it; an error inside puts everything back."""

    def __init__(self, module: torch.nn.Module, made: Mapping[int, Tensor]) -> None:
        self.module, self.made = module, made
        self.before: list[tuple[Slot, torch.Tensor]] = []

    def __enter__(self) -> None:
        self.before = list(_slots(self.module))
        for slot, tensor in self.before:
            slot.put(self.made[id(tensor)])

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            hooks.undo(self.module)
            for slot, tensor in self.before:
                slot.put(tensor)


def _dense(tensor: Tensor) -> torch.Tensor:
    value = _own(tensor)
    if not isinstance(tensor, torch.nn.Parameter):
        return value
    parameter = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
    vars(parameter).update({key: each for key, each in vars(tensor).items() if key not in _OURS})
    gradient = tensor.grad
    if gradient is not None:
        parameter.grad = _own(gradient)
    return parameter


def _own(tensor: Any) -> torch.Tensor:
    """The dense value in memory of its own."""
    value: torch.Tensor = tensor.detach().to_torch()
    return value.clone() if same_storage(value, tensor._data) else value
