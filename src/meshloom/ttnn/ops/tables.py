"""Rows of tables by number: embedding, and the gradient of its table."""

from __future__ import annotations

import math

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.ops.block_moves import inside, row_offsets, spread, take_rows
from meshloom.ttnn.ops.calling import Made, op, operands, shared_coords
from meshloom.ttnn.ops.topologies import einsum, rows as row_texts, topology_of
from meshloom.ttnn.tensor.formats import Layout
from meshloom.ttnn.tensor.parts import Block

__all__ = ["EmbeddingsType"]


class EmbeddingsType(Choice):
    """What is known of a table of embeddings; only `PADDED` with `padding_idx` changes a result: that row is read."""

    GENERIC, PADDED, BINARY = range(3)


@op("embedding")
def embedding(input_tensor, weight) -> Made:
    """Rows of a table by number: [B, S] of a [V, H] gives [B, S, H], row-major unless a layout is asked for."""
    _, (given, table) = operands("embedding", input_tensor, weight)
    axes, wide = len(input_tensor.grid), table.shape[-1]
    if math.prod(weight.shape[:-2]) != 1:
        raise OperandError(f"ttnn.embedding: weight is {list(weight.shape)}", fix="give a table [V, H]")
    rows = table.reshape(*table.shape[:axes], -1, wide)
    inside("embedding", given, rows.shape[axes], "row")
    numbers = _numbers(given, axes)
    values = take_rows(rows, numbers, axes)
    rank, ones = len(input_tensor.shape), "." * (len(weight.shape) - 1)
    index = "abcdefg"[:rank] if numbers.dim() - axes == rank else "a..b"
    text = f"{index}, {ones}h -> {index.replace('.', '')}h"
    label = topology_of(einsum(text, 1), input_tensor, weight, shape=values.shape[axes:])
    memory, coords = input_tensor.memory_config(), shared_coords(input_tensor, weight)
    return Made(values, weight, label, None, Layout.ROW_MAJOR, memory, coords=coords)


def _numbers(index: Block, axes: int) -> Block:
    """Token numbers as [B, S]: [B, 1, 1, S] loses its ones, as in the original."""
    if index.dim() - axes == 4 and index.shape[axes + 1 : axes + 3] == (1, 1):
        return index.reshape(*index.shape[: axes + 1], index.shape[-1])
    return index


@op("embedding_bw")
def embedding_bw(input_tensor, weight_tensor, output_gradient_tensor) -> Made:
    """The gradient of a table: every row is the sum of the gradients of its uses. Shape [1, 1, V, H]."""
    given = operands("embedding_bw", input_tensor, weight_tensor, output_gradient_tensor)[1]
    axes, (rows, wide) = len(input_tensor.grid), given[1].shape[-2:]
    index, grad = spread([given[0].flatten(axes), given[2].flatten(axes, -2)], axes)
    inside("embedding_bw", index, rows, "row")
    table = torch.zeros(*index.shape[:axes], rows, wide, dtype=torch.float32)
    numbers = (index.long() + row_offsets(table, axes, rows, 1)).reshape(-1)
    table.view(-1, wide).index_add_(0, numbers, grad.reshape(-1, wide).float())
    last, at = len(output_gradient_tensor.shape) - 1, len(weight_tensor.shape) - 2
    cuts = [f"*, *, S({at}) -> P(unknown)"]  # rows of a cut table are not all there
    cuts += [f"S({n}), S({m}), * -> P(sum)" for n in range(len(input_tensor.shape)) for m in range(last)]
    cuts += [f"R, S({last}), * -> S(3)", "R, P(sum), * -> P(sum)", "R, R, * -> R"]
    tensors = (input_tensor, output_gradient_tensor, weight_tensor)
    return Made(
        table.unsqueeze(axes).unsqueeze(axes),
        output_gradient_tensor,
        topology_of(row_texts(*cuts), *tensors, shape=(1, 1, rows, wide)),
    )
