"""An optimizer's step on stored arrays: torch's own step on plain tensors, not one call of ours for each of its ops.

Most optimizers treat every element by itself, so a step on the arrays is the step on the tensors. Torch lets a hook
change the arguments of a step, and the optimizer is one of them: the step gets a stand-in whose parameters and state
are the arrays. Where the program leaves it to torch how Adam and AdamW go through them, they take torch's fused step,
which reads and writes each array once. While somebody watches, or where tensors do not lie alike, a step runs on the
tensors as usual.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshloom.comms.deferred import is_waiting
from meshloom.engines import private
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.entries import MASK
from meshloom.tensor.lists import is_dense, is_ordered_as

# those that treat every element by itself, and write their state in place once it is there
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)
# those whose fused step differs from the one array by array in the last bit at most, of few elements
FUSED = frozenset((torch.optim.Adam, torch.optim.AdamW))
FUSED_DTYPES = frozenset((torch.float32, torch.float64))  # short floats are rounded in other places


def run_on_arrays(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of the same step on arrays; None where it has to run on tensors."""
    first = next((each for group in optimizer.param_groups for each in group["params"]), None)
    if not isinstance(first, Tensor) or optimizer.__class__ not in ELEMENTWISE:
        return None
    has_closure = len(args) > 1 or kwargs  # which may do anything
    if has_closure or not state.plain or state.waiting or private.has_step_hooks(optimizer):
        return None
    if first._is_remote:
        fused = _fuse_remote(optimizer)
        return None if fused is None else ((fused,), {})
    made = StandIn(optimizer)
    return ((made.optimizer,), {}) if first.__class__ is Tensor and made.fill() else None


def _fuse_remote(optimizer: Any) -> Any:
    """An optimizer of tensors on a cluster that takes the steps that its workers' arrays would take, or None."""
    groups = []
    for group in optimizer.param_groups:
        held = [each for each in group["params"] if each.grad is not None]
        alike = [{each.grad.topology, *_topologies(optimizer.state.get(each))} == {each.topology} for each in held]
        is_known = all(each in optimizer.state for each in held)
        is_fused = is_known and all(alike) and is_left_to_torch(optimizer, group, held)
        groups.append({**group, "fused": True} if is_fused else group)
    if not any(given is not group for given, group in zip(groups, optimizer.param_groups, strict=True)):
        return None
    made = object.__new__(optimizer.__class__)
    vars(made).update(vars(optimizer), param_groups=groups)
    return made


def _topologies(held: dict[str, Any] | None) -> set[Any]:
    return {each.topology for each in (held or {}).values() if isinstance(each, Tensor)}


def is_left_to_torch(optimizer: Any, group: dict[str, Any], held: list[Any]) -> bool:
    """Whether the program leaves it to torch how a group is stepped, and a fused step gives what any other does."""
    if optimizer.__class__ not in FUSED or group["foreach"] is not None or group.get("fused") is not None:
        return False
    if group["capturable"] or any(isinstance(each, torch.Tensor) for each in (group["lr"], *group["betas"])):
        return False
    return {each.dtype for each in held} <= FUSED_DTYPES


class StandIn:
    """An optimizer on arrays: the same groups and the same state, with an array for each tensor."""

    __slots__ = ("_changed", "_source", "_states", "_written", "optimizer")

    def __init__(self, source: Any) -> None:
        self.optimizer = object.__new__(source.__class__)
        self._source = source
        self._states: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._written: list[Tensor] = []
        self._changed: list[Tensor] = []  # those of them that are padded or split over processes

    def fill(self) -> bool:
        """Take over groups and state; False if something does not lie as its parameter does."""
        groups: list[dict[str, Any]] = []
        taken: list[torch.Tensor] = []
        for group in self._source.param_groups:
            arrays: list[torch.Tensor] = []
            needs_state = self._source.__class__ is not torch.optim.SGD or group["momentum"] != 0
            touched: list[list[torch.Tensor]] = []  # what the step reads and writes, a list for each parameter
            for each in group["params"]:
                if not self._take(each, arrays, needs_state, touched):
                    return False
            if group["differentiable"] or any(each.__class__ is Tensor for each in group.values()):
                return False
            if group.get("fused") and not _are_in_order(touched):
                return False
            is_fused = is_left_to_torch(self._source, group, arrays) and _are_in_order(touched)
            groups.append({**group, "params": arrays, **({"fused": True} if is_fused else {})})
            taken += arrays
        if len({*map(id, taken)}) < len(taken):
            return False
        vars(self.optimizer).update(
            vars(self._source), param_groups=groups, state=self._states, _tensors_written=(self._written, self._changed)
        )
        return True

    def _take(
        self, parameter: Any, arrays: list[torch.Tensor], needs_state: bool, touched: list[list[torch.Tensor]]
    ) -> bool:
        """Take over a parameter and its state; False if it has to stay a tensor."""
        if parameter.__class__ is not Tensor or parameter._view is not None:
            return False
        topology, data = parameter.topology, parameter._data
        mesh = topology.mesh
        if mesh.lease is not None or data.__class__ is not torch.Tensor or data.is_meta or not data.is_leaf:
            return False
        arrays.append(data)
        gradient = data.grad
        if gradient is None:
            return True
        if gradient.requires_grad or gradient._is_zerotensor() or (mesh.is_split and is_waiting(data)):
            return False
        held = self._source.state.get(parameter)
        if not held and needs_state:
            return False
        written, own = [parameter], {}
        if held:
            for name, value in held.items():
                if value.__class__ is Tensor:
                    if value.topology is not topology or value._view is not None:
                        return False
                    written.append(value)
                    own[name] = value._data
                elif not isinstance(value, torch.Tensor) or value.ndim:
                    return False  # a number or None is not written but replaced: what replaces it would be lost
                else:
                    own[name] = value
            self._states[data] = own
        self._written += written
        if topology.padded or mesh.is_split:
            self._changed += written
        touched.append([gradient, *[each._data for each in written]])
        return True


def _are_in_order(touched: list[list[torch.Tensor]]) -> bool:
    """Whether a fused step, which goes through memory, finds what belongs to a parameter there in one order."""
    return all(map(_are_contiguous, touched)) or all(
        is_dense(parameter) and all(is_ordered_as(each, parameter) for each in (gradient, *state))
        for gradient, parameter, *state in touched
    )


def _are_contiguous(arrays: list[torch.Tensor]) -> bool:
    return all(map(torch.Tensor.is_contiguous, arrays))


@torch.no_grad()
def note_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """After a step on arrays: the padding of their tensors is zero, and torch knows of the writes."""
    noted = vars(args[0]).get("_tensors_written")
    if noted is not None:
        written, changed = noted
        private.increment_version(written)
        if any(group.get("fused") for group in args[0].param_groups):  # torch's fused steps tell nobody that they wrote
            private.increment_version([each._data for each in written])
        for each in changed:
            topology = each.topology
            if topology.padded:
                each._mask_padding_()
            if topology.mesh.is_split:
                each._number = (each._number * 1000003 + 1) & MASK


register_optimizer_step_pre_hook(run_on_arrays)
register_optimizer_step_post_hook(note_step)
