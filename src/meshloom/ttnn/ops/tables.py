"""Rows of tables by number: embedding, and the gradient of its table."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.ops import label_moves
from meshloom.ttnn.ops.block_moves import inside, numbered, spread, taken
from meshloom.ttnn.ops.calling import Made, op, operands, shared_coords
from meshloom.ttnn.tensor.formats import Layout
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import Placement, PlacementPartial, PlacementReplicate, PlacementShard

__all__ = ["EmbeddingsType"]


class EmbeddingsType(enum.Enum):
    """What is known of a table of embeddings; only `PADDED` with `padding_idx` changes a result: that row is read."""

    GENERIC = 0
    PADDED = 1
    BINARY = 2

    __repr__ = enum.Enum.__str__


@op("embedding")
def embedding(input_tensor: Tensor, weight: Tensor) -> Made:
    """Rows of a table by number: [B, S] of a [V, H] gives [B, S, H], row-major unless a layout is asked for."""
    _, (index, table) = operands("embedding", input_tensor, weight)
    axes, wide = len(input_tensor.grid), table.shape[-1]
    if math.prod(weight.shape[:-2]) != 1:
        raise OperandError(f"ttnn.embedding: weight is {list(weight.shape)}", fix="give a table [V, H]")
    rows = table.reshape(*table.shape[:axes], -1, wide)
    inside("embedding", index, rows.shape[axes], "row")
    numbers = _numbers(index, axes)
    values = taken(rows, numbers, axes)
    return Made(
        values,
        weight,
        _embedded(input_tensor, weight, numbers.dim() - axes),
        layout=Layout.ROW_MAJOR,
        memory_config=input_tensor.memory_config(),
        coords=shared_coords(input_tensor, weight),
    )


def _numbers(index: Block, axes: int) -> Block:
    """Token numbers as [B, S]: [B, 1, 1, S] loses its ones, as in the original."""
    if index.dim() - axes == 4 and index.shape[axes + 1 : axes + 3] == (1, 1):
        return index.reshape(*index.shape[: axes + 1], index.shape[-1])
    return index


def _embedded(index: Tensor, weight: Tensor, rank: int) -> Any:
    """Cut at the tokens or at the width; of a table that is cut at its rows every device knows only some."""

    def rule(column: Sequence[Placement]) -> Placement | None:
        of_index, of_weight = column
        if isinstance(of_index, PlacementShard) and isinstance(of_weight, PlacementReplicate):
            last = len(index.shape) - 1
            return of_index.at(rank - 1 if of_index.dim == last else min(of_index.dim, rank - 1))
        if not isinstance(of_index, PlacementReplicate):
            return None
        if isinstance(of_weight, PlacementShard):
            return of_weight.at(rank) if of_weight.dim == len(weight.shape) - 1 else None
        return of_weight  # terms of a table are terms of its rows

    return label_moves.ruled(("embedding", rank), (index, weight), rule)


@op("embedding_bw")
def embedding_bw(input_tensor: Tensor, weight_tensor: Tensor, output_gradient_tensor: Tensor) -> Made:
    """The gradient of a table: every row is the sum of the gradients of its uses. Shape [1, 1, V, H]."""
    given = operands("embedding_bw", input_tensor, weight_tensor, output_gradient_tensor)[1]
    axes, (rows, wide) = len(input_tensor.grid), given[1].shape[-2:]
    index, grad = spread([given[0].flatten(axes), given[2].flatten(axes, -2)], axes)
    inside("embedding_bw", index, rows, "row")
    table = torch.zeros(*index.shape[:axes], rows, wide, dtype=torch.float32)
    numbers = (index.long() + numbered(table, axes, rows, 1)).reshape(-1)
    table.view(-1, wide).index_add_(0, numbers, grad.reshape(-1, wide).float())

    def rule(column: Sequence[Placement]) -> Placement | None:
        of_index, of_grad, of_table = column
        if of_table == PlacementShard(len(weight_tensor.shape) - 2):
            return None  # rows of the whole table are not there
        if isinstance(of_index, PlacementReplicate) and isinstance(of_grad, PlacementReplicate):
            return of_grad
        last = len(output_gradient_tensor.shape) - 1
        if of_grad == PlacementShard(last) and isinstance(of_index, PlacementReplicate):
            return PlacementShard(3)
        cut = isinstance(of_index, PlacementShard) and isinstance(of_grad, PlacementShard) and of_grad.dim < last
        return PlacementPartial() if cut else of_grad if of_grad == PlacementPartial() else None

    return Made(
        table.unsqueeze(axes).unsqueeze(axes),
        output_gradient_tensor,
        label_moves.ruled("embedding_bw", (input_tensor, output_gradient_tensor, weight_tensor), rule),
    )
