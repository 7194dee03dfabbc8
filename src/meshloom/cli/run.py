"""Run a script as several processes, on one host or on several; inside it `open_mesh` splits its mesh over them."""

from __future__ import annotations

import argparse
import getpass
import hashlib
import ipaddress
import json
import os
import shlex
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshloom import settings
from meshloom.cli.merging import WAIT
from meshloom.errors import LaunchError, message

if TYPE_CHECKING:
    from meshloom.processes.bindings import Binding, Bindings

PORT = 29500  # torchrun's own
ENTRY = str(Path(__file__).with_name("rank.py"))

EXAMPLES = """
examples:
  meshloom run --nproc 4 train.py --lr 0.1           four processes on this host
  meshloom run --nproc 4 -m package.train            a module instead of a file
  meshloom run --hosts a:4,b:4 --node-rank 0 train.py     on host a
  meshloom run --hosts a:4,b:4 --node-rank 1 train.py     on host b: they meet at a, port 29500
  meshloom run --bindings ranks.yaml train.py        ranks, meshes, devices and variables from a file
  meshloom run --nproc 4 --dry-run train.py          print what would run

The output of the ranks is shown as they speak: [rank 1] before what one says, [all 4] before what all say. Options of
the launcher stand before the script; what follows it belongs to the script. Exit code: 0, 1 if a rank failed, 130
after Ctrl-C.
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `meshloom run` takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    where = parser.add_argument_group("where")
    where.add_argument("-n", "--nproc", type=_positive, help="the number of processes on this host")
    where.add_argument("--hosts", help="every host with its number of processes, as a:4,b:4, the same on each of them")
    where.add_argument("--node-rank", type=_natural, help="which of the hosts this is (default: found by its name)")
    where.add_argument("--bindings", type=Path, help="a YAML file: rank, mesh id, host rank, devices, variables")
    meeting = parser.add_argument_group("how hosts meet (as in torchrun)")
    meeting.add_argument("--rdzv-endpoint", help=f"host:port of the meeting point (default: the first host, {PORT})")
    meeting.add_argument(
        "--rdzv-backend", choices=("static",), help="the only one: torch's c10d unpickles what it meets"
    )
    meeting.add_argument(
        "--rdzv-id", help="a name for this run, the same on every host (default: from user and command)"
    )
    meeting.add_argument("--interface", help="the network interface that joins the hosts (GLOO_SOCKET_IFNAME)")
    meeting.add_argument("--start-timeout", type=_positive, default=300, help="seconds to wait for hosts (%(default)s)")
    how = parser.add_argument_group("how it runs")
    how.add_argument("--timeout", type=_seconds, help="seconds that a collective may take (MESHLOOM_TIMEOUT)")
    how.add_argument("--check", choices=("always", "sample", "off"), help="compare what ranks do (MESHLOOM_CHECK)")
    how.add_argument("--hold", type=_seconds, default=WAIT, help="seconds a line waits for other ranks (%(default)s)")
    how.add_argument("--log-dir", type=Path, help="a folder for the output of every rank, one file per stream")
    how.add_argument("--dry-run", action="store_true", help="print the ranks, their environment and commands, and end")
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the file to run")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")


def run(options: argparse.Namespace) -> None:
    """Print what would run, or run it."""
    plan = plan_launch(options)
    if options.dry_run:
        print(plan)
        return
    _check_script(options)
    if plan.log_dir is not None:
        _check_folder(plan.log_dir)
    from meshloom.cli.launching import launch

    launch(plan)


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything that is decided before the first rank starts."""

    bindings: Bindings
    node: int
    typed: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    endpoint: str | None
    interface: str | None
    run_id: str
    start_timeout: int
    log_dir: Path | None
    hold: float

    @property
    def command(self) -> tuple[str, ...]:
        """What a rank runs: the script, as it was typed, after the line to the launcher."""
        return (sys.executable, "-u", ENTRY, *self.typed)

    @property
    def has_several_hosts(self) -> bool:
        """Whether hosts have to meet before ranks start."""
        return len(self.bindings.hosts) > 1

    @property
    def place(self) -> tuple[str, int]:
        """The meeting point: a name or an address, and a port."""
        assert self.endpoint is not None
        name, _, port = self.endpoint.rpartition(":")
        return name.strip("[]"), int(port)

    @property
    def local(self) -> tuple[Binding, ...]:
        """The ranks of this host."""
        host, _ = self.bindings.hosts[self.node]
        return tuple(binding for binding in self.bindings if binding.host == host)

    def environment_of(self, rank: int) -> dict[str, str]:
        """What the launcher adds to a rank's environment: torchrun's own variables, the settings, the binding."""
        binding = self.bindings[rank]
        return {**self._torchruns(binding), **dict(self.settings), **self._threads(rank), **binding.environment()}

    def _threads(self, rank: int) -> dict[str, str]:
        """The cores of a host shared out to its ranks, unless the user has said otherwise."""
        if settings.is_set("OMP_NUM_THREADS"):
            return {}
        ranks = dict(self.bindings.hosts)[self.bindings[rank].host]
        return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))}

    def __str__(self) -> str:
        head = f"{_count(len(self.bindings), 'rank')} on {_count(len(self.bindings.hosts), 'host')}"
        meeting = f", meeting at {self.endpoint}" if self.has_several_hosts else ""
        ranks = "\n\n".join(self._rank_line(binding) for binding in self.bindings)
        return f"{head}{meeting}\n\n{self.bindings}\n\n{ranks}"

    def _rank_line(self, binding: Binding) -> str:
        told = self.environment_of(binding.rank)
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in told.items())
        command = shlex.join(self.command)
        return message(f"rank {binding.rank} on {binding.host}", environment=variables, command=command)

    def _torchruns(self, binding: Binding) -> dict[str, str]:
        """The variables that torchrun sets; rank 0 holds whatever store a program of plain torch opens there."""
        names = [host for host, _ in self.bindings.hosts]
        found: dict[str, object] = {
            "RANK": binding.rank,
            "WORLD_SIZE": len(self.bindings),
            "LOCAL_RANK": binding.local_rank,
            "LOCAL_WORLD_SIZE": dict(self.bindings.hosts)[binding.host],
            "GROUP_RANK": names.index(binding.host),
            "GROUP_WORLD_SIZE": len(names),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": False,
        }
        if self.endpoint is not None:
            found |= dict(zip(("MASTER_ADDR", "MASTER_PORT"), self.place, strict=True))
        return {name: str(value) for name, value in found.items()}


