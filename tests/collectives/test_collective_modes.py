"""Three modes with one meaning: every algorithm over links equals the host; what is refused, and what is said of it."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import Mesh
from meshloom.collectives.algorithms import ALGORITHMS
from meshloom.comms import Group, literal, modes
from meshloom.comms.schedules import Box, Executor
from meshloom.fabric import Fabric, Link
from meshloom.tensor import collectives

FABRICS = {
    "ring of 2": Fabric.grid((2,), "ring", 1e-6, 1e9),
    "ring of 4": Fabric.grid((4,), "ring", 1e-6, 1e9),
    "ring of 5": Fabric.grid((5,), "ring", 1e-6, 1e9),
    "line of 4": Fabric.grid((4,), "line", 1e-6, 1e9),
    "line of 5": Fabric.grid((5,), "line", 1e-6, 1e9),
    "mesh of 2x3": Fabric.grid((2, 3), "mesh", 1e-6, 1e9),
    "torus of 3x3": Fabric.grid((3, 3), "torus", 1e-6, 1e9),
    "torus of 2x4": Fabric.grid((2, 4), "torus", 1e-6, 1e9),
    "full of 6": Fabric.grid((6,), "full", 1e-6, 1e9),
    "full of 8": Fabric.grid((8,), "full", 1e-6, 1e9),
    "star of 4": Fabric.of((4,), [Link(*pair, 1e-6, 1e9) for i in (1, 2, 3) for pair in (((0,), (i,)), ((i,), (0,)))]),
}  # fmt: skip
ARGUMENTS: dict[str, dict[str, Any]] = {
    "all_reduce": {}, "all_gather": {"dim": 0}, "reduce_scatter": {"dim": 0},
    "all_to_all": {"split_dim": 1, "concat_dim": 0}, "broadcast": {"root": 1}, "reduce": {"root": 1},
    "gather": {"dim": 1, "root": 1}, "scatter": {"dim": 1, "root": 1},
}  # fmt: skip
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
LINE = loom.open_mesh((4,), axes=("d",))


def fits(key: tuple[str, str], fabric: Fabric) -> bool:
    try:
        ALGORITHMS[key](fabric.coordinates(), fabric, root=ARGUMENTS[key[0]].get("root", 0))
    except loom.FabricError:
        return False
    return True


FITTING = [(*key, where) for key in ALGORITHMS for where, fabric in FABRICS.items() if fits(key, fabric)]


def test_every_algorithm_of_the_table_is_tried_on_some_links():
    assert {(collective, name) for collective, name, _ in FITTING} == set(ALGORITHMS)
    assert {where for _, _, where in FITTING} == set(FABRICS)


def sharded(fabric: Fabric, dtype: torch.dtype, rows: int | None = None) -> loom.Tensor:
    """Rows over all axes, unevenly; no two elements alike."""
    mesh = Mesh.of(fabric.shape, tuple("abcd"[: len(fabric.shape)]))
    shape = (2 * mesh.size - 1 if rows is None else rows, 7)
    generator = torch.Generator().manual_seed(len(fabric.links))
    count = shape[0] * shape[1]
    value = torch.randn(shape, generator=generator) if dtype.is_floating_point else torch.arange(count).view(shape) - 9
    return loom.distribute(value.to(dtype), mesh, ", ".join(["S(0)"] * mesh.ndim))


def both(collective: str, x: loom.Tensor, fabric: Fabric, **options: Any) -> tuple[loom.Tensor, loom.Tensor]:
    """The collective over links and through the host."""
    call, common = getattr(loom.collectives, collective), {**ARGUMENTS[collective], **options}
    algorithm = common.pop("algorithm", None)
    with loom.use_fabric(fabric):
        sent = call(x, mode="fabric", algorithm=algorithm, **common)
    return sent, call(x, mode="host", **common)


def check_same_parts(found: loom.Tensor, expected: loom.Tensor, exact: bool) -> None:
    assert found.topology == expected.topology
    for place in found.mesh.coordinates():
        here, there = found.shard_at(place), expected.shard_at(place)
        torch.testing.assert_close(here, there, **({"rtol": 0, "atol": 0} if exact else {}))


@pytest.fixture(autouse=True)
def few_collectives(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Every test starts with no collective through the host behind it."""
    counter = [0, 0, 0.0]
    monkeypatch.setattr(modes, "_through_host", counter)
    yield counter


