"""An MLP in TTNN's spelling, four times: data-parallel, tensor-parallel, both, and without saying how.

    python examples/ttnn_mlp.py
    python examples/ttnn_mlp.py --mesh 8x4
    MESHLOOM_SYSTEM=Galaxy python examples/ttnn_mlp.py --mesh 8x4

Change the import to `import ttnn` and the first three run on hardware. Each gives what torch gives; what differs is
what a device holds and what goes over the links.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import meshloom as loom
from meshloom import ttnn


class Weights(NamedTuple):
    """[in, hidden], [hidden], [hidden, out]."""

    up: torch.Tensor
    bias: torch.Tensor
    down: torch.Tensor

    @classmethod
    def draw(cls, width: int, hidden: int, dtype: torch.dtype) -> Weights:
        """Weights that keep the size of their inputs."""
        draw = torch.Generator().manual_seed(0)
        up, down = torch.randn(width, hidden, generator=draw), torch.randn(hidden, width, generator=draw)
        bias = torch.randn(hidden, generator=draw)
        return cls((up / width**0.5).to(dtype), bias.to(dtype), (down / hidden**0.5).to(dtype))


def reference(x: torch.Tensor, w: Weights) -> torch.Tensor:
    """The same in float32 with torch."""
    hidden = torch.nn.functional.gelu(x.float() @ w.up.float() + w.bias.float())
    return hidden @ w.down.float()


def placed(x: torch.Tensor, mesh: Any, rows: int | None = None, columns: int | None = None) -> Any:
    """A tensor on a mesh: the dim that the rows of the mesh cut, and the dim that its columns cut."""
    mapper = ttnn.ShardTensor2dMesh(mesh, tuple(mesh.shape), dims=(rows, columns))
    return ttnn.from_torch(x, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=mapper)


def data_parallel(x: torch.Tensor, w: Weights, mesh: Any) -> torch.Tensor:
    """Every device has all weights and a part of the batch; nothing is communicated."""
    everywhere = ttnn.ReplicateTensorToMesh(mesh)
    up, bias, down = (ttnn.from_torch(each, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=everywhere) for each in w)
    batch = ttnn.from_torch(x, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    y = ttnn.linear(ttnn.linear(batch, up, bias=bias, activation="gelu"), down)
    return ttnn.to_torch(y, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0))


def tensor_parallel(x: torch.Tensor, w: Weights, mesh: Any) -> torch.Tensor:
    """All devices cut the hidden dim, and their partial sums are summed."""
    cut = {dim: ttnn.ShardTensorToMesh(mesh, dim=dim) for dim in (0, 1)}
    up = ttnn.from_torch(w.up, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=cut[1])
    bias = ttnn.from_torch(w.bias, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=cut[0])
    down = ttnn.from_torch(w.down, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=cut[0])
    batch = ttnn.from_torch(x, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=ttnn.ReplicateTensorToMesh(mesh))
    terms = ttnn.linear(ttnn.linear(batch, up, bias=bias, activation="gelu"), down)
    y = ttnn.all_reduce(terms)
    return ttnn.to_torch(ttnn.get_device_tensors(y)[0])


def hybrid(x: torch.Tensor, w: Weights, mesh: Any) -> torch.Tensor:
    """Rows of the mesh cut the batch, its columns the hidden dim: sums go along the columns only."""
    batch = placed(x, mesh, rows=0)
    up, bias, down = placed(w.up, mesh, columns=1), placed(w.bias, mesh, columns=0), placed(w.down, mesh, columns=0)
    terms = ttnn.linear(ttnn.linear(batch, up, bias=bias, activation="gelu"), down)
    y = ttnn.all_reduce(terms, cluster_axis=1)
    return ttnn.to_torch(y)


def unsaid(x: torch.Tensor, w: Weights, mesh: Any) -> torch.Tensor:
    """The same placements, and no collective in the program: it is planned."""
    batch = placed(x, mesh, rows=0)
    up, bias, down = placed(w.up, mesh, columns=1), placed(w.bias, mesh, columns=0), placed(w.down, mesh, columns=0)
    hidden = ttnn.distributed.linear(batch, up, bias=bias, activation="gelu")
    return ttnn.to_torch(ttnn.distributed.matmul(hidden, down))


WAYS: dict[str, Callable[[torch.Tensor, Weights, Any], torch.Tensor]] = {
    "data-parallel": data_parallel,
    "tensor-parallel": tensor_parallel,
    "both": hybrid,
    "unsaid": unsaid,
}


def correlation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's coefficient."""
    return float(torch.corrcoef(torch.stack([found.float().flatten(), expected.float().flatten()]))[0, 1])


def shape(text: str) -> ttnn.MeshShape:
    """A mesh from text such as 2x4."""
    return ttnn.MeshShape(*map(int, text.split("x")))


def main() -> None:
    """Run all four on one mesh and compare them with torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=shape, default="2x4", help="rows x columns of the mesh (default 2x4)")
    sizes = {"batch": (64, "rows of the input"), "width": (256, "columns of the input"), "hidden": (1024, "hidden dim")}
    for name, (size, what) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help=f"{what} (default {size})")
    options = parser.parse_args()
    weights = Weights.draw(options.width, options.hidden, torch.bfloat16)
    x = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = reference(x, weights)
    with ttnn.create_mesh_device(options.mesh) as mesh:
        print(mesh)
        for name, way in WAYS.items():
            with loom.record() as log:
                found = way(x, weights, mesh)
            print(f"{name:<16} PCC {correlation(found, expected):.6f}, {log.bytes} B received by a device")


if __name__ == "__main__":
    main()
