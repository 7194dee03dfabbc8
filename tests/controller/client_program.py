"""Clients for the tests of faults: each prints the process ids of its workers, then does what its argument says."""

from __future__ import annotations

import os
import signal
import sys
import time

import meshloom as loom


def main(what: str) -> None:
    cluster = loom.launch(workers=2, timeout=5, threads=1, detach="test-faults" if what == "detach" else None)
    mesh = cluster.open_mesh((2,), axes=("dp",))
    x = loom.arange(6, mesh=mesh, dtype="float32")
    print(*(each["pid"] for each in cluster.counters()), cluster._starter.pid, flush=True)
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "forks":
        if child := os.fork():
            os.waitid(os.P_PID, child, os.WSTOPPED)  # it has said what it has to say
            print(child, x.sum().item(), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            x.sum().item()
        except loom.ClosedError as error:
            print(error.headline, flush=True)
        cluster.close()
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "raises":
        raise SystemExit(3)
    if what == "exits":
        x.sum()
        return
    if what == "detach":
        work = loom.ones(1000, 1000, mesh=mesh)
        for _ in range(30):
            work = work @ work * 0
        cluster.keep(x=x, y=(x * 2).requires_grad_())  # what the workers come to when this process is about to end
        return
    if what == "interrupted":
        try:
            print("waiting", flush=True)
            while True:
                cluster.wait()
        except KeyboardInterrupt:
            print("again", x.sum().item(), flush=True)
            cluster.close()
            return
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1])
