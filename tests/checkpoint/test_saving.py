"""Saving: what a state may hold, how it is put in place, series, threads, and what goes back into a training loop."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler as schedulers

import meshloom as loom
import ranks
from checkpoint_cases import make_state, on
from meshloom import Mesh, Partial, Shard
from meshloom.checkpoint import files, folders, saving, writers
from meshloom.checkpoint.index import read_index
from meshloom.checkpoint.writers import Source, assign
from meshloom.placement import Replicate, Topology, extents

MESH = Mesh(dp=2, tp=2)


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# What a state may hold


def test_plain_values_come_back_as_they_were(tmp_path):
    values = {
        "numbers": [1, -2.5, True, None, 10**30, 1e-320],
        "text": "ä \ud7ff \0 $x",
        "not finite": (float("inf"), -float("inf")),
        "keys": {1: "a", 2.5: "b", None: "c", (1, "x"): "d"},
        "tagged": {"$tensor": "no tensor", "other": {"$float": 3}},
        "counter": Counter({3: 2}),
        "size": torch.Size([2, 3]),
        "empty": [[], {}, ()],
        "numpy": [numpy.float64(0.1), numpy.int32(7), numpy.bool_(True)],
    }
    loom.save({"values": values}, tmp_path / "a")
    found = loom.load(tmp_path / "a", into={"values": None})["values"]
    assert found == {**values, "size": (2, 3)}
    assert isinstance(found["counter"], Counter) and found["numbers"][2] is True
    assert type(found["numpy"][1]) is int


def test_one_element_of_any_stride_and_views_of_complex_numbers_come_back(tmp_path):
    values = torch.tensor([1 + 2j, 3 - 1j, 2j])
    state = {"one": torch.arange(8.0)[::2][1:2], "imag": values[::2][:1].conj().imag, "whole": values.conj()}
    loom.save(state, tmp_path / "c")
    found = {name: torch.zeros_like(each) for name, each in state.items()}
    loom.load(tmp_path / "c", into=found)
    assert all(torch.equal(found[name], each) for name, each in state.items())


def test_nan_comes_back(tmp_path):
    loom.save({"x": float("nan")}, tmp_path / "a")
    assert loom.load(tmp_path / "a", into={"x": 0})["x"] != 0


class Strange:
    pass


REFUSED = {
    "state['a']['b'][1]": {"a": {"b": [1, {1, 2}]}},
    "state['f']": {"f": lambda: 1},
    "state['bytes']": {"bytes": b"x"},
    "state['o']": {"o": Strange()},
    "state['c']": {"c": 1j},
    "state['t'][0]": {"t": (Strange,)},
}


@pytest.mark.parametrize("path", REFUSED)
def test_a_value_that_json_cannot_hold_is_refused_by_its_path(tmp_path, path):
    with pytest.raises(loom.ArgumentError, match="cannot hold") as refused:
        loom.save(REFUSED[path], tmp_path / "a")
    assert str(refused.value).startswith(f"{path} is a ")
    assert names(tmp_path) == []


def test_what_cannot_be_named_placed_or_written_is_refused(tmp_path):
    model = nn.Linear(2, 2)
    cases: dict[str, Any] = {
        "has a parameter that no module in the state has": {"optimizer": torch.optim.SGD(model.parameters(), lr=1)},
        "it lies on meta": {"model": nn.Linear(2, 2, device="meta")},
        "is not initialised": {"model": nn.LazyLinear(2)},
        "a state is a dict with names": [1, 2],
        r"a key 3, which is no name\n  fix  use text: '3'": {3: torch.ones(2)},
        "which a checkpoint cannot hold": {"x": torch.eye(2).to_sparse()},
        "nested more than 100 levels": {"x": deep(200)},
    }
    for words, state in cases.items():
        with pytest.raises(loom.ArgumentError, match=words):
            loom.save(state, tmp_path / "a")
    with pytest.raises(loom.ArgumentError, match="which a checkpoint cannot hold"):
        loom.save({"x": {b"k": 1}}, tmp_path / "a")
    assert names(tmp_path) == []


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def test_a_partial_tensor_is_reduced_first(tmp_path):
    parts = [torch.full((3,), float(i)) for i in range(4)]
    x = loom.from_local(parts, MESH, (Partial("sum"), Partial("sum")))
    assert x.topology.partial_axes
    loom.save({"x": x}, tmp_path / "a")
    assert loom.load(tmp_path / "a", into={"x": torch.zeros(3)})["x"].tolist() == [6.0, 6.0, 6.0]
    assert x.topology.partial_axes


def test_a_tied_weight_is_written_once_and_complex_and_odd_dtypes_come_back(tmp_path):
    state = make_state(MESH, True)
    loom.save(state, tmp_path / "a")
    index = read_index(tmp_path / "a")
    assert [name for name in index.tensors if "head" in name] == []
    odd = {
        "c128": torch.randn(3, 5, dtype=torch.complex128),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "f8": torch.randn(6).to(torch.float8_e5m2),
        "u16": torch.arange(5).to(torch.uint16),
        "turned": torch.arange(12.0).view(3, 4).t(),
        "wide": torch.ones(1).expand(5),
        "number": torch.tensor(3, dtype=torch.int8),
    }
    loom.save({"odd": odd}, tmp_path / "b")
    fresh = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in odd.items()}
    loom.load(tmp_path / "b", into={"odd": fresh})
    for name, each in fresh.items():
        assert torch.equal(each.cpu().to(torch.complex128), odd[name].to(torch.complex128)), name
    with pytest.raises(loom.ArgumentError, match="which files do not have"):
        loom.save({"q": torch.empty(2, dtype=torch.float4_e2m1fn_x2)}, tmp_path / "c")


class Odd(nn.Module):
    """Something beside tensors that has a tensor in it."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Custom(nn.Module):
    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {"steps": 3}