@pytest.mark.parametrize(("collective", "name", "where"), FITTING)
def test_an_algorithm_over_links_equals_the_host(collective, name, where):
    fabric = FABRICS[where]
    for dtype in (torch.int64, torch.float32):
        sent, host = both(collective, sharded(fabric, dtype), fabric, algorithm=name)
        check_same_parts(sent, host, exact=dtype == torch.int64 or collective not in REDUCING)


REPLICATING = [each for each in FITTING if each[0] in ("all_reduce", "all_gather", "broadcast")]


@pytest.mark.parametrize(("collective", "name", "where"), REPLICATING)
def test_a_schedule_leaves_the_same_with_every_member(collective, name, where):
    """A replicated result is read from one member; here all of them are looked at."""
    fabric, root = FABRICS[where], 1 if collective == "broadcast" else 0
    schedule = ALGORITHMS[collective, name](fabric.coordinates(), fabric, root=root)
    vectors = torch.arange(len(schedule.group) * 11).view(-1, 11) ** 2
    expected = {"all_reduce": vectors.sum(0), "all_gather": vectors, "broadcast": vectors[root]}[collective]
    mesh = Mesh.of(fabric.shape)
    executor = Executor(Group(mesh, tuple(range(mesh.ndim))), Box((11,), (0,), (11,)))
    gathers = collective == "all_gather"
    found = executor.gather_all(schedule, vectors) if gathers else executor.reduce_all(schedule, vectors, "sum")
    assert all(torch.equal(held, expected) for held in found)


@pytest.mark.parametrize("where", FABRICS)
@pytest.mark.parametrize("collective", ARGUMENTS)
def test_the_algorithm_chosen_by_predicted_time_equals_the_host(collective, where):
    x = sharded(FABRICS[where], torch.int32)
    check_same_parts(*both(collective, x, FABRICS[where]), exact=True)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("collective", REDUCING)
def test_every_reduction_over_links_equals_the_host(collective, op):
    fabric = FABRICS["torus of 2x4"]
    dtype = torch.float64 if op in ("mean", "prod") else torch.int64
    check_same_parts(*both(collective, sharded(fabric, dtype), fabric, op=op), exact=op not in ("mean", "prod"))


@pytest.mark.parametrize("axis", ["a", "b", ("a", "b"), ("b", "a"), None])
@pytest.mark.parametrize("collective", ARGUMENTS)
def test_groups_along_some_axes_equal_the_host(collective, axis):
    fabric = FABRICS["torus of 2x4"]
    mesh = Mesh(a=2, b=4)
    x = loom.distribute(torch.arange(16 * 24).view(16, 24), mesh, "S(1), S(0)")
    check_same_parts(*both(collective, x, fabric, axis=axis), exact=True)


def test_a_comparison_with_another_value_fails():
    x = sharded(FABRICS["ring of 4"], torch.int64)
    sent, _ = both("all_reduce", x, FABRICS["ring of 4"])
    with pytest.raises(AssertionError):
        check_same_parts(sent, sent + 1, exact=True)
    with pytest.raises(AssertionError):
        check_same_parts(sent, x, exact=True)


