"""DTensor on virtual ranks in one process (torch's LocalTensor mode), beside ours and dense torch.

Runs as `python -m benchmarks.localtensor --ranks 8` in a process of its own, since the fake process group and the mode
are global; prints one line of JSON per work as soon as it is measured. The mode is entered for DTensor's rounds only,
outside the clock: the rounds of ours and of dense torch run without it.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import moves
from benchmarks.beside import compare, our_work, tell, works_of
from benchmarks.peers import MEMORY
from benchmarks.timing import Side, Work
from benchmarks.works import BATCH, FEATURES, REPLICATED_BYTES, SIZE, mlp, training_step

Make = Callable[[LocalTensorMode, DeviceMesh], tuple[Work, Work]]


def _add(mode: LocalTensorMode, mesh: DeviceMesh) -> tuple[Work, Work]:
    x, y = (torch.randn(32 * mesh.size(), 32) for _ in range(2))
    with mode:
        a, b = (distribute_tensor(each, mesh, [Shard(0)]) for each in (x, y))
    return lambda: a + b, lambda: x + y


def _matmul(first: Placement, second: Placement) -> Make:
    def make(mode: LocalTensorMode, mesh: DeviceMesh) -> tuple[Work, Work]:
        x, y = (torch.randn(SIZE, SIZE) for _ in range(2))
        with mode:
            a, b = distribute_tensor(x, mesh, [first]), distribute_tensor(y, mesh, [second])
        if first != Shard(1):
            return lambda: a @ b, lambda: x @ y
        # DTensor leaves the product partial; the all-reduce belongs to the work
        return lambda: cast(DTensor, a @ b).redistribute(mesh, [Replicate()]), lambda: x @ y

    return make


def _mlp(mode: LocalTensorMode, mesh: DeviceMesh) -> tuple[Work, Work]:
    x, y = torch.randn(BATCH, FEATURES[0]), torch.randn(BATCH, FEATURES[-1])
    dense = mlp()
    copied = copy.deepcopy(dense)
    with mode:
        ours = distribute_module(copied, mesh)
        a, b = (distribute_tensor(each, mesh, [Shard(0)]) for each in (x, y))
    return training_step(ours, a, b), training_step(dense, x, y)


def _all_reduce(mode: LocalTensorMode, mesh: DeviceMesh) -> tuple[Work, Work]:
    x = torch.ones(mesh.size(), moves.elements())
    with mode:
        parts = distribute_tensor(x, mesh, [Shard(0)]).to_local()
        a = DTensor.from_local(parts, mesh, [Partial()])
    return lambda: a.redistribute(mesh, [Replicate()]), moves.reduce_traffic(x)


def _all_gather(mode: LocalTensorMode, mesh: DeviceMesh) -> tuple[Work, Work]:
    x = torch.ones(moves.elements())
    with mode:
        a = distribute_tensor(x, mesh, [Shard(0)])
    return lambda: a.redistribute(mesh, [Replicate()]), moves.gather_traffic(x)


MAKES: dict[str, Make] = {
    "add": _add,
    "matmul row": _matmul(Shard(0), Replicate()),
    "matmul inner": _matmul(Shard(1), Shard(0)),
    "MLP step": _mlp,
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
}


def copies(mode: LocalTensorMode, mesh: DeviceMesh) -> float:
    """How often a replicated tensor is stored: the memory of all ranks, each piece once."""
    size = math.isqrt(REPLICATED_BYTES // 4)
    with mode:
        local = distribute_tensor(torch.randn(size, size), mesh, [Replicate()]).to_local()
    pieces = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts(local)}
    return sum(pieces.values()) / REPLICATED_BYTES


def parts(local: torch.Tensor) -> list[torch.Tensor]:
    """What each rank holds."""
    return list(cast(LocalTensor, local)._local_tensors.values())


@contextmanager
def virtual_ranks(ranks: int) -> Iterator[tuple[LocalTensorMode, DeviceMesh]]:
    """The fake process group, the mode, and a mesh of one axis. Our meshes are opened before it: they would join it."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        mode = LocalTensorMode(ranks)
        with mode:
            mesh = init_device_mesh("cpu", (ranks,))
        yield mode, mesh
    finally:
        dist.destroy_process_group()


def measure(ranks: int, scale: float) -> None:
    """Print the figures of every work on that many virtual ranks."""
    with virtual_ranks(ranks) as place:
        tell(MEMORY, copies=copies(*place))
    for work, (make, seconds) in works_of(MAKES, ranks).items():
        measure_work(work, make, ranks, seconds * scale)


def measure_work(work: tuple[str, str], make: Make, ranks: int, seconds: float) -> None:
    """Print the figures of one work."""
    ours = our_work(work, ranks)
    with virtual_ranks(ranks) as (mode, mesh):
        theirs, dense = make(mode, mesh)
        compare(work, Side(theirs, lambda: mode), ours, dense, seconds)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description="DTensor in LocalTensor mode beside ours, as lines of JSON.")
    parser.add_argument("--ranks", type=int, default=8, help="number of virtual ranks (default 8)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the seconds per work (default 1)")
    options = parser.parse_args()
    measure(options.ranks, options.scale)


if __name__ == "__main__":
    main()
