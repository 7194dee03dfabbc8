"""Products of matrices: every device multiplies its own parts.

Sums are kept in float32 and rounded once to the dtype of the first operand, or `dtype=`. Devices that share an operand
are folded into the rows or columns of one large product (`multiply_blocks`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ops.rule import Rule
from meshloom.ttnn.ops.activations import activator
from meshloom.ttnn.ops.calling import Made, compute, make, op, operands, result, shared_coords
from meshloom.ttnn.ops.elementwise import fine
from meshloom.ttnn.ops.topologies import LINEAR, contraction, einsum, rows, topology_of, without_terms
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.padding import real_places
from meshloom.ttnn.tensor.parts import Block, aligned
from meshloom.ttnn.tensor.tensor import Tensor


def _check(name: str, a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> None:
    if a.layout is not Layout.TILE or b.layout is not Layout.TILE:
        raise OperandError(
            f"ttnn.{name}: Inputs to matmul must be tilized", fix="ttnn.to_layout(tensor, ttnn.TILE_LAYOUT)"
        )
    if not a.shape or not b.shape:
        raise OperandError(f"ttnn.{name}: a tensor of rank 0 is no matrix", fix="reshape it")
    width = a.shape[-2] if transpose_a and len(a.shape) > 1 else a.shape[-1]
    height = b.shape[-1] if transpose_b or len(b.shape) == 1 else b.shape[-2]
    if width != height:
        raise OperandError(
            f"ttnn.{name}: The width of the first tensor must be equal to the height of the second tensor. "
            f"Mismatch: width={width} height={height}",
            shapes=f"{list(a.shape)} and {list(b.shape)}",
        )
    rows, columns = a.shape[:-2], b.shape[:-2]
    for back, (m, n) in enumerate(zip(reversed(rows), reversed(columns), strict=False), 1):
        if m != n and 1 not in (m, n):
            where = max(len(rows), len(columns)) - back
            raise OperandError(
                f"ttnn.{name}: bmm (non-bcast matmul) expects input tensors of shapes BCMK*BCKN=BCMN or batch "
                f"dimension {where} mismatch: a={m} vs b={n}",
                shapes=f"{list(a.shape)} and {list(b.shape)}",
            )


def product(
    name: str, a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool, kind: DataType
) -> Callable[[Block, Block], Block]:
    """What makes the block of a product of those of two tensors."""
    _, blocks = operands(name, a, b)
    _check(name, a, b, transpose_a, transpose_b)
    ranks, axes = (len(a.shape), len(b.shape)), len(a.grid)
    is_turned = (transpose_a and ranks[0] > 1, transpose_b and ranks[1] > 1)
    real = (real_places(a, [-2 if is_turned[0] else -1]), real_places(b, [-1 if is_turned[1] or ranks[1] == 1 else -2]))
    rank = max(ranks)
    is_exact = all(fine(block, kind) is block and block.dtype is blocks[0].dtype for block in blocks)
    if is_exact and real == (None, None) and is_turned == (False, False) and 1 < ranks[0] == ranks[1]:
        return multiply_blocks

    def kernel(x: Block, y: Block) -> Block:
        x, y = _alike(fine(_without(x, real[0]), kind), fine(_without(y, real[1]), kind))
        x, y = x.transpose(-1, -2) if is_turned[0] else x, y.transpose(-1, -2) if is_turned[1] else y
        if 1 in ranks:
            return _with_vector(x, y, *ranks, axes)
        return multiply_blocks(aligned(x, axes, rank), aligned(y, axes, rank))

    return kernel


def _without(block: Block, real: Block | None) -> Block:
    """A block whose padding adds nothing to a sum."""
    return block if real is None else torch.where(real, block, torch.zeros((), dtype=block.dtype))


def _alike(x: Block, y: Block) -> tuple[Block, Block]:
    if x.dtype is y.dtype:
        return x, y
    kind = torch.promote_types(x.dtype, y.dtype)
    return x.to(kind), y.to(kind)


MANY_ROWS, FEW_COLUMNS = 16, 64  # where one wide product beats many narrow ones, its copy of the second included


def multiply_blocks(x: Block, y: Block) -> Block:
    """x @ y with all leading dims as a batch, folded into one product where no batch is in both.

    >>> multiply_blocks(torch.ones(2, 1, 3, 5), torch.ones(1, 4, 5, 7)).shape  # (2 * 3, 5) @ (5, 4 * 7)
    torch.Size([2, 4, 3, 7])
    """
    is_batch, matrix, is_copied = _fold(x.shape, y.shape)
    if is_batch:
        return x @ y
    if matrix is not None:
        return x @ y.view(matrix) if y.is_contiguous() else x @ y[(0,) * (y.dim() - 2)]
    if not is_copied and y.is_contiguous():
        return x @ y
    (m, k), n, count = x.shape[-2:], y.shape[-1], math.prod(y.shape[:-2])
    rows, columns = x.reshape(math.prod(x.shape[:-1]), k), y.reshape(count, k, n).transpose(0, 1)
    if not is_copied and not columns.is_contiguous():
        return x @ y
    lead = x.dim() - 2
    found = (rows @ columns.reshape(k, count * n)).reshape(*x.shape[:-2], m, *y.shape[:-2], n)
    pairs = [each for place in range(lead) for each in (place, lead + 1 + place)]
    sizes = map(max, x.shape[:-2], y.shape[:-2])
    return found.permute(*pairs, lead, -1).reshape(*sizes, m, n)


@lru_cache(maxsize=4096)
def _fold(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[bool, tuple[int, int] | None, bool]:
    """For two shapes: whether both have the same batch somewhere, the second's matrix if it is one, and whether one
    wide product is better even if the columns of the second have to be copied for it."""
    is_batch = any(1 not in pair for pair in zip(x[:-2], y[:-2], strict=True))
    (k, n), count = y[-2:], math.prod(y[:-2])
    is_copied = math.prod(x[:-1]) >= MANY_ROWS and n < FEW_COLUMNS
    return is_batch and count != 1, (k, n) if count == 1 else None, is_copied


def _with_vector(x: Block, y: Block, a_rank: int, b_rank: int, axes: int) -> Block:
    if a_rank == 1 and b_rank == 1:
        return (x * y).sum(-1)
    if b_rank == 1:
        return multiply_blocks(x, aligned(y.unsqueeze(-1), axes, a_rank)).squeeze(-1)
    return multiply_blocks(aligned(x.unsqueeze(-2), axes, b_rank), y).squeeze(-2)


def multiply(name: str, a, b, *, transpose_a=False, transpose_b=False, bias=None, activation=None, kind=None) -> Made:
    """A product of matrices, plus a bias, then an activation."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise ArgumentError(f"ttnn.{name} multiplies two tensors, not {type(a).__name__} and {type(b).__name__}")
    kind, axes = kind or a.dtype, len(a.grid)
    multiplied = product(name, a, b, transpose_a, transpose_b, kind)
    made_by = (a, b) if bias is None else (a, b, bias)
    label = topology_of(_rule(a, b, transpose_a, transpose_b), *made_by, filled=True)
    if bias is not None:
        operands(name, a, bias)
    if activation is not None:
        label = without_terms(label)
    after = None if activation is None else activator(activation)
    if bias is None and after is None:
        return compute(multiplied, made_by, label)

    def kernel(x: Block, y: Block, *added: Block) -> Block:
        found = multiplied(x, y)
        for each in added:
            found = found + aligned(fine(each, kind), axes, found.dim() - axes)
        return found if after is None else after(found)

    return compute(kernel, made_by, label)