@pytest.mark.parametrize("algorithm", ["ring", "bidirectional_ring", "line"])
@pytest.mark.parametrize("collective", REDUCING)
def test_precise_brings_a_bfloat16_sum_closer_to_float32(collective, algorithm):
    mesh = loom.open_mesh((32,), axes=("d",))
    low = torch.randn(32 * 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    call = getattr(loom.collectives, collective)
    exact = call(loom.distribute(low.float(), mesh, "S(0)"), **ARGUMENTS[collective]).to_torch()

    def error(precise: bool) -> float:
        x = loom.distribute(low, mesh, "S(0)")
        found = call(x, **ARGUMENTS[collective], mode="fabric", algorithm=algorithm, precise=precise)
        assert found.dtype == torch.bfloat16
        return float((found.to_torch().float() - exact).abs().mean())

    assert error(precise=True) < 0.5 * error(precise=False)


def test_the_host_adds_bfloat16_in_float32():
    x = loom.distribute(torch.tensor([256.0, 1.0, 1.0, 1.0]).bfloat16(), LINE, "S(0)")
    assert loom.collectives.all_reduce(x, mode="host").item() == 260.0  # 259, rounded once; step by step it stays 256
    assert loom.collectives.all_reduce(x, mode="fabric", algorithm="ring", precise=True).item() == 260.0


# --- refusals ---------------------------------------------------------------------------------------------------


def numbers(*shape: int, placements: str = "S(0)") -> loom.Tensor:
    return loom.ones(*shape, mesh=LINE, placements=placements)


Case = tuple[type, Callable[[], Any], str]
REFUSED: dict[str, Case] = {
    "mode": (
        loom.ModeError,
        lambda: loom.collectives.all_reduce(numbers(8), mode="fabrik"),
        "there is no mode 'fabrik'\n  fix  did you mean 'fabric'? known: 'direct', 'host', 'fabric'",
    ),
    "mode of a shift": (
        loom.ModeError,
        lambda: loom.collectives.shift(numbers(8), mode="wire"),
        "there is no mode 'wire'\n  fix  did you mean 'direct'? known: 'direct', 'host', 'fabric'",
    ),
    "axis": (
        loom.MeshError,
        lambda: loom.collectives.all_reduce(numbers(8), "tp"),
        "the mesh has no axis 'tp'\n  mesh  Mesh(d=4)\n  fix   known: 'd'",
    ),
    "axis twice": (
        loom.ArgumentError,
        lambda: loom.collectives.broadcast(numbers(8), 0, ("d", "d")),
        "axis= names ['d', 'd']\n  mesh  Mesh(d=4)\n  fix   name each axis once, or leave it out for all",
    ),
    "no axis": (
        loom.ArgumentError,
        lambda: loom.collectives.all_gather(numbers(8), 0, ()),
        "axis= names []\n  mesh  Mesh(d=4)\n  fix   name each axis once, or leave it out for all",
    ),
    "axis by number": (
        loom.ArgumentError,
        lambda: loom.collectives.all_reduce(numbers(8), 0),  # type: ignore[arg-type]
        "axis takes names, not 0\n  mesh  Mesh(d=4)\n  fix   known: 'd'",
    ),
    "dim": (
        loom.ShapeError,
        lambda: loom.collectives.all_gather(numbers(8, 4), 2),
        "dim 2 is out of range for a tensor of 2 dims\n  fix  dims go from -2 to 1",
    ),
    "dim of a number": (
        loom.ShapeError,
        lambda: loom.collectives.reduce_scatter(loom.ones((), mesh=LINE), 0),
        "a 0-d tensor has no dim to gather or cut along\n  tensor  f32[](R) on Mesh(d=4)\n  fix     unsqueeze it",
    ),
    "one dim for two": (
        loom.ArgumentError,
        lambda: loom.collectives.all_to_all(numbers(8, 4), 1, -1),
        "split_dim and concat_dim are both 1\n  fix  use two dims; all_gather and reduce_scatter act along one",
    ),
    "op": (
        loom.ArgumentError,
        lambda: loom.collectives.all_reduce(numbers(8), op="add"),
        "there is no reduction 'add'\n  fix  known: 'sum', 'mean', 'max', 'min', 'prod'",
    ),
    "op of bool": (
        loom.ArgumentError,
        lambda: loom.collectives.reduce(numbers(8) > 0),
        "a sum of bool has no meaning\n  fix  use max for any, min for all, or cast first",
    ),
    "mean of whole numbers": (
        loom.ArgumentError,
        lambda: loom.collectives.reduce_scatter(numbers(8).long(), 0, op="mean"),
        "a mean of i64 has no meaning\n  fix  cast to f32 first",
    ),
    "algorithm": (
        loom.ArgumentError,
        lambda: loom.collectives.all_reduce(numbers(8), mode="fabric", algorithm="rong"),
        "all_reduce has no algorithm 'rong'\n  fix  did you mean 'ring'? known: 'ring'",
    ),
    "algorithm of another mode": (
        loom.ArgumentError,
        lambda: loom.collectives.all_reduce(numbers(8), mode="direct", algorithm="rong"),
        "all_reduce has no algorithm 'rong'\n  fix  did you mean 'ring'? known: 'ring'",
    ),
    "algorithm of another collective": (
        loom.ArgumentError,
        lambda: loom.collectives.all_to_all(numbers(8, 4), 1, 0, mode="fabric", algorithm="tree"),
        "all_to_all has no algorithm 'tree'\n  fix  did you mean 'spanning_tree'? known: 'ring', 'bidirectional_ring', "
        "'line', 'halving_doubling', 'direct', 'spanning_tree'",
    ),
    "algorithm without its links": (
        loom.FabricError,
        lambda: loom.collectives.all_reduce(numbers(8), mode="fabric", algorithm="tree"),
        "no link joins (0,) to (2,), and every two of 4 members need one",
    ),
    "root": (
        loom.ArgumentError,
        lambda: loom.collectives.broadcast(numbers(8), 4),
        "root 4 is not a member of a group of 4\n  mesh  Mesh(d=4)\n  fix   members go from 0 to 3, row-major over d",
    ),
    "root that is no number": (
        loom.ArgumentError,
        lambda: loom.collectives.reduce(numbers(8), True),
        "root True is not a member of a group of 4\n  mesh  Mesh(d=4)\n"
        "  fix   members go from 0 to 3, row-major over d",
    ),
    "destination": (
        loom.ArgumentError,
        lambda: loom.collectives.send_recv(numbers(8), 0, -1),
        "destination -1 is not a member of a group of 4\n  mesh  Mesh(d=4)\n"
        "  fix   members go from 0 to 3, row-major over d",
    ),
    "a plain tensor": (
        loom.ArgumentError,
        lambda: loom.collectives.all_reduce(torch.ones(8)),
        "a collective takes a meshloom tensor, not Tensor\n  fix  loom.distribute it",
    ),
    "barrier": (loom.ArgumentError, lambda: loom.collectives.barrier(4), "barrier takes a mesh, not int"),
    "shift by half a place": (
        loom.ArgumentError,
        lambda: loom.collectives.shift(numbers(8), 0.5),  # type: ignore[arg-type]
        "shift takes a whole number of places, not 0.5",
    ),
    "shift of what is replicated": (
        loom.ArgumentError,
        lambda: loom.collectives.shift(numbers(8, placements="R"), wrap=False),
        "members of the group would hold different values along a replicated axis, which no placement says\n"
        "  tensor  f32[8](R) on Mesh(d=4)\n"
        "  fix     shard the tensor along the group, or leave the replicated axis out of it",
    ),
    "shift of uneven parts": (
        loom.ShapeError,
        lambda: loom.collectives.shift(numbers(10)),
        "parts of different sizes cannot take each other's place\n  tensor  f32[10](S(0)) on Mesh(d=4)\n"
        "  fix     pad the dim to a multiple of the devices",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_this_text_and_leaves_no_event(name):
    kind, act, text = REFUSED[name]
    with loom.record() as log, pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind and str(caught.value) == text
    if name != "algorithm without its links":  # known only when its schedule is built
        assert not log.events


def test_an_unknown_mode_is_a_value_error_in_every_collective():
    for name, options in ARGUMENTS.items():
        with pytest.raises(ValueError, match="there is no mode 'x'"):
            getattr(loom.collectives, name)(numbers(8, 4), mode="x", **options)


def test_a_fabric_of_another_shape_is_refused_where_it_is_used():
    with loom.use_fabric(Fabric.grid((8,), "line", 1e-6, 1e9)), loom.record() as log:
        loom.collectives.all_reduce(numbers(8))  # the block needs no links
        with pytest.raises(loom.ArgumentError) as caught:
            loom.collectives.all_reduce(numbers(8), mode="fabric")
    assert str(caught.value) == (
        "the fabric has shape (8,) and the mesh (4,)\n  fabric  8 fabric (line) of 14 links\n  mesh    Mesh(d=4)\n"
        "  fix     use a fabric of the mesh's shape"
    )
    assert len(log) == 1


def test_use_fabric_takes_a_fabric():
    with pytest.raises(loom.ArgumentError, match=r"^use_fabric takes a Fabric, not 'ring'$"), loom.use_fabric("ring"):  # type: ignore[arg-type]
        pass


# --- broken links -----------------------------------------------------------------------------------------------


def test_a_broken_ring_is_a_line_and_no_ring():
    broken = FABRICS["ring of 4"].without((1,), (2,))
    x = sharded(broken, torch.int64)
    check_same_parts(*both("all_reduce", x, broken), exact=True)
    check_same_parts(*both("all_reduce", x, broken, algorithm="line"), exact=True)
    with pytest.raises(loom.FabricError) as caught:
        both("all_reduce", x, broken, algorithm="ring")
    assert str(caught.value) == (
        "no ring joins these 4 coordinates: (1,) is linked to (0,) alone\n  fabric   4 fabric of 6 links\n"
        "  group    (0,) (1,) (2,) (3,)\n  nearest  a line: (2,) (3,) (0,) (1,)\n"
        "  fix      ask for the line, or make axis 0 a ring"
    )


@pytest.mark.parametrize("collective", ARGUMENTS)
def test_a_torus_with_a_missing_link_still_serves_the_whole_mesh(collective):
    broken = FABRICS["torus of 2x4"].without((0, 0), (0, 1))
    check_same_parts(*both(collective, sharded(broken, torch.int64), broken), exact=True)


def test_groups_along_an_axis_of_links_that_are_no_grid_are_refused():
    broken = FABRICS["torus of 2x4"].without((0, 0), (0, 1))
    with pytest.raises(loom.ArgumentError) as caught:
        both("all_reduce", sharded(broken, torch.int64), broken, axis="b")
    assert str(caught.value) == (
        "links that are no grid have no common schedule for several groups\n  fabric  2x4 fabric of 22 links\n"
        "  fix     go over the whole mesh, or use a grid"
    )


def test_a_message_is_routed_around_a_missing_link():
    broken = FABRICS["ring of 4"].without((0,), (1,))
    assert broken.route((0,), (1,)) == ((0,), (3,), (2,), (1,))
    x = loom.arange(4, mesh=LINE)
    with loom.use_fabric(broken):
        assert loom.collectives.send_recv(x, 0, 1, mode="fabric").to_torch().tolist() == [0, 0, 2, 3]


def test_links_that_leave_someone_out_are_no_fabric():
    with pytest.raises(loom.FabricError, match="not connected"):
        FABRICS["line of 4"].without((1,), (2,))


# --- point to point ---------------------------------------------------------------------------------------------

MODES = collectives.MODES


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("source", "destination"), list(itertools.product(range(4), repeat=2)))
def test_send_recv_changes_one_member(source, destination, mode):
    x = loom.arange(8, mesh=LINE)
    parts = [[0, 1], [2, 3], [4, 5], [6, 7]]
    found = loom.collectives.send_recv(x, source, destination, mode=mode)
    parts[destination] = parts[source]
    assert found.to_torch().tolist() == list(itertools.chain(*parts))
    assert found.topology == x.topology and x.to_torch().tolist() == list(range(8))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("offset", [-5, -1, 0, 1, 2, 4, 7])
def test_shift_is_a_roll_and_without_wrap_zeros_come_in(offset, mode):
    x = loom.arange(1, 9, mesh=LINE)
    rolled = loom.collectives.shift(x, offset, mode=mode)
    assert rolled.to_torch().equal(torch.arange(1, 9).roll(2 * offset))
    cut = loom.collectives.shift(x, offset, wrap=False, mode=mode).to_torch()
    expected = [0 if not 0 <= i - 2 * offset < 8 else i - 2 * offset + 1 for i in range(8)]
    assert cut.tolist() == expected


@pytest.mark.parametrize("mode", MODES)
def test_shift_along_one_axis_moves_each_group_by_itself(mode):
    x = loom.distribute(torch.arange(8).view(2, 4), Mesh(a=2, b=4), "S(0), S(1)")
    assert loom.collectives.shift(x, 1, "b", mode=mode).to_torch().tolist() == [[3, 0, 1, 2], [7, 4, 5, 6]]
    assert loom.collectives.shift(x, 1, "a", mode=mode).to_torch().tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_a_replicated_value_stays_itself_when_members_exchange_it():
    x = numbers(4, placements="R")
    assert loom.collectives.shift(x).topology == x.topology
    assert loom.collectives.send_recv(x, 0, 3).to_torch().equal(torch.ones(4))


def test_the_gradient_of_a_shift_goes_the_other_way():
    x = loom.ones(4, mesh=LINE).requires_grad_()
    weight = loom.distribute(torch.tensor([1.0, 2.0, 3.0, 4.0]), LINE, "S(0)")
    (loom.collectives.shift(x, 1) * weight).sum().backward()
    assert x.grad.to_torch().tolist() == [2.0, 3.0, 4.0, 1.0]


# --- what is said about it --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("collective", [*ARGUMENTS, "shift"])
def test_forbid_raises_before_a_part_is_read(collective, mode, monkeypatch, few_collectives):
    def read(*_: Any) -> None:
        raise AssertionError("a part was read")

    monkeypatch.setattr(literal.Operand, "parts", read)
    call, options = getattr(loom.collectives, collective), ARGUMENTS.get(collective, {})
    title = collective if mode == "direct" else f"{collective} ({mode})"
    with loom.record() as log, loom.communication("forbid"), pytest.raises(loom.CommunicationError) as caught:
        call(numbers(8, 4), mode=mode, **options)
    assert caught.value.headline.startswith(f"{title} would communicate ")
    assert not log.events and few_collectives == [0, 0, 0.0]
    with pytest.raises(AssertionError, match="a part was read"):
        call(numbers(8, 4), mode=mode, **options)


def test_forbid_lets_a_group_of_one_pass():
    x = loom.ones(4, mesh=loom.open_mesh((1, 2), axes=("a", "b")), placements="R, S(0)")
    with loom.communication("forbid"):
        found = loom.collectives.all_reduce(x, "a")
    assert found.to_torch().equal(torch.ones(4))


def test_a_hot_path_through_the_host_warns_once_with_the_figure():
    x = numbers(8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3 * modes.HOT):
            loom.collectives.all_reduce(x, mode="host")
    (warning,) = caught
    assert warning.category is modes.HostTrafficWarning and warning.filename == __file__
    said = re.sub(r"in \S+ s", "in a while", str(warning.message))
    assert re.sub(r":\d+", "", said) == (
        f"100 collectives went through the host, {100 * 2 * 8 * 4} B in a while, the last at "
        "test_collective_modes.py; mode='direct' or 'fabric' does not"
    )


@pytest.mark.parametrize("mode", ["direct", "fabric"])
def test_the_other_modes_do_not_touch_the_host(mode, few_collectives):
    with loom.record() as log:
        for name, options in ARGUMENTS.items():
            getattr(loom.collectives, name)(numbers(8, 4), mode=mode, **options)
    assert log.host_bytes == 0 and few_collectives == [0, 0, 0.0]
    assert list(log.kinds()) == list(ARGUMENTS)


@pytest.mark.parametrize("collective", [*ARGUMENTS, "shift"])
def test_a_collective_through_the_host_is_counted_once(collective, few_collectives):
    getattr(loom.collectives, collective)(numbers(8, 4), mode="host", **ARGUMENTS.get(collective, {}))
    assert few_collectives[0] == 1 and few_collectives[1] > 0 and few_collectives[2] > 0
