"""What the ranks of `test_ttnn_faults` run: `fault_program.py` in TTNN's spelling.

What does not depend on it is that program's own. Gradients are not part of TTNN. Lines that a report must name carry a
tag, as in `time.sleep(600)  # @sleep`.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import torch

import meshloom as loom
from fault_program import COUNT, IS_BAD, RANK, TIMEOUT, Scenarios, fault, may_end
from meshloom import ttnn
from meshloom.processes import join

_ = ttnn.open_mesh_device, ttnn.from_torch, ttnn.all_reduce  # loads their modules before the ranks meet


class TtnnScenarios(Scenarios):
    """The same on a mesh of TTNN."""

    def opened(self, shape=(COUNT, 2), check=None):
        """A mesh; the timeout is short only after all have met, since starting may take long on a busy machine."""
        join(timeout=60, check=check)
        mesh = ttnn.open_mesh_device(ttnn.MeshShape(*shape))
        join(timeout=TIMEOUT)
        return mesh

    def rows(self, mesh, width=4):
        x = torch.ones(8 * mesh.get_num_devices(), width)
        return ttnn.from_torch(x, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))

    def step(self, x):
        return ttnn.all_reduce(x).shape  # @step

    def reads_alone(self):
        """One rank reads a tensor, which all have to do."""
        x = self.rows(self.opened())
        self.step(x)
        if IS_BAD:
            fault()
            ttnn.to_torch(x)  # @alone
        time.sleep(0 if IS_BAD else 600)  # @elsewhere

    def branch(self):
        x = self.rows(self.opened())
        fault()
        ttnn.all_gather(x, dim=0) if IS_BAD else ttnn.all_reduce(x)  # @branch

    def shape(self):
        x = self.rows(self.opened(), 8 if IS_BAD else 4)  # @made
        fault()
        ttnn.all_gather(x, dim=0)  # @shape

    def gather(self, x):
        ttnn.all_gather(x, dim=0)  # @late

    def order(self):
        x = self.rows(self.opened())
        fault()
        first, second = (ttnn.all_reduce, ttnn.all_broadcast) if IS_BAD else (ttnn.all_broadcast, ttnn.all_reduce)
        first(x)  # @order
        second(x)

    def one_axis(self):
        """Collectives along one axis of a 2-D grid, where the other group would never notice."""
        mesh = self.opened((2, COUNT // 2), check="off")  # what is given differs, too: let the collective tell
        fault()
        columns = ttnn.ShardTensor2dMesh(mesh, tuple(mesh.shape), dims=(None, 1))
        x = ttnn.from_torch(torch.ones(8, 8 if IS_BAD else 16), device=mesh, mesh_mapper=columns)
        join(check="sample")
        ttnn.all_gather(x, dim=1, cluster_axis=1)  # @one_axis

    def plain_tensors(self):
        mesh = self.opened(check=os.environ.get("FAULT_CHECK"))
        x = ttnn.from_torch(torch.full((8, 4), float(RANK)), device=mesh)  # @plain
        self.step(x)
        print("end")

    def silent_divergence(self):
        """An op that does not communicate, long after the collectives that are always compared."""
        x = self.rows(self.opened(check=os.environ["FAULT_CHECK"]))
        for _ in range(100):
            self.step(x)
        if IS_BAD:
            ttnn.multiply(x, 3)  # @silent
        for _ in range(10):
            self.step(x)
        print("end")

    def differs_at_the_end(self):
        """A tensor of another shape in the last collective, which the default check does not compare."""
        x = self.rows(self.opened(check="sample"))
        for _ in range(70):
            self.step(x)
        ttnn.all_reduce(ttnn.reshape(x, [4, 8]) if IS_BAD else x)  # @end
        if not IS_BAD:
            time.sleep(1)  # the last to leave sees what all did

    def in_a_thread(self):
        x = self.rows(self.opened(check="always"))
        thread = threading.Thread(target=lambda: ttnn.all_gather(x, dim=0) if IS_BAD else ttnn.all_reduce(x))
        thread.start()
        thread.join()
        print("end")

    def never_starts(self):
        if IS_BAD:
            sys.exit(0)
        fault()
        ttnn.open_mesh_device(ttnn.MeshShape(COUNT, 2))  # @never

    def goes_on_until(self):
        """Together, until the test says so; every rank leaves after the same step."""
        x = self.rows(self.opened())
        ends = loom.open_mesh((COUNT,))
        print("READY", flush=True)
        while loom.from_local(torch.tensor([float(may_end())]), ends, "S(0)").sum().item() != COUNT:
            self.step(x)
        print("END")


if __name__ == "__main__":
    getattr(TtnnScenarios(), sys.argv[1])()
