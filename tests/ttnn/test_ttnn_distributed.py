"""`ttnn.distributed`: rows of the checklist in ttnn's spelling, and 100 random programs in both views."""

from __future__ import annotations

import ast
import inspect
import itertools
import random
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import ttnn
from meshloom.errors import OperandError
from meshloom.ttnn.distributed import operations
from test_docs import check_document

S, R, P = ttnn.PlacementShard, ttnn.PlacementReplicate, ttnn.PlacementPartial
ROOT = Path(__file__).resolve().parents[2]
COLLECTIVES = frozenset("all_reduce all_gather reduce_scatter broadcast all_broadcast mesh_partition".split())


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def put(x: torch.Tensor, mesh: Any, how: Any = None, **options: Any) -> Any:
    """A tensor on a mesh: replicated, cut along a dim by all devices, or by one placement for every mesh axis."""
    if isinstance(how, int):
        mapper = ttnn.ShardTensorToMesh(mesh, dim=how)
    elif how is None:
        mapper = ttnn.ReplicateTensorToMesh(mesh)
    else:
        mapper = ttnn.create_mesh_mapper(mesh, ttnn.MeshMapperConfig(list(how)))
    return ttnn.from_torch(x, device=mesh, layout=ttnn.TILE_LAYOUT, mesh_mapper=mapper, **options)


def correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.float().flatten(), y.float().flatten()]))[0, 1])


def check_close(found: Any, expected: torch.Tensor, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    torch.testing.assert_close(ttnn.to_torch(found), expected, rtol=rtol, atol=atol)


@pytest.fixture
def mesh():
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as opened:
        yield opened


def document_example(shape: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
    """The example of the first requirements document on a mesh of any shape, and what every device holds."""
    a, b = values(4, 1, 64, 64, dtype=torch.bfloat16), values(1, 1, 64, 128, seed=1, dtype=torch.bfloat16)
    with ttnn.create_mesh_device(ttnn.MeshShape(*shape)) as mesh:
        y = ttnn.distributed.matmul(put(a, mesh), put(b, mesh))
        alone = ttnn.matmul(put(a, mesh), put(b, mesh))
        parts = [ttnn.to_torch(each) for each in ttnn.get_device_tensors(y)]
        assert all(torch.equal(ttnn.to_torch(each), parts[0]) for each in ttnn.get_device_tensors(alone))
    return a @ b, parts


# rows of the checklist


def test_row_001_the_documents_example_gives_4x1x64x128_on_every_device():
    _, parts = document_example((2, 4))
    assert [tuple(part.shape) for part in parts] == [(4, 1, 64, 128)] * 8


def test_row_002_replicated_times_replicated_is_on_every_device_what_one_device_computes():
    one, parts = document_example((2, 4))[1], document_example((1, 1))[1]
    assert len(one) == 8 and all(torch.equal(part, parts[0]) for part in one)


@pytest.mark.parametrize("dtype", [ttnn.bfloat16, ttnn.float32, ttnn.bfloat8_b])
def test_row_003_for_replicated_operands_it_is_the_standard_matmul_to_the_bit(mesh, dtype):
    a, b = put(values(4, 1, 64, 64), mesh, dtype=dtype), put(values(1, 1, 64, 128, seed=1), mesh, dtype=dtype)
    found, expected = ttnn.distributed.matmul(a, b), ttnn.matmul(a, b)
    assert (found.dtype, found.layout, found.shape) == (expected.dtype, expected.layout, expected.shape)
    assert torch.equal(ttnn.to_torch(found), ttnn.to_torch(expected))


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)])
def test_row_004_the_same_script_runs_on_one_device_and_on_eight(shape):
    expected, parts = document_example(shape)
    assert len(parts) == shape[0] * shape[1]
    assert all(correlation(part, expected) > 0.999 for part in parts)


@pytest.mark.parametrize("a_how", [None, 2, 3], ids=["R", "S(row)", "S(col)"])
@pytest.mark.parametrize("b_how", [None, 2, 3], ids=["R", "S(row)", "S(col)"])
def test_row_005_all_nine_combinations_of_shardings_agree_with_torch(mesh, a_how, b_how):
    a, b = values(1, 1, 64, 128, dtype=torch.bfloat16), values(1, 1, 128, 96, seed=1, dtype=torch.bfloat16)
    found = ttnn.to_torch(ttnn.distributed.matmul(put(a, mesh, a_how), put(b, mesh, b_how)))
    expected = a.float() @ b.float()
    assert correlation(found, expected) > 0.999
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.2)


def test_row_006_no_collective_stands_in_the_program():
    written = {node.attr for node in ast.walk(ast.parse(inspect.getsource(document_example)))
               if isinstance(node, ast.Attribute)}  # fmt: skip
    assert not written & COLLECTIVES
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as mesh:
        a, b = values(32, 64), values(64, 96, seed=1)
        check_close(ttnn.distributed.matmul(put(a, mesh, [S(0), S(1)]), put(b, mesh, [S(1), S(0)])), a @ b)


