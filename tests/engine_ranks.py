"""Real processes for tests of engines: each runs the same programs with its own rank, over Gloo, and hands back values.

    run_ranks(2, {"sum": "result = engine.all_reduce_sum(torch.tensor(rank)).item()"})    # {"sum": [1, 1]}

The processes meet in a file, so that no port can be taken. A rank that fails or does not end in time fails the test
with what every rank printed; the others are not waited for.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

TIMEOUT = 240


def run_ranks(world: int, programs: dict[str, str], timeout: float = TIMEOUT) -> dict[str, list[Any]]:
    """What each program leaves in `result` at each rank, in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "programs").write_text(json.dumps({name: textwrap.dedent(text) for name, text in programs.items()}))
        started = [_start(place, rank, world, timeout) for rank in range(world)]
        printed = _wait(started, timeout)
        failed = [rank for rank, each in enumerate(started) if each.returncode != 0]
        if failed:
            told = "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(printed))
            raise AssertionError(f"ranks {failed} failed\n{told}")
        left = [json.loads((place / f"results{rank}").read_text()) for rank in range(world)]
        return {name: [each[name] for each in left] for name in programs}


def _start(place: Path, rank: int, world: int, timeout: float) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "error", __file__, str(place), str(rank), str(world), str(0.9 * timeout)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _wait(started: list[subprocess.Popen[str]], timeout: float) -> list[str]:
    """What each process printed; when one fails or time is up, those that still run are ended."""
    end = time.monotonic() + timeout
    while any(each.poll() is None for each in started):
        if time.monotonic() > end or any(each.poll() for each in started):
            for each in started:
                each.kill()
        time.sleep(0.05)
    return [each.communicate()[0] for each in started]


def run_one(place: Path, rank: int, world: int, patience: float) -> None:
    """One rank: join the others, run the programs, leave their results; a rank that hangs prints where."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(patience)
    import torch
    import torch.distributed as dist

    from meshloom import engines

    dist.init_process_group("gloo", init_method=f"file://{place / 'meeting'}", rank=rank, world_size=world)
    known = {"torch": torch, "dist": dist, "engine": engines.load("torch"), "rank": rank, "world": world}
    results = {}
    for name, text in json.loads((place / "programs").read_text()).items():
        space = dict(known)  # gone after the program, so that no group outlives the world
        exec(compile(text, name, "exec"), space)
        results[name] = space.pop("result", None)
    del space
    (place / f"results{rank}").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_one(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
