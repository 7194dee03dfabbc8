"""Faults of clusters: each ends in an error that says who, what and where, within the timeout, and leaves nothing."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import meshloom as loom
from busy_machine import Patience
from meshloom.controller import session as sessions
from meshloom.controller.cluster import Cluster
from meshloom.controller.starting import Starter
from meshloom.tensor.clients import Clients

pytestmark = pytest.mark.slow
TIMEOUT = 3.0
PROGRAM = Path(__file__).with_name("client_program.py")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two workers, which are gone afterwards whatever happened to them."""
    yield from launch()


def launch() -> Iterator[Cluster]:
    with loom.launch(workers=2, timeout=TIMEOUT, threads=1) as made:
        pids = pids_of(made)
        yield made
    check_gone(pids)


def pids_of(cluster: Cluster) -> list[int]:
    return [*(each["pid"] for each in cluster.counters()), cluster._starter.process.pid]


def check_gone(pids: list[int], patience: float = 15.0) -> None:
    """None of the processes is there any more."""
    waited = Patience()
    while left := [pid for pid in pids if is_running(pid)]:
        assert waited.seconds < patience, f"processes {left} are left behind"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # before it was opened, or while it was read
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def raised_within(seconds: float, work: Callable[[], object]) -> BaseException:
    """The error that some work raises, in time."""
    waited = Patience()
    with pytest.raises(loom.MeshloomError) as found:
        work()
    assert waited.seconds < seconds, f"after {waited.seconds:.1f} s"
    return found.value


def ones(cluster: Cluster, *size: int) -> loom.Tensor:
    return loom.ones(*size, mesh=cluster.open_mesh((2,), axes=("dp",)))


def work_until_it_fails(x: loom.Tensor) -> None:
    for _ in range(10_000):
        x.sum().item()  # faults happen here
        time.sleep(0.01)


def test_a_worker_that_is_killed_while_idle(cluster):
    x = ones(cluster, 8)
    os.kill(pids_of(cluster)[1], signal.SIGKILL)
    error = raised_within(TIMEOUT + 2, lambda: work_until_it_fails(x))
    assert isinstance(error, loom.PeerLostError) and "worker 1 of Cluster(workers=2) is lost" in str(error)
    assert "rank 1 of 2 failed first: killed by SIGKILL (signal 9)" in str(error)  # as the launcher saw it
    assert f"{Path(__file__).name}:" in str(error)
    again = raised_within(1, lambda: x + 1)  # and it stays lost
    assert "worker 1" in str(again)


def test_a_worker_that_is_killed_in_a_collective(cluster):
    x = ones(cluster, 4_000_000)
    pid = pids_of(cluster)[0]
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    error = raised_within(TIMEOUT + 5, lambda: work_until_it_fails(x))
    assert "worker" in str(error) and "test_cluster_faults.py" in str(error)


def test_a_worker_that_is_stopped(cluster):
    x = ones(cluster, 8)
    os.kill(pids_of(cluster)[1], signal.SIGSTOP)
    error = raised_within(TIMEOUT + 3, lambda: work_until_it_fails(x))
    assert "worker" in str(error)


def test_a_call_that_takes_too_long_names_the_call_and_its_line(cluster):
    a = loom.ones(7000, 7000, mesh=cluster.open_mesh((2,), axes=("dp",)), placements="R")

    def work() -> None:
        b = a @ a  # this line
        b.sum().item()

    error = raised_within(TIMEOUT + 3, work)
    line = f"test_cluster_faults.py:{work.__code__.co_firstlineno + 1}"
    assert "matmul" in str(error) and line in str(error), error


def test_one_worker_that_has_no_memory_breaks_the_cluster(cluster):
    x = ones(cluster, 8)
    pid = pids_of(cluster)[1]
    held = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
    resource.prlimit(pid, resource.RLIMIT_AS, (held + (64 << 20), held + (64 << 20)))

    def work() -> None:
        y = loom.ones(100_000_000, mesh=x.mesh)
        work_until_it_fails(y)

    error = raised_within(sessions.GRACE + TIMEOUT + 2, work)
    assert isinstance(error, loom.OutOfMemoryError) and "worker" in str(error), error
    with pytest.raises(loom.MeshloomError, match="on worker 1 only"):
        for _ in range(1000):
            x + 1
            time.sleep(0.01)


def test_a_tensor_of_a_call_that_failed_says_so_at_every_use(cluster):
    mesh = cluster.open_mesh((2,), axes=("dp",))
    rows = torch.nn.functional.embedding(loom.arange(9, mesh=mesh), loom.ones(4, 3, mesh=mesh))
    later = rows * 2
    with pytest.raises(loom.MeshloomError):
        rows.to_torch()
    with pytest.raises(loom.OperandError, match="never made"):
        later.to_torch()


@pytest.mark.parametrize("what", ["killed", "raises", "exits"])
def test_workers_end_with_their_client(what):
    with start_client(what) as process:
        pids = [int(each) for each in process.stdout.readline().split()]
        assert len(pids) == 3
        process.wait(20)
    check_gone(pids)


def start_client(what: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, str(PROGRAM), what], stdout=subprocess.PIPE, text=True)


def test_a_forked_process_cannot_use_the_workers_and_does_not_keep_them():
    with start_client("forks") as process:
        pids = [int(each) for each in process.stdout.readline().split()]
        assert "belongs to process" in process.stdout.readline()
        child, total = process.stdout.readline().split()
        try:
            assert total == "15.0"
            process.wait(20)
            check_gone(pids)  # the child is still there
        finally:
            os.kill(int(child), signal.SIGKILL)


