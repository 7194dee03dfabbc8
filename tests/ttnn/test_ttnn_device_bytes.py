"""The bytes of a device's part: against numpy, face by face, and back to the tensor that they were read from."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy
import pytest
import torch

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError

PLAIN = {  # numpy's dtype of what a device keeps, for values that it can say exactly
    "float32": "<f4",
    "int32": "<i4",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "int8": "i1",
}
DTYPES = [*PLAIN, "bfloat16", "bfloat8_b", "bfloat4_b", "fp8_e4m3"]
SHAPES = [(1, 1, 32, 32), (64, 96), (2, 3, 40, 33), (5,), (7, 1), (1, 2, 31, 65)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as device:
        yield device


def draw(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype in ("float32", "bfloat16", "bfloat8_b", "bfloat4_b", "fp8_e4m3"):
        return torch.randn(shape, generator=generator) * 8
    low, high = {"int32": (-(2**31), 2**31), "uint32": (0, 2**32), "int8": (-128, 128)}.get(dtype, (0, 200))
    return torch.randint(low, high, shape, generator=generator)


def put(values: torch.Tensor, dtype: str, layout: Any = ttnn.TILE_LAYOUT, **how: Any) -> Any:
    return ttnn.from_torch(values, dtype=getattr(ttnn, dtype), layout=layout, **how)


def in_faces(values: numpy.ndarray, tile: tuple[int, int] = (32, 32)) -> numpy.ndarray:
    """Every element in the order of tiles and faces, one after the other, padding of zeros included."""
    matrix = values.reshape((1,) * (2 - values.ndim) + values.shape)
    ends = [(0, -size % side) for size, side in zip(matrix.shape[-2:], tile, strict=True)]
    padded = numpy.pad(matrix, [(0, 0)] * (matrix.ndim - 2) + ends)
    height, face = tile[0], min(16, tile[0])
    found = []
    for one in padded.reshape(-1, *padded.shape[-2:]):
        for top, left in product(range(0, one.shape[0], height), range(0, one.shape[1], tile[1])):
            for row, column in product(range(top, top + height, face), range(left, left + tile[1], 16)):
                found.append(one[row : row + face, column : column + 16].reshape(-1))
    return numpy.concatenate(found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", PLAIN)
def test_row_14_device_bytes_are_the_face_permutation_of_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    values = draw(shape, dtype)
    tensor = put(values, dtype)
    assert tensor.device_bytes() == in_faces(values.numpy().astype(PLAIN[dtype])).tobytes()
    assert put(values, dtype, ttnn.ROW_MAJOR_LAYOUT).device_bytes() == values.numpy().astype(PLAIN[dtype]).tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_row_14_bfloat16_is_the_upper_half_of_float32_in_the_order_of_faces(shape: tuple[int, ...]) -> None:
    values = draw(shape, "bfloat16").bfloat16()
    halves = (values.float().numpy().view(numpy.uint32) >> 16).astype("<u2")
    assert put(values, "bfloat16").device_bytes() == in_faces(halves).tobytes()


def slow_pack(block: list[float], bits: int) -> tuple[int, list[int]]:
    """The exponent that 16 values share, and their signs and mantissas; for values that need no rounding."""
    exponents = [struct.unpack("<I", struct.pack("<f", each))[0] >> 23 & 0xFF for each in block]
    shared = max(exponents)
    unit = math.ldexp(1.0, shared - 126 - bits)
    return shared, [round(abs(each) / unit) | (each < 0) << bits for each in block]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "bits"), [("bfloat8_b", 7), ("bfloat4_b", 3)])
def test_row_14_a_tile_of_block_floats_begins_with_its_exponents(dtype: str, bits: int, shape: tuple[int, ...]) -> None:
    tensor = put(draw(shape, dtype), dtype)
    ordered = in_faces(ttnn.to_torch(tensor).float().numpy()).reshape(-1, 64, 16).tolist()
    expected = bytearray()
    for tile in ordered:
        packed = [slow_pack(block, bits) for block in tile]
        expected += bytes(exponent for exponent, _ in packed)
        numbers = [number for _, mantissas in packed for number in mantissas]
        if bits == 3:
            numbers = [low | high << 4 for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
        expected += bytes(numbers)
    assert tensor.device_bytes() == bytes(expected)


@pytest.mark.parametrize("layout", ["TILE_LAYOUT", "ROW_MAJOR_LAYOUT"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_read_from_devices_gives_the_tensor_back(dtype: str, layout: str, mesh: Any) -> None:
    if layout == "ROW_MAJOR_LAYOUT" and dtype in ("bfloat8_b", "bfloat4_b"):
        return  # they are in tiles always
    for shape in ((16, 40, 33), (8, 5), (1, 8, 3, 70)):
        mapper = ttnn.ShardTensorToMesh(mesh, dim=shape.index(16) if 16 in shape else shape.index(8))
        tensor = put(draw(shape, dtype), dtype, getattr(ttnn, layout), device=mesh, mesh_mapper=mapper)
        held = {place: tensor.device_bytes(place) for place in tensor.device_coords()}
        assert len(held) == 8 and len(set(map(len, held.values()))) == 1
        assert len(next(iter(held.values()))) == tensor.buffer_num_pages() * tensor.buffer_page_size()
        back = ttnn.from_device_bytes(held, tensor.spec, mesh, topology=tensor.tensor_topology())
        assert torch.equal(back.block, tensor.block) and back.spec == tensor.spec and back.device() is mesh
        assert torch.equal(ttnn.to_torch(back), ttnn.to_torch(tensor))
        assert {place: back.device_bytes(place) for place in back.device_coords()} == held


def test_every_device_has_bytes_of_its_own_part(mesh: Any) -> None:
    values = draw((64, 32), "int32")
    tensor = put(values, "int32", device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    for number, place in enumerate(product(range(2), range(4))):
        part = values[number * 8 : number * 8 + 8].numpy().astype("<i4")
        assert tensor.device_bytes(place) == in_faces(part).tobytes()
    alike = put(values, "int32", device=mesh)
    assert alike.device_bytes((0, 0)) == alike.device_bytes((1, 3)) == in_faces(values.numpy().astype("<i4")).tobytes()
    assert ttnn.to_torch(ttnn.from_device_bytes(alike.device_bytes((1, 2)), alike.spec, mesh)).equal(values.int())


def test_results_of_ops_have_the_bytes_of_their_values(mesh: Any) -> None:
    values = draw((64, 32), "bfloat16").bfloat16()
    tensor = put(values, "bfloat16", device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=1))
    for result in (ttnn.relu(tensor), ttnn.typecast(tensor, ttnn.bfloat8_b)):
        fresh = ttnn.from_torch(
            ttnn.to_torch(result), dtype=result.dtype, layout=result.layout, device=mesh,
            mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=1),
        )  # fmt: skip
        assert result.device_bytes((1, 1)) == fresh.device_bytes((1, 1))


@pytest.mark.parametrize("sides", [(16, 32), (4, 32), (32, 16), (1, 32)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat8_b", "uint16"])
def test_tiles_of_other_sides_are_kept_in_faces_too(dtype: str, sides: tuple[int, int]) -> None:
    values = draw((2, 19, 70), dtype)
    tensor = put(values, dtype, tile=ttnn.Tile(sides))
    held = tensor.device_bytes()
    assert len(held) % ttnn.Tile(sides).get_tile_size(tensor.dtype) == 0
    if dtype == "uint16":
        assert held == in_faces(values.numpy().astype("<u2"), sides).tobytes()
    assert torch.equal(ttnn.from_device_bytes(held, tensor.spec).block, tensor.block)


def test_padding_has_the_value_that_the_tensor_was_padded_with() -> None:
    tensor = put(torch.zeros(2, 2), "int32", pad_value=7)
    found = numpy.frombuffer(tensor.device_bytes(), dtype="<i4")
    assert found.tolist() == in_faces(numpy.pad(numpy.zeros((2, 2), "<i4"), (0, 30), constant_values=7)).tolist()


def test_bytes_that_do_not_fit_and_devices_that_are_not_there_are_refused(mesh: Any) -> None:
    tensor = put(torch.ones(64, 32), "bfloat16", device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    with pytest.raises(ArgumentError, match="a tensor on 8 devices has bytes on each"):
        tensor.device_bytes()
    with pytest.raises(OperandError, match=r"no part of the tensor is on device \[2, 0\]"):
        tensor.device_bytes((2, 0))
    with pytest.raises(ArgumentError, match="2047 bytes are no part of BFLOAT16"):
        ttnn.from_device_bytes(bytes(2047), tensor.spec, mesh)
    with pytest.raises(OperandError, match=r"device \[0, 4\] is not on the mesh"):
        ttnn.from_device_bytes({(0, 4): bytes(2048)}, tensor.spec, mesh)
    with pytest.raises(ArgumentError, match="takes a TensorSpec"):
        ttnn.from_device_bytes(bytes(2048), (64, 32))
    with pytest.raises(OperandError, match="transposed tiles"):
        put(torch.ones(32, 32), "bfloat16", tile=ttnn.Tile((32, 32), transpose_tile=True)).device_bytes()
    ttnn.deallocate(tensor, force=True)
    with pytest.raises(OperandError, match="is not allocated"):
        tensor.device_bytes((0, 0))


def test_parts_without_a_topology_are_known_by_device_only(mesh: Any) -> None:
    spec = put(torch.ones(8, 32), "float32").spec
    parts = {
        (row, column): put(torch.full((8, 32), 4.0 * row + column), "float32").device_bytes()
        for row, column in product(range(2), range(4))
    }
    tensor = ttnn.from_device_bytes(parts, spec, mesh)
    assert tensor.tensor_topology().placements() == [ttnn.PlacementPartial("unknown")]
    assert [float(ttnn.to_torch(each)[0, 0]) for each in ttnn.get_device_tensors(tensor)] == list(map(float, range(8)))
