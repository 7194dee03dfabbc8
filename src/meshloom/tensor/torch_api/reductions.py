"""Fronts of reductions, and what is made of them: norms, distances, similarities."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.ops import OPS
from meshloom.ops.binding import bind
from meshloom.tensor.calling import Overload, invoke, pure, table_call, table_results
from meshloom.tensor.fallback import fallback
from meshloom.tensor.reading import as_tensor, find_mesh
from meshloom.tensor.writing import write_out
from meshloom.types import Dims


def _max(name: str) -> Overload:
    """max and min: all elements, along a dim, or of two tensors."""
    amax, pair = {"max": ("amax", "maximum"), "min": ("amin", "minimum")}[name]

    def overload(input: torch.Tensor, *args: object, **kwargs: object) -> Any:
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, torch.Tensor):
            return table_call(pair, input, other, **{k: v for k, v in kwargs.items() if k != "other"})
        if args or "dim" in kwargs:
            return table_results(f"{name}_dim", input, *args, **kwargs)
        return table_call(amax, input, **kwargs)

    return overload


def _make_variance(name: str) -> Overload:
    """var and std, whose second argument may be `unbiased`."""

    def overload(input: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if args and isinstance(args[0], bool):
            args = (None, *args)
        return table_call(name, input, *args, **kwargs)

    return overload


def _with_mean(name: str) -> Overload:
    """var_mean and std_mean: two ops over the same dims."""

    def overload(input: torch.Tensor, *args: object, **kwargs: object) -> Any:
        placed = (None, *args) if args and isinstance(args[0], bool) else args
        given = bind(OPS[name], (input, *placed), {key: each for key, each in kwargs.items() if key != "output"})
        return invoke(name, (input, *args), kwargs), table_call("mean", input, given["dim"], given["keepdim"])

    return overload


def _truth(name: str) -> Overload:
    """any and all: over no dims, which for other reductions means all of them, every element is taken by itself."""

    def overload(input: torch.Tensor, *args: object, **kwargs: Any) -> Any:
        dim = args[0] if args else kwargs.get("dim")
        if not isinstance(dim, (tuple, list)) or dim:
            return table_call(name, input, *args, **kwargs)
        held = table_call("ne", input, 0, output=kwargs.get("output"))
        found = table_call("to", held, torch.uint8) if input.dtype == torch.uint8 else held
        return write_out(found, kwargs["out"]) if kwargs.get("out") is not None else found

    return overload


def _aminmax(input: torch.Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[torch.Tensor, ...]:
    low, high = (table_call(name, input, dim, keepdim) for name in ("amin", "amax"))
    return torch.return_types.aminmax((low, high))


def _along_one_dim(name: str) -> Overload:
    """median of all elements shares its gradient between equal ones, as only torch's own does."""

    def overload(input: torch.Tensor, *args: object, **kwargs: object) -> Any:
        if args or kwargs:
            return table_results(name, input, *args, **kwargs)
        return fallback(getattr(torch, name), (input,), {}, name)

    return overload


def _norm(
    input: torch.Tensor,
    p: float | str | None = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    out: object = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """torch.norm: the p-norm of the elements, over some dims or all."""
    if p == "nuc":
        return fallback(torch.norm, (input, p, dim, keepdim, out, dtype), {}, "norm")
    order = 2 if p in ("fro", None) else p
    return table_call("linalg_vector_norm", input, order, dim, keepdim, dtype=dtype, out=out)


def _linalg_norm(
    input: torch.Tensor,
    ord: float | str | None = None,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    out: object = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """torch.linalg.norm: of a vector, or of a matrix where that is the norm of its elements."""
    dims = (dim,) if isinstance(dim, int) else dim if dim is not None else tuple(range(input.ndim))
    of_elements = ord is None or (len(dims) == 1 and not isinstance(ord, str)) or (len(dims) == 2 and ord == "fro")
    if not of_elements:
        return fallback(torch.linalg.norm, (input, ord, dim, keepdim), {"out": out, "dtype": dtype}, "linalg_norm")
    order = 2 if ord in (None, "fro") else ord
    return table_call("linalg_vector_norm", input, order, dim, keepdim, dtype=dtype, out=out)


def _matrix_norm(
    input: torch.Tensor,
    ord: float | str = "fro",
    dim: Dims = (-2, -1),
    keepdim: bool = False,
    *,
    out: object = None,
    dtype: torch.dtype | None = None,
) -> Any:
    if ord != "fro":
        return fallback(
            torch.linalg.matrix_norm, (input, ord, dim, keepdim), {"out": out, "dtype": dtype}, "linalg_matrix_norm"
        )
    return table_call("linalg_vector_norm", input, 2, dim, keepdim, dtype=dtype, out=out)


def _dist(input: torch.Tensor, other: object, p: float = 2) -> torch.Tensor:
    return table_call("linalg_vector_norm", table_call("sub", input, other), p)


def _normalize(
    input: torch.Tensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: object = None
) -> torch.Tensor:
    size = table_call("linalg_vector_norm", input, p, dim, True)
    return table_call("div", input, table_call("clamp_min", size, eps), out=out)


def _cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    mesh = find_mesh((x1, x2))
    if mesh is not None:  # one of them may be a plain tensor
        x1, x2 = as_tensor(x1, mesh), as_tensor(x2, mesh)
    if x1.shape != x2.shape:  # a dim of size 1 counts as often as it is read
        shape = torch.broadcast_shapes(x1.shape, x2.shape)
        x1, x2 = (table_call("expand", each, *shape) for each in (x1, x2))
    product = table_call("mul", *(_normalize(each, 2.0, dim, eps) for each in (x1, x2)))
    return table_call("sum", product, dim)


def _pairwise_distance(
    x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> torch.Tensor:
    apart = table_call("add", table_call("sub", x1, x2), eps)
    return table_call("linalg_vector_norm", apart, p, -1, keepdim)


REDUCTIONS: dict[str, Overload] = {
    **pure({name: _max(name) for name in ("max", "min")}),
    **pure({name: _make_variance(name) for name in ("var", "std")}),
    **pure({name: _truth(name) for name in ("any", "all")}),
    "var_mean": _with_mean("var"),
    "std_mean": _with_mean("std"),
    "aminmax": _aminmax,
    "median": _along_one_dim("median"),
    "nanmedian": _along_one_dim("nanmedian"),
    "norm": _norm,
    "linalg_norm": _linalg_norm,
    "linalg_matrix_norm": _matrix_norm,
    "dist": _dist,
    "normalize": _normalize,
    "cosine_similarity": _cosine_similarity,
    "pairwise_distance": _pairwise_distance,
}
