"""The total fallback: any torch function without a rule works. Gather, compute on the gathered value, say so.

It never raises for being unknown and never returns a wrong number: operands are gathered (partial sums reduced), the
function runs on dense tensors, results keep the placements of an operand of the same shape where there is one, and
operands that the function changed are written back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from meshloom.comms import move
from meshloom.context import FallbackWarning
from meshloom.engines.layout import short_name
from meshloom.errors import MeshloomError, ShapeError, UnsupportedError, ViewError
from meshloom.mesh import Mesh
from meshloom.placement import Replicate, Topology
from meshloom.planner import moves
from meshloom.runtime import state, where
from meshloom.tensor.base import Tensor
from meshloom.tensor.gradient_sums import Back, follow, is_tracked
from meshloom.tensor.joining import refuse_plain_results
from meshloom.tensor.moving import same_storage, shadow_of, to_dense, version_of
from meshloom.tensor.reading import find_mesh
from meshloom.tensor.refusals import refuse_transforms, transforms_refused
from meshloom.tensor.views import Recipe, is_alias, made_anew, moved_view, path_of, tie
from meshloom.tensor.writing import assign

_said: set[tuple[str, str]] = set()  # functions and lines that a warning has named


_DUAL = frozenset(("_make_dual", "_unpack_dual"))  # forward mode: what is gathered would lose its tangent


def fallback(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Run any torch function on gathered operands."""
    if name in _DUAL:
        raise transforms_refused()
    gathered = Gathered(name, find_mesh(args) or find_mesh(kwargs.values()), function, args, kwargs)
    dense_args = gathered.take(args)
    dense_kwargs = gathered.take(kwargs)
    for log in state.logs:
        log.begin_fallback(name, gathered.where, [each.tensor for each in gathered.operands])
    try:
        result = function(*dense_args, **dense_kwargs)
    except MeshloomError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        if any(each.dense.is_meta for each in gathered.operands):
            raise UnsupportedError(
                f"{name} cannot run on shapes alone",
                reason=str(error).splitlines()[0],
                fix="its result depends on values: leave it out of explain and of meta programs",
            ) from error
        raise
    finally:
        for log in state.logs:
            log.end_fallback()
    gathered.write_back()
    gathered.note()
    if args and isinstance(args[0], torch.Tensor) and not isinstance(args[0], Tensor) and gathered.operands:
        refuse_plain_results(gathered.operands[0].tensor)  # it may have written into a plain tensor
    return gathered.give(result)


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor of ours in a fallback call: as it was given (a parameter, say), and what it was gathered to."""

    tensor: Tensor
    given: Any
    dense: torch.Tensor
    version: int | None
    moved: bool
    whole: tuple[Tensor, torch.Tensor] | None = None  # what is written: the base of a view, with its dense value
    is_detached: bool = False  # the view has not the history of its base


def _copy_counted(data: torch.Tensor) -> torch.Tensor:
    """A copy that torch counts writes of, which it does not of what was made in inference mode."""
    if not data.is_inference():
        return data.clone()
    with torch.inference_mode(False):
        return data.clone()


class Gathered:
    """The operands of one fallback call: what they were, what they became, and what must be written back."""

    def __init__(
        self,
        name: str,
        mesh: Mesh | None,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> None:
        self.name, self.mesh, self.where = name, mesh, where()
        self.function, self.given, self.named = function, args, kwargs
        self.operands: list[Operand] = []
        self.plain: list[torch.Tensor] = []

    def take(self, value: object) -> Any:
        """The argument with every tensor of ours gathered."""
        if isinstance(value, Tensor):
            return self._gather(value, value)
        if isinstance(value, torch.Tensor):
            refuse_transforms(value)
            self.plain.append(value)
            return value.to("meta") if state.shadows is not None else value
        if isinstance(value, (tuple, list)):
            parts = [self.take(each) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            return {key: self.take(each) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(self.take(value.start), self.take(value.stop), self.take(value.step))
        return value

    def _gather(self, tensor: Tensor, given: object) -> torch.Tensor:
        tensor = shadow_of(tensor)
        writes = self.name.endswith("_") or self.name == "setitem"
        is_written = writes and self.given and given is self.given[0]
        if is_written and self.operands and self.operands[0].whole is not None:
            return self.operands[0].dense  # given once more: torch looks for that
        if is_written and (tensor._recipe is not None or tensor._data.requires_grad):
            if tensor._recipe is not None:
                return self._gather_base(tensor, given)
            data = to_dense(made_anew(tensor), self.name)
        else:
            data = to_dense(tensor, self.name)
        if not data.is_contiguous():  # as a dense tensor would be: some functions look at strides
            data = data.contiguous()
        is_own = same_storage(data, tensor._data)
        if (moved_view(tensor) is not None and is_own) or (data.is_inference() and not is_own):
            data = _copy_counted(data)
        moved = bool(moves(tensor.topology, tensor.topology.replicated, state.machine))
        self.operands.append(Operand(tensor, given, data, version_of(data), moved))
        return data

    def _gather_base(self, tensor: Tensor, given: object) -> torch.Tensor:
        """A view of which several elements lie in one place, as a view of its dense base."""
        base, recipes = path_of(tensor)
        detached = any(recipe.is_detached for recipe in recipes)
        whole = to_dense(base, self.name).detach() if detached else to_dense(made_anew(base), self.name)
        if whole.is_inference() or same_storage(whole, base._data):
            whole = _copy_counted(whole)
        data = whole
        for recipe in recipes:
            data = recipe.of_dense(data)
        moved = bool(moves(base.topology, base.topology.replicated, state.machine))
        self.operands.append(Operand(tensor, given, data, version_of(data), moved, (base, whole), detached))
        return data

    def write_back(self) -> None:
        """Operands that the function changed in place take the new value."""
        for operand in self.operands:
            tensor, data = operand.tensor, operand.dense
            if tuple(data.shape) != tensor.topology.shape:
                raise ShapeError(
                    f"{self.name} changed the shape of its operand to {list(data.shape)}",
                    tensor=tensor.topology,
                    fix="use the form without the underscore, which gives a new tensor",
                )
            if version_of(data) == operand.version or same_storage(data, tensor._data):
                continue
            base, whole = operand.whole or (tensor, data)
            if operand.is_detached and whole.requires_grad:
                raise ViewError(
                    f"{self.name} cannot give a history to this view: it is detached, and elements of it share memory",
                    view=tensor.topology,
                    fix=f"take a copy first: view.clone().{self.name}(...), or detach what is written",
                )
            with torch.set_grad_enabled(torch.is_grad_enabled() and not operand.is_detached):
                assign(base, Tensor(base.topology.replicated, whole), self.name)

    def note(self) -> None:
        """Say that a call went through the fallback, in every open log."""
        for log in state.logs:
            log.fallbacks[self.name] += 1
            log.note_call(f"{self.name}: no rule, gathered and computed dense", self.where)
        moved = [each.tensor.topology for each in self.operands if each.moved]
        if moved and not state.logs and (self.name, self.where) not in _said:
            warnings.warn(
                f"{self.name} at {self.where} has no rule: it gathers {moved[0]} and computes dense. To be quiet: "
                "warnings.filterwarnings('ignore', category=meshloom.FallbackWarning)",
                FallbackWarning,
                stacklevel=2,
            )
            _said.add((self.name, self.where))

    def give(self, result: object) -> Any:
        """The result with every tensor on the mesh."""
        if isinstance(result, torch.Tensor):
            return self._place(result)
        if isinstance(result, (tuple, list)):
            parts = [self.give(each) for each in result]
            if hasattr(result, "_fields"):
                return type(result)(*parts)
            return type(result)(parts)
        if isinstance(result, dict):
            return {key: self.give(each) for key, each in result.items()}
        return result

    def _place(self, result: torch.Tensor) -> Any:
        for operand in self.operands:
            if result is operand.dense:
                return operand.given
        if any(result is each for each in self.plain):
            return result
        refuse_transforms(result)
        if self.mesh is None or result.layout is not torch.strided:
            return result
        source = Topology(self.mesh, (Replicate(),) * self.mesh.ndim, tuple(result.shape), short_name(result.dtype))
        target = self._placements_to_keep(source)
        made = Tensor(target, move(result, source, target))
        if is_tracked(made._data) and (back := Back(moves(target, source, state.machine), (), ())):
            follow(self.name, back, made._data, ())
        base = next((each for each in self.operands if same_storage(result, each.dense)), None)
        if base is not None:
            self._tie(made, base)
        return made

    def _tie(self, made: Tensor, base: Operand) -> None:
        """A result that shares memory with a gathered operand is a view of it."""
        if moved_view(base.tensor) is None and is_alias(made._data, base.tensor._data):
            tie(made, base.tensor, None)
        elif self.given and self.given[0] is base.given:
            tie(made, base.tensor, Recipe(self.name, self.given[1:], self.named, None, self.function))

    def _placements_to_keep(self, source: Topology) -> Topology:
        """The placements that can be kept: those of the first operand of the same shape, partial ones reduced."""
        for operand in self.operands:
            topology = operand.tensor.topology
            if topology.shape == source.shape and source.ndim:
                return source.with_placements(topology.reduced.placements)
        return source
