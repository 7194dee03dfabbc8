"""A data-parallel step beside DDP over a slow link: two hosts that are network namespaces, joined by 1 Gbit/s.

    python -m benchmarks.link

Both sides run in turn in the same two processes, one on each host, and send 84 MB of gradients in every step. The rows
of a batch are so many that backward takes about as long as the sums, on whatever machine this is. A second line says
how much of the sums was exposed: the seconds that a rank waited for them when its backward had ended, of the seconds
from the first byte to the last, whichever rank has more. It needs the right to make network namespaces; without it the
lines are missing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.beside import tell
from benchmarks.processes import DEPTH, WIDTH, beside_ddp, best_of, deep_mlp, start_ranks
from benchmarks.works import training_step

CABLE, RATE, PORT = "cable", "1gbit", 29500
ROWS, MOST = 384, 4096  # per process: what a backward is timed on, and how many there may be
SENDING = DEPTH * WIDTH**2 * 4 * 8 / 1e9  # seconds of the gradients at that rate
STEP, EXPOSED = "deep MLP step", "exposed sums"
WORKS = ((STEP, "DDP, over 1 Gbit/s"), (EXPOSED, "of all, over 1 Gbit/s"))


def ip(*arguments: str) -> None:
    """Run `ip`; an error says what it refused."""
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def two_hosts() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Two network namespaces, each with its address, joined by a link of that rate for as long as the block lasts."""
    hosts = tuple((f"loombench{os.getpid()}{side}", f"10.78.0.{number}") for number, side in ((1, "a"), (2, "b")))
    try:
        for name, _ in hosts:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        (one, _), (other, _) = hosts
        ip("link", "add", CABLE, "netns", one, "type", "veth", "peer", "name", CABLE, "netns", other)
        for name, address in hosts:
            ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
            limit = ("root", "tbf", "rate", RATE, "burst", "256kb", "latency", "50ms")
            _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", CABLE, *limit)
        yield hosts
    finally:
        for name, _ in hosts:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def launch() -> int:
    """A rank on each host; rank 0 prints."""
    with two_hosts() as hosts:
        here = [sys.executable, "-m", "benchmarks.link", *sys.argv[1:]]
        met = {"MASTER_ADDR": hosts[0][1], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": CABLE}
        return start_ranks([["ip", "netns", "exec", name, *here] for name, _ in hosts], met, [0] * len(hosts))


class Sums:
    """When the sums of gradients began and ended, and how long somebody waited for them at the end of backward."""

    def __init__(self) -> None:
        self.begun, self.ended, self.waited = 0.0, 0.0, 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Note what `comms.deferred` does inside."""
        from meshloom.comms import deferred, wire

        begin, settle = wire.begin_sum, deferred.Bucket.settle

        def begun(*given: Any) -> Callable[[], torch.Tensor]:
            self.begun = self.begun or time.perf_counter()
            return begin(*given)

        def settled(bucket: Any) -> None:
            before = time.perf_counter()
            settle(bucket)
            self.ended = time.perf_counter()
            self.waited += self.ended - before

        wire.begin_sum, deferred.Bucket.settle = begun, settled  # type: ignore[method-assign]
        try:
            yield
        finally:
            wire.begin_sum, deferred.Bucket.settle = begin, settle  # type: ignore[method-assign]


def _rows() -> int:
    """As many rows as make backward take as long as sending its gradients, as rank 0 finds; both compute meanwhile."""
    model, x, y = deep_mlp(1, ROWS)
    taken = []
    for _ in range(4):
        loss = torch.nn.functional.mse_loss(model(x), y)
        dist.barrier()
        start = time.perf_counter()
        loss.backward()
        taken.append(time.perf_counter() - start)
    rows = torch.tensor([min(MOST, max(1, round(ROWS * SENDING / min(taken))))])
    dist.broadcast(rows, 0)
    return int(rows)


def rank(scale: float) -> None:
    """One process: time both sides, then look at the sums of three steps of ours."""
    import meshloom as loom

    torch.manual_seed(0)
    mesh = loom.open_mesh((2,), axes=("dp",))
    sides = beside_ddp(*deep_mlp(2, _rows()), mesh, training_step)
    rounds = max(3, int(12 * scale))
    best = best_of(sides, 1, rounds)
    shares = []
    for _ in range(3):
        sums = Sums()
        dist.barrier()
        with sums.watched():
            sides[0]()
        found = torch.tensor([sums.waited, sums.ended - sums.begun])
        both = [torch.empty(2) for _ in range(2)]
        dist.all_gather(both, found)
        shares.append(max((tuple(each.tolist()) for each in both), key=lambda each: each[0] / each[1]))
    if dist.get_rank() == 0:
        tell(WORKS[0], timing=(*best, rounds))
        tell(WORKS[1], timing=(*min(shares, key=lambda each: each[0] / each[1]), len(shares)))


def main() -> int:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=[2], default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args()
    if "RANK" in os.environ:
        rank(given.scale)
        return 0
    try:
        return launch()
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
