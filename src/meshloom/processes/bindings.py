"""Which process runs where: rank, host, place in a mesh, and the devices it sees. Values that are checked and print.

A `Binding` is one process, a `Bindings` all of a run. A process reads its own with `from_environment`: what torchrun
sets, and for its mesh and devices our variables or those of TT-Metal, which mean the same:

    MESHLOOM_VISIBLE_DEVICES  TT_VISIBLE_DEVICES   the ids of the devices that this process sees
    MESHLOOM_MESH_ID          TT_MESH_ID           which mesh it belongs to
    MESHLOOM_HOST_RANK        TT_MESH_HOST_RANK    its place among the processes of that mesh
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from meshloom import settings
from meshloom.errors import BindingError
from meshloom.mesh import HERE, Process

Environment = Mapping[str, str]

VISIBLE = ("MESHLOOM_VISIBLE_DEVICES", "TT_VISIBLE_DEVICES")
MESH_ID = ("MESHLOOM_MESH_ID", "TT_MESH_ID")
HOST_RANK = ("MESHLOOM_HOST_RANK", "TT_MESH_HOST_RANK")

ALONE = "localhost"  # the host of ranks that name none
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What the launcher and torchrun set for every rank: a file of bindings must not.
_RUN = ("MESHLOOM_LIFELINE", "MESHLOOM_STORE", "MESHLOOM_SECRET")
OWNED = frozenset((*RANKS, "MASTER_ADDR", "MASTER_PORT", *MESH_ID, *HOST_RANK, *_RUN))


@dataclass(frozen=True, slots=True)
class Binding:
    """One process: its rank, where it runs, its place in a mesh, the devices it sees (None: all), its environment.

    >>> print(Binding(1, 1, "a", mesh_id=0, host_rank=1, visible=(2, 3), world_size=2))
    rank  local rank  host  mesh  host rank  devices  environment
    1     1           a     0     1          2,3      -
    """

    rank: int = 0
    local_rank: int = 0
    host: str = ALONE
    mesh_id: int | None = None
    host_rank: int | None = None
    visible: tuple[int, ...] | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    world_size: int = 1

    def __post_init__(self) -> None:
        _check_range("rank", self.rank, self.world_size)
        _check_range("local rank", self.local_rank, self.world_size)
        for name, value in (("mesh id", self.mesh_id), ("host rank", self.host_rank)):
            if value is not None and value < 0:
                raise BindingError(f"{name} {value} of rank {self.rank} is negative", fix=f"{name}s start at 0")
        if self.host_rank is not None and self.mesh_id is None:
            raise BindingError(
                f"rank {self.rank} has host rank {self.host_rank} but no mesh id",
                missing=" or ".join(MESH_ID),
                fix="say which mesh the host rank belongs to",
            )
        _check_visible(self.visible, f"rank {self.rank}")
        _check_overrides(self.overrides, self.rank)

    def environment(self) -> dict[str, str]:
        """The variables that tell a process this binding, apart from those that torchrun sets."""
        told = dict(self.overrides)
        for names, value in ((MESH_ID, self.mesh_id), (HOST_RANK, self.host_rank), (VISIBLE, self._devices())):
            if value is not None:
                told |= dict.fromkeys(names, str(value))
        return told

    def _devices(self) -> str | None:
        return None if self.visible is None else ",".join(map(str, self.visible))

    def __str__(self) -> str:
        return _table([self])

    def cells(self) -> tuple[str, ...]:
        """The row of this process in the printed table."""
        devices = {None: "all", "": "none"}.get(self._devices(), self._devices())
        environment = " ".join(f"{name}={value}" for name, value in self.overrides) or "-"
        return (
            *map(_cell, (self.rank, self.local_rank, self.host, self.mesh_id, self.host_rank, devices)),
            environment,
        )


@dataclass(frozen=True, slots=True)
class Bindings:
    """Every process of a run: ranks without gaps, each host and mesh counted from 0, no device seen twice on a host.

    >>> print(Bindings.on([("a", 2), ("b", 1)]))
    rank  local rank  host  mesh  host rank  devices  environment
    0     0           a     -     -          all      -
    1     1           a     -     -          all      -
    2     0           b     -     -          all      -
    """

    rows: tuple[Binding, ...]

    def __post_init__(self) -> None:
        if not self.rows:
            raise BindingError("there are no ranks", fix="bind at least rank 0")
        _check_counted("rank", "the run", [row.rank for row in self.rows])
        if [row.rank for row in self.rows] != sorted(row.rank for row in self.rows):
            raise BindingError("the rows are not in the order of their ranks", fix="sort them by rank")
        for row in self.rows:
            if row.world_size != len(self.rows):
                raise BindingError(f"rank {row.rank} counts {row.world_size} ranks, but {len(self.rows)} are bound")
        _check_hosts(self.rows)
        _check_meshes(self.rows)
        _check_devices(self.rows)

    @classmethod
    def of(cls, rows: Iterable[Binding]) -> Bindings:
        """The bindings of these processes, in the order of their ranks; those of a mesh without host ranks get them."""
        rows = sorted(rows, key=lambda row: row.rank)
        return cls(tuple(_with_host_ranks([replace(row, world_size=len(rows)) for row in rows])))

    @classmethod
    def on(cls, hosts: Sequence[tuple[str, int]]) -> Bindings:
        """So many ranks on each host, counted through."""
        places = [(name, local) for name, count in hosts for local in range(count)]
        rows = [Binding(rank, local, name, world_size=len(places)) for rank, (name, local) in enumerate(places)]
        return cls(tuple(rows))

    def placed(self, hosts: Sequence[tuple[str, int]]) -> Bindings:
        """The same ranks on these hosts; hosts that the bindings name already must be these."""
        if {row.host for row in self.rows} != {ALONE}:
            if self.hosts != tuple(hosts):
                raise BindingError(f"the ranks are bound to {_name_hosts(self.hosts)}, not to {_name_hosts(hosts)}")
            return self
        if sum(count for _, count in hosts) != len(self.rows):
            raise BindingError(f"{len(self.rows)} ranks are bound, but the hosts {_name_hosts(hosts)} have others")
        places = Bindings.on(hosts)
        moved = (replace(a, host=b.host, local_rank=b.local_rank) for a, b in zip(self.rows, places, strict=True))
        return Bindings(tuple(moved))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Binding]:
        return iter(self.rows)

    def __getitem__(self, rank: int) -> Binding:
        if not 0 <= rank < len(self.rows):
            raise BindingError(f"rank {rank} is not bound", fix=f"ranks go from 0 to {len(self.rows) - 1}")
        return self.rows[rank]

    @property
    def hosts(self) -> tuple[tuple[str, int], ...]:
        """Every host with its number of ranks, in the order of ranks."""
        return tuple((host, len(list(rows))) for host, rows in groupby(self.rows, lambda row: row.host))

    def __str__(self) -> str:
        return _table(self.rows)


def read_hosts(text: str) -> tuple[tuple[str, int], ...]:
    """Hosts and their numbers of ranks from text.

    >>> read_hosts("a:4,b:2")
    (('a', 4), ('b', 2))
    """
    hosts = []
    for part in text.split(","):
        name, _, count = part.strip().rpartition(":")
        if not name or not count.isdecimal() or int(count) < 1:
            raise BindingError(
                f"{part!r} is not a host with a number of ranks", given=text, fix="write name:ranks, as in a:4,b:4"
            )
        hosts.append((name, int(count)))
    repeated = [name for name, times in Counter(name for name, _ in hosts).items() if times > 1]
    if repeated:
        raise BindingError(f"host {repeated[0]!r} is named twice", given=text, fix="name each host once")
    return tuple(hosts)


def from_environment(environment: Environment | None = None) -> Binding:
    """The binding of this process; rank 0 of 1 where nothing is set, an error where only half of it is.

    >>> from_environment({"TT_VISIBLE_DEVICES": "2,3", "TT_MESH_ID": "0", "TT_MESH_HOST_RANK": "1"}).visible
    (2, 3)
    """
    given = settings.environment() if environment is None else environment
    rank, world_size, local_rank = _read_ranks(given)
    return Binding(rank, local_rank, socket.gethostname(), *read_place(given), (), world_size)


Place = tuple[int | None, int | None, tuple[int, ...] | None]


def read_place(environment: Environment | None = None) -> Place:
    """The mesh of this process, its place among the processes of that mesh, and the devices that it sees.

    >>> read_place({"TT_MESH_ID": "0", "TT_MESH_HOST_RANK": "1"})
    (0, 1, None)
    """
    given = settings.environment() if environment is None else environment
    mesh_id, host_rank = _number(given, MESH_ID), _number(given, HOST_RANK)
    if host_rank is not None and mesh_id is None:
        name = next(name for name in HOST_RANK if name in given)
        raise BindingError(
            f"{name}={host_rank} is set without a mesh id",
            missing=" or ".join(MESH_ID),
            fix=f"set both, as in {MESH_ID[0]}=0 {HOST_RANK[0]}={host_rank}, or neither",
        )
    return mesh_id, host_rank, visible_devices(given)


def process() -> Process:
    """This process: its rank, and how many run the program together; before they meet, as the environment has it.

    >>> process()
    Process(rank=0, count=1)
    """
    if HERE.count > 1:
        return HERE
    rank, count, _ = _read_ranks(settings.environment())
    return Process(rank, count)


def visible_devices(environment: Environment | None = None) -> tuple[int, ...] | None:
    """The ids of the devices that this process may see, or None where nothing restricts them.

    >>> visible_devices({"TT_VISIBLE_DEVICES": "0,1"}), visible_devices({})
    ((0, 1), None)
    """
    name, text = _agree(settings.environment() if environment is None else environment, VISIBLE)
    return None if text is None else read_devices(text, name)


def read_devices(text: str, name: str = "devices") -> tuple[int, ...]:
    """Device ids from text; empty text is no device at all."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if not all(part.isdecimal() for part in parts):
        raise BindingError(f"{name}={text!r} is not a list of device ids", fix="write ids with commas, as in 0,1")
    ids = tuple(map(int, parts))
    _check_visible(ids, name)
    return ids


