"""A step while it runs, written down as a graph: every kernel on stored arrays, in forward, backward and optimizer.

Planned calls say what they are (`begin_call`, `end_call`); a dispatch mode of torch sees the kernels that run on the
arrays, on `meta` and on data alike. A kernel of backward belongs to the call whose graph node is running: nodes of the
graph are numbered as they are made, so the call is the last one that had begun by then. A storage is followed by a weak
reference until nobody holds it. Nothing of this is there unless somebody records.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshloom.collectives import Collective
from meshloom.comms.deferred import LARGE
from meshloom.comms.group import WORLD
from meshloom.cost import Load
from meshloom.cost.step import StepGraph
from meshloom.engines import private
from meshloom.engines.layout import short_name
from meshloom.mesh import Mesh
from meshloom.placement import Topology
from meshloom.planner import Plan, moves
from meshloom.runtime import Event, Log, state, where
from meshloom.tensor.base import Tensor
from meshloom.tensor.kernel_work import EMPTY, Kernel
from meshloom.tensor.known_numbers import KnownNumbers
from meshloom.tensor.layouts import layout_of
from meshloom.tensor.memory_book import MemoryBook
from meshloom.tensor.module_paths import ModulePaths
from meshloom.tensor.step_drafts import Called, Draft, Held, Phases, PlannedWeight, Weight
from meshloom.types import is_floating, itemsize, numel

_LEAF = 1 << 63  # from here on are the numbers of the graph nodes of leaves


class Recorder(Log):
    """A log that keeps the whole step: nodes with their kernels, storages with their lives."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts: list[Draft] = []
        self.kernel = 0  # the number of the next kernel
        self.memory = MemoryBook(self)
        self.modules = ModulePaths(self.memory.hold_parameter)
        self.begun: list[int] = []  # for each planned call, the number of the next graph node when it began
        self.called: list[Called] = []
        self.current: Called | None = None
        self.backward: Draft | None = None  # the node of backward that is growing
        self.optimizing = False
        self.awaited: list[tuple[int, list[Collective]]] = []  # sums of gradients, and the graph node that needs each
        self.owner = ""  # the module whose parameter the optimizer is at
        self.meshes: dict[Mesh, int] = {}
        self.weights: dict[int, Weight] = {}
        self.has_data = False
        self.moving: dict[int, Draft] = {}  # what moves tensors, by the ids of the tensors
        self.unmarked = False  # whether gradients may have been made since they were looked for

    # What calls say

    def begin_call(self, call: Any, where: str, tensors: Sequence[Tensor]) -> None:
        """A planned call is about to run on the arrays of these tensors."""
        self.has_data = self.has_data or any(_has_data(each) for each in tensors)
        self._leave_backward()
        mesh = self.number_of(call.mesh)
        draft = Called(call.call.op, self._weigh(call), self._phase(), self.modules.path, where, self.kernel, mesh)
        for tensor, topology, wanted in zip(tensors, call.call.operands, call.ins, strict=True):
            held = self.memory.hold_tensor(tensor, topology)
            draft.reads[held] = None
            draft.operand_storages.append(held)
            if wanted.local_bytes > topology.local_bytes:
                name = f"{draft.op} {wanted.notation}"
                draft.gathered[held] = self.memory.add_gathered(name, wanted.local_bytes, draft), wanted
        self._belong(draft)
        self._begin(draft)

    def _begin(self, draft: Called) -> None:
        self.drafts.append(draft)
        self.begun.append(private.next_sequence_number())
        self.called.append(draft)
        self.current = draft

    def end_call(self, results: Sequence[Any]) -> None:
        """The call has run; its results lie as the plan says."""
        draft = self.current
        if draft is None:
            return
        self._end(draft)
        plan: Plan = self.calls[-1][0]
        draft.operands = tuple(each.notation for each in plan.call.operands)
        draft.results = tuple(each.notation for each in plan.outs)
        draft.dtype = draft.dtype or _widest(plan.ins) or plan.outs[0].dtype
        draft.loads = [_load_of_call(draft)]
        for array, topology, raw in zip(results, plan.outs, plan.raw, strict=True):
            held = self.memory.hold(array, draft.op)
            draft.writes[held] = None
            if held not in draft.reads:
                held.place(layout_of(topology), draft.mesh)
                held.name = f"{draft.op} {topology.notation}"
                held.module = draft.module if self.optimizing else ""
            if raw.local_bytes > topology.local_bytes:
                buffer = self.memory.add_buffer(f"{draft.op} {raw.notation}", raw.local_bytes, draft)
                buffer.made, buffer.freed = draft.first, self.kernel - 1

    def begin_fallback(self, name: str, where: str, tensors: Sequence[Tensor]) -> None:
        """A function without a rule: each device gathers its operands and does all of it."""
        self._leave_backward()
        mesh = self.number_of(tensors[0].mesh) if tensors else 0
        draft = Called(name, Weight(), self._phase(), self.modules.path, where, self.kernel, mesh)
        draft.operands = tuple(each.topology.notation for each in tensors)
        for tensor in tensors:
            whole, held = tensor.topology.replicated, self.memory.hold_tensor(tensor, tensor.topology)
            if whole.local_bytes > tensor.topology.local_bytes:
                buffer = self.memory.add_gathered(f"{name} {whole.notation}", whole.local_bytes, draft)
                draft.gathered[held] = buffer, whole
        self._begin(draft)

    def end_fallback(self) -> None:
        """It has run, or failed."""
        if self.current is not None:
            self._end(self.current)

    def _end(self, draft: Called) -> None:
        self.current, draft.last = None, self.kernel
        for buffer, _ in draft.gathered.values():
            buffer.freed = max(buffer.made, self.kernel - 1)

    def abandon_call(self) -> None:
        """The call did not come to its end; what it did so far is kept."""
        self.current = None

    def note_tensor(self, tensor: Tensor) -> None:
        """A tensor is about to be used: it is on the devices, whether or not a call has used it."""
        self.memory.hold_tensor(tensor, tensor.topology)

    def note_events(self, events: Sequence[Event], of: Any = None, first: bool = False) -> None:
        """Collectives, at the node that causes them or as nodes of their own."""
        super().note_events(events, of, first)
        collectives = [event.collective for event in events]
        if not collectives:
            return
        if self.current is not None:
            moved = _moved_operands(self.current)
            self.current.before += zip(collectives, moved, strict=False)
            self.current.after += collectives[len(moved) :]
        elif of is not None and not isinstance(of, torch.Tensor):
            self.awaited.append((of._sequence_nr(), collectives))
        elif of is not None and (draft := self._backward_node()) is not None:
            if isinstance(of, Tensor):
                self._scatter(draft, events, of)
            else:
                self._gather_again(draft, collectives, of)
        elif of is None and (draft := self._backward_node()) is not None:
            draft.before += [(each, None) for each in collectives if first]
            draft.after += [each for each in collectives if not first]
        else:
            self._add_movement(events, of if isinstance(of, Tensor) else None)

    def _gather_again(self, draft: Draft, collectives: Sequence[Collective], leaf: torch.Tensor) -> None:
        """Backward needs what forward gathered and did not keep."""
        held, call = self.memory.hold(leaf, draft.op), draft.gradient_of
        draft.before += [(each, held) for each in collectives]
        draft.reads[held] = None
        if call is not None and held in call.gathered:
            whole = call.gathered[held][1]
            call.gathered[held] = (
                self.memory.add_gathered(f"{call.op} {whole.notation}", whole.local_bytes, draft),
                whole,
            )

    def _scatter(self, draft: Draft, events: Sequence[Event], leaf: Tensor) -> None:
        """The gradient of a leaf goes home: scattered while backward goes on, or at once."""
        if not any(event.kind == "reduce_scatter" for event in events):
            draft.after += [event.collective for event in events]
            return
        sent = Draft("scatter of gradients", "backward", draft.module, draft.where, self.kernel, draft.mesh)
        sent.after, sent.dtype, sent.is_gradient_sum = (
            [event.collective for event in events],
            events[0].collective.dtype,
            True,
        )
        sent.operands = sent.results = (leaf.topology.notation,)
        draft.scatters.append((sent, self.memory.hold_tensor(leaf, leaf.topology)))

    def _add_movement(self, events: Sequence[Event], of: Tensor | None) -> None:
        """A redistribution, an explicit collective, or the sum of a leaf's gradient."""
        event = events[0]
        phase = event.phase if event.phase != "forward" else self._phase()
        draft = Draft(event.call, phase, self.modules.path, event.where, self.kernel)
        draft.after, draft.dtype = [each.collective for each in events], event.collective.dtype
        if of is not None:
            array = of._data
            if event.phase == "backward" and array.grad is not None:
                array, draft.is_gradient_sum, draft.op = array.grad, True, "sum of gradients"
                draft.module = self.modules.name_of(of).rpartition(".")[0]
            held = self.memory.hold(array, draft.op)
            draft.mesh = self.number_of(of.mesh)
            held.place(layout_of(of.topology), draft.mesh)
            draft.operands = draft.results = (of.topology.notation,)
            draft.reads[held] = draft.writes[held] = None
            if draft.is_gradient_sum and numel(of.topology.local_shape) < LARGE and not of.mesh.is_split:
                self.memory.add_to_bucket(of.topology.local_bytes, draft)
            self.moving[id(of)] = draft
        self.drafts.append(draft)

    def note_move(self, tensor: Tensor, target: Topology, data: torch.Tensor) -> None:
        """A tensor has gone to another mesh: its array there comes of what was moved."""
        draft = self.moving.pop(id(tensor), None)
        if target.mesh == tensor.mesh:
            return
        held = self.memory.hold(data, "redistribute")
        held.place(layout_of(target), self.number_of(target.mesh))
        held.name = f"redistribute {target.notation}"
        if draft is not None:
            draft.writes[held] = None

    # What kernels do

    def see(self, kernel: Kernel) -> None:
        """A kernel has run."""
        if kernel.is_view or (kernel.name == "_to_copy" and self.memory.stand_for(kernel)):
            return
        draft = self._draft_for(kernel)
        read = [self.memory.hold(each, kernel.name) for each in kernel.inputs]
        made = [
            self.memory.make(each, kernel.name, draft, self._share_of(draft, each, i, kernel, read))
            for i, each in enumerate(kernel.fresh)
        ]
        if draft is None:
            return
        written = [self.memory.hold(each, kernel.name) for each in kernel.written]
        draft.reads.update(dict.fromkeys(read))
        draft.writes.update(dict.fromkeys([*made, *written]))
        if draft.gradient_of is not None:
            self.memory.use_gathered(draft.gradient_of, read)
        elif draft.call is None:
            self._belong(draft)
        self._count(
            draft, kernel, read, [*zip(kernel.fresh, made, strict=True), *zip(kernel.written, written, strict=True)]
        )
        self.kernel += 1
        draft.last = self.kernel

    def _draft_for(self, kernel: Kernel) -> Draft | None:
        """The node that a kernel belongs to; None for one that only the host sees."""
        draft = self.current or self._backward_node()
        if draft is not None or not self.memory.knows(kernel.inputs):
            return draft
        self._leave_backward()
        draft = Draft(kernel.name.strip("_"), self._phase(), self.modules.path, where(), self.kernel)
        draft.mesh = self.memory.mesh_of(kernel.inputs)
        draft.operands = tuple(f"{short_name(each.dtype)}{list(each.shape)}" for each in kernel.inputs[:4])
        draft.results = tuple(f"{short_name(each.dtype)}{list(each.shape)}" for each in kernel.fresh[:4])
        self.drafts.append(draft)
        return draft

    def _backward_node(self) -> Draft | None:
        """The node of backward that is running; kernels of one call follow each other."""
        running = private.current_node()
        if running is None:
            return None
        self.unmarked = True
        call = self._call_numbered(running._sequence_nr())
        if self.backward is None or (call is not None and call is not self.backward.gradient_of):
            self.backward = self._begin_backward(call, running.name())
        if call is not None:
            self._await_sums(self.backward, running._sequence_nr())
        return self.backward

    def _await_sums(self, draft: Draft, number: int) -> None:
        """Gradients that several uses of a value add up are summed over the devices when the last use has contributed.

        Nodes of the graph run in the order of their numbers, the last first, so it has when the one runs that made the
        value, or any before that.
        """
        if not self.awaited:
            return
        for needed, collectives in self.awaited:
            if needed >= number:
                use = self._last_use(needed)
                if use is not None:
                    use.after += collectives
                else:
                    draft.before += [(each, None) for each in collectives]
        self.awaited = [each for each in self.awaited if each[0] < number]

    def _last_use(self, number: int) -> Draft | None:
        """The last node of backward that worked on the gradient of what a graph node made."""
        made = self._call_numbered(number)
        values = made.writes if made is not None else ()
        for draft in reversed(self.drafts):
            call = draft.gradient_of
            if call is not None and call is not made and any(each in values for each in call.operand_storages):
                return draft
            if draft is made:
                break
        return None

    def _call_numbered(self, number: int) -> Called | None:
        """The call that made a node of the graph, by its number."""
        place = bisect.bisect_right(self.begun, number) - 1 if number < _LEAF else -1
        return self.called[place] if place >= 0 else None

    def _begin_backward(self, call: Called | None, name: str) -> Draft:
        if call is None:
            draft = Draft(name.rpartition("::")[2], "backward", self.modules.path, "unknown line", self.kernel)
        else:
            draft = Draft(call.op, "backward", call.module, call.where, self.kernel, call.mesh)
            draft.operands, draft.results, draft.dtype = call.results, call.operands, call.dtype
        draft.gradient_of = call
        self.drafts.append(draft)
        return draft

    def _leave_backward(self) -> None:
        """Whatever comes now is no longer backward: what that left are gradients."""
        if private.current_node() is None:
            if self.backward is not None:
                self._await_sums(self.backward, 0)
            self.backward = None
            if self.unmarked:
                self._mark_gradients()

    def _share_of(
        self, draft: Draft | None, array: torch.Tensor, place: int, kernel: Kernel, read: Sequence[Held]
    ) -> float | None:
        """What one device holds of an array that a kernel has made: from its call, or from its own operands."""
        call = draft.call if draft is not None else None
        share = call.weight.share_of(tuple(array.shape)) if call is not None else None
        return self.memory.share_like(array, place, kernel.inputs, read) if share is None else share

    def _count(
        self, draft: Draft, kernel: Kernel, read: Sequence[Held], written: Sequence[tuple[torch.Tensor, Held]]
    ) -> None:
        """The arithmetic and the traffic of a kernel, on one device."""
        flops, call = kernel.flops, draft.call
        share = call.weight.share if call is not None else max((each.share for each in read), default=1.0)
        touched = [*zip(kernel.inputs, read, strict=True), *written] if kernel.name not in EMPTY else []
        whole = call is not None and call.weight.plan is None
        traffic = sum(
            min(array.numel() * array.element_size(), held.whole) * (1.0 if whole else held.share)
            for array, held in touched
        )
        draft.kernels.append(kernel.name)
        draft.loads.append(Load(flops * share, traffic))
        if draft.phase != "recompute":
            draft.model_flops += flops * (call.weight.copies if call is not None else 1)
        if flops or not draft.dtype:
            draft.dtype = kernel.dtype or draft.dtype

    # What happens around calls

    def begin_step(self, optimizer: Any, *_: object) -> None:
        """An optimizer is about to step."""
        self._leave_backward()
        self._mark_gradients()
        self.memory.mark_state(optimizer)
        self.optimizing, self.owner = True, ""

    def end_step(self, optimizer: Any, *_: object) -> None:
        """An optimizer has stepped: what it keeps is its state."""
        self.optimizing = False
        self.memory.mark_state(optimizer)

    def _belong(self, draft: Draft) -> None:
        """A call of an optimizer belongs to the module whose parameter it works on, or worked on last."""
        if not self.optimizing or draft.module:
            return
        owners = {each.module for each in draft.reads if each.module}
        if len(owners) == 1:
            self.owner = owners.pop()
        draft.module = "" if owners else self.owner

    def _mark_gradients(self) -> None:
        self.unmarked = False
        self.memory.mark_gradients()

    def _phase(self) -> str:
        if self.optimizing:
            return "optimizer"
        return "recompute" if private.current_node() is not None else "forward"

    def _weigh(self, plan: Plan) -> Weight:
        """What a plan means for one device; equal calls have the same plan, which stays alive with its id here."""
        if id(plan) not in self.weights:
            self.weights[id(plan)] = PlannedWeight(plan)
        return self.weights[id(plan)]

    def number_of(self, mesh: Mesh) -> int:
        """The number of a mesh."""
        return self.meshes.setdefault(mesh, len(self.meshes))

    def graph(self) -> StepGraph:
        """What was recorded, as values."""
        self._leave_backward()
        self._mark_gradients()
        drafts = [one for each in self.drafts if each.is_something for one in (each, *self._scatters_of(each))]
        for number, draft in enumerate(drafts):
            draft.number = number
        numbers = {held: number for number, held in enumerate(self.memory.counted())}
        phases = Phases(drafts)
        storages = tuple(held.finish(number, phases) for held, number in numbers.items())
        nodes = tuple(draft.finish(numbers) for draft in drafts)
        return StepGraph(nodes, storages, tuple(self.meshes), self.kernel, self.has_data)

    def _scatters_of(self, draft: Draft) -> Iterator[Draft]:
        """The scatters of the gradients that a node of backward has computed."""
        for sent, leaf in draft.scatters:
            sent.first = sent.last = draft.last
            found = [each for each in draft.writes if each.whole == leaf.whole]
            sent.reads = dict.fromkeys(found or draft.writes)
            sent.writes = dict.fromkeys(found)
            yield sent


