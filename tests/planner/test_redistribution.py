"""Any placements to any others: the values stay, the path is a shortest one, its bytes are those of the formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import meshloom as loom
from meshloom import Mesh, Partial, Placement, Replicate, Shard, Topology
from meshloom.collectives import KINDS
from meshloom.engines.reductions import REDUCTIONS
from meshloom.fabric import VIRTUAL
from meshloom.planner import route
from meshloom.planner.paths import SMALL

AXES = ("a", "b", "c")
SLOW = loom.Machine("slow", latency=1e-9, bandwidth=1e6, flops=1e12, memory_bandwidth=1e11)


def placements_for(ndim: int, mesh: Mesh) -> st.SearchStrategy[tuple[Placement, ...]]:
    """Any placements; partial axes of one tensor reduce alike."""
    plain: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(ndim))]

    def with_partial(op: str) -> st.SearchStrategy[tuple[Placement, ...]]:
        return st.tuples(*(st.sampled_from([*plain, Partial(op)]) for _ in mesh.axes))

    return st.sampled_from(["sum", "mean", "max", "min", "prod"]).flatmap(with_partial)


@st.composite
def journeys(draw: st.DrawFn, stops: int = 2) -> tuple[torch.Tensor, Mesh, list[tuple[Placement, ...]]]:
    """A dense tensor, a mesh and some placements of it."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 10]), min_size=0, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    mesh = Mesh.of(sizes, AXES[: len(sizes)])
    dense = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)
    return dense, mesh, [draw(placements_for(len(shape), mesh)) for _ in range(stops)]


@given(journeys())
@settings(max_examples=200, deadline=None)
def test_there_and_back_is_the_identity(journey):
    dense, mesh, (here, there) = journey
    x = loom.distribute(dense, mesh, here)
    moved = x.redistribute(there)
    back = moved.redistribute(here)
    assert moved.placements == there and back.placements == here
    for each in (x, moved, back):
        assert torch.equal(each.to_torch(), dense)
        assert not each._data[~_held(each)].any()  # padding is zero


def _held(x: loom.Tensor) -> torch.Tensor:
    """True where the stored array holds an element: ones, placed the same way and not partial."""
    topology = x.topology.reduced
    ones = loom.distribute(torch.ones(topology.shape, dtype=torch.bool), topology.mesh, topology.placements)
    return ones._data.expand(x._data.shape)


@given(journeys(stops=4))
@settings(max_examples=60, deadline=None)
def test_a_chain_of_redistributions_keeps_the_values(journey):
    dense, mesh, stops = journey
    x = loom.distribute(dense, mesh, stops[0])
    for stop in stops[1:]:
        x = x.redistribute(stop)
    assert torch.equal(x.to_torch(), dense)


@given(journeys())
@settings(max_examples=80, deadline=None)
def test_gradients_pass_through_a_redistribution_unchanged(journey):
    dense, mesh, (here, there) = journey
    leaf = loom.distribute(dense, mesh, "(" + ", ".join("R" for _ in mesh.axes) + ")").requires_grad_()
    weight = dense + 1
    (leaf.redistribute(here).redistribute(there) * weight).sum().backward()
    torch.testing.assert_close(leaf.grad.to_torch(), weight)


def test_redistribute_shares_no_memory_with_its_source():
    mesh = Mesh(d=4)
    x = loom.distribute(torch.zeros(8, 8), mesh, "S(0)")
    y = x.redistribute("S(1)")
    y.add_(1)
    assert not x.to_torch().any()
    dense = x.to_torch()
    dense.add_(1)
    assert not x.to_torch().any()


def test_a_dict_leaves_the_other_axes_alone():
    x = loom.ones(8, 8, mesh=Mesh(dp=2, tp=2), placements="S(0), S(1)")
    assert x.redistribute({"tp": Replicate()}).placements == (Shard(0), Replicate())
    assert x.redistribute({"tp": Shard(-2)}).placements == (Shard(0), Shard(0))


