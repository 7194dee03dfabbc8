"""Who starts the workers of a cluster, and gathers their connections: `meshloom run`, or Ray.

Both are a process of their own between this one and the workers. It ends them, and what it has started, when this
process is done or gone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from meshloom import settings
from meshloom.controller import outcomes, wire
from meshloom.controller.worker import VARIABLE
from meshloom.errors import LaunchError, MeshloomError, OutOfMemoryError, PeerLostError

START = 120.0  # seconds until all workers must have come
GREET = 10.0  # seconds that a greeting may take
LAUNCHER = 2.0  # seconds in which the launcher must have said how a worker ended
PATIENCE = 2.0  # seconds in which Ray must have said how a worker ended
# what binds this process, and not those that it starts
_RANKS = frozenset("RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT".split())


class Starter:
    """Starts the launcher of the workers, and gathers their connections."""

    MOMENT = 5.0  # seconds in which it ends by itself

    def __init__(self, listener: socket.socket, secret: bytes, workers: int, timeout: float) -> None:
        self.listener, self.secret, self.workers, self.timeout = listener, secret, workers, timeout
        self.process: Any = None
        self.pid: int | None = None
        self._output: Any = None

    def start(self, hosts: Sequence[str] | None, threads: int | None, stays: bool) -> None:
        """`meshloom run`, with the workers' module as its script."""
        where = ["--hosts", ",".join(hosts), "--node-rank", "0"] if hosts else ["--nproc", str(self.workers)]
        rest = ["--timeout", str(self.timeout), "-m", "meshloom.controller.worker"]
        for number, other in enumerate(hosts or ()):
            if number:
                told = shlex.join(["meshloom", "run", *where[:-1], str(number), *rest])
                print(f"on {other.rpartition(':')[0]}: {VARIABLE}='{self._client}' {told}", file=sys.stderr, flush=True)
        more = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
        command = ["-m", "meshloom", "run", *where, *rest]
        self._open(command, {VARIABLE: self._client, **more}, stdin=subprocess.DEVNULL)

    @property
    def _client(self) -> str:
        """Where the workers find this process, and what they must prove."""
        host, port = self.listener.getsockname()[:2]
        return f"{host}:{port} {self.secret.hex()}"

    def _open(self, command: Sequence[str], more: dict[str, str], **streams: int) -> None:
        inherited = {name: text for name, text in settings.environment().items() if name not in _RANKS}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  closed in `end`
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={**inherited, **more},
            **{"stdout": self._output, "stderr": self._output, **streams},
            start_new_session=True,  # Ctrl-C is for the client
        )
        self.pid = self.process.pid

    def gather(self) -> list[socket.socket]:
        """A connection of every worker that proves the secret; strangers are sent away."""
        deadline = time.monotonic() + START
        found: dict[int, socket.socket] = {}
        outcomes.warm_up()
        while len(found) < self.workers:
            self._check_start()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{len(found)} of {self.workers} workers came within {START:.0f} s", output=self.output()
                )
            self.listener.settimeout(0.2)
            try:
                connection, _ = self.listener.accept()
            except TimeoutError:
                continue
            try:
                number = wire.welcome(connection, self.secret, min(deadline, time.monotonic() + GREET))
            except (LaunchError, OSError):
                connection.close()
                continue
            wire.tune(connection)
            found[number] = connection
        return [found[number] for number in range(self.workers)]

    def _check_start(self) -> None:
        """An error if nobody will come any more."""
        if self.process is not None and self.process.poll() is not None:
            raise LaunchError("the workers ended while they started", output=self.output())

    @property
    def pipes(self) -> list[Any]:
        """What tells the launcher that this process is there."""
        return []

    def find_fate(self, number: int) -> MeshloomError | None:
        """What is known of the end of a worker, besides that its connection ended; the launcher ends soon after it."""
        if self.process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(LAUNCHER)
        said = self.output()
        return None if said is None else PeerLostError("it has ended", output=said)

    def output(self) -> str | None:
        """The last lines that the launcher and the workers have printed."""
        if self._output is None:
            return None
        size = os.fstat(self._output.fileno()).st_size
        text = os.pread(self._output.fileno(), 1 << 14, max(0, size - (1 << 14))).decode(errors="replace")
        return "\n".join(text.strip().splitlines()[-20:]) or None

    def give_up(self) -> None:
        """End what was started, before it is of use to anybody."""
        self.listener.close()
        if self.process is not None:
            self.process.terminate()
        self.end()

    def end(self) -> None:
        """Wait for the launcher; end it if it does not end by itself. It leaves nothing behind."""
        if self.process is None:
            return
        for patience, number in ((self.MOMENT, signal.SIGTERM), (12, signal.SIGKILL), (5, None)):
            try:
                self.process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                if number is not None:
                    self.process.send_signal(number)
        self._output.close()


