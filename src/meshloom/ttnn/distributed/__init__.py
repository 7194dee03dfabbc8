"""Ops with a global meaning on tensors of parts: `ttnn.distributed.matmul(a, b, output=...)` and its kind.

Where `ttnn.matmul` multiplies what each device holds, `ttnn.distributed.matmul` multiplies the wholes that the labels
describe: topologies of the operands are read, communication is planned and done as needed, and the result has the
topology that was asked for. Every op of `ttnn` that is a native op too is here, made when it is first asked for. The
README beside this file has an example. What the original keeps under this name (`ttnn.distributed.open_mesh_device`)
is here too.

>>> import torch
>>> from meshloom import ttnn
>>> with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as mesh:
...     a = ttnn.from_torch(torch.ones(32, 64), layout=ttnn.TILE_LAYOUT, device=mesh,
...                         mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=1))
...     b = ttnn.from_torch(torch.ones(64, 96), layout=ttnn.TILE_LAYOUT, device=mesh)
...     y = ttnn.distributed.matmul(a, b, output=ttnn.PlacementShard(0))
>>> y.shape, y.tensor_topology().placements()
(Shape([4, 96]), [PlacementShard(0)])
"""

from __future__ import annotations

from typing import Any

from meshloom.errors import closest
from meshloom.ttnn import surface
from meshloom.ttnn.distributed import operations

__all__ = operations.names()
to_topology = operations.to_topology


def __getattr__(name: str) -> Any:
    if name in __all__:
        return operations.bridge(name)
    if f"distributed.{name}" in surface.originals():
        return surface.find(name)
    raise AttributeError(
        f"ttnn.distributed has no {name!r}, only matmul and other native ops; {closest(name, __all__)}"
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
