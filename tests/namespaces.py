"""Two hosts as network namespaces: each has its own interfaces, and one cable (a veth pair) joins them.

    with namespaces.pair() as (left, right):
        left.start([...])         # a process on the first host
        right.cut()               # somebody pulls the cable

A kernel that refuses, or a missing iproute2, is a skip with its reason. Everything is removed at the end: processes by
their ids, namespaces by their names, which no other run shares.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import faults

CABLE = "cable"
PORT = 29500  # a namespace has all ports for itself
_numbers = itertools.count()


@dataclass
class Host:
    """One namespace, its address on the cable, and the processes that were started in it."""

    name: str
    address: str
    started: list[faults.Started] = field(default_factory=list)

    def start(self, command: list[str], output: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """A process of this host; what it says goes to a file."""
        inside = ["ip", "netns", "exec", self.name, *command]
        with open(output, "wb") as file:
            process = subprocess.Popen(
                inside, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.started.append(process)
        return process

    def fork(self, command: list[str], output: Path, environment: dict[str, str]) -> faults.Forked:
        """The same of an interpreter, forked off one that has imported torch."""
        process = faults.Forked(command, output, environment, network=self.name)
        self.started.append(process)
        return process

    def cut(self) -> None:
        """Packets vanish from now on; no connection is closed by it."""
        _ip("-n", self.name, "link", "set", CABLE, "down")

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def pair() -> Iterator[tuple[Host, Host]]:
    """Two hosts joined by a cable, for as long as the block lasts."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed: no `ip netns`")
    stem = f"loom{os.getpid()}x{next(_numbers)}"
    hosts = (Host(f"{stem}a", "10.77.0.1"), Host(f"{stem}b", "10.77.0.2"))
    try:
        try:
            _join(hosts)
        except OSError as error:
            pytest.skip(f"the kernel refuses network namespaces: {error}")
        yield hosts
    finally:
        for host in hosts:
            host.end()
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)  # its end of the cable goes with it


def _join(hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        _ip("netns", "add", host.name)
        _ip("-n", host.name, "link", "set", "lo", "up")
    one, other = hosts
    _ip("link", "add", CABLE, "netns", one.name, "type", "veth", "peer", "name", CABLE, "netns", other.name)
    for host in hosts:
        _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", CABLE)
        _ip("-n", host.name, "link", "set", CABLE, "up")


def environment(hosts: tuple[Host, Host], rank: int, count: int) -> dict[str, str]:
    """torchrun's variables for a rank: the first half of the ranks on the first host, rank 0 holding the store."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_RANK": str(rank % (count // 2)),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": CABLE,
        "OMP_NUM_THREADS": "1",
    }


def start_ranks(
    hosts: tuple[Host, Host], count: int, command: list[str], folder: Path, **more: str
) -> list[faults.Forked]:
    """A process per rank; what each says goes to `rank-N` in the folder."""
    return [
        hosts[rank * 2 // count].fork(command, folder / f"rank-{rank}", {**environment(hosts, rank, count), **more})
        for rank in range(count)
    ]
