"""`loom.plans`: plans that come with meshloom, made for a model and a mesh. Each is a `Plan` to print, edit and save.

| name | batch | parameters |
|---|---|---|
| `data` | rows over every axis | replicated |
| `fsdp` | rows over every axis | dim 0 over every axis |
| `hsdp` | rows over every axis | dim 0 over the sharding axis, replicated over the others |
| `tensor` | rows over the data axes | columns and rows over the tensor axis |
| `tensor+sequence` | as `tensor` | as `tensor`; outside of products the sequence lies over the tensor axis |
| `fsdp+tensor` | as `tensor` | as `tensor`, the other dim over the data axes |
| `context` | rows over the data axes, dim 1 over the context axis | replicated; attention goes around the ring |
| `expert` | rows over every axis but the tensor axis | experts over the expert axis, the rest as `tensor` |

Axes go by their names: `tp`, `tensor`, `model` or `mp` is a tensor axis, `fsdp`, `shard` or `sharded` a sharding axis,
`cp`, `context`, `sp`, `sequence` or `seq` a context axis, `ep`, `expert` or `experts` an expert axis. If a mesh has no
such name, it is the last axis; experts then take the tensor axis, if there is one. The others are data axes.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from torch import nn

from meshloom.errors import ArgumentError, MeshError, closest
from meshloom.mesh import Mesh
from meshloom.nn.expert_forward import can_dispatch
from meshloom.nn.lines import Lines, brief
from meshloom.nn.patterns import fold
from meshloom.nn.plan import Plan
from meshloom.nn.roles import Role, blocks_of, roles_of
from meshloom.nn.styles import from_huggingface, from_torch
from meshloom.placement import Placement, Replicate, Shard

_TENSOR = ("tp", "tensor", "model", "mp")
_SHARDED = ("fsdp", "shard", "sharded")
_EXPERT = ("ep", "expert", "experts")
_CONTEXT = ("cp", "context", "sp", "sequence", "seq")


def named(name: str, module: nn.Module, mesh: Mesh) -> Plan:
    """The plan of a name, for a model and a mesh.

    >>> from meshloom import Mesh
    >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    >>> print(named("tensor", model, Mesh(dp=2, tp=4)))
    batch      dp=S(0)
    parameter  0.weight  tp=S(0)
    parameter  0.bias    tp=S(0)
    parameter  2.weight  tp=S(1)
    """
    if name not in NAMES:
        raise ArgumentError(f"there is no plan {name!r}", fix=closest(name, NAMES))
    return NAMES[name](module, mesh)


def as_plan(given: object, module: nn.Module, mesh: Mesh) -> Plan:
    """The plan that somebody means: a plan, its name, a dict of patterns, or the path of a TOML file."""
    if isinstance(given, Plan):
        return given
    if isinstance(given, Mapping):
        return Plan(given)
    if isinstance(given, str) and given in NAMES:
        return named(given, module, mesh)
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".toml")):
        return Plan.from_toml(Path(given))
    if isinstance(given, str):
        raise ArgumentError(f"there is no plan {given!r}", fix=f"{closest(given, NAMES)}; a file ends in .toml")
    raise ArgumentError(f"plan={given!r:.80} is no plan", fix="give a Plan, a name, a dict of patterns or a TOML file")


def _data(module: nn.Module, mesh: Mesh) -> Plan:
    return Plan(batch=_rows(mesh.axes))


def _fsdp(module: nn.Module, mesh: Mesh) -> Plan:
    rows = _rows(mesh.axes)
    return Plan(_first_dims(module, mesh.axes), batch=rows, outputs=_looked_up(module, rows), units=_units(module))


def _hsdp(module: nn.Module, mesh: Mesh) -> Plan:
    _need_two("hsdp", mesh, ("dp", "fsdp"))
    sharded = _axis(mesh, _SHARDED)
    rows = _rows(mesh.axes)
    return Plan(_first_dims(module, [sharded]), batch=rows, outputs=_looked_up(module, rows), units=_units(module))


def _tensor(module: nn.Module, mesh: Mesh) -> Plan:
    axis = _axis(mesh, _TENSOR)
    return Plan(_by_role(module, axis, ()), batch=_rows(_others(mesh, axis)))


def _tensor_sequence(module: nn.Module, mesh: Mesh) -> Plan:
    axis = _axis(mesh, _TENSOR)
    names = [name for name, _ in module.named_modules()]
    outputs: Lines = {layer: {axis: Shard(sequence_dim(module, layer))} for layer in _writers(module)}
    inputs: Lines = {part: {axis: Replicate()} for part in readers(module)}
    taken, given = (brief(lines, {name: lines.get(name) for name in names}) for lines in (inputs, outputs))
    return Plan(_by_role(module, axis, ()), _rows(_others(mesh, axis)), taken, given)


def _fsdp_tensor(module: nn.Module, mesh: Mesh) -> Plan:
    _need_two("fsdp+tensor", mesh, ("fsdp", "tp"))
    axis = _axis(mesh, _TENSOR)
    data = _others(mesh, axis)
    rows = _rows(data)
    return Plan(_by_role(module, axis, data), batch=rows, outputs=_looked_up(module, rows), units=_units(module))


def _context(module: nn.Module, mesh: Mesh) -> Plan:
    axis = _axis(mesh, _CONTEXT)
    return Plan(batch={**_rows(_others(mesh, axis)), axis: Shard(1)})


def _expert(module: nn.Module, mesh: Mesh) -> Plan:
    """Experts over their axis, and over a tensor axis beside it if they divide over both; the rest as `tensor`."""
    tensor = next((axis for axis in _TENSOR if axis in mesh.axes), None)
    axis = next((axis for axis in _EXPERT if axis in mesh.axes), tensor or mesh.axes[-1])
    counts = {name: module.get_parameter(name).shape[0] for name in _expert_weights(module)}
    over = [each for each in mesh.axes if each in (axis, tensor)]
    if any(count % math.prod(mesh.shape[mesh.axis(each)] for each in over) for count in counts.values()):
        over = [axis]
    where = _places(module, lambda role, _: _of_expert(role, over, tensor))
    lines = brief({name: axes for name, axes in where.items() if axes}, where)
    return Plan(lines, _rows(_others(mesh, tensor)), experts=dispatched(module))


NAMES: dict[str, Callable[[nn.Module, Mesh], Plan]] = {
    "data": _data,
    "fsdp": _fsdp,
    "hsdp": _hsdp,
    "tensor": _tensor,
    "tensor+sequence": _tensor_sequence,
    "fsdp+tensor": _fsdp_tensor,
    "context": _context,
    "expert": _expert,
}


# Axes


def _axis(mesh: Mesh, names: Iterable[str]) -> str:
    return next((axis for axis in names if axis in mesh.axes), mesh.axes[-1])


def _others(mesh: Mesh, axis: str | None) -> list[str]:
    return [each for each in mesh.axes if each != axis]


def _rows(axes: Iterable[str]) -> dict[str, Placement]:
    return {axis: Shard(0) for axis in axes}


def _need_two(name: str, mesh: Mesh, axes: tuple[str, str]) -> None:
    if mesh.ndim < 2:
        raise MeshError(
            f"the plan {name!r} needs a mesh of two axes", mesh=mesh, fix=f"loom.open_mesh((2, 4), axes={axes!r})"
        )


# Parameters


def _first_dims(module: nn.Module, axes: Iterable[str]) -> Lines:
    """Everything by its first dim; single numbers have none."""
    parameters = dict(module.named_parameters())
    single: Lines = {name: {} for name, parameter in parameters.items() if not parameter.dim()}
    return single if len(single) == len(parameters) else {**single, "**": _rows(axes)}


def _by_role(module: nn.Module, axis: str, data: Iterable[str]) -> Lines:
    """Columns and rows over one axis; over data axes, if any, the other dim of each matrix, or the first."""
    roles = roles_of(module)
    if not roles:
        raise ArgumentError(
            f"no layer of this {type(module).__name__} is known to read or to write the input of a block",
            layers=_fold_layers(module),
            fix="write the plan: loom.Plan({'**.first.weight': 'tp=S(0)', '**.second.weight': 'tp=S(1)'})",
        )
    where = _places(module, lambda role, parameter: _of_one(role, parameter.dim(), axis, tuple(data)))
    return brief({name: axes for name, axes in where.items() if axes}, where)


def _places(module: nn.Module, of: Callable[[Role | None, nn.Parameter], dict[str, Placement]]) -> Lines:
    """Where each parameter goes by its role; a tied one by that of any of its names."""
    roles = roles_of(module)
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    where = {}
    for name, parameter in module.named_parameters():
        role = next((roles[each] for each in names[id(parameter)] if each in roles), None)
        where[name] = of(role, parameter)
    return where


def _of_one(role: Role | None, dims: int, axis: str, data: tuple[str, ...]) -> dict[str, Placement]:
    if role is None:
        return {each: Shard(0) for each in data} if dims else {}
    rest = {} if role.other is None else {each: Shard(role.other) for each in data}
    return {axis: Shard(role.dim), **rest}


def _of_expert(role: Role | None, over: Iterable[str], tensor: str | None) -> dict[str, Placement]:
    if role is None:
        return {}
    if role.kind == "expert":
        return {axis: Shard(0) for axis in over}
    return {} if tensor is None else {tensor: Shard(role.dim)}


def _expert_weights(module: nn.Module) -> list[str]:
    found = [name for name, role in roles_of(module).items() if role.kind == "expert"]
    if not found:
        raise ArgumentError(
            f"this {type(module).__name__} has no experts: modules of that name with weights [experts, ...]",
            layers=_fold_layers(module),
            fix='loom.plans.named("tensor", model, mesh), or loom.experts.Experts for the experts of a model of yours',
        )
    return found


def _fold_layers(module: nn.Module) -> str:
    return fold(name for name, layer in module.named_modules() if not list(layer.children()))


# Modules


def dispatched(module: nn.Module) -> list[str]:
    """The modules whose forward is exchanged for one in which tokens travel; others call `loom.experts` themselves."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in _expert_weights(module))
    found: Lines = {name: {} for name in owners if can_dispatch(module.get_submodule(name))}
    return list(brief(found, {name: found.get(name) for name, _ in module.named_modules()}))


