"""Plans that others have written: transformers' tensor-parallel plans, and the styles of torch.distributed.tensor.

Only what is sharded is taken over. What those libraries do to make their collectives right (sums of gradients, local
tensors, masks of routers) follows here from the placements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshloom.errors import ArgumentError, closest
from meshloom.nn.lines import Lines, brief
from meshloom.nn.patterns import fits, generalise, near
from meshloom.nn.plan import Plan
from meshloom.nn.tables import AxesLike
from meshloom.placement import Placement, Replicate, Shard

Of = Callable[[torch.Tensor, str], Placement]  # where a parameter goes, by its dims and its last name


def _nowhere(parameter: torch.Tensor, name: str) -> Placement:
    return Replicate()


def _column(parameter: torch.Tensor, name: str) -> Placement:
    return Shard(max(parameter.dim() - 2, 0))


def _row(parameter: torch.Tensor, name: str) -> Placement:
    return Replicate() if parameter.dim() < 2 or name == "bias" else Shard(parameter.dim() - 1)


def _first(parameter: torch.Tensor, name: str) -> Placement:
    return Shard(0)


def _second(parameter: torch.Tensor, name: str) -> Placement:
    return Shard(1)


@dataclass(frozen=True)
class Style:
    """What a style does: to the parameters of its module, to what the module takes, to what it returns."""

    parameters: Of = _nowhere
    takes: Placement | None = None
    returns: Placement | None = None


# The styles of transformers by name. Those that shard nothing arrange sums that follow here from the placements.
# Weights that are packed (gate and up in one) are cut through both: the halves meet where the model splits them.
STYLES: dict[str, Style] = {
    "colwise": Style(_column),
    "colwise_rep": Style(_column, returns=Replicate()),
    "colwise_gather_output": Style(_column, returns=Replicate()),
    "packed_colwise": Style(_column),
    "rowwise": Style(_row),
    "rowwise_rep": Style(_row),
    "rowwise_split_input": Style(_row),
    "packed_rowwise": Style(_row),
    "embedding_rowwise": Style(_first),
    "embedding_colwise": Style(_second),
    "grouped_gemm": Style(_first),
    "sequence_parallel": Style(takes=Shard(1)),
    **dict.fromkeys(
        "all_reduce replicate replicated_with_grad_allreduce mla_kv_a_proj moe_tp_experts moe_identity_expert "
        "ep_router ep_dispatch_experts megamoe_router megamoe_experts".split(),
        Style(),
    ),
}


@dataclass
class _Draft:
    """The lines of a plan while styles are read."""

    axis: str
    parameters: Lines = field(default_factory=dict)
    inputs: Lines = field(default_factory=dict)
    outputs: Lines = field(default_factory=dict)

    def add(self, name: str, module: nn.Module, style: Style) -> None:
        """What a style does to a module and its own parameters."""
        for each, parameter in module.named_parameters(recurse=False):
            self.place(f"{name}.{each}", parameter, style)
        if style.takes is not None:
            self.inputs[name] = {self.axis: style.takes}
        if style.returns is not None:
            self.outputs[name] = {self.axis: style.returns}

    def place(self, name: str, parameter: torch.Tensor, style: Style) -> None:
        where = style.parameters(parameter, name.rpartition(".")[2])
        if isinstance(where, Shard) and name not in self.parameters:
            self.parameters[name] = {self.axis: where}

    def finish(self, model: nn.Module, batch: AxesLike) -> Plan:
        """The plan; a tied parameter goes where its first style puts it."""
        first = {id(parameter): name for name, parameter in reversed([*model.named_parameters(remove_duplicate=False)])}
        tied = dict(model.named_parameters(remove_duplicate=False))
        placed: Lines = {}
        for name, where in self.parameters.items():
            placed.setdefault(first[id(tied[name])], where)
        known = {name: placed.get(name) for name, _ in model.named_parameters()}
        modules = [name for name, _ in model.named_modules()]
        inputs, outputs = (
            brief(each, {name: each.get(name) for name in modules}) for each in (self.inputs, self.outputs)
        )
        return Plan(brief(placed, known), batch, inputs, outputs)


def from_huggingface(model: nn.Module, axis: str = "tp", batch: AxesLike = None) -> Plan:
    """The plan that a model of transformers has for tensor parallelism, on an axis of a mesh.

    `batch` says where the rows of a batch go, such as `{"dp": Shard(0)}`: such plans say nothing of it.

    >>> class Config(nn.Module):
    ...     tp_plan = {"fc1": "colwise", "fc2": "rowwise"}
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)
    >>> print(from_huggingface(Config(), batch="dp=S(0)"))
    batch      dp=S(0)
    parameter  fc1.weight  tp=S(0)
    parameter  fc1.bias    tp=S(0)
    parameter  fc2.weight  tp=S(1)
    """
    given = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not isinstance(given, Mapping) or not given:
        raise ArgumentError(
            f"this {type(model).__name__} has no plan for tensor parallelism of its own",
            fix='loom.plans.named("tensor", model, mesh) finds columns and rows by name and shape',
        )
    for name, style in given.items():
        if style not in STYLES:
            raise ArgumentError(f"the style {style!r} of {name!r} is not known", fix=closest(style, STYLES))
    draft = _Draft(axis)
    for name, module in model.named_modules():
        if generalise(name) in given:
            draft.add(name, module, STYLES[given[generalise(name)]])
        for each, parameter in module.named_parameters(recurse=False):
            if (known := generalise(f"{name}.{each}")) in given:
                draft.place(f"{name}.{each}", parameter, STYLES[given[known]])
    return draft.finish(model, batch)


def from_torch(styles: Mapping[str, Any], module: nn.Module, axis: str = "tp", batch: AxesLike = None) -> Plan:
    """The plan that styles of `torch.distributed.tensor.parallel` make for a module.

    >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> print(from_torch({"0": ColwiseParallel(), "2": RowwiseParallel()}, model))
    parameter  0.weight  tp=S(0)
    parameter  0.bias    tp=S(0)
    parameter  2.weight  tp=S(1)
    """
    draft = _Draft(axis)
    modules = {name: each for name, each in module.named_modules() if name}
    for pattern, style in styles.items():
        found = [name for name in modules if fits(pattern, name)]
        if not found:
            raise ArgumentError(f"the style of {pattern!r} fits no module", fix=near(pattern, modules))
        for name in found:
            draft.add(name, modules[name], _read(style, modules[name], name))
    return draft.finish(module, batch)


def _read(style: Any, module: nn.Module, name: str) -> Style:
    """A style of torch's for a module: only what differs from what would happen anyway is asked for."""
    kind = type(style).__name__
    if kind in ("ColwiseParallel", "RowwiseParallel"):
        return _read_product(style, module, name, is_column=kind == "ColwiseParallel")
    if kind == "SequenceParallel":
        return Style(takes=_one(style.sequence_sharding, name))
    if kind == "PrepareModuleInput":
        wanted = (*(style.desired_input_layouts or ()), *style.desired_input_kwarg_layouts.values())
        return Style(takes=_one(wanted, name))
    if kind == "PrepareModuleOutput":
        return Style(returns=_one(style.desired_output_layouts, name))
    if kind == "PrepareModuleInputOutput":
        takes = _read(style.prepare_module_input, module, name).takes
        return Style(takes=takes, returns=_read(style.prepare_module_output, module, name).returns)
    known = "ColwiseParallel, RowwiseParallel, SequenceParallel, PrepareModuleInput, -Output, -InputOutput"
    raise ArgumentError(f"the style {kind} of {name!r} is not known", fix=f"known: {known}")


