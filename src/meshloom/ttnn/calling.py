"""What all ops share: the table of them, the checks of their operands, and how a result becomes a tensor.

An op is a function with the arguments that TTNN's has, registered under its dotted name by `@op`. It asks `operands`
for blocks, computes a block with plain array calls, says the label of the result, and `result` does the rest: dtype and
rounding, room in memory, `output_tensor=`. Arguments that only concern the speed of hardware are checked for their type
in one place (`CHECKS`) and then left alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.device import MeshDevice
from meshloom.ttnn.formats import DataType, Layout, rounded
from meshloom.ttnn.memory import MemoryConfig
from meshloom.ttnn.parts import Block
from meshloom.ttnn.tensor import Tensor
from meshloom.ttnn.topology import TensorTopology

Function = TypeVar("Function", bound=Callable[..., Any])

TABLE: dict[str, Callable[..., Any]] = {}  # every op by its dotted name: "add", "transformer.concatenate_heads"
CHECKS: dict[str, Callable[[Any], bool]] = {}  # arguments that concern speed only: what they may be


def op(name: str, *aliases: str) -> Callable[[Function], Function]:
    """Register an op under its name and its aliases."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                _check(name, kwargs)
            return function(*args, **kwargs)

        for each in (name, *aliases):
            TABLE[each] = call
        return call  # type: ignore[return-value]

    return register


def _check(name: str, kwargs: dict[str, Any]) -> None:
    for argument, value in kwargs.items():
        fits = CHECKS.get(argument)
        if fits is not None and value is not None and not fits(value):
            raise ArgumentError(f"ttnn.{name}: {argument}={value!r} is of the wrong type")


def operands(name: str, *tensors: Tensor) -> tuple[MeshDevice, list[Block]]:
    """The device that all operands are on, and their blocks. One that only knows its mesh is moved there."""
    device: MeshDevice | None = None
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"ttnn.{name}: operand {position} is a {type(tensor).__name__}, not a ttnn.Tensor")
        here = tensor.device()
        if here is None:
            raise OperandError(
                f"ttnn.{name}: operand {position} is on the host", fix="ttnn.to_device(tensor, mesh_device)"
            )
        if device is not None and here is not device:
            raise OperandError(f"ttnn.{name}: operands are on {device} and {here}", fix="move them to one mesh")
        device = here
    assert device is not None
    return device, [tensor.block for tensor in tensors]


def result(
    block: Block,
    like: Tensor,
    *,
    topology: TensorTopology,
    dtype: DataType | None = None,
    layout: Layout | None = None,
    memory_config: MemoryConfig | None = None,
    output_tensor: Tensor | None = None,
) -> Tensor:
    """A block as a tensor: format, label and memory as its first operand's, unless said otherwise."""
    kind = dtype or (output_tensor.dtype if output_tensor is not None else like.dtype)
    values = rounded(block, kind)
    if output_tensor is not None:
        return _written(values, output_tensor, topology)
    return Tensor(
        values,
        like.grid,
        kind,
        layout or like.layout,
        topology,
        like.device(),
        memory_config or like.memory_config(),
        like.tile,
    )


def _written(values: Block, output: Tensor, topology: TensorTopology) -> Tensor:
    axes = len(output.grid)
    if values.shape[axes:] != output.block.shape[axes:]:
        raise OperandError(
            f"output_tensor has shape {list(output.shape)}, the result {list(values.shape[axes:])}",
            fix="give one of the shape of the result",
        )
    room = output.block
    if any(have < need for have, need in zip(room.shape[:axes], values.shape[:axes], strict=True)):
        output._block = torch.empty_like(values)  # it held the same everywhere, and now does not
    output.block.copy_(values)
    output.update_tensor_topology(topology)
    return output