def _rule(a: Tensor, b: Tensor, transpose_a: bool, transpose_b: bool) -> Rule:
    """The labels of a product for the ranks of its operands: "...mk, ...kn -> ...mn" of matrices."""
    first = "k" if len(a.shape) == 1 else "...km" if transpose_a else "...mk"
    second = "k" if len(b.shape) == 1 else "...nk" if transpose_b else "...kn"
    kept = "m" * (len(a.shape) > 1) + "n" * (len(b.shape) > 1)
    return contraction(f"{first}, {second} -> {'...' if kept else ''}{kept}")


@op("matmul", more=multiply)
def matmul(input_tensor_a, input_tensor_b, **how) -> Made:
    """The product of every device's matrices; leading dims are a batch."""
    return multiply("matmul", input_tensor_a, input_tensor_b, **how)


@op("linear", more=multiply)
def linear(input_tensor_a, input_tensor_b, *, in0_column_offset=None, **how) -> Made:
    """The product of every device's matrices, plus a bias, then an activation.

    `in0_column_offset` takes the columns of the first operand from there on, as many as the second has rows.
    """
    a = input_tensor_a
    if in0_column_offset is not None:
        height = input_tensor_b.shape[-1 if how.get("transpose_b") else -2]
        _, (block,) = operands("linear", a)
        a = result(block.narrow(-1, in0_column_offset, height), a, topology=topology_of(LINEAR, a))
    return multiply("linear", a, input_tensor_b, **how)