# the path


def cost(topology: Topology, target: tuple[Placement, ...], machine: loom.Machine = VIRTUAL) -> float:
    return route(topology, target, machine)[1]


@given(journeys(stops=3), st.sampled_from([VIRTUAL, SLOW]))
@settings(max_examples=150, deadline=None)
def test_a_detour_is_never_cheaper(journey, machine):
    dense, mesh, (a, b, c) = journey
    assume((2 + dense.dim()) ** mesh.ndim <= SMALL and not shards_early(a, b))
    start = Topology(mesh, a, tuple(dense.shape), "f32")
    through = cost(start, b, machine) + cost(start.with_placements(b), c, machine)
    assert cost(start, c, machine) <= through * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(16, 8), (5, 7), (4096, 4096)])
def test_no_detour_over_all_placements_of_a_2d_mesh_is_cheaper(shape):
    mesh = Mesh(x=2, y=4)
    kinds = (Replicate(), Shard(0), Shard(1), Partial("sum"))
    start = Topology(mesh, (Replicate(),) * 2, shape, "f32")
    every = list(itertools.product(kinds, repeat=2))
    price = {(a, b): cost(start.with_placements(a), b) for a in every for b in every}
    triples = [each for each in itertools.product(every, repeat=3) if not shards_early(*each[:2])]
    assert [(a, b, c) for a, b, c in triples if price[a, c] > (price[a, b] + price[b, c]) * 1.0001] == []
    assert all(price[a, a] == 0 for a in every)


def shards_early(a, b):
    """Whether the detour shards a replicated axis before it has to, which a redistribution does not do."""
    return any(x == Replicate() != y for x, y in zip(a, b, strict=True))


def test_an_axis_that_is_replicated_at_both_ends_is_left_alone():
    start = Topology(Mesh(x=2, y=4), (Replicate(), Partial("sum")), (4096, 4096), "f32")
    steps, _ = route(start, (Replicate(), Replicate()), VIRTUAL)
    assert [(step.kind, step.axis) for step in steps] == [("all_reduce", "y")]


