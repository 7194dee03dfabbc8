"""The requirement checklist, one test per row that this surface answers; the number in the name is the row's."""

from __future__ import annotations

import ast
import itertools
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest
import torch

import meshloom as loom
from meshloom import Mesh, Partial, Replicate, Shard, Topology
from meshloom.ops import Call, Ref
from meshloom.planner import STRATEGIES, plan, strategy_of

ROOT = Path(__file__).resolve().parents[2]
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"}


@pytest.fixture
def workers() -> Mesh:
    return loom.open_mesh((4,), axes=("w",))


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_close(found: loom.Tensor, expected: torch.Tensor, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found.to_torch(), expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("first", ["R", "S(0)", "S(1)"])
@pytest.mark.parametrize("second", ["R", "S(0)", "S(1)"])
def test_row_005_all_nine_input_placements_agree_with_torch_in_bfloat16(first, second, workers):
    a, b = values(64, 48).bfloat16(), values(48, 32, seed=1).bfloat16()
    found = loom.distribute(a, workers, first) @ loom.distribute(b, workers, second)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.to_torch(), a @ b, rtol=2e-2, atol=2e-2)


def test_row_006_sharded_inputs_need_no_collective_in_user_code():
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    a, b = values(20, 30), values(30, 7, seed=1)
    check_close(loom.distribute(a, mesh, "S(0), S(1)") @ loom.distribute(b, mesh, "S(1), S(0)"), a @ b)


def test_row_008_only_the_inner_sharded_matmul_communicates(workers):
    a, b = values(16, 8), values(8, 4, seed=1)
    with loom.record() as rows:
        loom.distribute(a, workers, "S(0)") @ loom.distribute(b, workers, "R")
    with loom.record() as inner:
        loom.distribute(a, workers, "S(1)") @ loom.distribute(b, workers, "S(0)")
    assert rows.bytes == 0
    assert inner.bytes == 2 * 16 * 4 * 4 * 3 // 4


@pytest.mark.parametrize("asked", ["R, R", "S(0), R", "R, S(-1)", "S(0), S(1)"])
def test_row_009_any_output_layout_can_be_asked_for(asked):
    mesh = loom.open_mesh((2, 2), axes=("dp", "tp"))
    a, b = values(12, 8), values(8, 6, seed=1)
    found = loom.matmul(loom.distribute(a, mesh, "S(1), R"), loom.distribute(b, mesh, "R, S(0)"), output=asked)
    assert str(found.topology) == f"f32[12, 6]({asked.replace('-1', '1')}) on Mesh(dp=2, tp=2)"
    check_close(found, a @ b)


def _program(mesh: Mesh) -> torch.Tensor:
    torch.manual_seed(3)
    x = loom.randn(16, 12, mesh=mesh, placements={mesh.axes[0]: Shard(0)})
    w = loom.randn(12, 8, mesh=mesh, placements={mesh.axes[-1]: Shard(1)})
    return (x @ w).relu().sum(0).to_torch()


def test_row_010_a_program_for_virtual_4x4_runs_on_physical_2x2():
    virtual = loom.open_mesh((4, 4), axes=("r", "c"), physical=(2, 2))
    homes = {virtual.virtual_to_physical(place)[0] for place in virtual.coordinates()}
    assert homes == set(itertools.product(range(2), range(2)))
    assert torch.equal(_program(virtual), _program(loom.open_mesh((4, 4), axes=("r", "c"))))
    torch.testing.assert_close(_program(virtual), _program(loom.open_mesh((1, 1), axes=("r", "c"))))


