"""Who communicates: the processes of this run, groups of devices, and the processes that hold them.

A `Group` is the devices along some axes of a mesh, in the order in which a collective numbers them, with the process
and the row of each; a mesh that one process holds has groups of one process. Processes alone are the devices of a mesh
that has one for each. `WORLD` is this run: alone until processes join (`processes.world`), which then says how to
connect and how to run a collective.
"""

from __future__ import annotations

import itertools
import math
import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch

from meshloom.errors import PeerLostError
from meshloom.mesh import HERE, Mesh
from meshloom.mesh.process import number_of

TIMEOUT = 300.0


class Story:
    """The running hash of what this process has done, and which tensors the call that is under way works on.

    There is one of all processes, and one of those that hold a submesh: they compare what they do on it, and what they
    do while they work on it alone (`within`).
    """

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self.ranks = ranks  # whose story it is; () for all
        self.hash = 0
        self.number = 0  # collectives begun
        self.identity = 0

    def add(self, text: str) -> None:
        """One more thing that all processes do alike."""
        self.hash = zlib.crc32(text.encode(), self.hash)


def _nobody(*_: object) -> Any:
    raise PeerLostError(
        "there are no other processes", fix="open a mesh in the processes that share it: loom.open_mesh(...)"
    )


@dataclass
class World:
    """All processes of this run, and how they look after each other.

    `connect` makes torch's group of some ranks, `begin` begins one collective and gives what is waited for, `message`
    does so for what two processes do alone.
    """

    timeout: float = TIMEOUT
    check: str = "sample"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    control: Group | None = None
    bindings: list[Any] = field(default_factory=list)  # mesh id, host rank and visible devices of every process
    watch: Any = None
    story: Story = field(default_factory=Story)
    stories: dict[tuple[int, ...], Story] = field(default_factory=dict)  # of those that hold a submesh
    within: tuple[int, ...] = ()  # who works alone now, on a stage of a pipeline
    is_muted: bool = False  # what is done now is nobody else's business
    connect: Callable[..., Any] = _nobody
    begin: Callable[..., Any] = _nobody
    message: Callable[..., Any] = _nobody
    connected: list[Group] = field(default_factory=list)
    handles: dict[Any, Any] = field(default_factory=dict)
    device_meshes: dict[Mesh, tuple[Any, Any]] = field(default_factory=dict)  # torch's own, and its group

    @property
    def is_joined(self) -> bool:
        """Whether there are other processes."""
        return self.control is not None

    def story_of(self, ranks: tuple[int, ...] = ()) -> Story:
        """What is compared by the processes that hold a mesh; without any, by those that work together now."""
        wanted = ranks or self.within
        return self.stories.setdefault(wanted, Story(wanted)) if wanted else self.story


WORLD = World()


