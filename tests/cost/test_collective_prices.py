"""The price of a collective is what the simulator finds, send by send, on links of every machine that we know."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from meshloom import Machine, Mesh, parse
from meshloom.collectives import KINDS, Collective
from meshloom.collectives.algorithms import candidates, choose
from meshloom.collectives.algorithms.timing import Hops
from meshloom.cost import fastest, price, price_of
from meshloom.fabric import VIRTUAL, AxisLinks, Fabric, Preset, preset, preset_names
from meshloom.observe.simulate import compute_time, schedule_of, simulate, whole_size
from meshloom.ops import Call, Ref
from meshloom.planner import plan

NAMES = ("a", "b", "c")
SCHEDULED = [kind for kind in KINDS if kind != "copy"]  # a copy between meshes is over no axis and has no schedule
SIZES = (1000, 1 << 10, 37 << 10, 1 << 20, 64 << 20)
WITHIN = 0.01
MIB = 1 << 20


class Axis:
    """One axis of a preset, some devices long, alone on its fabric."""

    def __init__(self, found: Preset, axis: int, devices: int) -> None:
        shape = tuple(devices if i == axis else 1 for i in range(len(found.shape)))
        self.name, self.devices = NAMES[axis], devices
        self.fabric = found.fabric(shape)
        self.machine = found.machine(shape=shape).on(Mesh.of(shape, NAMES[: len(shape)]))
        self.group = self.fabric.group(axis, (0,) * len(shape))

    def collective(self, kind: str, size: int) -> Collective:
        """A collective of which one device receives `size` bytes."""
        return Collective(kind, self.name, self.devices, size, "f32", ())

    def simulated(self, collective: Collective) -> float:
        whole = whole_size(collective)
        return simulate(schedule_of(collective.kind, self.group, self.fabric, whole), self.fabric, whole).time


def check_price(axis: Axis, collective: Collective, machine: Machine | None = None) -> None:
    """Raise unless the price is what the simulator finds."""
    assert price(collective, machine or axis.machine) == pytest.approx(axis.simulated(collective), rel=WITHIN), (
        f"{collective} on {axis.fabric}"
    )


def different_axes(found: Preset) -> Iterator[int]:
    """The axes of a preset, of those with the same links the first."""
    seen = set()
    for number, axis in enumerate(found.machine().axes):
        figures = replace(axis, name="", size=1)
        if figures not in seen:
            yield number
        seen.add(figures)


def check_preset(name: str, lengths: tuple[int, ...]) -> int:
    compared = 0
    for number in different_axes(preset(name)):
        for devices in lengths:
            axis = Axis(preset(name), number, devices)
            for kind in SCHEDULED:
                for size in SIZES:
                    check_price(axis, axis.collective(kind, size))
                    compared += 1
    return compared


@pytest.mark.parametrize("name", preset_names())
def test_the_price_is_what_the_simulator_finds_on_every_preset(name):
    lengths = (2, 3, 4, 5, 8, 16)
    axes = len(list(different_axes(preset(name))))
    assert check_preset(name, lengths) == axes * len(lengths) * len(SCHEDULED) * len(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", preset_names())
def test_the_price_is_what_the_simulator_finds_on_axes_of_up_to_64(name):
    assert check_preset(name, (31, 32, 64)) >= 3 * len(SCHEDULED) * len(SIZES)


OWN = {
    kind: AxisLinks(kind, 6, latency=2e-6, bandwidth=3e9, combined=1e9, packet=(2000, 5e-6), least=700, name="a")
    for kind in ("line", "ring", "full", "switch")
}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("combining", [None, 5e9])
def test_the_price_is_what_the_simulator_finds_on_links_of_ones_own(kind, combining):
    links = OWN[kind]
    fabric = Fabric.grid(
        (6,),
        kind,
        links.latency,
        links.bandwidth,
        combined=[links.combined],
        packets=[links.packet],
        least=links.least,
        launch=1e-6,
        combining=combining,
    )
    machine = Machine("own", 1.0, 1.0, 1e12, 1e11, axes=(links,), launch=1e-6, combining=combining)
    for collective in SCHEDULED:
        for size in SIZES[:-1]:
            asked = Collective(collective, "a", 6, size, "f32", ())
            whole = whole_size(asked)
            found = simulate(schedule_of(collective, fabric.coordinates(), fabric, whole), fabric, whole).time
            assert price(asked, machine) == pytest.approx(found, rel=WITHIN), (asked, kind)


# --- the comparison can fail ------------------------------------------------------------------------------------


def test_a_price_with_a_wrong_figure_is_noticed():
    axis = Axis(preset("galaxy"), 0, 8)
    asked = axis.collective("all_reduce", 1 << 10)
    check_price(axis, asked)
    for wrong in (
        replace(axis.machine, launch=axis.machine.launch * 1.2),
        replace(axis.machine, axes=tuple(replace(each, latency=each.latency * 1.05) for each in axis.machine.axes)),
        replace(axis.machine, axes=tuple(replace(each, least=0.0) for each in axis.machine.axes)),
    ):
        with pytest.raises(AssertionError):
            check_price(axis, asked, wrong)
    large = axis.collective("reduce_scatter", MIB)
    for wrong in (
        replace(axis.machine, combining=None),
        replace(axis.machine, axes=tuple(replace(each, combined=None) for each in axis.machine.axes)),
        replace(axis.machine, axes=tuple(replace(each, kind="line") for each in axis.machine.axes)),
    ):
        with pytest.raises(AssertionError):
            check_price(axis, large, wrong)


def forget_the_port(hops: Hops, size: float, count: int) -> float:
    return hops.delay(size) + hops.room(size)


def forget_the_steps(hops: Hops, size: float, count: int) -> float:
    return hops.copy(size * count)


@pytest.mark.parametrize(
    ("method", "wrong", "name", "kind"),
    [
        ("copies", forget_the_port, "nvlink8", "all_gather"),
        ("additions", forget_the_port, "ethernet16", "reduce_scatter"),
        ("growing", forget_the_steps, "t3000", "all_to_all"),
    ],
)
def test_a_wrong_formula_is_noticed(method, wrong, name, kind, monkeypatch):
    axis = Axis(preset(name), 0, 8)
    asked = axis.collective(kind, MIB)
    check_price(axis, asked)
    monkeypatch.setattr(Hops, method, wrong)
    with pytest.raises(AssertionError):
        check_price(axis, asked)


def test_the_simulator_does_not_ask_the_price(monkeypatch):
    axis = Axis(preset("nvlink8"), 0, 8)
    whole = 8 * MIB
    schedules = [each.schedule for each in candidates("all_reduce", axis.group, axis.fabric, whole) if each.schedule]
    before = [simulate(each, axis.fabric, whole).time for each in schedules]
    for name in ("copy", "add", "room", "room_added", "delay", "copies", "additions", "growing"):
        monkeypatch.setattr(Hops, name, lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        price(axis.collective("all_reduce", whole), axis.machine)
    assert [simulate(each, axis.fabric, whole).time for each in schedules] == before


# --- what links allow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "devices"), [("ethernet16", 16), ("nvlink8", 8)])
def test_nothing_is_faster_than_one_port_allows(name, devices):
    """Every device must send and receive 2(p-1)/p of the value through its port."""
    axis = Axis(preset(name), 0, devices)
    for size in (1 << 14, MIB, 64 * MIB):
        least = 2 * (devices - 1) / devices * size / axis.machine.axes[0].bandwidth
        for each in candidates("all_reduce", axis.group, axis.fabric, size):
            if each.schedule:
                assert simulate(each.schedule, axis.fabric, size).time > least, each
        asked = axis.collective("all_reduce", KINDS["all_reduce"].size(size, size, devices))
        assert price(asked, axis.machine) > least
    assert price(asked, axis.machine) == pytest.approx(least, rel=0.06)


def test_without_ports_the_bound_is_broken_and_the_test_above_would_see_it():
    cables = Fabric.grid((8,), "full", 0.6e-6, 276e9)
    least = 2 * 7 / 8 * 64 * MIB / 276e9
    fast = choose("all_reduce", cables.coordinates(), cables, 64 * MIB)(cables.coordinates(), cables)
    assert simulate(fast, cables, 64 * MIB).time < least


def test_every_axis_is_priced_by_its_own_links():
    """Not as a ring of the slowest links, whatever the axis is made of."""
    cluster = preset("nvlink8x16").machine().on(Mesh(host=16, chip=8))
    across, inside = (price(Collective("all_gather", name, 8, 64 * MIB, "f32", ()), cluster) for name in cluster_axes())
    assert across > 8 * inside
    kinds = {kind: preset("galaxy").machine(kinds=kind).on(Mesh(dp=8, tp=4)) for kind in ("line", "ring")}
    small = Collective("all_gather", "dp", 8, 1 << 10, "f32", ())
    assert fastest(small, kinds["line"])[0] == "line" and fastest(small, kinds["ring"])[0] == "bidirectional_ring"
    assert price(small, kinds["line"]) > 1.3 * price(small, kinds["ring"])


def cluster_axes() -> tuple[str, str]:
    return "host", "chip"


def test_more_lanes_and_less_waiting_make_it_faster():
    found = preset("galaxy")
    asked = Collective("all_reduce", "a", 8, MIB, "f32", ())
    price_on = [
        price(asked, made.machine().on(Mesh.of((8, 4), ("a", "b"))))
        for made in (replace(found, lanes=(1, 1)), found, replace(found, launch=0.0))
    ]
    assert price_on == sorted(price_on, reverse=True) and len(set(price_on)) == 3


FABRICS = {
    "2x4 torus": Fabric.grid((2, 4), "torus", 1e-6, 1e9),
    "3x4 mesh": Fabric.grid((3, 4), "mesh", 1e-6, 1e9, combining=3e9),
    "a torus of unequal axes": Fabric.grid((4, 4), "torus", (1e-6, 3e-6), (2e9, 1e9)),
    "a broken ring": Fabric.grid((6,), "ring", 1e-6, 1e9).without((2,), (3,)),
    "t3000": preset("t3000").fabric(),
    "nvlink8": preset("nvlink8").fabric(),
    "3x3 switches": Fabric.grid((3, 3), "switch", 1e-6, 1e9),
}


@pytest.mark.parametrize("name", FABRICS)
@pytest.mark.parametrize("size", [1 << 10, 100_000, 8 * MIB])
def test_what_is_chosen_is_what_the_simulator_finds_fastest(name, size):
    fabric = FABRICS[name]
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"):
        every = candidates(kind, fabric.coordinates(), fabric, size)
        times = {
            each.algorithm.name: simulate(each.schedule, fabric, size).time
            for each in every
            if each.schedule is not None
        }
        chosen = choose(kind, fabric.coordinates(), fabric, size).name
        assert times[chosen] <= min(times.values()) * (1 + WITHIN), (kind, times)


def test_hosts_of_gpus_reduce_inside_first_and_then_between_hosts():
    found = preset("nvlink8x16")
    fabric, machine = found.fabric((4, 8)), found.machine(shape=(4, 8)).on(Mesh(host=4, chip=8))
    for kind in ("all_reduce", "all_gather", "reduce_scatter"):
        for size in SIZES:
            asked = Collective(kind, "host,chip", 32, size, "bf16", ())
            whole = whole_size(asked)
            made = schedule_of(kind, fabric.coordinates(), fabric, whole)
            assert (fastest(asked, machine)[0], made.algorithm) == ("levels", "levels")
            assert price(asked, machine) == pytest.approx(simulate(made, fabric, whole).time, rel=WITHIN)
    # Between hosts goes an eighth of the value, twice three quarters of it, at 23 GB/s; inside 2 * 7/8 at 276 GB/s.
    size = KINDS["all_reduce"].size(64 * MIB, 64 * MIB, 32)
    least = 2 * (3 / 4 * 8 * MIB / 23e9 + 7 / 8 * 64 * MIB / 276e9)
    assert price(Collective("all_reduce", "host,chip", 32, size, "bf16", ()), machine) == pytest.approx(least, rel=0.05)


def test_a_torus_of_2x4_is_split():
    fabric = FABRICS["2x4 torus"]
    assert choose("all_reduce", fabric.coordinates(), fabric, 8 * MIB).name == "torus_split"


# --- how a price finds its axis ---------------------------------------------------------------------------------


def test_a_price_by_number_and_by_name_are_the_same():
    machine = preset("nvlink8x16").machine().on(Mesh(host=16, chip=8))
    for number, (name, devices) in enumerate((("host", 16), ("chip", 8))):
        by_name = price(Collective("all_to_all", name, devices, MIB, "f32", ()), machine)
        assert price_of("all_to_all", devices, MIB, machine, number) == by_name


def test_a_machine_that_is_not_bound_takes_an_axis_of_as_many_devices_or_the_slowest():
    machine = preset("nvlink8x16").machine()
    bound = machine.on(Mesh(host=16, chip=8))
    asked = {devices: Collective("all_gather", "x", devices, MIB, "f32", ()) for devices in (8, 16, 5)}
    assert price(asked[8], machine) == price(replace(asked[8], axis="chip"), bound)
    assert price(asked[16], machine) == price(replace(asked[16], axis="host"), bound)
    assert price(asked[5], machine) == price(replace(asked[5], axis="host"), bound)


def test_without_axes_every_axis_is_a_ring_as_before():
    """2(p-1) latencies are halved both ways round the ring, and so are the bytes."""
    asked = Collective("all_reduce", "x", 8, 7000, "f32", ())
    assert fastest(asked, VIRTUAL) == ("bidirectional_ring", pytest.approx(8 * (0.8e-6 + 500 / 12.5e9)))
    started = replace(VIRTUAL, launch=1e-6)
    assert price(asked, started) == pytest.approx(price(asked, VIRTUAL) + 1e-6)


def test_one_device_alone_pays_nothing():
    machine = preset("galaxy").machine().on(Mesh(dp=8, tp=1))
    for kind in SCHEDULED:
        assert price(Collective(kind, "tp", 1, MIB, "f32", ()), machine) == 0


@pytest.mark.parametrize(
    ("name", "above"), [("galaxy", 0.01), ("quietbox", 0.01), ("n300", 0.01), ("t3000", 0.125), ("loudbox", 0.125)]
)
def test_a_collective_over_all_axes_is_priced_too(name, above):
    """On a torus as the simulator finds it; parts of a value that meet on lines have no closed form and are faster."""
    found = preset(name)
    devices, names = math.prod(found.shape), NAMES[: len(found.shape)]
    axes, one = found.machine().on(Mesh.of(found.shape, names)), found.machine().on(Mesh.of((devices,), ("one",)))
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "shift"):
        for size in SIZES:
            asked = Collective(kind, ",".join(names), devices, size, "f32", ())
            whole, fabric = whole_size(asked), found.fabric()
            best = simulate(schedule_of(kind, fabric.coordinates(), fabric, whole), fabric, whole).time
            assert best * (1 - WITHIN) <= price(asked, axes) <= best * (1 + above), (asked, fastest(asked, axes))
            assert price(replace(asked, axis="one"), one) == price(asked, axes)


# --- plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["galaxy", "t3000", "loudbox", "nvlink8x16"])
def test_a_plan_costs_what_the_simulator_finds_on_its_machine(name):
    found = preset(name)
    machine, mesh = found.machine("bf16"), Mesh.of(found.shape, NAMES[: len(found.shape)])
    for axis in range(len(found.shape)):
        inner = [", ".join(f"S({dim})" if i == axis else "R" for i in range(len(found.shape))) for dim in (1, 0)]
        x, w = (parse(f"bf16[512, 1024]({inner[0]}) on {mesh}"), parse(f"bf16[1024, 768]({inner[1]}) on {mesh}"))
        made = plan(Call("matmul", (x, w), {"input": Ref(0), "other": Ref(1)}), machine=machine)
        assert [each.kind for each in made.forward] == ["all_reduce"] and made.machine is machine
        moved = price(made.forward[0], machine.on(mesh))
        assert made.cost == pytest.approx(moved + compute_time(made, machine))
        assert simulate(made, found.fabric()).time == pytest.approx(made.cost, rel=WITHIN)
