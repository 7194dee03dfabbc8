"""A step while it runs, written down as a graph: every kernel on stored arrays, in forward, backward and optimizer.

Planned calls say what they are (`begin_call`, `end_call`); a dispatch mode of torch sees the kernels that run on the
arrays, on `meta` and on data alike. A kernel of backward belongs to the call whose graph node is running: nodes of the
graph are numbered as they are made, so the call is the last one that had begun by then. A storage is followed by a weak
reference until nobody holds it. Nothing of this is there unless somebody records.
"""

from __future__ import annotations

import bisect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from meshloom.collectives import Collective
from meshloom.cost import Load, load_of
from meshloom.cost.step import Node, StepGraph, Storage
from meshloom.engines import private
from meshloom.engines.layout import short_name
from meshloom.mesh import Mesh
from meshloom.ops import find
from meshloom.placement import Topology
from meshloom.planner import Plan, moves
from meshloom.runtime import Event, Log, state, where
from meshloom.tensor.base import Tensor
from meshloom.tensor.layouts import Layout, infer_share, layout_of
from meshloom.types import itemsize

# Kernels that give memory and touch none of it.
_EMPTY = frozenset("empty empty_like new_empty new_empty_strided empty_strided".split())


class Held:
    """A storage while it is recorded; several arrays may stand for it, such as a table and its copy without data."""

    __slots__ = (
        "bytes", "freed", "held_for", "is_counted", "is_exact", "keys", "layout", "made", "module", "name", "node",
        "share", "whole",
    )  # fmt: skip

    def __init__(self, name: str, whole: int, made: int, node: Draft | None) -> None:
        self.name, self.whole, self.made, self.node = name, whole, made, node
        self.freed: int | None = None
        self.held_for = self.module = ""
        self.share, self.layout = 1.0, Layout((), ())
        self.is_counted = self.is_exact = False  # on the devices at all; placed by a topology and not inferred
        self.keys = 0
        self.bytes: int | None = None

    def place(self, layout: Layout) -> None:
        """Say exactly how it is spread over devices."""
        self.layout, self.share, self.is_exact, self.is_counted = layout, layout.share, True, True

    @property
    def local(self) -> int:
        """The bytes on one device."""
        return round(self.whole * self.share) if self.bytes is None else self.bytes


class Draft:
    """A node while it is recorded."""

    def __init__(self, op: str, phase: str, module: str, line: str, first: int) -> None:
        self.op, self.phase, self.module, self.where, self.first = op, phase, module, line, first
        self.last = first
        self.operands: tuple[str, ...] = ()
        self.results: tuple[str, ...] = ()
        self.kernels: list[str] = []
        self.loads: list[Load] = []
        self.dtype = ""
        self.model_flops = 0.0
        self.before: list[tuple[Collective, Held | None]] = []
        self.after: list[Collective] = []
        self.reads: dict[Held, None] = {}
        self.writes: dict[Held, None] = {}
        self.gradient_of: Called | None = None
        self.is_gradient_sum = False
        self.number = -1


class Called(Draft):
    """The node of a planned call, and what its backward needs to know of it."""

    def __init__(self, plan: Plan, phase: str, module: str, line: str, first: int) -> None:
        super().__init__(plan.call.op, phase, module, line, first)
        self.plan = plan
        self.share, self.load, self.layouts = _weigh(plan)
        self.gathered: dict[Held, tuple[Held, Topology]] = {}  # operands that are needed larger than they are kept
        self.shares: dict[tuple[int, ...], float | None] = {}
        self.operand_storages: list[Held] = []

    def share_of(self, shape: tuple[int, ...]) -> float | None:
        """What one device holds of an array inside of the call or of its backward."""
        if shape not in self.shares:
            self.shares[shape] = infer_share(shape, self.layouts)
        return self.shares[shape]


_WEIGHED: dict[int, tuple[Plan, float, Load, tuple[Layout, ...]]] = {}


def _weigh(plan: Plan) -> tuple[float, Load, tuple[Layout, ...]]:
    """Which part of a plan's arithmetic the fullest device does, all that it does, and the layouts of its arrays."""
    found = _WEIGHED.get(id(plan))
    if found is None or found[0] is not plan:
        choices = find(plan.call.op).rule(plan.call)
        load = load_of(plan.call, choices, plan.rows, [each.dtype for each in plan.outs])
        share = load.flops / choices.flops if choices.flops else 1.0
        placed = (*plan.call.operands, *plan.outs, *plan.ins, *plan.raw)
        layouts = dict.fromkeys(layout_of(each) for topology in placed for each in (topology, topology.reduced))
        if len(_WEIGHED) >= 1 << 14:
            _WEIGHED.clear()
        found = _WEIGHED[id(plan)] = (plan, share, load, tuple(layouts))
    return found[1:]


