"""How the launchers of several hosts meet: at the first one, each proving that it knows the same secret.

The first host listens at one address and greets whoever comes with a number that is used once. A launcher answers with
who it is and what it runs, sealed with the secret and that number; when all hosts have come, each is told, sealed in
the same way, where the ranks meet and from what their own secret is made. Whoever cannot seal is sent away and changes
nothing; hosts that disagree about the hosts end together.
"""

from __future__ import annotations

import errno
import hashlib
import os
import queue
import secrets
import shlex
import socket
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshloom import settings
from meshloom.errors import LaunchError
from meshloom.processes import interfaces
from meshloom.processes.sealing import VARIABLE, Seal

if TYPE_CHECKING:
    from meshloom.cli.run import Launch

FILE = "MESHLOOM_SECRET_FILE"
LOOK = 0.1  # seconds between two attempts to reach the first host
SHORTEST = 16  # characters of a secret
LONGEST = 1 << 16  # bytes of a line
_GREETING = "meshloom "


@dataclass(frozen=True, slots=True)
class Met:
    """What the ranks of this host are told: where they meet, and the secret of this run."""

    store: str
    secret: str
    interface: str | None

    def environment(self) -> dict[str, str]:
        """The same as variables."""
        named = {interfaces.VARIABLE: self.interface} if self.interface is not None else {}
        return {"MESHLOOM_STORE": self.store, VARIABLE: self.secret, **named}


def meet_in(folder: Path, interface: str | None) -> Met:
    """Ranks of one host meet in a folder, and speak to each other over loopback unless the user has said otherwise."""
    return Met(folder.as_uri(), secrets.token_hex(32), interface or interfaces.interface_of("127.0.0.1"))


def meet_hosts(plan: Launch) -> Met:
    """All hosts of a run, or an error on each of them."""
    seal, until = Seal(read_secret()), time.monotonic() + plan.start_timeout
    return _Host(plan, seal, until).meet() if plan.node == 0 else _Guest(plan, seal, until).meet()


def _facts(plan: Launch) -> dict[str, Any]:
    """What a launcher says of itself."""
    ranks = hashlib.sha256(str(plan.bindings).encode()).hexdigest()
    hosts = ",".join(f"{name}:{count}" for name, count in plan.bindings.hosts)
    return {"node": plan.node, "run": plan.run_id, "hosts": hosts, "ranks": ranks, "command": shlex.join(plan.typed)}


def _not_met(plan: Launch, reason: str) -> LaunchError:
    return LaunchError(
        f"the {len(plan.bindings.hosts)} hosts did not meet at {plan.endpoint} within {plan.start_timeout} s",
        reason=reason,
        fix="start the same command on every host, each with its --node-rank; the endpoint must be reachable",
    )


