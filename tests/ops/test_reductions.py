"""Reductions beyond the walk over the table: what is made of them, and what they communicate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Mesh

MESH = Mesh(dp=2, tp=3)
INF = float("inf")


def dense(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def check_alike(function: Callable[..., Any], *values: torch.Tensor, placements: str = "S(0), S(1)") -> loom.Tensor:
    """The function on the mesh gives what it gives on dense tensors, with gradients."""
    leaves = [value.clone().requires_grad_() for value in values]
    mine = [loom.distribute(value, MESH, placements).requires_grad_() for value in values]
    expected, found = _listed(function(*leaves)), _listed(function(*mine))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.to_torch().detach(), theirs.detach())
    sum(each.square().sum() for each in expected).backward()
    sum(each.square().sum() for each in found).backward()
    for leaf, own in zip(leaves, mine, strict=True):
        torch.testing.assert_close(own.grad.to_torch(), leaf.grad)
    return found[0]


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


COMPOSED: dict[str, Callable[[Any], Any]] = {
    "norm": lambda x: x.norm(),
    "norm of a dim": lambda x: torch.norm(x, 1, 0, True),
    "norm by name": lambda x: torch.norm(x, p="fro", dim=(0, 1)),
    "linalg.norm": lambda x: torch.linalg.norm(x),
    "linalg.norm of rows": lambda x: torch.linalg.norm(x, INF, dim=1),
    "linalg.matrix_norm": lambda x: torch.linalg.matrix_norm(x),
    "normalize": lambda x: F.normalize(x, dim=0),
    "var_mean": lambda x: torch.var_mean(x, dim=1, keepdim=True),
    "std_mean": lambda x: torch.std_mean(x, dim=0, correction=0),
    "std of all": lambda x: x.std(),
    "std biased": lambda x: torch.std(x, False),
    "aminmax": lambda x: tuple(torch.aminmax(x, dim=0)),
    "aminmax of all": lambda x: tuple(x.aminmax()),
    "dist": lambda x: torch.dist(x, x * 2, 3),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_is_made_of_reductions_equals_dense_without_the_fallback(name: str) -> None:
    with loom.record() as log:
        check_alike(COMPOSED[name], dense(7, 5))
    assert not log.fallbacks


def test_similarity_and_distance_of_rows_equal_dense() -> None:
    with loom.record() as log:
        check_alike(lambda x, y: F.cosine_similarity(x, y), dense(7, 5), dense(5, 7).t().contiguous())
        check_alike(lambda x, y: F.pairwise_distance(x, y), dense(7, 5), dense(5, 7).t().contiguous())
    assert not log.fallbacks


def test_norms_that_need_singular_values_go_through_the_fallback() -> None:
    x = loom.distribute(dense(6, 4), MESH, "S(0), R")
    with loom.record() as log:
        torch.testing.assert_close(torch.linalg.norm(x, 2).to_torch(), torch.linalg.norm(dense(6, 4), 2))
        torch.testing.assert_close(torch.norm(x, "nuc").to_torch(), torch.norm(dense(6, 4), "nuc"))
    assert sorted(log.fallbacks) == ["linalg_norm", "norm"]


def test_the_median_of_all_elements_equals_dense() -> None:
    check_alike(torch.median, dense(7, 5))
    check_alike(torch.nanmedian, dense(7, 5))


def test_a_named_tuple_comes_back_as_in_torch() -> None:
    x = loom.distribute(dense(6, 4), MESH, "S(0), R")
    for name, args in (("median", (1,)), ("mode", (1,)), ("kthvalue", (2, 1)), ("cummax", (1,))):
        found, expected = getattr(torch, name)(x, *args), getattr(torch, name)(dense(6, 4), *args)
        assert type(found) is type(expected)
        torch.testing.assert_close(found.values.to_torch(), expected.values)
        assert found.indices.tolist() == expected.indices.tolist()


def told(function: Callable[[], Any]) -> list[str]:
    return [str(each) for each in loom.explain(function).plans[-1].forward]


def test_a_norm_all_reduces_one_number_and_an_extreme_one_its_maximum() -> None:
    x = loom.distribute(dense(8, 4), Mesh(w=4), "S(0)")
    assert told(lambda: torch.linalg.vector_norm(x)) == ["all_reduce(sum) over w of 4: 6 B"]
    assert told(lambda: torch.linalg.vector_norm(x, INF)) == ["all_reduce(max) over w of 4: 6 B"]


def test_a_scan_over_a_sharded_dim_gathers_one_total_per_device() -> None:
    x = loom.distribute(dense(8, 4), Mesh(w=4), "S(0)")
    assert told(lambda: x.cumsum(0)) == ["all_gather over w of 4: 48 B"]  # 4 totals of 4 devices, but its own
    assert told(lambda: x.cumsum(1)) == []
    assert told(lambda: x.cummax(0)) == ["all_gather over w of 4: 144 B"]  # an index travels with each


def test_a_scan_skips_padding_in_the_middle() -> None:
    value = torch.arange(1.0, 11.0)
    x = loom.distribute(value, Mesh(a=2, b=4), "S(0), S(0)")  # 2, 2, 1, 0 and 2, 2, 1, 0
    assert x.cumsum(0).tolist() == value.cumsum(0).tolist()
    assert x.cumprod(0).tolist() == value.cumprod(0).tolist()
    assert x.cummax(0).indices.tolist() == list(range(10))


def test_the_padding_of_a_partial_extreme_is_zero_where_devices_hold_nothing() -> None:
    x = loom.distribute(torch.randn(10, 1), loom.open_mesh((4, 4)), "R, R")
    found = loom.amax(x, -1, output="P(max), S(0)")
    assert found._data[:, 10:].eq(0).all()
    assert torch.equal(found.to_torch(), x.to_torch().amax(-1))


@pytest.mark.parametrize("order", [INF, -INF, 0, 1, 2, 3, -1, -2, 0.5])
def test_norms_of_complex_tensors_equal_dense_for_every_order(order: float) -> None:
    value = torch.complex(dense(7, 5), dense(5, 7).T)
    for mesh, placements in ((Mesh(w=2), "S(0)"), (MESH, "S(0), S(0)"), (MESH, "S(1), S(0)"), (MESH, "P(sum), S(1)")):
        for dim in (None, 0, 1):
            theirs = value.clone().requires_grad_()
            leaf = loom.distribute(value, mesh, {}).requires_grad_()
            found = torch.linalg.vector_norm(leaf.redistribute(placements), order, dim)
            expected = torch.linalg.vector_norm(theirs, order, dim)
            torch.testing.assert_close(found.to_torch().detach(), expected.detach())
            if order:  # a count has no gradient
                found.sum().backward(), expected.sum().backward()
                torch.testing.assert_close(leaf.grad.to_torch(), theirs.grad)


@pytest.mark.parametrize("order", [INF, -INF, -1, 2])
def test_norms_of_integers_are_refused_as_in_torch(order: float) -> None:
    for placements in ("R, R", "S(0), S(0)"):
        with pytest.raises(RuntimeError, match="floating point or complex"):
            torch.linalg.vector_norm(loom.distribute(torch.arange(7), MESH, placements), order)


@pytest.mark.parametrize("shape", [(0, 5), (0, 2, 5)])
def test_the_mean_of_nothing_is_nan_and_its_padding_zero(shape: tuple[int, ...]) -> None:
    ours, wanted = loom.zeros(*shape, mesh=MESH, placements={"tp": loom.Shard(len(shape) - 1)}), torch.zeros(shape)
    for _ in range(2):
        assert ours.mean(0).isnan().sum().item() == wanted.mean(0).isnan().sum().item()
        assert ours.mean(0, True).isnan().sum().item() == wanted.mean(0, True).isnan().sum().item()
