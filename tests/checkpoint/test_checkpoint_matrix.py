"""Any mesh reads what any mesh wrote: 12 by 12 meshes in one process, six pairs of numbers of processes, dense too."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import checkpoint_cases as cases
import meshloom as loom
import ranks
from checkpoint_cases import MESHES, check_state, make_state
from meshloom.checkpoint import arrays, files, saving
from meshloom.engines.layout import torch_dtype
from meshloom.types import numel
from test_placement import topologies

TENSORS = 36  # of a state
FULL = bool(os.environ.get("MESHLOOM_CASES"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every mesh, and one of dense tensors."""
    parent = tmp_path_factory.mktemp("matrix")
    for number, shape in enumerate(MESHES):
        loom.save(make_state(loom.open_mesh(shape), True), parent / f"mesh-{number:02d}")
    loom.save(make_state(None, True), parent / "dense")
    return parent


@pytest.mark.parametrize("number", range(len(MESHES)), ids=[str(shape) for shape in MESHES])
def test_every_mesh_reads_what_a_mesh_wrote_bit_for_bit(saved, number):
    read = 0
    for shape in MESHES:
        mesh = loom.open_mesh(shape)
        state = make_state(mesh, False)
        loom.load(saved / f"mesh-{number:02d}", into=state)
        read += check_state(state, mesh)
    assert read == 12 * TENSORS


def test_dense_tensors_and_meshes_read_each_other(saved):
    state = make_state(None, False)
    assert check_state(loom.load(saved / "mesh-08", into=state), None) == TENSORS
    mesh = loom.open_mesh((2, 3))
    state = make_state(mesh, False)
    assert check_state(loom.load(saved / "dense", into=state), mesh) == TENSORS


def test_an_optimizer_with_a_state_is_read_in_place_and_one_on_another_mesh_anew(saved):
    mesh = loom.open_mesh((2, 4))
    state = make_state(mesh, True)
    for _, each in cases.tensors_of(state):
        if isinstance(each, loom.Tensor) and each.is_floating_point():
            each.detach().zero_()
    kept = {
        id(p): state["optimizer"].state[p]["exp_avg"]
        for p in state["model"].parameters()
        if p.dim() == 2 and p.dtype == p.float().dtype
    }
    loom.load(saved / "mesh-03", into=state)
    check_state(state, mesh)
    for parameter in state["model"].parameters():
        if id(parameter) in kept:
            assert state["optimizer"].state[parameter]["exp_avg"] is kept[id(parameter)]


@given(topologies(partial=False), st.data())
@settings(max_examples=120, deadline=None)
def test_any_topology_is_read_as_any_other_in_blocks_of_any_size(source, data):
    target = data.draw(topologies(partial=False).filter(lambda each: len(each.shape) == len(source.shape)))
    placements = target.placements
    block = data.draw(st.sampled_from([1, 16, 100, 1 << 22]))
    dense = (torch.arange(1, numel(source.shape) + 1).view(source.shape)).to(torch_dtype(source.dtype))
    with tempfile.TemporaryDirectory() as parent, pytest.MonkeyPatch.context() as patched:
        for module in (arrays, files, saving):
            patched.setattr(module, "BLOCK", block)
        loom.save({"x": loom.distribute(dense, source.mesh, source.placements)}, f"{parent}/a")
        found = loom.distribute(torch.zeros_like(dense), target.mesh, placements)
        loom.load(f"{parent}/a", into={"x": found})
    wanted = loom.distribute(dense, target.mesh, placements)
    assert torch.equal(found._data, wanted._data)  # padding too


# The processes of a run: their number, whose checkpoints they read, and whether they write one themselves.
RUNS = ((1, (), True), (2, (1,), True), (3, (2,), True), (4, (3, 2), True), (2, (3,), False), (1, (4,), False))
REST = ((1, (1, 2, 3), False), (2, (2, 4), False), (3, (1, 3, 4), False), (4, (1, 4), False))


@pytest.mark.slow
def test_six_pairs_of_numbers_of_processes_read_what_the_others_wrote(tmp_path):
    read = 0
    for count, sources, writes in (*RUNS, *(REST if FULL else ())):
        folders = [str(tmp_path / f"by-{source}") for source in sources]
        target = str(tmp_path / f"by-{count}") if writes else None
        if count == 1:
            found = [cases.cross(folders, target)]
        else:
            found = ranks.run(count, "checkpoint_cases:cross", folders, target)
        assert found == [TENSORS * len(sources)] * count
        read += len(sources)
    assert read == (16 if FULL else 6)
