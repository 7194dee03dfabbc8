"""One mesh over several processes: run it plainly, or as two ranks with `meshloom run --nproc 2 examples/ranks.py`.

The numbers are the same. Every rank says which part of the mesh it holds, which is not the same.
"""

import torch

import meshloom as loom

mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
print(loom.control(mesh))

x, w = torch.arange(64.0).reshape(8, 8), torch.ones(8, 4)
y = loom.distribute(x, mesh, "S(0), S(1)") @ loom.distribute(w, mesh, "R, S(0)")
assert torch.equal(y.to_torch(), x @ w)
print("equal to the dense product; the sum of all is", y.sum().item())
