"""What a hostile user tries: odd dtypes and scalars, padding in the way, aliases, threads. Everything equals dense."""

import copy
import operator
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F

import meshloom as loom

MESH = loom.Mesh(a=2, b=4)
INTERIOR = "S(0), S(0)"  # 10 over (2, 4) is 5 + 5, then 2, 2, 1, 0: padding lies between the elements


def check_same(ours, dense):
    assert ours.dtype == dense.dtype
    torch.testing.assert_close(ours.to_torch().detach(), dense.detach(), equal_nan=True)


@pytest.mark.parametrize("ids", ["R, R", "S(0), R", "S(0), S(0)"])
@pytest.mark.parametrize("placed", ["S(0), S(0)", "S(0), R", "R, S(0)", "S(1), S(0)"])
def test_embedding_finds_its_rows_around_interior_padding(ids, placed):
    dense = torch.randn(10, 3, requires_grad=True)
    ours = loom.distribute(dense.detach(), MESH, placed).requires_grad_()
    index = torch.arange(10)
    found, expected = F.embedding(loom.distribute(index, MESH, ids), ours), F.embedding(index, dense)
    check_same(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    check_same(ours.grad, dense.grad)


@pytest.mark.parametrize("placed", ["S(1), S(1)", "S(1), S(0)", "S(0), S(1)"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_finds_its_classes_around_interior_padding(placed, weighted):
    dense = torch.randn(7, 10, requires_grad=True)
    ours = loom.distribute(dense.detach(), MESH, placed).requires_grad_()
    target, weight = torch.tensor([0, 9, 5, 4, -100, 6, 1]), torch.rand(10) if weighted else None
    found, expected = F.cross_entropy(ours, target, weight), F.cross_entropy(dense, target, weight)
    check_same(found, expected)
    found.backward()
    expected.backward()
    check_same(ours.grad, dense.grad)


@pytest.mark.parametrize("index", [11, -1])
def test_an_index_into_padding_is_out_of_range(index):
    weight = loom.ones(11, 2, mesh=MESH, placements="S(0), R")  # stored as 12 rows
    with pytest.raises(IndexError):
        F.embedding(torch.tensor([0, index]), weight)
    logits = loom.ones(1, 11, mesh=MESH, placements="S(1), R")
    with pytest.raises(IndexError):
        F.cross_entropy(logits, torch.tensor([index]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.float16])
def test_dtype_arguments_of_padded_tensors_cast_first(dtype):
    dense = torch.tensor([0, 1, 1, 0, 1, 0, 1, 1, 1, 0]).to(dtype)
    ours = loom.distribute(dense, MESH, INTERIOR)
    for program in (
        lambda t: t.mean(dtype=torch.float32),
        lambda t: t.softmax(0, dtype=torch.float64),
        lambda t: F.log_softmax(t, 0, dtype=torch.float32),
        lambda t: t.log_softmax(0, torch.float32),
        lambda t: torch.softmax(t, dim=0, dtype=torch.float32),
    ):
        check_same(program(ours), program(dense))


def test_var_of_padded_tensors_refuses_integers_and_is_real_for_complex():
    with pytest.raises(RuntimeError, match="floating point and complex"):
        loom.arange(10, mesh=MESH, placements=INTERIOR).var()
    dense = torch.randn(10, dtype=torch.complex64)
    check_same(loom.distribute(dense, MESH, INTERIOR).var(), dense.var())


def test_complex_numbers_have_no_order():
    with pytest.raises(loom.DTypeError, match="complex numbers have no order"):
        loom.distribute(torch.randn(10, dtype=torch.complex64), MESH, INTERIOR).amax()


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("number", [-1, 3, 10**12, 0.1, float("inf"), 1 + 2j])
@pytest.mark.parametrize("name", ["sub", "truediv", "pow"])
def test_a_number_on_the_left_equals_dense(name, number, dtype):
    if name == "pow" and number == -1 and not (dtype.is_floating_point or dtype.is_complex):
        pytest.skip("integers to negative powers raise in torch")
    dense = torch.tensor([1, 2, 3, 4, 5, 1, 2, 3, 1, 2]).to(dtype)
    apply = getattr(operator, name)
    check_same(apply(number, loom.distribute(dense, MESH, INTERIOR)), apply(number, dense))


def test_a_truth_value_minus_a_tensor_is_refused():
    with pytest.raises(loom.DTypeError, match="no meaning for bool"):
        True - loom.ones(4, mesh=MESH)
    with pytest.raises(loom.DTypeError, match="no meaning for bool"):
        1 - (loom.ones(4, mesh=MESH) > 0)


def test_numpy_scalars_are_numbers():
    dense = torch.randn(6, 4)
    ours = loom.distribute(dense, MESH, "S(0), S(1)")
    for program in (
        lambda t: t.sum(numpy.int64(1)),
        lambda t: t.sum((numpy.int32(0), numpy.int64(1))),
        lambda t: t.reshape(numpy.int64(24)),
        lambda t: t + numpy.bool_(True),
        lambda t: t * numpy.float32(0.5),
        lambda t: numpy.float64(0.5) * t,
    ):
        check_same(program(ours), program(dense))
    assert str(ours.reshape(numpy.int64(24)).topology).startswith("f32[24]")


def test_arguments_with_equal_hashes_are_told_apart():
    assert hash(numpy.float64(-1)) == hash(numpy.float64(-2))
    dense = torch.randn(2, 3, 4)
    ours = loom.distribute(dense, MESH, "S(0), R")
    for scale in (numpy.float64(-1), numpy.float64(-2)):
        found = F.scaled_dot_product_attention(ours, ours, ours, scale=scale)
        check_same(found, F.scaled_dot_product_attention(dense, dense, dense, scale=float(scale)))


@pytest.mark.parametrize("program", [lambda t: t.sum(5), lambda t: t.sum((0, 0)), lambda t: t.amax(1)])
def test_a_dim_that_a_number_does_not_have_is_refused(program):
    with pytest.raises(loom.ShapeError):
        program(loom.ones((), mesh=MESH))


@pytest.mark.parametrize("dim", [1.5, "a"])
def test_what_is_no_dim_is_refused(dim):
    with pytest.raises(loom.ArgumentError, match="takes the number of a dim"):
        loom.ones(4, mesh=MESH).sum(dim)


def test_a_number_is_no_matrix():
    with pytest.raises(loom.ArgumentError, match="matmul takes a tensor for 'other', not 2"):
        loom.ones(4, 4, mesh=MESH) @ 2


def test_linear_takes_a_weight_of_one_dim():
    dense, weight = torch.randn(6, 4), torch.randn(4)
    check_same(F.linear(loom.distribute(dense, MESH, "S(0), R"), weight), F.linear(dense, weight))


@pytest.mark.parametrize("placed", ["R, R", "S(0), R", "S(0), S(1)"])
@pytest.mark.parametrize("copied", [lambda t: t.t().contiguous(), lambda t: t.to(torch.float32, copy=True)])
def test_a_copy_is_not_an_alias(placed, copied):
    dense = torch.randn(4, 8)
    ours = loom.distribute(dense, MESH, placed)
    copied(ours).add_(1)
    check_same(ours, dense)


def test_deepcopy_keeps_the_gradient_and_shares_nothing():
    leaf = loom.ones(10, 2, mesh=MESH, placements=INTERIOR).requires_grad_()
    (leaf * 3).sum().backward()
    copied = copy.deepcopy(leaf)
    assert copied.requires_grad
    check_same(copied.grad, torch.full((10, 2), 3.0))
    (copied * 2).sum().backward()
    check_same(copied.grad, torch.full((10, 2), 5.0))
    check_same(leaf.grad, torch.full((10, 2), 3.0))


def test_deepcopy_of_a_parameter_leaves_its_gradient_behind_as_torch_does():
    ours = loom.Parameter(loom.ones(10, 2, mesh=MESH, placements=INTERIOR))
    for leaf in (torch.nn.Parameter(torch.ones(10, 2)), ours):
        (leaf * 3).sum().backward()
        assert copy.deepcopy(leaf).grad is None
    copied = copy.deepcopy(ours)
    (copied * 2).sum().backward()
    check_same(copied.grad, torch.full((10, 2), 2.0))
    check_same(ours.grad, torch.full((10, 2), 3.0))


def test_explain_does_not_write_to_a_plain_out():
    out = torch.zeros(4)
    loom.explain(lambda: torch.add(loom.ones(4, mesh=MESH), 1, out=out))
    assert not out.any()


def test_topologies_are_interned_across_threads():
    barrier = threading.Barrier(4)
    for size in range(200):
        made = [None] * 4

        def make(i, size=size, made=made):
            barrier.wait()
            made[i] = loom.Topology(MESH, (loom.Shard(0), loom.Replicate()), (size + 4000, 7), "f32")

        threads = [threading.Thread(target=make, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({id(each) for each in made}) == 1
