"""Collectives of 64 MB on 8 devices, and copies that read and write the same bytes, into memory that is there."""

from __future__ import annotations

import torch

from benchmarks.timing import Work

DEVICES = 8
BYTES = 64 << 20

# What every system is asked for; `BYTES` is what each device holds, or what all of them hold together.
ALL_REDUCE = ("all-reduce", "64 MB per device")
ALL_GATHER = ("all-gather", "64 MB in all")
# Peers write a result of their own in every call. Ours can write into a tensor that is there, or do as they do.
ALL_REDUCE_NEW = ("all-reduce", "64 MB per device, new result")
ALL_GATHER_NEW = ("all-gather", "64 MB in all, new result")
WORKS = (ALL_REDUCE, ALL_REDUCE_NEW, ALL_GATHER, ALL_GATHER_NEW)


def elements() -> int:
    """How many float32 values `BYTES` are."""
    return BYTES // 4


def reduce_traffic(parts: torch.Tensor) -> Work:
    """Read every row once and write one: the first is copied, the others are only read (summed to one number)."""
    out = torch.zeros_like(parts[0])
    return lambda: (out.copy_(parts[0]), parts[1:].sum())


def gather_traffic(whole: torch.Tensor) -> Work:
    """Read the whole once and write it once."""
    out = torch.zeros_like(whole)
    return lambda: out.copy_(whole)
