"""Weights that processes hold in shards: gathered just before a use, freed after it, gathered again in backward.

A leaf of which a call needs more than its shard is a `Weight`. What a call gathers is not kept for backward: where
autograd would save the gathered array, or a view of it, it saves a `Recipe`, which gathers again when backward asks
(`run_without_keeping`). The gradient of what was gathered is reduce-scattered (`comms.scatters`).

`ORDER` learns which weight follows which, and gathers ahead: when a weight is taken, the next ones are started, and
small ones travel together. What is started follows from the order of the calls alone, which is the same on every
process. A guess that turns out wrong is waited for and thrown away, on all processes alike.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from meshloom.collectives import Collective
from meshloom.comms import wire
from meshloom.comms.gradients import GatherGradient, ReduceScatter
from meshloom.comms.group import WORLD
from meshloom.comms.redistribution import Gather
from meshloom.comms.scatters import SCATTERS
from meshloom.context import Event, state
from meshloom.engines import private
from meshloom.engines.node import Node
from meshloom.errors import GradientError, place_name

SMALL = 1 << 18  # bytes of a gathered weight up to which it travels with others
TOGETHER = 1 << 20  # bytes of small weights that travel together at most
FAR = 64  # weights that are looked ahead for small ones
WAYS = 64  # ways to a weight that are remembered

# ops that autocast runs in the lower precision
LOWERED = {"linear", "matmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "conv1d", "conv2d", "conv3d"}

Way = tuple[bool, "Weight | None"]  # whether in backward, and the weight before the last one


def declare_unit(leaves: Sequence[torch.Tensor]) -> None:
    """Say that the weights of a unit, such as a layer, may be gathered ahead together."""
    size = sum(leaf.nbytes for leaf in leaves)
    for leaf in leaves:
        leaf._unit = size  # type: ignore[attr-defined]


class Weight:
    """A leaf as some of its uses gather it, and which weight came after it."""

    __slots__ = (
        "ahead", "bytes", "call", "device", "dtype", "firsts", "followers", "gather", "is_small", "leaf", "shape",
    )  # fmt: skip

    def __init__(self, leaf: torch.Tensor, gather: Gather) -> None:
        self.leaf, self.gather = weakref.ref(leaf), gather
        self.shape, self.dtype, self.device = leaf.shape, leaf.dtype, leaf.device
        self.bytes = leaf.nbytes * gather.group.processes
        self.is_small = self.bytes <= SMALL  # it travels with others
        self.ahead = max(self.bytes, getattr(leaf, "_unit", 0) * gather.group.processes)  # bytes of its unit
        self.call = ""  # the last call that used it, as a divergence tells of it
        self.firsts: set[bool] = set()  # a pass (in backward or not) began with it: who is not guessed there, so that
        # a loop of passes leaves nothing gathered at the end of one
        self.followers: dict[Way, Weight | None] = {}

    def array(self) -> torch.Tensor:
        """The leaf, or zeros in its place if it is gone: nobody will use it, but others may still have to send theirs.

        When a leaf that nobody holds goes is up to the garbage collector of each process.
        """
        leaf = self.leaf()
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if leaf is None else leaf

    def learn(self, way: Way, follower: Weight | None) -> None:
        """What came after it this time."""
        if len(self.followers) >= WAYS:  # weights of models that come and go lead here
            self.followers.clear()
        self.followers[way] = follower


class Weights(dict[Any, Weight]):
    """Those of a leaf, on the leaf, by the placements that it is gathered from and the axis; a copy of it has none."""

    def __reduce__(self) -> tuple[object, ...]:
        return Weights, ()


def weight_of(leaf: torch.Tensor, gather: Gather) -> Weight:
    """The weight of a leaf, always the same for the same gather."""
    known: Weights | None = getattr(leaf, "_weights", None)
    if known is None:
        known = leaf._weights = Weights()  # type: ignore[attr-defined]
    key = gather.source, gather.axis
    found = known.get(key)
    if found is None or found.leaf() is not leaf:
        found = known[key] = Weight(leaf, gather)
    return found


State = tuple[int, int]  # what tells whether an array was written to: its version, and where it lies


def state_of(leaf: torch.Tensor) -> State:
    """Changes when somebody writes to the array or gives it other memory."""
    return leaf._version, leaf.data_ptr()


class Flight:
    """Weights of one group and dtype that are being gathered in one collective."""

    def __init__(self, weights: Sequence[Weight], leaves: Sequence[torch.Tensor]) -> None:
        self.shapes = [leaf.shape for leaf in leaves]
        self.states = dict(zip(weights, map(state_of, leaves), strict=True))
        sent = leaves[0].detach() if len(leaves) == 1 else torch.cat([leaf.detach().reshape(-1) for leaf in leaves])
        self.places = {weight: place for place, weight in enumerate(weights)}
        self.finish: Callable[[], torch.Tensor] | None = wire.begin_all_gather(sent, weights[0].gather.group)
        self.room: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """What every process sent."""
        if self.finish is not None:
            self.room, self.finish = self.finish(), None
        assert self.room is not None
        return self.room

    def take(self, weight: Weight) -> torch.Tensor:
        """The gathered weight; nothing here keeps it."""
        room, place = self.wait(), self.places[weight]
        if len(self.shapes) == 1:
            self.room = None
            return room
        start = sum(shape.numel() for shape in self.shapes[:place])
        shape = self.shapes[place]
        return room[:, start : start + shape.numel()].reshape(len(room), *shape)


class Order:
    """The order in which weights are gathered, as it was the last time, and what is under way because of it."""

    def __init__(self) -> None:
        self.task = -1
        self.before: Weight | None = None
        self.last: Weight | None = None
        self.guessed: deque[Weight] = deque()
        self.flights: dict[Weight, Flight] = {}
        self.largest = self.largest_now = 0  # bytes of the largest unit, of this pass or the one before; of this pass

    def take(self, weight: Weight, leaf: torch.Tensor) -> torch.Tensor:
        """The shards of every process, stacked; the next weights are on their way when this returns.

        A leaf that is no parameter, such as a batch, comes and goes: it has no place in the order.
        """
        if not (leaf.requires_grad or getattr(leaf, "_is_parameter", False)):
            return wire.all_gather(leaf.detach(), weight.gather.group)
        self._follow(weight)
        flight = self.flights.pop(weight, None)
        if flight is not None and flight.states[weight] != state_of(leaf):
            self.flights[weight] = flight
            self.drop()
            flight = None
        found = wire.all_gather(leaf.detach(), weight.gather.group) if flight is None else flight.take(weight)
        self._begin_next()
        return found

    def drop(self) -> None:
        """Forget what is guessed. What is under way on all processes comes to its end first."""
        self.guessed.clear()
        for flight in dict.fromkeys(self.flights.values()):
            flight.wait()
        self.flights.clear()

    def _follow(self, weight: Weight) -> None:
        """Learn that this weight is the next one."""
        task = private.current_graph_task_id()
        if task != self.task:  # another pass: of backward, or forward again
            if task == -1:
                SCATTERS.drop()
            self._learn(None)
            self.drop()
            self.task, self.before, self.last = task, None, None
            self.largest, self.largest_now = self.largest_now, 0
        if self.last is None:
            weight.firsts.add(task != -1)
        self._learn(weight)
        if self.guessed and self.guessed[0] is weight:
            self.guessed.popleft()
        else:
            self.drop()
        self.before, self.last = self.last, weight
        self.largest_now = max(self.largest_now, weight.ahead)
        self.largest = max(self.largest, self.largest_now)

    def _learn(self, weight: Weight | None) -> None:
        if self.last is not None:
            self.last.learn((self.task != -1, self.before), weight)

    def _begin_next(self) -> None:
        """Start large weights up to the size of the largest unit, and small ones from far ahead together."""
        self._guess()
        ahead = sum(weight.bytes for weight in self.flights if not weight.is_small)
        begun: list[Weight] = []
        for place, weight in enumerate(self.guessed):
            if weight in self.flights:
                continue
            if weight.is_small:
                if not begun or not begun[-1].is_small:
                    self._begin_small(place)
                continue
            if ahead and ahead + weight.bytes > self.largest:
                return
            ahead += weight.bytes
            begun.append(weight)
            self._begin([weight])

    def _begin_small(self, place: int) -> None:
        """The small weights from a place on, those alike in one collective each."""
        near = [each for each in list(self.guessed)[place:] if each.is_small and each not in self.flights]
        chosen: dict[Any, list[Weight]] = {}
        size = 0
        for weight in dict.fromkeys(near):
            size += weight.bytes
            if size > TOGETHER:
                break
            chosen.setdefault((weight.gather.group, weight.dtype), []).append(weight)
        for alike in chosen.values():
            self._begin(alike)

    def _begin(self, weights: list[Weight]) -> None:
        call, WORLD.watch.call = WORLD.watch.call, weights[0].call
        flight = Flight(weights, [weight.array() for weight in weights])
        WORLD.watch.call = call
        self.flights.update(dict.fromkeys(weights, flight))

    def _guess(self) -> None:
        """Follow the order as far as it is looked ahead."""
        ends = [self.before, self.last, *self.guessed][-2:]
        (before, last), is_back = ends, self.task != -1
        while last is not None and len(self.guessed) < FAR:
            follower = last.followers.get((is_back, before))
            if follower is None or is_back in follower.firsts:
                return
            self.guessed.append(follower)
            before, last = last, follower


ORDER = Order()


class GatherWeight(Node):
    """The shards of a leaf, stacked: (...) to (processes, ...); its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, leaf: torch.Tensor, weight: Weight) -> torch.Tensor:
        ctx.group, ctx.call, ctx.leaf = weight.gather.group, WORLD.watch.call, data if data.is_leaf else None
        return ORDER.take(weight, leaf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        WORLD.watch.call = in_backward(ctx.call)
        if ctx.leaf is not None and SCATTERS.takes(ctx.leaf, ctx.next_functions[0][0]):
            SCATTERS.add(ctx.leaf, gradient, ctx.group)
            return None, None, None
        return ReduceScatter.apply(gradient, ctx.group), None, None


def in_backward(call: str) -> str:
    """A call as backward is told of."""
    return call if call.endswith(" backward") else f"{call} backward"


def is_weight(data: torch.Tensor) -> bool:
    """Whether an array is a leaf with data: a parameter, or a tensor without gradients such as a frozen one."""
    return data.is_leaf and not data.is_meta and data.numel() > 0


def is_held(data: torch.Tensor) -> bool:
    """Whether an array stays in memory anyway: a leaf, or a view of one, such as a weight turned round."""
    base = data._base if data._is_view() else None
    return data.numel() > 0 and (data.is_leaf or (base is not None and base.is_leaf))


def forget_gathered(
    function: Callable[..., Any],
    datas: Sequence[torch.Tensor],
    uses: Callable[[int, torch.Tensor], Use],
    gathered: Iterable[int],
) -> Callable[..., Any]:
    """A function of arrays so that backward gathers the leaves again that its call gathers, and keeps nothing of them.

    `gathered` are the operands that the call gathers, `uses` makes a use of one and its leaf.
    """
    leaves = [i for i in gathered if is_held(datas[i])]
    if not leaves or not any(data.requires_grad for data in datas) or not keeps_by_itself():
        return function
    made = [uses(i, datas[i] if datas[i].is_leaf else datas[i].detach()) for i in leaves]
    return lambda *ready: run_without_keeping(function, ready, made)


def scatter_back(gather: Gather) -> Callable[[torch.Tensor], torch.Tensor]:
    """A gather for split work of any array: of each process's gradient the parts are summed and scattered."""
    return lambda data: gather.cut.whole(GatherGradient.apply(data, gather.group))


def gather_weight(data: torch.Tensor, leaf: torch.Tensor, gather: Gather) -> torch.Tensor:
    """A leaf gathered for one use; `data` is the leaf, or what stands for it in the graph and shares its memory."""
    weight = weight_of(leaf, gather)
    weight.call = WORLD.watch.call
    return gather.cut.whole(GatherWeight.apply(data, leaf, weight))


# What autograd keeps of a gathered weight


@dataclass(frozen=True)
class Use:
    """A leaf that a call gathers: which operand it is, how it is prepared, and what is told of it in backward."""

    operand: int
    leaf: torch.Tensor
    prepare: Callable[[torch.Tensor], torch.Tensor]
    op: str
    moves: tuple[Collective, ...]
    place: tuple[str, int]

    def tell(self) -> None:
        """Backward is about to gather again: whoever watches is told, with the line of the call."""
        line = place_name(self.place) or "unknown line"
        events = [Event(each, self.op, line, "backward") for each in self.moves]
        state.check(events)
        state.log(events, of=self.leaf, first=True)


class Recipe:
    """Stands in autograd's graph for a gathered array, or a view of it: how to gather it again."""

    __slots__ = ("call", "layout", "leaf", "state", "use")

    def __init__(self, use: Use, saved: torch.Tensor) -> None:
        self.use, self.leaf, self.state = use, use.leaf, state_of(use.leaf)
        self.layout = saved.size(), saved.stride(), saved.storage_offset()
        self.call = _change_call(None)

    def make(self) -> torch.Tensor:
        """What was saved, gathered again."""
        if state_of(self.leaf) != self.state:
            raise _written(self.leaf, self.leaf._version, self.state[0])
        if state.watching:
            self.use.tell()
        call = _change_call(in_backward(self.call))
        with torch.no_grad():
            whole = self.use.prepare(self.leaf)
        _change_call(call)
        return whole.as_strided(*self.layout)


def _change_call(text: str | None) -> str:
    """What processes are told that they do, before it is changed; one process tells nobody."""
    watch = WORLD.watch
    if watch is None:
        return ""
    before: str = watch.call
    if text is not None:
        watch.call = text
    return before


class Kept:
    """Stands for any other array, as autograd keeps it by itself: with a look at its version."""

    __slots__ = ("array", "version")

    def __init__(self, saved: torch.Tensor) -> None:
        self.array, self.version = saved.detach(), saved._version

    def make(self) -> torch.Tensor:
        """The array, if nobody has written to it."""
        if self.array._version != self.version:
            raise _written(self.array, self.array._version, self.version)
        return self.array


def _written(array: torch.Tensor, now: int, expected: int) -> GradientError:
    what = f"[{array.type()} {list(array.shape)}]"
    change = f"is at version {now}; expected version {expected} instead" if now != expected else "has other memory"
    return GradientError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: {what} "
        f"{change}",
        fix="write to a parameter after backward, or compute with a copy of it",
    )