def plan_launch(options: argparse.Namespace) -> Launch:
    """The launch that the command line asks for."""
    bindings = _bindings(options)
    hosts = bindings.hosts
    typed = (*(["-m"] if options.module else []), options.script, *options.args)
    return Launch(
        bindings=bindings,
        node=_node(options, hosts),
        typed=typed,
        settings=_settings(options),
        endpoint=_endpoint(options.rdzv_endpoint, hosts),
        interface=options.interface or (settings.read("GLOO_SOCKET_IFNAME") or None),
        run_id=options.rdzv_id or _run_id(typed),
        start_timeout=options.start_timeout,
        log_dir=options.log_dir,
        hold=options.hold,
    )


def _run_id(typed: tuple[str, ...]) -> str:
    """A name that two jobs do not share, unless one user runs the same command twice."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a number without a name
        user = str(os.getuid())
    return hashlib.sha256(json.dumps([user, *typed]).encode()).hexdigest()[:16]


def _bindings(options: argparse.Namespace) -> Bindings:
    from meshloom.processes.bindings import ALONE, Bindings, read_hosts
    from meshloom.processes.rank_file import read_bindings

    hosts = read_hosts(options.hosts) if options.hosts else None
    if options.bindings:
        found = read_bindings(options.bindings)
        bindings = found if hosts is None else found.placed(hosts)
    elif hosts is not None:
        bindings = Bindings.on(hosts)
    elif options.nproc is None:
        raise LaunchError("the number of ranks is not given", fix="add --nproc 4, --hosts a:4,b:4 or --bindings FILE")
    else:
        return Bindings.on([(ALONE, options.nproc)])
    wrong = next((host for host in bindings.hosts if options.nproc not in (None, host[1])), None)
    if wrong is not None:
        raise LaunchError(
            f"--nproc {options.nproc} contradicts {wrong[1]} ranks on {wrong[0]}", fix="leave out --nproc"
        )
    return bindings


def _node(options: argparse.Namespace, hosts: tuple[tuple[str, int], ...]) -> int:
    names = [name for name, _ in hosts]
    if options.node_rank is not None:
        if options.node_rank >= len(names):
            raise LaunchError(
                f"--node-rank {options.node_rank} is out of range for {_count(len(names), 'host')}",
                fix=f"it goes from 0 to {len(names) - 1}",
            )
        return int(options.node_rank)
    if len(names) == 1 or options.dry_run:
        return 0
    own = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    found = [index for index, name in enumerate(names) if name in own]
    if not found:
        raise LaunchError(
            f"this host ({socket.gethostname()}) is none of {', '.join(names)}",
            missing="--node-rank",
            fix="say which of the hosts this is: --node-rank 0 for the first",
        )
    return found[0]


def _endpoint(given: str | None, hosts: tuple[tuple[str, int], ...]) -> str | None:
    """host:port; None on one host, where nobody has to come."""
    if given is None:
        return f"{hosts[0][0]}:{PORT}" if len(hosts) > 1 else None
    name, _, port = given.rpartition(":")
    if _is_ipv6(given) or _is_ipv6(name):  # fd77::1:29500 could be read in two ways
        address = given if _is_ipv6(given) else name
        raise LaunchError(
            f"--rdzv-endpoint {given} is an IPv6 address without brackets",
            fix=f"write [{address}]:port, as in [{address}]:{PORT}",
        )
    if not name or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise LaunchError(f"--rdzv-endpoint {given} has no port", fix=f"write host:port, as in {hosts[0][0]}:{PORT}")
    return given


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _settings(options: argparse.Namespace) -> tuple[tuple[str, str], ...]:
    given = {"MESHLOOM_TIMEOUT": options.timeout, "MESHLOOM_CHECK": options.check}
    return tuple((name, str(value)) for name, value in given.items() if value is not None)


def _check_script(options: argparse.Namespace) -> None:
    if not options.module and not Path(options.script).exists():
        raise LaunchError(
            f"there is no script {options.script}", folder=Path.cwd(), fix="for a module, put -m before it"
        )


def _check_folder(folder: Path) -> None:
    """An error before anything starts if the logs could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise LaunchError(
            f"the log folder {folder} cannot be written: {error.strerror}", fix="give another --log-dir"
        ) from error


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 1, 2, 4")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0, 1, 2")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
