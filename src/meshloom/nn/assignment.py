"""Which line of a plan takes which parameter of a module: decided on names and dims alone, before anything is moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from meshloom.errors import MeshError, PlacementError
from meshloom.mesh import Mesh
from meshloom.nn.patterns import fits, fold, near
from meshloom.nn.tables import Axes, Table, spell_axes
from meshloom.placement import Shard


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plan and the names that it takes. `shadowed`: names that fit, but an earlier line took them."""

    word: str
    pattern: str
    axes: Axes | None
    takes: tuple[str, ...]
    shadowed: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """What the line takes, in a few words."""
        return fold(self.takes) or f"nothing: earlier lines took {fold(self.shadowed)}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a plan does with a module: prints as a table.

    `parameters` has the placements of each parameter by name, tied ones under their first name; `tied` has the other
    names. `lines` says which line took what, `replicated` lists what no line names.
    """

    module: str
    batch: Axes
    parameters: Table[Axes]
    lines: tuple[Line, ...]
    replicated: tuple[str, ...]
    tied: Table[str]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = len(self.parameters)
        head = f"{self.module}: {count} parameters, {count - len(self.replicated)} on a line of the plan"
        rows = [("batch", spell_axes(self.batch), "")] if self.batch else []
        for line in self.lines:
            rows.append(
                (f"{line.word:<9}  {line.pattern}", "" if line.axes is None else spell_axes(line.axes), line.told)
            )
        if self.replicated:
            rows.append(("no line names these", "R", fold(self.replicated)))
        if self.tied:
            rows.append(("tied", "", ", ".join(f"{name} to {first}" for name, first in self.tied.items())))
        return "\n".join([head, *_columns(rows), *(f"  note: {each}" for each in self.notes)])


def _columns(rows: list[tuple[str, str, str]]) -> list[str]:
    first, second = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
    return [f"  {a:<{first}}  {b:<{second}}  {c}".rstrip() for a, b, c in rows]


def assign(plan: Any, module: Any, mesh: Mesh | None = None) -> Assignment:
    """Every decision of a plan about a module, or an error for a line that fits nothing, or names what is not there."""
    if mesh is not None:
        _check_axes(plan, mesh)
    groups = _tied_names(module)
    modules = [name for name, _ in module.named_modules() if name]
    lines, where = _share_out(plan.parameters, groups)
    _check_dims(lines, groups)
    for word, table in (("input", plan.inputs), ("output", plan.outputs)):
        lines += [Line(word, each, axes, _named(word, each, modules)) for each, axes in table.items()]
    for word, patterns in (("unit", plan.units), ("recompute", plan.recompute), ("experts", plan.experts)):
        lines += [Line(word, each, None, _named(word, each, modules)) for each in patterns]
    return Assignment(
        type(module).__name__,
        plan.batch,
        Table({first: where.get(first, Table({})) for first in groups}),
        tuple(lines),
        tuple(first for first in groups if first not in where),
        Table({name: first for first, (names, _) in groups.items() for name in names[1:]}),
        () if mesh is None else tuple(_notes(lines, groups, module, mesh)),
    )


def _check_axes(plan: Any, mesh: Mesh) -> None:
    for axis in plan.axes:
        if axis not in mesh.axes:
            raise MeshError(
                f"the plan names a mesh axis {axis!r} that the mesh does not have",
                mesh=mesh,
                fix=f"plan.rename({{{axis!r}: {mesh.axes[-1]!r}}}), or open a mesh with that axis",
            )


Groups = Mapping[str, tuple[tuple[str, ...], Any]]


def _tied_names(module: Any) -> Groups:
    """Each parameter with all its names, by the first."""
    names: dict[int, list[str]] = {}
    found: dict[int, Any] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        found[id(parameter)] = parameter
    return {each[0]: (tuple(each), found[key]) for key, each in names.items()}


def _share_out(table: Mapping[str, Axes], groups: Groups) -> tuple[list[Line], dict[str, Axes]]:
    """The first line that fits one of a parameter's names takes it."""
    where: dict[str, Axes] = {}
    lines = []
    for pattern, axes in table.items():
        matched = [first for first, (names, _) in groups.items() if any(fits(pattern, name) for name in names)]
        if not matched:
            raise PlacementError(
                f"the line {pattern!r} fits no parameter",
                asked=spell_axes(axes),
                fix=near(pattern, (name for names, _ in groups.values() for name in names)),
            )
        takes = tuple(first for first in matched if first not in where)
        where.update(dict.fromkeys(takes, axes))
        lines.append(Line("parameter", pattern, axes, takes, tuple(each for each in matched if each not in takes)))
    return lines, where


def _check_dims(lines: Iterable[Line], groups: Groups) -> None:
    for line in lines:
        for name in line.takes:
            dims = groups[name][1].dim()
            for axis, each in (line.axes or {}).items():
                if isinstance(each, Shard) and not -dims <= each.dim < dims:
                    raise PlacementError(
                        f"the line {line.pattern!r} shards dim {each.dim} of {name!r}, which has {dims} dims",
                        asked=f"{axis}={each}",
                        shape=list(groups[name][1].shape),
                        fix=_fix_dim(line.pattern, name, dims),
                    )


def _fix_dim(pattern: str, name: str, dims: int) -> str:
    if pattern != name:
        return f"write a line for it above: {name!r}: 'R'"
    return f"shard a dim from 0 to {dims - 1}, or say 'R'" if dims > 1 else "say S(0) or R" if dims else "say R"


def _named(word: str, pattern: str, modules: list[str]) -> tuple[str, ...]:
    found = tuple(name for name in modules if fits(pattern, name))
    if not found:
        raise PlacementError(f"the {word} {pattern!r} fits no module", fix=near(pattern, modules))
    return found


def _notes(lines: Iterable[Line], groups: Groups, module: Any, mesh: Mesh) -> Iterator[str]:
    """What does not divide over a mesh: dims of parameters, and heads of attention."""
    sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
    uneven: dict[str, list[str]] = {}
    sharding: set[str] = set()
    for line in lines:
        for axis, each in (line.axes or {}).items() if line.word == "parameter" else ():
            sharding.add(axis)
            for name in line.takes:
                size = groups[name][1].shape[each.dim] if isinstance(each, Shard) else 0
                if axis in sizes and size % sizes[axis]:
                    uneven.setdefault(f"{size} over {axis}={sizes[axis]}", []).append(name)
    for what, names in uneven.items():
        yield f"{what} does not divide, so some devices hold less: {fold(names)}"
    for axis in sorted(sharding & set(sizes)):
        for count in sorted(_heads(module)):
            if count % sizes[axis]:
                yield f"{count} heads do not divide over {axis}={sizes[axis]}, so attention may move activations"


def _heads(module: Any) -> set[int]:
    """The numbers of heads that a model's configuration, or its attention, tells."""
    words = ("num_attention_heads", "num_key_value_heads", "num_heads", "n_head")
    owners = [
        getattr(module, "config", None),
        *(each for each in module.modules() if "Attention" in type(each).__name__),
    ]
    found = [getattr(owner, word, None) for owner in owners for word in words]
    return {each for each in found if isinstance(each, int) and each > 0}
