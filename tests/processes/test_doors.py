"""Who can reach a run: on one host nobody but its user, on several hosts only who knows the secret.

Real runs, looked at through the system's tables, and attacked by a process with another user id.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import faults
import namespaces
import sockets
from meshloom.cli import main
from meshloom.cli.guardian import descendants
from meshloom.cli.meeting import read_secret
from meshloom.errors import LaunchError
from meshloom.processes.notes import FolderNotes
from meshloom.processes.store import Board

pytestmark = pytest.mark.slow
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], list[int]]]:
    """A run on one host whose ranks have met and go on until `go_on` is there: the launcher, and what comes from it."""
    process = faults.start_meshloom_run("goes_on_until", folder)
    logs = [folder / "logs" / f"rank-{rank}.stdout.log" for rank in range(2)]
    faults.wait_until(lambda: all(each.exists() and "READY" in each.read_text() for each in logs), [process], folder)
    try:
        yield process, descendants(process.pid)
    finally:
        (folder / "go_on").touch()
        faults.wait_for([process], folder)


def check_ended_well(process: subprocess.Popen[bytes], folder: Path) -> None:
    said = (folder / "launcher").read_text()
    assert process.returncode == 0 and "[all 2] END" in said, said


@LINUX
def test_on_one_host_no_store_listens_and_nothing_is_reached_from_outside(tmp_path):
    with running(tmp_path) as (process, others):
        found = sockets.listening([process.pid, *others])
        ranks = [pid for pid in others if os.getpgid(pid) == pid and b"rank.py" in command_of(pid)]
        assert len(ranks) == 2
        assert {pid: doors for pid, doors in found.items() if doors and pid not in ranks} == {}
        doors = [door for pid in ranks for door in found[pid]]  # Gloo's
        assert {address for address, _ in doors} == {"127.0.0.1"}
        assert [door for door in doors if sockets.is_store(*door)] == []
    check_ended_well(process, tmp_path)


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@LINUX
def test_the_look_at_listening_sockets_finds_a_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    found = sockets.listening([os.getpid()])[os.getpid()]
    assert store.port in [port for _, port in found] and sockets.is_store("127.0.0.1", store.port, seconds=30)


@LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_read_write_nor_end_a_run(tmp_path):
    with running(tmp_path) as (process, others):
        pids = [process.pid, *others]
        ports = sorted({port for doors in sockets.listening(pids).values() for _, port in doors})
        folder = Path(environment_of(others[-1])["MESHLOOM_STORE"].removeprefix("file://"))
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "notes" / "status 0").exists()
        assert done_by_stranger(folder, pids, ports) == []
        time.sleep(1)  # the ranks look at their notes four times a second
    check_ended_well(process, tmp_path)
    assert "stranger" not in (tmp_path / "launcher").read_text()


@LINUX
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_stranger_does_what_it_can():
    """Where doors are open, it goes through all of them; pytest keeps its own folders closed."""
    with tempfile.TemporaryDirectory() as folder:
        check_stranger(Path(folder))


def check_stranger(tmp_path: Path) -> None:
    place = tmp_path / "open"
    (place / "notes").mkdir(parents=True)
    for path in (place, place / "notes"):
        path.chmod(0o777)
    for path in (place / "store", place / "notes" / "status 0"):
        path.write_text("")
        path.chmod(0o666)
    tmp_path.chmod(0o777)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    done = done_by_stranger(place, [], [store.port], patience=30)
    assert done[:2] == ["list the folder", "read the store"] and done[-1] == f"write to the store on port {store.port}"
    assert len(done) == 7 and b"a stranger says so" in store.get("meshloom/failure")


def done_by_stranger(folder: Path, pids: list[int], ports: list[int], patience: float = 2) -> list[str]:
    command = [sys.executable, str(Path(__file__).parents[1] / "stranger.py"), str(folder)]
    numbers = [",".join(map(str, each)) for each in (pids, ports)]
    done = subprocess.run([*command, *numbers, str(patience)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def environment_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


@LINUX
def test_on_several_hosts_everything_listens_on_the_interface_that_joins_them(tmp_path):
    with namespaces.pair() as hosts:
        command = [sys.executable, "-m", "meshloom", "run", "--hosts", "a:1,b:1"]
        command += ["--rdzv-endpoint", f"{hosts[0].address}:{namespaces.PORT}", "--start-timeout", "60"]
        command += ["--log-dir", str(tmp_path / "logs")]
        program = [str(faults.PROGRAM), "goes_on_until", str(tmp_path)]
        environment = {**faults.clean(), "MESHLOOM_SECRET": "0123456789abcdef"}
        started = [
            host.start([*command, "--node-rank", str(node), *program], tmp_path / f"host-{node}", environment)
            for node, host in enumerate(hosts)
        ]
        logs = [tmp_path / "logs" / f"rank-{rank}.stdout.log" for rank in range(2)]
        faults.wait_until(
            lambda: all(each.exists() and "READY" in each.read_text() for each in logs), started, tmp_path
        )
        pids = [pid for each in started for pid in (each.pid, *descendants(each.pid))]
        doors = {door for found in sockets.listening(pids).values() for door in found}
        assert {address for address, _ in doors} == {host.address for host in hosts}
        assert (hosts[0].address, namespaces.PORT) in doors
        (tmp_path / "go_on").touch()
        faults.wait_for(started, tmp_path)
        said = [(tmp_path / f"host-{node}").read_text() for node in range(2)]
        assert [each.returncode for each in started] == [0, 0], said
        assert ["END" in each for each in said] == [True, True]


# notes


def boards(folder: Path) -> dict[str, tuple[Board, object]]:
    """A board on every kind of store, with the store as a stranger sees it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    notes = FolderNotes(folder)
    return {"tcp": (Board.beside(store), dist.PrefixStore("meshloom", store)), "folder": (Board(notes), notes)}


