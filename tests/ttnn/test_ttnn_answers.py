"""Calls with the answer of TTNN 0.81.1: shapes, dtypes, layouts, memory, labels, texts, values of the host, refusals.

`tests/data/ttnn_answers.txt` has a mesh and a call, then `= answer` or `! error`; `~ reason` says that ours differs on
purpose. A refusal is asked for with `strictness("original")`. The helpers of the calls are below.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from meshloom import ttnn
from meshloom.ttnn.device import fabric
from ttnn_cases import mesh

DTYPES = {
    "bf16": ttnn.bfloat16,
    "f32": ttnn.float32,
    "bf8": ttnn.bfloat8_b,
    "bf4": ttnn.bfloat4_b,
    "i32": ttnn.int32,
    "u32": ttnn.uint32,
    "u16": ttnn.uint16,
    "u8": ttnn.uint8,
}


class Case(NamedTuple):
    """A call on a mesh, with the original's answer or error, and why ours differs if it does on purpose."""

    mesh: str
    call: str
    answer: str
    is_error: bool
    reason: str


def read_cases(text: str) -> Iterator[Case]:
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    while lines:
        mesh, _, call = lines.pop(0).partition(": ")
        answer = lines.pop(0)
        reason = lines.pop(0)[2:] if lines and lines[0].startswith("~ ") else ""
        yield Case(mesh, call, answer[2:], answer.startswith("! "), reason)


CASES = list(read_cases((Path(__file__).parents[1] / "data" / "ttnn_answers.txt").read_text(encoding="utf-8")))


# what calls are made of


def values(shape: Any, dtype: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.rand(shape, generator=generator) if dtype.is_float else torch.randint(0, 9, shape, generator=generator)


def host(shape: Any, dtype: str = "bf16", layout: str = "TILE", **how: Any) -> Any:
    """A tensor of the host."""
    kind = DTYPES[dtype]
    mapper, order = how.pop("mapper", None), getattr(ttnn, f"{layout}_LAYOUT")
    return ttnn.from_torch(values(shape, kind), dtype=kind, layout=order, mesh_mapper=mapper, **how)


def crs(*ranges: tuple[int, int, int, int]) -> Any:
    """Cores by the corners of rectangles."""
    return ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(a, b), ttnn.CoreCoord(c, d)) for a, b, c, d in ranges])


class Calls:
    """The names that a call on a mesh may use."""

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh

    def dev(self, shape: Any, dtype: str = "bf16", layout: str = "TILE", mem: Any = None, mapper: Any = None) -> Any:
        """A tensor on the mesh; replicated without a mapper."""
        made = host(shape, dtype, layout, mapper=mapper or ttnn.ReplicateTensorToMesh(self.mesh))
        return ttnn.to_device(made, self.mesh, mem or ttnn.DRAM_MEMORY_CONFIG)

    def idx(self, shape: Any) -> Any:
        """Row numbers on the mesh."""
        return self.dev(shape, "u32", "ROW_MAJOR")

    def run(self, call: str) -> Any:
        names = {"dev": self.dev, "idx": self.idx, "host": host, "crs": crs, "mesh": self.mesh}
        return eval(call, {"ttnn": ttnn, "torch": torch, **names})


def calls_on(name: str) -> Calls:
    """The calls on a mesh; the fabric is named behind a plus."""
    grid = name.partition("+")[0]
    return Calls(None if grid == "host" else mesh(tuple(map(int, grid.split("x")))))


# answers as text


def grid_text(grid: Any) -> list[list[int]]:
    return [[each.start.x, each.start.y, each.end.x, each.end.y] for each in grid.ranges()]


def shard_parts(config: Any) -> tuple[Any, Any]:
    spec, nd = config.shard_spec, config.nd_shard_spec
    return (
        None if spec is None else [grid_text(spec.grid), list(spec.shape), spec.orientation.name],
        None if nd is None else [list(nd.shard_shape), grid_text(nd.grid), nd.orientation.name],
    )


def tell(found: Any) -> str:
    """A result as the table writes it."""
    if isinstance(found, ttnn.Tensor):
        config, label = found.memory_config(), found.tensor_topology()
        shard, nd = shard_parts(config)
        return (
            f"{list(found.shape)} padded {list(found.padded_shape)} {found.dtype.name} {found.layout.name} "
            f"{config.buffer_type.name} {config.memory_layout.name} shard {shard} nd {nd} "
            f"label {[list(label.distribution_shape()), list(map(repr, label.placements()))]}"
        )
    if isinstance(found, ttnn.MemoryConfig):
        shard, nd = shard_parts(found)
        return json.dumps(
            {"buffer": found.buffer_type.name, "layout": found.memory_layout.name, "shard": shard, "nd": nd}
        )
    if isinstance(found, list):
        return json.dumps([str(each) for each in found])
    return json.dumps(found)


ERRORS = {"RuntimeError": RuntimeError, "TypeError": TypeError}


def check_answer(case: Case) -> None:
    """Raise unless the call has the original's answer, or its error."""
    calls = calls_on(case.mesh)
    if not case.is_error:
        found = tell(calls.run(case.call))
        assert found == case.answer, f"{case.call}\n  original {case.answer}\n  ours     {found}"
        return
    kind, _, text = case.answer.partition(": ")
    with pytest.raises(ERRORS[kind]) as raised:
        calls.run(case.call)
    said = " ".join(str(raised.value).split())
    assert text in said, f"{case.call}\n  original {text}\n  ours     {said}"


NAMES = [f"{place}-{case.mesh}" for place, case in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_a_call_has_the_answer_of_the_original_unless_it_differs_on_purpose(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = case.mesh.partition("+")[2] or "DISABLED"
    monkeypatch.setattr(fabric, "_config", ttnn.FabricConfig[config])  # meshes of other tests may be open
    expected = (AssertionError, pytest.fail.Exception) if case.reason else ()
    with ttnn.strictness("original"), pytest.raises(expected) if expected else contextlib.nullcontext():
        check_answer(case)


def test_an_answer_that_is_not_the_originals_is_found() -> None:
    for answer, is_error in (("3", False), ("RuntimeError: no", True)):
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            check_answer(Case("host", "ttnn.Shape([2])[0]", answer, is_error, ""))
