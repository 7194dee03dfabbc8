"""`ttnn.distributed.matmul` where TTNN's document looks for its tests: row 175 of the checklist.

`pytest tests/ttnn/unit_tests/operations/test_distributed_matmul.py` runs them.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import ttnn

SHAPES = [(1, 1), (1, 8), (2, 4), (4, 8)]
CUTS = [None, -2, -1]  # replicated, by rows, by columns


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def put(x: torch.Tensor, mesh: Any, dim: int | None) -> Any:
    mapper = ttnn.ReplicateTensorToMesh(mesh) if dim is None else ttnn.ShardTensorToMesh(mesh, dim=dim)
    return ttnn.from_torch(x, device=mesh, layout=ttnn.TILE_LAYOUT, mesh_mapper=mapper)


@pytest.mark.parametrize("shape", SHAPES)
def test_row_175_replicated_operands_give_the_standard_matmul_on_every_device(shape: tuple[int, int]) -> None:
    a, b = values(4, 1, 64, 64, seed=0), values(1, 1, 64, 128, seed=1)
    with ttnn.create_mesh_device(ttnn.MeshShape(*shape)) as mesh:
        x, y = put(a, mesh, None), put(b, mesh, None)
        found = ttnn.distributed.matmul(x, y)
        assert list(found.shape) == [4, 1, 64, 128]
        standard = ttnn.to_torch(ttnn.matmul(x, y))
        parts = [ttnn.to_torch(each) for each in ttnn.get_device_tensors(found)]
    assert len(parts) == shape[0] * shape[1]
    assert all(torch.equal(part, standard) for part in parts)


@pytest.mark.parametrize(("left", "right"), [*itertools.product(CUTS, repeat=2)])
def test_row_175_operands_cut_in_any_way_give_the_global_product(left: int | None, right: int | None) -> None:
    a, b = values(2, 1, 64, 64, seed=2), values(1, 1, 64, 128, seed=3)
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as mesh:
        x, y = put(a, mesh, left), put(b, mesh, right)
        with loom.record() as log:
            found = ttnn.distributed.matmul(x, y)
        torch.testing.assert_close(ttnn.to_torch(found), a @ b, rtol=2e-2, atol=0.1)
    assert bool(log.bytes) == ((left, right) not in [(None, None), (-2, None), (None, -1)])
