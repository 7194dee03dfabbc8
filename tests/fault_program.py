"""What the ranks of `test_faults` run: some steps together, then one rank misbehaves as the first argument says.

Lines that a report must name carry a tag, as in `time.sleep(600)  # @sleep`.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import threading
import time

import torch

import meshloom as loom
import meshloom.processes.store

torch.set_num_threads(1)
RANK, COUNT = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TIMEOUT = float(os.environ.get("FAULT_TIMEOUT", "4"))
BAD = int(os.environ.get("FAULT_RANK", "1"))
IS_BAD = RANK == BAD
BEGAN = time.monotonic()
GO_ON = pathlib.Path(*sys.argv[2:3]) / "go_on"  # the test says that the end may come


def may_end():
    """Whether the test says that the end may come; an error if it never does."""
    assert time.monotonic() - BEGAN < 100, "the test has not said that the end may come"
    time.sleep(0.02)
    return GO_ON.exists()


def fault():
    """Say when it happens."""
    print(f"FAULT {time.time()}", flush=True)


def die():
    fault()
    os.kill(os.getpid(), signal.SIGKILL)


class Scenarios:
    """What may happen, by name; TTNN's program has some of it in its own spelling."""

    def opened(self, shape=(COUNT,), axes=("dp",), **options):
        """A mesh; the timeout is short only after all have met, since starting may take long on a busy machine."""
        loom.open_mesh(shape, axes=axes, timeout=60)
        return loom.open_mesh(shape, axes=axes, **{"timeout": TIMEOUT, **options})

    def rows(self, mesh, width=4):
        return loom.ones(8 * COUNT, width, mesh=mesh, placements="S(0)" + ", R" * (len(mesh.shape) - 1))

    def step(self, x):
        return x.sum().item()  # @step

    def gather(self, x):
        x.redistribute("R")  # @late

    def begun(self):
        """Rows, after a first step together."""
        x = self.rows(self.opened())
        self.step(x)
        return x

    def misbehave(self, act):
        """The bad rank does something between two steps of all."""
        x = self.begun()
        if IS_BAD:
            fault()
            act()
        self.step(x)

    def kill_before(self):
        x = self.rows(self.opened())
        if IS_BAD:
            die()
        self.step(x)

    def kill_in(self):
        x = self.begun()
        if IS_BAD:
            threading.Timer(1.5, die).start()
        else:
            time.sleep(4)
        self.step(x)

    def kill_after(self):
        x = self.begun()
        if IS_BAD:
            time.sleep(1)  # what it did is known by then
            die()
        for _ in range(3):
            self.step(x)

    def raises(self):
        def broken():
            raise ValueError("the data of this rank is broken")  # @raise

        self.misbehave(broken)

    def raises_in_backward(self):
        x = self.rows(self.opened()).requires_grad_()

        def broken(gradient):
            fault()
            raise ValueError("no gradient")  # @backward

        y = x * 2
        if IS_BAD:
            y.register_hook(broken)
        y.sum().backward()
        self.step(x.grad)

    def backward_of_a_lost_rank(self):
        mesh = self.opened()
        w = loom.ones(4, 4, mesh=mesh, placements="R").requires_grad_()
        loss = (self.rows(mesh) @ w).sum()
        if IS_BAD:
            die()
        loss.backward()  # @lost_backward
        print(w.grad.sum().item())  # @lost_grad

    def branch(self):
        x = self.rows(self.opened())
        fault()
        x.amax() if IS_BAD else x.sum()  # @branch

    def shape(self):
        x = self.rows(self.opened(), 8 if IS_BAD else 4)  # @made
        fault()
        x.redistribute("R")  # @shape

    def order(self):
        x = self.rows(self.opened())
        fault()
        first, second = ("amax", "amin") if IS_BAD else ("amin", "amax")
        getattr(x, first)()  # @order
        getattr(x, second)()

    def one_axis(self):
        """Collectives along one axis of a 2-D grid, where the other group would never notice."""
        mesh = self.opened((2, COUNT // 2), ("dp", "tp"))
        fault()
        x = loom.ones(8, 8 if IS_BAD else 16, mesh=mesh, placements="R, S(1)")
        loom.collectives.all_gather(x, axis="tp", dim=1)  # @one_axis

    def plain_tensors(self):
        x = self.rows(self.opened(check=os.environ.get("FAULT_CHECK")))
        y = x + torch.full((4,), float(RANK))  # @plain
        print("sum", self.step(y))

    def silent_divergence(self):
        """An op that does not communicate, long after the collectives that are always compared."""
        x = self.rows(self.opened(check=os.environ["FAULT_CHECK"]))
        for _ in range(100):
            self.step(x)
        if IS_BAD:
            x * 3  # @silent
        for _ in range(10):
            self.step(x)
        print("end")

    def differs_at_the_end(self):
        """Another op in the last collective, which the default check does not compare."""
        x = self.rows(self.opened(check="sample"))
        for _ in range(70):
            self.step(x)
        x.amax() if IS_BAD else x.sum()  # @end
        if not IS_BAD:
            time.sleep(1)  # the last to leave sees what all did

    def in_a_thread(self):
        x = self.rows(self.opened(check="always"))
        thread = threading.Thread(target=lambda: x.amax() if IS_BAD else x.sum())
        thread.start()
        thread.join()
        print("end")

    def late_mismatch(self):
        """Different shapes in a collective that "sample" does not compare."""
        mesh = self.opened(check="sample")
        x = self.rows(mesh)
        for _ in range(70):
            self.step(x)
        big = self.rows(mesh, 4096 if IS_BAD else 512)
        fault()
        for _ in range(80):
            self.gather(big)

    def sleep(self):
        self.misbehave(lambda: time.sleep(600))  # @sleep

    def stuck_in_c(self):
        """A call into C that signals do not interrupt."""
        lock = torch.futures.Future()
        self.misbehave(lambda: lock.wait())  # @stuck

    def early(self):
        self.misbehave(lambda: sys.exit(0))

    def catches(self):
        x = self.begun()
        if IS_BAD:
            fault()
            time.sleep(600)
        for attempt in range(2):
            try:
                self.step(x)
            except loom.PeerLostError as error:
                print(f"caught {attempt}: {error.headline}", flush=True)
        print("goes on alone", flush=True)

    def ends_at_once(self):
        """Nothing but an open mesh: whoever is first must not leave before the others have met it."""
        self.opened()
        print("end")

    def never_starts(self):
        if IS_BAD:
            sys.exit(0)
        fault()
        loom.open_mesh((COUNT,))  # @never

    def never_starts_and_one_is_slow(self):
        """The bad rank looks so seldom that rank 0 has long told why the meeting failed."""
        if IS_BAD:
            meshloom.processes.store.LOOK = 4.2
        fault()
        loom.open_mesh((COUNT,))  # @slow

    def goes_on(self):
        x = self.begun()
        print("READY", flush=True)
        while True:  # @loop
            self.step(x)  # @next

    def goes_on_until(self):
        """Together, until the test says so; every rank leaves after the same step."""
        mesh = self.opened()
        x = self.rows(mesh)
        print("READY", flush=True)
        while loom.from_local(torch.tensor([float(may_end())]), mesh, "S(0)").sum().item() != COUNT:
            self.step(x)
        print("END")

    def raises_later(self):
        self.begun()
        print("READY", flush=True)
        while not may_end():
            pass
        self.raises()

    def goes_on_but_one(self):
        """All communicate, but one has long work of its own."""
        x = self.begun()
        print("READY", flush=True)
        while IS_BAD:
            time.sleep(0.01)  # @busy
        self.step(x)


if __name__ == "__main__":
    getattr(Scenarios(), sys.argv[1])()