def test_row_007_the_result_has_the_topology_that_is_asked_for(mesh):
    a, b = values(32, 64), values(64, 96, seed=1)
    for asked in (S(0), loom.Shard(0), ttnn.ShardTensorToMesh(mesh, dim=0), "S(0)"):
        y = ttnn.distributed.matmul(put(a, mesh), put(b, mesh, 0), output=asked)
        assert y.tensor_topology().placements() == [S(0)] and y.shape == [4, 96]
        check_close(y, a @ b)


def test_row_008_it_communicates_only_where_it_must(mesh):
    a, b = values(32, 64), values(64, 96, seed=1)
    with loom.record() as log:
        ttnn.distributed.matmul(put(a, mesh, 0), put(b, mesh))
    assert (len(log), log.bytes) == (0, 0)
    with loom.record() as log:
        ttnn.distributed.matmul(put(a, mesh, 1), put(b, mesh, 0))
    assert log.kinds() == {"all_reduce": 1} and log.bytes == 2 * 32 * 96 * 4 * 7 // 8


@pytest.mark.parametrize("asked", [R(), S(0), S(-1), [S(0), S(1)]], ids=["R", "S(0)", "S(-1)", "2-D"])
def test_row_009_every_output_layout_can_be_asked_for(mesh, asked):
    a, b = values(32, 64), values(64, 96, seed=1)
    for a_how, b_how in itertools.product((None, 0, 1, (S(1), S(0))), repeat=2):
        y = ttnn.distributed.matmul(put(a, mesh, a_how), put(b, mesh, b_how), output=asked)
        told = y.tensor_topology().placements()
        wanted = asked if isinstance(asked, list) else [asked]
        assert told == [S(1) if each == S(-1) else each for each in wanted]
        check_close(y, a @ b)


def program(mesh: Any) -> torch.Tensor:
    """A program for a 4x4 mesh."""
    x = put(values(16, 32), mesh, [S(0), R()])
    up, down = put(values(32, 64, seed=1), mesh, [R(), S(1)]), put(values(64, 32, seed=2), mesh, [R(), S(0)])
    hidden = ttnn.distributed.linear(x, up, activation="relu")
    return ttnn.to_torch(ttnn.distributed.softmax(ttnn.distributed.matmul(hidden, down), dim=-1))


def test_row_010_a_program_for_a_virtual_4x4_runs_on_2x2_physical_devices():
    shape = ttnn.MeshShape(4, 4)
    with ttnn.create_mesh_device(shape, physical=(2, 2)) as virtual, ttnn.create_mesh_device(shape) as real:
        homes = {virtual.virtual_to_physical(place)[0] for place in itertools.product(range(4), range(4))}
        assert homes == set(itertools.product(range(2), range(2)))
        assert torch.equal(program(virtual), program(real))
    hidden = torch.relu(values(16, 32) @ values(32, 64, seed=1))
    with ttnn.create_mesh_device(shape, physical=(2, 2)) as virtual:
        torch.testing.assert_close(program(virtual), torch.softmax(hidden @ values(64, 32, seed=2), -1))


def test_row_011_virtual_to_physical_is_total_invertible_and_survives_reshape():
    with ttnn.create_mesh_device(ttnn.MeshShape(4, 4), physical=(2, 2)) as mesh:
        places = list(itertools.product(range(4), range(4)))
        homes = [mesh.virtual_to_physical(place) for place in places]
        assert len(set(homes)) == 16
        assert [mesh.physical_to_virtual(*home) for home in homes] == places
        by_id = dict(zip(mesh.get_device_ids(), homes, strict=True))
        mesh.reshape(ttnn.MeshShape(1, 16))
        moved = [mesh.virtual_to_physical((0, column)) for column in range(16)]
        assert dict(zip(mesh.get_device_ids(), moved, strict=True)) == by_id


def test_row_017_a_4d_batch_broadcasts(mesh):
    a, b = values(4, 1, 64, 64, dtype=torch.bfloat16), values(1, 1, 64, 128, seed=1, dtype=torch.bfloat16)
    for a_how in (None, 0, 2, 3):
        found = ttnn.distributed.matmul(put(a, mesh, a_how), put(b, mesh))
        check_close(found, a @ b, rtol=2e-2, atol=0.1)


def test_row_020_the_readme_beside_the_module_runs():
    text = resources.files("meshloom.ttnn").joinpath("distributed", "README.md").read_text()
    assert check_document(text, "README.md") == text.count("```python") == 5
    broken = text.replace("Shape([4, 1, 64, 128])", "Shape([4])")
    with pytest.raises(AssertionError, match="README"):
        check_document(broken, "README.md")


def test_row_021_there_is_a_test_file_for_the_distributed_matmul():
    assert sum(name.startswith("test_row_0") for name in globals()) >= 20


