"""The bytes that a device keeps for its part of a tensor: read from it, and made into a tensor again.

In rows they are the elements one after the other; in tiles, tile by tile, each face by face. Elements are little
endian. The tile of a block float begins with its exponents, one for every 16 elements, and signs and mantissas follow.
The padding of tiles is there, with the value that the tensor was padded with. A part that is spread over banks or cores
is given as its pages in their order: where they lie, the addresses say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.runtime import MeshCoordinate
from meshloom.runtime.tiles import tilize, untilize
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.ops.topologies import replicated_topology
from meshloom.ttnn.tensor.blockfloat import pack, unpack
from meshloom.ttnn.tensor.formats import BITS, DataType, Layout, Tile, bytes_of, padded_shape
from meshloom.ttnn.tensor.parts import part
from meshloom.ttnn.tensor.specs import TensorSpec
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import ALONE, UNKNOWN, TensorTopology

__all__ = ["from_device_bytes"]

# The torch dtype of the elements of a device, where it is not the one that values are kept in.
_HELD = {DataType.UINT32: torch.uint32, DataType.UINT16: torch.uint16, DataType.FP8_E4M3: torch.float8_e4m3fn}


def read(tensor: Tensor, coordinate: Sequence[int] | None = None) -> bytes:
    """The bytes of one device's part; the coordinate may be left out if there is one device."""
    place = _place_of(tensor, coordinate)
    tensor.wait()
    values = part(tensor._pad_tiles(tensor._pad) if tensor.layout is Layout.TILE else tensor.block, place)
    return _bytes_of(values, tensor.dtype, tensor.layout, tensor.tile)


def _place_of(tensor: Tensor, coordinate: Sequence[int] | None) -> tuple[int, ...]:
    places = tensor.device_coords()
    if coordinate is None:
        if len(places) > 1:
            raise ArgumentError(
                f"a tensor on {len(places)} devices has bytes on each", fix=f"device_bytes({list(places[0])})"
            )
        return tuple(places[0])
    place = tuple(coordinate)
    if place not in [tuple(each) for each in places]:
        raise OperandError(
            f"no part of the tensor is on device {list(place)}",
            tensor=f"on {', '.join(str(list(each)) for each in places[:8])}",
        )
    return place


def _bytes_of(values: torch.Tensor, dtype: DataType, layout: Layout, tile: Tile) -> bytes:
    if layout is Layout.TILE:
        _check_tile(tile)
        if dtype in BITS:
            return _raw(pack(values, BITS[dtype], tile.tile_shape))
        values = tilize(values, tile=tile.tile_shape)
    return _raw(values.to(_HELD.get(dtype, dtype.store)))


def _raw(values: torch.Tensor) -> bytes:
    return values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _check_tile(tile: Tile) -> None:
    if tile.transpose_tile:
        raise OperandError(
            "the bytes of transposed tiles are not known", tile=tile, fix="a tile that is not transposed"
        )


def _values_of(data: bytes, spec: TensorSpec) -> torch.Tensor:
    """The values of one device's bytes, without the padding of tiles."""
    dtype, layout, tile, shape = spec.dtype, spec.layout, spec.tile, tuple(spec.shape)
    size = bytes_of(math.prod(padded_shape(shape, layout, tile)), dtype)
    if layout is Layout.TILE:
        size = math.prod(padded_shape(shape, layout, tile)) // math.prod(tile.tile_shape) * tile.get_tile_size(dtype)
    if len(data) != size:
        raise ArgumentError(
            f"{len(data)} bytes are no part of {dtype.name} {list(shape)} in {layout}", fix=f"{size} bytes"
        )
    raw = torch.from_numpy(numpy.frombuffer(data, dtype=numpy.uint8).copy())
    if layout is Layout.TILE:
        _check_tile(tile)
        if dtype in BITS:
            return unpack(raw, shape, BITS[dtype], tile.tile_shape).to(dtype.store)
    values = raw.view(_HELD.get(dtype, dtype.store)).to(dtype.store)
    if layout is Layout.ROW_MAJOR:
        return values.reshape(shape)
    sizes = (1,) * (2 - len(shape)) + shape
    return untilize(values.reshape(*sizes[:-2], -1), sizes, tile.tile_shape).reshape(shape)


Parts = bytes | Mapping[Any, bytes]


def from_device_bytes(
    data: Parts, spec: TensorSpec, device: MeshDevice | None = None, *, topology: TensorTopology | None = None
) -> Tensor:
    """A tensor from what devices keep: bytes that are the same on all of them, or the bytes of each by its coordinate.

    `topology` says how the parts make up a whole; `x.tensor_topology()` is that of the tensor that they were read from.

    >>> from meshloom import ttnn
    >>> x = ttnn.from_torch(torch.arange(4.0).reshape(2, 2), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT)
    >>> held = x.device_bytes()
    >>> len(held), ttnn.from_device_bytes(held, x.spec).to_list()
    (2048, [[0.0, 1.0], [2.0, 3.0]])
    """
    if not isinstance(spec, TensorSpec):
        raise ArgumentError(f"from_device_bytes takes a TensorSpec, not {spec!r}", fix="the spec of a tensor: x.spec")
    coords = None
    if isinstance(data, Mapping):
        grid, block, coords = _join(data, spec, None if device is None else tuple(device.shape))
        label = replicated_topology(grid).with_placements([UNKNOWN])  # nobody said how they fit together
    else:
        grid, values = (1, 1) if device is None else tuple(device.shape), _values_of(bytes(data), spec)
        block = values.reshape(*(1,) * len(grid), *values.shape)
        label = ALONE if device is None else replicated_topology(grid)
    return Tensor(
        block, grid, spec.dtype, spec.layout, topology or label, device, spec.memory_config, spec.tile, coords=coords
    )


def _join(
    data: Mapping[Any, bytes], spec: TensorSpec, grid: tuple[int, ...] | None
) -> tuple[tuple[int, ...], torch.Tensor, tuple[MeshCoordinate, ...] | None]:
    """The grid, the block and the devices of parts by coordinate; without a mesh, the grid is as small as can be."""
    parts = {tuple(place): _values_of(bytes(each), spec) for place, each in data.items()}
    if not parts:
        raise ArgumentError("from_device_bytes needs the bytes of a device")
    sizes = grid or tuple(max(each) + 1 for each in zip(*parts, strict=True))
    for place in parts:
        if len(place) != len(sizes) or not all(0 <= c < size for c, size in zip(place, sizes, strict=True)):
            raise OperandError(f"device {list(place)} is not on the mesh", mesh=f"of shape {list(sizes)}")
    block = torch.zeros(*sizes, *spec.shape, dtype=spec.dtype.store)
    for place, values in parts.items():
        block[place] = values
    is_whole = len(parts) == math.prod(sizes)
    return sizes, block, None if is_whole else tuple(MeshCoordinate(list(place)) for place in sorted(parts))
