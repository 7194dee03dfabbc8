"""What ranks run in the tests of copies between meshes and of pipelines."""

from __future__ import annotations

import os

import torch

import meshloom as loom


def program_on_two_submeshes() -> dict[str, object]:
    """A program whose halves are on different processes: every process runs all of it."""
    count = int(os.environ["WORLD_SIZE"])
    mesh = loom.open_mesh((2, count), axes=("pp", "tp"))
    first, second = mesh.submesh(pp=0), mesh.submesh(pp=1)
    torch.manual_seed(0)
    dense = [torch.randn(7, 6), torch.randn(6, 8), torch.randn(8, 3)]
    x = loom.distribute(dense[0], first, "S(0)")
    w = loom.Parameter(loom.distribute(dense[1], first, "S(1)"))
    v = loom.Parameter(loom.distribute(dense[2], second, "S(0)"))
    hidden = torch.relu(x @ w).redistribute("S(1)", mesh=second)
    loss = (hidden @ v).square().mean()
    loss.backward()
    plain = [each.clone().requires_grad_() for each in dense[1:]]
    expected = (torch.relu(dense[0] @ plain[0]) @ plain[1]).square().mean()
    expected.backward()
    torch.testing.assert_close(loss.detach().to_torch(), expected.detach())
    torch.testing.assert_close(w.grad.to_torch(), plain[0].grad)
    torch.testing.assert_close(v.grad.to_torch(), plain[1].grad)
    assert loss.item() == loss.item()
    optimizer = torch.optim.AdamW([w, v], lr=0.1)
    optimizer.step()
    other = torch.optim.AdamW(plain, lr=0.1)
    other.step()
    torch.testing.assert_close(w.detach().to_torch(), plain[0].detach())
    torch.testing.assert_close(v.detach().to_torch(), plain[1].detach())
    return {"elsewhere": (first.is_elsewhere, second.is_elsewhere), "data": (w._data.is_meta, v._data.is_meta)}