def test_a_reduction_over_two_axes_scatters_and_gathers_where_that_moves_less():
    start = Topology(Mesh(x=2, y=4), (Partial("sum"), Partial("sum")), (4096, 4096), "f32")
    whole = 4096 * 4096 * 4
    steps, _ = route(start, (Replicate(), Replicate()), VIRTUAL)
    assert [(step.kind, step.axis, step.bytes) for step in steps] == [
        ("reduce_scatter", "y", whole * 3 // 4),
        ("all_reduce", "x", whole // 4),
        ("all_gather", "y", whole * 3 // 4),
    ]


def test_one_all_reduce_is_preferred_to_a_reduce_scatter_and_an_all_gather():
    for shape, devices in itertools.product([(1,), (7,), (64, 3), (4096, 4096)], [2, 3, 4, 8]):
        start = Topology(Mesh(x=devices), (Partial("sum"),), shape, "f32")
        assert [step.kind for step in route(start, (Replicate(),), VIRTUAL)[0]] == ["all_reduce"]


def test_the_outer_of_two_axes_on_a_dim_is_freed_by_going_round_the_inner_one():
    start = Topology(Mesh(x=2, y=4), (Shard(0), Shard(0)), (4096, 4096), "f32")
    steps, _ = route(start, (Replicate(), Shard(0)), VIRTUAL)
    assert [(step.kind, step.axis) for step in steps] == [("all_to_all", "y"), ("all_gather", "x"), ("all_to_all", "y")]


def test_gathering_the_outer_axis_costs_more_than_the_inner_one():
    start = Topology(Mesh(x=4, y=4), (Shard(0), Shard(0)), (64, 8), "f32")
    inner = route(start, (Shard(0), Replicate()), VIRTUAL)
    outer = route(start, (Replicate(), Shard(0)), VIRTUAL)
    assert [(step.kind, step.axis) for step in inner[0]] == [("all_gather", "y")]
    assert [(step.kind, step.axis) for step in outer[0]] == [("all_gather", "y"), ("all_gather", "x")]
    assert outer[1] > inner[1]


@given(journeys())
@settings(max_examples=100, deadline=None)
def test_every_step_changes_one_innermost_axis_and_the_path_ends_at_the_target(journey):
    """Replays the collectives on placements: each has exactly one reading that the next ones follow."""
    dense, mesh, (here, there) = journey
    start = Topology(mesh, here, tuple(dense.shape), "f32")
    steps, _ = route(start, there, VIRTUAL)
    assert there in _reachable(start, [(step.kind, step.axis) for step in steps], there)


def _reachable(
    start: Topology, steps: list[tuple[str, str]], target: tuple[Placement, ...]
) -> set[tuple[Placement, ...]]:
    """The placements that follow from the collectives, with free changes (R to S or P) anywhere in between."""
    mesh = start.mesh
    states = _freely(start, {start.placements}, target)
    for kind, name in steps:
        axis = mesh.axis(name)
        states = {
            (*state[:axis], new, *state[axis + 1 :])
            for state in states
            for new in _options(start, target, axis)
            if _kind(state[axis], new) == kind and _is_innermost(state, axis, new)
        }
        states = _freely(start, states, target)
    return states


def _options(start: Topology, target: tuple[Placement, ...], axis: int) -> set[Placement]:
    return {Replicate(), target[axis], *(Shard(dim) for dim in range(start.ndim))}


def _freely(
    start: Topology, states: set[tuple[Placement, ...]], target: tuple[Placement, ...]
) -> set[tuple[Placement, ...]]:
    mesh = start.mesh
    found, fresh = set(states), set(states)
    while fresh:
        grown = set()
        for state, axis in itertools.product(fresh, range(mesh.ndim)):
            for new in _options(start, target, axis):
                free = mesh.shape[axis] == 1 or isinstance(state[axis], Replicate)
                if free and new != state[axis] and _is_innermost(state, axis, new):
                    grown.add((*state[:axis], new, *state[axis + 1 :]))
        fresh = grown - found
        found |= fresh
    return found


def _kind(now: Placement, new: Placement) -> str | None:
    if isinstance(now, Partial):
        return "reduce_scatter" if isinstance(new, Shard) else "all_reduce" if isinstance(new, Replicate) else None
    if isinstance(now, Shard) and new != now:
        return "all_to_all" if isinstance(new, Shard) else "all_gather" if isinstance(new, Replicate) else None
    return None


def _is_innermost(state: tuple[Placement, ...], axis: int, new: Placement) -> bool:
    touched = {p.dim for p in (state[axis], new) if isinstance(p, Shard)}
    return not any(isinstance(p, Shard) and p.dim in touched for p in state[axis + 1 :])


# bytes by hand: a tensor of f32[16, 8], 512 bytes in all


def moved(mesh: Mesh, here: str, there: str, shape: tuple[int, ...] = (16, 8)) -> list[tuple[str, str, int]]:
    start = Topology(mesh, loom.parse(f"({here})"), shape, "f32")  # type: ignore[arg-type]
    steps, _ = route(start, loom.parse(f"({there})"), VIRTUAL)  # type: ignore[arg-type]
    return [(step.kind, step.axis, step.bytes) for step in steps]


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ("S(0)", "R", [("all_gather", "tp", 384)]),  # 512 * 3 / 4
        ("P(sum)", "R", [("all_reduce", "tp", 768)]),  # 2 * 512 * 3 / 4
        ("P(max)", "R", [("all_reduce", "tp", 768)]),
        ("P(sum)", "S(1)", [("reduce_scatter", "tp", 384)]),
        ("S(0)", "S(1)", [("all_to_all", "tp", 96)]),  # 128 held, 3 / 4 of it comes from others
        ("R", "S(0)", []),
        ("R", "P(sum)", []),
        ("S(0)", "P(sum)", [("all_gather", "tp", 384)]),
        ("P(sum)", "P(max)", [("all_reduce", "tp", 768)]),
        ("S(0)", "S(0)", []),
    ],
)
def test_bytes_on_four_devices(here, there, expected):
    assert moved(Mesh(tp=4), here, there) == expected


@pytest.mark.parametrize(
    ("here", "there", "expected"),
    [
        ("S(0), S(1)", "R, R", [("all_gather", "dp", 64), ("all_gather", "tp", 384)]),
        ("S(0), S(0)", "S(0), R", [("all_gather", "tp", 192)]),  # 256 * 3 / 4
        ("S(0), S(0)", "R, S(0)", [("all_gather", "tp", 192), ("all_gather", "dp", 256)]),
        ("S(0), P(sum)", "S(0), R", [("all_reduce", "tp", 384)]),
        ("P(sum), S(0)", "S(1), S(0)", [("reduce_scatter", "dp", 64)]),
        ("S(0), R", "S(1), R", [("all_to_all", "dp", 128)]),
    ],
)
def test_bytes_on_two_by_four_devices(here, there, expected):
    assert moved(Mesh(dp=2, tp=4), here, there) == expected


def test_padding_counts_in_the_bytes_that_move():
    assert moved(Mesh(tp=4), "S(0)", "S(1)", (10, 8)) == [("all_to_all", "tp", 3 * 8 * 4 * 3 // 4)]


@pytest.mark.parametrize("devices", [2, 3, 8, 128])
def test_the_formulas_are_the_lower_bounds(devices):
    whole = 1024 * devices
    part = whole // devices
    assert KINDS["all_gather"].size(part, whole, devices) == whole - part
    assert KINDS["reduce_scatter"].size(whole, part, devices) == whole - part
    assert KINDS["all_reduce"].size(whole, whole, devices) == 2 * (whole - part)
    assert KINDS["all_to_all"].size(part, part, devices) == math.ceil(part * (devices - 1) / devices)
    assert KINDS["all_reduce"].size(1, 1, devices) >= 1, "one byte is not none"


def test_an_axis_of_one_device_moves_nothing():
    assert moved(Mesh(a=1, b=4), "S(0), R", "R, R") == []
    assert moved(Mesh(a=1, b=4), "P(sum), S(0)", "S(1), S(0)") == []


# from_local, block and shard_at


@given(journeys(stops=1))
@settings(max_examples=100, deadline=None)
def test_parts_that_were_read_off_make_the_same_tensor_again(journey):
    dense, mesh, (here,) = journey
    x = loom.distribute(dense, mesh, here)
    parts = [x.shard_at(place) for place in mesh.coordinates()]
    again = loom.from_local(parts, mesh, here)
    assert again.topology is x.topology
    assert torch.equal(again.to_torch(), dense)


@given(journeys(stops=1))
@settings(max_examples=100, deadline=None)
def test_block_and_shard_at_agree_with_the_dense_tensor(journey):
    dense, mesh, (here,) = journey
    x = loom.distribute(dense, mesh, tuple(Replicate() if isinstance(p, Partial) else p for p in here))
    assert tuple(x.block.shape) == x.topology.block_shape
    for place in mesh.coordinates():
        part = dense
        for dim, (start, extent) in enumerate(zip(x.topology.offset(place), x.topology.extent(place), strict=True)):
            part = part.narrow(dim, min(start, dense.shape[dim]), extent)
        assert torch.equal(x.shard_at(place), part)
        local = x.block[tuple(0 if size == 1 else c for c, size in zip(place, x.block.shape, strict=False))]
        assert tuple(local.shape) == x.topology.local_shape
        inside = tuple(slice(0, extent) for extent in x.topology.extent(place))
        assert torch.equal(local[inside], part)


def test_block_shares_memory_with_the_tensor():
    x = loom.zeros(8, 4, mesh=Mesh(d=4), placements="S(1)")
    x.block[2] += 5
    assert x.to_torch()[:, 2].eq(5).all() and x.to_torch().sum() == 40


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
def test_partial_parts_are_reduced_when_they_are_read(op):
    parts = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 5.0]), torch.tensor([-4.0, 0.5])]
    x = loom.from_local(parts, Mesh(d=3), (Partial(op),))
    stacked = torch.stack(parts)
    expected = {"max": stacked.amax(0), "min": stacked.amin(0)}.get(op)
    expected = getattr(stacked, op)(0) if expected is None else expected
    assert torch.equal(x.to_torch(), expected)
    assert all(torch.equal(x.shard_at((i,)), part) for i, part in enumerate(parts))


