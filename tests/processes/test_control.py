"""The control plane: devices are found, a mesh is seen locally and globally, and ops never ask."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import meshloom as loom
from meshloom import Mesh, MeshError
from meshloom.errors import BindingError
from meshloom.processes import discovery as plane
from meshloom.processes.bindings import Binding
from meshloom.processes.discovery import Control, Device, control, discover, visible_mesh

DECLARED = "MESHLOOM_VIRTUAL_DEVICES"


@pytest.fixture(autouse=True)
def no_cards(monkeypatch, tmp_path):
    monkeypatch.setattr(plane, "CARDS", tmp_path / "tenstorrent")
    for name in os.environ:
        if name.startswith(("TT_", "MESHLOOM_", "RANK", "WORLD_SIZE", "LOCAL_")):
            monkeypatch.delenv(name)


def ids(**environment: str) -> list[str]:
    return [str(device) for device in discover(environment)]


def test_row_52_discovery_lists_virtual_devices_that_the_environment_declares():
    assert ids(**{DECLARED: "3"}) == ["virtual:0", "virtual:1", "virtual:2"]
    assert ids(TT_VISIBLE_DEVICES="4,2") == ["virtual:4", "virtual:2"]
    assert ids(**{DECLARED: "8"}, MESHLOOM_VISIBLE_DEVICES="6,7") == ["virtual:6", "virtual:7"]


def test_row_52_discovery_lists_cards_that_are_there(tmp_path):
    folder = tmp_path / "tenstorrent"
    folder.mkdir()
    for name in ("10", "0", "1", "by-id"):
        (folder / name).touch()
    assert discover({}) == [Device("card", number, str(folder / str(number))) for number in (0, 1, 10)]
    assert ids(TT_VISIBLE_DEVICES="1") == ["card:1"]
    assert ids(**{DECLARED: "2"}) == ["virtual:0", "virtual:1"]
    with pytest.raises(BindingError, match="device 3 is to be visible, but there is no such device"):
        discover({"TT_VISIBLE_DEVICES": "3"})


def test_row_52_discovery_lists_gpus_and_is_empty_without_any(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert discover({}) == []
    assert discover({"TT_VISIBLE_DEVICES": ""}) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert ids() == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("value", ["-1", "four", "1.5"])
def test_a_wrong_number_of_devices_is_refused(value):
    with pytest.raises(BindingError, match="is not a number of devices"):
        discover({DECLARED: value})


def test_row_53_the_mesh_shape_is_told_by_scope():
    whole = control(Mesh(dp=2, tp=4))
    assert whole.mesh_shape() == whole.mesh_shape("global") == whole.mesh_shape("local") == (2, 4)
    with pytest.raises(MeshError, match=r"'locl' is not a scope") as caught:
        whole.mesh_shape("locl")
    assert "did you mean 'local'?" in str(caught.value)


def test_row_55_two_ranks_of_a_2x4_mesh_see_2x2_each_with_the_right_offsets():
    left, right = (Control((2, 4), (1, 2), (0, place)) for place in range(2))
    for each in (left, right):
        assert each.mesh_shape("local") == (2, 2) and each.mesh_shape("global") == (2, 4)
        assert each.mesh_range("global") == (range(2), range(4))
    assert left.mesh_offset == (0, 0) and right.mesh_offset == (0, 2)
    assert left.mesh_range("local") == (range(2), range(2))
    assert right.mesh_range("local") == (range(2), range(2, 4))
    held = [[place for place in Mesh(r=2, c=4).coordinates() if each.is_local(place)] for each in (left, right)]
    assert sorted(held[0] + held[1]) == list(Mesh(r=2, c=4).coordinates()) and len(held[0]) == len(held[1]) == 4
    assert str(right) == "global 2x4 by 1x2 processes; local 2x2 at (0, 2), coordinates [0:2, 2:4]"


@pytest.mark.parametrize(
    ("shape", "processes", "place", "error"),
    [((2, 4), (1, 3), (0, 0), MeshError), ((2, 4), (1, 2), (0, 2), BindingError), ((2, 4), (2,), (0, 0), MeshError)],
)
def test_a_view_that_cannot_be_is_refused(shape, processes, place, error):
    with pytest.raises(error):
        Control(shape, processes, place)


def test_row_56_ops_never_ask_the_control_plane(monkeypatch):
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("the data plane asked the control plane")

    monkeypatch.setenv("TT_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    for name in ("discover", "control", "visible_mesh", "visible_devices", "from_environment", "_cards", "_gpus"):
        monkeypatch.setattr(plane, name, refuse)
    with pytest.raises(AssertionError, match="asked the control plane"):
        plane.discover()
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    x = loom.randn(16, 8, mesh=mesh, placements="S(0), S(1)").requires_grad_()
    w = loom.distribute(torch.randn(8, 12), mesh, "R, S(0)")
    y = (x @ w).relu().sum()
    y.backward()
    assert y.item() == pytest.approx((x.to_torch() @ w.to_torch()).relu().sum().item(), rel=1e-5)
    assert x.grad is not None and x.redistribute("R, R").to_torch().shape == (16, 8)
    loom.collectives.all_reduce(w, "tp")


def test_row_57_without_ids_a_mesh_takes_all_visible_devices(monkeypatch):
    monkeypatch.setenv(DECLARED, "8")
    assert visible_mesh() == Mesh.of((8,))
    assert visible_mesh((2, 4), ("r", "c")) == Mesh(r=2, c=4)
    monkeypatch.setenv("TT_VISIBLE_DEVICES", "4,5,6,7")
    assert visible_mesh((2, 2)).device_ids == (4, 5, 6, 7)
    opened = visible_mesh(opened=loom.open_mesh)
    assert opened is loom.current_mesh() and opened.device_ids == (4, 5, 6, 7)
    assert loom.ones(4, mesh=opened).sum().item() == 4
    with pytest.raises(MeshError, match=r"needs 8 devices, but 4 are visible"):
        visible_mesh((2, 4))


def test_row_57_virtual_devices_need_no_declaration_but_a_shape(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert visible_mesh((2, 4)) == Mesh.of((2, 4))
    with pytest.raises(MeshError, match="there is no device to open a mesh over"):
        visible_mesh()


PARTITION = """
    import json, os, pathlib, sys, time
    import meshloom as loom
    from meshloom.processes.discovery import discover, visible_mesh

    folder, own, other = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    mesh = visible_mesh(opened=loom.open_mesh)
    (folder / own).touch()  # both stand here at once, or the test does not end
    until = time.monotonic() + 60
    while not (folder / other).exists():
        assert time.monotonic() < until, "the other process did not come"
        time.sleep(0.01)
    total = loom.ones(6, mesh=mesh).sum().item()
    print(json.dumps({"devices": [d.id for d in discover()], "mesh": mesh.device_ids, "total": total}))
