"""The first example: two tensors on a mesh, one product, and what it cost."""

import torch

import meshloom as loom
from meshloom import Replicate, Shard

torch.manual_seed(0)
mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))  # eight virtual devices in this process
x = loom.randn(256, 64, mesh=mesh, placements={"dp": Shard(0)})  # rows over dp, the same on every tp
w = loom.randn(64, 128, mesh=mesh, placements={"tp": Shard(1)})  # columns over tp, the same on every dp

with loom.record() as log:
    y = x @ w
print(y.topology)
print("communicated:", log.bytes, "bytes")

with loom.record() as log:
    total = y.sum()
print("sum:", total.topology.notation, "after", log.bytes, "bytes per device")

whole = y.redistribute({"dp": Replicate(), "tp": Replicate()})
print(loom.draw(y))
torch.testing.assert_close(whole.to_torch(), x.to_torch() @ w.to_torch())
torch.testing.assert_close(total.to_torch(), y.to_torch().sum())
print("equal to the dense product")
