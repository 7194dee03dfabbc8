"""The same values again: in another dtype, layout or memory, in a tensor of their own or in one that is there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.device import queues
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.ops.block_moves import fresh
from meshloom.ttnn.ops.calling import blocks_of, op, operands
from meshloom.ttnn.ops.topologies import alike_topology
from meshloom.ttnn.refusal_levels import refuse_if
from meshloom.ttnn.tensor.converting import converted
from meshloom.ttnn.tensor.formats import DataType, Layout, padded_shape
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import REPLICATE
from meshloom.ttnn.tensor.transfers import check_tensor, to_device

__all__ = ["to"]  # not an op of its own: the op that it chooses is


def _copy_as(
    name: str, tensor: Tensor, dtype: DataType | None = None, layout: Layout | None = None, **how: Any
) -> Tensor:
    """The values of a tensor in one of its own; on the host, or where it is."""
    (block,) = blocks_of(name, tensor)
    kind = dtype or tensor.dtype
    values = converted(block, kind, block) if kind is not tensor.dtype else fresh(block)
    order = Layout.TILE if kind.is_block_float else layout or tensor.layout
    memory, pad = how.get("memory_config") or tensor.memory_config(), how.get("pad_value", tensor._pad)
    return queues.note_write(tensor._like(values, dtype=kind, layout=order, memory_config=memory, pad_value=pad))


@op("to_layout")
def to_layout(tensor: Tensor, layout, dtype=None, memory_config=None, pad_value=0.0) -> Tensor:
    """In rows or in tiles; block floats in rows become bfloat16. What has the layout already is given back as it is."""
    check_tensor("to_layout", tensor)
    if not isinstance(layout, Layout):
        raise ArgumentError(f"ttnn.to_layout: {layout!r} is not a layout", fix="ttnn.TILE_LAYOUT")
    if layout is tensor.layout:
        return tensor
    if layout is Layout.ROW_MAJOR and (dtype or tensor.dtype).is_block_float:
        dtype = DataType.BFLOAT16
    filled = tensor._pad if pad_value is None else pad_value
    return _copy_as("to_layout", tensor, dtype, layout, memory_config=memory_config, pad_value=filled)


@op("to_dtype")
def to_dtype(tensor, dtype) -> Tensor:
    """In another dtype, on the host."""
    check_tensor("to_dtype", tensor)
    refuse_if(
        tensor.device() is not None, "Expected Tensor with HostStorage, got StorageType::DEVICE", "use ttnn.typecast"
    )
    if dtype.is_block_float and tensor.layout is Layout.ROW_MAJOR:
        had, has = (_sides(padded_shape(tensor.shape, order, tensor.tile)) for order in (tensor.layout, Layout.TILE))
        refuse_if(
            had != has,
            f"to_dtype: Converting layout to Layout::TILE implicitly changed physical shape from {had} to {has} due to "
            "alignment constraints. This is currently unsupported. Please pad the tensor explicitly before.",
            "use ttnn.to_layout(tensor, ttnn.TILE_LAYOUT) first",
        )
    return tensor if dtype is tensor.dtype else _copy_as("to_dtype", tensor, dtype)


def _sides(shape: Sequence[int]) -> tuple[int, int]:
    """The rows and the columns that a part has in memory."""
    return math.prod(shape[:-1]), shape[-1]


@op("typecast")
def typecast(
    input_tensor, dtype=None, output_dtype=None, *, input_dtype=None, memory_config=None, output_tensor=None
) -> Tensor:
    """In another dtype: `typecast(x, dtype)` or `typecast(x, input_dtype, output_dtype)`."""
    check_tensor("typecast", input_tensor)
    wanted, told = (output_dtype, input_dtype or dtype) if output_dtype is not None else (dtype, input_dtype)
    if not isinstance(wanted, DataType):
        raise ArgumentError("ttnn.typecast: it is not said to which dtype", fix="ttnn.typecast(x, ttnn.float32)")
    if told is not None and told is not input_tensor.dtype:
        raise OperandError(f"ttnn.typecast: the tensor is {input_tensor.dtype}, not {told}")
    if output_tensor is not None:
        return copy(_copy_as("typecast", input_tensor, wanted), output_tensor)
    return _copy_as("typecast", input_tensor, wanted, memory_config=memory_config)


@op("experimental.typecast")
def experimental_typecast(input_tensor, dtype, memory_config=None, optional_output_tensor=None) -> Tensor:
    """`typecast` with everything by position."""
    found: Tensor = typecast(input_tensor, dtype, memory_config=memory_config, output_tensor=optional_output_tensor)
    return found


@op("clone")
def clone(input, *, dtype=None, memory_config=None) -> Tensor:
    """The same values in a tensor of their own."""
    check_tensor("clone", input)
    return _copy_as("clone", input, dtype, memory_config=memory_config)


@op("to_memory_config")
def to_memory_config(tensor: Tensor, memory_config, dtype=None, output_tensor=None) -> Tensor:
    """In another memory, or spread over it otherwise."""
    check_tensor("to_memory_config", tensor)
    if not isinstance(memory_config, MemoryConfig):
        raise ArgumentError(f"ttnn.to_memory_config: {memory_config!r} is not a MemoryConfig")
    if output_tensor is not None:
        return copy(tensor, output_tensor)
    if memory_config == tensor.memory_config() and dtype in (None, tensor.dtype):
        return tensor
    return _copy_as("to_memory_config", tensor, dtype, memory_config=memory_config)


def to(
    tensor: Tensor,
    target: MeshDevice | DataType | Layout | MemoryConfig,
    memory_config: MemoryConfig | None = None,
    *,
    cq_id: int | None = None,
) -> Tensor:
    """On a mesh, in a dtype, in a layout or in a memory config, by what is given.

    >>> from meshloom import ttnn
    >>> ttnn.to(ttnn.ones([2, 2]), ttnn.float32).dtype
    DataType.FLOAT32
    """
    check_tensor("to", tensor)
    if isinstance(target, MeshDevice):
        return to_device(tensor, target, memory_config, cq_id=cq_id)
    if isinstance(target, Layout):
        return to_layout(tensor, target, memory_config=memory_config)
    if isinstance(target, MemoryConfig):
        return to_memory_config(tensor, target)
    if not isinstance(target, DataType):
        raise ArgumentError(
            f"ttnn.to: {target!r} is no mesh, dtype, layout or memory config", fix="ttnn.to(x, ttnn.float32)"
        )
    if target is tensor.dtype and memory_config in (None, tensor.memory_config()):
        return tensor
    return typecast(tensor, target, memory_config=memory_config)


@op("copy")
def copy(input_a, input_b) -> Tensor:
    """Write the values of the first into the second, in its dtype."""
    check_tensor("copy", input_a)
    check_tensor("copy", input_b)
    operands("copy", input_a, input_b)
    if input_a.shape != input_b.shape:
        raise OperandError(f"ttnn.copy: shapes differ: {list(input_a.shape)} and {list(input_b.shape)}")
    values = converted(input_a.block, input_b.dtype) if input_a.dtype is not input_b.dtype else input_a.block
    input_b.write(values, label=input_a.tensor_topology())
    input_b.update_tensor_topology(input_a.tensor_topology())
    return queues.note_write(input_b)


@op("assign", spelled={"input_tensor": "input_a"})
def assign(input_a, input_b=None, *, memory_config=None, dtype=None, output_tensor=None) -> Tensor:
    """The same values in a tensor of their own, or written into one that is there."""
    target = input_b if input_b is not None else output_tensor
    return clone(input_a, dtype=dtype, memory_config=memory_config) if target is None else copy(input_a, target)


@op("deallocate")
def deallocate(tensor, force=True) -> None:
    """Give the memory of a tensor back; a second time does nothing."""
    check_tensor("deallocate", tensor)
    tensor.deallocate(force)


def _elsewhere(name: str, tensor: Tensor, memory_config: MemoryConfig | None) -> Tensor:
    """The values of a tensor at the address that is first free without it; the tensor itself is gone."""
    check_tensor(name, tensor)
    _, (block,) = operands(name, tensor)
    grid, label, device, coords = tensor.grid, tensor.tensor_topology(), tensor.device(), tensor._coords
    if coords is None and set(label.placements()) == {REPLICATE}:
        label = alike_topology(grid)  # it is made anew on the devices
    config = memory_config or tensor.memory_config()
    tensor.deallocate(force=True)
    made = Tensor(block, grid, tensor.dtype, tensor.layout, label, device, config, tensor.tile, tensor._pad, coords)
    return queues.note_write(made)


@op("reallocate")
def reallocate(tensor, memory_config=None) -> Tensor:
    """Moved together with what else is there; the argument is deallocated."""
    return _elsewhere("reallocate", tensor, memory_config)


@op("move")
def move(input_tensor, *, memory_config=None) -> Tensor:
    """In other memory; the argument is deallocated."""
    return _elsewhere("move", input_tensor, memory_config)
