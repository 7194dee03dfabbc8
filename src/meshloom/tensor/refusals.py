"""What tensors on a mesh cannot be: leaves that are partial, one number of many, operands of torch.func transforms."""

from __future__ import annotations

import math

import torch

from meshloom.engines import private
from meshloom.errors import ArgumentError, GradientError, MeshError, UnsupportedError
from meshloom.mesh import Mesh
from meshloom.placement import Partial, Topology
from meshloom.types import is_floating


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


def refuse_moved_parameter(topology: Topology, mesh: Mesh) -> None:
    """A parameter stays on the mesh of its tensor."""
    if topology.mesh != mesh:
        raise MeshError(
            "a parameter was asked for on another mesh than that of its tensor",
            tensor=topology,
            asked=mesh,
            fix="loom.Parameter(x.to_torch(), mesh, placements)",
        )


def refuse_parameter(topology: Topology, requires_grad: bool) -> None:
    """A parameter is a leaf; where it requires a gradient, its dtype has one."""
    refuse_partial_leaf(topology)
    if requires_grad and not is_floating(topology.dtype):
        fix = "cast it: x.float(), or give requires_grad=False"
        raise GradientError(f"a parameter of {topology.dtype} has no gradient", fix=fix)


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
