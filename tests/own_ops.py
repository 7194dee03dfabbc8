"""Ops of a user's own, for `test_extend.py`: as people write them, with samples, for one process and for ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import extend
from oracle import check_case
from samples import Case, Draw, Operand, Sample, Seeded

Function = Callable[..., Any]


def swiglu(gate, x):
    return F.silu(gate) * x


def scale_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def squared_distance(a, b):
    return (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1)


def log_ratio(x, y, *, scale=None):
    found = (x / y).log()
    return found if scale is None else found * scale


def halves(x):
    first, second = x.chunk(2, -1)
    return first * second.sigmoid()


def centre(x):
    mean = x.mean(-1)
    return x - mean.unsqueeze(-1), mean


# name: the function, what extend.op is told, and sample operands
OWN: dict[str, tuple[Function, dict[str, Any], Sequence[torch.Tensor]]] = {
    "swiglu": (swiglu, {"labels": "..., ... -> ...", "sees_padding": True}, [torch.randn(4, 5), torch.randn(4, 5)]),
    "scale_norm": (scale_norm, {"labels": "...d, d -> ...d", "whole": "d"}, [torch.randn(4, 5), torch.randn(5)]),
    "squared_distance": (
        squared_distance,
        {"labels": "...mk, ...nk -> ...mn", "sums": "k", "sees_padding": True},
        [torch.randn(2, 4, 5), torch.randn(2, 3, 5)],
    ),
    "careful_distance": (
        squared_distance, {"labels": "mk, nk -> mn", "sums": "k"}, [torch.randn(4, 6), torch.randn(6, 6)]
    ),
    "log_ratio": (log_ratio, {"labels": "..., ... -> ..."}, [torch.rand(4, 5) + 0.1, torch.rand(4, 5) + 0.1]),
    "halves": (halves, {"labels": "...d -> ...e"}, [torch.randn(4, 6)]),
    "centre": (centre, {"labels": "...d -> ...d, ..."}, [torch.randn(4, 6)]),
}  # fmt: skip


def _pair(name: str, values: str = "any") -> Callable[[dict[str, Function]], Sample]:
    def bound(ops: dict[str, Function]) -> Sample:
        def sample(d: Draw) -> Case:
            shape = d.shape(1)
            other = d.broadcast_to(shape)
            return Case((Operand(shape, torch.float32, values), Operand(other, torch.float32, values)), ops[name])

        return sample

    return bound


def _normed(ops: dict[str, Function]) -> Sample:
    def sample(d: Draw) -> Case:
        shape = d.shape(1, empty=False)
        return Case((Operand(shape, torch.float32), Operand(shape[-1:], torch.float32)), ops["scale_norm"])

    return sample


def _distances(name: str, batched: bool) -> Callable[[dict[str, Function]], Sample]:
    def bound(ops: dict[str, Function]) -> Sample:
        def sample(d: Draw) -> Case:
            m, n, k = d.size(), d.size(), d.size()
            batch = d.shape(0, 1) if batched else ()
            return Case((Operand((*batch, m, k), torch.float32), Operand((n, k), torch.float32)), ops[name])

        return sample

    return bound


def _one(name: str, even: bool) -> Callable[[dict[str, Function]], Sample]:
    def bound(ops: dict[str, Function]) -> Sample:
        def sample(d: Draw) -> Case:
            last = 2 * d.number(1, 4) if even else d.number(1, 7)
            return Case((Operand((*d.shape(0, 2), last), torch.float32),), ops[name])

        return sample

    return bound


SAMPLES: dict[str, Callable[[dict[str, Function]], Sample]] = {
    "swiglu": _pair("swiglu"),
    "scale_norm": _normed,
    "squared_distance": _distances("squared_distance", True),
    "careful_distance": _distances("careful_distance", False),
    "log_ratio": _pair("log_ratio", "positive"),
    "halves": _one("halves", True),
    "centre": _one("centre", False),
}


@contextmanager
def defined() -> Iterator[dict[str, Function]]:
    """All of them in the op table, and out of it again."""
    ops = {name: extend.op(**told, name=name)(function) for name, (function, told, _) in OWN.items()}
    try:
        yield ops
    finally:
        for name in OWN:
            extend.remove(name)


def compare_on_ranks(cases: int) -> list[str]:
    """Every op on the processes of this run, in so many cases, against dense; the names of those that ran."""
    with defined() as ops:
        for name in ops:
            for number in range(cases):
                draw = Seeded(f"{name} {number}")
                mesh = loom.open_mesh(draw.pick([(2,), (4,), (2, 2), (2, 3)]))
                assert mesh.is_split
                check_case(draw, SAMPLES[name](ops)(draw), mesh)
        return [*ops]