def test_replicas_that_are_both_nan_agree():
    part = torch.tensor([float("nan"), 1.0])
    x = loom.from_local([part, part.clone()], Mesh(d=2), "R")
    assert torch.equal(x.to_torch().isnan(), part.isnan())


def test_replicas_that_differ_in_nan_are_refused():
    with pytest.raises(loom.PlacementError, match=r"the parts at \(0,\) and \(1,\) differ"):
        loom.from_local([torch.tensor([float("nan")]), torch.tensor([1.0])], Mesh(d=2), "R")


def test_replicas_of_integers_and_bool_are_compared_exactly():
    big = 2**60
    with pytest.raises(loom.PlacementError, match="differ"):
        loom.from_local([torch.tensor([big]), torch.tensor([big + 1])], Mesh(d=2), "R")
    assert loom.from_local([torch.tensor([True])] * 2, Mesh(d=2), "R").item() is True


@pytest.mark.parametrize(
    "sizes",
    [(2, 3), (1, 2, 3), (3, 1, 3), (0, 3), (3, 3, 1, 3), (2, 2, 2, 3)],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
def test_ragged_parts_are_refused(sizes):
    with pytest.raises(loom.PlacementError, match=r"the part at \(\d,\) has shape \[\d\] and its placements give it"):
        loom.from_local([torch.ones(size, 2)[:, 0] for size in sizes], Mesh(d=len(sizes)), "S(0)")


@pytest.mark.parametrize("sizes", [(3, 3, 3, 1), (2, 2, 1, 0), (1, 0, 0, 0), (0, 0, 0, 0), (4, 4, 4, 4)])
def test_parts_cut_as_the_topology_says_are_taken(sizes):
    parts = [torch.full((size,), float(i)) for i, size in enumerate(sizes)]
    assert torch.equal(loom.from_local(parts, Mesh(d=4), "S(0)").to_torch(), torch.cat(parts))


def test_parts_of_different_rank_are_refused():
    with pytest.raises(loom.PlacementError, match=r"has shape .* and its placements give it"):
        loom.from_local([torch.ones(2), torch.tensor(1.0)], Mesh(d=2), "S(0)")


def test_parts_on_two_axes_of_one_dim_nest_left_first():
    mesh = Mesh(a=2, b=4)
    parts = [torch.full((n,), float(i)) for i, n in enumerate([2, 2, 1, 0, 2, 2, 1, 0])]
    x = loom.from_local(parts, mesh, "S(0), S(0)")
    assert x.to_torch().tolist() == [0, 0, 1, 1, 2, 4, 4, 5, 5, 6]


LAYOUTS = [((2,), "P({})"), ((4,), "P({})"), ((2, 4), "S(0), P({})"), ((3, 2), "P({}), S(0)"), ((2, 2), "P({}), P({})")]


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize(("sizes", "placements"), LAYOUTS)
def test_values_that_become_partial_and_whole_again_keep_the_sign_of_zero(
    op: str, sizes: tuple[int, ...], placements: str
) -> None:
    mesh = Mesh.of(sizes)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        dense = torch.tensor([-0.0, 0.0, -1.0, torch.inf, -torch.inf, torch.nan, -0.0], dtype=dtype)
        found = loom.distribute(dense, mesh, "R" + ", R" * (len(sizes) - 1)).redistribute(placements.format(op, op))
        torch.testing.assert_close(found.to_torch(), dense, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(found.to_torch().signbit()[dense == 0], dense.signbit()[dense == 0])


def test_complex_values_that_become_partial_and_whole_again_keep_the_signs_of_zeros() -> None:
    dense = torch.tensor([complex(-0.0, -0.0), complex(1.0, -0.0), complex(-0.0, torch.inf)])
    found = loom.distribute(dense, Mesh.of((2,)), "R").redistribute("P(sum)").to_torch()
    for ours, theirs in ((found.real, dense.real), (found.imag, dense.imag)):
        assert torch.equal(ours, theirs) and torch.equal(ours.signbit(), theirs.signbit())


@pytest.mark.parametrize("devices", [2, 3, 4, 128])
@pytest.mark.parametrize(("dtype", "large"), [(torch.float32, 2e38), (torch.float64, 1e308), (torch.float16, 6e4)])
def test_a_mean_of_large_parts_does_not_overflow(devices: int, dtype: torch.dtype, large: float) -> None:
    dense = torch.tensor([large, -large, 1.0, torch.finfo(dtype).tiny], dtype=dtype)
    x = loom.distribute(dense, Mesh.of((devices,)), "R").requires_grad_()
    found = x.redistribute("P(mean)").redistribute("R")
    torch.testing.assert_close(found.to_torch().detach(), dense)
    found.sum().backward()
    torch.testing.assert_close(x.grad.to_torch(), torch.ones_like(dense))


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod"])
@pytest.mark.parametrize("seed", [1.0, torch.inf, -torch.inf, 0.0])
def test_gradients_through_partial_values_are_denses_at_nan_and_at_infinity(op: str, seed: float) -> None:
    dense = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 2.0, -3.0])
    x = loom.distribute(dense, Mesh.of((4,)), "R").requires_grad_()
    whole = x.redistribute(f"P({op})").redistribute("S(0)")
    whole.backward(torch.full((7,), seed))
    torch.testing.assert_close(x.grad.to_torch(), torch.full((7,), seed))