@op("matmul_batched_weights", more=multiply)
def matmul_batched_weights(input_tensor_a, input_tensors_b, **how) -> list[Made]:
    """The product of one tensor with each of several."""
    return [multiply("matmul_batched_weights", input_tensor_a, each, **how) for each in input_tensors_b]


@op("addmm")
def addmm(input_tensor, mat1_tensor, mat2_tensor, *, alpha=1.0, beta: float = 1.0) -> Made:
    """beta * input + alpha * (mat1 @ mat2)."""
    exact = DataType.FLOAT32
    operands("addmm", input_tensor, mat1_tensor, mat2_tensor)
    multiplied = product("addmm", mat1_tensor, mat2_tensor, False, False, exact)
    block = alpha * multiplied(mat1_tensor.block, mat2_tensor.block)
    rank, axes = block.dim() - len(mat1_tensor.grid), len(mat1_tensor.grid)
    summed = (mat1_tensor, mat2_tensor, input_tensor) if beta != 0 else (mat1_tensor, mat2_tensor)
    label = topology_of(_rule(mat1_tensor, mat2_tensor, False, False), *summed, filled=True)
    if beta != 0:
        block = block + beta * aligned(fine(input_tensor.block, exact), axes, rank)
    return Made(block, mat1_tensor, label, coords=shared_coords(input_tensor, mat1_tensor, mat2_tensor))


@op("outer")
def outer(input_tensor_a, input_tensor_b) -> Made:
    """The product of every element of one with every element of the other: [..., m, 1] and [..., 1, n].

    Of fewer than four dims, only the last ones are multiplied: [b, m] and [b, n] are [b, m, n].
    """
    _, (x, y) = operands("outer", input_tensor_a, input_tensor_b)
    if max(len(input_tensor_a.shape), len(input_tensor_b.shape)) < 4:
        return _outer_of_rows(input_tensor_a, input_tensor_b)
    axes, rank = len(input_tensor_a.grid), max(len(input_tensor_a.shape), 2)
    column = x.reshape(*x.shape[:axes], *(1,) * (rank - 2), -1, 1)
    row = y.reshape(*y.shape[:axes], *(1,) * (rank - 2), 1, -1)
    kind, values = input_tensor_a.dtype, (*(1,) * (rank - 2), column.shape[-2], row.shape[-1])
    cuts = [f"S({dim}), R -> S({rank - 2})" for dim in _long(input_tensor_a)]
    cuts += [f"R, S({dim}) -> S({rank - 1})" for dim in _long(input_tensor_b)]
    label = topology_of(rows(*cuts, *_TERMS), input_tensor_a, input_tensor_b, shape=values)
    return Made(fine(column, kind) * fine(row, kind), input_tensor_a, label)


