"""Attention whose sequence lies on several processes, against dense attention: what test_ring.py runs on ranks."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import meshloom as loom


def attention_equals_dense(shape: tuple[int, ...], processes: tuple[int, ...]) -> int:
    """Every kind of attention with sharded sequences, values and gradients; the number of cases."""
    mesh = loom.open_mesh(shape, processes=processes)
    placed = ", ".join(["S(2)"] * mesh.ndim)
    cases = list(itertools.product((12, 11, 5), (False, True), (1, 2), (None, "bool", "float")))
    for length, causal, groups, mask in cases:
        if causal and mask is not None:
            continue
        _check(mesh, f"({placed})", length, causal, groups, mask)
    return len(cases)


def _check(mesh: loom.Mesh, placed: str, length: int, causal: bool, groups: int, mask: str | None) -> None:
    torch.manual_seed(length)
    shapes = [(2, 4, length, 4), (2, 4 // groups, length, 4), (2, 4 // groups, length, 4)]
    dense = [torch.randn(each).requires_grad_() for each in shapes]
    ours: list[Any] = [loom.distribute(each.detach(), mesh, placed).requires_grad_() for each in dense]
    given: Any = None
    if mask == "bool":
        given = (torch.rand(length, length) > 0.3) | torch.eye(length, dtype=torch.bool)
    elif mask == "float":
        given = torch.randn(2, 1, length, length).requires_grad_()
    theirs = given
    if given is not None:
        replicated = f"({', '.join(['R'] * mesh.ndim)})"
        theirs = loom.distribute(given.detach(), mesh, replicated).requires_grad_(given.requires_grad)
    options = {"is_causal": causal, "enable_gqa": groups > 1}
    expected = F.scaled_dot_product_attention(*dense, given, **options)
    with loom.record() as log:
        found = F.scaled_dot_product_attention(*ours, theirs, **options)
    assert set(log.kinds()) == {"shift"}, log
    weight = torch.randn(expected.shape)
    (expected * weight).sum().backward()
    (found * loom.distribute(weight, mesh, placed)).sum().backward()
    torch.testing.assert_close(found.to_torch(), expected.detach(), rtol=1e-4, atol=1e-5)
    pairs = [*zip(ours, dense, strict=True), *([(theirs, given)] if mask == "float" else [])]
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad.to_torch(), other.grad, rtol=1e-4, atol=1e-5)


def peak_of_attention(count: int, length: int) -> tuple[int, int, int]:
    """The bytes by which memory grew in a ring forward, forward and backward, and those of all keys and values."""
    mesh = loom.open_mesh((count,))
    queries, width = 8, 64
    query = loom.randn(1, 1, queries, width, mesh=mesh, placements="S(2)", requires_grad=True)
    key, value = (
        loom.from_local(torch.randn(1, 1, length // mesh.size, width), mesh, "S(2)").requires_grad_() for _ in range(2)
    )
    F.scaled_dot_product_attention(query, query, query)  # what the first call makes belongs to no sequence
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts here
    before = _status("VmRSS")
    out = F.scaled_dot_product_attention(query, key, value)
    forward = _status("VmHWM") - before
    out.sum().backward()
    assert key.grad is not None
    return forward, _status("VmHWM") - before, 2 * length * width * 4


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{os.getpid()}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