def test_row_022_the_examples_of_ttnn_distributed_call_no_collective():
    text = resources.files("meshloom.ttnn").joinpath("distributed", "README.md").read_text()
    assert not [name for name in COLLECTIVES if f"ttnn.{name}(" in text]


def test_row_023_one_script_gives_one_answer_on_2_and_20_and_200_devices():
    answers = []
    for shape in ((1, 2), (4, 5), (10, 20)):
        with ttnn.create_mesh_device(ttnn.MeshShape(*shape)) as mesh:
            x, w = put(values(40, 16), mesh, 0), put(values(16, 24, seed=1), mesh)
            answers.append(ttnn.to_torch(ttnn.distributed.sum(ttnn.distributed.matmul(x, w), dim=0)))
    expected = (values(40, 16) @ values(16, 24, seed=1)).sum(0)
    for answer in answers:
        torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-4)


def test_row_024_a_hint_changes_the_bytes_and_neither_the_call_nor_the_result(mesh):
    a, b = values(32, 64), values(64, 96, seed=1)
    moved, found = [], []
    for hint in (0, 1):
        x = put(a, mesh, hint)
        with loom.record() as log:
            y = ttnn.distributed.matmul(x, put(b, mesh))
        moved.append(log.bytes)
        found.append(ttnn.to_torch(y))
    assert moved[0] == 0 < moved[1]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


def test_row_025_topologies_are_told_on_every_axis_and_survive_ops(mesh):
    x = put(values(16, 32), mesh, [S(0), S(1)])
    assert x.topology().placements() == [S(0), S(1)]
    y = ttnn.distributed.add(ttnn.distributed.multiply(x, 2.0), x)
    assert y.topology().placements() == [S(0), S(1)]
    assert ttnn.distributed.sum(y, dim=0, keepdim=True).topology().placements() == [R(), S(1)]
    assert ttnn.distributed.softmax(y, dim=1).topology().placements() == [S(0), S(1)]


@pytest.mark.parametrize(
    "strategy, label, kinds",
    [
        ("row", [S(0), S(0)], {}),
        ("column", [S(1), S(1)], {}),
        ("inner", [R(), R()], {"reduce_scatter": 1, "all_reduce": 1, "all_gather": 1}),
        ("2d", [S(0), S(1)], {}),
        (("inner", "column"), [R(), S(1)], {"all_reduce": 1}),
    ],
    ids=str,
)
def test_row_026_every_strategy_can_be_chosen(mesh, strategy, label, kinds):
    a, b = values(32, 64), values(64, 96, seed=1)
    with loom.record() as log:
        y = ttnn.distributed.matmul(put(a, mesh), put(b, mesh), strategy=strategy)
    assert y.tensor_topology().placements() == label and log.kinds() == kinds
    check_close(y, a @ b)


def test_row_026_blocks_of_both_operands_take_the_2d_strategy_by_gathering_panels():
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 2)) as mesh:
        a, b = values(32, 64), values(64, 96, seed=1)
        with loom.record() as log:
            y = ttnn.distributed.matmul(put(a, mesh, [S(0), S(1)]), put(b, mesh, [S(0), S(1)]), strategy="2d")
        assert [(event.kind, event.axis) for event in log] == [("all_gather", "x1"), ("all_gather", "x0")]
        assert y.tensor_topology().placements() == [S(0), S(1)]
        check_close(y, a @ b)


@pytest.mark.parametrize("a_how, b_how", list(itertools.product((None, 0, 1), repeat=2)))
def test_row_027_the_chosen_plan_moves_no_more_than_gathering_both_operands(mesh, a_how, b_how):
    a, b = put(values(64, 512), mesh, a_how), put(values(512, 64, seed=1), mesh, b_how)
    with loom.record() as chosen:
        ttnn.distributed.matmul(a, b)
    with loom.record() as naive:
        x, w = (ttnn.distributed.to_topology(each, R()) for each in (a, b))
        ttnn.distributed.matmul(x, w)
    assert chosen.bytes <= naive.bytes
    assert a_how is b_how is None or naive.bytes > 0


HOWS = (None, 0, 1, (S(0), S(1)), (R(), S(0)), (S(1), R()), (P(), R()), (S(0), P()))


@pytest.mark.parametrize("shape", [(16, 24), (9, 7), (10, 1)])
def test_row_028_to_topology_goes_from_any_to_any(mesh, shape):
    dense = values(*shape)
    asked = (R(), S(0), S(1), P(), [S(0), S(1)], [S(0), S(0)], [R(), S(0)], [S(1), P()])
    for how, output in itertools.product(HOWS, asked):
        x = put(dense, mesh, how)
        y = ttnn.distributed.to_topology(x, output)
        wanted = output if isinstance(output, list) else [output]
        if [*wanted] != [S(0), S(0)] or shape[0] % 8 == 0:  # padding inside a dim has no label: the inner axis gathers
            assert y.tensor_topology().placements() == wanted
        check_close(y, dense)
        assert ttnn.distributed.to_topology(y, y.tensor_topology()) is y