def test_whatever_is_saved_can_be_loaded(tmp_path, monkeypatch):
    """Names that collide in files and in the index, tensors in a module's extra state."""
    monkeypatch.setattr(writers, "SHARED", 4)
    state = {
        "__metadata__": torch.ones(3),
        "a": torch.arange(4.0),
        "a[0:2]": torch.full((2,), 7.0),
        "x/y": torch.zeros(1),
        "x": {"y": torch.ones(1)},
        "odd": Odd({"amax": torch.arange(3), "n": 2}),
    }
    loom.save(state, tmp_path / "a")
    fresh = {key: torch.zeros_like(each) for key, each in state.items() if isinstance(each, torch.Tensor)}
    loom.load(tmp_path / "a", into={**fresh, "x": (x := {"y": torch.zeros(1)}), "odd": (odd := Odd(None))})
    assert all(torch.equal(each, state[key]) for key, each in fresh.items()) and x["y"] == 1
    assert odd.extra["amax"].tolist() == [0, 1, 2] and odd.extra["n"] == 2
    with pytest.raises(loom.ArgumentError, match="and a module's state has tensors"):
        loom.save({"model": Custom()}, tmp_path / "b")
    with pytest.raises(loom.ArgumentError, match="two parameters of the state are called 'm/n/weight'"):
        loom.save({"m/n": nn.Linear(1, 1), "m": {"n": nn.Linear(1, 1)}}, tmp_path / "b")


def test_a_tensor_that_has_the_name_of_a_piece_has_another_name_in_the_file(tmp_path, monkeypatch):
    mesh = Mesh.of((2,), processes=(2,))
    half = loom.Tensor(Topology(mesh, (Shard(0),), (4,), "f32"), torch.ones(2))
    sources = {"a": half, "a[0:2]": torch.zeros(2)}
    with pytest.raises(loom.MeshloomError, match="processes"):
        loom.save(sources, tmp_path / "z")
    monkeypatch.setattr(saving.HERE, "count", 2)
    job = saving.Job(tmp_path / "x", tmp_path / "y", None, saving.Gathered({}, sources))
    keys = [job._part(number, piece).key for number, piece in enumerate(job.pieces)]
    assert keys == ["a[0:2]", "a[2:4]", "a[0:2]~"]


