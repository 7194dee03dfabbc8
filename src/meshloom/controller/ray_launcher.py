"""The process that speaks to Ray: it places an actor for every rank, and says how each of them ended.

It has a process of its own, so that the client does not import Ray, and Ray's processes end with it however it ends.
Its first line of input has its orders; when its input ends, the client is done or gone. On its output it says a line
of JSON for every worker that has ended, or why there are none.

Without the address of a Ray cluster it starts one for these workers: on loopback, without a dashboard or statistics,
with the token that it was given and all its files in a folder that goes with it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from meshloom import settings
from meshloom.errors import LaunchError, closest
from meshloom.processes import interfaces
from meshloom.processes.bindings import read_hosts

LOOPBACK = "127.0.0.1"
ROOM = 60.0  # seconds until Ray must have placed the workers
MOMENT = 2.0  # seconds in which workers end by themselves
LONGEST = 400  # characters of what Ray says
STORE = 80 << 20  # bytes of Ray's object store, which nothing is put into: the least that it takes


@dataclass(frozen=True, slots=True)
class Node:
    """A host of a Ray cluster."""

    number: str
    names: tuple[str, ...]
    cores: int


def choose_nodes(nodes: Sequence[Node], workers: int, hosts: Sequence[str] | None) -> list[tuple[Node, int]]:
    """The hosts that get workers, with how many: those named, or one after the other until all have a place.

    >>> a, b = Node("1", ("a", "192.0.2.1"), 4), Node("2", ("b", "192.0.2.2"), 4)
    >>> [(node.names[0], count) for node, count in choose_nodes([a, b], 6, None)]
    [('a', 4), ('b', 2)]
    >>> [(node.names[0], count) for node, count in choose_nodes([a, b], 3, ["192.0.2.2:3"])]
    [('b', 3)]
    """
    if hosts is not None:
        known = {name: node for node in nodes for name in node.names}
        wanted = read_hosts(",".join(hosts))
        for name, _ in wanted:
            if name not in known:
                raise LaunchError(f"the Ray cluster has no host {name!r}", fix=closest(name, known))
        return [(known[name], count) for name, count in wanted]
    found, left = [], workers
    for node in nodes:
        if count := min(left, node.cores):
            found.append((node, count))
            left -= count
    if left:
        raise LaunchError(
            f"the Ray cluster has {workers - left} cores for {workers} workers",
            hosts=", ".join(f"{node.names[0]}:{node.cores}" for node in nodes),
            fix=f"loom.launch(workers={workers - left}), or add a host to the Ray cluster",
        )
    return found


class Rank:
    """The actor: a process of Ray that becomes a worker."""

    def find_place(self) -> tuple[str, int, str]:
        """The address of this host, a free port there, and what tells this host from others."""
        address = find_address()
        with socket.create_server((address, 0)) as free:
            return address, free.getsockname()[1], interfaces.machine()

    def serve(self, environment: dict[str, str], threads: int, folder: str) -> None:
        """Be a worker until the client is done; torch is imported here, with the threads that are meant for it."""
        own = settings.environment()
        own.update({"OMP_NUM_THREADS": str(threads), **environment})
        if not settings.is_set(interfaces.VARIABLE):
            own[interfaces.VARIABLE] = interfaces.interface_of(find_address()) or ""
        if os.path.isdir(folder):
            os.chdir(folder)
        from meshloom.controller.worker import main

        main()


def find_address() -> str:
    """The address of this host, as Ray has it."""
    import ray

    return str(ray.util.get_node_ip_address())


class Actors:
    """The actors of one cluster."""

    def __init__(self, orders: dict[str, Any]) -> None:
        self.orders = orders
        self.ranks: list[Any] = []

    def place(self) -> None:
        """A placement group for every host, and in it an actor for every rank."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self.chosen = choose_nodes(list_nodes(), self.orders["workers"], self.orders["hosts"])
        actor = ray.remote(num_cpus=1, max_restarts=0)(Rank)
        for node, count in self.chosen:
            group = placement_group([{"CPU": count}], bundle_label_selector=[{"ray.io/node-id": node.number}])
            if not group.wait(ROOM):
                raise LaunchError(
                    f"host {node.names[0]} of the Ray cluster had no {count} free cores within {ROOM:.0f} s",
                    cores=node.cores,
                    fix="end what runs there, or launch fewer workers",
                )
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            self.ranks += [actor.options(scheduling_strategy=where).remote() for _ in range(count)]

    def serve(self) -> list[Any]:
        """Let the actors be workers; what stands for the end of each is given."""
        import ray

        places = ray.get([rank.find_place.remote() for rank in self.ranks], timeout=ROOM)
        host = self.orders["client"].split(" ")[0].rpartition(":")[0]
        far = [address for address, _, machine in places if machine != interfaces.machine()]
        if far and interfaces.is_loopback(host):
            raise LaunchError(
                f"workers on {far[0]} cannot reach a client on {host}",
                fix='let it listen where they can: loom.launch(..., on="ray", address="the address of this host")',
            )
        return [
            rank.serve.remote(environment, self._threads(environment), self.orders["folder"])
            for rank, environment in zip(self.ranks, self._environments(*places[0][:2]), strict=True)
        ]

    def _environments(self, address: str, port: int) -> Iterator[dict[str, str]]:
        """What `meshloom run` would tell each rank."""
        secret, rank = secrets.token_hex(32), 0
        for group, (_, count) in enumerate(self.chosen):
            for local in range(count):
                yield {
                    "RANK": str(rank), "WORLD_SIZE": str(self.orders["workers"]), "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(count), "GROUP_RANK": str(group), "MASTER_ADDR": address,
                    "MASTER_PORT": str(port), "MESHLOOM_STORE": f"tcp://{address}:{port}", "MESHLOOM_SECRET": secret,
                    "MESHLOOM_TIMEOUT": str(self.orders["timeout"]), "MESHLOOM_CONTROLLER": self.orders["client"],
                }  # fmt: skip
                rank += 1

    def _threads(self, environment: dict[str, str]) -> int:
        """The cores of a host shared out to its ranks, unless the user has said otherwise."""
        given = self.orders["threads"] or settings.read("OMP_NUM_THREADS")
        node = self.chosen[int(environment["GROUP_RANK"])][0]
        cores = os.cpu_count() or 1 if self.orders["address"] is None else node.cores  # ours counts workers
        return int(given) if given else max(1, cores // int(environment["LOCAL_WORLD_SIZE"]))


def list_nodes() -> list[Node]:
    """The hosts of the Ray cluster that are alive, this one first."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    found = [
        Node(
            each["NodeID"],
            (each["NodeManagerAddress"], each["NodeManagerHostname"]),
            int(each["Resources"].get("CPU", 0)),
        )
        for each in ray.nodes()
        if each["Alive"]
    ]
    return sorted(found, key=lambda node: (node.number != own, node.names, node.number))


def explain_end(error: Exception) -> tuple[bool, str]:
    """Whether memory was short, and how a worker ended, in Ray's words without its advice."""
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):
        return False, f"{type(error.cause).__name__}: {str(error.cause).partition(chr(10))[0]}"
    text = str(error).partition("Some common causes")[0]
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("\t")]
    if isinstance(error, exceptions.OutOfMemoryError):
        return True, f"Ray ended it, since memory was short: {lines[0]}"
    return False, " ".join(line.strip() for line in lines)[:LONGEST]


