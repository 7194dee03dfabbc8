"""Products of matrices against torch on every device's part and on wholes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from meshloom import ttnn
from meshloom.errors import OperandError
from ttnn_cases import check_claim, check_op, check_parts, distributed, each_device, label, tensor_of
from ttnn_draws import DTYPES, Grid, P, R, S, blocks, cuts, grids


@settings(max_examples=60, deadline=None)
@given(data=st.data(), grid=grids())
def test_a_product_is_torchs_on_every_device(data: st.DataObject, grid: Grid) -> None:
    m, k, n = (data.draw(st.sampled_from([0, 1, 2, 5, 33])) for _ in range(3))
    batch = data.draw(st.sampled_from([(), (3,), (2, 3)]))
    a_batch = data.draw(st.sampled_from([batch, tuple(1 for _ in batch), ()]))
    turned_a, turned_b = data.draw(st.booleans()), data.draw(st.booleans())
    a_shape = (*a_batch, k, m) if turned_a else (*a_batch, m, k)
    b_shape = (*batch, n, k) if turned_b else (*batch, k, n)
    a = tensor_of(data.draw(blocks(grid, a_shape)), grid, dtype=data.draw(st.sampled_from(DTYPES)))
    b = tensor_of(data.draw(blocks(grid, b_shape)), grid, dtype=data.draw(st.sampled_from(DTYPES)))

    def wanted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x, y = x.mT if turned_a else x, y.mT if turned_b else y
        return torch.einsum("...mk,...kn->...mn", x.double(), y.double()).float()

    found = ttnn.matmul(a, b, transpose_a=turned_a, transpose_b=turned_b)
    assert found.dtype is a.dtype
    coarse = 0.08 if a.dtype is ttnn.bfloat16 else 1e-4
    check_parts(found, each_device(wanted, a, b), rtol=0.02 if coarse > 0.01 else 1e-4, atol=coarse)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), grid=grids(), turned=st.booleans())
def test_a_label_of_a_product_claims_only_what_is_so(data: st.DataObject, grid: Grid, turned: bool) -> None:
    batch, m, k, n = (data.draw(st.sampled_from([1, 6, 12])) for _ in range(4))
    a_shape, b_shape = (batch, m, k), (n, k) if turned else (k, n)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    wholes = [torch.rand(each, generator=generator) for each in (a_shape, b_shape)]
    a, b = (distributed(whole, grid, data.draw(cuts(grid, whole.shape)), seed=i) for i, whole in enumerate(wholes))
    try:
        found = ttnn.matmul(a, b, transpose_b=turned)
    except OperandError as error:
        assert "Mismatch" in str(error)
        return
    whole = wholes[0] @ (wholes[1].T if turned else wholes[1])
    if _agree(a, b, turned):
        check_claim(found, whole, rtol=1e-3, atol=1e-3)


def _agree(a: Any, b: Any, turned: bool) -> bool:
    """Whether the same axes cut the summed dim of both, so that the parts belong together."""
    inner = 1 if turned else 0
    pairs = zip(label(a), label(b), a.grid, strict=True)
    return all((p == S(2)) == (q == S(inner)) for p, q, size in pairs if size > 1)


def test_the_strategies_of_a_sharded_product() -> None:
    a, b = torch.rand(4, 6), torch.rand(6, 8)
    grid = (2,)

    def product(p: Any, q: Any) -> Any:
        return ttnn.matmul(distributed(a, grid, [p]), distributed(b, grid, [q], seed=1))

    for p, q, wanted in ((S(0), R, S(0)), (R, S(1), S(1)), (S(1), S(0), P()), (R, R, R), (P(), R, P()), (R, P(), P())):
        found = product(p, q)
        assert label(found) == [wanted] and check_claim(found, a @ b)
    for p, q in ((S(0), S(1)), (P(), P()), (P(), S(1))):
        assert label(product(p, q)) == [P("unknown")]


def test_the_oracle_of_labels_notices_terms_that_are_called_a_shard() -> None:
    a, b = torch.rand(4, 6), torch.rand(6, 8)
    found = ttnn.matmul(distributed(a, (2,), [S(1)]), distributed(b, (2,), [S(0)]))
    found.update_tensor_topology(found.tensor_topology().with_placements([S(1)]))
    with pytest.raises(AssertionError):
        check_claim(found, a @ b)


def test_a_batch_that_is_cut_stays_cut() -> None:
    a, b = torch.rand(4, 2, 3, 5), torch.rand(4, 1, 5, 7)
    found = ttnn.matmul(distributed(a, (2,), [S(0)]), distributed(b, (2,), [S(0)]))
    assert label(found) == [S(0)] and check_claim(found, a @ b)
    found = ttnn.matmul(distributed(a, (2,), [S(1)]), distributed(b, (2,), [R]))
    assert label(found) == [S(1)] and check_claim(found, a @ b)


def test_vectors_multiply_as_in_torch() -> None:
    m, v, w = (tensor_of(torch.rand(2, *shape), (2,)) for shape in ((3, 4), (4,), (3,)))
    check_op(ttnn.matmul(m, v), torch.matmul, m, v)
    check_op(ttnn.matmul(w, m), torch.matmul, w, m)
    check_op(ttnn.matmul(v, v), torch.dot, v, v)


def test_linear_adds_its_bias_and_activates() -> None:
    grid = (2, 2)
    x, w, b = (tensor_of(torch.rand(2, 1, *shape) - 0.5, grid) for shape in ((3, 4), (4, 5), (1, 5)))
    check_op(ttnn.linear(x, w, bias=b), lambda i, j, k: i @ j + k, x, w, b)
    check_op(ttnn.linear(x, w, activation="gelu"), lambda i, j: F.gelu(i @ j), x, w)
    check_op(ttnn.linear(x, w, bias=b, activation="relu"), lambda i, j, k: F.relu(i @ j + k), x, w, b)
    chosen = ttnn.UnaryWithParam(ttnn.UnaryOpType.ELU, 0.5)
    check_op(ttnn.matmul(x, w, activation=chosen), lambda i, j: F.elu(i @ j, 0.5), x, w)
    wide = tensor_of(torch.rand(1, 1, 3, 9), grid)
    check_op(ttnn.linear(wide, w, in0_column_offset=2), lambda i, j: i[:, 2:6] @ j, wide, w)


def test_a_bias_on_every_device_makes_no_whole_of_terms() -> None:
    x, w = distributed(torch.rand(3, 4), (2,), [S(1)]), distributed(torch.rand(4, 5), (2,), [S(0)])
    assert label(ttnn.linear(x, w)) == [P()]
    assert label(ttnn.linear(x, w, bias=distributed(torch.rand(5), (2,), [R]))) == [P("unknown")]
    assert label(ttnn.linear(x, w, activation="relu")) == [P("unknown")]
    columns = distributed(torch.rand(4, 6), (2,), [S(1)])
    bias = distributed(torch.rand(6), (2,), [S(0)])
    assert label(ttnn.linear(distributed(torch.rand(3, 4), (2,), [R]), columns, bias=bias, activation="gelu")) == [S(1)]


def test_addmm_outer_and_several_weights() -> None:
    grid = (2,)
    c, a, b = (tensor_of(torch.rand(2, *shape), grid) for shape in ((3, 5), (3, 4), (4, 5)))
    found = ttnn.addmm(c, a, b, alpha=0.5, beta=2.0)
    check_op(found, lambda i, j, k: torch.addmm(i, j, k, alpha=0.5, beta=2.0), c, a, b)
    check_op(ttnn.addmm(c, a, b, beta=0.0), lambda i, j, k: j @ k, c, a, b)
    first, second = ttnn.matmul_batched_weights(a, [b, b])
    check_op(first, torch.matmul, a, b)
    check_op(second, torch.matmul, a, b)
    u, v = tensor_of(torch.rand(2, 1, 1, 1, 3), grid), tensor_of(torch.rand(2, 1, 1, 4, 1), grid)
    check_op(ttnn.outer(u, v), lambda i, j: torch.outer(i.flatten(), j.flatten())[None, None], u, v)


def test_sparse_products_are_zero_where_nothing_is_asked_for() -> None:
    grid = (2,)
    a, b = tensor_of(torch.rand(2, 2, 3, 4, 5), grid), tensor_of(torch.rand(1, 1, 6, 5, 7), grid)
    kept = tensor_of((torch.rand(2, 2, 3, 1, 6) > 0.5).float(), grid, layout=ttnn.ROW_MAJOR_LAYOUT)

    def wanted(x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(2, 3, 1, 6, 4, 7)
        for i in range(2):
            for j in range(3):
                for e in range(6):
                    if mask[i, j, 0, e]:
                        out[i, j, 0, e] = x[i, j] @ y[0, e]
        return out

    check_parts(ttnn.sparse_matmul(a, b, sparsity=kept), each_device(wanted, a, b, kept))
    c = tensor_of(torch.rand(2, 1, 6, 4, 5), grid)
    mask = tensor_of((torch.rand(1, 1, 1, 1, 6) > 0.5).float(), grid, layout=ttnn.ROW_MAJOR_LAYOUT)
    both = ttnn.sparse_matmul(c, b, sparsity=mask, is_input_a_sparse=True, nnz=3)
    check_op(both, lambda x, y, z: (x @ y) * z.reshape(1, 6, 1, 1), c, b, mask)
    with pytest.raises(OperandError, match="sparsity of shape"):
        ttnn.sparse_matmul(a, b, sparsity=mask)


def test_formats_of_a_product() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(1, 64, 256, generator=generator)
    a = tensor_of(values, (2,), dtype=ttnn.bfloat16)
    b = tensor_of(values.mT, (2,), dtype=ttnn.bfloat16)
    exact = a.block.double() @ b.block.double()
    fine = ttnn.matmul(a, b, dtype=ttnn.float32)
    assert fine.dtype is ttnn.float32
    torch.testing.assert_close(fine.block.double(), exact, rtol=1e-5, atol=1e-4)
    coarse = ttnn.matmul(a, b)
    torch.testing.assert_close(coarse.block, exact.to(torch.bfloat16), rtol=1e-2, atol=0.0)
    block_float = ttnn.matmul(a, b, dtype=ttnn.bfloat8_b)
    torch.testing.assert_close(block_float.block.double(), exact, rtol=0.02, atol=0.5)


def test_operands_that_do_not_go_together_are_refused_in_the_words_of_the_original() -> None:
    def zeros(*shape: int, layout: Any = None) -> Any:
        return tensor_of(torch.zeros(1, *shape), (2,), layout=layout)

    with pytest.raises(RuntimeError, match="Inputs to matmul must be tilized"):
        ttnn.matmul(zeros(4, 4, layout=ttnn.ROW_MAJOR_LAYOUT), zeros(4, 4))
    text = (
        "The width of the first tensor must be equal to the height of the second tensor. Mismatch: width=64 height=32"
    )
    with pytest.raises(RuntimeError, match=text):
        ttnn.matmul(zeros(32, 64), zeros(32, 64))
    with pytest.raises(RuntimeError, match="batch dimension 0 mismatch: a=2 vs b=3"):
        ttnn.matmul(zeros(2, 4, 4), zeros(3, 4, 4))
    with pytest.raises(TypeError, match="multiplies two tensors"):
        ttnn.matmul(zeros(4, 4), 3.0)


def test_a_product_is_written_into_the_tensor_that_is_given() -> None:
    a, b = (tensor_of(torch.rand(2, 4, 4), (2,)) for _ in range(2))
    room = tensor_of(torch.zeros(2, 4, 4), (2,))
    address = room.buffer_address()
    assert ttnn.matmul(a, b, optional_output_tensor=room) is room and room.buffer_address() == address
    check_op(room, torch.matmul, a, b)


def test_inner_dims_cut_along_different_axes_leave_no_partial_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 6, generator=generator), torch.randn(6, 8, generator=generator)
    apart = ttnn.matmul(distributed(a, (2, 2), [S(1), R]), distributed(b, (2, 2), [R, S(0)]))
    assert not check_claim(apart, a @ b)
    assert check_claim(ttnn.matmul(distributed(a, (2, 2), [S(1), R]), distributed(b, (2, 2), [S(0), R])), a @ b)
    batched = torch.randn(4, 4, 6, generator=generator)
    other = torch.randn(4, 6, 8, generator=generator)
    found = ttnn.matmul(distributed(batched, (2, 2), [S(0), R]), distributed(other, (2, 2), [R, S(0)]))
    assert not check_claim(found, batched @ other)