@dataclass(frozen=True, eq=False)
class Group:
    """The devices along some axes of a mesh, its members, and the processes that hold them.

    A group of one process has nobody to talk to: what it holds is all there is. All processes make torch's groups
    together, at the first collective on one. What is only planned or explained makes none, and asks nobody.
    """

    mesh: Mesh
    axes: tuple[int, ...]
    handle: Any = field(default=None, init=False)  # torch's group

    def connect(self) -> None:
        """Have torch's group, if there is none yet: those along the same axes are made together."""
        if self.handle is None:
            beside = [self.ranks] if self.mesh.ranks else self._beside  # of a submesh, by its members alone
            handles = {ranks: WORLD.connect(ranks, bool(self.mesh.ranks)) for ranks in beside}
            self.use(handles[self.ranks])

    def use(self, handle: object) -> None:
        """Communicate through this group of torch's."""
        object.__setattr__(self, "handle", handle)
        WORLD.connected.append(self)

    @cached_property
    def _beside(self) -> list[tuple[int, ...]]:
        check_joined(self.mesh)
        found = partition(self.mesh.processes, self.axes)
        return [tuple(self.mesh.holders[place] for place in ranks) for ranks in found]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the processes, in order; those of the first group, where this one holds nothing of the mesh."""
        return next((ranks for ranks in self._beside if HERE.rank in ranks), self._beside[0])

    @cached_property
    def processes(self) -> int:
        """How many processes there are."""
        return math.prod(self.grid)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The devices along each axis."""
        return tuple(self.mesh.shape[axis] for axis in self.axes)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The devices of this process along each axis."""
        return tuple(self.mesh.local_shape[axis] for axis in self.axes)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """The processes along each axis."""
        return tuple(self.mesh.processes[axis] for axis in self.axes)

    @cached_property
    def crosses(self) -> bool:
        """Whether the members lie on several processes."""
        return self.processes > 1

    @cached_property
    def size(self) -> int:
        """How many members there are."""
        return math.prod(self.sizes)

    @cached_property
    def count(self) -> int:
        """How many of them this process holds."""
        return math.prod(self.held)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """For every member its process (by number in the group) and its row there.

        >>> Group(Mesh.of((2, 4), processes=(1, 2)), (0, 1)).places
        ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3))
        """
        return tuple(self._place(member) for member in itertools.product(*(range(size) for size in self.sizes)))

    def _place(self, member: Sequence[int]) -> tuple[int, int]:
        process = row = 0
        for at, held, parts in zip(member, self.held, self.grid, strict=True):
            process, row = process * parts + at // held, row * held + at % held
        return process, row

    @property
    def index(self) -> int:
        """The number of this process in the group."""
        place = 0
        for axis, parts in zip(self.axes, self.grid, strict=True):
            place = place * parts + self.mesh.place[axis]
        return place

    @cached_property
    def mine(self) -> tuple[int, ...]:
        """The numbers of this process's members, in the order of its rows."""
        return tuple(member for member, (process, _) in enumerate(self.places) if process == self.index)

    def row(self, member: int) -> int | None:
        """The row of a member, None where another process holds it."""
        process, row = self.places[member]
        return row if process == self.index else None

    def together(self, stacked: torch.Tensor, place: int = 0) -> torch.Tensor:
        """(..., processes, own members, ...) to (..., all members, ...), in their order."""
        count = len(self.axes)
        split = stacked.unflatten(place + 1, self.held).unflatten(place, self.grid)
        order = [place + i + level * count for i in range(count) for level in (0, 1)]
        rest = range(place + 2 * count, split.dim())
        moved: torch.Tensor = split.permute(*range(place), *order, *rest)
        return moved.flatten(place, place + 2 * count - 1)

    def apart(self, whole: torch.Tensor, place: int = 0) -> torch.Tensor:
        """(..., all members, ...) to (..., processes, own members, ...); the inverse of `together`."""
        count = len(self.axes)
        both = tuple(size for pair in zip(self.grid, self.held, strict=True) for size in pair)
        split = whole.unflatten(place, both)
        order = [place + 2 * i + level for level in (0, 1) for i in range(count)]
        rest = range(place + 2 * count, split.dim())
        moved: torch.Tensor = split.permute(*range(place), *order, *rest)
        return moved.flatten(place + count, place + 2 * count - 1).flatten(place, place + count - 1)


def group_of(mesh: Mesh, axes: Iterable[int]) -> Group | None:
    """The processes along some axes of a mesh, one group for all meshes that they split alike; None for one process."""
    crossing = tuple(axis for axis in axes if mesh.processes[axis] > 1)
    if not crossing:
        return None
    check_joined(mesh)
    return members_of(one_device_each(mesh.processes, mesh.ranks), crossing)


@lru_cache(maxsize=256)
def one_device_each(grid: tuple[int, ...], ranks: tuple[int, ...] = ()) -> Mesh:
    """A mesh of one device for each process of a grid."""
    return Mesh.of(grid, processes=grid).held_by(ranks)


@lru_cache(maxsize=1024)
def members_of(mesh: Mesh, axes: tuple[int, ...]) -> Group:
    """The group of this process's devices along some axes of a mesh, always the same one."""
    return Group(mesh, axes)


def check_joined(mesh: Mesh) -> None:
    """A mesh that processes split is used by all of them, not by one that read it from a file."""
    count = max(mesh.holders) + 1
    if (count > HERE.count if mesh.ranks else count != HERE.count) or not WORLD.is_joined:
        raise PeerLostError(
            f"a mesh over {count} processes is used by {HERE.count}",
            fix="open it in the processes that use it: loom.open_mesh(...); for a file that others read, "
            "save x.to_torch()",
        )


def partition(grid: tuple[int, ...], crossing: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The groups along some axes: one for every place on the others, members in row-major order.

    >>> partition((2, 2), (0,))
    [(0, 2), (1, 3)]
    """
    fixed = [range(1) if axis in crossing else range(size) for axis, size in enumerate(grid)]
    moving = [range(size) if axis in crossing else range(1) for axis, size in enumerate(grid)]
    return [
        tuple(number_of(map(operator.add, base, move), grid) for move in itertools.product(*moving))
        for base in itertools.product(*fixed)
    ]