def test_row_011_virtual_to_physical_is_total_invertible_and_survives_reshape():
    mesh = loom.open_mesh((4, 4), axes=("r", "c"), physical=(2, 2))
    homes = [mesh.virtual_to_physical(place) for place in mesh.coordinates()]
    assert len(set(homes)) == 16
    assert [mesh.physical_to_virtual(*home) for home in homes] == list(mesh.coordinates())
    line = mesh.reshape(x=16)
    assert [line.virtual_to_physical((i,)) for i in range(16)] == homes


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources in which `python -m build` made an sdist and, from that, a wheel; without the network."""
    where = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, where / name)
    shutil.copytree(ROOT / "src", where / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    run_python("-m", "build", "--no-isolation", "--outdir", "dist", ".", cwd=where)
    return where


def run_python(*arguments: str, cwd: Path, **environment: str) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(project: Path) -> Path:
    (found,) = (project / "dist").glob("*.whl")
    return found


IMPORTS = """
import sys, meshloom
meshloom.distributed.matmul
import meshloom.distributed
from meshloom.distributed import matmul
assert matmul is meshloom.ttnn.distributed.matmul
assert meshloom.__file__.startswith(sys.argv[1]), meshloom.__file__
"""


@pytest.mark.slow
def test_row_018_distributed_matmul_is_importable_from_a_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    run_python("-c", IMPORTS, str(tmp_path), cwd=tmp_path, PYTHONPATH=str(tmp_path))


def modules() -> set[str]:
    """Every module and data file that an installation must have."""
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/meshloom").rglob("*.py")}
    return sources | {
        "meshloom/py.typed",
        "meshloom/ttnn/names.txt",
        "meshloom/ttnn/ops/signatures.txt",
        "meshloom/ttnn/distributed/README.md",
    }


@pytest.mark.slow
def test_row_019_the_sdist_and_the_wheel_hold_every_module_and_the_type_marker(project, wheel):
    assert modules() <= set(zipfile.ZipFile(wheel).namelist())
    (sdist,) = (project / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in modules()} | {"pyproject.toml", "README.md", "LICENSE"} <= held


@pytest.mark.slow
def test_row_019_pip_installs_the_directory(project, tmp_path):
    alone = ("--no-build-isolation", "--no-deps", "--no-index", "--target", str(tmp_path))
    run_python("-m", "pip", "install", "--quiet", *alone, ".", cwd=project)
    assert all((tmp_path / name).is_file() for name in modules())
    run_python("-c", IMPORTS, str(tmp_path), cwd=tmp_path, PYTHONPATH=str(tmp_path))


def _called_names(source: str) -> set[str]:
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {f.attr if isinstance(f, ast.Attribute) else f.id for f in calls if isinstance(f, (ast.Attribute, ast.Name))}


def test_row_022_no_example_calls_a_collective():
    """Those with TTNN's literal collectives apart: they show how programs of that kind run."""
    examples = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("ttnn_"))
    assert examples, "there are no examples to read"
    assert {path.name: _called_names(path.read_text()) & COLLECTIVES for path in examples} == {
        path.name: set() for path in examples
    }


def test_row_022_the_reader_of_examples_finds_a_planted_collective():
    assert _called_names("import x\nx.all_reduce(y)\n") & COLLECTIVES == {"all_reduce"}


@pytest.mark.parametrize("shape", [(1, 2), (4, 5), (10, 20)])
def test_row_023_one_script_gives_one_answer_on_2_20_and_200_devices(shape):
    expected = _program(loom.open_mesh((1, 1), axes=("dp", "tp")))
    torch.testing.assert_close(_program(loom.open_mesh(shape, axes=("dp", "tp"))), expected)


def test_row_024_a_hint_changes_the_bytes_and_not_the_result(workers):
    a, b = values(32, 16), values(16, 8, seed=1)

    def run(hint: str) -> tuple[torch.Tensor, int]:
        x, w = loom.distribute(a, workers, hint), loom.distribute(b, workers, "S(0)")
        with loom.record() as log:
            y = x @ w
        return y.to_torch(), log.bytes

    plain, hinted = run("S(0)"), run("S(1)")
    torch.testing.assert_close(plain[0], hinted[0])
    assert plain[1] == 16 * 8 * 4 * 3 // 4  # gathers w
    assert hinted[1] == 2 * 32 * 8 * 4 * 3 // 4  # reduces the product


def test_row_025_topology_reports_each_axis_and_survives_ops():
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    x = loom.ones(16, 8, mesh=mesh, placements={"dp": Shard(0)})
    w = loom.ones(8, 12, mesh=mesh, placements={"tp": Shard(1)})
    assert x.placements == (Shard(0), Replicate())
    assert (x @ w).relu().mul(2).placements == (Shard(0), Shard(1))
    assert (x @ w).T.placements == (Shard(1), Shard(0))
    assert str((x @ w).topology) == "f32[16, 12](S(0), S(1)) on Mesh(dp=2, tp=4)"


