"""One program on 2, 20 and 200 devices: the mesh changes, the program and the answer do not."""

import torch

import meshloom as loom
from meshloom import Shard


def program(mesh: loom.Mesh) -> torch.Tensor:
    """A small network on any mesh with axes dp and tp. The sizes divide none of the meshes."""
    torch.manual_seed(0)
    x = loom.randn(50, 33, mesh=mesh, placements={"dp": Shard(0)})
    up = loom.randn(33, 70, mesh=mesh, placements={"tp": Shard(1)})
    down = loom.randn(70, 9, mesh=mesh, placements={"tp": Shard(0)})
    hidden = (x @ up).relu()
    return loom.softmax(hidden @ down / 70, dim=-1).to_torch()


answers = {}
for shape in ((1, 2), (4, 5), (10, 20)):
    mesh = loom.open_mesh(shape, axes=("dp", "tp"))
    answers[shape] = program(mesh)
    print(f"{mesh.size:>4} devices  {mesh!s:<20} first row {[round(v, 4) for v in answers[shape][0, :4].tolist()]}")

first = answers[(1, 2)]
for answer in answers.values():
    torch.testing.assert_close(answer, first)
largest = max((answer - first).abs().max().item() for answer in answers.values())
print(f"the same answer on every mesh; largest difference {largest:.1e}")
