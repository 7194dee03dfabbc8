"""Nodes and storages of a step while it is recorded, and how they become the values of `meshloom.cost.step`."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from meshloom.collectives import Collective
from meshloom.cost import Load, load_of
from meshloom.cost.compute import cut_of
from meshloom.cost.step import Node, Storage
from meshloom.ops import find
from meshloom.placement import Topology
from meshloom.planner import Plan
from meshloom.tensor.layouts import Layout, infer_share, layout_of


class Held:
    """A storage while it is recorded; several arrays may stand for it, such as a table and its copy without data.

    `whole` are the bytes of the stored array, of which one device holds a share. It is counted if it is on the devices
    at all, and exact if a topology says how it lies; else its share is inferred.
    """

    __slots__ = (
        "arrays", "freed", "held_for", "is_counted", "is_exact", "layout", "made", "mesh", "module", "name", "node",
        "share", "whole",
    )  # fmt: skip

    def __init__(self, name: str, whole: int, made: int, node: Draft | None) -> None:
        self.name, self.whole, self.made, self.node = name, whole, made, node
        self.freed: int | None = None
        self.held_for = self.module = ""
        self.share, self.layout = 1.0, Layout((), ())
        self.is_counted = self.is_exact = False
        self.arrays = 0  # that stand for it and are alive
        self.mesh = node.mesh if node is not None else 0

    def place(self, layout: Layout, mesh: int) -> None:
        """Say exactly how it is spread over the devices of a mesh, by the number of the mesh."""
        self.layout, self.share, self.is_exact, self.is_counted = layout, layout.share, True, True
        self.mesh = mesh

    @property
    def local(self) -> int:
        """The bytes on one device."""
        return round(self.whole * self.share)

    def finish(self, number: int, phases: Phases) -> Storage:
        """The storage as a value."""
        node = self.node if self.node is not None and self.node.number >= 0 else None
        return Storage(
            number=number,
            name=self.name,
            held_for=self.held_for or phases.held_for(self),
            bytes=self.local,
            made=self.made,
            freed=self.freed,
            node=node.number if node is not None else None,
            module=self.module or (node.module if node is not None else ""),
            where=node.where if node is not None else "",
            mesh=self.mesh,
        )


class Draft:
    """A node while it is recorded."""

    def __init__(self, op: str, phase: str, module: str, where: str, first: int, mesh: int = 0) -> None:
        self.op, self.phase, self.module, self.where, self.mesh = op, phase, module, where, mesh
        self.first = self.last = first  # its first kernel, and the first one after it
        self.operands: tuple[str, ...] = ()
        self.results: tuple[str, ...] = ()
        self.kernels: list[str] = []
        self.loads: list[Load] = []
        self.dtype = ""
        self.model_flops = 0.0
        self.before: list[tuple[Collective, Held | None]] = []  # with the storage that is moved
        self.after: list[Collective] = []
        self.reads: dict[Held, None] = {}
        self.writes: dict[Held, None] = {}
        self.gradient_of: Called | None = None
        self.is_gradient_sum = False
        self.scatters: list[tuple[Draft, Held]] = []  # of gradients of leaves, with the leaf's storage
        self.number = -1

    @property
    def call(self) -> Called | None:
        """The planned call that its kernels belong to: itself, or the one whose gradient it is."""
        return self.gradient_of

    @property
    def is_something(self) -> bool:
        """Whether it does anything at all."""
        return bool(self.kernels or self.before or self.after or self.writes)

    def finish(self, numbers: dict[Held, int]) -> Node:
        """The node as a value."""
        of = self.gradient_of
        return Node(
            number=self.number,
            op=self.op,
            phase=self.phase,
            module=self.module,
            where=self.where,
            operands=self.operands,
            results=self.results,
            kernels=tuple(self.kernels),
            dtype=self.dtype,
            loads=tuple(self.loads),
            model_flops=self.model_flops,
            before=tuple(each for each, _ in self.before),
            before_of=tuple(numbers.get(held) if held is not None else None for _, held in self.before),
            after=tuple(self.after),
            reads=tuple(numbers[each] for each in self.reads if each in numbers),
            writes=tuple(numbers[each] for each in self.writes if each in numbers),
            kernel_range=(self.first, self.last),
            gradient_of=of.number if of is not None and of.number >= 0 else None,
            is_gradient_sum=self.is_gradient_sum,
            mesh=self.mesh,
        )


class Called(Draft):
    """The node of a planned call, and what its kernels and those of its backward need to know of it."""

    def __init__(self, op: str, weight: Weight, phase: str, module: str, where: str, first: int, mesh: int) -> None:
        super().__init__(op, phase, module, where, first, mesh)
        self.weight = weight
        self.gathered: dict[Held, tuple[Held, Topology]] = {}  # operands that are needed larger than they are kept
        self.operand_storages: list[Held] = []

    @property
    def call(self) -> Called:
        """The planned call that its kernels belong to."""
        return self


class Weight:
    """What a call means for one device, which does all of it: a function without a rule."""

    plan: Plan | None = None
    load, share, copies = Load(0.0, 0.0), 1.0, 1

    def share_of(self, shape: tuple[int, ...]) -> float | None:
        """What one device holds of an array inside of the call or of its backward."""
        return 1.0


class PlannedWeight(Weight):
    """What a plan means for one device; equal calls have the same plan, so it is worked out once.

    `load` is what the fullest device does, `share` its part of the arithmetic of the arrays that are here, `copies`
    how many processes share the rest, and `layouts` say how operands and results lie.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        choices = find(plan.call.op).rule(plan.call)
        self.load = load_of(plan.call, choices, plan.rows, [each.dtype for each in plan.outs])
        grid = zip(plan.rows, plan.mesh.processes, strict=True)
        self.copies = math.prod(count for row, count in grid if cut_of(row) is not None)
        self.share = self.load.flops / choices.flops * self.copies if choices.flops else 1.0
        placed = (*plan.call.operands, *plan.outs, *plan.ins, *plan.raw)
        reduced = [each for topology in placed for each in (topology, topology.reduced)]
        self.layouts = tuple(dict.fromkeys(map(layout_of, reduced)))
        self.shares: dict[tuple[int, ...], float | None] = {}

    def share_of(self, shape: tuple[int, ...]) -> float | None:
        """What one device holds of an array inside of the call or of its backward."""
        if shape not in self.shares:
            self.shares[shape] = infer_share(shape, self.layouts)
        return self.shares[shape]


class Phases:
    """When passes of backward begin: what forward made and is still there then was saved for it."""

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.backward = [draft.first for draft in drafts if draft.phase == "backward" and not draft.is_gradient_sum]

    def held_for(self, held: Held) -> str:
        """What a storage is held for that nobody has marked."""
        if held.made < 0:
            return "inputs"
        if held.node is not None and held.node.phase not in ("forward", "recompute"):
            return "temporaries"
        place = bisect.bisect_left(self.backward, held.made)
        begins = self.backward[place] if place < len(self.backward) else None
        is_saved = begins is not None and (held.freed is None or held.freed >= begins)
        return "activations" if is_saved else "temporaries"
