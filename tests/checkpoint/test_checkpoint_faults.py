"""Faults: processes that are ended, full disks, changed and foreign files, hostile indices, peers that fail."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint_faults as faults
import meshloom as loom
import ranks
from busy_machine import Patience
from checkpoint_faults import check_numbered, flip, numbered
from meshloom import Mesh
from meshloom.checkpoint import verify
from meshloom.checkpoint.index import _canonical

# Ended


@pytest.mark.slow
def test_a_kill_at_twenty_random_moments_leaves_the_last_good_checkpoint(tmp_path):
    drawn, left, steps = random.Random(0), 0, []
    for number in range(20):
        parent = tmp_path / f"run-{number}"
        series, asynchronous = number % 2 == 0, number % 4 >= 2
        process = ranks.FORKS.Process(target=faults.save_for_ever, args=(str(parent), series, asynchronous))
        process.start()
        until = time.monotonic() + 60
        while loom.latest(parent) is None and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(drawn.uniform(0, 0.15))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        found = loom.latest(parent)
        assert found is not None, number
        steps.append(check_numbered(found))
        verify(found)
        left += any(".tmp-" in each.name for each in parent.iterdir())
        loom.save(numbered(999), parent / "step-000999", keep=1)
        assert check_numbered(parent / "step-000999") == 999
        assert [each.name for each in parent.iterdir() if ".tmp-" in each.name] == []
        shutil.rmtree(parent)
    assert left >= 5 and len(set(steps)) > 2, (left, steps)


def test_what_another_run_is_writing_is_no_leftover(tmp_path):
    from meshloom.checkpoint.folders import Lock, lock_file, name_aside, remove_leftovers

    alive, dead, lost, early = (name_aside(tmp_path / f"step-{n}", f"{n:016x}") for n in range(4))
    for each in (alive, dead, lost):
        each.mkdir()
    held, soon = Lock(lock_file(alive, 0)), Lock(lock_file(early, 0))
    Lock(lock_file(dead, 0)).release()
    (tmp_path / "step-3.txt").write_text("mine")
    assert remove_leftovers(tmp_path / "other") == []
    assert remove_leftovers(tmp_path / "step-7") == [dead, lost]
    assert alive.is_dir() and lock_file(alive, 0).exists() and lock_file(early, 0).exists()
    held.release()
    soon.release()
    assert remove_leftovers(tmp_path / "step-7") == [alive, early]
    assert [each.name for each in tmp_path.iterdir()] == ["step-3.txt"]


# Full disks


def run_alone(function: Callable[..., None], *arguments: Any) -> int | None:
    process = ranks.FORKS.Process(target=function, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


def test_a_file_that_cannot_grow_is_an_error_and_the_last_checkpoint_stays(tmp_path):
    loom.save(numbered(1), tmp_path / "step-000001")
    for name in ("step-000001", "step-000002"):
        assert run_alone(faults.save_beyond_limit, str(tmp_path / name), "it cannot be written: File too large") == 0
        assert [each.name for each in tmp_path.iterdir()] == ["step-000001"]
    assert check_numbered(tmp_path / "step-000001") == 1


ON_A_SMALL_DISK = """
import sys, subprocess
from pathlib import Path
place = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(place)], check=True)
import torch, meshloom as loom
loom.save({"x": torch.ones(1 << 18), "step": 1}, place / "step-000001")
for asynchronous in (False, True):
    try:
        loom.save({"x": torch.ones(1 << 19), "step": 2}, place / "step-000002", asynchronous=asynchronous).wait()
    except loom.CheckpointError as error:
        assert "No space left on device" in str(error), error
    else:
        raise SystemExit("nothing was refused")