def _read_ranks(given: Environment) -> tuple[int, int, int]:
    """Rank, number of ranks and local rank, from torchrun's variables."""
    if not any(given.get(name) for name in RANKS):
        return 0, 1, 0
    missing = [name for name in NEEDED if not given.get(name)]
    if given.get("LOCAL_WORLD_SIZE") and not given.get("LOCAL_RANK"):
        missing.append("LOCAL_RANK")
    if missing:
        found = " ".join(f"{name}={given[name]}" for name in (*RANKS, *NEEDED[2:]) if given.get(name))
        raise BindingError(
            f"the environment binds this process by halves: {', '.join(missing)} not set",
            found=found,
            fix="start it with `meshloom run` or torchrun, set what is missing, or unset the rest",
        )
    rank, world_size = _integer(given, "RANK"), _integer(given, "WORLD_SIZE")
    local_rank = _integer(given, "LOCAL_RANK") if given.get("LOCAL_RANK") else rank
    local_size = _integer(given, "LOCAL_WORLD_SIZE") if given.get("LOCAL_WORLD_SIZE") else world_size
    _check_range("RANK", rank, world_size)
    _check_range("LOCAL_RANK", local_rank, local_size)
    if local_size > world_size:
        raise BindingError(f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={world_size}")
    _check_range("MASTER_PORT", _integer(given, "MASTER_PORT"), 65536)
    return rank, world_size, local_rank


def _agree(given: Environment, names: tuple[str, str]) -> tuple[str, str | None]:
    """What two variables of one meaning say, with the name of the one that says it."""
    told = [(name, given[name]) for name in names if name in given]
    if len({text.replace(" ", "") for _, text in told}) > 1:
        raise BindingError(
            "two variables of one meaning differ: " + ", ".join(f"{name}={text}" for name, text in told),
            fix=f"unset one of them, or set both to {told[0][1]}",
        )
    return told[0] if told else (names[0], None)


def _number(given: Environment, names: tuple[str, str]) -> int | None:
    name, text = _agree(given, names)
    return None if text is None else _integer({name: text}, name)


def _integer(given: Environment, name: str) -> int:
    text = given[name].strip()
    if not text.isdecimal():
        raise BindingError(f"{name}={given[name]!r} is not a number", fix=f"set {name} to 0, 1, 2 and so on")
    return int(text)


def _check_range(name: str, value: int, size: int) -> None:
    if not 0 <= value < size:
        raise BindingError(f"{name} {value} is out of range for {size}", fix=f"it goes from 0 to {size - 1}")


def _check_visible(visible: tuple[int, ...] | None, where: str) -> None:
    repeated = [device for device, times in Counter(visible or ()).items() if times > 1]
    if repeated:
        raise BindingError(f"{where} names device {repeated[0]} twice", found=",".join(map(str, visible or ())))


def _check_overrides(overrides: tuple[tuple[str, str], ...], rank: int) -> None:
    for name, _ in overrides:
        if not name or "=" in name or "\0" in name:
            raise BindingError(f"{name!r} of rank {rank} is not the name of a variable")
        if name in OWNED:
            raise BindingError(
                f"rank {rank} overrides {name}, which the launcher sets", fix=f"take {name} out of the overrides"
            )


def _check_counted(what: str, where: str, found: Sequence[int]) -> None:
    """An error unless the numbers are 0, 1, 2... each once."""
    repeated = [number for number, times in Counter(found).items() if times > 1]
    if repeated:
        raise BindingError(f"{what} {repeated[0]} is bound twice in {where}", found=sorted(found))
    missing = sorted(set(range(len(found))) - set(found))
    if missing:
        raise BindingError(
            f"{what} {missing[0]} is missing in {where}",
            found=sorted(found),
            fix=f"{what}s go from 0 to {len(found) - 1} without gaps",
        )


def _check_hosts(rows: Sequence[Binding]) -> None:
    runs = [host for host, _ in groupby(rows, lambda row: row.host)]
    apart = [host for host, times in Counter(runs).items() if times > 1]
    if apart:
        raise BindingError(
            f"the ranks of host {apart[0]!r} do not follow each other",
            found=", ".join(f"{row.rank} on {row.host}" for row in rows),
            fix="number the ranks host by host",
        )
    for host in runs:
        _check_counted("local rank", f"host {host!r}", [row.local_rank for row in rows if row.host == host])


def _check_meshes(rows: Sequence[Binding]) -> None:
    ids = {row.mesh_id for row in rows}
    if None in ids and len(ids) > 1:
        unbound = [row.rank for row in rows if row.mesh_id is None]
        raise BindingError(
            f"rank {unbound[0]} has no mesh id while others do", missing="mesh_id", fix="bind every rank, or none"
        )
    for mesh_id in ids - {None}:
        ranks = [row.host_rank for row in rows if row.mesh_id == mesh_id]
        if None in ranks and set(ranks) != {None}:
            raise BindingError(
                f"some ranks of mesh {mesh_id} have a host rank and some have none",
                found=ranks,
                missing="mesh_host_rank",
                fix="give a host rank to every rank of the mesh, or to none",
            )
        if None not in ranks:
            _check_counted("host rank", f"mesh {mesh_id}", [rank for rank in ranks if rank is not None])


def _check_devices(rows: Sequence[Binding]) -> None:
    seen: dict[tuple[str, int], int] = {}
    for row in rows:
        for device in row.visible or ():
            other = seen.setdefault((row.host, device), row.rank)
            if other != row.rank:
                raise BindingError(
                    f"device {device} of host {row.host!r} is seen by rank {other} and by rank {row.rank}",
                    fix="give each device to one rank",
                )


def _with_host_ranks(rows: Sequence[Binding]) -> Iterator[Binding]:
    """The rows with host ranks counted through, in meshes that have none."""
    counts: Counter[int] = Counter()
    told = {row.mesh_id for row in rows if row.host_rank is not None}
    for row in rows:
        if row.mesh_id is None or row.mesh_id in told:
            yield row
        else:
            yield replace(row, host_rank=counts[row.mesh_id])
            counts[row.mesh_id] += 1


_HEAD = ("rank", "local rank", "host", "mesh", "host rank", "devices", "environment")


def _name_hosts(hosts: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"{name}:{count}" for name, count in hosts)


def _cell(value: object) -> str:
    return "-" if value is None else str(value)


def _table(rows: Iterable[Binding]) -> str:
    lines = [_HEAD, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
