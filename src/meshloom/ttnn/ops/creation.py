"""Tensors from nothing: the same on every device, or random numbers on each.

Without a device a tensor is on the host. On a mesh every device holds the same values, so they are kept once; `rand`
with a mapper, `uniform` and `bernoulli` draw for every device by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.device import queues
from meshloom.ttnn.ops.calling import Made, make, op, operands, register, result
from meshloom.ttnn.ops.topologies import EACH, alike_topology, replicated_topology
from meshloom.ttnn.tensor.boxes import take_box
from meshloom.ttnn.tensor.formats import DataType, Layout, rounded
from meshloom.ttnn.tensor.memory import DRAM_MEMORY_CONFIG
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import ALONE, REPLICATE, UNKNOWN, PlacementPartial

Shapes = Sequence[int]


def make_tensor(
    values: Block, *, dtype=None, layout=None, device=None, memory_config=None, optional_tensor: Tensor | None = None
) -> Tensor:
    """Values of one part as a tensor, on the host or the same on every device."""
    if optional_tensor is not None:
        axes = len(optional_tensor.grid)
        block = values.reshape(*(1,) * axes, *values.shape)
        return result(
            block,
            optional_tensor,
            topology=optional_tensor.tensor_topology(),
            dtype=optional_tensor.dtype,
            output_tensor=optional_tensor,
        )
    kind = dtype or DataType.BFLOAT16
    order = Layout.TILE if kind.is_block_float else layout or Layout.ROW_MAJOR
    grid = device.grid if device is not None else (1, 1)
    block = rounded(values, kind).reshape(*(1,) * len(grid), *values.shape)
    label = replicated_topology(grid) if device is not None else ALONE
    return queues.note_write(Tensor(block, grid, kind, order, label, device, memory_config or DRAM_MEMORY_CONFIG))


def _made_on_devices(tensor: Tensor) -> Tensor:
    """A tensor that devices made by themselves: its label is about the axes of the mesh."""
    if tensor.device() is not None:
        tensor.update_tensor_topology(alike_topology(tensor.grid))
    return tensor


def _fill_shape(shape: Shapes, value: float, dtype: DataType | None) -> Block:
    whole = dtype is not None and not dtype.is_float
    return torch.full(tuple(shape), value, dtype=torch.int64 if whole and float(value).is_integer() else torch.float32)


def _like(
    tensor: Tensor, value: float, dtype: DataType | None = None, layout: Layout | None = None, **how: Any
) -> Tensor:
    kind = dtype or tensor.dtype
    values = _fill_shape(tensor.shape, value, kind)
    if how.get("optional_tensor") is not None or how.get("device") not in (None, tensor.device()):
        return make_tensor(values, dtype=kind, layout=layout or tensor.layout, **how)
    block = values.reshape(*(1,) * len(tensor.grid), *values.shape)
    label = tensor.tensor_topology()
    alike = [REPLICATE if isinstance(each, PlacementPartial) else each for each in label.placements()]
    topology = label.with_placements(alike)  # one value is no terms of a sum
    return result(block, tensor, topology=topology, dtype=kind, layout=layout, memory_config=how.get("memory_config"))


def _constant(name: str, value: float, doc: str, on_devices: bool = False) -> None:
    """Register an op that makes a tensor of one value, on the devices or by way of the host, and the one that makes it
    like another."""

    def call(shape: Shapes, **how: Any) -> Tensor:
        made = make_tensor(_fill_shape(shape, value, how.get("dtype")), **how)
        return _made_on_devices(made) if on_devices else made

    def like(tensor: Tensor, **how: Any) -> Tensor:
        return _like(tensor, value, **how)

    register(name, f"A tensor {doc}.", call, more=make_tensor)
    register(f"{name}_like", f"A tensor {doc}, with the shape, format and place of another.", like, more=make_tensor)


_constant("zeros", 0, "of zeros")
_constant("ones", 1, "of ones")
_constant("empty", 0, "to be written to; it holds zeros until then", on_devices=True)


@op("full", more=make_tensor)
def full(shape, fill_value, **how) -> Tensor:
    """A tensor of one value."""
    return make_tensor(_fill_shape(shape, fill_value, how.get("dtype")), **how)


@op("full_like", more=make_tensor)
def full_like(tensor, fill_value, **how) -> Tensor:
    """A tensor of one value with the shape, format and place of another."""
    return _like(tensor, fill_value, **how)


@op("arange", more=make_tensor)
def arange(start: int | None = None, end: int | None = None, step: int = 1, **how) -> Tensor:
    """The numbers from `start` (or 0) up to but without `end`."""
    first, last = (0, start) if end is None else (start or 0, end)
    if last is None:
        raise ArgumentError("ttnn.arange needs an end")
    if step == 0:
        raise ArgumentError("ttnn.arange: step is 0", fix="a step that leads from start to end")
    count = max(0, -(-(last - first) // step))
    return make_tensor(first + step * torch.arange(count), **how)


@op("moreh_arange", more=make_tensor)
def moreh_arange(
    start: float = 0, end: float | None = None, step: float = 1, device=None, *, output=None, untilize_out=False, **how
) -> Tensor:
    """The numbers from `start` up to but without `end`."""
    if end is None or device is None:
        raise ArgumentError("ttnn.moreh_arange needs an end and a device", fix="moreh_arange(end=..., device=...)")
    layout = Layout.ROW_MAJOR if untilize_out else Layout.TILE
    return make_tensor(torch.arange(start, end, step), layout=layout, device=device, optional_tensor=output, **how)


@op("moreh_full", more=make_tensor)
def moreh_full(shape, fill_value, device, *, layout=Layout.TILE, **how) -> Tensor:
    """A tensor of one value."""
    return make_tensor(_fill_shape(shape, fill_value, how.get("dtype")), layout=layout, device=device, **how)


@op("moreh_full_like", more=make_tensor)
def moreh_full_like(input, fill_value, **how) -> Tensor:
    """A tensor of one value with the shape, format and place of another."""
    return _like(input, fill_value, **how)


# random numbers


def _generator(seed: int | None) -> torch.Generator | None:
    """A generator of its own for a seed; 0 and None draw from torch's default one."""
    return torch.Generator().manual_seed(seed) if seed else None


