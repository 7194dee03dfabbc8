"""What processes do in `test_checkpoint_faults.py`: save until they are ended, on full disks, beside peers that end."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import torch

import meshloom as loom
from meshloom import Shard
from meshloom.checkpoint import saving
from meshloom.mesh import HERE
from meshloom.processes.exchange import exchange

ELEMENTS = 1 << 18


def numbered(step: int) -> dict[str, Any]:
    """A state in which every element says the step."""
    mesh = loom.Mesh(dp=2, tp=2)
    return {
        "x": loom.full((ELEMENTS,), float(step), mesh=mesh, placements="S(0), R"),
        "y": torch.full((ELEMENTS // 4,), step),
        "step": step,
    }


def save_for_ever(folder: str, series: bool, asynchronous: bool) -> None:
    """One step after the other, into one folder or into a series."""
    torch.set_num_threads(1)
    step = 0
    while True:
        step += 1
        name = f"{folder}/step-{step:06d}" if series else f"{folder}/step-000000"
        loom.save(numbered(step), name, keep=2 if series else None, asynchronous=asynchronous).wait()


def check_numbered(folder: Path) -> int:
    """An error unless the checkpoint in a folder is of one step; the step."""
    state = numbered(0)
    loom.load(folder, into=state)
    step = state["step"]
    assert step > 0
    assert (state["x"] == step).all().item() and bool((state["y"] == step).all())
    return int(step)


def save_beyond_limit(folder: str, words: str) -> None:
    """Save with files that may have 100 KB; the error names the file."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    try:
        loom.save(numbered(2), folder)
    except loom.CheckpointError as error:
        assert words in str(error) and ".tmp-" in str(error).splitlines()[0], error
        return
    raise AssertionError("nothing was refused")


# On two processes


def split(step: float) -> dict[str, Any]:
    mesh = loom.open_mesh((2,), axes=("dp",))
    return {"x": loom.full((10, 3), step, mesh=mesh, placements={"dp": Shard(0)}), "step": int(step)}


def told(act: Any) -> str:
    """The first line of the error of an act."""
    try:
        act()
    except loom.MeshloomError as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing was refused"


def fail_in_turn(folder: str) -> dict[str, str]:
    """Failures of the second of two processes, in a save, in a thread, in a load; what each process is told."""
    found = {}
    loom.save(split(1.0), f"{folder}/good")
    write = saving.write_file

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device", "somewhere")

    def broken(act: Any, rank: int) -> str:
        saving.write_file = full if HERE.rank == rank else write  # type: ignore[assignment]
        try:
            return told(act)
        finally:
            saving.write_file = write

    found["save"] = broken(lambda: loom.save(split(2.0), f"{folder}/good"), 1)
    found["first"] = broken(lambda: loom.save(split(2.0), f"{folder}/good"), 0)
    found["thread"] = broken(lambda: loom.save(split(2.0), f"{folder}/good", asynchronous=True).wait(), 1)
    found["values"] = told(lambda: loom.save({**split(2.0), "loss": HERE.rank}, f"{folder}/good"))
    found["dense"] = told(lambda: loom.save({**split(2.0), "d": torch.tensor([HERE.rank])}, f"{folder}/good"))
    found["kinds"] = told(lambda: loom.save({**split(2.0), "o": [1, b"x"][HERE.rank]}, f"{folder}/good"))
    found["other"] = told(lambda: loom.save(split(2.0), f"{folder}/good{HERE.rank}"))
    state = split(0.0)
    loom.load(f"{folder}/good", into=state)
    assert state["step"] == 1 and float(state["x"].sum()) == 30.0
    loom.save(split(3.0), f"{folder}/hurt")
    if HERE.rank == 0:
        flip(Path(folder) / "hurt" / "rank-00001-000.safetensors", -1)
    exchange("flipped", None)  # the other one reads it after that
    fresh = split(0.0)
    found["load"] = told(lambda: loom.load(f"{folder}/hurt", into=fresh))
    assert fresh["step"] == 0 and float(fresh["x"].sum()) == 0.0
    shaped = {**split(0.0), "step": 0}
    if HERE.rank == 1:
        shaped["more"] = 1
    found["plan"] = told(lambda: loom.load(f"{folder}/good", into=shaped))
    return found


def flip(file: Path, at: int, bit: int = 1) -> None:
    """Flip one bit of a file; it keeps its size."""
    data = bytearray(file.read_bytes())
    data[at] ^= bit
    file.write_bytes(data)


def end_amid_save(folder: str, asynchronous: bool) -> None:
    """The second process is ended by the system while it writes; the first says so and leaves a note."""
    loom.save(split(1.0), f"{folder}/good")
    write = saving.write_file

    def ended(*args: Any, **kwargs: Any) -> Any:
        write(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    if HERE.rank == 1:
        saving.write_file = ended  # type: ignore[assignment]
    said = told(lambda: loom.save(split(2.0), f"{folder}/good", asynchronous=asynchronous).wait())
    (Path(folder) / "said").write_text(said)
