"""Every op of the table on cards that share no memory with this process, against dense torch: values and gradients.

600 cases on cards that keep bytes, half of them with kernels of their own; every fourth op on cards in processes of
their own and on the stand-in for blackhole-py. `MESHLOOM_CARDS=all` (`make full`) draws 600 cases there too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import blackhole
import meshloom as loom
from counting_cards import KERNELS, CountingDriver
from meshloom.runtime import MeshDevice, open_mesh_device
from meshloom.runtime.card_array import CardArray
from meshloom.runtime.drivers.process.driver import ProcessDriver
from oracle import check_case
from samples import SAMPLES, Draw

IS_FULL = os.environ.get("MESHLOOM_CARDS") == "all"
PARTS = 4  # tests, each of every fourth op
FOUR = ((2,), (2, 2), (4,))
MANY = ((1,), (3,), (3, 2), (2, 1, 2), *FOUR)
# for each kind of cards: what makes a driver, the meshes, and how many cases of every op; below 1, of some ops
KINDS: dict[str, tuple[Any, tuple[tuple[int, ...], ...], float]] = {
    "by the host": (CountingDriver, MANY, 1),
    "by kernels": (lambda: CountingDriver(KERNELS), MANY, 1),
    "in processes": (ProcessDriver, FOUR[:2], 2 if IS_FULL else 1 / 4),
    "stand-in": (blackhole.driver, FOUR[1:2], 2 if IS_FULL else 1 / 4),
}
Devices = dict[tuple[int, ...], MeshDevice]


@pytest.fixture(scope="module", params=KINDS)
def devices(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Devices]:
    make, shapes, _ = KINDS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        blackhole.install(patch, Path(tmp_path_factory.mktemp("cards")))
        opened = {shape: open_mesh_device(shape, driver=make()) for shape in shapes}
        yield opened
        for device in opened.values():
            device.close()
            assert all(usage.used == 0 for usage in device.memory_usage().values())


def run_cases(name: str, devices: Devices, count: int) -> int:
    """Draw so many cases of an op and check them; how many ran."""
    ran = 0

    @settings(
        max_examples=count, deadline=None, derandomize=True, database=None, phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal ran
        draw = Draw(data)
        case, shape = SAMPLES[name](draw), draw.pick(tuple(devices))
        check_case(draw, case, devices[shape].mesh)
        ran += 1

    run()
    return ran


@pytest.mark.parametrize("part", range(PARTS))
def test_op_equals_dense_on_cards(part, devices, request, record_property):
    count = KINDS[request.node.callspec.params["devices"]][2]
    names = sorted(SAMPLES)[part :: round(PARTS / min(count, 1))]
    ran = sum(run_cases(name, devices, max(1, round(count))) for name in names)
    record_property("cases of ops on cards against dense", ran)
    assert ran >= len(names) >= 15


def test_there_are_five_hundred_cases():
    counts = {name: count * len(SAMPLES) for name, (_, _, count) in KINDS.items()}
    assert counts["by the host"] + counts["by kernels"] >= 500
    assert not IS_FULL or min(counts["in processes"], counts["stand-in"]) >= 500


def test_the_cases_are_on_cards(devices):
    for device in devices.values():
        assert loom.distribute(torch.ones(5), device)._data.__class__ is CardArray


def test_a_card_that_computes_wrongly_is_found():
    def wrong(a: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(a)

    with open_mesh_device((2,), driver=CountingDriver({"relu": wrong})) as device, pytest.raises(AssertionError):
        run_cases("relu", {(2,): device}, 40)


def test_a_card_that_loses_a_bit_is_found(monkeypatch):
    with open_mesh_device((2,), driver=CountingDriver()) as device:
        card = device.get_device(1)
        real = card.read

        def read(handle: Any, index: Any = ...) -> torch.Tensor:
            found: torch.Tensor = real(handle, index)
            return found.add_(1) if found.is_floating_point() else found

        monkeypatch.setattr(card, "read", read)
        with pytest.raises(AssertionError):
            run_cases("mul", {(2,): device}, 40)