def test_views_that_are_made_at_every_use_are_not_taken_for_one(tmp_path):
    base = loom.distribute(torch.arange(40.0).view(4, 10), MESH, "S(0), S(1)")
    views = {str(row): base[row] for row in range(4)}
    loom.save(views, tmp_path / "a")
    fresh = {key: torch.zeros(10) for key in views}
    loom.load(tmp_path / "a", into=fresh)
    assert torch.equal(torch.stack(list(fresh.values())), base.to_torch())


# Who writes what


@pytest.mark.parametrize("grid", [(1, 1), (2, 1), (2, 2), (4, 3)])
def test_every_element_is_written_once_and_writers_have_about_as_many_bytes(grid):
    mesh, count = Mesh.of((4, 6), processes=grid), grid[0] * grid[1]
    layouts = [(Replicate(), Replicate()), (Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(0))]
    sources = {
        f"{number} {layer}": Source("f32", (50, 31), Topology(mesh, placements, (50, 31), "f32"))
        for number, placements in enumerate(layouts)
        for layer in range(40)
    }
    sources["dense"] = Source("f32", (64,))
    pieces = assign(sources, count)
    loads = [0] * count
    for name, source in sources.items():
        seen = torch.zeros(source.shape, dtype=torch.int64)
        for piece in (each for each in pieces if each.name == name):
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
            seen[box] += 1
            loads[piece.rank] += piece.nbytes
            if source.topology is not None and source.topology.mesh.is_split:
                assert any(e.start == piece.start for e in extents(source.topology, piece.rank))
        assert (seen == 1).all(), name
    assert sum(loads) == sum(
        each.shape[0] * (each.shape[1] if len(each.shape) > 1 else 1) * 4 for each in sources.values()
    )
    assert max(loads) <= 1.15 * min(loads)


def test_a_large_replicated_tensor_is_shared_among_its_holders():
    mesh = Mesh.of((4,), processes=(4,))
    whole = Source("f32", (1 << 13, 1 << 13), Topology(mesh, (Replicate(),), (1 << 13, 1 << 13), "f32"))
    pieces = assign({"w": whole}, 4)
    assert sorted(each.rank for each in pieces) == [0, 1, 2, 3]
    assert [each.shape for each in pieces] == [(2048, 8192)] * 4


def test_a_state_larger_than_a_file_is_written_to_several(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "LARGE", 1000)
    state = {f"w{i}": torch.full((100,), float(i)) for i in range(7)}
    loom.save(state, tmp_path / "a")
    assert len(names(tmp_path / "a")) == 5
    for most in (2, 256):  # files that are open at a time
        monkeypatch.setattr(files, "MOST_OPEN", most)
        fresh = {name: torch.zeros(100) for name in state}
        loom.load(tmp_path / "a", into=fresh)
        assert all(torch.equal(fresh[name], state[name]) for name in state)


# Putting it in place


def test_a_checkpoint_is_exchanged_for_a_new_one_and_nothing_is_left(tmp_path):
    for step in (1, 2):
        loom.save({"x": torch.full((3,), float(step)), "step": step}, tmp_path / "a")
        assert names(tmp_path) == ["a"]
        assert loom.load(tmp_path / "a", into={"x": torch.zeros(3)})["x"].tolist() == [step] * 3