class Recorder(Log):
    """A log that keeps the whole step: nodes with their kernels, storages with their lives."""

    def __init__(self) -> None:
        super().__init__()
        self.drafts: list[Draft] = []
        self.kernel = 0  # the number of the next kernel
        self.held: dict[int, Held] = {}  # storages that are alive, by address
        self.all_held: list[Held] = []
        self.watches: dict[int, weakref.ref[Any]] = {}
        self.begun: list[int] = []  # for each planned call, the number of the next graph node when it began
        self.called: list[Called] = []
        self.current: Called | None = None
        self.backward: Draft | None = None  # the node of backward that is growing
        self.optimizing = False
        self.leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self.modules = Modules(self)
        self.mesh: Mesh | None = None
        self.has_data = False
        self.unmarked = False  # whether gradients may have been made since they were looked for

    # What calls say

    def begin_call(self, call: Any, where: str, tensors: Sequence[Tensor]) -> None:
        """A planned call is about to run on the arrays of these tensors."""
        self._see_mesh(call.mesh)
        self._leave_backward()
        draft = Called(call, self._phase(), self.modules.path, where, self.kernel)
        for i, (tensor, topology) in enumerate(zip(tensors, call.call.operands, strict=True)):
            held = self._hold_tensor(tensor, topology)
            draft.reads[held] = None
            draft.operand_storages.append(held)
            if call.ins[i].local_bytes > topology.local_bytes:
                self._gather(draft, held, call.ins[i])
        self._belong(draft)
        self.drafts.append(draft)
        self.begun.append(private.next_sequence_number())
        self.called.append(draft)
        self.current = draft

    def end_call(self, results: Sequence[Any]) -> None:
        """The call has run; its results lie as the plan says."""
        draft, self.current = self.current, None
        if draft is None:
            return
        plan: Plan = self.calls[-1][0]
        draft.operands = tuple(each.notation for each in plan.call.operands)
        draft.results = tuple(each.notation for each in plan.outs)
        draft.dtype = draft.dtype or _widest(plan.ins) or plan.outs[0].dtype
        draft.last = self.kernel
        for array, topology, raw in zip(results, plan.outs, plan.raw, strict=True):
            held = self._hold(array, draft.op)
            if held not in draft.reads:
                held.place(layout_of(topology))
                held.name = f"{draft.op} {topology.notation}"
                held.module = draft.module if self.optimizing else ""
            draft.writes[held] = None
            if raw.local_bytes > topology.local_bytes:
                self._add_buffer(f"{draft.op} {raw.notation}", raw.local_bytes, draft, draft.first, self.kernel - 1)
        draft.loads = [self._load_of_call(draft)]

    def _belong(self, draft: Draft) -> None:
        """A call of an optimizer belongs to the module whose parameter it works on."""
        if self.optimizing and not draft.module:
            draft.module = next((each.module for each in draft.reads if each.module), "")

    def _load_of_call(self, draft: Called) -> Load:
        """A planned call counts as one kernel, with the arithmetic of the kernels that ran."""
        counted, touched = sum(load.flops for load in draft.loads), sum(load.bytes for load in draft.loads)
        return Load(counted or draft.load.flops, draft.load.bytes or touched)

    def _gather(self, draft: Called, held: Held, topology: Topology) -> None:
        """An operand as the call needs it: a buffer that backward may use again."""
        buffer = self._add_buffer(f"{draft.op} {topology.notation}", topology.local_bytes, draft, self.kernel, None)
        buffer.held_for, buffer.freed = "gathered", self.kernel
        draft.gathered[held] = buffer, topology

    def _add_buffer(self, name: str, size: int, node: Draft, made: int, freed: int | None) -> Held:
        """Memory that the devices need and the stored arrays do not: there a gather is the array as it is."""
        buffer = Held(name, size, made, node)
        buffer.is_counted, buffer.bytes, buffer.freed = True, size, freed
        self.all_held.append(buffer)
        return buffer

    def note_events(self, events: Sequence[Event], of: Any = None, first: bool = False) -> None:
        """Collectives, at the node that causes them or as nodes of their own."""
        super().note_events(events, of, first)
        collectives = [event.collective for event in events]
        if not collectives:
            return
        if self.current is not None:
            moved = self._moved_operands(self.current)
            self.current.before += zip(collectives, moved, strict=False)
            self.current.after += collectives[len(moved) :]
        elif isinstance(of, Tensor):
            self._add_movement(events, of, first)
        elif (draft := self._backward_node()) is not None:
            draft.before += [(each, None) for each in collectives if first]
            draft.after += [each for each in collectives if not first]
        else:
            self._add_movement(events, None, first)

    def _moved_operands(self, draft: Called) -> list[Held]:
        """For each collective that brings an operand to a call, the operand's storage."""
        plan = draft.plan
        rows = zip(draft.operand_storages, plan.call.operands, plan.ins, strict=True)
        return [held for held, source, target in rows for _ in moves(source, target, plan.machine)]

    def _add_movement(self, events: Sequence[Event], of: Tensor | None, first: bool) -> None:
        """A redistribution, an explicit collective, or the sum of a leaf's gradient."""
        event = events[0]
        draft = Draft(event.call, event.phase if event.phase != "forward" else self._phase(), "", "", self.kernel)
        draft.module, draft.where = self.modules.path, event.where
        draft.after = [each.collective for each in events]
        draft.dtype = event.collective.dtype
        if of is not None:
            array = of._data
            if event.phase == "backward" and array.grad is not None:
                array, draft.is_gradient_sum, draft.op = array.grad, True, "sum of gradients"
                draft.module = self.modules.owner(of)
            held = self._hold(array, draft.op)
            held.place(layout_of(of.topology))
            draft.operands = draft.results = (of.topology.notation,)
            draft.reads[held] = draft.writes[held] = None
        self.drafts.append(draft)

    # What kernels do

    def see(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """A kernel has run."""
        inputs, outputs = [*_arrays(args), *_arrays(kwargs.values())], [*_arrays((result,))]
        known = {_address(each): each for each in inputs}
        fresh = [each for each in outputs if _address(each) not in known]
        if not fresh and not function._schema.is_mutable:
            return  # a view
        name = function._schema.name.partition("::")[2]
        draft = self._draft_for(name, inputs)
        if name == "_to_copy" and self._stand_for(inputs, fresh):
            return
        before = [self._hold(each, name) for each in inputs]
        if draft is None:
            for i, each in enumerate(fresh):
                self._make(each, name, None, self._shares_like(before, inputs, each, i))
            return
        for held in before:
            draft.reads[held] = None
            if draft.gradient_of is not None:
                self._use_gathered(draft.gradient_of, held)
        made = [self._make(each, name, draft, self._share_of(draft, each, i, before, inputs)) for i, each in
                enumerate(fresh)]  # fmt: skip
        for held in made if made else before[:1]:
            draft.writes[held] = None
        self._count(draft, name, function, args, kwargs, result, (inputs, before), (fresh, made))
        self.kernel += 1
        draft.last = self.kernel

    def _draft_for(self, name: str, inputs: Sequence[torch.Tensor]) -> Draft | None:
        """The node that a kernel belongs to; None for one that only the host sees."""
        if self.current is not None:
            return self.current
        draft = self._backward_node()
        if draft is not None:
            return draft
        if not any((held := self.held.get(_address(each))) is not None and held.is_counted for each in inputs):
            return None
        self._leave_backward()
        draft = Draft(name.strip("_"), self._phase(), self.modules.path, where(), self.kernel)
        draft.operands = tuple(f"{short_name(each.dtype)}{list(each.shape)}" for each in inputs[:4])
        self.drafts.append(draft)
        return draft

    def _backward_node(self) -> Draft | None:
        """The node of backward that is running; kernels of one call follow each other."""
        running = private.current_node()
        if running is None:
            return None
        self.unmarked = True
        call = self._call_of(running)
        if self.backward is None or (call is not self.backward.gradient_of and call is not None):
            self.backward = self._begin_backward(call, running.name())
        return self.backward

    def _call_of(self, node: Any) -> Called | None:
        number = node._sequence_nr()
        if number >= 1 << 63:  # a leaf's own node, which is none of a call
            return None
        place = bisect.bisect_right(self.begun, number) - 1
        return self.called[place] if place >= 0 else None

    def _begin_backward(self, call: Called | None, name: str) -> Draft:
        if call is None:
            draft = Draft(name.rpartition("::")[2], "backward", self.modules.path, "unknown line", self.kernel)
        else:
            draft = Draft(call.op, "backward", call.module, call.where, self.kernel)
            draft.operands, draft.results, draft.dtype = call.results, call.operands, call.dtype
        draft.gradient_of = call
        self.drafts.append(draft)
        return draft

    def _leave_backward(self) -> None:
        """Backward is over, or interrupted by a call: what it left are gradients."""
        if private.current_node() is None:
            self.backward = None
            if self.unmarked:
                self.mark_gradients()

    def _use_gathered(self, call: Called, held: Held) -> None:
        """Backward reads an operand that was gathered: the buffer was kept until now."""
        if held in call.gathered:
            call.gathered[held][0].freed = self.kernel

    def _share_of(
        self, draft: Draft, array: torch.Tensor, place: int, before: Sequence[Held], inputs: Sequence[torch.Tensor]
    ) -> float | None:
        """What one device holds of an array that a kernel has made."""
        call = draft if isinstance(draft, Called) else draft.gradient_of
        share = call.share_of(tuple(array.shape)) if isinstance(call, Called) else None
        return self._shares_like(before, inputs, array, place) if share is None else share

    def _shares_like(
        self, before: Sequence[Held], inputs: Sequence[torch.Tensor], array: torch.Tensor, place: int
    ) -> float | None:
        """The same from the kernel's own operands, the one at the same place of a list first."""
        pairs = [pair for pair in zip(before, inputs, strict=True) if pair[0].is_counted]
        elements = array.numel()
        same = [held for held, each in pairs if each.numel() == elements]
        at_place = [held for held, each in zip(before[place:], inputs[place:], strict=True) if held in same]
        if same:
            return (at_place or same)[0].share
        return infer_share(tuple(array.shape), [held.layout for held, _ in pairs if held.layout.stored])

    def _count(
        self,
        draft: Draft,
        name: str,
        function: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        read: tuple[Sequence[torch.Tensor], Sequence[Held]],
        made: tuple[Sequence[torch.Tensor], Sequence[Held]],
    ) -> None:
        """The arithmetic and the traffic of a kernel, on one device."""
        counter = _FLOPS.get(function._overloadpacket)
        total = float(counter(*args, **kwargs, out_val=result)) if counter is not None else 0.0
        call = draft if isinstance(draft, Called) else draft.gradient_of
        share = call.share if isinstance(call, Called) else max((each.share for each in read[1]), default=1.0)
        traffic = 0.0
        for arrays, helds in () if name in _EMPTY else (read, made):
            for array, held in zip(arrays, helds, strict=True):
                traffic += min(array.numel() * array.element_size(), held.whole) * held.share
        draft.kernels.append(name)
        draft.loads.append(Load(total * share, traffic))
        if draft.phase != "recompute":
            draft.model_flops += total
        if total or not draft.dtype:
            draft.dtype = _widest_array(read[0]) or draft.dtype

    # Storages

    def _hold_tensor(self, tensor: Tensor, topology: Topology) -> Held:
        """The storage of an operand, which lies as its topology says."""
        array = tensor._data
        held = self._hold(array, "tensor")
        if not held.is_exact:
            held.place(layout_of(topology))
            if held.name == "tensor":
                held.name = topology.notation
        is_leaf = array.requires_grad and array.is_leaf
        if tensor._is_param or (is_leaf and held.made < 0):
            held.held_for = "parameters"
            held.name = self.modules.names.get(_address(array), held.name)
            held.module = self.modules.owner(tensor)
        if is_leaf:
            self.leaves.setdefault(id(array), weakref.ref(array))
        return held

    def _hold(self, array: torch.Tensor, name: str) -> Held:
        """The storage of an array; one that nobody saw before was there before."""
        return self.held.get(_address(array)) or self._start(array, Held(name, _size(array), -1, None))

    def _make(self, array: torch.Tensor, name: str, draft: Draft | None, share: float | None) -> Held:
        held = self._start(array, Held(name, _size(array), self.kernel, draft))
        if share is not None:
            held.share, held.is_counted = share, True
        held.name = f"{draft.op if draft is not None else name} {short_name(array.dtype)}{list(array.shape)}"
        if draft is not None and draft.gradient_of is not None:
            self._make_gathered(draft, draft.gradient_of, array)
        return held

    def _make_gathered(self, draft: Draft, call: Called, array: torch.Tensor) -> None:
        """The gradient of a gathered operand is whole before it is reduced and scattered."""
        for held, (buffer, topology) in call.gathered.items():
            if array.numel() * array.element_size() == held.whole:
                gradient = self._add_buffer(f"gradient {topology.notation}", buffer.local, draft, self.kernel, None)
                gradient.held_for, gradient.freed = "gathered", self.kernel

    def _start(self, array: torch.Tensor, held: Held) -> Held:
        self.all_held.append(held)
        self._watch(array, held)
        return held

    def _watch(self, array: torch.Tensor, held: Held) -> None:
        """Follow an array's memory until it is freed."""
        address, recorder = _address(array), weakref.ref(self)
        held.keys += 1

        def free(_: object) -> None:
            mine = recorder()
            if mine is not None and mine.held.get(address) is held:
                del mine.held[address], mine.watches[address]
                held.keys -= 1
                if not held.keys:
                    held.freed = mine.kernel - 1

        self.held[address] = held
        self.watches[address] = weakref.ref(array.untyped_storage(), free)

    def _stand_for(self, inputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> bool:
        """Whether a copy is one without data of an array that has some: it stands for the same memory."""
        if len(fresh) != 1 or not fresh[0].is_meta or inputs[0].is_meta:
            return False
        self._watch(fresh[0], self._hold(inputs[0], "tensor"))
        return True

    def hold_parameter(self, tensor: Tensor, name: str) -> None:
        """A parameter of a model that is about to run."""
        self.modules.names.setdefault(_address(tensor._data), name)
        self._hold_tensor(tensor, tensor.topology)

    def mark_gradients(self) -> None:
        """The gradients that leaves have now are what their memory is held for."""
        self.unmarked = False
        for found in list(self.leaves.values()):
            leaf = found()
            if leaf is None or leaf.grad is None:
                continue
            held, of = self._hold(leaf.grad, "gradient"), self.held.get(_address(leaf))
            held.held_for = "gradients"
            if of is not None:
                held.place(of.layout)
                held.name, held.module = f"gradient of {of.name}", of.module

    def begin_step(self, optimizer: Any, *_: object) -> None:
        """An optimizer is about to step."""
        self._leave_backward()
        self.mark_gradients()
        self._mark_state(optimizer)
        self.optimizing = True

    def end_step(self, optimizer: Any, *_: object) -> None:
        """An optimizer has stepped: what it keeps is its state."""
        self.optimizing = False
        self._mark_state(optimizer)

    def _mark_state(self, optimizer: Any) -> None:
        for parameter, table in optimizer.state.items():
            of = self.held.get(_address(parameter._data)) if isinstance(parameter, Tensor) else None
            for key, value in table.items() if isinstance(table, dict) else ():
                if isinstance(value, Tensor):
                    held = self._hold(value._data, "state")
                    held.place(layout_of(value.topology))
                    held.held_for = "optimizer state"
                    held.name = f"{key} of {of.name}" if of is not None else key
                    held.module = of.module if of is not None else ""

    # The whole

    def _phase(self) -> str:
        if self.optimizing:
            return "optimizer"
        return "recompute" if private.current_node() is not None else "forward"

    def _see_mesh(self, mesh: Mesh) -> None:
        if self.mesh is None or math.prod(mesh.shape) > math.prod(self.mesh.shape):
            self.mesh = mesh

    def graph(self) -> StepGraph:
        """What was recorded, as values."""
        self.mark_gradients()
        drafts = [each for each in self.drafts if each.kernels or each.before or each.after or each.writes]
        for number, draft in enumerate(drafts):
            draft.number = number
        counted = [held for held in self.all_held if held.is_counted]
        numbers = {held: number for number, held in enumerate(counted)}
        phases = _Phases(drafts)
        storages = tuple(_storage(held, number, phases) for held, number in numbers.items())
        nodes = tuple(_node(draft, numbers) for draft in drafts)
        return StepGraph(nodes, storages, self.mesh, self.kernel, self.has_data)


class _Phases:
    """When backward began after each kernel: what forward made and is still there then was saved for it."""

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.backward = [draft.first for draft in drafts if draft.phase == "backward" and not draft.is_gradient_sum]

    def held_for(self, held: Held) -> str:
        """What a storage is held for that nobody has marked."""
        if held.held_for:
            return held.held_for
        if held.made < 0:
            return "inputs"
        phase = held.node.phase if held.node is not None else "forward"
        if phase not in ("forward", "recompute"):
            return "temporaries"
        place = bisect.bisect_left(self.backward, held.made)
        begins = self.backward[place] if place < len(self.backward) else None
        is_saved = begins is not None and (held.freed is None or held.freed >= begins)
        return "activations" if is_saved else "temporaries"


def _storage(held: Held, number: int, phases: _Phases) -> Storage:
    node = held.node if held.node is not None and held.node.number >= 0 else None
    return Storage(
        number=number,
        name=held.name,
        held_for=phases.held_for(held),
        bytes=held.local,
        made=held.made,
        freed=held.freed,
        node=node.number if node is not None else None,
        module=held.module or (node.module if node is not None else ""),
        where=node.where if node is not None else "",
    )


def _node(draft: Draft, numbers: dict[Held, int]) -> Node:
    of = draft.gradient_of
    return Node(
        number=draft.number,
        op=draft.op,
        phase=draft.phase,
        module=draft.module,
        where=draft.where,
        operands=draft.operands,
        results=draft.results,
        kernels=tuple(draft.kernels),
        dtype=draft.dtype,
        loads=tuple(draft.loads),
        model_flops=draft.model_flops,
        before=tuple(each for each, _ in draft.before),
        before_of=tuple(numbers.get(held) if held is not None else None for _, held in draft.before),
        after=tuple(draft.after),
        reads=tuple(numbers[each] for each in draft.reads if each in numbers),
        writes=tuple(numbers[each] for each in draft.writes if each in numbers),
        kernel_range=(draft.first, max(draft.last, draft.first)),
        gradient_of=of.number if of is not None and of.number >= 0 else None,
        is_gradient_sum=draft.is_gradient_sum,
    )


class Modules:
    """Which module of the model is running, by its path from the first one that was called."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.paths: dict[int, str] = {}
        self.names: dict[int, str] = {}  # of parameters, by the address of their memory
        self.stack: list[str] = []

    @property
    def path(self) -> str:
        """The path of the module that is running."""
        return self.stack[-1] if self.stack else ""

    def owner(self, tensor: Tensor) -> str:
        """The path of the module that has a parameter."""
        return self.names.get(_address(tensor._data), "").rpartition(".")[0]

    def enter(self, module: torch.nn.Module, *_: object) -> None:
        """A module is called."""
        if id(module) not in self.paths:
            self._read(module)
        self.stack.append(self.paths[id(module)])

    def leave(self, module: torch.nn.Module, *_: object) -> None:
        """It is done."""
        if self.stack:
            self.stack.pop()

    def _read(self, root: torch.nn.Module) -> None:
        """The paths of a module and of all in it, and the names of its parameters."""
        start = f"{self.path}.{type(root).__name__}" if self.path else type(root).__name__
        for name, module in root.named_modules():
            self.paths.setdefault(id(module), f"{start}.{name}" if name else start)
        for name, parameter in root.named_parameters():
            if isinstance(parameter, Tensor):
                self.recorder.hold_parameter(parameter, f"{start}.{name}")


class _Kernels(private.TorchDispatchMode):
    """Sees every kernel on arrays; what is called with tensors of ours comes again with their arrays."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, Tensor) for each in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        self.recorder.see(function, args, kwargs or {}, result)
        return result


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
        hooks: Iterable[Any] = (
            register_module_forward_pre_hook(recorder.modules.enter),
            register_module_forward_hook(recorder.modules.leave, always_call=True),
            register_optimizer_step_pre_hook(recorder.begin_step),
            register_optimizer_step_post_hook(recorder.end_step),
        )
        for hook in hooks:
            stack.callback(hook.remove)
        stack.enter_context(state.changed(logs=(*state.logs, recorder)))
        stack.enter_context(_Kernels(recorder))
        yield recorder


def _arrays(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in values:
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, (list, tuple)):
            yield from _arrays(each)


def _address(array: torch.Tensor) -> int:
    address: int = array.untyped_storage()._cdata
    return address


def _size(array: torch.Tensor) -> int:
    return array.untyped_storage().nbytes()


def _widest(topologies: Iterable[Topology]) -> str:
    """The dtype that arithmetic on operands is done in: the widest of the floating ones."""
    dtypes = [each.dtype for each in topologies if each.dtype[0] in "bfc" and each.dtype != "bool"]
    return max(dtypes, key=itemsize, default="")


def _widest_array(arrays: Iterable[torch.Tensor]) -> str:
    floating = [each.dtype for each in arrays if each.dtype.is_floating_point or each.dtype.is_complex]
    return short_name(max(floating, key=lambda each: each.itemsize)) if floating else ""


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    flops: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return flops


def _attention_back_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    flops: int = sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)
    return flops


# torch's own formulas, and those of the kernel that CPU and `meta` take for attention
_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    private.fused_attention: _attention_flops,
    private.fused_attention_backward: _attention_back_flops,
}