def test_a_cluster_that_is_closed_while_threads_call_tells_each_of_them():
    told: list[str] = []
    with loom.launch(workers=1, timeout=TIMEOUT, threads=1) as made:
        x = loom.ones(8, mesh=made.open_mesh((2,)))

        def work() -> None:
            try:
                while True:
                    (x * 2).sum().item()
            except loom.ClosedError:
                told.append("closed")

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for each in threads:
            each.start()
        time.sleep(0.2)
    for each in threads:
        each.join(10)
    assert told == ["closed"] * 3


def test_a_client_that_is_interrupted_in_a_wait_goes_on():
    with start_client("interrupted") as process:
        pids = [int(each) for each in process.stdout.readline().split()]
        assert process.stdout.readline().strip() == "waiting"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().strip() == "again 15.0"
        assert process.wait(20) == 0
    check_gone(pids)


@pytest.mark.parametrize("name", [None, "busy"])
def test_workers_that_are_still_busy_when_their_client_closes_them_end_well(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with loom.launch(workers=2, timeout=TIMEOUT, threads=1, detach=name) as made:
        pids, work = pids_of(made), ones(made, 1000, 1000)
        for _ in range(10):  # one frame each, most of them unread when the client leaves
            work = work @ work * 0
            time.sleep(0.01)
    check_gone(pids)
    assert made._starter.process.returncode == 0


def test_workers_that_stay_serve_the_next_client(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with start_client("detach") as process:
        pids = [int(each) for each in process.stdout.readline().split()]
        assert process.wait(20) == 0
    assert all(is_running(pid) for pid in pids)
    note = tmp_path / "meshloom" / "clusters" / "test-faults.json"
    assert note.stat().st_mode & 0o777 == 0o600
    with loom.attach("test-faults") as again:
        assert again.kept["x"].tolist() == [0, 1, 2, 3, 4, 5]
        y = again.kept["y"]
        (y * y).sum().backward()
        assert y.grad.tolist() == [0, 4, 8, 12, 16, 20]
    check_gone(pids)
    assert not note.exists()
    with pytest.raises(loom.LaunchError, match="no detached cluster"):
        loom.attach("test-faults")


def test_a_network_that_is_cut(monkeypatch):
    proxy = Proxy()
    start = Starter.start

    def start_behind(self, *rest):
        proxy.target = self.listener.getsockname()[1]
        real, self.listener = self.listener, proxy.listener
        try:
            start(self, *rest)
        finally:
            self.listener = real

    monkeypatch.setattr(Starter, "start", start_behind)
    with loom.launch(workers=2, timeout=TIMEOUT, threads=1) as made:
        x, pids = ones(made, 8), pids_of(made)
        proxy.is_cut = True
        error = raised_within(2 * TIMEOUT + 3, lambda: work_until_it_fails(x))
        assert "nothing was heard" in str(error), error
    proxy.close()
    check_gone(pids, 30)


class Proxy:
    """A network between workers and client that can be cut: what is sent is lost, and nobody is told."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.target, self.is_cut, self.ends = 0, False, []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                one, _ = self.listener.accept()
            except OSError:
                return
            other = socket.create_connection(("127.0.0.1", self.target))
            self.ends += [one, other]
            for source, sink in ((one, other), (other, one)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if not self.is_cut:
                    sink.sendall(data)
        except OSError:
            return

    def close(self) -> None:
        self.listener.close()
        for each in self.ends:
            each.close()


def test_workers_that_cannot_start_say_why(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    error = raised_within(10, lambda: loom.launch(workers=2, timeout=TIMEOUT))
    assert isinstance(error, loom.LaunchError) and "/nowhere" in str(error), error


def test_a_launcher_that_is_killed_takes_its_workers_along(cluster):
    x = ones(cluster, 8)
    os.kill(cluster._starter.process.pid, signal.SIGKILL)
    error = raised_within(TIMEOUT + 5, lambda: work_until_it_fails(x))
    assert "is lost" in str(error)


def test_strangers_at_the_door_are_sent_away(monkeypatch):
    start = Starter.start

    def start_after_strangers(self, *rest):
        address = self.listener.getsockname()
        for words in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(200), b"meshloom controller 1\n" + bytes(36)):
            stranger = socket.create_connection(address)
            stranger.sendall(words)
            if words != b"meshloom controller 1\n" + bytes(36):
                stranger.close()
            strangers.append(stranger)
        start(self, *rest)

    strangers: list[socket.socket] = []
    monkeypatch.setattr(Starter, "start", start_after_strangers)
    monkeypatch.setattr("meshloom.controller.starting.GREET", 0.5)
    with loom.launch(workers=2, timeout=TIMEOUT, threads=1) as made:
        assert ones(made, 8).sum().item() == 8
    for each in strangers:
        each.close()


def test_what_lies_on_a_cluster_that_was_closed_is_gone():
    with loom.launch(workers=1, timeout=TIMEOUT, threads=1) as made:
        x = loom.ones(4, mesh=made.open_mesh((2,)))
    assert Clients.take is None
    uses = [
        lambda: x + 1, lambda: x.tolist(), lambda: x.sum(), lambda: x.requires_grad_(), lambda: made.wait(),
        lambda: torch.relu(x), lambda: torch.ones(4) + x, lambda: torch.cat([x, x]), lambda: x.redistribute("R"),
        lambda: loom.ones(4, mesh=x.mesh), lambda: loom.distribute(torch.ones(4), x.mesh), lambda: x.add_(1),
        lambda: loom.ones(4, mesh=loom.Mesh(dp=2)) + x, lambda: loom.save({"x": x}, "nowhere"),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(loom.ClosedError):
            use()
    assert "f32[4]" in repr(x)