# each op against torch, whatever the placements


CALLS = {
    "linear": (
        lambda d, x, w, v: d.linear(x, w, bias=v, activation="gelu"),
        lambda x, w, v: torch.nn.functional.gelu(x @ w + v),
    ),
    "matmul_turned": (lambda d, x, w, v: d.matmul(w, x, transpose_a=True, transpose_b=True), lambda x, w, v: w.T @ x.T),
    "add": (lambda d, x, w, v: d.add(x, x, activations=["relu"]), lambda x, w, v: torch.relu(x + x)),
    "add_row": (lambda d, x, w, v: d.add(w, v), lambda x, w, v: w + v),
    "multiply": (lambda d, x, w, v: d.multiply(d.multiply(w, v), 0.5), lambda x, w, v: w * v * 0.5),
    "softmax": (lambda d, x, w, v: d.softmax(x, dim=0), lambda x, w, v: x.softmax(0)),
    "layer_norm": (
        lambda d, x, w, v: d.layer_norm(w, weight=v, bias=v, epsilon=1e-5),
        lambda x, w, v: torch.nn.functional.layer_norm(w, w.shape[-1:], v, v, 1e-5),
    ),
    "rms_norm": (
        lambda d, x, w, v: d.rms_norm(w, weight=v, bias=v, epsilon=1e-5, residual_input_tensor=w),
        lambda x, w, v: torch.nn.functional.rms_norm(2 * w, w.shape[-1:], v, 1e-5) + v,
    ),
    "sum": (lambda d, x, w, v: d.sum(x, dim=[0, 1], scalar=2.0), lambda x, w, v: 2 * x.sum()),
    "sum_kept": (lambda d, x, w, v: d.sum(x, -1, True), lambda x, w, v: x.sum(-1, keepdim=True)),
    "mean": (lambda d, x, w, v: d.mean(x, dim=0), lambda x, w, v: x.mean(0)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("size", [(16, 8, 24), (9, 10, 7)], ids=["even", "uneven"])
def test_every_op_is_torchs_for_all_placements(mesh, name, size):
    m, k, n = size
    x, w, v = values(m, k), values(k, n, seed=1), values(n, seed=2)
    call, expected = CALLS[name]
    for x_how, w_how in itertools.product(HOWS, repeat=2):
        found = call(ttnn.distributed, put(x, mesh, x_how), put(w, mesh, w_how), put(v, mesh, 0))
        check_close(found, expected(x, w, v), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("table_how", [None, 0, 1, (S(1), S(0))], ids=str)
@pytest.mark.parametrize("index_how", [None, 0, (S(0), S(1))], ids=str)
def test_embedding_finds_rows_of_a_table_that_is_cut_anywhere(mesh, index_how, table_how):
    index, table = torch.randint(0, 50, (8, 12), generator=torch.Generator().manual_seed(3)), values(50, 32)
    found = ttnn.distributed.embedding(put(index, mesh, index_how, dtype=ttnn.uint32), put(table, mesh, table_how))
    assert found.layout is ttnn.ROW_MAJOR_LAYOUT
    assert torch.equal(ttnn.to_torch(found), table[index])


def test_embedding_refuses_a_number_that_is_no_row(mesh):
    with pytest.raises(OperandError, match="row"):
        ttnn.distributed.embedding(put(torch.tensor([[50]]), mesh, dtype=ttnn.uint32), put(values(50, 32), mesh, 0))


@pytest.mark.parametrize("how", [None, 0, 1, 2, (S(0), S(1)), (S(2), S(1)), (S(1), S(3))], ids=str)
@pytest.mark.parametrize("heads", [4, 2], ids=["own", "shared"])
def test_attention_is_torchs_with_batch_heads_sequence_or_width_cut(mesh, how, heads):
    q, k, v = values(4, 4, 32, 16), values(4, heads, 32, 16, seed=1), values(4, heads, 32, 16, seed=2)
    found = ttnn.distributed.scaled_dot_product_attention(*(put(each, mesh, how) for each in (q, k, v)))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    check_close(found, expected)


def test_dtypes_and_layouts_follow_the_op_of_the_same_name(mesh):
    x = put(values(32, 64), mesh, 0, dtype=ttnn.bfloat16)
    w = put(values(64, 32, seed=1), mesh, dtype=ttnn.bfloat8_b)
    for options in ({}, {"dtype": ttnn.float32}, {"dtype": ttnn.bfloat8_b}):
        found, expected = ttnn.distributed.matmul(x, w, **options), ttnn.matmul(x, w, **options)
        assert (found.dtype, found.layout) == (expected.dtype, expected.layout)
        assert torch.equal(ttnn.to_torch(found), ttnn.to_torch(expected))
    rows = ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT)
    with pytest.raises(RuntimeError, match="Inputs to matmul must be tilized"):
        ttnn.distributed.matmul(rows, w)


def test_explain_prints_the_plan_and_the_result_is_still_given(mesh, capsys):
    a, b = values(32, 64), values(64, 96, seed=1)
    y = ttnn.distributed.matmul(put(a, mesh, 1), put(b, mesh, 0), explain=True)
    printed = capsys.readouterr().out
    assert "matmul(f32[32, 64](S(1)), f32[64, 96](S(0))) -> f32[32, 96](R) on Mesh(x0=8)" in printed
    assert "moves all_reduce(sum) over x0 of 8" in printed and "1 collective" in printed
    check_close(y, a @ b)


def test_a_label_that_cuts_like_the_mesh_is_bridged_without_a_copy(mesh):
    x = put(values(16, 32), mesh, [S(0), R()])
    whole = operations.lift(x)
    assert whole._data.data_ptr() == x.block.data_ptr()
    assert whole.topology.notation == "f32[16, 32](S(0), R)"


def test_what_all_devices_cut_row_major_is_nested_left_axis_first(mesh):
    x = put(torch.arange(16).reshape(16, 1).float(), mesh, 0)
    whole = operations.carry(operations.lift(x), mesh.runtime.mesh)
    assert whole.topology.notation == "f32[16, 1](S(0), S(0))"
    assert [whole.shard_at(place)[0].item() for place in itertools.product(range(2), range(4))] == list(range(0, 16, 2))


def test_a_distribution_over_another_shape_is_brought_to_the_mesh(mesh):
    dense = values(8, 6)
    x = ttnn.from_torch(dense, device=mesh, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (4, 2), dims=(0, 1)))
    y = ttnn.distributed.add(x, put(dense, mesh, [S(0), S(1)]))
    check_close(y, 2 * dense)


def test_parts_without_a_whole_are_refused_with_a_fix(mesh):
    a, b = put(values(32, 64), mesh, 1), put(values(64, 32, seed=1), mesh, 0)
    parts = ttnn.gelu(ttnn.matmul(a, b))
    with pytest.raises(OperandError, match="the global tensor cannot be reconstructed from these shards") as caught:
        ttnn.distributed.softmax(parts)
    assert "all_reduce" in str(caught.value)
    some = ttnn.from_torch(values(8, 4), device=mesh, mesh_mapper=ttnn.ShardTensor2dMesh(mesh, (1, 4), dims=(0, 1)))
    with pytest.raises(OperandError, match="lies on 4 of 8 devices"):
        ttnn.distributed.sum(some)


def test_partial_sums_are_read_as_their_sum_and_can_be_asked_for(mesh):
    a, b = values(32, 64), values(64, 96, seed=1)
    parts = ttnn.matmul(put(a, mesh, 1), put(b, mesh, 0))
    assert parts.tensor_topology().placements() == [P()]
    check_close(ttnn.distributed.softmax(parts), (a @ b).softmax(-1))
    kept = ttnn.distributed.matmul(put(a, mesh, 1), put(b, mesh, 0), output=P())
    assert kept.tensor_topology().placements() == [P()]
    assert torch.equal(ttnn.to_torch(kept), ttnn.to_torch(parts))
    with pytest.raises(TypeError, match="activation of partial sums"):
        ttnn.distributed.matmul(put(a, mesh, 1), put(b, mesh, 0), output=P(), activation="relu")


def test_the_names_of_the_original_are_there_too():
    assert ttnn.distributed.open_mesh_device is ttnn.open_mesh_device
    with pytest.raises(AttributeError, match="matmul"):
        ttnn.distributed.conv2d  # noqa: B018


# every op of the table that has a global meaning


def case(*args: Any, like: Any = None, **options: Any) -> tuple[tuple[Any, ...], Any, dict[str, Any]]:
    """Arguments, torch's function of them if it is not the golden one, and options that only ours takes."""
    return args, like, options


F = torch.nn.functional
X, Y, ROW = values(16, 8).sigmoid() * 0.8 + 0.1, values(16, 8, seed=1).sigmoid() + 0.1, values(8, seed=2)
WHOLE, OTHER, INDEX = (torch.randint(1, 8, (16, 8), generator=torch.Generator().manual_seed(seed)) for seed in range(3))
HEADS = [values(2, 8, 4, 4, seed=seed) for seed in range(3)]
ONE = """
    abs acos asin asinh atan atanh ceil celu clone cos cosh deg2rad digamma elu erf erfc erfinv exp exp2 expm1 floor
    frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf lgamma log
    log10 log1p log2 logical_not logit mish neg rad2deg reciprocal relu relu6 round rsqrt selu sigmoid sign signbit silu
    sin sinh softplus softshrink softsign sqrt square squeeze tan tanh tanhshrink tril triu trunc argmax""".split()
TWO = """
    add atan2 div divide eq fmod ge gt hypot isclose ldexp le logaddexp logaddexp2 logical_and logical_or logical_xor
    lt maximum minimum mul multiply ne nextafter pow remainder sub subtract xlogy""".split()
BITS = "bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor gcd lcm".split()
CASES = {
    **{name: case(X) for name in ONE},
    **{name: case(X, Y) for name in TWO},
    **{name: case(WHOLE, OTHER) for name in BITS},
    "acosh": case(X + 1),
    "addcdiv": case(X, Y, Y + 1),
    "addcmul": case(X, Y, X),
    "addmm": case(values(8, 4), values(8, 16), values(16, 4)),
    "batch_norm": case(values(4, 8, 2, 2), like=lambda x: F.batch_norm(x, ROW, ROW.abs()), eps=1e-5),
    "bitwise_not": case(WHOLE),
    "chunk": case(X, 2, 0),
    "clamp": case(X, 0.3, 0.6),
    "clip": case(X, 0.3, 0.6),
    "concat": case([X, Y], 0),
    "cumprod": case(X, 0),
    "cumsum": case(X, 0, like=lambda x, dim: x.flip(dim).cumsum(dim).flip(dim), reverse_order=True),
    "embedding": case(INDEX, values(8, 4), like=lambda index, table: table[index]),
    "expand": case(values(16, 1), (16, 8)),
    "gather": case(X, 1, INDEX),
    "glu": case(X, -1),
    "heaviside": case(X - 0.5, 0.5, like=lambda x, value: torch.heaviside(x, torch.tensor(value))),
    "index_fill": case(X, 0, torch.tensor([1, 3]), 2.0),
    "l1_loss": case(X, Y, like=lambda x, y: (x - y).abs()),
    "layer_norm": case(X, like=lambda x: F.layer_norm(x, (8,), eps=1e-12)),
    "leaky_relu": case(X - 0.5, 0.1),
    "lerp": case(X, Y, X),
    "linear": case(X, values(8, 4), like=torch.matmul),
    "matmul": case(X, values(8, 4)),
    "max": case(X, 0, like=torch.amax),
    "mean": case(X, 0),
    "min": case(X, 0, like=torch.amin),
    "mse_loss": case(X, Y, like=lambda x, y: (x - y).square()),
    "narrow": case(X, 0, 2, 8),
    "outer": case(ROW, ROW),
    "pad": case(X, [(1, 2), (0, 3)], 0.5, like=lambda x, pairs, value: F.pad(x, (0, 3, 1, 2), value=value)),
    "permute": case(X, (1, 0)),
    "prelu": case(X - 0.5, ROW),
    "prod": case(X, 1),
    "repeat": case(X, (2, 1)),
    "repeat_interleave": case(X, 2, 0),
    "reshape": case(X, (8, 16)),
    "rms_norm": case(X, like=lambda x: F.rms_norm(x, (8,), eps=1e-12)),
    "roll": case(X, 3, 0),
    "scaled_dot_product_attention": case(
        *HEADS, like=lambda *qkv: F.scaled_dot_product_attention(*qkv, is_causal=True)
    ),
    "scatter": case(X, 1, torch.arange(8).expand(16, 8).flip(1), Y),
    "scatter_add": case(X, 1, INDEX, Y),
    "softmax": case(X, 0),
    "sort": case(X, 0),
    "split": case(X, 4, 0),
    "stack": case([X, Y], 0),
    "std": case(X, 0),
    "sum": case(X, 0),
    "threshold": case(X, 0.5, 2.0),
    "to_topology": case(X, S(1), like=lambda x, output: x),
    "topk": case(X, 3, 0),
    "transpose": case(X, 0, 1),
    "unsqueeze": case(X, 0),
    "var": case(X, 0),
    "view": case(X, (8, 16)),
    "where": case(WHOLE > 4, X, Y),
}


def spread(value: Any, mesh: Any) -> Any:
    """An argument with every tensor in it cut at its first dim by the rows of the mesh, at its last by the columns."""
    if isinstance(value, list):
        return [spread(each, mesh) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    how = [S(0), S(value.ndim - 1) if value.ndim > 1 else R()]
    kind = ttnn.float32 if value.is_floating_point() or value.dtype is torch.bool else ttnn.int32
    return put(value.float() if value.dtype is torch.bool else value, mesh, how, dtype=kind)


def test_every_op_with_a_global_meaning_has_a_case():
    assert sorted(CASES) == ttnn.distributed.__all__ and len(CASES) > 155


@pytest.mark.parametrize("name", CASES)
def test_ops_of_sharded_operands_are_torchs_and_what_moves_is_in_the_log(mesh, name):
    args, like, options = CASES[name]
    if name == "batch_norm":
        rows = {"running_mean": ROW, "running_var": ROW.abs()}
        options = options | {key: spread(row.reshape(1, 8, 1, 1), mesh) for key, row in rows.items()}
    expected = (like or ttnn.get_golden_function(getattr(ttnn, name)))(*args)
    given = [spread(each, mesh) for each in args]
    with loom.record() as log:
        found = getattr(ttnn.distributed, name)(*given, **options)
    several, wanted = ([found], [expected]) if isinstance(expected, torch.Tensor) else (found, expected)
    for one, other in zip(several, wanted, strict=True):
        torch.testing.assert_close(ttnn.to_torch(one).double(), other.double(), rtol=1e-4, atol=1e-4)
    if log.bytes == 0:  # then it can be done where communication is an error
        with loom.communication("forbid"):
            getattr(ttnn.distributed, name)(*given, **options)
    else:
        with pytest.raises(RuntimeError), loom.communication("forbid"):
            getattr(ttnn.distributed, name)(*given, **options)


# random programs in both views


class Views:
    """One tensor three times: parts with explicit collectives, a whole through `ttnn.distributed`, and dense.

    `cut` says which dim each mesh axis cuts (None for none). Every step is written once for each view.
    """

    def __init__(self, mesh: Any, draw: random.Random) -> None:
        self.mesh, self.draw, self.seed, self.steps = mesh, draw, 100, []
        self.axes = range(len(tuple(mesh.shape)))
        self.dense = values(32, 32, seed=draw.randrange(1 << 20))
        dims = draw.choice([(None, None), (0, None), (None, 0), (1, None), (None, 1), (0, 1), (1, 0)])
        self.cut: list[int | None] = list(dims)
        self.parts = self.whole = put(self.dense, mesh, self.label())

    def label(self) -> list[Any]:
        return [R() if dim is None else S(dim) for dim in self.cut]

    def weight(self, *shape: int, cut: dict[int, int] | None = None) -> tuple[torch.Tensor, Any]:
        self.seed += 1
        dense = values(*shape, seed=self.seed) / shape[0] ** 0.5
        return dense, put(dense, self.mesh, [S(cut[axis]) if axis in (cut or {}) else R() for axis in self.axes])

    def step(self) -> None:
        able = [self.column, self.pointwise, self.softmax, self.norm, self.total, self.gather, self.partition]
        if 1 in self.cut:
            able.append(self.row)
        chosen = self.draw.choice(able)
        self.steps.append(chosen.__name__)
        chosen()

    def axis_without(self) -> int | None:
        free = [axis for axis in self.axes if self.cut[axis] is None]
        return self.draw.choice(free) if free else None

    def gathered(self, dim: int) -> None:
        """Explicit: every axis that cuts a dim gathers it."""
        for axis in self.axes:
            if self.cut[axis] == dim:
                self.parts = ttnn.all_gather(self.parts, dim, cluster_axis=axis)
                self.cut[axis] = None

    def column(self) -> None:
        """A weight cut at its columns by an axis that cuts nothing yet."""
        self.gathered(1)
        axis = self.axis_without()
        dense, w = self.weight(32, 32, cut={} if axis is None else {axis: 1})
        self.parts = ttnn.matmul(self.parts, w)
        if axis is not None:
            self.cut[axis] = 1
        self.whole = ttnn.distributed.matmul(self.whole, w)
        self.dense = self.dense @ dense

    def row(self) -> None:
        """A weight cut at its rows, where the columns of the other are cut: partial sums, summed or scattered."""
        axis = self.cut.index(1)
        dense, w = self.weight(32, 32, cut={axis: 0})
        terms = ttnn.matmul(self.parts, w)
        assert terms.tensor_topology().placements()[axis] == (P() if self.mesh.shape[axis] > 1 else R())
        if self.draw.random() < 0.5:
            self.parts, self.cut[axis] = ttnn.all_reduce(terms, cluster_axis=axis), None
        else:
            self.parts = ttnn.reduce_scatter(terms, 1, cluster_axis=axis)
        self.whole = ttnn.distributed.matmul(self.whole, w, output=self.label())
        self.dense = self.dense @ dense

    def pointwise(self) -> None:
        """A bias and a factor that lie as they have to."""
        dense, w = self.weight(32, 32, cut={axis: dim for axis, dim in enumerate(self.cut) if dim is not None})
        self.parts = ttnn.multiply(ttnn.add(self.parts, w), 0.5)
        self.whole = ttnn.distributed.multiply(ttnn.distributed.add(self.whole, w), 0.5)
        self.dense = (self.dense + dense) * 0.5

    def softmax(self) -> None:
        dim = self.draw.choice((0, 1))
        self.gathered(dim)
        self.parts = ttnn.softmax(self.parts, dim=dim)
        self.whole = ttnn.distributed.softmax(self.whole, dim=dim)
        self.dense = self.dense.softmax(dim)

    def norm(self) -> None:
        name = self.draw.choice(("rms_norm", "layer_norm"))
        self.gathered(1)
        dense, w = self.weight(32)
        self.parts = getattr(ttnn, name)(self.parts, weight=w, epsilon=1e-5)
        self.whole = getattr(ttnn.distributed, name)(self.whole, weight=w, epsilon=1e-5)
        self.dense = getattr(torch.nn.functional, name)(self.dense, (32,), dense, eps=1e-5)

    def total(self) -> None:
        """Its sum over a dim is taken from it: a sum over a cut dim is reduced by hand."""
        dim = self.draw.choice((0, 1))
        part = ttnn.sum(self.parts, dim=dim, keepdim=True)
        for axis in self.axes:
            if self.cut[axis] == dim:
                part = ttnn.all_reduce(part, cluster_axis=axis)
        self.parts = ttnn.add(self.parts, ttnn.multiply(part, -1 / 32))
        mean = ttnn.distributed.mean(self.whole, dim=dim, keepdim=True)
        self.whole = ttnn.distributed.add(self.whole, ttnn.distributed.multiply(mean, -1.0))
        self.dense = self.dense - self.dense.mean(dim, keepdim=True)

    def gather(self) -> None:
        self.gathered(self.draw.choice((0, 1)))
        self.whole = ttnn.distributed.to_topology(self.whole, self.label())

    def partition(self) -> None:
        """An axis that cuts nothing cuts a dim that no other cuts."""
        dims = [dim for dim in (0, 1) if dim not in self.cut]
        axis = self.axis_without()
        if dims and axis is not None:
            self.cut[axis] = self.draw.choice(dims)
            rows = ttnn.to_layout(self.parts, ttnn.ROW_MAJOR_LAYOUT)  # only rows are cut inside of a tile
            rows = ttnn.mesh_partition(rows, self.cut[axis], cluster_axis=axis)
            self.parts = ttnn.to_layout(rows, ttnn.TILE_LAYOUT)
            self.whole = ttnn.distributed.to_topology(self.whole, self.label())

    def check(self) -> None:
        parts, whole = ttnn.to_torch(self.parts), ttnn.to_torch(self.whole)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(whole, self.dense, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("start", range(0, 100, 10))
def test_parts_with_explicit_collectives_equal_wholes_in_100_random_programs(start):
    ran = []
    for seed in range(start, start + 10):
        draw = random.Random(seed)
        shape = ttnn.MeshShape(*draw.choice([(2, 4), (4, 2), (1, 8), (2, 2), (8, 4)]))
        with ttnn.create_mesh_device(shape) as mesh, ttnn.strictness("lenient"):  # groups of one are among them
            views = Views(mesh, draw)
            for _ in range(draw.randint(4, 8)):
                views.step()
                views.check()
            ran += views.steps
    assert len(set(ran)) >= 6


def test_a_program_that_forgets_its_all_reduce_is_caught(mesh, monkeypatch):
    monkeypatch.setattr(ttnn, "all_reduce", lambda tensor, cluster_axis: relabelled(tensor, cluster_axis))

    def relabelled(tensor: Any, axis: int) -> Any:
        told = tensor.tensor_topology().placements()
        told[axis] = R()
        tensor.update_tensor_topology(tensor.tensor_topology().with_placements(told))
        return tensor

    views = Views(mesh, random.Random(0))
    views.cut = [None, 1]
    views.parts = views.whole = put(views.dense, mesh, views.label())
    monkeypatch.setattr(views.draw, "random", lambda: 0.0)
    views.row()
    with pytest.raises(AssertionError, match="not close"):
        views.check()


@pytest.mark.parametrize("how", [0, 1])
def test_a_trace_replays_what_was_planned_on_new_values(how, monkeypatch):
    monkeypatch.setenv("MESHLOOM_CHECK", "races")
    first, second, w = values(32, 64), values(32, 64, seed=5), values(64, 32, seed=1)
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as mesh:
        x, b = put(first, mesh, how), put(w, mesh, 0)
        ttnn.distributed.softmax(ttnn.distributed.matmul(x, b, output=S(1)))  # programs are compiled before a capture
        trace = ttnn.begin_trace_capture(mesh, cq_id=0)
        y = ttnn.distributed.softmax(ttnn.distributed.matmul(x, b, output=S(1)))
        ttnn.end_trace_capture(mesh, trace, cq_id=0)
        for given in (first, second):
            mapper = ttnn.ShardTensorToMesh(mesh, dim=how)
            host = ttnn.from_torch(given, layout=ttnn.TILE_LAYOUT, mesh_mapper=mapper)
            ttnn.copy_host_to_device_tensor(host, x)
            ttnn.execute_trace(mesh, trace, cq_id=0)
            check_close(y, (given @ w).softmax(-1))
        ttnn.release_trace(mesh, trace)


def test_a_part_that_is_stored_once_for_all_devices_is_still_a_part_of_each(mesh):
    x = ttnn.zeros((2, 4), device=mesh, layout=ttnn.TILE_LAYOUT, dtype=ttnn.float32)
    assert x.block.shape[:2] == (1, 1)
    x.update_tensor_topology(put(values(16, 4), mesh, 0).tensor_topology())
    check_close(ttnn.distributed.add(x, 1.0), torch.ones(16, 4))