def _read_product(style: Any, module: nn.Module, name: str, is_column: bool) -> Style:
    if isinstance(module, nn.Embedding):
        return Style(_second if is_column else _first, returns=_one(style.output_layouts, name))
    if not isinstance(module, nn.Linear):
        raise ArgumentError(
            f"{name!r} is a {type(module).__name__}, and {type(style).__name__} is for Linear and Embedding",
            fix="write its lines into a loom.Plan",
        )
    takes, returns = _one(style.input_layouts, name), _one(style.output_layouts, name)
    if is_column:
        gathered = Replicate() if isinstance(takes, Shard) else None
        return Style(_column, gathered, None if returns == Shard(-1) else returns)
    return Style(_row, None, None if returns == Replicate() else returns)


def _one(layouts: Any, name: str) -> Placement | None:
    """The one placement among layouts; those that are None stay as they are."""
    found = {_ours(each, name) for each in layouts if each is not None}
    if len(found) > 1:
        raise ArgumentError(
            f"the style of {name!r} gives the tensors of one module several layouts",
            layouts=", ".join(sorted(map(str, found))),
            fix="give one; the others lie as they come and are moved where an op needs them",
        )
    return next(iter(found), None)


def _ours(layout: Any, name: str) -> Placement:
    kind = type(layout).__name__
    if kind == "Shard":
        return Shard(layout.dim)
    if kind == "Replicate":
        return Replicate()
    raise ArgumentError(
        f"the style of {name!r} has the layout {layout!r}",
        fix="use Shard(dim) or Replicate(): a plan has no partial sums",
    )
