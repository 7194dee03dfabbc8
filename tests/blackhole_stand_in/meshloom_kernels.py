"""Kernels of ops for this card: `OPS` is a table from ops to what makes a kernel for operands, or None.

The sources are what the stand-in's cores understand: the name of what they do. On a card they would be C++.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from device import DataflowLaunch, Program
from meshloom.runtime.card import Part, SourceKernel
from meshloom.runtime.drivers.blackhole_memory import pages

WIDTHS = {torch.float32: 4, torch.bfloat16: 2}


def kernel(op: str, extra: Any, cores: int = 4) -> SourceKernel:
    """A kernel that spreads the tiles of its result over cores."""

    def build(compiled: Mapping[str, Any], handles: Sequence[Any], args: Mapping[str, Any]) -> Program:
        *operands, out = handles
        width, tiles = WIDTHS[out.dtype], pages(out.shape)
        addresses = [each.buffer.addr for each in operands]

        def share(core: int, _: Any, count: int) -> list[int]:
            step = -(-tiles // count)
            start = min(core * step, tiles)
            return [*addresses, start, min(step, tiles - start)]

        launch = DataflowLaunch(cores, share, [out.buffer.addr], compiled["reader"], compiled["writer"])
        page = out.buffer.page_size
        return Program([launch], compiled["compute"], [width, *extra(handles, args)], [0, 1, 16], page, tiles, cores)

    return SourceKernel(op, {"reader": "read tiles", "writer": "write tiles", "compute": op}, build, "blackhole")


def _nothing(handles: Sequence[Any], args: Mapping[str, Any]) -> list[int]:
    return []


def _columns(shape: Sequence[int]) -> int:
    return -(-shape[-1] // 32)


ADD, RELU = kernel("add", _nothing), kernel("relu", _nothing)
ADD_ROW = kernel("add_row", lambda handles, args: [_columns(handles[-1].shape)])
MATMUL = kernel("matmul", lambda handles, args: [_columns(handles[0].shape), _columns(handles[1].shape)])
FILL = kernel("fill", lambda handles, args: [struct.unpack("I", struct.pack("f", args["value"]))[0]])


def _are_known(*parts: Part) -> bool:
    return len({part.dtype for part in parts}) == 1 and parts[0].dtype in WIDTHS


def add(operands: Sequence[Part], result: Part, args: Mapping[str, Any]) -> SourceKernel | None:
    """Of one shape, or a matrix and a row."""
    if args.get("alpha", 1) != 1 or len(operands) != 2 or not _are_known(*operands, result):
        return None
    first, second = (part.shape for part in operands)
    if first == second == result.shape:
        return ADD
    return ADD_ROW if first == result.shape and len(first) == 2 and second == (1, first[1]) else None


def relu(operands: Sequence[Part], result: Part, args: Mapping[str, Any]) -> SourceKernel | None:
    """Of any shape."""
    return RELU if len(operands) == 1 and operands[0] == result and _are_known(result) else None


def matmul(operands: Sequence[Part], result: Part, args: Mapping[str, Any]) -> SourceKernel | None:
    """Of two matrices."""
    fits = len(operands) == 2 and all(len(part.shape) == 2 for part in (*operands, result))
    return MATMUL if fits and 0 not in (*operands[0].shape, *result.shape) and _are_known(*operands, result) else None


OPS = {"add": add, "relu": relu, "matmul": matmul}