@op("rand", more=make_tensor)
def rand(shape, device, *, layout=Layout.TILE, low=0.0, high=1.0, seed=0, mesh_mapper: Any = None, **how) -> Tensor:
    """Numbers drawn evenly from `low` to `high`; with a mapper config, of the whole that it distributes."""
    values = torch.rand(tuple(shape), generator=_generator(seed)) * (high - low) + low
    if mesh_mapper is None:
        return _made_on_devices(make_tensor(values, layout=layout, device=device, **how))
    from meshloom.ttnn.tensor.converting import from_torch
    from meshloom.ttnn.tensor.mappers import create_mesh_mapper

    mapper = create_mesh_mapper(device, mesh_mapper)
    return from_torch(values, **{"dtype": DataType.BFLOAT16, **how}, layout=layout, device=device, mesh_mapper=mapper)


@op("randn", more=make_tensor)
def randn(shape, device, *, layout=Layout.TILE, seed=None, **how) -> Tensor:
    """Numbers drawn from the normal distribution."""
    values = torch.randn(tuple(shape), generator=_generator(seed))
    return _made_on_devices(make_tensor(values, layout=layout, device=device, **how))


def _draw(tensor: Tensor, draw: Callable[[Block], Block], seed: int | None) -> Block:
    """Numbers for every device: with a seed all draw the same, as each one's generator starts there."""
    grid = (1,) * len(tensor.grid) if seed else tensor.grid
    return take_box(draw(torch.empty((*grid, *tensor.shape), dtype=torch.float32)), tensor.grid)


@op("uniform", spelled={"from": "low", "to": "high"})
def uniform(input, low=0, high=1, seed=0) -> Made:
    """Numbers drawn evenly, written into the tensor."""
    operands("uniform", input)
    block = _draw(input, lambda room: room.uniform_(low, high, generator=_generator(seed)), seed)
    return Made(block, input, input.tensor_topology(), output=input)


@op("bernoulli")
def bernoulli(input, seed=0) -> Made:
    """1 with the probability that the element says, else 0."""
    _, (block,) = operands("bernoulli", input)
    drawn = _draw(input, lambda room: room.uniform_(generator=_generator(seed)), seed) < block.float()
    return make(drawn.float(), EACH, input)


@op("experimental.dropout")
def dropout(input_tensor, probability, scale, seed, *, use_per_device_seed=True) -> Made:
    """Zeros with that probability, and the other elements times `scale`: by a seed, or one more for every device."""
    name = "experimental.dropout"
    _, (block,) = operands(name, input_tensor)
    grid, shape = input_tensor.grid, tuple(input_tensor.shape)
    count = math.prod(grid) if use_per_device_seed else 1
    drawn = [torch.rand(shape, generator=torch.Generator().manual_seed(seed + number)) for number in range(count)]
    luck = take_box(torch.stack(drawn).reshape(*(grid if use_per_device_seed else (1,) * len(grid)), *shape), grid)
    made = make(torch.where(luck < probability, 0, block.float() * scale), EACH, input_tensor)
    if count > 1:  # what was the same on all devices is so no more
        pairs = zip(made.topology.placements(), made.topology.distribution_shape(), strict=True)
        told = [UNKNOWN if each == REPLICATE and size > 1 else each for each, size in pairs]
        made.topology = made.topology.with_placements(told)
    return made


@op("manual_seed")
def manual_seed(seeds=0, *, device=None) -> None:
    """Let random ops draw the same numbers again."""
    value = int(seeds.block.flatten()[0]) if isinstance(seeds, Tensor) else int(seeds)
    torch.manual_seed(value)


@op("from_buffer")
def from_buffer(buffer, shape, dtype, device, layout=None, memory_config=None) -> Tensor:
    """A list of numbers as a tensor of that shape, the same on every device."""
    values = torch.as_tensor(buffer, dtype=torch.float64 if dtype.is_float else torch.int64)
    if values.numel() != math.prod(shape):
        raise OperandError(f"ttnn.from_buffer: {values.numel()} numbers for a shape of {list(shape)}")
    how: dict[str, Any] = {"dtype": dtype, "layout": layout, "device": device, "memory_config": memory_config}
    return make_tensor(values.reshape(tuple(shape)), **how)


def _filled_corner(shape: Shapes, ones: Shapes, like: Tensor, high: float, low: float) -> Made:
    operands("fill_rm", like)
    block = torch.full((1,) * len(like.grid) + tuple(shape), low, dtype=torch.float32)
    block[..., : ones[0], : ones[1]] = high
    label = like.tensor_topology()
    return Made(block, like, label.with_placements([REPLICATE] * len(label.placements())), layout=Layout.ROW_MAJOR)


@op("fill_rm")
def fill_rm(N, C, H, W, hOnes, wOnes, any, val_hi, val_lo) -> Made:
    """[N, C, H, W] of one value, with another in the first rows and columns; like `any` in all else."""
    return _filled_corner((N, C, H, W), (hOnes, wOnes), any, val_hi, val_lo)


@op("fill_ones_rm")
def fill_ones_rm(N, C, H, W, hOnes, wOnes, any) -> Made:
    """[N, C, H, W] of zeros, with ones in the first rows and columns."""
    return _filled_corner((N, C, H, W), (hOnes, wOnes), any, 1.0, 0.0)
