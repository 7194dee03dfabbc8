"""`Plan`: how a model lies on a mesh, as a value. It prints, reads back, is compared and hashed, and knows no torch.

Start with `Plan` and `Plan.check`; `loom.plans` makes plans of models, `loom.parallelize` carries one out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from meshloom.errors import ArgumentError
from meshloom.mesh import Mesh
from meshloom.nn.assignment import Assignment, assign
from meshloom.nn.patterns import check_pattern
from meshloom.nn.plan_text import read_toml, read_words, write_toml, write_words
from meshloom.nn.tables import Axes, AxesLike, Table, read_axes, read_table


@dataclass(frozen=True, slots=True)
class Plan:
    """A table from patterns of names to placements, and what else is decided for a model.

    `parameters`: the first line that fits a parameter's name places it; what no line fits is replicated.
    `batch`: where plain tensors go that the model is called with. `inputs` and `outputs`: where tensors go that
    modules take and return, by patterns of module names; axes that such a line does not name stay as they are.
    `units`: modules whose parameters are gathered together. `recompute`: modules whose activations are computed again
    in backward. `experts`: modules with stacks of experts, to which their tokens travel by all-to-all.

    >>> from meshloom import Shard
    >>> plan = Plan({"**.{up,gate}.weight": {"tp": Shard(0)}, "**.down.weight": "tp=S(1)"}, batch={"dp": Shard(0)})
    >>> print(plan)
    batch      dp=S(0)
    parameter  **.{up,gate}.weight  tp=S(0)
    parameter  **.down.weight       tp=S(1)
    >>> Plan.parse(str(plan)) == plan == eval(repr(plan))
    True
    """

    parameters: Mapping[str, AxesLike] = field(default_factory=lambda: Table({}))
    batch: AxesLike = None
    inputs: Mapping[str, AxesLike] = field(default_factory=lambda: Table({}))
    outputs: Mapping[str, AxesLike] = field(default_factory=lambda: Table({}))
    units: Sequence[str] = ()
    recompute: Sequence[str] = ()
    experts: Sequence[str] = ()

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "batch", read_axes(self.batch))
        for name in ("parameters", "inputs", "outputs"):
            put(self, name, read_table(getattr(self, name), keep=name != "parameters"))
        for name in ("units", "recompute", "experts"):
            put(self, name, _patterns(name, getattr(self, name)))

    def __repr__(self) -> str:
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in given.items() if value)})"

    def __str__(self) -> str:
        return write_words(self.as_dict())

    @classmethod
    def parse(cls, text: str) -> Plan:
        """The plan that a printed text stands for.

        >>> Plan.parse("parameter  **.weight  fsdp=S(0)")
        Plan(parameters={'**.weight': {'fsdp': Shard(dim=0)}})
        """
        return cls(**read_words(text))

    def to_toml(self) -> str:
        """The plan as TOML, which `from_toml` reads.

        >>> print(Plan({"**.weight": "fsdp=S(0)"}, batch="fsdp=S(0)", units=["layers.*"]).to_toml())
        batch = "fsdp=S(0)"
        units = ["layers.*"]
        <BLANKLINE>
        [parameters]
        "**.weight" = "fsdp=S(0)"
        <BLANKLINE>
        """
        return write_toml(self.as_dict())

    @classmethod
    def from_toml(cls, source: str | os.PathLike[str]) -> Plan:
        """The plan in a TOML text, or in a file whose path is given.

        >>> Plan.from_toml('batch = "dp=S(0)"')
        Plan(batch={'dp': Shard(dim=0)})
        """
        return cls(**read_toml(source))

    def as_dict(self) -> dict[str, Any]:
        """The parts of the plan by name, those that say something."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name))}

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the plan names, sorted.

        >>> Plan({"**.weight": "tp=S(0)"}, batch="dp=S(0)").axes
        ('dp', 'tp')
        """
        tables: list[Mapping[str, Any]] = [self.parameters, self.inputs, self.outputs]
        named: list[Any] = [self.batch, *(axes for table in tables for axes in table.values())]
        return tuple(sorted({axis for axes in named for axis in axes}))

    def rename(self, axes: Mapping[str, str]) -> Plan:
        """The same plan with other names of mesh axes.

        >>> Plan({"**.weight": "tp=S(0)"}).rename({"tp": "model"})
        Plan(parameters={'**.weight': {'model': Shard(dim=0)}})
        """

        def renamed(given: Any) -> Axes:
            return read_axes({axes.get(axis, axis): each for axis, each in given.items()}, keep=True)

        tables = {name: getattr(self, name) for name in ("parameters", "inputs", "outputs")}
        changed: dict[str, Any] = {
            name: {key: renamed(each) for key, each in table.items()} for name, table in tables.items()
        }
        return replace(self, batch=renamed(self.batch), **changed)

    def check(self, module: Any, mesh: Mesh | None = None) -> Assignment:
        """Which line takes which parameter of a module; a line that fits nothing is an error.

        With a mesh, an axis that it lacks is an error too, and what does not divide over it is noted: uneven shards are
        exact, and cost more.

        >>> import torch
        >>> print(Plan({"*.weight": "tp=S(0)"}, batch="dp=S(0)").check(torch.nn.Sequential(torch.nn.Linear(4, 8))))
        Sequential: 2 parameters, 1 on a line of the plan
          batch                dp=S(0)
          parameter  *.weight  tp=S(0)  0.weight
          no line names these  R        0.bias
        """
        return assign(self, module, mesh)


def _patterns(name: str, given: Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ArgumentError(f"{name}={given!r} is no list of patterns", fix=f"write {name}=['layers.*']")
    return tuple(check_pattern(each) for each in given)
