"""Stages of a model: which of its modules belong together, decided before anything is moved.

A *unit* is a module with parameters that runs as a whole: a block, or a module beside the blocks. What has no
parameters (activations, rotary tables) and the Python between units belong to whatever stage is running. Units are cut
in the order in which the model defines them, which is the order in which nearly every model calls them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from meshloom.errors import ArgumentError, MeshError, closest, expect
from meshloom.mesh import Mesh
from meshloom.nn.patterns import fits
from meshloom.nn.plan import Plan
from meshloom.nn.roles import blocks_of
from meshloom.planner.pipelines import balance

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Stage:
    """A stage: its number, where it runs, the names of its units, and its part of the plan."""

    number: int
    mesh: Mesh
    units: tuple[str, ...]
    plan: Plan

    @property
    def is_here(self) -> bool:
        """Whether this process runs it."""
        return not self.mesh.is_elsewhere


class Part(nn.Module):
    """A piece of a model under the names of the whole: what `parallelize` is given for a stage."""


def find_units(module: nn.Module, cuts: Iterable[str] = ()) -> tuple[str, ...]:
    """The names of the units, in the order of definition; lists, and modules around blocks and cuts, are opened.

    >>> find_units(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))))
    ('0', '2.0', '2.1')
    """
    around = {*blocks_of(module), *(name.rpartition(".")[0] for name in cuts)}
    found = tuple(_walk(module, "", around))
    if not found:
        raise ArgumentError(
            f"this {type(module).__name__} has no modules with parameters to make stages of",
            fix="give a model that calls its modules one after the other, such as an nn.Sequential",
        )
    return found


def _walk(module: nn.Module, prefix: str, around: set[str]) -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if not has_state(child):
            continue
        is_around = any(each == path or each.startswith(f"{path}.") for each in around)
        if isinstance(child, _LISTS) or is_around:
            yield from _walk(child, f"{path}.", around)
        else:
            yield path


def has_state(module: nn.Module) -> bool:
    """Whether a module has parameters, or statistics that it writes."""
    written = any(name.rpartition(".")[2] == "running_mean" for name, _ in module.named_buffers())
    return written or next(module.parameters(), None) is not None


def cut(module: nn.Module, stages: int | Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    """The units of each stage: a number of stages with about as many parameters each, the units at which the stages
    after the first begin, or lists of patterns, one for each stage.

    >>> net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    >>> cut(net, 2), cut(net, ["1"]), cut(net, [["0", "3"], ["{1,2}"]])
    ((('0', '1'), ('2', '3')), (('0',), ('1', '2', '3')), (('0', '3'), ('1', '2')))
    """
    if isinstance(stages, bool) or not isinstance(stages, (int, list, tuple)):
        raise ArgumentError(
            f"stages={stages!r:.80} is of type {type(stages).__name__}",
            fix="give a number, the names of the modules at which stages begin, or a list of patterns for each stage",
        )
    if isinstance(stages, int):
        return _cut_evenly(module, find_units(module), stages)
    if stages and all(isinstance(each, (list, tuple)) for each in stages):
        return _cut_by_patterns(find_units(module), stages)
    for each in stages:
        expect("stages", each, str, fix="give the names of the modules at which stages begin")
    return _cut_at(find_units(module, stages), stages)


def _cut_evenly(module: nn.Module, units: Sequence[str], count: int) -> tuple[tuple[str, ...], ...]:
    if not 1 <= count <= len(units):
        raise ArgumentError(
            f"{len(units)} modules cannot make {count} stages", units=", ".join(units), fix=f"1 to {len(units)} stages"
        )
    weights = [sum(each.numel() for each in module.get_submodule(name).parameters()) for name in units]
    return _slice(units, balance(weights, count))


def _cut_at(units: Sequence[str], names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    for name in names:
        if name not in units:
            raise ArgumentError(f"no stage can begin at {name!r}", fix=closest(name, units))
    places = [units.index(name) for name in names]
    if places != sorted(set(places)) or 0 in places:
        raise ArgumentError(
            f"stages={list(names)} are not in the order of the model",
            units=", ".join(units),
            fix="name the first module of each stage after the first, in this order",
        )
    return _slice(units, places)


def _cut_by_patterns(units: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    found: list[list[str]] = [[] for _ in rows]
    for name in units:
        taken = [number for number, row in enumerate(rows) if any(fits(pattern, name) for pattern in row)]
        if len(taken) != 1:
            what = "no stage has" if not taken else f"stages {taken} both have"
            raise ArgumentError(f"{what} a pattern for {name!r}", fix="every module belongs to one stage")
        found[taken[0]].append(name)
    empty = [number for number, row in enumerate(found) if not row]
    if empty:
        raise ArgumentError(f"stage {empty[0]} has no modules", patterns=list(rows[empty[0]]), units=", ".join(units))
    return tuple(map(tuple, found))


def _slice(units: Sequence[str], places: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    bounds = [0, *places, len(units)]
    return tuple(tuple(units[a:b]) for a, b in pairwise(bounds))


def choose_meshes(mesh: Mesh | Sequence[Mesh], axis: str | None, count: int) -> tuple[Mesh, ...]:
    """The mesh of each stage: the submeshes along an axis, or those that were given."""
    if isinstance(mesh, (list, tuple)):
        given: Sequence[Any] = mesh
        found: tuple[Mesh, ...] = tuple(getattr(each, "mesh", each) for each in given)
        if len(found) != count:
            raise MeshError(f"{count} stages and {len(found)} meshes do not pair up", fix="give one mesh per stage")
    else:
        place: Any = getattr(mesh, "mesh", mesh)
        expect("mesh", place, Mesh, fix='open one: mesh = loom.open_mesh((2, 4), axes=("pp", "tp"))')
        name = place.axes[place.axis(axis if axis is not None else ("pp" if "pp" in place.axes else 0))]
        size = place.shape[place.axis(name)]
        if size != count:
            raise MeshError(
                f"{count} stages do not pair up with {size} places on axis {name!r}",
                mesh=place,
                fix=f"make {size} stages, open a mesh with {name}={count}, or give a list of meshes",
            )
        keep = place.ndim == 1  # a mesh has an axis
        found = tuple(place.submesh({name: slice(i, i + 1) if keep else i}) for i in range(count))
    for each in found:
        expect("mesh", each, Mesh, fix="give one mesh per stage")
    if len(set(found)) != count:
        raise MeshError("two stages are on the same mesh", fix="give each stage devices of its own: mesh.submesh(pp=0)")
    return found


def restrict(plan: Plan, part: nn.Module) -> Plan:
    """The lines of a plan that say something of a part of the model."""
    parameters = [name for name, _ in part.named_parameters()]
    modules = [name for name, _ in part.named_modules() if name]

    def keep(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
        return [each for each in patterns if any(fits(each, name) for name in names)]

    def lines(table: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        return {each: table[each] for each in keep(table, names)}

    return Plan(
        lines(plan.parameters, parameters),
        plan.batch,
        lines(plan.inputs, modules),
        lines(plan.outputs, modules),
        keep(plan.units, modules),
        keep(plan.recompute, modules),
    )


def part_of(module: nn.Module, units: Iterable[str], owners: Iterable[str] = ()) -> Part:
    """Some units of a model under their names, and the own parameters of some modules around units."""
    made = Part()
    for name in units:
        path, _, last = name.rpartition(".")
        _container(made, path).add_module(last, module.get_submodule(name))
    for path in owners:
        for each, parameter in module.get_submodule(path).named_parameters(recurse=False):
            _container(made, path).register_parameter(each, parameter)
    return made


def find_owners(module: nn.Module, units: Iterable[str]) -> tuple[str, ...]:
    """The names of modules around units that have parameters of their own."""
    listed = tuple(units)
    return tuple(
        name
        for name, owner in module.named_modules()
        if next(owner.parameters(recurse=False), None) is not None
        and not any(name == unit or name.startswith(f"{unit}.") for unit in listed)
    )


def _container(root: Part, path: str) -> nn.Module:
    here: nn.Module = root
    for name in path.split(".") if path else ():
        if name not in here._modules:
            here.add_module(name, Part())
        here = here.get_submodule(name)
    return here


def refuse_shared(module: nn.Module, rows: Sequence[Sequence[str]]) -> None:
    """An error if a parameter is in two stages."""
    seen: dict[int, tuple[int, str]] = {}
    for number, row in enumerate(rows):
        for unit in row:
            for name, each in module.get_submodule(unit).named_parameters():
                first = seen.setdefault(id(each), (number, f"{unit}.{name}"))
                if first[0] != number:
                    raise ArgumentError(
                        f"{first[1]!r} of stage {first[0]} and '{unit}.{name}' of stage {number} are one parameter",
                        fix="give each its own; models of transformers take tie_word_embeddings=False",
                    )
