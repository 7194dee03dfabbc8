"""What tensors on a mesh cannot be: leaves that are partial, one number of many, operands of torch.func transforms."""

from __future__ import annotations

import math

import torch

from meshloom.engines import private
from meshloom.errors import ArgumentError, GradientError, UnsupportedError
from meshloom.placement import Partial, Topology


def refuse_partial_leaf(topology: Topology) -> None:
    """A Partial tensor cannot be a leaf: its gradient would belong to a value nobody holds."""
    for axis, placement in enumerate(topology.placements):
        if isinstance(placement, Partial):
            name = topology.mesh.axes[axis]
            raise GradientError(
                f"a tensor that is {placement} on axis {name!r} cannot require a gradient",
                tensor=topology,
                fix=f"redistribute it first: x.redistribute({{{name!r}: Replicate()}}).requires_grad_()",
            )


def refuse_several(topology: Topology) -> None:
    """Only a tensor of one element is one number."""
    if (count := math.prod(topology.shape)) != 1:
        raise ArgumentError(
            f"item() takes a tensor of one element, not {count}",
            tensor=topology,
            fix="use x.tolist() or x.to_torch()",
        )


def transforms_refused() -> UnsupportedError:
    """What a torch.func transform of our tensors raises."""
    return UnsupportedError(
        "torch.func transforms do not work on meshloom tensors",
        fix="use backward() or torch.autograd.grad for gradients; shard a batch dim instead of vmap",
    )


def refuse_transforms(value: torch.Tensor) -> None:
    """torch.func transforms hand out wrapped tensors that no mesh knows."""
    if private.is_functorch_wrapped_tensor(value):
        raise transforms_refused()