# what a stranger may write, and whether only a secret tells that it is no note
GARBAGE = {
    "nothing": ("", False),
    "words": ("the run has failed", False),
    "half of a note": ('- {"rank": 1', False),
    "no seal": ('{"rank": 1, "headline": "stranger", "cause": "stranger"}', False),
    "many brackets": ("- " + "[" * 100_000, False),
    "no secret": ('- {"rank": 1, "headline": "stranger", "cause": "stranger"}', True),
    "another secret": ("0" * 64 + ' {"rank": 1, "headline": "stranger", "cause": "stranger"}', False),
}


@pytest.mark.parametrize("kind", ["tcp", "folder"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_what_is_no_note_is_not_read_and_hinders_nobody(kind, garbage, tmp_path, monkeypatch):
    text, needs_secret = GARBAGE[garbage]
    if needs_secret:
        monkeypatch.setenv("MESHLOOM_SECRET", "0123456789abcdef")
    board, store = boards(tmp_path)[kind]
    store.set("failure", text)
    assert store.check(["failure"])  # torch does not wait until what is set is there; others ask on lines of their own
    assert board.has("failure", 5) and board.read("failure", 5) is None and board.read_all(["failure"], 5) == [None]
    assert board.write_first("failure", "own", 5) == "own"
    assert board.write_first("failure", "second", 5) == "own" == board.read("failure", 5)


@pytest.mark.parametrize("kind", ["tcp", "folder"])
def test_a_note_is_good_under_its_own_name_only(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("MESHLOOM_SECRET", "0123456789abcdef")
    board, store = boards(tmp_path)[kind]
    board.write("status 1", {"state": "left"}, 5)
    store.set("status 0", store.get("status 1").decode())
    assert board.read("status 1", 5) == {"state": "left"} and board.read("status 0", 5) is None


def test_garbage_in_the_store_neither_ends_a_run_nor_its_watch(tmp_path):
    """The last words are those of the rank that really failed, and the other rank hears them."""
    port = faults.free_port()

    def spoil() -> None:
        store = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=60))
        for name in ("failure", "closed", "status 0", "status 1"):
            for text in ("no note", '- {"rank": 1, "headline": "a stranger says so", "cause": "a stranger"}', "- 5"):
                store.set(f"meshloom/{name}", text)
                time.sleep(0.3)  # a beat of the watch

    ranks = faults.run("raises_later", tmp_path, meanwhile=spoil, MASTER_PORT=str(port), MESHLOOM_SECRET="s" * 16)
    for rank in ranks:
        assert "the data of this rank is broken" in rank.text and "stranger" not in rank.text, rank.text
    assert "PeerLostError" in ranks[0].text


# files


def test_logs_are_for_their_owner_alone(tmp_path):
    (tmp_path / "script.py").write_text("print('said')")
    (tmp_path / "logs").mkdir()
    older = tmp_path / "logs" / "rank-0.stdout.log"
    older.write_text("of an earlier run, which was longer")
    older.chmod(0o644)
    command = [sys.executable, "-m", "meshloom", "run", "-n", "1", "--log-dir", str(tmp_path / "logs")]
    subprocess.run([*command, str(tmp_path / "script.py")], check=True, capture_output=True, timeout=60)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "logs").iterdir()}
    assert found == {"rank-0.stdout.log": 0o600, "rank-0.stderr.log": 0o600} and older.read_text() == "said\n"


