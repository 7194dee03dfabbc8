"""Fronts of ops that cut, join and turn: other spellings of ops of the table."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from meshloom.errors import ShapeError
from meshloom.ops.labels import normal_dim
from meshloom.ops.shapes import split_sizes
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import Overload, pure, table_call, table_results
from meshloom.tensor.fallback import fallback
from meshloom.tensor.writing import write_out


def _unbind(input: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    shape = input.shape
    return () if shape and not shape[normal_dim(dim, len(shape))] else table_results("unbind", input, dim)


def _repeat_interleave(input: torch.Tensor, repeats: object = None, dim: int | None = None, **kwargs: object) -> Any:
    """Repeats given by a tensor make a shape that depends on values: no rule."""
    if isinstance(repeats, torch.Tensor) or repeats is None:
        given = () if repeats is None else (repeats, dim)
        return fallback(torch.repeat_interleave, (input, *given), kwargs, "repeat_interleave")
    return table_call("repeat_interleave", input, repeats, dim, **kwargs)


def _tensor_split(
    input: torch.Tensor,
    indices_or_sections: Any = None,
    dim: int = 0,
    *,
    indices: Any = None,
    sections: Any = None,
    tensor_indices_or_sections: Any = None,
) -> Any:
    given = (indices_or_sections, indices, sections, tensor_indices_or_sections)
    asked: Any = next((each for each in given if each is not None), None)
    shape = input.shape
    place = normal_dim(dim, len(shape))
    whole = isinstance(asked, (int, tuple, list)) and bool(shape)
    if not whole or split_sizes(shape[place], asked) is None:
        return fallback(torch.tensor_split, (input, asked), {"dim": dim}, "tensor_split")
    return table_results("tensor_split", input, asked, place)


def _split_along(name: str, dim: int, least: int) -> Overload:
    """hsplit, vsplit, dsplit: equal sections or indices, along a fixed dim."""

    def overload(
        input: torch.Tensor, indices_or_sections: object = None, *, indices: object = None, sections: object = None
    ) -> Any:
        asked = next((each for each in (indices_or_sections, indices, sections) if each is not None), None)
        shape = input.shape
        if len(shape) < least:
            raise ShapeError(f"{name} needs {least} dims or more and got {list(shape)}")
        place = 0 if name == "hsplit" and len(shape) == 1 else dim
        if isinstance(asked, int) and (asked < 1 or shape[place] % asked):
            raise ShapeError(f"{name} does not cut size {shape[place]} into {asked} equal sections")
        return _tensor_split(input, asked, place)

    return overload


def _at_least(ndim: int) -> Overload:
    """atleast_1d and its kind: new dims as numpy puts them."""

    def overload(*tensors: object) -> Any:
        if len(tensors) == 1 and isinstance(tensors[0], (tuple, list)):
            tensors = tuple(tensors[0])
        found = tuple(_raise_rank(each, ndim) for each in tensors)
        return found[0] if len(found) == 1 else found

    return overload


def _raise_rank(input: Any, ndim: int) -> Any:
    shape = tuple(input.shape)
    if len(shape) >= ndim:
        return input
    if ndim == 3:
        wide = {0: (1, 1, 1), 1: (1, *shape, 1), 2: (*shape, 1)}[len(shape)]
    else:
        wide = (1,) * (ndim - len(shape)) + shape
    return input.reshape(wide)


def _make_stack(ndim: int, dim: int, column: bool = False) -> Overload:
    """hstack and its kind: raise to `ndim` dims, then join; what was asked of the result concerns the joining."""

    def overload(tensors: Sequence[object], **kwargs: object) -> Any:
        with state.changed(output=None):
            raised = [_column(each) if column else _raise_rank(each, ndim) for each in tensors]
        place = 0 if dim == 1 and raised[0].ndim == 1 else dim
        return table_call("cat", raised, place, **kwargs)

    return overload


def _cat(tensors: object, *args: object, **kwargs: object) -> Any:
    """torch joins a tensor of shape [0] with tensors of any number of dims, for programs of its first years."""
    given = tensors if isinstance(tensors, (tuple, list)) else ()
    shapes = [tuple(each.shape) for each in given]
    if (0,) not in shapes or all(len(shape) == 1 for shape in shapes):
        return table_call("cat", tensors, *args, **kwargs)
    kept = [each for each, shape in zip(given, shapes, strict=True) if shape != (0,)]
    has_gradient = any(each.requires_grad and shape == (0,) for each, shape in zip(given, shapes, strict=True))
    if has_gradient or not any(isinstance(each, Tensor) for each in kept):  # a gradient without elements, or no mesh
        return fallback(torch.cat, (tensors, *args), kwargs, "cat")
    dtype = functools.reduce(torch.promote_types, (each.dtype for each in given))
    found = table_call("cat", kept, *args, **kwargs)
    return found if found.dtype == dtype else table_call("to", found, dtype)


def _column(input: Any) -> Any:
    shape = tuple(input.shape)
    return input if len(shape) > 1 else input.reshape(*(shape or (1,)), 1)


def _diag(input: torch.Tensor, diagonal: int = 0, **kwargs: object) -> torch.Tensor:
    """A matrix of a line, or the line of a matrix; a copy, as in torch."""
    if input.ndim == 1:
        return table_call("diag_embed", input, diagonal, **kwargs)
    if input.ndim != 2:
        raise ShapeError(f"diag takes a line or a matrix, not {list(input.shape)}", fix="use diagonal")
    with state.changed(output=None):
        line = table_call("diagonal", input, diagonal)
    return table_call("clone", line, **kwargs)


def _matrix_diagonal(A: torch.Tensor, *, offset: int = 0, dim1: int = -2, dim2: int = -1) -> torch.Tensor:
    return table_call("diagonal", A, offset, dim1, dim2)


def _make_flip(name: str, dim: int) -> Overload:
    def overload(input: torch.Tensor) -> torch.Tensor:
        if input.ndim <= dim:
            raise ShapeError(f"{name} needs {dim + 1} dims or more and got {list(input.shape)}")
        return table_call("flip", input, dim)

    return overload


def _msort(input: torch.Tensor, *, out: object = None) -> Any:
    found = table_results("sort", input, 0)[0]
    return found if out is None else write_out(found, out)


ARRANGING: dict[str, Overload] = {
    **pure({"unbind": _unbind, "cat": _cat}),
    "repeat_interleave": _repeat_interleave,
    "tensor_split": _tensor_split,
    "hsplit": _split_along("hsplit", 1, 1),
    "vsplit": _split_along("vsplit", 0, 2),
    "dsplit": _split_along("dsplit", 2, 3),
    "atleast_1d": _at_least(1),
    "atleast_2d": _at_least(2),
    "atleast_3d": _at_least(3),
    "hstack": _make_stack(1, 1),
    "vstack": _make_stack(2, 0),
    "row_stack": _make_stack(2, 0),
    "dstack": _make_stack(3, 2),
    "column_stack": _make_stack(2, 1, column=True),
    "diag": _diag,
    "linalg_diagonal": _matrix_diagonal,
    "fliplr": _make_flip("fliplr", 1),
    "flipud": _make_flip("flipud", 0),
    "msort": _msort,
}
