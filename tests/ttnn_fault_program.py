"""What the ranks of `test_ttnn_faults` run: `fault_program.py` in TTNN's spelling.

Some steps together, then one rank misbehaves as the first argument says. Gradients are not part of TTNN; all else is
the same. Lines that a report must name carry a tag, as in `time.sleep(600)  # @sleep`.
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
from meshloom import ttnn
from meshloom.processes import join

torch.set_num_threads(1)
RANK, COUNT = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TIMEOUT = float(os.environ.get("FAULT_TIMEOUT", "4"))
BAD = int(os.environ.get("FAULT_RANK", "1"))
IS_BAD = RANK == BAD
BEGAN = time.monotonic()
GO_ON = pathlib.Path(*sys.argv[2:3]) / "go_on"  # the test says that the end may come
_ = ttnn.open_mesh_device, ttnn.from_torch, ttnn.all_reduce  # loads their modules before the ranks meet


def opened(shape=(COUNT, 2), check=None):
    """A mesh; the timeout is short only after all have met, since starting may take long on a busy machine."""
    join(timeout=60, check=check)
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(*shape))
    join(timeout=TIMEOUT)
    return mesh


def rows(mesh, width=4):
    x = torch.ones(8 * mesh.get_num_devices(), width)
    return ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))


def step(x):
    return ttnn.all_reduce(x).shape  # @step


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


def kill_before():
    x = rows(opened())
    if IS_BAD:
        die()
    step(x)


def kill_in():
    x = rows(opened())
    step(x)
    if IS_BAD:
        threading.Timer(1.5, die).start()
    else:
        time.sleep(4)
    step(x)


def kill_after():
    x = rows(opened())
    step(x)
    if IS_BAD:
        time.sleep(1)  # what it did is known by then
        die()
    for _ in range(3):
        step(x)


def raises():
    x = rows(opened())
    step(x)
    if IS_BAD:
        fault()
        raise ValueError("the data of this rank is broken")  # @raise
    step(x)


def reads_alone():
    """One rank reads a tensor, which all have to do."""
    x = rows(opened())
    step(x)
    if IS_BAD:
        fault()
        ttnn.to_torch(x)  # @alone
    time.sleep(0 if IS_BAD else 600)  # @elsewhere


def branch():
    x = rows(opened())
    fault()
    ttnn.all_gather(x, dim=0) if IS_BAD else ttnn.all_reduce(x)  # @branch


def shape():
    x = rows(opened(), 8 if IS_BAD else 4)  # @made
    fault()
    ttnn.all_gather(x, dim=0)  # @shape


def order():
    x = rows(opened())
    fault()
    first, second = (ttnn.all_reduce, ttnn.all_broadcast) if IS_BAD else (ttnn.all_broadcast, ttnn.all_reduce)
    first(x)  # @order
    second(x)


def one_axis():
    """Collectives along one axis of a 2-D grid, where the other group would never notice."""
    mesh = opened((2, COUNT // 2), check="off")  # what is given differs, too: let the collective tell
    fault()
    columns = ttnn.ShardTensor2dMesh(mesh, tuple(mesh.shape), dims=(None, 1))
    x = ttnn.from_torch(torch.ones(8, 8 if IS_BAD else 16), device=mesh, mesh_mapper=columns)
    join(check="sample")
    ttnn.all_gather(x, dim=1, cluster_axis=1)  # @one_axis


def plain_tensors():
    mesh = opened(check=os.environ.get("FAULT_CHECK"))
    x = ttnn.from_torch(torch.full((8, 4), float(RANK)), device=mesh)  # @plain
    step(x)
    print("end")


def silent_divergence():
    """An op that does not communicate, long after the collectives that are always compared."""
    x = rows(opened(check=os.environ["FAULT_CHECK"]))
    for _ in range(100):
        step(x)
    if IS_BAD:
        ttnn.multiply(x, 3)  # @silent
    for _ in range(10):
        step(x)
    print("end")


def differs_at_the_end():
    """A tensor of another shape in the last collective, which the default check does not compare."""
    x = rows(opened(check="sample"))
    for _ in range(70):
        step(x)
    ttnn.all_reduce(ttnn.reshape(x, [4, 8]) if IS_BAD else x)  # @end
    if not IS_BAD:
        time.sleep(1)  # the last to leave sees what all did


def in_a_thread():
    x = rows(opened(check="always"))
    thread = threading.Thread(target=lambda: ttnn.all_gather(x, dim=0) if IS_BAD else ttnn.all_reduce(x))
    thread.start()
    thread.join()
    print("end")


def late_mismatch():
    """Different shapes in a collective that "sample" does not compare."""
    mesh = opened(check="sample")
    x = rows(mesh)
    for _ in range(70):
        step(x)
    big = rows(mesh, 4096 if IS_BAD else 512)
    fault()
    for _ in range(80):
        ttnn.all_gather(big, dim=0)  # @late


def sleep():
    x = rows(opened())
    step(x)
    if IS_BAD:
        fault()
        time.sleep(600)  # @sleep
    step(x)


def stuck_in_c():
    """A call into C that signals do not interrupt."""
    x = rows(opened())
    step(x)
    if IS_BAD:
        fault()
        lock = torch.futures.Future()
        lock.wait()  # @stuck
    step(x)


def early():
    x = rows(opened())
    step(x)
    if IS_BAD:
        fault()
        sys.exit(0)
    step(x)


def catches():
    x = rows(opened())
    step(x)
    if IS_BAD:
        fault()
        time.sleep(600)
    for attempt in range(2):
        try:
            step(x)
        except loom.PeerLostError as error:
            print(f"caught {attempt}: {error.headline}", flush=True)
    print("goes on alone", flush=True)


def ends_at_once():
    """Nothing but an open mesh: whoever is first must not leave before the others have met it."""
    opened()
    print("end")


def never_starts():
    if IS_BAD:
        sys.exit(0)
    fault()
    ttnn.open_mesh_device(ttnn.MeshShape(COUNT, 2))  # @never


def goes_on():
    x = rows(opened())
    step(x)
    print("READY", flush=True)
    while True:  # @loop
        step(x)  # @next


def goes_on_until():
    """Together, until the test says so; every rank leaves after the same step."""
    x = rows(opened())
    ends = loom.open_mesh((COUNT,))
    print("READY", flush=True)
    while loom.from_local(torch.tensor([float(may_end())]), ends, "S(0)").sum().item() != COUNT:
        step(x)
    print("END")


def goes_on_but_one():
    """All communicate, but one has long work of its own."""
    x = rows(opened())
    step(x)
    print("READY", flush=True)
    while IS_BAD:
        time.sleep(0.01)  # @busy
    step(x)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