def test_a_link_in_the_place_of_a_log_is_not_followed(tmp_path, capsys):
    (tmp_path / "script.py").write_text("")
    (tmp_path / "logs").mkdir()
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "logs" / "rank-0.stdout.log").symlink_to(tmp_path / "precious")
    assert main(["run", "-n", "1", "--log-dir", str(tmp_path / "logs"), str(tmp_path / "script.py")]) == 1
    assert "rank-0.stdout.log cannot be written: it is a link" in capsys.readouterr().err
    assert (tmp_path / "precious").read_text() == "precious"


# the secret of hosts


@pytest.fixture
def secret_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("MESHLOOM_SECRET", raising=False)
    monkeypatch.setenv("MESHLOOM_SECRET_FILE", str(tmp_path / "new" / "secret"))
    return tmp_path / "new" / "secret"


def test_a_secret_is_made_once_for_its_owner_alone(secret_file):
    made = read_secret()
    assert len(made) == 64 and read_secret() == made
    assert stat.S_IMODE(secret_file.stat().st_mode) == 0o600
    assert [path.name for path in secret_file.parent.iterdir()] == ["secret"]


def test_a_secret_that_others_can_read_is_refused(secret_file):
    read_secret()
    secret_file.chmod(0o640)
    with pytest.raises(LaunchError, match=rf"others can read or write the secret {secret_file}\n  mode  0640"):
        read_secret()


def test_a_secret_that_can_be_guessed_is_refused(monkeypatch):
    monkeypatch.setenv("MESHLOOM_SECRET", "short")
    with pytest.raises(LaunchError, match="the secret in MESHLOOM_SECRET has 5 characters, of at least 16"):
        read_secret()


def test_a_host_with_another_secret_is_sent_away_and_the_others_wait_on(tmp_path):
    (tmp_path / "script.py").write_text("print('ran')")
    command = [sys.executable, "-m", "meshloom", "run", "--hosts", "a:1,b:1", "--start-timeout", "60"]
    command += ["--rdzv-endpoint", f"localhost:{faults.free_port()}"]

    def start(node: str, secret: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "MESHLOOM_SECRET": secret}
        whole = [*command, "--node-rank", node, str(tmp_path / "script.py")]
        return subprocess.Popen(whole, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    first, stranger = start("0", "the right secret"), start("1", "another secret, of 33 characters")
    try:
        said, _ = stranger.communicate(timeout=100)
        assert stranger.returncode == 1 and "have different secrets" in said
        second = start("1", "the right secret")
        assert [each.communicate(timeout=100)[0] for each in (first, second)] == ["[rank 0] ran\n", "[rank 1] ran\n"]
    finally:
        for each in (first, stranger):
            each.kill()


LATE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
from meshloom.processes.store import Board

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)  # while the interpreter ends

slow = Slow()
board = Board(dist.TCPStore("127.0.0.1", int(sys.argv[1]), timeout=timedelta(seconds=60)))
try:
    board._ask(0.1, "get", "late")
except RuntimeError as error:
    print(error, flush=True)
"""


def test_an_answer_that_comes_while_the_program_ends_does_not_abort_it():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    started = subprocess.Popen(
        [sys.executable, "-c", LATE, str(store.port)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert started.stdout.readline() == "the store of the processes did not answer within 0.1 s\n"
    time.sleep(0.7)
    store.set("late", "answer")
    told = started.communicate(timeout=60)
    assert started.returncode == 0, told
