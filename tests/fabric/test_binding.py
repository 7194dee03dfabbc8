"""A mesh on a machine: which links join the devices along each axis of it."""

from __future__ import annotations

import pytest

from meshloom import Mesh
from meshloom.fabric import VIRTUAL, AxisLinks, Fabric, preset
from meshloom.fabric.binding import bind

GALAXY = tuple(AxisLinks("ring", size, 1e-6, 1e9, packet=(4096, 2e-6)) for size in (8, 4))
HOSTS = (AxisLinks("switch", 16, 1e-5, 1e9),)
MESH = tuple(AxisLinks("line", size, latency, 1e9) for size, latency in ((2, 1e-6), (4, 2e-6)))
RACKS = (AxisLinks("line", 4, 1e-5, 1e8), *GALAXY)


def kinds(axes: tuple[AxisLinks, ...], *shape: int) -> list[tuple[str, int]]:
    return [(each.kind, each.size) for each in bind(axes, [str(i) for i in range(len(shape))], shape)]


@pytest.mark.parametrize(
    ("axes", "shape", "expected"),
    [
        (GALAXY, (8, 4), [("ring", 8), ("ring", 4)]),
        (GALAXY, (8, 2), [("ring", 8), ("line", 2)]),  # a part of a ring is a line
        (GALAXY, (2, 3), [("line", 2), ("line", 3)]),
        (GALAXY, (512, 8), [("ring", 512), ("ring", 8)]),  # a larger machine of the same kind
        (
            GALAXY,
            (2, 4, 4),
            [("ring", 2), ("line", 4), ("ring", 4)],
        ),  # an axis in two
        (GALAXY, (32,), [("ring", 32)]),
        (GALAXY, (4, 8), [("ring", 4), ("ring", 8)]),  # by device ids: two rows of four each
        (MESH, (8,), [("ring", 8)]),  # two rows, there and back
        (MESH[1:], (4,), [("line", 4)]),
        (HOSTS, (2, 8), [("switch", 2), ("switch", 8)]),
        (HOSTS, (16,), [("switch", 16)]),
        (HOSTS, (4,), [("switch", 4)]),
        (RACKS, (4, 32), [("line", 4), ("ring", 32)]),
        (RACKS, (8, 4), [("ring", 8), ("ring", 4)]),  # one rack
    ],
)
def test_an_axis_of_a_mesh_is_made_of_the_links_that_join_its_devices(axes, shape, expected):
    assert kinds(axes, *shape) == expected


def test_every_fourth_device_is_four_links_away_and_shares_them():
    outer, inner, _ = bind(GALAXY, ("a", "b", "c"), (2, 4, 4))
    assert (outer.latency, outer.bandwidth, outer.packet) == (4e-6, 0.25e9, (4096, 8e-6))
    assert (inner.latency, inner.bandwidth) == (1e-6, 1e9)


def test_a_way_through_several_axes_has_the_pace_of_the_slowest():
    (through,) = bind(MESH, ("a",), (8,))
    assert through.latency == 2e-6
    (through,) = bind(RACKS, ("a",), (128,))
    assert (through.latency, through.bandwidth) == (1e-5, 1e8)
    assert through.box == RACKS
    assert bind(RACKS, ("a",), (64,))[0].box == ()  # half of the racks is no box of whole axes


def test_both_ways_round_a_ring_share_the_port_of_a_switch():
    cluster = preset("nvlink8x16").machine()
    (through,) = cluster.on(Mesh.of((128,), ("a",))).axes
    assert (through.kind, through.bandwidth) == ("ring", cluster.axes[0].bandwidth / 2)


def test_a_bound_machine_has_the_names_of_the_mesh_and_all_else_of_the_machine():
    machine = preset("galaxy").machine("bf16")
    bound = machine.on(Mesh(dp=8, tp=4))
    assert [each.name for each in bound.axes] == ["dp", "tp"]
    assert bound.on(Mesh(dp=8, tp=4)) == bound
    assert (bound.flops, bound.launch, bound.memory) == (machine.flops, machine.launch, machine.memory)
    assert bound.axis("tp", 4) == bound.axes[1] and bound.axis("x", 8) == bound.axes[0]


def test_a_machine_without_axes_is_the_same_on_every_mesh():
    assert VIRTUAL.on(Mesh(dp=8, tp=4)) is VIRTUAL
    assert VIRTUAL.axis("dp", 8) is None


@pytest.mark.parametrize("name", ["galaxy", "t3000", "nvlink8x16", "galaxy4", "ethernet16"])
def test_the_axes_of_a_machine_are_the_links_of_its_fabric(name):
    """A whole axis and a part of one, as the fabric itself has them."""
    found = preset(name)
    fabric = found.fabric()
    for number, axis in enumerate(found.machine().axes):
        group = fabric.group(number, (0,) * len(fabric.shape))
        assert is_closed(fabric, group) == (axis.kind != "line" or axis.size < 3)
        if axis.kind == "ring":
            (part, *_) = bind((axis,), ("a",), (axis.size - 1,))
            assert part.kind == "line" and not is_closed(fabric, group[:-1])


def is_closed(fabric: Fabric, group: tuple[tuple[int, ...], ...]) -> bool:
    return len(group) < 3 or fabric.link(group[-1], group[0]) is not None
