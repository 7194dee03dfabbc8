"""Everything that waits while processes start has a deadline, whoever answers at the meeting point."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import faults
import namespaces
from busy_machine import Patience
from faults import errors, line

pytestmark = pytest.mark.slow


def say_nothing(call: socket.socket) -> None:
    """Take the call, and never answer."""


def speak_http(call: socket.socket) -> None:
    """Answer as a server of web pages does to what it does not understand."""
    call.recv(64)
    call.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def speak_first(call: socket.socket) -> None:
    """Say something before being asked, as servers of mail do."""
    call.sendall(b"220 mail.example ESMTP\r\n")


def hang_up(call: socket.socket) -> None:
    """Close the connection at once."""
    call.close()


# who may be at the meeting point instead of us
STRANGERS: list[Callable[[socket.socket], None]] = [say_nothing, speak_http, speak_first, hang_up]


@contextmanager
def held_port(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A port where somebody else listens."""
    calls = []  # kept open

    def listen() -> None:
        while True:
            try:
                call, _ = server.accept()
                calls.append(call)
                answer(call)
            except OSError:  # it is over, or the caller has gone
                if server.fileno() < 0:
                    return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    for call in calls:
        call.close()


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_meeting_point_held_by_somebody_else_is_an_error_on_every_rank(stranger, tmp_path):
    with held_port(stranger) as port:
        waited = Patience()
        ranks = faults.run("never_starts", tmp_path, MASTER_PORT=str(port), FAULT_RANK="-1", MESHLOOM_TIMEOUT="3")
    assert waited.seconds < 60  # twenty times that without a deadline
    for rank in ranks:
        told = errors(rank.text)
        assert rank.code == 1 and told.startswith("meshloom.errors.PeerLostError: "), rank.text
        assert f"rank {rank.rank} waited " in told and f"in open_mesh at {line('never')}: " in told
        assert f"meeting_point  127.0.0.1:{port}" in told


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_host_that_finds_somebody_else_at_the_meeting_point_says_so(stranger, tmp_path):
    (tmp_path / "script.py").write_text("")
    with held_port(stranger) as port:
        command = [sys.executable, "-m", "meshloom", "run", "--hosts", "a:1,b:1", "--start-timeout", "3"]
        command += ["--node-rank", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", str(tmp_path / "script.py")]
        environment = {**faults.clean(), "MESHLOOM_SECRET": "0123456789abcdef"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert f"meshloom run: the 2 hosts did not meet at 127.0.0.1:{port} within 3 s\n  reason  " in done.stderr


def test_a_port_that_is_taken_is_an_error_at_once_on_the_first_host(tmp_path):
    (tmp_path / "script.py").write_text("")
    with held_port(say_nothing) as port:
        command = [sys.executable, "-m", "meshloom", "run", "--hosts", "a:1,b:1", "--node-rank", "0"]
        command += ["--rdzv-endpoint", f"127.0.0.1:{port}", str(tmp_path / "script.py")]
        environment = {**faults.clean(), "MESHLOOM_SECRET": "0123456789abcdef"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert f"this host cannot listen at 127.0.0.1:{port}: another job is there" in done.stderr
    assert f"--rdzv-endpoint 127.0.0.1:{port + 1}" in done.stderr


def test_a_host_whose_own_name_is_loopback_is_named_on_every_host_before_gloo_waits(tmp_path):
    with namespaces.pair() as hosts:
        command = [sys.executable, str(faults.PROGRAM), "never_starts", str(tmp_path)]
        started = namespaces.start_ranks(
            hosts, 2, command, tmp_path, FAULT_RANK="-1", MESHLOOM_TIMEOUT="60", GLOO_SOCKET_IFNAME=""
        )
        faults.wait_for(started, tmp_path, seconds=55)
    for rank, process in enumerate(started):
        told = errors((tmp_path / f"rank-{rank}").read_text())
        assert process.returncode == 1
        assert f"in open_mesh at {line('never')}: rank 0 on " in told
        assert " would wait at 127." in told and "which no other host can reach" in told
        assert "fix            set GLOO_SOCKET_IFNAME on every host" in told


def test_an_interface_that_is_not_there_is_an_error_on_every_rank(tmp_path):
    ranks = faults.run("never_starts", tmp_path, FAULT_RANK="-1", MESHLOOM_TIMEOUT="60", GLOO_SOCKET_IFNAME="none0")
    for rank in ranks:
        assert "has no interface named none0 with an address" in errors(rank.text) and rank.code == 1
