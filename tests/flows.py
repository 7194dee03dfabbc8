"""The section "Four flows" of `docs/layout.md`: the functions of ours that four calls enter, traced when seen before.

`python tests/flows.py` writes the section; a test traces again and compares.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import meshloom as loom
import ranks
from meshloom import ttnn

PAGE = Path(__file__).resolve().parents[1] / "docs" / "layout.md"
SOURCES = os.path.dirname(os.path.abspath(loom.__file__)) + os.sep
HEAD, END = "<!-- flows: made by tests/flows.py -->\n", "<!-- end of flows -->\n"


@dataclass(frozen=True)
class Frame:
    """A function of ours that was entered: how many of ours were on the way to it, its file, its name."""

    depth: int
    file: str
    name: str

    @property
    def room(self) -> str:
        return self.file.partition("/")[0].removesuffix(".py")


def trace(act: Callable[[], Any]) -> list[Frame]:
    """The functions of meshloom's sources that a call enters, in order.

    Left out: generators, which are entered each time they go on; comprehensions and lambdas; what a collective does
    while it waits for others; and what happens when a result is dropped.
    """
    found: list[Frame] = []
    depth = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(SOURCES):
            return
        if code.co_flags & inspect.CO_GENERATOR or code.co_name.startswith("<") or code.co_name in ("look", "__del__"):
            return
        if event == "call":
            found.append(Frame(depth, code.co_filename.removeprefix(SOURCES), code.co_name))
        depth += 1 if event == "call" else -1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        kept = act()
    finally:
        sys.setprofile(before)
    del kept
    return found


def trace_again(act: Callable[[], Any]) -> list[Frame]:
    """The same of a call that was made three times before."""
    for _ in range(3):
        act()
    return trace(act)


def product() -> list[Frame]:
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    x, w = loom.ones(16, 8, mesh=mesh, placements="S(0), R"), loom.ones(8, 12, mesh=mesh, placements="R, S(1)")
    return trace_again(lambda: x @ w)


def fabric_sum() -> list[Frame]:
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    x = loom.ones(16, 8, mesh=mesh, placements="S(0), S(1)")
    all_reduce = loom.collectives.all_reduce
    return trace_again(lambda: all_reduce(x, axis="tp", mode="fabric"))


def backward() -> list[Frame]:
    return [Frame(*each) for each in ranks.run(2, "flows:backward_of_a_rank")[0]]


def backward_of_a_rank() -> list[tuple[int, str, str]]:
    """What rank 0 of 2 enters in `loss.backward()` and in reading the gradient of a replicated weight."""
    mesh = loom.open_mesh((2,), axes=("dp",))
    x = loom.ones(4, 3, mesh=mesh, placements="S(0)")
    w = loom.Parameter(torch.ones(3, 2), mesh, "R")

    def step() -> list[Frame]:
        w.grad = None
        loss = (x @ w).square().mean()
        return trace(lambda: (loss.backward(), w.grad))

    found = [step() for _ in range(4)][-1]
    return [(each.depth, each.file, each.name) for each in found]


def ttnn_gather() -> list[Frame]:
    device = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    try:
        mapper = ttnn.ShardTensorToMesh(device, dim=3)
        x = ttnn.from_torch(torch.ones(1, 1, 32, 256), device=device, mesh_mapper=mapper, layout=ttnn.TILE_LAYOUT)
        return trace_again(lambda: ttnn.all_gather(x, dim=3))
    finally:
        ttnn.close_mesh_device(device)


FLOWS: dict[str, Callable[[], list[Frame]]] = {
    "`x @ w`, operands that line up, seen before": product,
    '`all_reduce(x, axis="tp", mode="fabric")` on a (2, 4) mesh, seen before': fabric_sum,
    "`loss.backward()` and `w.grad` on one of two processes, `w` replicated": backward,
    "`ttnn.all_gather(x, dim=3)` on a (2, 4) mesh, seen before": ttnn_gather,
}


# What a room calls in one below it, through a slot that the lower one fills.
SLOTS = {("comms", "processes"): "the world of processes, where there is more than one"}


def steps_back(frames: list[Frame], order: Sequence[str]) -> list[tuple[Frame, Frame]]:
    """Callers and callees where the callee's room lies below the caller's in the order of rooms.

    >>> steps_back([Frame(0, "tensor/a.py", "f"), Frame(1, "mesh/b.py", "g")], ["mesh", "tensor"])
    []
    >>> len(steps_back([Frame(0, "mesh/b.py", "g"), Frame(1, "tensor/a.py", "f")], ["mesh", "tensor"]))
    1
    """
    found, callers = [], list[Frame]()
    for frame in frames:
        del callers[frame.depth :]
        if callers:
            rooms = (callers[-1].room, frame.room)
            if order.index(rooms[1]) > order.index(rooms[0]) and rooms not in SLOTS:
                found.append((callers[-1], frame))
        callers.append(frame)
    return found


def drawing(frames: list[Frame]) -> str:
    """A line per function, further right inside its caller; equal ones in a row are one line with their number.

    >>> print(drawing([Frame(0, "a.py", "f"), Frame(1, "b.py", "g"), Frame(1, "b.py", "g")]))
    a.py f
      b.py g  x2
    """
    lines: list[list[Any]] = []
    for frame in frames:
        text = f"{'  ' * frame.depth}{frame.file} {frame.name}"
        if lines and lines[-1][0] == text:
            lines[-1][1] += 1
        else:
            lines.append([text, 1])
    return "\n".join(text if count == 1 else f"{text}  x{count}" for text, count in lines)


def part(title: str, frames: list[Frame]) -> str:
    """A flow as the page shows it."""
    return f"{title}: {len(frames)} functions\n\n```text\n{drawing(frames)}\n```\n"


def section() -> str:
    """The section of the page between its two marks."""
    return HEAD + "\n" + "\n".join(part(title, flow()) for title, flow in FLOWS.items()) + END


def page_with(new: str) -> str:
    """The page with another section."""
    return re.sub(re.escape(HEAD) + ".*" + re.escape(END), lambda _: new, PAGE.read_text(), flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page_with(section()))
