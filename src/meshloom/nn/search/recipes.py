"""Ways to make a plan: the plans with names, and plans that are built part by part.

A *part* is what is placed together: the columns and rows of an attention or a feed-forward, the experts, a vocabulary,
and the biases and norms of all layers. On the tensor axis it lies as its role says, as a whole on each device, or by
the other dim of its matrices; over the sharding axis it is sharded by the first dim that is left, or by the last, or
every device keeps all of it. Between the parts the sequence may lie over the tensor axis too. Axes are told by their
names:

| axis | rows of the batch | weights |
|---|---|---|
| `dp` | over it | replicated |
| `fsdp` | over it | sharded over it, gathered block by block |
| `ep` | over it | experts over it; the others replicated, or sharded if there is an `fsdp` axis |
| `cp` | dim 1 over it | replicated |
| `tp` | on all of it | by part |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from meshloom.mesh import Mesh
from meshloom.nn import plans
from meshloom.nn.lines import Lines, brief
from meshloom.nn.patterns import generalise
from meshloom.nn.plan import Plan
from meshloom.nn.roles import Role, blocks_of, roles_of
from meshloom.placement import Placement, Replicate, Shard

ROWS = ("dp", "fsdp", "ep")
CONTEXT, TENSOR, SHARDED, EXPERT = "cp", "tp", "fsdp", "ep"
# How a part may lie on an axis; the first of each unless something else is said.
WAYS = {TENSOR: ("role", "whole", "other"), SHARDED: ("sharded", "kept", "last")}
ALL = -1
VECTORS = "biases and norms"  # parameters of one dim, of all layers together: small, so that gathering them is waiting

Way = tuple[str, str, str]  # a part or a layer, an axis, and how it lies on it


@dataclass(frozen=True)
class Named:
    """A plan with a name."""

    name: str
    recompute: int = 0

    @property
    def title(self) -> str:
        """The name."""
        return self.name

    def plan(self, module: nn.Module, mesh: Mesh) -> Plan:
        """The plan of that name."""
        return plans.named(self.name, module, mesh)


@dataclass(frozen=True)
class Built:
    """A plan out of choices: how parts lie, where the sequence lies between them, and how many blocks recompute."""

    ways: tuple[Way, ...] = ()  # of parts, or of single layers, that do not lie as usual
    is_sequence: bool = False  # between parts the sequence lies over the tensor axis
    recompute: int = 0  # blocks whose activations are computed again in backward; ALL for each of them

    @property
    def title(self) -> str:
        """The choices in a few words."""
        said = ["sequence over tp between parts"] if self.is_sequence else []
        said += [f"{part} {_SAID[way]}" for part, _, way in self.ways]
        if self.recompute:
            said.append("all blocks recompute" if self.recompute == ALL else f"{self.recompute} blocks recompute")
        return ", ".join(said) or "each part by its role"

    def changed(self, part: str, axis: str, way: str) -> Built:
        """The same with another choice for a part.

        >>> Built().changed("feed", "tp", "whole").ways, Built().changed("feed", "tp", "role").ways
        ((('feed', 'tp', 'whole'),), ())
        """
        kept = [each for each in self.ways if each[:2] != (part, axis)]
        added = [] if way == WAYS[axis][0] else [(part, axis, way)]
        return replace(self, ways=tuple(sorted([*kept, *added])))

    def plan(self, module: nn.Module, mesh: Mesh) -> Plan:
        """The plan for a model on a mesh."""
        return _Draft(self, module, mesh).finish()


_SAID = {
    "whole": "whole on tp",
    "other": "by its other dim on tp",
    "kept": "kept on fsdp",
    "last": "by its last dim on fsdp",
}


@dataclass(frozen=True)
class Part:
    """Layers of a model that are placed together, by names with stars for numbers."""

    name: str
    layers: tuple[str, ...]
    kind: str  # "block" for columns and rows, "expert", "vocabulary", "vectors"


def parts_of(module: nn.Module) -> list[Part]:
    """The parts in the order of the model: columns up to the rows that end them, experts, vocabularies.

    >>> layer = nn.TransformerEncoderLayer(8, 2)
    >>> for part in parts_of(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)):
    ...     print(part.name, part.layers)
    self_attn ('layers.*.self_attn', 'layers.*.self_attn.out_proj')
    linear1 ('layers.*.linear1', 'layers.*.linear2')
    biases and norms ()
    """
    found: dict[str, Part] = {}
    for layers, kind in _runs(module):
        names = tuple(dict.fromkeys(map(generalise, layers)))
        found.setdefault(names[0], Part(_short(names), names, kind))
    if any(each.dim() < 2 for each in module.parameters()):
        found[VECTORS] = Part(VECTORS, (), "vectors")
    clear = {part.name for part in found.values()}
    if len(clear) < len(found):
        return [replace(part, name=part.layers[0]) if part.layers else part for part in found.values()]
    return list(found.values())


def expert_counts(module: nn.Module) -> list[int]:
    """How many experts each layer of experts has."""
    names = [name for name, role in roles_of(module).items() if role.kind == "expert"]
    return [module.get_parameter(name).shape[0] for name in names]


def _runs(module: nn.Module) -> Iterator[tuple[list[str], str]]:
    """Layers that go together, and what they are."""
    kinds: dict[str, str] = {}
    for role in roles_of(module).values():
        ends = role.kind == "row" or kinds.get(role.layer) == "row"  # an attention module has both
        kinds[role.layer] = "row" if ends else role.kind
    open_run: list[str] = []
    for layer, kind in kinds.items():
        is_apart = kind in ("expert", "vocabulary")
        if open_run and (is_apart or (kinds[open_run[-1]] == "row" and kind == "column")):
            yield open_run, "block"
            open_run = []
        if is_apart:
            yield [layer], kind
        else:
            open_run.append(layer)
    if open_run:
        yield open_run, "block"


def _short(layers: tuple[str, ...]) -> str:
    """The module that all layers are in, or the first of them: its last word."""
    parents = {layer.rpartition(".")[0] for layer in layers}
    (common,) = parents if len(parents) == 1 else (layers[0],)
    words = [word for word in (common if len(layers) > 1 else layers[0]).split(".") if word != "*"]
    inside = common.split(".")[-1] != "*" or len(layers) == 1
    return words[-1] if inside and words else layers[0].rpartition(".")[2]


class _Draft:
    """The lines of a built plan."""

    def __init__(self, recipe: Built, module: nn.Module, mesh: Mesh) -> None:
        self.recipe, self.module = recipe, module
        self.tensor = TENSOR if TENSOR in mesh.axes else None
        self.experts = EXPERT if EXPERT in mesh.axes else None
        self.sharded = [axis for axis in mesh.axes if SHARDED in mesh.axes and axis in (SHARDED, EXPERT)]
        self.rows: dict[str, Placement] = {axis: Shard(0) for axis in mesh.axes if axis in ROWS}
        self.context: dict[str, Placement] = {axis: Shard(1) for axis in mesh.axes if axis == CONTEXT}
        self.roles = roles_of(module)
        self.ways = self._ways_of_layers()

    def _ways_of_layers(self) -> dict[tuple[str, str], str]:
        """How each layer lies on each axis: as is said of it, of its part, or as usual."""
        chosen = {(part, axis): way for part, axis, way in self.recipe.ways}
        found = {(VECTORS, SHARDED): chosen.get((VECTORS, SHARDED), WAYS[SHARDED][0])}
        for part in parts_of(self.module):
            for layer in part.layers:
                for axis, usual in WAYS.items():
                    found[layer, axis] = chosen.get((layer, axis), chosen.get((part.name, axis), usual[0]))
        return found

    def _way(self, layer: str, axis: str) -> str:
        return self.ways[generalise(layer), axis]

    def _is_whole(self, layer: str) -> bool:
        return self.tensor is None or self._way(layer, TENSOR) == "whole"

    def finish(self) -> Plan:
        """The plan."""
        modules = [name for name, _ in self.module.named_modules()]
        inputs, outputs = (
            brief(lines, {name: lines.get(name) for name in modules}) for lines in (self._inputs(), self._outputs())
        )
        blocks = blocks_of(self.module)
        units = [f"{name}.*" for name in blocks] if self.sharded else []
        batch = {**self.rows, **self.context}
        again, travels = [*self._recomputed(blocks)], plans.dispatched(self.module) if self.experts else ()
        return Plan(self._parameters(), batch, inputs, outputs, units, again, travels)

    def _parameters(self) -> Lines:
        names: dict[int, list[str]] = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        where = {}
        for name, parameter in self.module.named_parameters():
            role = next((self.roles[each] for each in names[id(parameter)] if each in self.roles), None)
            where[name] = self._place(role, parameter.dim())
        return brief({name: axes for name, axes in where.items() if axes}, where)

    def _place(self, role: Role | None, dims: int) -> dict[str, Placement]:
        """On the tensor axis as chosen; over the sharding axis by the dim that is left, or by the first."""
        dim = None if role is None else self._dim(role)
        placed: dict[str, Placement] = {} if dim is None or self.tensor is None else {self.tensor: Shard(dim)}
        is_expert = role is not None and role.kind == "expert"
        if role is not None and is_expert and self.experts is not None:
            dim = role.dim
            placed[self.experts] = Shard(dim)
        free = [each for each in range(dims) if each != dim]
        if free and self._is_sharded(role, dims):
            is_last = role is not None and self._way(role.layer, SHARDED) == "last"
            placed = {axis: Shard(free[-1 if is_last else 0]) for axis in self.sharded} | placed
        return placed

    def _is_sharded(self, role: Role | None, dims: int) -> bool:
        if dims < 2 and self.ways[VECTORS, SHARDED] == "kept":
            return False
        return role is None or self._way(role.layer, SHARDED) != "kept"

    def _dim(self, role: Role) -> int | None:
        if self._is_whole(role.layer):
            return None
        return role.dim if self._way(role.layer, TENSOR) == "role" else role.other

    def _outputs(self) -> Lines:
        """Results that go from part to part; what is looked up in a sharded vocabulary lies as the batch does."""
        found: Lines = {}
        tables = [name for name, layer in self.module.named_modules() if isinstance(layer, nn.Embedding)]
        for layer in dict.fromkeys(role.layer for role in self.roles.values()):
            if layer in tables:
                found[layer] = {**(self.rows if self.sharded else {}), **self._between(layer)}
            elif self._writes(layer) and not self._is_whole(layer):
                found[layer] = self._between(layer)
        return {layer: axes for layer, axes in found.items() if axes}

    def _writes(self, layer: str) -> bool:
        kinds = {role.kind for role in self.roles.values() if role.layer == layer}
        return "row" in kinds and not plans.stays_inside(layer)

    def _between(self, layer: str) -> dict[str, Placement]:
        if self.tensor is None or not self.recipe.is_sequence:
            return {}
        return {self.tensor: Shard(plans.sequence_dim(self.module, layer))}

    def _inputs(self) -> Lines:
        """Where several layers read what lies by its sequence, it is gathered once for all of them."""
        if self.tensor is None or not self.recipe.is_sequence:
            return {}
        columns = [name for (name, axis), way in self.ways.items() if axis == TENSOR and way == "role"]
        parts = plans.readers(self.module)
        read = {layer.rpartition(".")[0] for layer in columns}
        return {part: {self.tensor: Replicate()} for part in parts if generalise(part) in read}

    def _recomputed(self, blocks: tuple[str, ...]) -> Iterator[str]:
        left = self.recipe.recompute
        for name in blocks:
            count = len(list(self.module.get_submodule(name).children()))
            taken = count if left == ALL else min(left, count)
            left -= 0 if left == ALL else taken
            if taken == count:
                yield f"{name}.*"
            elif taken == 1:
                yield f"{name}.0"
            elif taken:
                yield f"{name}.{{{','.join(map(str, range(taken)))}}}"


def gathered(module: nn.Module) -> Built:
    """Weights that are best gathered: by their last dim, so that no product takes a part of them, small ones kept."""
    recipe = Built()
    for part in parts_of(module):
        recipe = recipe.changed(part.name, SHARDED, "kept" if part.kind == "vectors" else "last")
    return recipe


def other_ways(parts: list[Part], mesh: Mesh) -> dict[tuple[str, str], tuple[str, ...]]:
    """What may be chosen for each part on each axis, besides the usual; only vocabularies go by their other dim."""
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    for axis, part in itertools.product([axis for axis in WAYS if axis in mesh.axes], parts):
        if part.kind == "vectors":
            found |= {(part.name, axis): ("kept",)} if axis == SHARDED else {}
        elif axis == SHARDED or part.kind == "vocabulary":
            found[part.name, axis] = WAYS[axis][1:]
        else:
            found[part.name, axis] = ("whole",)
    return found
