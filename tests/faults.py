"""Ranks that are meant to fail: started, ended and heard one by one, with a check that no process is left.

`run` starts `fault_program.py` as a user's own starter would: torchrun's environment, rank 0 holding the store. Its
ranks are forked off a process that has imported torch (`ranks.live`); with `fresh` each is an interpreter of its own.
`torchrun` and `meshloom_run` start it with those, and read what each rank said from their log files.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import interpreters
import ranks
from busy_machine import Patience

PROGRAM = Path(__file__).with_name("fault_program.py")
_CHANCE = random.SystemRandom()  # a test that seeds `random` in two workers must not give both one port
LIMIT = 100.0  # seconds after which a run counts as hung; the program's own waits are longer


@dataclass(frozen=True)
class Ended:
    """A rank that has ended: its exit code (None where a launcher took it), when, and what it said."""

    rank: int
    code: int | None
    at: float
    text: str


def line(tag: str, program: Path = PROGRAM) -> str:
    """The tagged line of a program as reports show it; of one that TTNN's program does not have, that of `PROGRAM`.

    >>> line("sleep").startswith("fault_program.py:")
    True
    """
    found = [n for n, text in enumerate(program.read_text().splitlines(), 1) if text.endswith(f"# @{tag}")]
    if not found and program != PROGRAM:
        return line(tag)
    assert len(found) == 1, f"{tag} is the tag of {len(found)} lines"
    return f"{program.name}:{found[0]}"


def errors(text: str) -> str:
    """What a rank said from its error on, without torch's prefix and without the traceback."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", each) for each in text.splitlines()]
    starts = [n for n, each in enumerate(lines) if re.match(r"(meshloom\.errors\.)?\w*(Error|Interrupt)\b", each)]
    assert starts, f"no error in: {text}"
    return "\n".join(lines[starts[0] :])


def run(
    case: str,
    folder: Path,
    count: int = 2,
    absent: Sequence[int] = (),
    meanwhile: Callable[[], None] | None = None,
    fresh: bool = False,
    program: Path = PROGRAM,
    **environment: str,
) -> list[Ended]:
    """Start the ranks but those that are absent, wait for all of them, and see that nothing is left.

    `meanwhile` is called when all are ready, and lets them go on.
    """
    shared = {
        **clean(),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        **environment,
    }
    start = _start if fresh else Forked
    command = [sys.executable, str(program), case, str(folder)]
    started = {
        rank: start(command, folder / f"rank-{rank}", {**shared, "RANK": str(rank)})
        for rank in range(count)
        if rank not in absent
    }
    if meanwhile is not None:
        outputs = [folder / f"rank-{rank}" for rank in started]
        wait_until(lambda: all("READY" in each.read_text() for each in outputs), list(started.values()), folder)
        try:
            meanwhile()
        finally:
            (folder / "go_on").touch()
    ends = wait_for(list(started.values()), folder)
    ended = [
        Ended(rank, process.returncode, end, (folder / f"rank-{rank}").read_text(errors="replace"))
        for (rank, process), end in zip(started.items(), ends, strict=True)
    ]
    return told(case, ended)


