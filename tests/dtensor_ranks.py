"""What ranks run in `test_dtensors.py`: DTensors become tensors on a mesh and DTensors again, with their gradients."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import meshloom as loom

SHAPES = ((4, 6), (5, 3), (1, 7), (0, 2), (9, 5))
KINDS = (Shard(0), Shard(1), Replicate())
OPS = {"sum": torch.Tensor.sum, "avg": torch.Tensor.mean, "max": torch.Tensor.amax, "min": torch.Tensor.amin}


def _start() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def check_same(ours: loom.Tensor, theirs: DTensor) -> None:
    """The same global value, the same placements, the same part in this process."""
    assert tuple(ours.shape) == tuple(theirs.shape)
    assert [str(each)[0] for each in ours.placements] == [type(each).__name__[0] for each in theirs.placements]
    torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor(), rtol=0, atol=0)
    if not _is_nested_unevenly(theirs):  # 5 over (2, 2) is 2, 1, 2, 0 here and 2, 1, 1, 1 there
        torch.testing.assert_close(ours.to_local(), theirs.to_local(), rtol=0, atol=0)


def _is_nested_unevenly(theirs: DTensor) -> bool:
    dims = [each.dim for each in theirs.placements if isinstance(each, Shard)]
    return any(dims.count(dim) > 1 and theirs.shape[dim] % 2 for dim in dims)


def there_and_back(shape: tuple[int, ...]) -> int:
    """Every placement, even, uneven and empty, on a device mesh of that shape; how many."""
    _start()
    device_mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
    mesh, count = loom.from_device_mesh(device_mesh), 0
    assert mesh.shape == mesh.processes == shape and loom.current_mesh() is mesh
    for size, placements in itertools.product(SHAPES, itertools.product(KINDS, repeat=len(shape))):
        theirs = distribute_tensor(values(*size), device_mesh, placements)
        ours = loom.from_dtensor(theirs)
        assert ours.mesh == mesh
        check_same(ours, theirs)
        back = ours.to_dtensor()
        assert back.device_mesh is device_mesh and back.placements == theirs.placements
        assert back.stride() == theirs.stride()
        check_same(ours, back)
        check_same(loom.distribute_tensor(values(*size), mesh, placements), theirs)
        count += 1
    return count


def partial_sums() -> int:
    """What is still to be reduced is reduced alike."""
    _start()
    world = dist.get_world_size()
    device_mesh, parts = init_device_mesh("cpu", (world,)), values(world, 4, 3)
    for op, reduce in OPS.items():
        theirs = DTensor.from_local(parts[dist.get_rank()], device_mesh, [Partial(op)])
        ours = loom.from_dtensor(theirs)
        torch.testing.assert_close(ours.to_torch(), reduce(parts, 0))
        torch.testing.assert_close(ours.to_dtensor().full_tensor(), reduce(parts, 0))
        check_same(ours, theirs)
    return len(OPS)


def gradients() -> int:
    """A loss that goes through a DTensor, a tensor on a mesh, and a DTensor again, has the gradients of dense."""
    _start()
    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    mesh = loom.from_device_mesh(device_mesh)
    x, w, count = values(5, 4), values(4, 3) + 1, 0
    for first, second in itertools.product(KINDS, repeat=2):
        dense = [each.clone().requires_grad_() for each in (x, w)]
        expected = torch.autograd.grad(((dense[0] @ dense[1]).tanh() * dense[0].sum()).sum(), dense)
        theirs = distribute_tensor(x, device_mesh, [first]).requires_grad_()
        ours = loom.distribute(
            w, mesh, str(loom.from_dtensor(distribute_tensor(w, device_mesh, [second])).placements[0])
        )
        ours.requires_grad_()
        brought = loom.from_dtensor(theirs)
        loss = ((brought @ ours).to_dtensor().tanh() * theirs.sum()).sum()
        loss.full_tensor().backward()
        torch.testing.assert_close(theirs.grad.full_tensor(), expected[0])
        torch.testing.assert_close(ours.grad.to_torch(), expected[1])
        count += 1
    return count


def refusals() -> list[str]:
    """What cannot be: more devices than processes, other orders of ranks."""
    _start()
    world = dist.get_world_size()
    x = loom.ones(8, mesh=loom.open_mesh((2 * world,), axes=("tp",)), placements="S(0)")
    told = []
    turned = init_device_mesh("cpu", (world,))
    turned._rank_map = turned.mesh.flip(0)
    for wrong in (x.to_dtensor, x.to_local, lambda: loom.distribute(distribute_tensor(values(2), turned, [Shard(0)]))):
        try:
            wrong()
        except loom.MeshloomError as error:
            told.append(str(error))
    return told


def mixed_model() -> Any:
    """A layer of DTensors, then one on a mesh, trained together as a dense pair is; the largest difference."""
    _start()
    device_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    mesh = loom.from_device_mesh(device_mesh)
    torch.manual_seed(0)
    a, b, x = torch.randn(6, 4), torch.randn(3, 6), torch.randn(5, 4)
    first = torch.nn.Parameter(distribute_tensor(a, device_mesh, [Shard(0)]))
    second = loom.Parameter(b, mesh, "S(1)")
    dense = [torch.nn.Parameter(each.clone()) for each in (a, b)]
    optimizers = [torch.optim.SGD([each], lr=0.1) for each in (first, second)] + [torch.optim.SGD(dense, lr=0.1)]
    for _ in range(3):
        for each in optimizers:
            each.zero_grad()
        hidden = F.linear(distribute_tensor(x, device_mesh), first).tanh()
        F.linear(loom.from_dtensor(hidden), second).square().mean().backward()
        F.linear(F.linear(x, dense[0]).tanh(), dense[1]).square().mean().backward()
        for each in optimizers:
            each.step()
    found = (first.detach().full_tensor() - dense[0], second.detach().to_torch() - dense[1])
    return max(each.abs().max().item() for each in found)