def _load_of_call(draft: Called) -> Load:
    """A planned call counts as one kernel, with the arithmetic of the kernels that ran."""
    counted, touched = sum(load.flops for load in draft.loads), sum(load.bytes for load in draft.loads)
    load = draft.weight.load
    return Load(counted or load.flops, load.bytes or touched)


def _moved_operands(draft: Called) -> list[Held]:
    """For each collective that brings an operand to a call, the operand's storage."""
    plan = draft.weight.plan
    if plan is None:
        return []
    rows = zip(draft.operand_storages, plan.call.operands, plan.ins, strict=True)
    return [held for held, source, target in rows for _ in moves(source, target, plan.machine)]


def _widest(topologies: Sequence[Topology]) -> str:
    """The dtype that arithmetic on operands is done in."""
    return max((each.dtype for each in topologies if is_floating(each.dtype)), key=itemsize, default="")


def _has_data(tensor: Tensor) -> bool:
    return not tensor._data.is_meta and tensor._data.dtype.is_floating_point


def changes_nothing(function: Any, args: Any) -> bool:
    """Whether a function changes a list of arrays in place that have no data: torch would walk through all of them."""
    name = function._schema.name
    return name.startswith("aten::_foreach_") and name.endswith("_") and all(each.is_meta for each in args[0])


