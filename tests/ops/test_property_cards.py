"""Every op of the table on cards that share no memory with this process, against dense torch: values and gradients.

About 500 cases in all, drawn over ops, meshes, placements, shapes and dtypes. `MESHLOOM_CARDS=N` draws N for every op.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from counting_cards import KERNELS, CountingDriver
from meshloom.runtime import MeshDevice, open_mesh_device
from meshloom.runtime.card_array import CardArray
from oracle import check_case
from samples import SAMPLES, Draw

EACH = int(os.environ.get("MESHLOOM_CARDS", "0")) or 2
SHAPES = ((1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 1, 2))
PARTS = 8  # tests, each of every eighth op
DRIVERS = {"by the host": {}, "by kernels": KERNELS}


@pytest.fixture(scope="module", params=DRIVERS)
def devices(request: pytest.FixtureRequest) -> dict[tuple[int, ...], MeshDevice]:
    kernels = DRIVERS[request.param]
    opened = {shape: open_mesh_device(shape, driver=CountingDriver(kernels)) for shape in SHAPES}
    yield opened
    for device in opened.values():
        device.close()
        assert all(card.used == 0 for card in device.cards)


def run_cases(name: str, devices: dict[tuple[int, ...], MeshDevice], count: int) -> int:
    """Draw so many cases of an op and check them; how many ran."""
    ran = 0

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal ran
        draw = Draw(data.draw)
        case, shape = SAMPLES[name](draw), draw.pick(SHAPES)
        check_case(draw, case, devices[shape].mesh)
        ran += 1

    run()
    return ran


@pytest.mark.parametrize("part", range(PARTS))
def test_op_equals_dense_on_cards(part, devices, request, record_property):
    by_kernels = request.node.callspec.params["devices"] == "by kernels"
    names = sorted(SAMPLES)[part::PARTS]
    count = EACH if not by_kernels else EACH // 2
    ran = sum(run_cases(name, devices, count) for name in names)
    record_property("cases of ops on cards against dense", ran)
    assert ran >= count * len(names)


def test_there_are_five_hundred_cases():
    assert EACH * len(SAMPLES) >= 500


def test_a_card_that_computes_wrongly_is_found(monkeypatch):
    def wrong(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, alpha: float = 1) -> None:
        out.copy_(a - b)

    device = open_mesh_device((2,), driver=CountingDriver({"add": wrong}))
    with device, pytest.raises(AssertionError):
        run_cases("add", dict.fromkeys(SHAPES, device), 40)


def test_a_card_that_loses_a_byte_is_found(monkeypatch):
    device = open_mesh_device((2,), driver=CountingDriver())
    card = device.get_device(1)
    real = card.read

    def read(handle: object, index: object = ...) -> torch.Tensor:
        found = real(handle, index)
        return found.add_(1) if found.is_floating_point() else found

    monkeypatch.setattr(card, "read", read)
    with device, pytest.raises(AssertionError):
        run_cases("mul", dict.fromkeys(SHAPES, device), 40)


def test_the_cases_are_on_cards(devices):
    seen: set[type] = set()

    def look(draw: Draw) -> None:
        mesh = devices[2, 2].mesh
        made = __import__("meshloom").distribute(torch.ones(draw.number(1, 9)), mesh)
        seen.add(type(made._data))

    look_once = settings(max_examples=3, database=None)(given(st.data())(lambda data: look(Draw(data.draw))))
    look_once()
    assert seen == {CardArray}