"""


def test_row_58_two_processes_with_their_own_visible_devices_run_at_once(tmp_path):
    script = tmp_path / "partition.py"
    script.write_text(textwrap.dedent(PARTITION))

    def start(visible: str, own: str, other: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TT_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), str(tmp_path), own, other]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    running = [start("0,1", "first", "second"), start("2,3", "second", "first")]
    try:
        told = [each.communicate(timeout=120) for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, 0], told
    assert [json.loads(out) for out, _ in told] == [
        {"devices": [0, 1], "mesh": [0, 1], "total": 6.0},
        {"devices": [2, 3], "mesh": [2, 3], "total": 6.0},
    ]


def test_row_59_the_local_view_follows_mesh_id_and_host_rank(monkeypatch):
    mesh = Mesh(r=2, c=4)
    for rank, offset in enumerate([(0, 0), (0, 2)]):
        monkeypatch.setenv("TT_MESH_ID", "0")
        monkeypatch.setenv("TT_MESH_HOST_RANK", str(rank))
        seen = control(mesh, hosts=(1, 2))
        assert (seen.mesh_shape("local"), seen.mesh_shape("global"), seen.mesh_offset) == ((2, 2), (2, 4), offset)


@pytest.mark.parametrize(("rank", "says"), [("2", "host rank 2 is out of range for 2"), ("-1", "is not a number")])
def test_row_59_an_invalid_host_rank_raises(monkeypatch, rank, says):
    monkeypatch.setenv("TT_MESH_ID", "0")
    monkeypatch.setenv("TT_MESH_HOST_RANK", rank)
    with pytest.raises(BindingError, match=says):
        control(Mesh(r=2, c=4), hosts=(1, 2))


def test_row_59_a_host_rank_without_a_mesh_id_raises(monkeypatch):
    monkeypatch.setenv("TT_MESH_HOST_RANK", "1")
    with pytest.raises(BindingError, match="set without a mesh id"):
        control(Mesh(r=2, c=4), hosts=(1, 2))


def test_a_host_rank_that_contradicts_the_split_of_a_mesh_is_refused():
    split = Mesh.of((2, 4), processes=(1, 2))  # this process is rank 0
    assert control(split, binding=Binding(mesh_id=0, host_rank=0)).mesh_offset == (0, 0)
    with pytest.raises(BindingError, match=r"says place \(0, 1\), but rank 0 holds place \(0, 0\)"):
        control(split, binding=Binding(mesh_id=0, host_rank=1))
    with pytest.raises(MeshError, match="split by 1x2 processes, not 2x1"):
        control(split, hosts=(2, 1))


def test_the_file_of_cards_is_the_drivers():
    source = Path(plane.__file__).read_text()
    assert 'CARDS = Path("/dev/tenstorrent")' in source