@pytest.mark.parametrize(("op", "winner"), [("max", 0), ("min", 1)])
def test_an_infinite_gradient_goes_to_the_part_that_was_chosen(op: str, winner: int) -> None:
    data = torch.tensor([[3.0, torch.nan], [2.0, 1.0]], requires_grad=True)
    reduced = REDUCTIONS[op].along(data, 0)
    reduced.backward(torch.tensor([torch.inf, torch.inf]))
    expected = torch.zeros(2, 2)
    expected[winner, 0] = expected[0, 1] = torch.inf
    assert torch.equal(data.grad, expected)


@pytest.mark.parametrize("op", ["max", "min"])
def test_equal_parts_share_a_gradient(op: str) -> None:
    data = torch.tensor([[3.0, 1.0], [3.0, 1.0], [3.0, 1.0], [3.0, 1.0]], requires_grad=True)
    REDUCTIONS[op].along(data, 0).sum().backward()
    assert torch.equal(data.grad, torch.full((4, 2), 0.25))


@pytest.mark.parametrize("placements", ["R", "S(0)", "P(sum)"])
def test_redistribute_to_the_same_placements_is_the_tensor_itself_unless_a_copy_is_asked_for(placements: str) -> None:
    x = loom.distribute(torch.arange(3.0), Mesh.of((2,)), "R").redistribute(placements)
    assert x.redistribute(placements) is x
    y = x.redistribute(placements, copy=True)
    assert y.topology is x.topology
    y.add_(1)
    assert torch.equal(x.to_torch(), torch.arange(3.0)) and torch.equal(y.to_torch(), torch.arange(3.0) + 1)


def test_placements_that_make_no_key_are_refused_in_our_words():
    x = loom.ones(4, mesh=loom.open_mesh((2,), axes=("dp",)))
    for asked in ({"dp": []}, (["R"],), [["R"]]):
        with pytest.raises(loom.MeshloomError):
            x.redistribute(asked)
