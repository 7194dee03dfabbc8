"""States for tests of checkpoints, and what ranks run: every value follows from its name, so that any rank knows it."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshloom as loom
from meshloom import Mesh, Placement, Replicate, Shard
from meshloom.checkpoint import saving

MESHES = (
    (1,), (2,), (3,), (5,), (8,), (2, 2), (2, 3), (3, 2), (2, 4), (4, 4), (2, 2, 2), (2, 3, 2),
)  # fmt: skip
SPLIT = {1: (2, 3), 2: (4, 3), 3: (3, 2), 4: (2, 4)}  # a mesh for each number of processes


class Net(nn.Module):
    """Uneven sizes, a tied weight, buffers, a number, nothing at all, two dtypes, something beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 7, bias=False).bfloat16()
        self.norm = nn.BatchNorm1d(7)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.note = "new"

    def get_extra_state(self) -> dict[str, Any]:
        return {"note": self.note, "sizes": (1, 2.5)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert state["sizes"] == (1, 2.5)
        self.note = state["note"]


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The value that a tensor of this name has."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    return (drawn * 100).to(dtype)


def placed(name: str, mesh: Mesh, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """Placements that follow from a name: every dim is sharded on some axis now and then, by several too."""
    kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    start = zlib.crc32(name.encode()) >> 3
    return tuple(kinds[(start // 7**axis) % len(kinds)] for axis in range(mesh.ndim))


class Loader:
    """Something with a state of plain values."""

    def __init__(self, place: int) -> None:
        self.place = place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "order": [3, 1, 2], "by": {1: 2.5}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["order"] == [3, 1, 2] and state["by"] == {1: 2.5}
        self.place = state["place"]


def make_state(mesh: Mesh | None, is_saved: bool) -> dict[str, Any]:
    """A state with values that follow from names, or a fresh one to load into; without a mesh it is dense."""
    net = Net()
    fill(net, mesh, is_saved)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25 if is_saved else 0.5, betas=(0.5, 0.75))
    if is_saved:
        net.note = "saved"
        fill_optimizer(net, optimizer)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
    if is_saved:
        scheduler.last_epoch, scheduler._step_count = 3, 4
    mask = value("mask", (9, 5), torch.bool) if is_saved else torch.zeros(9, 5, dtype=torch.bool)
    return {
        "model": net,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": Loader(17 if is_saved else 0),
        "generator": torch.Generator().manual_seed(5 if is_saved else 6),
        "tensors": [on(mesh, "mask", mask), {"dense": torch.arange(4) * is_saved}],
        "step": 300 if is_saved else 0,
        "history": [1.5, None, ("a", float("-inf"))] if is_saved else [],
    }


def on(mesh: Mesh | None, name: str, data: torch.Tensor) -> torch.Tensor:
    return data if mesh is None else loom.distribute(data, mesh, placed(f"{name} {mesh}", mesh, tuple(data.shape)))


def fill(net: nn.Module, mesh: Mesh | None, is_saved: bool) -> None:
    """Give every tensor of a module its value and its place; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in [*net.named_parameters(remove_duplicate=False)]:
        if id(parameter) not in made:
            data = value(name, tuple(parameter.shape), parameter.dtype) if is_saved else torch.zeros_like(parameter)
            data = on(mesh, name, data.detach())
            made[id(parameter)] = nn.Parameter(data) if mesh is None else loom.Parameter(data)
        owner, _, last = name.rpartition(".")
        setattr(net.get_submodule(owner), last, made[id(parameter)])
    for name, buffer in net.named_buffers():
        data = value(name, tuple(buffer.shape), buffer.dtype) if is_saved else torch.zeros_like(buffer)
        owner, _, last = name.rpartition(".")
        net.get_submodule(owner).register_buffer(last, on(mesh, name, data) if data.dim() else data)


def fill_optimizer(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for name, parameter in net.named_parameters():
        if name == "down.weight":
            continue  # one without a state, as of a frozen layer
        moments = {}
        for key in ("exp_avg", "exp_avg_sq"):
            dense = value(f"{name}/{key}", tuple(parameter.shape), torch.float32)  # of another dtype than bf16
            is_loom = isinstance(parameter, loom.Tensor)
            moments[key] = loom.distribute(dense, parameter.mesh, parameter.placements) if is_loom else dense
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments}


def tensors_of(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a state, by name."""
    net, optimizer = state["model"], state["optimizer"]
    yield from net.state_dict(keep_vars=True).items()
    for name, parameter in net.named_parameters():
        for key, each in optimizer.state.get(parameter, {}).items():
            yield f"{name}/{key}", each
    yield "mask", state["tensors"][0]
    yield "dense", state["tensors"][1]["dense"]
    yield "generator", state["generator"].get_state()


def check_state(state: dict[str, Any], mesh: Mesh | None) -> int:
    """An error unless a loaded state has the saved values, bit for bit, where they belong; how many tensors it has."""
    wanted = dict(tensors_of(make_state(None, True)))
    found = {name: each for name, each in tensors_of(state) if not name.endswith("_extra_state")}
    assert set(found) == {name for name in wanted if not name.endswith("_extra_state")}
    for name, each in found.items():
        dense = each.to_torch() if isinstance(each, loom.Tensor) else each
        assert dense.dtype == wanted[name].dtype, name
        assert torch.equal(dense, wanted[name]), name
    for name, parameter in state["model"].named_parameters():
        assert isinstance(parameter, loom.Tensor) == (mesh is not None), name
        for key, each in state["optimizer"].state.get(parameter, {}).items():
            if mesh is not None and key != "step":
                assert each.topology.placements == parameter.topology.placements and each.mesh == mesh, (name, key)
    assert state["model"].head.weight is state["model"].embed.weight
    assert state["model"].note == "saved"
    assert state["step"] == 300 and state["loader"].place == 17
    assert state["history"] == [1.5, None, ("a", float("-inf"))]
    (group,) = state["optimizer"].param_groups
    assert group["lr"] == 0.25 and group["betas"] == (0.5, 0.75)
    assert state["scheduler"].last_epoch == 3
    return len(found)


# What ranks run


def work_while_saving(folder: str) -> int:
    """Threads hold a checkpoint each while the processes communicate and change the state; how often they did."""
    mesh, gate, write, done = loom.open_mesh((4,), axes=("dp",)), threading.Event(), saving.write_file, 0

    def wait_and_write(*args: Any, **kwargs: Any) -> Any:
        assert gate.wait(60)
        return write(*args, **kwargs)

    saving.write_file = wait_and_write  # type: ignore[assignment]
    x = loom.full((64, 1024), 0.0, mesh=mesh, placements={"dp": Shard(0)})
    for step in range(1, 4):
        gate.clear()
        x.fill_(float(step))
        under_way = loom.save({"x": x, "step": step}, f"{folder}/step-{step:06d}", asynchronous=True, keep=2)
        for _ in range(10):
            x.add_(1.0)
            done += (x.sum() / x.numel()).item() > step  # an all-reduce of all processes
        assert not under_way.done
        gate.set()
        under_way.wait()
    found = {"x": x, "step": 0}
    loom.load(f"{folder}/step-000003", into=found)
    assert found["step"] == 3 and bool((x == 3.0).all().item())
    assert sorted(each.name for each in Path(folder).iterdir()) == ["step-000002", "step-000003"]
    return done


def cross(sources: list[str], target: str | None) -> int:
    """Load some checkpoints on the mesh of this number of processes, and write one; how many tensors were compared."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = loom.open_mesh(SPLIT[count])
    assert mesh.is_split == (count > 1)
    read = 0
    for folder in sources:
        state = make_state(mesh, False)
        loom.load(folder, into=state)
        read += check_state(state, mesh)
    if target is not None:
        loom.save(make_state(mesh, True), target, asynchronous=count == 2).wait()
        files = [f"rank-{rank:05d}-000.safetensors" for rank in range(count)]
        assert sorted(each.name for each in Path(target).iterdir()) == ["index.json", *files]
    return read
