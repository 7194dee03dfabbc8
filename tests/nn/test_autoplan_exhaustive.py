"""`loom.autoplan` beside a search of everything: one block, few devices, placements from the rows of the op table.

The search here knows nothing of roles, parts or recipes. It asks the op table how `linear` may lie on one mesh axis,
puts the batch and every weight in each of these ways on every axis of every mesh, asks for the results of layers in
each way too, and runs all of it dry. `make test` looks at a few; with MESHLOOM_AUTOPLAN=all in the environment (`make
full`) it takes minutes and looks at more devices, a whole transformer block and meshes of two axes.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import meshloom as loom
from meshloom import Mesh, Placement, Plan, Replicate, Shard, Topology
from meshloom.fabric import preset
from meshloom.nn.search.trials import Task, Trials
from meshloom.ops import Call, Ref, find

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

import plan_models
from plan_models import Attention, Block, Plain, Sizes

IS_WHOLE = os.environ.get("MESHLOOM_AUTOPLAN") == "all"
SIZES = Sizes(256, 1, 4, 4, 1024, 64, 128)
ROWS = 8
Lines = dict[str, dict[str, Placement]]
Groups = tuple[tuple[str, ...], ...]


class Net(nn.Module):
    """A feed-forward after a norm, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.LayerNorm(SIZES.width), Plain(SIZES)

    def forward(self, x):
        """(batch, length, width) to the same."""
        return x + self.net(self.norm(x))


def transformer() -> nn.Module:
    return Block(SIZES, Attention(SIZES, 4, True, True), Plain(SIZES), nn.LayerNorm)


# For each block the layers that are placed alike: queries, keys and values read the same and are read together.
BLOCKS = {
    "net": (Net, (("net.fc1",), ("net.fc2",))),
    "transformer": (
        transformer,
        (
            ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            ("attention.o_proj",),
            ("net.fc1",),
            ("net.fc2",),
        ),
    ),
}


def rows_of_linear() -> set[tuple[Placement, Placement, Placement]]:
    """How the input, the weight and the result of `linear` may lie on one mesh axis, by the op table."""
    mesh = Mesh(d=2)
    shapes = ((ROWS, SIZES.length, SIZES.width), (SIZES.hidden, SIZES.width))
    operands = tuple(Topology(mesh, (Replicate(),), shape, "bf16") for shape in shapes)
    call = Call("linear", operands, {"input": Ref(0), "weight": Ref(1), "bias": None}, (Ref(0), Ref(1), None))
    rows = find("linear").rule(call).rows
    return {(row.ins[0], row.ins[1], row.outs[0]) for row in rows}


def choices(index: int) -> list[Placement]:
    """The placements of one operand (or of the result) in all rows; sums that are not done are no place to lie."""
    found = {row[index] for row in rows_of_linear()}
    return sorted((each for each in found if isinstance(each, (Shard, Replicate))), key=str)


def plans_on(mesh: Mesh, groups: Groups, with_requests: bool) -> Iterator[Plan]:
    """Every plan on a mesh: for each axis a place of the batch, of each group of weights, and of what layers return."""
    asked: list[Placement | None] = [None, *(choices(2) if with_requests else ())]
    one = list(itertools.product(choices(0), itertools.product(choices(1), repeat=len(groups)), asked))
    for chosen in itertools.product(one, repeat=mesh.ndim):
        batch = {axis: each[0] for axis, each in zip(mesh.axes, chosen, strict=True)}
        parameters: Lines = {}
        outputs: Lines = {}
        for axis, (_, weights, request) in zip(mesh.axes, chosen, strict=True):
            for group, weight in zip(groups, weights, strict=True):
                for layer in group:
                    parameters.setdefault(f"{layer}.weight", {})[axis] = weight
                    if isinstance(weight, Shard) and weight.dim == 0:
                        parameters.setdefault(f"{layer}.bias", {})[axis] = weight
            if request is not None:
                for group in groups[1::2]:
                    outputs.setdefault(group[0], {})[axis] = request
        yield Plan(parameters, batch, {}, outputs)


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


class Fixed:
    """A plan as a recipe."""

    title, recompute = "fixed", 0

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan(self, module: nn.Module, mesh: Mesh) -> Plan:
        return self._plan


def search_all(
    task: Task, groups: tuple[tuple[str, ...], ...], ndim: int, with_requests: bool
) -> tuple[float, Plan, int]:
    """The fastest of all plans, and how many there were."""
    trials = Trials(task)
    best: tuple[float, Plan | None] = (math.inf, None)
    count = 0
    for mesh in meshes(task.devices, ndim):
        for plan in plans_on(mesh, groups, with_requests):
            run = trials.run(trials.folded.with_blocks({}), mesh, Fixed(plan))
            count += 1
            if run.time < best[0]:
                best = (run.time, plan)
    assert best[1] is not None
    return best[0], best[1], count


def meshes(devices: int, ndim: int) -> list[Mesh]:
    """A line of all devices, or all ways to cut them in two."""
    if ndim == 1:
        return [Mesh(a=devices)]
    return [Mesh(a=devices // inner, b=inner) for inner in range(2, devices) if devices % inner == 0]


SOME = [("net", "t3000", 4, 1, True)]
ALL = [
    *(("net", machine, devices, 1, True) for machine in ("t3000", "galaxy", "nvlink8") for devices in (2, 4, 8)),
    ("net", "galaxy", 16, 1, True),
    ("net", "t3000", 4, 2, False),
    ("transformer", "t3000", 8, 1, False),
    ("transformer", "galaxy", 16, 1, False),
]


@pytest.mark.parametrize(("block", "machine", "devices", "ndim", "with_requests"), ALL if IS_WHOLE else SOME)
def test_it_is_as_good_as_trying_everything(block, machine, devices, ndim, with_requests):
    make, groups = BLOCKS[block]
    with torch.device("meta"):
        model = make().to(torch.bfloat16)
        batch = torch.empty(ROWS, SIZES.length, SIZES.width, dtype=torch.bfloat16)
    found = loom.autoplan(model, batch, machine, devices, loss=loss)
    task = Task(model, batch, preset(machine).machine(), devices, None, loss=loss)
    least, plan, count = search_all(task, groups, ndim, with_requests)
    assert count >= 100
    print(f"autoplan {found.best.time:.6g} s of {found.tried} plans, the best of {count}: {least:.6g} s")
    assert found.best.time <= 1.05 * least, f"{plan}\n{found}"


@pytest.mark.skipif(not IS_WHOLE, reason="takes most of a minute; MESHLOOM_AUTOPLAN=all runs it")
def test_32_blocks_on_1024_devices_take_less_than_a_minute_of_one_core():
    sizes = replace(plan_models.SIZES["large"], layers=32)
    with torch.device("meta"):
        model = plan_models.llama(sizes).to(torch.bfloat16)
        tokens = torch.zeros(1024, sizes.length, dtype=torch.long)
    start = time.process_time()
    found = loom.autoplan(model, (tokens, tokens), "nvlink8x16", 1024, loss=plan_models.loss)
    took = time.process_time() - start
    assert len(found.best.run.nodes) > 32 * 20
    assert took < 60, f"{took:.0f} s of CPU time\n{found}"


def test_the_rows_of_the_table_are_the_ones_that_are_known():
    assert [str(each) for each in choices(0)] == ["R", "S(0)", "S(1)", "S(2)"]
    assert [str(each) for each in choices(1)] == ["R", "S(0)", "S(1)"]