assert [each.name for each in place.iterdir()] == ["step-000001"], list(place.iterdir())
state = {"x": torch.zeros(1 << 18), "step": 0}
loom.load(loom.latest(place), into=state)
assert state["step"] == 1 and state["x"].sum() == 1 << 18
loom.save({"x": torch.ones(1 << 18), "step": 3}, place / "step-000003")
print("all told")
"""


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_the_last_checkpoint_stays(tmp_path):
    """A disk of 3 MB, in a namespace of its own where the system lets us have one."""
    inside = ["unshare", "--map-root-user", "--mount"]
    try:
        tried = subprocess.run([*inside, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if tried.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
    done = subprocess.run(
        [*inside, sys.executable, "-c", ON_A_SMALL_DISK, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == "all told\n", done.stderr


# Changed files


def make(folder: Path) -> Path:
    torch.manual_seed(1)
    model = nn.Linear(300, 1000)
    loom.save({"model": model, "step": 5, "loss": 0.25}, folder)
    return folder


def fresh() -> dict[str, Any]:
    mesh = Mesh(dp=2, tp=2)
    model = nn.Linear(300, 1000)
    model.weight = loom.Parameter(torch.zeros(1000, 300), mesh, "S(0), S(1)")
    model.bias = loom.Parameter(torch.zeros(1000), mesh, "R, S(0)")
    return {"model": model, "step": 0, "loss": 0.0}


def check_refused(folder: Path, file: str | None, words: str | None = None) -> None:
    """An error unless a load is refused with the name of the file first, and changes nothing."""
    state = fresh()
    with pytest.raises(loom.CheckpointError, match=words) as refused:
        loom.load(folder, into=state)
    if file is not None:
        assert str(refused.value).startswith(str(folder / file)), refused.value
    assert state["step"] == 0 and state["loss"] == 0.0
    assert float(state["model"].weight.detach().abs().sum()) == 0.0


DATA = "rank-00000-000.safetensors"


def test_every_flipped_bit_is_found(tmp_path):
    folder, drawn = make(tmp_path / "a"), random.Random(2)
    for name in (DATA, "index.json"):
        size = (folder / name).stat().st_size
        places = [0, 7, 8, 20, size - 1, *(drawn.randrange(size) for _ in range(25))]
        for at in places:
            bit = 1 << drawn.randrange(8)
            flip(folder / name, at, bit)
            check_refused(folder, name)
            with pytest.raises(loom.CheckpointError):
                verify(folder)
            flip(folder / name, at, bit)
    state = loom.load(folder, into=fresh())
    assert state["step"] == 5


def test_weights_of_a_changed_checkpoint_and_its_export_are_refused(tmp_path):
    folder = make(tmp_path / "a")
    flip(folder / DATA, -1)
    weights = loom.checkpoint.open_weights(folder)
    topology = loom.Topology(Mesh(x=2), (loom.Shard(0),), (1000, 300), "f32")
    for act in (
        lambda: weights.read("weight", topology),
        lambda: loom.export(folder, tmp_path / "model.safetensors"),
        lambda: loom.export(folder, tmp_path / "hub", layout="huggingface"),
    ):
        with pytest.raises(loom.CheckpointError, match="it was changed"):
            act()
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def replace_by(make_other: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.unlink()
        make_other(file)

    return change


def foreign(file: Path) -> None:
    """A file of the same size from a checkpoint of other weights."""
    torch.manual_seed(2)
    other = file.parent.parent / "other"
    loom.save({"model": nn.Linear(300, 1000), "step": 5, "loss": 0.25}, other)
    assert (other / DATA).stat().st_size == file.stat().st_size
    shutil.copy(other / DATA, file)


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "it is missing"),
    "short": (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes, and the index says"),
    "empty": (lambda file: file.write_bytes(b""), "it has 0 bytes, and the index says"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "bytes, and the index says"),
    "foreign": (foreign, "it was changed"),
    "zeros": (lambda file: file.write_bytes(bytes(file.stat().st_size)), "it was changed|not a safetensors file"),
    "a link": (replace_by(lambda file: file.symlink_to("/etc/passwd")), "it is a link to somewhere else"),
    "a pipe": (replace_by(lambda file: os.mkfifo(file)), "it is not a file"),
    "a folder": (replace_by(lambda file: file.mkdir()), "it is not a file"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_file_that_is_not_the_one_that_was_written_is_refused_by_name(tmp_path, case):
    folder = make(tmp_path / "a")
    change, words = CHANGES[case]
    change(folder / DATA)
    check_refused(folder, DATA, words)


def test_a_missing_and_a_foreign_index_are_refused(tmp_path):
    folder = make(tmp_path / "a")
    (folder / "index.json").rename(tmp_path / "kept")
    check_refused(folder, "index.json", "there is no such file")
    (folder / "index.json").write_text('{"weight_map": {}}')
    check_refused(folder, "index.json", "it is not the index of a checkpoint")


# Hostile indices: their checksums hold


def deep(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


def weight(index: dict[str, Any]) -> dict[str, Any]:
    return index["tensors"]["model/weight"]


def halves(first: list[int], second: list[int], start: list[int]) -> Callable[[dict[str, Any]], None]:
    def change(index: dict[str, Any]) -> None:
        (piece,) = weight(index)["pieces"]
        weight(index)["pieces"] = [{**piece, "shape": first}, {**piece, "start": start, "shape": second}]

    return change


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(index: dict[str, Any]) -> None:
        index["files"] = {name: index["files"][DATA]}
        for each in index["tensors"].values():
            for piece in each["pieces"]:
                piece["file"] = name

    return change


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(index: dict[str, Any]) -> None:
        for key in keys[:-1]:
            index = index[key]
        index[keys[-1]] = value

    return change


W = ("tensors", "model/weight")
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a path upwards": (rename_file("../secret.safetensors"), "cannot be one of its own"),
    "an absolute path": (rename_file("/etc/passwd"), "cannot be one of its own"),
    "a hidden file": (rename_file(".x.safetensors"), "cannot be one of its own"),
    "a name with a null": (rename_file("a\0b.safetensors"), "cannot be one of its own"),
    "pieces that overlap": (halves([600, 300], [500, 300], [500, 0]), "overlap or leave holes"),
    "pieces with a hole": (halves([400, 300], [500, 300], [500, 0]), "overlap or leave holes"),
    "a piece outside": (halves([500, 300], [501, 300], [500, 0]), "lies outside"),
    "no pieces": (put(*W, "pieces", value=[]), "overlap or leave holes"),
    "a huge shape": (put(*W, "shape", value=[1 << 59, 1 << 59]), "larger than any file"),
    "a huge number": (put(*W, "shape", value=[10**400]), "has the shape"),
    "a negative shape": (put(*W, "shape", value=[-1, 300]), "has the shape"),
    "a shape of text": (put(*W, "shape", value="300"), "has the shape"),
    "a thousand dims": (put(*W, "shape", value=[1] * 1000), "has the shape"),
    "a true size": (put(*W, "shape", value=[True, 300]), "has the shape"),
    "other dims in a piece": (put(*W, "pieces", 0, "start", value=[0]), "other dims"),
    "an unknown dtype": (put(*W, "dtype", value="pickle"), "has dtype 'pickle'"),
    "another dtype": (put(*W, "dtype", value="i32"), r"i32\[1000, 300\] there and f32"),
    "an unknown file": (put(*W, "pieces", 0, "file", value="x.safetensors"), "not among its files"),
    "another name in the file": (put(*W, "pieces", 0, "name", value="model/bias"), "it has F32.1000. as 'model/bias'"),
    "a name that is not there": (put(*W, "pieces", 0, "name", value="zzz"), "it has nothing as 'zzz'"),
    "a huge file": (put("files", DATA, "bytes", value=1 << 70), "bytes"),
    "too few checksums": (put("files", DATA, "crc32", value=""), "the checksums of"),
    "checksums of text": (put("files", DATA, "crc32", value="zzzzzzzz" * 2), "the checksums of"),
    "another chunk": (put("chunk", value=7), "its checksums are of 7 bytes"),
    "a new version": (put("version", value=2), "it has version 2 of the format"),
    "no tensors": (put("tensors", value=[]), "it has no table of tensors"),
    "no state": (put("state", value=None), "it says nothing of the state"),
    "a state that is a list": (put("state", value=[1]), "it says nothing of the state"),
    "a tag of nobody": (put("state", "step", value={"$pickle": "x"}), "there is nothing here"),
    "a number that is none": (put("state", "step", value={"$float": "exec"}), "the number 'exec'"),
    "a tuple that is none": (put("state", "step", value={"$tuple": 3}), "no list under"),
    "keys that are none": (put("state", "step", value={"$map": [[[1], 2]]}), "a key that is none"),
    "a deep value": (put("state", "step", value=deep(500)), "nested too deeply"),
    "a module that is none": (put("state", "model", value={"$module": 3}), "no table of a module"),
    "a tensor that is not there": (put("state", "model", "$module", "weight", value={"$tensor": "x"}), "a tensor here"),
}  # fmt: skip


def seal(index: dict[str, Any]) -> bytes:
    index.pop("crc32", None)
    text = _canonical(index)
    return (text[:-1] + f',"crc32":"{zlib.crc32(text.encode()):08x}"}}').encode()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_index_is_refused(tmp_path, case):
    folder = make(tmp_path / "a")
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_bytes(seal(index))
    assert loom.load(folder, into=fresh())["step"] == 5  # sealed as ours are
    change, words = HOSTILE[case]
    change(index)
    (folder / "index.json").write_bytes(seal(index))
    check_refused(folder, None, words)


RAW = {
    "deep JSON": b"[" * 100_000 + b"]" * 100_000,
    "not a number": b'{"format": "meshloom checkpoint", "version": NaN}',
    "a huge integer": b'{"format": ' + b"9" * 10_000 + b"}",
    "no text": b"\xff\xfe\x00",
    "nothing": b"",
    "a pickle": b"\x80\x04\x95\x00",
    "a list": b"[]",
}


@pytest.mark.parametrize("case", RAW)
def test_an_index_that_is_no_index_is_refused(tmp_path, case):
    folder = make(tmp_path / "a")
    (folder / "index.json").write_bytes(RAW[case])
    check_refused(folder, "index.json")


def test_a_huge_index_is_refused_unread(tmp_path):
    folder = make(tmp_path / "a")
    os.truncate(folder / "index.json", 1 << 40)  # it takes no room on the disk
    check_refused(folder, "index.json", "no index has more than")


def test_a_checkpoint_that_is_exchanged_while_it_is_read_is_still_read(tmp_path):
    from meshloom.checkpoint.files import open_files, read_part
    from meshloom.checkpoint.index import read_index

    loom.save({"x": torch.ones(3)}, tmp_path / "a")
    index = read_index(tmp_path / "a")
    with open_files(index) as opened:
        loom.save({"x": torch.zeros(3)}, tmp_path / "a")
        with pytest.raises(loom.CheckpointError, match="it cannot be read: No such file"):
            read_part(opened, index.tensors["x"], (0,), (3,))


# Peers that fail


@pytest.mark.slow
def test_what_fails_on_one_process_is_told_by_both_and_nothing_is_changed(tmp_path):
    first, second = ranks.run(
        2, "checkpoint_faults:fail_in_turn", str(tmp_path), environment={"MESHLOOM_TIMEOUT": "20"}
    )
    good, hurt = tmp_path / "good", tmp_path / "hurt"
    full = "CheckpointError: somewhere: it cannot be written: No space left on device"
    assert second["save"] == second["thread"] == first["first"] == full
    for said in (first["save"], first["thread"]):
        assert said.startswith(f"CheckpointError: rank 1 could not write its part of {good}: [Errno 28] No space left")
    assert second["first"].startswith("CheckpointError: rank 0 could not write its part of")
    for each in (first, second):
        assert each["values"] == "CheckpointError: ranks 0 and 1 do not save the same: state['loss'] differs"
        assert each["dense"] == "CheckpointError: ranks 0 and 1 do not save the same: the dense tensor 'd' differs"
        assert each["other"] == "CheckpointError: ranks 0 and 1 do not save the same: the folder differs"
    assert (
        first["kinds"]
        == "CheckpointError: rank 1 failed in save: state['o'] is a bytes, which a checkpoint cannot hold"
    )
    assert second["kinds"] == "ArgumentError: state['o'] is a bytes, which a checkpoint cannot hold"
    damaged = f"{hurt / 'rank-00001-000.safetensors'}: it was changed"
    assert second["load"].startswith(f"CheckpointError: {damaged}")
    assert first["load"].startswith(f"CheckpointError: rank 1 failed in load: {damaged}")
    assert "rank 1 failed in load: state['more'] cannot be read" in first["plan"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["good", "hurt"]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_process_that_is_ended_amid_a_save_is_told_by_the_other_at_once(tmp_path, asynchronous):
    waited = Patience()
    with pytest.raises(AssertionError, match="rank 1 failed"):
        ranks.run(
            2, "checkpoint_faults:end_amid_save", str(tmp_path), asynchronous, environment={"MESHLOOM_TIMEOUT": "60"}
        )
    assert waited.seconds < 55
    said = (tmp_path / "said").read_text()
    assert said == f"CheckpointError: rank 1 ended before {tmp_path / 'good'} was complete"
    assert verify(tmp_path / "good").state["step"] == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["good", "said"]