@pytest.mark.parametrize(
    ("choice", "outcome", "kinds"),
    [
        ({"x": "row", "y": "none"}, "S(0), R", {}),
        ({"x": "none", "y": "column"}, "R, S(1)", {}),
        ({"x": "inner", "y": "none"}, "R, R", {"all_reduce": 1}),
        ({"x": "row", "y": "column"}, "S(0), S(1)", {}),
    ],
)
def test_row_026_row_column_inner_and_2d_strategies_are_each_selectable(choice, outcome, kinds):
    mesh = loom.open_mesh((2, 3), axes=("x", "y"))
    a, b = values(12, 10), values(10, 9, seed=1)
    x, w = loom.distribute(a, mesh, "R, R"), loom.distribute(b, mesh, "R, R")
    with loom.choose(**choice), loom.record() as log:
        y = x @ w
    assert y.topology.notation == f"f32[12, 9]({outcome})"
    assert log.kinds() == kinds
    check_close(y, a @ b)


def test_row_026_sharded_operands_take_the_2d_strategy_by_gathering_panels():
    mesh = loom.open_mesh((2, 2), axes=("x", "y"))
    a, b = values(12, 8), values(8, 6, seed=1)
    x, w = loom.distribute(a, mesh, "S(0), S(1)"), loom.distribute(b, mesh, "S(0), S(1)")
    with loom.choose(x="row", y="column"), loom.record() as log:
        y = x @ w
    assert y.topology.notation == "f32[12, 6](S(0), S(1))"
    assert [(event.kind, event.axis) for event in log] == [("all_gather", "y"), ("all_gather", "x")]
    check_close(y, a @ b)


def test_row_028_redistribute_reaches_any_placements_from_any():
    mesh = loom.open_mesh((2, 3), axes=("x", "y"))
    dense = values(7, 5)
    each = (Replicate(), Shard(0), Shard(1), Partial("sum"))
    for source, target in itertools.product(itertools.product(each, each), repeat=2):
        found = loom.distribute(dense, mesh, source).redistribute(target)
        assert found.placements == target
        check_close(found, dense)