def run_without_keeping(function: Callable[..., Any], ready: Sequence[torch.Tensor], uses: Sequence[Use]) -> Any:
    """A function of arrays of which some were gathered. Its graph keeps nothing of those."""
    ready, uses = _lower(ready, uses)
    storages = {ready[use.operand].untyped_storage()._cdata: use for use in uses}

    def pack(saved: torch.Tensor) -> Recipe | Kept:
        use = storages.get(saved.untyped_storage()._cdata)
        return Kept(saved) if use is None else Recipe(use, saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, _make):
        return function(*ready)


def _lower(ready: Sequence[torch.Tensor], uses: Sequence[Use]) -> tuple[Sequence[torch.Tensor], Sequence[Use]]:
    """What autocast is about to cast, cast: its own copy would be kept, and nobody could tell where it came from."""
    device = ready[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or uses[0].op not in LOWERED:
        return ready, uses
    dtype, found, lowered = torch.get_autocast_dtype(device), [*ready], []
    for use in uses:
        whole = found[use.operand]
        if whole.is_floating_point() and whole.dtype not in (torch.float64, dtype):
            found[use.operand] = whole.to(dtype)
            use = replace(use, prepare=partial(_prepare_as, use.prepare, dtype))
        lowered.append(use)
    return found, lowered


def _prepare_as(
    prepare: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, leaf: torch.Tensor
) -> torch.Tensor:
    return prepare(leaf).to(dtype)


def _make(stored: Recipe | Kept) -> torch.Tensor:
    return stored.make()


def keeps_by_itself() -> bool:
    """Whether autograd keeps what it saves: inside of checkpoints and other hooks, these decide."""
    return private.saved_tensors_hooks() is None