def _outer_of_rows(a: Tensor, b: Tensor) -> Made:
    """The last dims of two tensors multiplied; what is a column or a row already stays one."""
    axes, (first, second) = len(a.grid), (tuple(a.shape), tuple(b.shape))
    down = first if len(first) > 1 and first[-1] == 1 else (*first, 1)
    across = second if len(second) > 1 and second[-2] == 1 else (*second[:-1], 1, *second[-1:])
    rank = max(len(down), len(across))
    column = aligned(a.block.reshape(*a.block.shape[:axes], *down), axes, rank)
    row = aligned(b.block.reshape(*b.block.shape[:axes], *across), axes, rank)
    values = fine(column, a.dtype) * fine(row, a.dtype)
    cuts = [f"S({dim}), R -> S({rank - len(down) + dim})" for dim in range(len(first))]
    cuts += [f"R, S({len(second) - 1}) -> S({rank - 1})"]
    label = topology_of(rows(*cuts, *_TERMS), a, b, shape=values.shape[axes:])
    return Made(values, a, label, coords=shared_coords(a, b))


_TERMS = ("P(sum), R -> P(sum)", "R, P(sum) -> P(sum)")


def _long(tensor: Tensor) -> list[int]:
    """The only dim that is longer than 1, if there is one: flattened, it is the dim that may be cut."""
    long = [place for place, size in enumerate(tensor.shape) if size != 1]
    return long if len(long) == 1 else []


def _check_covered(*, indices=None, bias=None) -> None:
    if bias is not None or indices is not None:
        raise ArgumentError("ttnn.sparse_matmul: bias= and indices= are not covered", fix="ttnn.add after the product")


@op("sparse_matmul", more=_check_covered)
def sparse_matmul(
    input_tensor_a, input_tensor_b, *, sparsity, is_input_a_sparse=False, is_input_b_sparse=True, kind=None, **uncovered
) -> Made:
    """Products with several matrices of which `sparsity` leaves some out: theirs are zero.

    With the second operand [1, E, K, N] sparse, a of [A, B, M, K] and sparsity of [A, B, 1, E] give
    [A, B, 1, E, M, N]. With the first sparse too, a of [A, E, M, K] and sparsity of [1, 1, A, E] give [A, E, M, N].
    """
    name = "sparse_matmul"
    _check_covered(**uncovered)
    _, (x, y, kept) = operands(name, input_tensor_a, input_tensor_b, sparsity)
    kind = kind or input_tensor_a.dtype
    axes, a_shape, b_shape = len(input_tensor_a.grid), input_tensor_a.shape, input_tensor_b.shape
    if len(a_shape) != 4 or len(b_shape) != 4 or a_shape[-1] != b_shape[-2]:
        raise OperandError(
            f"ttnn.{name}: The width of the first tensor must be equal to the height of the second tensor. "
            f"Mismatch: width={a_shape[-1]} height={b_shape[-2]}",
            shapes=f"{list(a_shape)} and {list(b_shape)}",
        )
    x, y = _alike(fine(x, kind), fine(y, kind))
    experts = b_shape[1]
    batch: tuple[int, ...]
    if is_input_b_sparse and not is_input_a_sparse:
        batch = (a_shape[0], a_shape[1], 1, experts)
        x, y = x.unsqueeze(axes + 2).unsqueeze(axes + 3), y.unsqueeze(axes).unsqueeze(axes)
    elif is_input_a_sparse:
        batch = (a_shape[0], experts)
    else:
        raise ArgumentError(f"ttnn.{name}: no operand is sparse", fix="is_input_a_sparse or is_input_b_sparse")
    if kept[(0,) * axes].numel() != torch.Size(batch).numel():
        raise OperandError(
            f"ttnn.{name}: sparsity of shape {list(sparsity.shape)} does not name {list(batch)} products"
        )
    mask = kept.reshape(*kept.shape[:axes], *batch, 1, 1) != 0
    block = torch.where(mask, x @ y, 0)
    text = "abmk, .ekn -> ab.emn" if len(batch) == 4 else "aemk, .ekn -> aemn"
    return make(block, einsum(text, 0, 1), input_tensor_a, input_tensor_b, filled=True)
