"""A call of a kind that was seen before is the kernel alone, and sees all that changes from call to call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flows
import meshloom as loom
from meshloom import ttnn
from meshloom.errors import ClosedError, OperandError, OutOfMemoryError
from meshloom.ttnn.device import fabric
from meshloom.ttnn.ops import repeats
from meshloom.ttnn.tensor.tensor import form_of
from ttnn_cases import label


@pytest.fixture
def device() -> Iterator[Any]:
    repeats.forget()
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as opened:
        yield opened


def put(device: Any, *shape: int, dim: int | None = None, dtype: Any = ttnn.float32, seed: int = 0) -> Any:
    mapper = None if dim is None else ttnn.ShardTensorToMesh(device, dim=dim)
    values = torch.randn(shape or (64, 32), generator=torch.Generator().manual_seed(seed))
    return ttnn.from_torch(values, dtype=dtype, layout=ttnn.TILE_LAYOUT, device=device, mesh_mapper=mapper)


def read(tensor: Any) -> torch.Tensor:
    return ttnn.to_torch(tensor)


# the most functions of ours that a call seen before enters
FRAMES: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "add": (11, lambda x, y: ttnn.add(x, y)),
    "operator": (12, lambda x, y: x + y),
    "in other memory": (12, lambda x, y: ttnn.multiply(x, y, memory_config=ttnn.L1_MEMORY_CONFIG)),
    "with a number": (13, lambda x, y: ttnn.multiply(x, 2.0)),
    "unary": (11, lambda x, y: ttnn.exp(x)),
    "all_gather": (32, lambda x, y: ttnn.all_gather(x, dim=0)),
    "all_reduce": (30, lambda x, y: ttnn.all_reduce(x, cluster_axis=1)),
    "reduce_scatter": (34, lambda x, y: ttnn.reduce_scatter(x, dim=1, cluster_axis=1)),
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_call_seen_before_enters_few_functions_of_ours(name: str, device: Any) -> None:
    most, act = FRAMES[name]
    x, y = put(device, dim=0), put(device, dim=0, seed=1)
    assert len(flows.trace(lambda: act(x, y))) > 1.5 * most  # the first time all is decided
    found = flows.trace_again(lambda: act(x, y))
    assert 5 < len(found) <= most, flows.drawing(found)


def test_a_call_seen_before_gives_the_values_and_the_metadata_of_the_first(device: Any) -> None:
    calls: dict[str, Callable[[Any, Any], Any]] = {
        "add": lambda x, y: ttnn.add(x, y),
        "add to itself": lambda x, y: ttnn.add(x, x),
        "other dtype": lambda x, y: ttnn.add(x, y, dtype=ttnn.bfloat16),
        "other memory": lambda x, y: ttnn.add(x, y, memory_config=ttnn.L1_MEMORY_CONFIG),
        "block floats": lambda x, y: ttnn.subtract(x, y, dtype=ttnn.bfloat8_b),
        "a number": lambda x, y: ttnn.multiply(x, 0.5),
        "a number first": lambda x, y: ttnn.rsub(x, 2),
        "activations": lambda x, y: ttnn.add(x, y, activations=[ttnn.UnaryOpType.RELU]),
        "unary": lambda x, y: ttnn.elu(x, alpha=0.25),
        "three": lambda x, y: ttnn.where(ttnn.gt(x, 0.0), x, y),
        "clamp": lambda x, y: ttnn.clamp(x, -0.5, 0.25),
    }
    for call in calls.values():
        first = call(put(device, dim=0), put(device, dim=0, seed=1))
        for seed in (0, 7):
            x, y = put(device, dim=0, seed=seed), put(device, dim=0, seed=seed + 1)
            found = call(x, y)
            repeats.forget()
            expected = call(x, y)
            assert torch.equal(read(found), read(expected))
            for each in (found, first):
                assert (each.shape, each.dtype, each.layout) == (expected.shape, expected.dtype, expected.layout)
                assert (each.memory_config(), label(each)) == (expected.memory_config(), label(expected))
                assert each.tile == expected.tile and each.device() is device


def test_one_tensor_twice_and_two_tensors_are_told_apart(device: Any) -> None:
    x, y = put(device, dim=0), put(device, dim=0, seed=1)
    for a, b in ((x, x), (x, y), (y, x), (y, y)):
        torch.testing.assert_close(read(ttnn.subtract(a, b)), read(a) - read(b))


def test_numbers_that_are_equal_and_not_the_same_are_told_apart(device: Any) -> None:
    x = put(device, dim=0)
    for _ in range(2):
        for zero in (0.0, -0.0):
            assert read(ttnn.div(x, zero)).sign().equal((read(x) / zero).sign())
        for power in (2, 2.0, True):
            torch.testing.assert_close(read(ttnn.pow(x, power)), read(x) ** power)


def test_labels_dtypes_layouts_memories_and_shapes_are_kinds_of_their_own(device: Any) -> None:
    plain = put(device, 64, 32, dim=0)
    others = [
        put(device, 64, 32, dim=1),
        put(device, 64, 32),
        put(device, 128, 32, dim=0),
        put(device, 64, 32, dim=0, dtype=ttnn.bfloat16),
        ttnn.to_layout(plain, ttnn.ROW_MAJOR_LAYOUT),
        ttnn.to_memory_config(plain, ttnn.L1_MEMORY_CONFIG),
    ]
    for x in (plain, *others, plain):
        found = ttnn.relu(x)
        assert (found.shape, found.dtype, found.layout, label(found)) == (x.shape, x.dtype, x.layout, label(x))
        assert found.memory_config() == x.memory_config()
        assert torch.equal(read(found), read(x).relu())


def test_a_label_that_is_changed_by_hand_counts_from_then_on(device: Any) -> None:
    x = put(device, dim=0)
    ttnn.relu(x)
    unknown = x.tensor_topology().with_placements([ttnn.PlacementPartial("sum")])
    x.update_tensor_topology(unknown)
    assert label(ttnn.neg(x)) == [ttnn.PlacementPartial("sum")]
    assert label(ttnn.relu(x)) == [ttnn.PlacementPartial("unknown")]


def test_a_deallocated_operand_is_refused_as_the_first_time(device: Any) -> None:
    x, y = put(device, dim=0), put(device, dim=0)
    ttnn.add(x, y)
    for force in (True, False):
        gone = put(device, dim=0)
        ttnn.deallocate(gone, force=force)
        with pytest.raises(OperandError, match="Input Tensor B is not allocated"):
            ttnn.add(x, gone)
    shared = ttnn.reshape(y, (1, *y.shape))
    ttnn.add(shared, shared)
    ttnn.deallocate(y, force=True)
    with pytest.raises(OperandError, match="is not allocated"):
        ttnn.add(shared, shared)


def test_a_closed_mesh_is_refused_as_the_first_time() -> None:
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x = put(device)
    ttnn.relu(x)
    ttnn.relu(x)
    ttnn.close_mesh_device(device)
    with pytest.raises(ClosedError, match="has been closed"):
        ttnn.relu(x)


def test_a_kind_that_was_seen_on_one_mesh_gives_results_on_another(device: Any) -> None:
    ttnn.relu(put(device))
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as other:
        x = put(other)
        found = ttnn.relu(x)
        assert found.device() is other
        with pytest.raises(OperandError, match="need to be on the same device"):
            ttnn.add(found, put(device))


def test_programs_are_counted_for_every_call(device: Any) -> None:
    x = put(device, dim=0)
    for _ in range(3):
        ttnn.relu(x)
    assert device.num_program_cache_entries() == 1
    device.clear_program_cache()
    assert device.num_program_cache_entries() == 0
    ttnn.relu(x)
    assert device.num_program_cache_entries() == 1
    device.clear_program_cache()
    device.set_program_cache_misses_allowed(False)
    with pytest.raises(OperandError, match="program cache miss occurred"):
        ttnn.relu(x)
    device.set_program_cache_misses_allowed(True)
    device.disable_and_clear_program_cache()
    ttnn.relu(x)
    assert device.num_program_cache_entries() == 0


def test_a_part_of_another_op_is_no_program_of_its_own_until_it_is_called(device: Any) -> None:
    x = put(device, dim=0)
    ttnn.sqrt(x)
    count = device.num_program_cache_entries()
    ttnn.sqrt(put(device, 64, 64, dim=0))
    assert device.num_program_cache_entries() == count + 1


def test_hooks_see_calls_that_were_seen_before(device: Any) -> None:
    x = put(device, dim=0)
    ttnn.relu(x)
    seen: list[str] = []
    with (
        ttnn.register_pre_operation_hook(lambda operation, args, kwargs: seen.append("before")),
        ttnn.register_post_operation_hook(lambda operation, args, kwargs, output: seen.append("after")),
    ):
        ttnn.relu(x)
    ttnn.relu(x)
    assert seen == ["before", "after"]


def test_a_capture_takes_calls_that_were_seen_before(device: Any) -> None:
    x, y = put(device, dim=0), put(device, dim=0, seed=1)
    ttnn.add(x, y)
    trace = ttnn.begin_trace_capture(device, cq_id=0)
    found = ttnn.add(x, y)
    ttnn.end_trace_capture(device, trace, cq_id=0)
    host = ttnn.from_torch(
        torch.full((64, 32), 3.0), layout=ttnn.TILE_LAYOUT, mesh_mapper=ttnn.ShardTensorToMesh(device, 0)
    )
    ttnn.copy_host_to_device_tensor(host, x)
    ttnn.execute_trace(device, trace, cq_id=0)
    torch.testing.assert_close(read(found), 3.0 + read(y))
    ttnn.execute_trace(device, trace, cq_id=0, blocking=False)
    torch.testing.assert_close(read(ttnn.add(found, y)), 3.0 + 2 * read(y))  # it waits for the replay
    ttnn.release_trace(device, trace)


def test_results_are_allocated_in_lockstep_and_given_back(device: Any) -> None:
    x = put(device, dim=0)
    used = [each.used for each in device.memory_usage().values()]
    one, two = ttnn.relu(x), ttnn.relu(x)
    assert one.buffer_address() != two.buffer_address()
    address = one.buffer_address()
    del one
    assert ttnn.relu(x).buffer_address() == address
    ttnn.deallocate(two, force=True)
    del two
    gc.collect()
    assert [each.used for each in device.memory_usage().values()] == used
    again = ttnn.relu(x, memory_config=ttnn.L1_MEMORY_CONFIG), ttnn.relu(x, memory_config=ttnn.L1_MEMORY_CONFIG)
    assert again[0].memory_config() == again[1].memory_config() == ttnn.L1_MEMORY_CONFIG
    assert again[0].buffer_address() > again[1].buffer_address()  # L1 is given out from the top


def test_memory_that_is_full_names_the_line_of_a_call_that_was_seen_before() -> None:
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2), memory=1 << 20) as device:
        x = put(device, 256, 256)
        kept = [ttnn.relu(x)]
        with pytest.raises(OutOfMemoryError, match=r"since test_ttnn_repeats.py:\d+"):
            for _ in range(20):
                kept.append(ttnn.relu(x))


def test_a_result_that_is_written_into_a_tensor_is_written_every_time(device: Any) -> None:
    out = put(device, dim=0, seed=9)
    address = out.buffer_address()
    for seed in range(3):
        x, y = put(device, dim=0, seed=seed), put(device, dim=0, seed=seed + 1)
        assert ttnn.add(x, y, output_tensor=out) is out
        torch.testing.assert_close(read(out), read(x) + read(y))
        expected = read(x) * read(y)
        assert ttnn.multiply_(x, y) is x
        torch.testing.assert_close(read(x), expected)
    assert out.buffer_address() == address
    with pytest.raises(OperandError, match="output_tensor has shape"):
        ttnn.add(x, y, output_tensor=put(device, 128, 32, dim=0))


def test_a_tensor_that_all_devices_shared_is_another_kind_when_they_differ(device: Any) -> None:
    x, y = put(device), put(device, dim=0)
    shared = ttnn.relu(x)
    assert shared.block.shape[:2] == (1, 1)
    ttnn.relu(shared)
    ttnn.copy(ttnn.relu(put(device, 512, 32, dim=0)), shared)
    assert shared.block.shape[:2] == (2, 4)
    assert torch.equal(ttnn.relu(shared).block, shared.block.relu())
    assert y.block.shape[:2] == (2, 4)


def check_form(tensor: Any) -> None:
    """The form that a tensor keeps is the one that it has."""
    kept, tensor._form = tensor._form, None
    assert kept is None or kept is form_of(tensor)


def test_the_form_that_a_tensor_keeps_is_none_once_something_of_it_changed(device: Any) -> None:
    first = ttnn.relu(put(device, 64, 32))
    for _ in range(2):  # decided, then remembered
        found = ttnn.relu(put(device, 64, 32))
        form_of(found)
    assert found._form is form_of(first), "alike in all"
    view, part = ttnn.reshape(found, (2, 32, 32)), ttnn.get_device_tensors(found)[0]
    every = [found, view, part]
    before = [form_of(each) for each in every]
    ttnn.copy(ttnn.relu(put(device, 512, 32, dim=0)), found)  # devices differ: it grows, and its views follow
    for each in every:
        check_form(each)
    assert form_of(found) is not before[0] and form_of(view) is not before[1]
    unknown = found.tensor_topology().with_placements([ttnn.PlacementPartial("sum")])
    form_of(found)
    found.update_tensor_topology(unknown)
    check_form(found)
    form_of(first)
    first.deallocate()
    assert first._form is None is form_of(first)
    found._form = before[0]
    with pytest.raises(AssertionError):
        check_form(found)


def test_an_error_of_torch_is_told_as_the_first_time(device: Any) -> None:
    x, y = put(device, dim=0), put(device, dim=0)
    ttnn.add(x, y)
    broken = put(device, dim=0)
    broken._block = broken.block.to(torch.complex64).to(torch.bool)  # bools cannot be subtracted
    for _ in range(2):
        with pytest.raises(OperandError, match=r"ttnn\.subtract cannot take these operands"):
            ttnn.subtract(broken, broken)


@pytest.mark.parametrize("dtype", [ttnn.bfloat8_b, ttnn.bfloat4_b], ids=str)
def test_block_floats_of_many_elements_are_the_same_in_every_call(dtype: Any, device: Any) -> None:
    shape = (8 * 512, 1024)
    x, y = (put(device, *shape, dim=0, dtype=dtype, seed=seed) for seed in range(2))
    for call in (lambda: ttnn.add(x, y), lambda: ttnn.multiply(x, 0.3), lambda: ttnn.tril(x), lambda: ttnn.exp(x)):
        repeats.forget()
        first, second = call(), call()
        assert first.dtype is second.dtype is dtype
        assert torch.equal(first.block, second.block)
    expected = ttnn.from_torch(read(x).float() + read(y).float(), dtype=dtype, layout=ttnn.TILE_LAYOUT)
    assert torch.equal(read(ttnn.add(x, y)), read(expected))


# collectives


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "all_gather": lambda x, **how: ttnn.all_gather(x, dim=0, **how),
    "all_reduce": lambda x, **how: ttnn.all_reduce(x, **how),
    "reduce_scatter": lambda x, **how: ttnn.reduce_scatter(x, dim=1, **how),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_seen_before_gives_the_values_of_its_own_tensor(name: str, device: Any) -> None:
    act = COLLECTIVES[name]
    for axis in (None, 0, 1, None):
        for seed in range(2):
            x = put(device, dim=0, seed=seed)
            found = act(x, cluster_axis=axis)
            repeats.forget()
            expected = act(x, cluster_axis=axis)
            assert torch.equal(found.block, expected.block) and label(found) == label(expected)
            assert found.buffer_address() != x.buffer_address()
            found.block.zero_()
            assert x.block.any()  # the result has memory of its own


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_seen_before_is_recorded_restricted_and_carried_out_as_asked(name: str, device: Any) -> None:
    act, x = COLLECTIVES[name], put(device, dim=0)
    expected = act(x)
    with loom.record() as log:
        act(x)
        with ttnn.collective_mode("fabric"):
            torch.testing.assert_close(act(x).block, expected.block)
        torch.testing.assert_close(act(x, mode="host").block, expected.block)
    assert log.kinds() == {name: 3}
    assert [event.call for event in log] == [name, f"{name} (fabric)", f"{name} (host)"]
    assert {event.where.partition(":")[0] for event in log} == {"test_ttnn_repeats.py"}
    with loom.communication("forbid"), pytest.raises(loom.CommunicationError, match="forbidden"):
        act(x)
    assert torch.equal(act(x).block, expected.block)


def test_a_collective_on_another_mesh_of_the_same_shape_is_on_that_one() -> None:
    for _ in range(2):  # the first mesh is closed when the second is used
        with ttnn.create_mesh_device(ttnn.MeshShape(1, 4)) as device:
            x = put(device, 32, 32, dim=0)
            for _ in range(2):
                assert torch.equal(read(ttnn.all_gather(x, dim=0)), read(x))
            assert torch.equal(read(ttnn.all_reduce(x)), read(x).reshape(4, 8, 32).sum(0))


def test_a_group_of_one_device_gives_memory_of_its_own() -> None:
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 1)) as device, ttnn.strictness("lenient"):
        x = put(device, 32, 32)
        for _ in range(3):
            found = ttnn.all_gather(x, dim=0)  # which the original refuses
            assert torch.equal(read(found), read(x))
            found.block.zero_()
            assert x.block.any()


def test_an_unknown_label_is_refused_every_time_once_that_is_asked_for(device: Any) -> None:
    x = put(device, 64, 32, dim=0)
    x.update_tensor_topology(
        ttnn.TensorTopology([2, 4], [ttnn.PlacementShard(0)] * 2, x.tensor_topology().mesh_coords())
    )
    for _ in range(2):
        ttnn.all_gather(x, dim=0, cluster_axis=0)  # a later axis cuts the dim too
    with ttnn.manage_config("strict_ccl_topology", True), pytest.raises(OperandError, match="cannot be told"):
        ttnn.all_gather(x, dim=0, cluster_axis=0)


def test_a_dim_with_padding_is_cut_every_time() -> None:
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 4)) as device:
        for seed in range(3):
            x = put(device, 7, 32, dim=0, seed=seed)
            found = ttnn.all_gather(x, dim=0)
            assert found.shape == (7, 32) and torch.equal(read(found), read(x))


# what is kept


def test_what_is_remembered_is_bounded_and_can_be_forgotten(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "LIMIT", 8)
    x = put(device, dim=0)
    for number in range(40):
        torch.testing.assert_close(read(ttnn.add(x, float(number))), read(x) + number)
    assert len(repeats.SEEN) == 8
    repeats.forget()
    assert not repeats.SEEN


def test_nothing_that_is_remembered_keeps_a_tensor_alive(device: Any) -> None:
    x, y = put(device, dim=0), put(device, dim=0)
    results = [ttnn.add(x, y), ttnn.where(x, x, y), ttnn.clamp(x, y, 1.0), ttnn.addcmul(x, y, y), ttnn.multiply_(y, x)]
    assert repeats.SEEN
    for each in repeats.SEEN.values():
        for result in each._results:
            assert not repeats.holds_tensor(result.kernel)
    gone = [weakref.ref(each) for each in (x, y, *results)]
    del x, y, results
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


def test_a_kernel_that_keeps_a_block_is_not_remembered(device: Any) -> None:
    kept = torch.ones(2)
    assert repeats.holds_tensor(lambda x: x + kept)
    assert not repeats.holds_tensor(torch.add)


def test_a_memory_config_does_not_change_with_the_spec_that_it_was_made_of() -> None:
    grid = ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(1, 0))])
    spec = ttnn.ShardSpec(grid, (32, 64))
    layout, kind = ttnn.TensorMemoryLayout.HEIGHT_SHARDED, ttnn.BufferType.L1
    config = ttnn.MemoryConfig(layout, kind, spec)
    same = ttnn.MemoryConfig(layout, kind, ttnn.ShardSpec(grid, (32, 64)))
    assert config.token == same.token and config == same
    spec.shape = [64, 64]
    assert config.shard_spec.shape == [32, 64]
    assert ttnn.MemoryConfig(layout, kind, spec).token != config.token


# memory of results, refusals


CORES = ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(1, 0))])
SHARDED = ttnn.MemoryConfig(
    ttnn.TensorMemoryLayout.HEIGHT_SHARDED,
    ttnn.BufferType.L1,
    ttnn.ShardSpec(CORES, (32, 32), ttnn.ShardOrientation.ROW_MAJOR),
)
MEMORY: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "add, the first in shards": (lambda wide, cut: ttnn.add(cut, wide), SHARDED),
    "add, the second in shards": (lambda wide, cut: ttnn.add(wide, cut), SHARDED),
    "add, none in shards": (lambda wide, cut: ttnn.add(wide, wide), ttnn.DRAM_MEMORY_CONFIG),
    "matmul": (lambda wide, cut: ttnn.matmul(cut, cut, transpose_b=True), ttnn.DRAM_MEMORY_CONFIG),
    "matmul, asked for L1": (
        lambda wide, cut: ttnn.matmul(cut, cut, transpose_b=True, memory_config=ttnn.L1_MEMORY_CONFIG),
        ttnn.L1_MEMORY_CONFIG,
    ),
}


@pytest.mark.parametrize("name", MEMORY)
def test_the_memory_of_a_result_is_decided_once_for_each_memory_of_operands(name: str, device: Any) -> None:
    call, expected = MEMORY[name]
    wide = put(device)
    cut = ttnn.to_memory_config(wide, SHARDED)
    for other, _ in MEMORY.values():  # other kinds of the same shapes
        other(wide, cut)
    known = len(repeats.SEEN)
    for _ in range(2):
        assert call(wide, cut).memory_config() == expected
    assert known and len(repeats.SEEN) == known, "a call of this kind was seen"


def test_integers_are_divided_as_float32_every_time(device: Any) -> None:
    x = ttnn.from_torch(torch.full((32, 32), 3), dtype=ttnn.int32, layout=ttnn.TILE_LAYOUT, device=device)
    y = ttnn.from_torch(torch.full((32, 32), 2), dtype=ttnn.int32, layout=ttnn.TILE_LAYOUT, device=device)
    for _ in range(3):
        found = ttnn.div(x, y)
        assert found.dtype is ttnn.float32 and bool((read(found) == 1.5).all())


def test_heads_lie_on_the_cores_of_the_chip_that_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for system in ("T3000", "LoudBox"):  # 8 and 13 cores in a row
        monkeypatch.setenv("MESHLOOM_SYSTEM", system)
        with ttnn.create_mesh_device(ttnn.MeshShape(1, 1)) as device:
            x = put(device, 1, 1, 16, 96)
            made = [ttnn.experimental.nlp_create_qkv_heads_decode(x, num_heads=1, num_kv_heads=1)[0] for _ in range(2)]
            assert made[0].memory_config() == made[1].memory_config()
            found.append(made[1].memory_config().shard_spec.grid.bounding_box().grid_size().x)
    assert found == [8, 13]


def test_a_collective_is_decided_again_when_the_fabric_changes(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = put(device)
    with ttnn.strictness("original"):
        monkeypatch.setattr(fabric, "_config", ttnn.FabricConfig.FABRIC_1D)
        for _ in range(2):
            ttnn.all_gather(x, dim=0, cluster_axis=0)
        ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)
        with pytest.raises(OperandError, match="un-initialized fabric context"):
            ttnn.all_gather(x, dim=0, cluster_axis=0)


def test_a_call_that_the_original_refuses_is_not_remembered_where_that_is_told(device: Any) -> None:
    x = ttnn.from_torch(torch.ones(32, 32), dtype=ttnn.int32, layout=ttnn.TILE_LAYOUT, device=device)
    y = ttnn.typecast(x, ttnn.float32)
    repeats.forget()
    with pytest.warns(ttnn.RefusalWarning, match="Mixed dtype"):
        ttnn.add(x, y)
    assert not repeats.SEEN
    with ttnn.strictness("lenient"):
        ttnn.add(x, y)
        assert len(repeats.SEEN) == 1
    assert not repeats.SEEN, "the level has changed"