class _Host:
    """The first host: it listens."""

    def __init__(self, plan: Launch, seal: Seal, until: float) -> None:
        self._plan, self._seal, self._until = plan, seal, until
        self._own = _facts(plan)
        self._came: queue.SimpleQueue[tuple[socket.socket, str, Any]] = queue.SimpleQueue()
        self._guests: dict[int, tuple[socket.socket, Any]] = {}
        self._refused: dict[str, str] = {}

    def meet(self) -> Met:
        address = _address_here(self._plan)
        _, port = self._plan.place
        with _listen(self._plan, address, port) as door:
            threading.Thread(target=self._greet_all, args=(door,), name="meshloom meeting", daemon=True).start()
            while len(self._guests) + 1 < len(self._plan.bindings.hosts):
                self._admit(*self._next())
            door.shutdown(socket.SHUT_RDWR)  # the thread that greets ends
        session = secrets.token_hex(16)
        store = f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
        for node, (guest, facts) in self._guests.items():
            try:
                _send(guest, self._seal.wrap(f"welcome {facts['number']}", {"store": store, "session": session}))
            except OSError as error:
                raise _not_met(self._plan, f"node {node} came and went: {error.strerror}") from None
            guest.close()
        return Met(store, _derive(self._seal, self._plan, session), _interface(self._plan, address))

    def _next(self) -> tuple[socket.socket, str, Any]:
        try:
            return self._came.get(timeout=max(0.0, self._until - time.monotonic()))
        except queue.Empty:
            came = f"{len(self._guests) + 1} of {len(self._plan.bindings.hosts)} came"
            raise _not_met(self._plan, "; ".join([came, *self._refused.values()])) from None

    def _greet_all(self, door: socket.socket) -> None:
        while True:
            try:
                guest, place = door.accept()
            except OSError:  # the meeting is over
                return
            threading.Thread(target=self._greet, args=(guest, str(place[0])), daemon=True).start()

    def _greet(self, guest: socket.socket, address: str) -> None:
        """In a thread of its own: a guest that says nothing keeps nobody waiting."""
        guest.settimeout(self._plan.start_timeout)
        number = secrets.token_hex(16)
        try:
            _send(guest, _GREETING + number)
            self._came.put((guest, address, self._seal.unwrap(f"hello {number}", _receive(guest))))
        except OSError:  # it has gone, as whoever only looks for open ports
            guest.close()

    def _admit(self, guest: socket.socket, address: str, facts: Any) -> None:
        if facts is None:
            self._refused[address] = f"{address} came with another secret, or is no launcher"
            self._send_away(guest, "refused")
        elif facts["run"] != self._own["run"]:
            self._refused[address] = f"{address} runs another job: {facts['command']}"
            self._send_away(guest, self._complaint(facts, f"another job waits there: {self._own['command']}"))
        elif (wrong := self._find_difference(facts)) is not None:
            for each, told in [(guest, facts), *self._guests.values()]:
                self._send_away(each, self._complaint(told, wrong))
            raise LaunchError(wrong, fix="start the same command on every host, each with its own --node-rank")
        else:
            self._guests[facts["node"]] = guest, facts

    def _find_difference(self, facts: Any) -> str | None:
        node, own = facts["node"], self._own
        if facts["hosts"] != own["hosts"]:
            return f"the hosts differ: node 0 has --hosts {own['hosts']}, node {node} has --hosts {facts['hosts']}"
        if facts["ranks"] != own["ranks"]:
            return f"the bindings of ranks differ between node 0 and node {node}"
        return f"two hosts came as node {node}" if node == 0 or node in self._guests else None

    def _complaint(self, facts: Any, text: str) -> str:
        return self._seal.wrap(f"welcome {facts['number']}", {"error": text})

    def _send_away(self, guest: socket.socket, text: str) -> None:
        try:
            _send(guest, text)
        except OSError:  # it has gone already
            return
        finally:
            guest.close()


class _Guest:
    """Any other host: it comes."""

    def __init__(self, plan: Launch, seal: Seal, until: float) -> None:
        self._plan, self._seal, self._until = plan, seal, until

    def meet(self) -> Met:
        with self._connect() as host:
            own = host.getsockname()[0]
            answer = self._introduce(host)
        if "error" in answer:
            raise LaunchError(
                str(answer["error"]),
                here=shlex.join(self._plan.typed),
                fix="start the same command on every host; two jobs at once need two ports (--rdzv-endpoint)",
            )
        secret = _derive(self._seal, self._plan, answer["session"])
        return Met(answer["store"], secret, _interface(self._plan, own))

    def _connect(self) -> socket.socket:
        source = (_address_of(self._plan.interface, self._plan.place[0]), 0) if self._plan.interface else None
        while True:
            left = max(LOOK, self._until - time.monotonic())
            try:
                return socket.create_connection(self._plan.place, timeout=left, source_address=source)
            except OSError as error:
                if time.monotonic() + LOOK > self._until:
                    raise _not_met(self._plan, f"nobody answers there: {error.strerror or error}") from None
            time.sleep(LOOK)

    def _introduce(self, host: socket.socket) -> Any:
        greeting = self._hear(host, "somebody listens there and says nothing")
        if not greeting.startswith(_GREETING):
            raise _not_met(self._plan, f"somebody else answers there: {greeting[:40]!r}")
        number = secrets.token_hex(16)
        hello = {**_facts(self._plan), "number": number}
        _send(host, self._seal.wrap(f"hello {greeting.removeprefix(_GREETING)}", hello))
        answer = self._hear(host, "the first host waits for others")
        if (found := self._seal.unwrap(f"welcome {number}", answer)) is None:
            raise LaunchError(
                f"this host and the first one, at {self._plan.endpoint}, have different secrets",
                secret=f"{VARIABLE} or {_file()}",
                fix=f"give every host the same: copy the file from the first host, or set {VARIABLE}",
            )
        return found

    def _hear(self, host: socket.socket, otherwise: str) -> str:
        host.settimeout(max(LOOK, self._until - time.monotonic()))
        try:
            return _receive(host)
        except TimeoutError:
            raise _not_met(self._plan, otherwise) from None
        except OSError as error:
            raise _not_met(self._plan, f"the first host is gone: {error}") from None


