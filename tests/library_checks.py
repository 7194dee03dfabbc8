"""Whether models of public libraries are on a mesh what they are dense: values, states, gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import meshloom as loom
from library_models import IS_DENSE


def dense(value: Any) -> torch.Tensor:
    """The value that a tensor has, wherever it is, without its gradient."""
    return value.detach() if type(value) in (torch.Tensor, torch.nn.Parameter) else value.detach().to_torch()


def check_equal(ours: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """An error unless two tensors have the same shape, dtype and values."""
    assert tuple(ours.shape) == tuple(expected.shape)
    torch.testing.assert_close(dense(ours), dense(expected), rtol=tolerance, atol=tolerance)


def check_states(ours: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float = 2e-5) -> None:
    """An error unless two dictionaries of tensors are equal."""
    assert sorted(ours) == sorted(expected)
    for name, value in expected.items():
        check_equal(ours[name], value, tolerance)


def check_gradients(ours: torch.nn.Module, expected: torch.nn.Module) -> None:
    """An error unless every parameter has the gradient of its twin, and at least one has any."""
    pairs = list(zip(ours.named_parameters(), expected.parameters(), strict=True))
    for (name, p), q in pairs:
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            check_equal(p.grad, q.grad, 5e-5)
    assert any(q.grad is not None for _, q in pairs)


def check_on_mesh(model: torch.nn.Module) -> None:
    """An error if a parameter has left the mesh."""
    left = [name for name, p in model.named_parameters() if not IS_DENSE and not isinstance(p, loom.Parameter)]
    assert not left, left
