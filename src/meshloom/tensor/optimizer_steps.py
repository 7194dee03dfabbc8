"""An optimizer's step on stored arrays: torch's own step on plain tensors, not one call of ours for each of its ops.

Most optimizers treat every element by itself, so a step on the arrays is the step on the tensors. Torch lets a hook
change the arguments of a step, and the optimizer is one of them: the step gets a stand-in whose parameters and state
are the arrays; small ones go as lists, in one call for all. While somebody watches, or where tensors do not lie alike,
it runs on the tensors as usual.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshloom.comms.deferred import is_waiting
from meshloom.engines import private
from meshloom.placement import Topology
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.entries import MASK
from meshloom.tensor.lists import is_dense, is_ordered_as

# those that treat every element by itself, and write their state in place once it is there
ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in "Adadelta Adagrad Adam AdamW Adamax ASGD NAdam RAdam RMSprop Rprop SGD".split()
)
# those whose steps on lists give the bits of steps on one tensor after the other
SAME_AS_LISTS = frozenset((torch.optim.Adam, torch.optim.AdamW))
SAME_BITS = frozenset((torch.float32, torch.float64))  # short floats are rounded in other places
SMALL = 1 << 16  # bytes up to which calls and not arithmetic decide what a step takes


def run_on_arrays(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of the same step on arrays; None where it has to run on tensors."""
    first = next((each for group in optimizer.param_groups for each in group["params"]), None)
    if first.__class__ is not Tensor or optimizer.__class__ not in ELEMENTWISE:
        return None
    has_closure = len(args) > 1 or kwargs  # which may do anything
    if has_closure or not state.plain or state.waiting or private.has_step_hooks(optimizer):
        return None
    made = StandIn(optimizer)
    return ((made.optimizer,), {}) if made.fill() else None


class StandIn:
    """An optimizer on arrays: the same groups and the same state, with an array for each tensor."""

    __slots__ = ("_source", "_states", "_written", "optimizer")

    def __init__(self, source: Any) -> None:
        self.optimizer = object.__new__(source.__class__)
        self._source = source
        self._states: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        self._written: list[Tensor] = []

    def fill(self) -> bool:
        """Take over groups and state; False if something does not lie as its parameter does."""
        groups = []
        for group in self._source.param_groups:
            arrays: list[torch.Tensor] = []
            has_state = self._source.__class__ is not torch.optim.SGD or group["momentum"] != 0
            is_fused = bool(group.get("fused"))
            if not all(self._take(each, arrays, has_state, is_fused) for each in group["params"]):
                return False
            if group["differentiable"] or any(each.__class__ is Tensor for each in group.values()):
                return False
            groups += self._share_out(group, arrays)
        vars(self.optimizer).update(
            vars(self._source), param_groups=groups, state=self._states, _tensors_written=self._written
        )
        return True

    def _take(self, parameter: Any, arrays: list[torch.Tensor], has_state: bool, is_fused: bool) -> bool:
        """Take over a parameter and its state; False if it has to stay a tensor.

        A fused step goes through memory, so what belongs to a parameter has to lie there in the same order.
        """
        if parameter.__class__ is not Tensor or parameter._view is not None:
            return False
        mesh, data = parameter.topology.mesh, parameter._data
        is_plain = mesh.lease is None and data.__class__ is torch.Tensor and not data.is_meta
        if not is_plain or not data.is_leaf or data in self._states:
            return False
        arrays.append(data)
        gradient = data.grad
        if gradient is None:
            return True
        if gradient.requires_grad or gradient._is_zerotensor() or (mesh.is_split and is_waiting(data)):
            return False
        self._written.append(parameter)
        like = data if is_fused else None
        if like is not None and not (is_ordered_as(gradient, like) and is_dense(like)):
            return False
        held = self._source.state.get(parameter)
        return self._take_state(held, parameter.topology, self._states[data], like) if held else not has_state

    def _share_out(self, group: dict[str, Any], arrays: list[torch.Tensor]) -> list[dict[str, Any]]:
        """A group as it is stepped: where the choice is left to torch, small arrays go as lists, to the same bits."""
        is_free = self._source.__class__ in SAME_AS_LISTS and group["foreach"] is None and not group["fused"]
        small = [each for each in arrays if each.nbytes <= SMALL and each.dtype in SAME_BITS] if is_free else []
        if len(small) < 2 or any(isinstance(each, torch.Tensor) for each in (group["lr"], *group["betas"])):
            return [{**group, "params": arrays}]
        listed = {*small}
        large = [each for each in arrays if each not in listed]
        return [{**group, "params": small, "foreach": True}, *([{**group, "params": large}] if large else [])]

    def _take_state(
        self, held: dict[str, Any], topology: Topology, own: dict[str, Any], like: torch.Tensor | None
    ) -> bool:
        """Take over what an optimizer knows of a parameter: tensors that lie as it does, and numbers."""
        for name, value in held.items():
            if value.__class__ is Tensor:
                if value.topology is not topology or value._view is not None:
                    return False
                if like is not None and not is_ordered_as(value._data, like):
                    return False
                self._written.append(value)
                own[name] = value._data
            elif not isinstance(value, torch.Tensor) or value.ndim:
                return False  # a number or None is not written but replaced, and what replaces it would be lost
            else:
                own[name] = value
        return True


@torch.no_grad()
def note_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """After a step on arrays: the padding of their tensors is zero, and torch knows of the writes."""
    written = vars(args[0]).get("_tensors_written")
    if written is not None:
        private.increment_version(written)
        for each in written:
            topology = each.topology
            if topology.padded:
                each._mask_padding_()
            if topology.mesh.is_split:
                each._number = (each._number * 1000003 + 1) & MASK


register_optimizer_step_pre_hook(run_on_arrays)
register_optimizer_step_post_hook(note_step)
