"""Three ways to split a matrix operation over four workers. The program never communicates by hand.

1. A is split by rows, B is on every worker: each worker has rows of the product.
2. A reduction over a split tensor: each worker reduces its part, the parts are combined.
3. A and B are both split on the inner dim: each worker has a summand of the whole product.
"""

import torch

import meshloom as loom
from meshloom import Replicate, Shard
from meshloom.runtime import Log

torch.manual_seed(0)
mesh = loom.open_mesh((4,), axes=("worker",))
dense_a, dense_b = torch.randn(128, 64), torch.randn(64, 32)


def report(title: str, log: Log, result: loom.Tensor, expected: torch.Tensor) -> None:
    """Print what ran and raise unless the values are right."""
    torch.testing.assert_close(result.to_torch(), expected, rtol=1e-4, atol=1e-4)
    print(f"\n{title}\n  result {result.topology}")
    for event in log:
        print(f"  {event.collective}")
    print(f"  {log.bytes} bytes per worker, values as dense")


def row_sharded() -> None:
    """Strategy 1: nothing has to be combined."""
    a = loom.distribute(dense_a, mesh, {"worker": Shard(0)})
    b = loom.distribute(dense_b, mesh, {"worker": Replicate()})
    with loom.record() as log:
        c = a @ b
    assert [tuple(a.shard_at((i,)).shape) for i in range(4)] == [(32, 64)] * 4
    assert tuple(c.shard_at((0,)).shape) == (32, 32)
    assert len(log) == 0
    report("strategy 1: A by rows, B everywhere", log, c, dense_a @ dense_b)


def reductions() -> None:
    """Strategy 2: partial results are combined, and every worker has the answer."""
    a = loom.distribute(dense_a, mesh, {"worker": Shard(0)})
    for name in ("sum", "mean"):
        with loom.record() as log:
            result = getattr(a, name)()
        assert [event.kind for event in log] == ["all_reduce"]
        report(f"strategy 2: {name} of a split tensor", log, result, getattr(dense_a, name)())


def inner_sharded() -> None:
    """Strategy 3: each worker has a summand as large as the result."""
    a = loom.distribute(dense_a, mesh, {"worker": Shard(1)})
    b = loom.distribute(dense_b, mesh, {"worker": Shard(0)})
    with loom.record() as log:
        c = a @ b
    assert [event.kind for event in log] == ["all_reduce"]
    report("strategy 3: A and B on the inner dim", log, c, dense_a @ dense_b)
    with loom.record() as log:
        c = loom.matmul(a, b, output={"worker": Shard(0)})
    assert [event.kind for event in log] == ["reduce_scatter"]
    report("strategy 3, result asked for by rows: half the bytes", log, c, dense_a @ dense_b)


row_sharded()
reductions()
inner_sharded()