def _derive(seal: Seal, plan: Launch, session: str) -> str:
    return seal.derive(f"run {plan.run_id} {session}")


def _send(peer: socket.socket, text: str) -> None:
    peer.sendall(text.encode() + b"\n")


def _receive(peer: socket.socket) -> str:
    """One line; an OSError where it never ends, or is none."""
    line = b""
    while not line.endswith(b"\n"):
        more = peer.recv(4096)
        if not more or len(line) > LONGEST:
            raise ConnectionError("it has closed the connection" if not more else "it does not stop talking")
        line += more
        if b"\r" in line:  # HTTP and its kind: their first line is enough
            break
    return line.decode(errors="replace").strip()


# where the first host listens


def _address_here(plan: Launch) -> str:
    """The address of this host at which the others will come."""
    name, port = plan.place
    if plan.interface is not None:
        return _address_of(plan.interface, name)
    try:
        found = [str(place[0]) for *_, place in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise LaunchError(f"the meeting point {plan.endpoint} is not known: {error.strerror}", fix=_FIX) from None
    here = [address for address in found if interfaces.is_local(address)]
    if not here:
        raise LaunchError(
            f"the meeting point {plan.endpoint} ({', '.join(found)}) is not an address of this host, the first one",
            interfaces=_known_interfaces(),
            fix=_FIX,
        )
    if interfaces.is_loopback(here[0]) and name != "localhost" and name != here[0]:
        raise LaunchError(
            f"the meeting point {plan.endpoint} is {here[0]} on this host, where no other host can come",
            interfaces=_known_interfaces(),
            fix=_FIX,
        )
    return here[0]


_FIX = "name the interface that joins the hosts (--interface), or give the address itself (--rdzv-endpoint)"


def _address_of(interface: str, like: str) -> str:
    """The address of an interface; of its IPv6 ones if the meeting point is one."""
    found = interfaces.interfaces().get(interface, [])
    fitting = [address for address in found if (":" in address) == (":" in like)] or found
    if not fitting:
        raise LaunchError(
            f"this host has no interface {interface!r} with an address", interfaces=_known_interfaces(), fix=_FIX
        )
    return fitting[0]


def _known_interfaces() -> str:
    return ", ".join(f"{name} ({found[0]})" for name, found in interfaces.interfaces().items() if found)


def _interface(plan: Launch, address: str) -> str | None:
    return plan.interface or interfaces.interface_of(address)


def _listen(plan: Launch, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise LaunchError(
            f"this host cannot listen at {plan.endpoint}: {'another job is there' if taken else error.strerror}",
            fix=f"give another port on every host, as in --rdzv-endpoint {plan.place[0]}:{port + 1}",
        ) from None


# the secret that hosts share


def read_secret() -> bytes:
    """What the hosts of a run know and nobody else: a variable, or a file of this user, which is made if need be."""
    if settings.is_set(VARIABLE):
        return _check_length(settings.read(VARIABLE), VARIABLE)
    path = _file()
    _make_secret(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor) as file:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
            raise LaunchError(
                f"others can read or write the secret {path}",
                mode=f"{stat.S_IMODE(about.st_mode):04o}, owner {about.st_uid}",
                fix=f"chmod 600 {shlex.quote(str(path))}; if somebody may have read it, delete it instead",
            )
        return _check_length(file.read().strip(), str(path))


def _check_length(text: str, where: str) -> bytes:
    if len(text) < SHORTEST:
        raise LaunchError(
            f"the secret in {where} has {len(text)} characters, of at least {SHORTEST}",
            fix='python -c "import secrets; print(secrets.token_hex(32))" makes one',
        )
    return text.encode()


def _file() -> Path:
    return Path(settings.read(FILE) or Path(settings.read("XDG_CONFIG_HOME"), "meshloom", "secret"))


def _make_secret(path: Path) -> None:
    """A file with a new secret, unless there is one; of two hosts that share a home and come together, one is first."""
    if path.exists():
        return
    draft = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            return
        finally:
            draft.unlink()
    except OSError as error:
        raise LaunchError(
            f"the secret of the hosts cannot be written to {path}: {error.strerror}",
            fix=f"set {VARIABLE} on every host, or {FILE} to a file that you can write",
        ) from error
