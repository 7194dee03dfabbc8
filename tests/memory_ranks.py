"""What ranks run in `test_memory.py` and `test_lists.py`: memory that is read, and scalers, on a split mesh."""

from __future__ import annotations

import gc
from typing import Any

import torch

import meshloom as loom
from meshloom.mesh import HERE


def _tensor(placements: str = "S(0)") -> tuple[torch.Tensor, loom.Tensor]:
    mesh = loom.open_mesh((2,))
    dense = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    return dense, loom.distribute(dense, mesh, placements)


def _moves(story: Any) -> list[str]:
    return [f"{event.kind} {event.bytes}" for event in story.events]


def recorded() -> dict[str, list[str]]:
    """The collectives of each way to the dense value, the second time as well, and of what asks for none."""
    found = {}
    for name in ("to_torch", "data_ptr", "untyped_storage"):
        _, x = _tensor()
        for time in ("first", "second"):
            with loom.record() as story:
                getattr(x, name)()
            found[f"{name}, {time}"] = _moves(story)
            if HERE.rank == 1:  # a copy that only one process lost changes nothing
                vars(x).pop("_dense", None)
                gc.collect()
    _, x = _tensor()
    with loom.record() as story:
        _ = x.stride(), x.is_contiguous(), x.storage_offset(), dir(x)
    found["stride"] = _moves(story)
    return found


def forbidden() -> dict[str, str]:
    """What is refused where communication is forbidden, by name."""
    told = {}
    for name in ("to_torch", "data_ptr", "untyped_storage"):
        _, x = _tensor()
        with loom.communication("forbid"):
            try:
                getattr(x, name)()
            except loom.CommunicationError as error:
                told[name] = str(error).splitlines()[0]
    _, x = _tensor()
    with loom.communication("forbid"):
        told["stride"] = f"{x.stride()} {x.is_contiguous()} {x.storage_offset()}"
    return told


def bytes_of_all() -> int:
    """The memory has the whole value in every process; how many layouts were read."""
    from test_memory import bytes_at, raw

    layouts = ("S(0)", "S(1)", "R", "P(sum)")
    for placements in layouts:
        _, x = _tensor("S(0)" if placements == "P(sum)" else placements)
        if placements == "P(sum)":
            x = x.redistribute("P(sum)")
        assert bytes_at(x) == raw(x.to_torch())
        x.mul_(2)
        assert bytes_at(x) == raw(x.to_torch())
    return len(layouts)


def scaled(placements: str) -> dict[tuple[int | None, bool], tuple[list[float], list[torch.Tensor]]]:
    """Steps with a scaler: which process's part was infinite and whether `fused`, to the scales and the values."""
    return {
        (bad, fused): _scaled(bad, fused, _tensor(placements)[1]) for bad in (None, 0, 1) for fused in (False, True)
    }


def _scaled(bad: int | None, fused: bool, start: loom.Tensor) -> tuple[list[float], list[torch.Tensor]]:
    """Three scaled steps, with an infinite gradient in one process's part at the second."""
    weight = loom.Parameter(start)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    scales, values = [], []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale((weight * weight).sum()).backward()
        if step == 1 and HERE.rank == bad:
            weight.grad.block.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        values.append(weight.detach().to_torch())
    return scales, values


def lists(placements: str) -> float:
    """Optimizers of lists with clipping, split over the processes, beside dense; the largest difference."""
    worst = 0.0
    for flag in ("foreach", "fused"):
        start, placed = _tensor(placements)
        small = torch.arange(3.0)
        dense = [torch.nn.Parameter(start.clone()), torch.nn.Parameter(small.clone())]
        ours = [loom.Parameter(placed), loom.Parameter(loom.distribute(small, placed.mesh, "R"))]
        for parameters in (dense, ours):
            optimizer = torch.optim.AdamW(parameters, lr=0.1, **{flag: True})
            for _ in range(3):
                optimizer.zero_grad()
                (parameters[0].square().sum() * parameters[1].square().sum()).backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
                with loom.communication("forbid"):
                    optimizer.step()
        for mine, theirs in zip(ours, dense, strict=True):
            worst = max(worst, float((mine.detach().to_torch() - theirs.detach()).abs().max()))
    return worst