@contextmanager
def connect(orders: dict[str, Any]) -> Iterator[None]:
    """A connection to the Ray cluster, or one of our own for as long as this lasts."""
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if orders["address"] is None:
        options |= {
            "num_cpus": orders["workers"], "num_gpus": 0, "include_dashboard": False, "object_store_memory": STORE,
            "_node_ip_address": LOOPBACK, "_temp_dir": orders["own_folder"],
        }  # fmt: skip
    try:
        ray.init(address=orders["address"] or "local", **options)
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is about to end
        ray.shutdown()
        shutil.rmtree(orders["own_folder"], ignore_errors=True)


def main() -> None:
    """Start the workers and see to them until they have ended, or the client is done."""
    tell = os.dup(1)
    os.dup2(2, 1)  # what others print is no news
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    orders = json.loads(sys.stdin.buffer.readline())

    def say(**facts: object) -> None:
        os.write(tell, json.dumps(facts).encode() + b"\n")

    try:
        with connect(orders):
            actors = Actors(orders)
            actors.place()
            watch(actors.ranks, actors.serve(), orders["stays"], say)
    except LaunchError as error:
        say(refusal=error.headline, details={name: str(value) for name, value in error.details.items()})
    except Exception as error:
        from ray.exceptions import RayError

        how = explain_end(error)[1] if isinstance(error, RayError) else f"{type(error).__name__}: {error}"
        say(refusal=f"Ray could not start the workers: {how[:LONGEST]}", details={})
        raise


def watch(ranks: list[Any], ends: list[Any], stays: bool, say: Any) -> None:
    """Say how each worker ended, until all have, or the client is done or gone and they do not stay."""
    import ray
    from ray.exceptions import ActorUnavailableError

    numbers = {end: number for number, end in enumerate(ends)}
    while numbers:
        for end in ray.wait(list(numbers), num_returns=len(numbers), timeout=0.2)[0]:
            number = numbers.pop(end)
            try:
                ray.get(end)
            except ActorUnavailableError as error:  # Ray will know more: its process or its host may have died
                say(worker=number, is_memory=False, is_sure=False, how=explain_end(error)[1])
                numbers[ranks[number].find_place.remote()] = number
            except Exception as error:
                is_memory, how = explain_end(error)
                say(worker=number, is_memory=is_memory, is_sure=True, how=how)
        if not stays and select.select([0], [], [], 0)[0] and not os.read(0, 1):
            break
    if numbers:
        ray.wait(list(numbers), num_returns=len(numbers), timeout=MOMENT)