class RayStarter(Starter):
    """Workers in actors of a Ray cluster; `controller/ray_launcher.py` speaks to Ray, and tells us what it says."""

    MOMENT = 20.0

    def start(self, hosts: Sequence[str] | None, threads: int | None, stays: bool) -> None:
        """The launcher, with its orders on its first line; it ends when that line is closed."""
        if importlib.util.find_spec("ray") is None:
            raise LaunchError('on="ray" needs Ray, which is not installed', fix="pip install 'meshloom[ray]'")
        self._fates: dict[int, MeshloomError] = {}
        self._unsure: set[int] = set()  # workers of whose end Ray will know more
        self._refusal: LaunchError | None = None
        self._heard = b""
        address = _address_of_ray()
        where = tempfile.gettempdir()  # Ray makes sockets in it, whose names have a bound
        self._folder = tempfile.mkdtemp(prefix="loom-ray-", dir=where if len(where) < 24 else "/tmp")
        self._open(
            ["-c", "from meshloom.controller import ray_launcher; ray_launcher.main()"],
            {"RAY_USAGE_STATS_ENABLED": "0", **({} if address else _own_ray())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        os.set_blocking(self.process.stdout.fileno(), False)
        orders = {
            "workers": self.workers, "hosts": hosts, "threads": threads, "stays": stays, "client": self._client,
            "timeout": self.timeout, "address": address, "folder": os.getcwd(), "own_folder": self._folder,
        }  # fmt: skip
        self.process.stdin.write(json.dumps(orders).encode() + b"\n")
        self.process.stdin.flush()

    def _listen(self) -> None:
        """What the launcher has said since the last time."""
        while piece := self.process.stdout.read(1 << 16):
            self._heard += piece
        *lines, self._heard = self._heard.split(b"\n")
        for facts in map(json.loads, lines):
            if "worker" in facts:
                kind = OutOfMemoryError if facts["is_memory"] else PeerLostError
                self._fates[facts["worker"]] = kind(facts["how"])
                self._unsure = (
                    self._unsure - {facts["worker"]} if facts["is_sure"] else self._unsure | {facts["worker"]}
                )
            else:
                self._refusal = LaunchError(facts["refusal"], **facts["details"])

    def _check_start(self) -> None:
        self._listen()
        if self._refusal is not None:
            raise self._refusal.locate(output=self.output())
        for number, fate in self._fates.items():
            raise LaunchError(f"worker {number} ended while it started: {fate}", output=self.output())
        super()._check_start()

    @property
    def pipes(self) -> list[Any]:
        """The line that the launcher listens to."""
        return [self.process.stdin]

    def find_fate(self, number: int) -> MeshloomError | None:
        """What Ray says of the end of a worker; it may need a moment to know."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            self._listen()
            if number in self._fates and number not in self._unsure:
                break
            time.sleep(0.05)
        return self._fates.get(number)

    def end(self) -> None:
        """Close the line to the launcher, which ends Ray's processes if it has started them."""
        if self.process is not None:
            self.process.stdin.close()
            super().end()
            self.process.stdout.close()
            shutil.rmtree(self._folder, ignore_errors=True)  # the launcher has done it, unless it was killed


def _own_ray() -> dict[str, str]:
    """What keeps a Ray cluster of our own on this host: a token that is not in ~/.ray, and loopback only.

    Ray listens on all interfaces unless it may not have clusters of several hosts, which it decides by this variable.
    """
    token = secrets.token_hex(32)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def _address_of_ray() -> str | None:
    """The Ray cluster that this process is connected to, or that it was told of; None: one of our own."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().gcs_address)
    return settings.read("RAY_ADDRESS") or None


STARTERS = {"processes": Starter, "ray": RayStarter}