def torchrun(case: str, folder: Path, count: int = 2, program: Path = PROGRAM, **environment: str) -> list[Ended]:
    """The same under torchrun, whose own process is forked off; those that it starts are interpreters."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--redirects", "3"]
    command += ["--log-dir", str(folder / "logs"), str(program), case, str(folder)]
    process = Forked(command, folder / "launcher", {**clean(), **environment})
    end = wait_for([process], folder)[0]
    return told(case, [Ended(rank, None, end, _logged(folder, f"{rank}/*.log")) for rank in range(count)])


def start_meshloom_run(
    case: str, folder: Path, count: int = 2, program: Path = PROGRAM, **environment: str
) -> subprocess.Popen[bytes]:
    """`meshloom run`, not waited for."""
    command = [sys.executable, "-m", "meshloom", "run", "--nproc", str(count), "--log-dir", str(folder / "logs")]
    return _start([*command, str(program), case, str(folder)], folder / "launcher", {**clean(), **environment})


def meshloom_run(case: str, folder: Path, count: int = 2, program: Path = PROGRAM, **environment: str) -> list[Ended]:
    """The same under `meshloom run`."""
    end = wait_for([start_meshloom_run(case, folder, count, program, **environment)], folder)[0]
    return told(case, logged_ranks(folder, count, end))


def logged_ranks(folder: Path, count: int, end: float) -> list[Ended]:
    """What the ranks of `meshloom run` said, from its log folder."""
    return [Ended(rank, None, end, _logged(folder, f"rank-{rank}.*.log")) for rank in range(count)]


def _logged(folder: Path, pattern: str) -> str:
    return "".join(each.read_text(errors="replace") for each in sorted((folder / "logs").rglob(pattern)))


def clean() -> dict[str, str]:
    """The environment without what would make this process a rank."""
    given = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MESHLOOM_TIMEOUT")}
    return {**given, "OMP_NUM_THREADS": "1"}


def _start(command: list[str], output: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(output, "wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


class Forked:
    """A program that was forked off instead of started, as far as tests look at a `Popen`."""

    def __init__(
        self, command: list[str], output: Path, environment: dict[str, str], network: str | None = None
    ) -> None:
        rest = (interpreters.interpret, command[1:], os.getcwd(), None, network)
        self._process = ranks.FORKS.Process(target=ranks.live, args=(str(output), environment, *rest))
        output.touch()
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> None:
        self._process.join()


Started = subprocess.Popen[bytes] | Forked


def free_port() -> int:
    """A port of loopback that nobody uses, and that the system gives to nobody who connects."""
    while True:
        port = _CHANCE.randrange(10000, 32000)
        with socket.socket() as held:
            if held.connect_ex(("127.0.0.1", port)) != 0:
                return port


def wait_for(started: Sequence[Started], folder: Path, seconds: float = LIMIT) -> list[float]:
    """When each ended; an error, and an end by force, if one hangs or leaves a process behind."""
    ends: dict[int, float] = {}
    waited = Patience()
    while len(ends) < len(started) and waited.seconds < seconds:
        for process in started:
            if process.pid not in ends and process.poll() is not None:
                ends[process.pid] = time.time()
        time.sleep(0.02)
    hung = [process for process in started if process.pid not in ends]
    end(hung)
    said = "".join(each.read_text(errors="replace") for each in folder.rglob("*") if each.is_file())
    assert not hung, f"{len(hung)} of {len(started)} hung for {seconds:g} s:\n{said}"
    assert left(folder, started) == [], f"processes were left behind:\n{said}"
    return [ends[process.pid] for process in started]


def end(started: Sequence[Started]) -> None:
    """End by force what still runs; a launcher's guardian then ends its ranks."""
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(is_so: Callable[[], bool], started: Sequence[Started], folder: Path, seconds: float = LIMIT) -> None:
    """Wait for something that the processes bring about; an error, and their end, if they end or take too long."""
    waited = Patience()
    while not is_so():
        is_early = any(process.poll() is not None for process in started)
        if is_early or waited.seconds > seconds:
            said = "".join(each.read_text(errors="replace") for each in folder.rglob("*") if each.is_file())
            end(started)
            raise AssertionError(f"{'ended too early' if is_early else f'not within {seconds:g} s'}:\n{said}")
        time.sleep(0.05)


def left(folder: Path, started: Sequence[Started] = ()) -> list[int]:
    """The processes whose command line has this folder, and those of the sessions that began with these; a moment is
    given for what is just ending."""
    sessions = [each.pid for each in started]
    found: list[int] = []
    for _ in range(30):
        running = [each for each in Path("/proc").iterdir() if each.name.isdecimal()]
        found = [int(each.name) for each in running if _is_of(each, folder, sessions)]
        if not found:
            return []
        time.sleep(0.1)
    return found


def _is_of(process: Path, folder: Path, sessions: Sequence[int | None]) -> bool:
    try:
        state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
        is_running_there = int(session) in sessions and state != "Z"
        return is_running_there or str(folder).encode() in (process / "cmdline").read_bytes()
    except OSError:  # it has just ended
        return False


def told(case: str, ended: list[Ended]) -> list[Ended]:
    """The same, after everything that was said and the time from the fault to the last end have been printed."""
    began = [float(each) for rank in ended for each in re.findall(r"^FAULT ([\d.]+)", rank.text, re.M)]
    if began:
        print(f"{case}: all had ended {max(rank.at for rank in ended) - min(began):.1f} s after the fault")
    for rank in ended:
        print(f"--- rank {rank.rank}, ended with {rank.code}\n{rank.text}")
    return ended