def test_what_is_not_a_checkpoint_is_not_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    for name, words in (("mine", "files that are not a checkpoint's"), ("file", "it is a file"), ("link", "a link")):
        with pytest.raises(loom.CheckpointError, match=words):
            loom.save({"x": 1}, tmp_path / name)
    (tmp_path / "empty").mkdir()
    loom.save({"x": 1}, tmp_path / "empty")
    assert names(tmp_path) == ["empty", "file", "link", "mine"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "all of it"


def test_where_folders_cannot_be_exchanged_the_old_one_stays(tmp_path, monkeypatch):
    loom.save({"step": 1}, tmp_path / "a")
    monkeypatch.setattr(folders.ctypes, "CDLL", lambda *_, **__: object())
    with pytest.raises(loom.CheckpointError, match="cannot be exchanged"):
        loom.save({"step": 2}, tmp_path / "a")
    assert names(tmp_path) == ["a"] and loom.load(tmp_path / "a", into={"step": 0})["step"] == 1


def test_the_last_ones_of_a_series_are_kept_and_only_complete_older_ones_removed(tmp_path):
    (tmp_path / "step-000000").mkdir()  # not complete
    (tmp_path / "other-000001").mkdir()
    loom.save({"step": 9}, tmp_path / "step-000090")  # of a run that went further
    for step in (1, 2, 3, 4):
        loom.save({"step": step}, tmp_path / f"step-{step:06d}", keep=2)
    assert names(tmp_path) == ["other-000001", "step-000000", "step-000003", "step-000004", "step-000090"]
    assert loom.latest(tmp_path) == tmp_path / "step-000090"
    loom.save({"step": 5}, tmp_path / "step-000005", keep=1)
    assert "step-000005" in names(tmp_path) and "step-000004" not in names(tmp_path)
    for keep in (0, -1, True, "2"):
        with pytest.raises(loom.ArgumentError, match="is not a number of checkpoints"):
            loom.save({"step": 5}, tmp_path / "step-000006", keep=keep)  # type: ignore[arg-type]
    with pytest.raises(loom.ArgumentError, match="ends in a number"):
        loom.save({"step": 5}, tmp_path / "best", keep=2)


def test_the_latest_is_by_number_and_none_where_there_is_none(tmp_path):
    assert loom.latest(tmp_path / "absent") is None and loom.latest(tmp_path) is None
    for number in ("9", "10", "000011"):
        loom.save({"step": number}, tmp_path / f"step-{number}")
    (tmp_path / "step-12").mkdir()
    assert loom.latest(tmp_path) == tmp_path / "step-000011"
    assert folders.name_aside(tmp_path / "step-13", "0" * 16).name == "step-13.tmp-0000000000000000"


# In a thread


def test_an_asynchronous_save_has_the_values_of_its_moment_and_one_copy(tmp_path):
    state = {"x": loom.ones(4, 4, mesh=MESH, placements={"tp": Shard(1)}), "y": torch.ones(3), "step": 1}
    done = loom.save(state, tmp_path / "a", asynchronous=True)
    state["x"].zero_()
    state["y"].zero_()
    state["step"] = 2
    assert done.wait() == tmp_path / "a" and done.done
    fresh = loom.load(tmp_path / "a", into={"x": torch.zeros(4, 4), "y": torch.zeros(3), "step": 0})
    assert fresh["x"].sum() == 16 and fresh["y"].sum() == 3 and fresh["step"] == 1


def test_a_slow_save_does_not_stop_the_program_and_the_next_one_waits_for_it(tmp_path, monkeypatch):
    gate, write = threading.Event(), files.write_file

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(30)
        return write(*args, **kwargs)

    monkeypatch.setattr(saving, "write_file", slow)
    first = loom.save({"x": torch.ones(3)}, tmp_path / "step-1", asynchronous=True)
    assert not first.done and "under way" in repr(first)
    with pytest.raises(TimeoutError, match="has not ended"):
        first.wait(0.01)
    threading.Timer(0.1, gate.set).start()
    second = loom.save({"x": torch.ones(3)}, tmp_path / "step-2")
    assert first.done and second.done
    assert names(tmp_path) == ["step-1", "step-2"]


def break_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(saving, "write_file", full)


def test_a_failure_in_the_thread_is_told_by_wait_or_by_the_next_save(tmp_path, monkeypatch):
    loom.save({"x": torch.ones(3)}, tmp_path / "a")
    with monkeypatch.context() as patched:
        break_disk(patched)
        failed = loom.save({"x": torch.zeros(3)}, tmp_path / "a", asynchronous=True)
        with pytest.raises(loom.CheckpointError, match="No space left on device"):
            failed.wait()
        failed = loom.save({"x": torch.zeros(3)}, tmp_path / "a", asynchronous=True)
        failed._ended.wait(30)
        with pytest.raises(loom.CheckpointError, match="No space left on device"):
            loom.save({"x": torch.zeros(3)}, tmp_path / "a")
    loom.save({"x": torch.ones(3)}, tmp_path / "b")
    assert names(tmp_path) == ["a", "b"]
    assert loom.load(tmp_path / "a", into={"x": torch.zeros(3)})["x"].sum() == 3


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_the_disk_refuses_while_more_is_written_fails_the_save(tmp_path, monkeypatch, asynchronous):
    def refuse(_: int) -> None:
        synced.append(True)
        raise OSError(5, "Input/output error")

    synced: list[bool] = []
    loom.save({"x": torch.ones(3)}, tmp_path / "a")
    with monkeypatch.context() as patched:
        patched.setattr(files, "SYNC", 1 << 20)
        patched.setattr(files, "_SYNC_DATA", refuse)
        with pytest.raises(loom.CheckpointError, match="Input/output error"):
            loom.save({"x": torch.zeros(8 << 20)}, tmp_path / "a", asynchronous=asynchronous).wait()
    assert synced and names(tmp_path) == ["a"]
    assert loom.load(tmp_path / "a", into={"x": torch.zeros(3)})["x"].sum() == 3


PROGRAM = """
import sys, torch, meshloom as loom
from meshloom.checkpoint import saving
def full(*_, **__):
    raise OSError(28, "No space left on device", "somewhere")
if sys.argv[2] == "full":
    saving.write_file = full
loom.save({"x": torch.ones(int(sys.argv[3]))}, sys.argv[1], asynchronous=True)
print("the program ends")
"""


@pytest.mark.slow
@pytest.mark.parametrize("elements", [1000, 25_000_000])
@pytest.mark.parametrize("disk", ["full", "empty"])
def test_a_program_that_ends_waits_for_its_save_and_a_failure_is_an_exit_code(tmp_path, disk, elements):
    """Executors take nothing any more once the program has come to its end."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "a"), disk, str(elements)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert "the program ends" in done.stdout
    if disk == "full":
        assert done.returncode == 1 and "CheckpointError: somewhere: it cannot be written: No space" in done.stderr
        assert names(tmp_path) == []
    else:
        assert done.returncode == 0, done.stderr
        assert loom.load(tmp_path / "a", into={"x": torch.zeros(elements)})["x"].eq(1).all()


@pytest.mark.slow
def test_processes_communicate_while_their_threads_save(tmp_path):
    assert ranks.run(2, "checkpoint_cases:work_while_saving", str(tmp_path)) == [30, 30]


# Progress


def test_progress_is_told_in_bytes_to_a_function_and_drawn_where_asked(tmp_path, capsys):
    told: list[tuple[int, int]] = []
    state = {"x": torch.zeros(3 << 20), "y": torch.zeros(5)}
    loom.save(state, tmp_path / "a", progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (12 * (1 << 20) + 20,) * 2 and len(told) >= 2
    told.clear()
    loom.load(tmp_path / "a", into=state, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (12 * (1 << 20) + 20,) * 2
    loom.save(state, tmp_path / "a", progress=True)
    assert "saving" in capsys.readouterr().err
    loom.save(state, tmp_path / "a")  # no terminal
    assert capsys.readouterr().err == ""
    with pytest.raises(loom.ArgumentError, match="progress='yes'"):
        loom.save(state, tmp_path / "a", progress="yes")  # type: ignore[arg-type]


# Memory


def measure_memory(folder: str) -> tuple[int, int, int, int]:
    """The state, and the peaks of a save, a save in a thread and a load above it, in MB."""
    from pathlib import Path

    def peak(act: Callable[[], Any]) -> int:
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        act()
        return (status("VmHWM") - before) >> 10

    def status(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])

    mesh = loom.open_mesh((2, 4))
    layouts = ("R, S(1)", "S(0), S(0)", "S(0), R", "R, R")
    state = {f"w{n}": loom.ones(4095, 4095, mesh=mesh, placements=each) for n, each in enumerate(layouts)}
    loom.save({"warm": torch.ones(1 << 20)}, f"{folder}/warm")
    held = sum(each._data.nbytes for each in state.values()) >> 20
    saved = peak(lambda: loom.save(state, f"{folder}/a"))
    loaded = peak(lambda: loom.load(f"{folder}/a", into=state))
    copied = peak(lambda: loom.save(state, f"{folder}/a", asynchronous=True).wait())
    return held, saved, copied, loaded


@pytest.mark.slow
def test_a_save_takes_the_memory_of_one_shard_and_in_a_thread_of_one_copy(tmp_path):
    ((held, saved, copied, loaded),) = ranks.run(1, "test_saving:measure_memory", str(tmp_path))
    assert held >= 250
    assert saved <= 64 and loaded <= 64, (saved, loaded)  # one of the four tensors; it is some blocks of 4 MB
    assert held * 0.8 <= copied <= held * 1.15, (copied, held)


# Random numbers


def test_random_numbers_go_on_as_they_would_have(tmp_path):
    state = {"random": loom.RandomState(python=True, numpy=True)}

    def draw() -> list[Any]:
        on_mesh = loom.randn(5, mesh=MESH).to_torch().tolist()
        return [torch.rand(2).tolist(), on_mesh, random.random(), numpy.random.rand(2).tolist(), random.gauss(0, 1)]

    random.gauss(0, 1)  # keeps the second one of a pair
    loom.save(state, tmp_path / "a")
    first = draw()
    assert draw() != first
    loom.load(tmp_path / "a", into={"random": loom.RandomState(python=True, numpy=True)})
    assert draw() == first
    with pytest.raises(loom.CheckpointError, match="the random state has"):
        loom.load(tmp_path / "a", into={"random": loom.RandomState()})


# A training loop


def test_a_run_goes_on_on_another_mesh_as_if_nothing_had_happened(tmp_path):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3))
    inputs, labels = torch.randn(6, 12, 6), torch.randint(3, (6, 12))

    def make(mesh: Mesh | None) -> dict[str, Any]:
        model = copy.deepcopy(dense)
        if mesh is not None:
            for layer in (model[0], model[2]):
                for name, parameter in list(layer.named_parameters()):
                    setattr(layer, name, loom.Parameter(on(mesh, name, parameter.detach())))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}

    def train(state: dict[str, Any], until: int, mesh: Mesh | None) -> list[float]:
        losses = []
        while state["step"] < until:
            x, y = inputs[state["step"]], labels[state["step"]]
            if mesh is not None:
                x, y = loom.distribute(x, mesh), loom.distribute(y, mesh)
            state["optimizer"].zero_grad()
            loss = F.cross_entropy(state["model"](x), y)
            loss.backward()
            state["optimizer"].step()
            state["scheduler"].step()
            state["step"] += 1
            losses.append(loss.item())
        return losses

    whole = train(make(None), 6, None)
    first = make(MESH)
    losses = train(first, 3, MESH)
    loom.save(first, tmp_path / "step-000003")
    other = Mesh(a=3)
    second = loom.load(tmp_path / "step-000003", into=make(other))
    losses += train(second, 6, other)
    assert losses == pytest.approx(whole, rel=1e-5)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.5**epoch),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.5, total_steps=9),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.1, 0.5),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.5)], [2]
    ),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
}


@pytest.mark.filterwarnings("ignore:.*epoch parameter in")  # torch's own, in SequentialLR
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_as_it_would_have(tmp_path, name):
    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[name](optimizer)}

    def go_on(state: dict[str, Any], steps: int) -> list[float]:
        rates = []
        for _ in range(steps):
            state["optimizer"].step()
            state["scheduler"].step(*([1.0] if name == "ReduceLROnPlateau" else []))
            rates.append(state["optimizer"].param_groups[0]["lr"])
        return rates

    first, second = make(), make()
    go_on(first, 3)
    loom.save(first, tmp_path / "a")
    loom.load(tmp_path / "a", into=second)
    rates = go_on(first, 4)
    assert go_on(second, 4) == rates and len(set(rates)) > 1 - (name == "MultiStepLR")


def test_the_index_is_json_that_anybody_reads_and_files_are_safetensors(tmp_path):
    from safetensors.torch import load_file

    state = make_state(MESH, True)
    loom.save(state, tmp_path / "a")
    index = json.loads((tmp_path / "a" / "index.json").read_text())
    assert index["format"] == "meshloom checkpoint" and index["version"] == 1
    found = load_file(tmp_path / "a" / "rank-00000-000.safetensors")
    for piece in index["tensors"]["model/up.weight"]["pieces"]:
        assert torch.equal(found[piece["name"]], state["model"].up.weight.to_torch())