def test_row_047_accumulating_k_micro_batches_reduces_each_parameter_once():
    mesh = loom.open_mesh((4,), axes=("dp",))
    w = loom.Parameter(loom.distribute(values(6, 3), mesh, "R"))

    def backward(step: int) -> None:
        x = loom.distribute(values(8, 6, seed=step), mesh, "S(0)")
        (x @ w).square().sum().backward()

    with loom.record() as log:
        with loom.accumulate():
            for step in range(4):
                backward(step)
        before = [event for event in log if event.phase == "backward"]
        backward(4)
    after = [event for event in log if event.phase == "backward"]
    assert before == []
    assert [(event.kind, event.axis, event.bytes) for event in after] == [("all_reduce", "dp", 2 * 6 * 3 * 4 * 3 // 4)]
    dense = values(6, 3).requires_grad_()
    for step in range(5):
        (values(8, 6, seed=step) @ dense).square().sum().backward()
    check_close(w.grad, dense.grad)


def test_row_047_the_user_decides_when_to_reduce():
    mesh = loom.open_mesh((4,), axes=("dp",))
    w = loom.Parameter(loom.distribute(values(6, 3), mesh, "R"))
    optimizer = torch.optim.SGD([w], lr=0.1)
    with loom.accumulate():
        (loom.distribute(values(8, 6), mesh, "S(0)") @ w).sum().backward()
    with pytest.raises(loom.GradientError, match=r"outside of loom.accumulate\(\).*loom.synchronize\(parameters\)"):
        optimizer.step()
    check_close(w, values(6, 3))
    with loom.record() as log:
        loom.synchronize([w])
    assert log.kinds() == {"all_reduce": 1}
    with loom.communication("forbid"):
        loom.synchronize([w])  # nothing waits any more
        optimizer.step()
    check_close(w, values(6, 3) - 0.1 * values(8, 6).sum(0)[:, None].expand(6, 3))


def test_row_128_a_sum_moves_one_partial_per_device_and_not_the_shards(workers):
    x = loom.ones(4096, 64, mesh=workers, placements="S(0)")
    with loom.record() as log:
        x.sum()
    assert [(event.kind, event.bytes) for event in log] == [("all_reduce", 2 * 4 * 3 // 4)]


def held_rows(rows: int) -> list[int]:
    """How many rows each of 16 devices holds."""
    topology = Topology(Mesh(w=16), (Shard(0),), (rows, 8), "f32")
    held = [topology.extent((i,))[0] for i in range(16)]
    assert sum(held) == rows
    assert topology.block_shape == (16, max(held), 8)  # every device allocates the same
    return held


@pytest.mark.parametrize("rows", [16, 4096, 65536])
def test_row_129_what_divides_is_spread_evenly(rows):
    held = held_rows(rows)
    assert max(held) == min(held) == rows // 16


@pytest.mark.parametrize("rows", [1001, 4099, 65537])
def test_row_129_a_large_tensor_that_does_not_divide_lacks_less_than_a_tile_of_rows(rows):
    held = held_rows(rows)
    assert max(held) <= rows / 16 + 1
    assert max(held) - min(held) < 32  # ceil-sized chunks: the last device has what is left
    assert held[:-1] == [max(held)] * 15


def test_row_129_few_rows_leave_the_last_devices_empty_as_documented():
    assert held_rows(17) == [2] * 8 + [1] + [0] * 7
    assert (
        "17 over 16 devices is eight times 2, then 1, then seven times nothing"
        in (ROOT / "docs" / "placements.md").read_text()
    )


def test_row_131_a_batch_of_7_on_2_devices_is_padded_to_8_and_cut_to_7():
    mesh = loom.open_mesh((2,), axes=("dp",))
    dense, weight = values(7, 5), values(5, 3, seed=1)
    x = loom.distribute(dense, mesh, "S(0)")
    assert x.block.shape == (2, 4, 5)
    assert x.topology.padding((1,)) == (1, 0)
    y = x @ weight
    assert y.shape == (7, 3)
    check_close(y, dense @ weight)


def test_row_132_uneven_shards_of_4_and_3_are_accepted_and_right():
    mesh = loom.open_mesh((2,), axes=("dp",))
    parts = [values(4, 3), values(3, 3, seed=1)]
    x = loom.from_local(parts, mesh, "S(0)")
    dense = torch.cat(parts)
    assert [tuple(x.shard_at((i,)).shape) for i in range(2)] == [(4, 3), (3, 3)]
    check_close(x.softmax(-1), dense.softmax(-1))
    check_close(x.mean(0), dense.mean(0))
    check_close(x.softmax(0), dense.softmax(0))


def test_row_142_rows_of_a_lie_on_workers_0_to_3(workers):
    dense = values(128, 64)
    a = loom.distribute(dense, workers, "S(0)")
    for worker in range(4):
        assert a.topology.offset((worker,)) == (32 * worker, 0)
        assert torch.equal(a.shard_at((worker,)), dense[32 * worker : 32 * worker + 32])


def test_row_143_broadcasting_b_is_paid_once(workers):
    a = loom.distribute(values(128, 64), workers, "S(0)")
    b = loom.distribute(values(64, 32, seed=1), workers, "S(0)")
    with loom.record() as first:
        everywhere = b.redistribute("R")
        a @ everywhere
    with loom.record() as second:
        a @ everywhere
    assert first.bytes == 64 * 32 * 4 * 3 // 4
    assert second.bytes == 0
    assert all(torch.equal(everywhere.shard_at((w,)), b.to_torch()) for w in range(4))


def test_row_144_every_worker_multiplies_its_own_rows_in_one_call(workers, monkeypatch):
    from meshloom.engines import torch_engine

    calls = []
    monkeypatch.setitem(torch_engine.FUNCTIONS, "matmul", lambda *a, **k: calls.append(1) or torch.matmul(*a, **k))
    a = loom.distribute(values(128, 64), workers, "S(0)")
    b = loom.distribute(values(64, 32, seed=1), workers, "R")
    with loom.choose(w="row"):
        c = a @ b
    assert calls == [1]  # all workers at the same time
    for worker in range(4):
        assert c.shard_at((worker,)).shape == (32, 32)
        torch.testing.assert_close(c.shard_at((worker,)), a.shard_at((worker,)) @ b.to_torch(), rtol=1e-4, atol=1e-4)


def test_row_145_the_parts_of_c_concatenate_along_dim_0(workers):
    a, b = values(128, 64), values(64, 32, seed=1)
    c = loom.distribute(a, workers, "S(0)") @ loom.distribute(b, workers, "R")
    assert c.shape == (128, 32)
    assert torch.equal(torch.cat([c.shard_at((w,)) for w in range(4)]), c.to_torch())
    check_close(c, a @ b)


def test_row_146_strategy_1_has_no_all_reduce(workers):
    with loom.record() as log:
        loom.ones(128, 64, mesh=workers, placements="S(0)") @ loom.ones(64, 32, mesh=workers, placements="S(0)")
    assert "all_reduce" not in log.kinds()
    assert log.kinds()["all_gather"] == 1


def test_row_147_sum_is_a_partial_per_worker_and_an_all_reduce(workers):
    dense = values(128, 64)
    x = loom.distribute(dense, workers, "S(0)")
    partial = loom.sum(x, output=Partial("sum"))
    for worker in range(4):
        part = dense[32 * worker : 32 * worker + 32].sum()
        torch.testing.assert_close(partial.shard_at((worker,)), part, rtol=1e-5, atol=0)
    with loom.record() as log:
        total = x.sum()
    assert [event.kind for event in log] == ["all_reduce"]
    numpy.testing.assert_allclose(total.item(), dense.numpy().sum(), rtol=1e-5)


@pytest.mark.parametrize("rows", [128, 127, 13, 3])
def test_row_148_mean_is_weighted_by_what_each_worker_holds(rows, workers):
    dense = values(rows, 5)
    check_close(loom.distribute(dense, workers, "S(0)").mean(), dense.mean())
    check_close(loom.distribute(dense, workers, "S(0)").mean(0), dense.mean(0))


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min", "prod", "var", "any", "all"])
@pytest.mark.parametrize("placement", ["S(0)", "S(1)", "S(2)", "R"])
def test_row_149_any_shard_axis_any_reduction_axis_and_keepdims_equal_numpy(op, placement, workers):
    dense = values(5, 6, 7)
    source = dense > 0 if op in ("any", "all") else dense
    x = loom.distribute(source, workers, placement)
    reduce = getattr(numpy, op)
    for axis, keep in itertools.product((None, 0, 1, 2, -1), (False, True)):
        if axis is None and keep:
            continue  # torch reduces everything without keepdim
        found = _reduced(x, op, axis, keep)
        expected = reduce(source.numpy(), axis=axis, keepdims=keep)
        assert found.shape == expected.shape
        numpy.testing.assert_allclose(found.to_torch().numpy(), expected, rtol=1e-4, atol=1e-5)


def _reduced(x: loom.Tensor, op: str, axis: int | None, keep: bool) -> loom.Tensor:
    options = {"correction": 0} if op == "var" else {}
    if axis is None:
        return getattr(x, op)(**options)
    found = getattr(x, op)(dim=axis, keepdim=keep, **options)
    return found.values if op in ("max", "min") else found


@pytest.mark.parametrize("op", ["sum", "mean", "amax", "any"])
@pytest.mark.parametrize("axes", [(0, 1), (0, 2), (1, 2), (0, 1, 2)])
def test_row_149_several_reduction_axes_with_keepdims_equal_numpy(op, axes, workers):
    dense = values(5, 6, 7)
    for placement, keep in itertools.product(("S(0)", "S(1)", "S(2)"), (False, True)):
        source = dense > 1 if op == "any" else dense
        found = getattr(loom.distribute(source, workers, placement), op)(dim=axes, keepdim=keep)
        expected = getattr(numpy, op)(source.numpy(), axis=axes, keepdims=keep)
        assert found.shape == expected.shape
        numpy.testing.assert_allclose(found.to_torch().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_row_150_every_worker_reads_the_result_without_a_transfer(workers):
    total = loom.distribute(values(128, 64), workers, "S(0)").sum(0)
    with loom.communication("forbid"):
        read = [total.shard_at((worker,)) for worker in range(4)]
        dense = total.to_torch()
    assert all(torch.equal(each, dense) for each in read)


def test_row_151_strategy_3_sums_partials_of_the_full_shape(workers):
    a, b = values(128, 64), values(64, 32, seed=1)
    x, w = loom.distribute(a, workers, "S(1)"), loom.distribute(b, workers, "S(0)")
    partial = loom.matmul(x, w, output=Partial("sum"))
    for worker in range(4):
        inner = slice(16 * worker, 16 * worker + 16)
        torch.testing.assert_close(partial.shard_at((worker,)), a[:, inner] @ b[inner], rtol=1e-4, atol=1e-4)
    with loom.record() as log:
        c = x @ w
    assert log.kinds() == {"all_reduce": 1}
    check_close(c, a @ b)


def test_row_152_inner_shards_that_do_not_line_up_are_resharded():
    mesh = loom.open_mesh((2, 2), axes=("x", "y"))
    a, b = values(8, 12), values(12, 4, seed=1)
    with loom.record() as log:
        c = loom.distribute(a, mesh, "S(1), R") @ loom.distribute(b, mesh, "R, S(0)")
    check_close(c, a @ b)
    assert log.bytes > 0
    with pytest.raises(loom.ShapeError, match="label 'k' has size 12 and size 6"):
        loom.distribute(a, mesh, "S(1), R") @ loom.distribute(values(6, 4), mesh, "S(0), R")


@pytest.mark.parametrize("make", ["randn", "rand", "zeros", "ones"])
def test_row_153_new_tensors_are_spread_over_the_workers(make, workers):
    x = getattr(loom, make)(128, 64, mesh=workers)
    assert [tuple(x.shard_at((w,)).shape) for w in range(4)] == [(32, 64)] * 4


def test_row_153_from_numpy_is_spread_over_the_workers(workers):
    array = numpy.arange(128 * 64).reshape(128, 64)
    x = loom.distribute(array, workers)
    assert x.block.shape == (4, 32, 64)
    assert (x.numpy() == array).all()


@pytest.mark.parametrize("make", [loom.randn, loom.rand])
def test_row_153_seeded_values_do_not_depend_on_the_number_of_workers(make):
    def drawn(*shape: int) -> torch.Tensor:
        torch.manual_seed(7)
        return make(130, 1100, mesh=loom.open_mesh(shape)).to_torch()

    expected = drawn(1)
    assert expected.std() > 0
    for shape in [(2,), (4,), (7,), (2, 3), (128,)]:
        assert torch.equal(drawn(*shape), expected)


def test_row_154_thirteen_rows_on_four_workers_are_4_4_4_1(workers):
    dense = values(13, 3)
    x = loom.distribute(dense, workers)
    assert x.placements == (Shard(0),)
    assert [x.topology.extent((w,))[0] for w in range(4)] == [4, 4, 4, 1]
    assert torch.equal(x.to_torch(), dense)


def test_row_155_data_numpy_does_not_depend_on_the_order_of_arrival(workers):
    parts = {(w,): values(3, 2, seed=w) for w in range(4)}
    expected = torch.cat(list(parts.values())).numpy()
    for order in itertools.permutations(parts):
        x = loom.from_local({place: parts[place] for place in order}, workers, "S(0)")
        assert (x.data.numpy() == expected).all()


def _planned(op: str, sharding: str, row: str | None = None) -> tuple[object, int | None]:
    mesh = Mesh(w=4)
    shapes = ((128, 64), (64, 32)) if op == "matmul" else ((128, 64),)
    placed = [loom.parse(text) for text in sharding.split(", ")]
    operands = tuple(Topology(mesh, (p,), s, "f32") for p, s in zip(placed, shapes, strict=True))  # type: ignore[arg-type]
    extra = {"other": Ref(1)} if op == "matmul" else {"dim": None, "keepdim": False, "dtype": None}
    decided = plan(Call(op, operands, {"input": Ref(0), **extra}, ()), chosen=None if row is None else {"w": row})
    return decided, strategy_of(decided, "w")


@pytest.mark.parametrize("line", STRATEGIES, ids=lambda line: f"{line.number}-{line.op}-{line.sharding}")
def test_row_164_the_selector_follows_the_table(line):
    decided, number = _planned(line.op, line.sharding)
    assert number == line.number
    assert tuple(each.kind for each in decided.forward) == line.communication


def test_row_164_the_choice_can_be_overridden():
    assert _planned("matmul", "S(0), R")[1] == 1
    assert _planned("matmul", "S(0), R", row="k")[1] == 3
    assert _planned("matmul", "S(1), S(0)", row="m")[1] == 1


def test_row_165_the_table_names_the_three_strategies_of_the_document():
    assert {(line.number, line.op) for line in STRATEGIES} == {(1, "matmul"), (2, "sum"), (2, "mean"), (3, "matmul")}
    assert {line.number: line.communication for line in STRATEGIES} == {
        1: (),
        2: ("all_reduce",),
        3: ("all_reduce",),
    }
