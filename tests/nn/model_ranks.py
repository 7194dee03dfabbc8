"""What ranks run in the tests of `nn`: models on a mesh that processes split."""

from __future__ import annotations

import copy
import ctypes
import os
import threading
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


import torch

import meshloom as loom
import model_matrix
from meshloom import Plan


def matrix(cases: list[tuple[str, str]], axes: tuple[str, ...] = ("tp",)) -> list[str]:
    """Models and plans on a mesh of one device per process; what was checked."""
    shape = (int(os.environ["WORLD_SIZE"]),) if len(axes) == 1 else (2, int(os.environ["WORLD_SIZE"]))
    mesh = loom.open_mesh(shape, axes=axes, processes=None if len(axes) == 1 else (1, shape[1]))
    assert mesh.is_split
    for name, plan in cases:
        try:
            model_matrix.check(name, plan, mesh)
        except Exception as error:
            raise AssertionError(f"{name} with plan {plan}") from error
    return [f"{name} {plan}" for name, plan in cases]


def made(layout: str) -> dict[str, torch.Tensor]:
    """What the initialisers of a model on `meta` give where processes split the mesh."""
    import test_materialise

    _, plan = test_materialise.LAYOUTS[layout]
    mesh = loom.open_mesh((2,), axes=("tp",))
    torch.manual_seed(5)
    return test_materialise.tensors(loom.parallelize(test_materialise.on_meta(), mesh, plan))


def memory_used(way: str, file: str, plan: str) -> dict[str, int]:
    """The bytes that a process holds of a model on `meta` after it was made, and the most memory it had on the way.

    Pages of a file that is mapped are not counted: they are not its own.
    """
    import test_materialise

    mesh = loom.open_mesh((2,), axes=("fsdp",))
    with torch.device("meta"):
        model = torch.nn.Sequential(*(test_materialise.wide() for _ in range(16)))
    first = torch.nn.Linear(8, 8, device="meta")
    loom.parallelize(first, mesh, "fsdp")  # what a first use loads is no part of it
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # memory that is freed goes back: M_MMAP_THRESHOLD
    with Watch() as watch:
        loom.parallelize(model, mesh, plan, weights=file if way == "files" else None)
    held = sum(p._data.untyped_storage().nbytes() for p in model.parameters())
    return {"held": held, "peak": watch.peak}


def life() -> dict[str, str]:
    """Modules that go to a mesh of two processes, train there and come back whole; where a weight lay, by plan."""
    from test_parallelize import check_same, gradients, letters, net, refusal

    found = {}
    meshes = {1: loom.open_mesh((2,), axes=("tp",)), 2: loom.open_mesh((2, 2), axes=("dp", "tp"), processes=(1, 2))}
    extra = {
        "activations": Plan(
            {"**.up.weight": "tp=S(0)", "**.down.weight": "tp=S(1)"}, "dp=S(0)",
            inputs={"blocks.*.norm": "tp=S(1)"}, outputs={"blocks.*.down": "tp=S(1)"},
        ),
        "recompute": Plan({"**.weight": "tp=S(0)"}, "dp=S(0), tp=S(1)", recompute=["blocks.*"]),
    }  # fmt: skip
    for name in (*loom.plans.NAMES, *extra):
        mesh = meshes[2] if name in (*model_matrix.FLAT, *extra) else meshes[1]
        assert mesh.is_split
        dense = net(name)
        ours = loom.parallelize(copy.deepcopy(dense), mesh, extra.get(name, name))
        other = copy.deepcopy(ours)
        check_same(gradients(ours, letters()), gradients(dense, letters()))
        check_same({"y": other(letters()).to_torch()}, {"y": dense(letters())})
        found[name] = ours.blocks[0].down.weight.topology.notation
        told = refusal(lambda model=ours, mesh=mesh: loom.parallelize(model, mesh, "data"))
        assert "is on a mesh already" in told
        loom.unparallelize(ours)
        assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), dense.parameters(), strict=True))
        check_same(gradients(ours, letters()), gradients(dense, letters()))
    return found


class Watch:
    """The most anonymous memory of this process above that at the start, looked at all the time."""

    def __enter__(self) -> Watch:
        self.peak, self.start, self.is_over = 0, self._now(), False
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_over = True
        self._thread.join()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, self._now() - self.start)
            if self.is_over:
                return
            time.sleep(0.0005)

    def _now(self) -> int:
        told = Path("/proc/self/status").read_text().split("RssAnon:")[1].split()
        return int(told[0]) * 1024