class Unchanged(private.TorchDispatchMode):
    """Lists of arrays without data are not walked through to change them: optimizers of dry runs are quicker."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, Tensor) for each in types):
            return NotImplemented
        return None if changes_nothing(function, args) else function(*args, **(kwargs or {}))


class Kernels(private.TorchDispatchMode):
    """Sees every kernel on arrays; what is called with tensors of ours comes again with their arrays."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, Tensor) for each in types):
            return NotImplemented
        result = None if changes_nothing(function, args) else function(*args, **(kwargs or {}))
        if not WORLD.is_muted:  # what stands in for other stages of a pipeline does not happen
            self.recorder.see(Kernel(function, args, kwargs or {}, result))
        return result


def _here(function: Callable[..., None]) -> Callable[..., None]:
    """A hook for modules and optimizers of this thread: torch calls it in all."""
    thread = threading.get_ident()

    def hook(*args: object) -> None:
        if threading.get_ident() == thread:
            function(*args)

    return hook


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record a step: what runs inside, as a graph at the end.

    >>> import meshloom as loom
    >>> x = loom.ones(8, 4, mesh=loom.open_mesh((2,), axes=("dp",)), placements="S(0)")
    >>> with recording() as step:
    ...     total = (x * 2).sum()
    >>> [(node.op, node.kernels, node.traffic, node.bytes) for node in step.graph().nodes]
    [('mul', ('mul',), 128, 0), ('sum', ('sum',), 68, 4)]
    """
    recorder = Recorder()
    with ExitStack() as stack:
        for hook in (
            register_module_forward_pre_hook(_here(recorder.modules.enter)),
            register_module_forward_hook(_here(recorder.modules.leave), always_call=True),
            register_optimizer_step_pre_hook(_here(recorder.begin_step)),
            register_optimizer_step_post_hook(_here(recorder.end_step)),
        ):
            stack.callback(hook.remove)
        stack.enter_context(state.changed(logs=(*state.logs, recorder)))
        stack.enter_context(KnownNumbers())
        stack.enter_context(Kernels(recorder))
        yield recorder
