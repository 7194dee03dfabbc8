"""`launch` and `attach`: worker processes, and the client's way to them.

    with loom.launch(workers=4) as cluster:
        mesh = cluster.open_mesh((2, 2), axes=("dp", "tp"))

The workers are ranks, started by `meshloom run` or by Ray. They dial the client, which listens on loopback unless
another address is asked for; both prove the secret of the cluster.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from meshloom import settings
from meshloom.controller import methods
from meshloom.controller.calls import line_here
from meshloom.controller.log import DispatcherLog
from meshloom.controller.monitoring import Reporter
from meshloom.controller.placing import take
from meshloom.controller.session import Session, Status
from meshloom.controller.starting import STARTERS, Starter
from meshloom.controller.tensors import ClusterLease, RemoteTensor, make_remote
from meshloom.controller.values import PLACEMENTS
from meshloom.errors import ArgumentError, LaunchError, TraceError, closest, expect, expect_seconds
from meshloom.mesh import Mesh
from meshloom.placement import Topology
from meshloom.processes.bindings import read_hosts
from meshloom.tensor import creation
from meshloom.tensor.clients import Clients

LOOPBACK = "127.0.0.1"

methods.attach()
_OPEN: set[ClusterLease] = set()  # while there is one, calls on their meshes are taken


def _take_calls(lease: ClusterLease, is_open: bool) -> None:
    (_OPEN.add if is_open else _OPEN.discard)(lease)
    Clients.take = take if _OPEN else None


def launch(
    workers: int | None = None,
    *,
    hosts: Sequence[str] | None = None,
    on: str = "processes",
    address: str = LOOPBACK,
    timeout: float = 300.0,
    threads: int | None = None,
    detach: str | None = None,
) -> Cluster:
    """Start worker processes and connect to them; they end with the `with` block, or with this process.

    `hosts` such as `["a:4", "b:4"]` starts the workers of the first host here, prints the command that starts those of
    each other host, and waits for them. `on="ray"` starts them in actors of a Ray cluster: the one that this process is
    connected to, or that RAY_ADDRESS names, or else one of their own on this host. `address` is where this client
    listens. `timeout` is how many seconds a call may take before its worker counts as lost. With `detach="name"` the
    workers stay when this process ends, and `loom.attach("name")` finds them.

    >>> import meshloom as loom
    >>> with loom.launch(workers=2) as cluster:
    ...     mesh = cluster.open_mesh((2,), axes=("dp",))
    ...     loom.arange(4, mesh=mesh).sum().item()
    6
    """
    if on not in STARTERS:
        raise ArgumentError(f"on={on!r} is no way to start workers", fix=closest(on, STARTERS))
    if hosts is None:
        expect("workers", workers, int, fix="loom.launch(workers=4)")
    expect_seconds("timeout", timeout, 0.1)
    if threads is not None:
        expect("threads", threads, int, fix="the threads of one worker, such as 1")
    count = workers or 0 if hosts is None else sum(number for _, number in read_hosts(",".join(hosts)))
    if count < 1 or workers not in (None, count):
        raise ArgumentError(f"workers={workers!r} is no number of processes", hosts=hosts, fix="loom.launch(workers=4)")
    secret = secrets.token_bytes(32)
    listener = _listen(address, 0)
    starter = STARTERS[on](listener, secret, count, timeout)
    try:
        starter.start(hosts, threads, detach is not None)
        if detach is not None:
            _write_note(detach, listener, secret, count, timeout, starter.process.pid)
    except BaseException:
        starter.give_up()
        raise
    return Cluster(starter, timeout, detach)


def attach(name: str) -> Cluster:
    """The client of workers that an earlier client left with `launch(..., detach=name)`, with the tensors it kept."""
    path = _note_of(name)
    if not path.exists():
        known = [each.stem for each in path.parent.glob("*.json")] if path.parent.is_dir() else []
        raise LaunchError(f"there is no detached cluster {name!r}", fix=closest(name, known))
    note = json.loads(path.read_text())
    try:
        listener = _listen(note["host"], note["port"])
    except OSError as error:
        raise LaunchError(
            f"the port of cluster {name!r} is taken: {error.strerror}", fix="another client may be attached to it"
        ) from None
    starter = Starter(listener, bytes.fromhex(note["secret"]), note["workers"], note["timeout"])
    starter.pid = note["pid"]
    made = Cluster(starter, note["timeout"], name)
    made._find_kept()
    return made


def _listen(address: str, port: int) -> socket.socket:
    return socket.create_server((address, port), backlog=128)


def _note_of(name: str) -> Path:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ArgumentError(f"{name!r} is no name of a cluster", fix="letters, digits, - and _")
    return Path(settings.read("XDG_CACHE_HOME")) / "meshloom" / "clusters" / f"{name}.json"


def _write_note(name: str, listener: socket.socket, secret: bytes, workers: int, timeout: float, pid: int) -> None:
    """Where a detached cluster is found again; only its user can read it."""
    path = _note_of(name)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    host, port = listener.getsockname()[:2]
    note = {"host": host, "port": port, "secret": secret.hex(), "workers": workers, "timeout": timeout, "pid": pid}
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        json.dump(note, file)


class Cluster:
    """Workers that a client drives: open a mesh on them, and use it as any other."""

    def __init__(self, starter: Starter, timeout: float, detach: str | None) -> None:
        self.workers = starter.workers
        self.name = f"Cluster(workers={self.workers})"
        self.kept: dict[str, RemoteTensor] = {}
        self._traces: set[str] = set()
        self._starter, self._detached = starter, detach
        try:
            connections = starter.gather()
        except BaseException:
            starter.give_up()
            if detach is not None:
                _note_of(detach).unlink(missing_ok=True)
            raise
        starter.listener.close()
        self.session = Session(connections, timeout, self.name, starter.find_fate)
        self.session.pipes += starter.pipes
        self._lease = ClusterLease(self.name, self.session)
        _take_calls(self._lease, True)
        if detach is not None:
            self.session.put(["b"])
        self._reporter = Reporter(self.session, self._lease)
        atexit.register(self._leave)

    # what it is for

    def open_mesh(
        self, shape: Sequence[int] | int, axes: Sequence[str] | None = None, *, processes: Sequence[int] | None = None
    ) -> Mesh:
        """A mesh whose devices are the workers': they split it into equal boxes, by the grid of `processes` if given.

        It becomes the current mesh.
        """
        self.session.check()
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        mesh = Mesh.of(sizes, axes).with_lease(self._lease)
        if processes is not None:
            raise ArgumentError("processes= is decided by the workers", fix="leave it out")
        if mesh not in self._lease.meshes:
            number = self._lease.meshes[mesh] = len(self._lease.meshes) + 1
            self.session.put(["m", number, list(sizes), None if axes is None else list(axes), {}])
        creation._opened[:] = [mesh]
        return mesh

    def wait(self) -> None:
        """Until the workers have done everything that was called; an error if a call failed."""
        self.session.wait()

    @property
    def log(self) -> DispatcherLog:
        """The last calls with their plans, collectives, bytes and lines."""
        return DispatcherLog(list(self.session.log))

    @property
    def statuses(self) -> list[Status]:
        """What each worker is doing, as it said last."""
        return self.session.statuses

    def counters(self) -> list[dict[str, Any]]:
        """What each worker has counted: calls, tensors with their bytes, memory, seconds of CPU, process id."""
        answers = self.session.ask(lambda request: ["n", request], wanted=self.workers)
        return sorted((value for value, _ in answers), key=lambda value: int(value["worker"]))

    # traces

    @contextmanager
    def trace(self, name: str) -> Iterator[None]:
        """Capture the calls inside, which run, under a name: `replay` runs them again without sending them.

        A replay computes from what the tensors hold then; results are again in the tensors that had them first.
        """
        expect("name", name, str, fix='with cluster.trace("step"): ...')
        self.session.refuse_while_capturing(f"trace {name!r} began")
        with self.session.lock:
            self.session.put(["t", name])
            self.session.capturing, self.session.context = name, None  # the modes belong to it
        try:
            yield
        finally:
            with self.session.lock:
                self.session.capturing = None
                self.session.context = None  # a replay may leave other modes behind
                self.session.put(["u"])
        self._traces.add(name)

    def replay(self, name: str, times: int = 1) -> None:
        """Run the calls of a trace again."""
        if name not in self._traces:
            raise TraceError(f"there is no trace {name!r}", fix=closest(name, self._traces))
        expect("times", times, int, fix="how often, such as 1")
        with self.session.lock:
            self.session.put(["y", name, times])
            self.session.context = None
            self.session.log.append((self.session.issued, f"replay of {name}", line_here(2), None, 0))

    # tensors that outlive a client

    def keep(self, **tensors: RemoteTensor) -> None:
        """Give tensors names under which a later client finds them: `loom.attach(name).kept["w"]`."""
        for name, tensor in tensors.items():
            expect(name, tensor, RemoteTensor, fix="give tensors on a mesh of this cluster")
            self.kept[name] = tensor
            self.session.put(["k", name, tensor._id])

    def _find_kept(self) -> None:
        ((told, _),) = self.session.ask(lambda request: ["w", request])
        self.session.numbers = iter(range(told["next"], 1 << 62))  # type: ignore[assignment]
        for number, shape, axes in told["meshes"]:
            mesh = Mesh.of(tuple(shape), tuple(axes)).with_lease(self._lease)
            self._lease.meshes[mesh] = number
            creation._opened[:] = [mesh]
        meshes = {number: mesh for mesh, number in self._lease.meshes.items()}
        for name, each in told["kept"].items():
            placed = [PLACEMENTS[kind](*rest) for kind, *rest in each["placements"]]
            topology = Topology(meshes[each["mesh"]], placed, each["shape"], each["dtype"])
            found = self.kept[name] = make_remote(self.session, topology, each["tensor"])
            if each["tracked"]:
                found.requires_grad_()

    # the end

    def close(self) -> None:
        """End the workers, detached ones too; tensors on them are gone."""
        self._close(False)
        if self._detached is not None:
            _note_of(self._detached).unlink(missing_ok=True)

    def _leave(self) -> None:
        """This process ends: so do the workers, unless they are to stay."""
        self._close(self._detached is not None)

    def _close(self, stays: bool) -> None:
        atexit.unregister(self._leave)
        if os.getpid() != self.session.pid or self.session.is_closed:
            return
        if creation._opened and creation._opened[-1].lease is self._lease:
            creation._opened.clear()
        self.kept.clear()
        self._reporter.close()
        self.session.close(stays)
        self._lease.end()
        _take_calls(self._lease, False)
        if not stays:
            self._starter.end()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.session.is_closed else f"{len(self._lease.meshes)} meshes"
        return f"Cluster(workers={self.workers}, {state})"