def _units(module: nn.Module) -> list[str]:
    return [f"{name}.*" for name in blocks_of(module)]


def _writers(module: nn.Module) -> list[str]:
    """The modules whose results go from block to block: layers that write, and vocabularies that are looked up."""
    roles = [role for role in roles_of(module).values() if role.kind == "row" and not stays_inside(role.layer)]
    return list(dict.fromkeys([*_vocabularies(module), *(role.layer for role in roles)]))


def stays_inside(layer: str) -> bool:
    """Whether what a layer writes does not leave its block: experts, and the small products of a state space."""
    return any(word in layer for word in ("expert", "x_proj"))


def _vocabularies(module: nn.Module) -> list[str]:
    tables = [name for name, layer in module.named_modules() if isinstance(layer, nn.Embedding)]
    return [role.layer for role in roles_of(module).values() if role.layer in tables]


def _looked_up(module: nn.Module, rows: dict[str, Placement]) -> Lines:
    """What is looked up in a vocabulary lies as the batch does.

    A vocabulary that is large against the batch stays where it is, and the rows that are found in its parts are added
    up. Without a request every process would have all of them, and the whole model would go on so.
    """
    return {name: dict(rows) for name in _vocabularies(module)}


def readers(module: nn.Module) -> list[str]:
    """The parts of blocks in which several layers read the same input: it is gathered once for all of them."""
    columns = dict.fromkeys(role.layer for role in roles_of(module).values() if role.kind == "column")
    counts = Counter(layer.rpartition(".")[0] for layer in columns if "expert" not in layer)
    blocks = tuple(blocks_of(module))
    inside = [part for part in counts if part.startswith(tuple(f"{each}." for each in blocks))]
    return [part for part in inside if counts[part] > 1 and part.rpartition(".")[0] not in blocks]


def sequence_dim(module: nn.Module, layer: str) -> int:
    """The dim of a layer's result that is the sequence."""
    found = module.get_submodule(layer)
    return 0 if isinstance(found, nn.MultiheadAttention) and not found.batch_first else 1


__all__ = ["NAMES", "from_huggingface", "from_torch", "named"]
