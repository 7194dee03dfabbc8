"""`launch`: workers on this host, and the client's way to them."""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from meshloom import settings
from meshloom.controller import methods, wire
from meshloom.controller.session import Session
from meshloom.controller.tensors import ClusterLease
from meshloom.controller.worker import VARIABLE
from meshloom.errors import LaunchError, MeshError
from meshloom.mesh import Mesh
from meshloom.tensor import creation

START = 120.0  # seconds until all workers must have come


def launch(workers: int = 2, *, timeout: float = 300.0, threads: int | None = None) -> Cluster:
    """Start worker processes and connect to them; they end with the `with` block, or with this process."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise LaunchError(f"workers={workers!r} is no number of processes", fix="loom.launch(workers=4)")
    return Cluster(workers, timeout, threads)


class Cluster:
    """Workers, and what the client may do with them."""

    def __init__(self, workers: int, timeout: float, threads: int | None) -> None:
        self.workers = workers
        self.name = f"Cluster(workers={workers})"
        self._secret = secrets.token_bytes(32)
        self._log = tempfile.NamedTemporaryFile(prefix="meshloom-cluster-", suffix=".log", delete=False)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=workers + 8)
        self._process = self._start(timeout, threads)
        try:
            connections = self._gather()
        except BaseException:
            self._end_process()
            raise
        self.session = Session(connections, timeout, self.name)
        self._lease = ClusterLease(self.name, self.session)
        self._meshes = 0
        atexit.register(self.close)

    def _start(self, timeout: float, threads: int | None) -> subprocess.Popen[bytes]:
        host, port = self._listener.getsockname()
        command = [sys.executable, "-m", "meshloom", "run", "--nproc", str(self.workers), "--timeout", str(timeout)]
        command += ["-m", "meshloom.controller.worker"]
        inherited = {name: text for name, text in settings.environment().items() if name not in _RANKS}
        environment = {**inherited, VARIABLE: f"{host}:{port} {self._secret.hex()}"}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def _gather(self) -> list[socket.socket]:
        """A connection of every worker that proves the secret; strangers are sent away."""
        deadline = time.monotonic() + START
        found: dict[int, socket.socket] = {}
        while len(found) < self.workers:
            if self._process.poll() is not None:
                raise LaunchError("the workers ended while they started", output=self._tail())
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{len(found)} of {self.workers} workers came within {START:.0f} s", output=self._tail()
                )
            self._listener.settimeout(0.2)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            try:
                number = wire.welcome(connection, self._secret, min(deadline, time.monotonic() + 10))
            except (LaunchError, OSError):
                connection.close()
                continue
            wire.tune(connection)
            found[number] = connection
        return [found[number] for number in range(self.workers)]

    def _tail(self) -> str | None:
        text = Path(self._log.name).read_text(errors="replace").strip()
        return "\n".join(text.splitlines()[-20:]) or None

    def open_mesh(self, shape: Sequence[int] | int, axes: Sequence[str] | None = None) -> Mesh:
        """A mesh whose devices are the workers'; they split it among themselves."""
        self.session.check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        made = Mesh.of(sizes, axes)
        mesh = made.with_lease(self._lease)
        if mesh not in self._lease.meshes:
            self._meshes += 1
            self._lease.meshes[mesh] = self._meshes
            self.session.put(["m", self._meshes, list(sizes), None if axes is None else list(axes), {}])
        creation._opened[:] = [mesh]
        return mesh

    def wait(self) -> None:
        """Until the workers have done everything that was called."""
        self.session.wait()

    def close(self) -> None:
        """End the workers; tensors on them are gone."""
        atexit.unregister(self.close)
        if os.getpid() != self.session.pid:
            return
        if creation._opened and creation._opened[-1].lease is self._lease:
            creation._opened.clear()
        self.session.close()
        self._lease.end()
        self._end_process()

    def _end_process(self) -> None:
        self._listener.close()
        for patience, number in ((5, signal.SIGTERM), (12, signal.SIGKILL), (5, None)):
            try:
                self._process.wait(patience if self._process.poll() is None else 0)
                break
            except subprocess.TimeoutExpired:
                if number is not None:
                    self._process.send_signal(number)
        self._log.close()
        Path(self._log.name).unlink(missing_ok=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return self.name


_RANKS = frozenset("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split())
_ = (MeshError, Any, methods)
