"""Formats, cores, memory configs, kernel and program configs."""

import json
from itertools import product

import numpy
import pytest
import torch

from meshloom import ttnn
from meshloom.errors import ArgumentError
from meshloom.runtime import tilize
from meshloom.ttnn.tensor import formats, memory


def core_range(x0: int, y0: int, x1: int, y1: int) -> ttnn.CoreRange:
    return ttnn.CoreRange(ttnn.CoreCoord(x0, y0), ttnn.CoreCoord(x1, y1))


def core_set(*corners: tuple[int, int, int, int]) -> ttnn.CoreRangeSet:
    return ttnn.CoreRangeSet([core_range(*each) for each in corners])


# dtypes, layouts, tiles


def test_enums_have_the_values_and_names_of_the_original() -> None:
    listed = {
        "DataType": "BFLOAT16 0 FLOAT32 1 UINT32 2 BFLOAT8_B 3 BFLOAT4_B 4 UINT8 5 UINT16 6 INT32 7 FP8_E4M3 8 INT8 9 "
        "INVALID 10",
        "BufferType": "DRAM 0 L1 1 L1_SMALL 3 TRACE 4",
        "TensorMemoryLayout": "INTERLEAVED 0 HEIGHT_SHARDED 2 WIDTH_SHARDED 3 BLOCK_SHARDED 4 ND_SHARDED 5",
        "ShardOrientation": "ROW_MAJOR 0 COL_MAJOR 1",
        "StorageType": "HOST 0 DEVICE 1",
        "ShardStrategy": "HEIGHT 1 WIDTH 2 BLOCK 3",
    }
    for name, members in listed.items():
        words = members.split()
        expected = dict(zip(words[::2], map(int, words[1::2]), strict=True))
        assert {each.name: each.value for each in getattr(ttnn, name)} == expected, name
    assert (ttnn.Layout.ROW_MAJOR.value, ttnn.Layout.TILE.value) == (0, 1)
    assert repr(ttnn.bfloat16) == "DataType.BFLOAT16" and repr(ttnn.TILE_LAYOUT) == "Layout.TILE"
    assert [each.name for each in ttnn.MathFidelity] == ["LoFi", "HiFi2", "HiFi3", "HiFi4", "Invalid"]


def test_sizes_of_elements_and_tiles() -> None:
    assert {each.name: ttnn.tile_size(each) for each in (ttnn.bfloat16, ttnn.bfloat8_b, ttnn.bfloat4_b)} == {
        "BFLOAT16": 2048,
        "BFLOAT8_B": 1088,
        "BFLOAT4_B": 576,
    }
    assert [ttnn.element_size(each) for each in (ttnn.float32, ttnn.bfloat16, ttnn.uint16, ttnn.uint8)] == [4, 2, 2, 1]
    with pytest.raises(RuntimeError, match="has no size"):
        ttnn.element_size(ttnn.DataType.INVALID)


def test_every_dtype_has_the_torch_dtype_that_it_is_read_back_as() -> None:
    for dtype in ttnn.DataType:
        if dtype is ttnn.DataType.INVALID:
            continue
        x = ttnn.from_torch(torch.ones(32, 32), dtype, layout=ttnn.TILE_LAYOUT)
        assert ttnn.to_torch(x).dtype is ttnn.ttnn_dtype_to_torch_dtype(dtype), dtype


@pytest.mark.parametrize("height", formats.HEIGHTS)
@pytest.mark.parametrize("width", formats.WIDTHS)
def test_tiles_of_every_height_have_whole_faces(height: int, width: int) -> None:
    tile = ttnn.Tile((height, width))
    assert tile.num_faces * tile.face_shape[0] * tile.face_shape[1] == height * width
    assert tile.tile_shape == [height, width] and tile == ttnn.Tile([height, width])
    assert tile.get_tile_size(ttnn.bfloat16) == 2 * height * width
    assert formats.padded_shape((3, height + 1, 5), ttnn.TILE_LAYOUT, tile) == (3, 2 * height, width)


def test_tiles_that_there_are_not_are_refused() -> None:
    for shape in ((32, 8), (3, 32), (32,), (64, 32)):
        with pytest.raises(RuntimeError, match="Tile size is not valid"):
            ttnn.Tile(shape)


def test_row_14_tiles_are_kept_face_by_face_as_numpy_permutes_them() -> None:
    values = torch.arange(64 * 96, dtype=torch.int32).reshape(64, 96)
    expected = []
    for tile_row, tile_column in product(range(2), range(3)):
        tile = values.numpy()[tile_row * 32 :, tile_column * 32 :][:32, :32]
        faces = [tile[a : a + 16, b : b + 16].reshape(-1) for a, b in ((0, 0), (0, 16), (16, 0), (16, 16))]
        expected.append(numpy.concatenate(faces))
    assert tilize(values).tolist() == numpy.concatenate(expected).tolist()
    x = ttnn.from_torch(values, layout=ttnn.TILE_LAYOUT)
    assert x.layout is ttnn.TILE_LAYOUT and torch.equal(ttnn.to_torch(x), values)


def test_padding_goes_to_whole_tiles() -> None:
    for shape, padded in {(): (32, 32), (5,): (32, 32), (1, 40, 10): (1, 64, 32)}.items():
        assert formats.padded_shape(shape, ttnn.TILE_LAYOUT, ttnn.Tile()) == padded
    assert formats.padded_shape((), ttnn.ROW_MAJOR_LAYOUT, ttnn.Tile()) == (1,)


@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        ([1.6, -1.6, 300.0, 70000.0], "uint8", [1, 255, 44, 112]),
        ([1.6, -1.6, 300.0, 70000.0], "int8", [1, -1, 44, 112]),
        ([1.6, -1.6, 300.0, 70000.0], "uint16", [1, 0, 300, 65535]),
        ([1.6, -1.6, 300.0, 70000.0], "int32", [1, -1, 300, 70000]),
        ([1.6, -1.6, 300.0], "uint32", [1, 2**32 - 1, 300]),
    ],
)
def test_fractions_become_integers_as_the_original_makes_them(
    given: list[float], dtype: str, expected: list[int]
) -> None:
    x = ttnn.from_torch(torch.tensor(given), getattr(ttnn, dtype))
    assert ttnn.to_torch(x).tolist() == expected


def test_a_dtype_without_a_counterpart_has_to_be_named() -> None:
    inferred = "float32 FLOAT32 bfloat16 BFLOAT16 float16 BFLOAT16 int8 INT8 int16 UINT16 int32 INT32 int64 UINT32 "
    inferred += "uint8 UINT8 uint16 UINT16 uint32 UINT32 bool UINT8"
    words = inferred.split()
    for given, expected in zip(words[::2], words[1::2], strict=True):
        assert ttnn.from_torch(torch.ones(2, 2).to(getattr(torch, given))).dtype is ttnn.DataType[expected]
    with pytest.raises(TypeError, match=r"torch.float64 has no counterpart among ttnn's dtypes"):
        ttnn.from_torch(torch.ones(2, 2, dtype=torch.float64))
    assert ttnn.from_torch(torch.ones(2, 2, dtype=torch.float64), ttnn.float32).dtype is ttnn.float32


# cores


def test_cores_are_spelled_as_in_ttnn() -> None:
    assert repr(ttnn.CoreCoord(8, 7)) == "8-7" and ttnn.CoreCoord((1, 2)) == ttnn.CoreCoord(1, 2)
    assert ttnn.CoreGrid(x=8, y=4).num_cores == 32 and repr(ttnn.CoreGrid(x=8, y=4)) == "ttnn.CoreGrid(x=8, y=4)"
    assert repr(core_set((0, 0, 3, 1))) == "{[0-0 - 3-1]}"
    with pytest.raises(TypeError):
        ttnn.CoreGrid(8, 4)  # type: ignore[misc]
    with pytest.raises(TypeError, match="takes x and y"):
        ttnn.CoreCoord(1, -1)
    with pytest.raises(RuntimeError, match="Invalid core range for start_coord: 1-0, end_coord: 0-0"):
        core_range(1, 0, 0, 0)


def test_sets_of_ranges_tell_their_cores() -> None:
    cores = core_set((0, 0, 1, 1), (4, 4, 5, 4))
    assert cores.num_cores() == 6 and cores.size() == 2 and not cores.empty() and ttnn.CoreRangeSet([]).empty()
    assert cores.bounding_box() == core_range(0, 0, 5, 4)
    assert cores.contains(ttnn.CoreCoord(5, 4)) and not cores.contains(ttnn.CoreCoord(2, 2))
    assert cores.contains(core_range(0, 0, 1, 0)) and not cores.contains(core_range(1, 1, 2, 1))
    assert cores.contains(core_set((0, 1, 1, 1), (4, 4, 4, 4)))
    assert ttnn.CoreRangeSet({core_range(0, 0, 1, 1), core_range(4, 4, 5, 4)}) == cores
    assert ttnn.CoreRangeSet.from_json(cores.to_json()) == cores and hash(cores) == hash(
        core_set((4, 4, 5, 4), (0, 0, 1, 1))
    )
    with pytest.raises(RuntimeError, match="overlap"):
        core_set((0, 0, 2, 2), (2, 2, 3, 3))


def test_merging_and_subtracting_are_those_of_sets_of_cores() -> None:
    generator = numpy.random.default_rng(0)
    for _ in range(100):
        grids = [generator.random((5, 6)) < 0.6 for _ in range(2)]
        cells = [{(int(x), int(y)) for y, x in zip(*grid.nonzero(), strict=True)} for grid in grids]
        a, b = (ttnn.CoreRangeSet(list(map(single, each))) for each in cells)
        assert set(a.merge(b).cells()) == cells[0] | cells[1] and set(a.subtract(b).cells()) == cells[0] - cells[1]
        assert a.merge(b).num_cores() == len(cells[0] | cells[1])


def single(cell: tuple[int, int]) -> ttnn.CoreRange:
    return core_range(*cell, *cell)


def test_the_first_cores_of_a_grid_go_by_columns_or_rows() -> None:
    grid = ttnn.CoreCoord(8, 8)
    assert ttnn.num_cores_to_corerangeset(10, grid, row_wise=True) == core_set((0, 0, 7, 0), (0, 1, 1, 1))
    assert ttnn.num_cores_to_corerangeset(10, grid) == core_set((0, 0, 0, 7), (1, 0, 1, 1))
    assert ttnn.num_cores_to_corerangeset(64, grid) == core_set((0, 0, 7, 7))
    inside = ttnn.num_cores_to_corerangeset_in_subcoregrids(
        ttnn.CoreCoord(1, 0), 5, core_set((0, 0, 2, 1), (5, 0, 6, 1)), row_wise=True
    )
    assert set(inside.cells()) == {(1, 0), (2, 0), (0, 1), (1, 1), (2, 1)}
    with pytest.raises(RuntimeError, match="Target number of cores 65 is greater than total number of available cores"):
        ttnn.num_cores_to_corerangeset(65, grid)
    assert ttnn.corerange_to_cores(core_set((0, 0, 1, 1)), 3, row_wise=True)[-1] == ttnn.CoreCoord(0, 1)


@pytest.mark.parametrize("units", [0, 1, 7, 16, 17, 100])
@pytest.mark.parametrize("row_wise", [True, False])
def test_work_is_divided_so_that_cores_differ_by_one_unit(units: int, row_wise: bool) -> None:
    count, everyone, more, less, units_more, units_less = ttnn.split_work_to_cores(
        ttnn.CoreCoord(4, 4), units, row_wise
    )
    assert count == min(16, units) == everyone.num_cores() == more.num_cores() + less.num_cores()
    assert more.num_cores() * units_more + less.num_cores() * units_less == units
    assert less.empty() or units_more == units_less + 1


# memory configs


def test_memory_configs_are_equal_by_value_and_go_through_json() -> None:
    spec = ttnn.ShardSpec(core_set((0, 0, 3, 0)), [32, 64], ttnn.ShardOrientation.ROW_MAJOR)
    sharded = ttnn.MemoryConfig(ttnn.TensorMemoryLayout.WIDTH_SHARDED, ttnn.BufferType.L1, spec)
    nd = ttnn.MemoryConfig(ttnn.BufferType.DRAM, ttnn.NdShardSpec([1, 32, 32], core_set((0, 0, 1, 1))))
    for config in (ttnn.DRAM_MEMORY_CONFIG, ttnn.L1_MEMORY_CONFIG, sharded, nd):
        again = ttnn.MemoryConfig.from_json(config.to_json())
        assert again == config and hash(again) == hash(config) and json.loads(config.to_json())
    assert len({ttnn.DRAM_MEMORY_CONFIG, ttnn.MemoryConfig(), ttnn.L1_MEMORY_CONFIG, sharded, nd}) == 4
    assert sharded.is_sharded() and not sharded.interleaved and ttnn.MemoryConfig().interleaved
    assert nd.memory_layout is ttnn.TensorMemoryLayout.ND_SHARDED and nd.nd_shard_spec.num_cores() == 4
    assert sharded != ttnn.MemoryConfig(ttnn.TensorMemoryLayout.HEIGHT_SHARDED, ttnn.BufferType.L1, spec)
    assert ttnn.L1_HEIGHT_SHARDED_MEMORY_CONFIG.memory_layout is ttnn.TensorMemoryLayout.HEIGHT_SHARDED
    with pytest.raises(TypeError, match="memory_layout="):
        ttnn.MemoryConfig("INTERLEAVED")


def test_a_grid_that_does_not_divide_the_tensor_is_refused_or_rounded_up() -> None:
    arguments = ((1, 1, 100, 64), ttnn.CoreGrid(x=8, y=1), ttnn.ShardStrategy.HEIGHT)
    with pytest.raises(RuntimeError, match="Invalid sharding core_grid"):
        ttnn.create_sharded_memory_config(*arguments)
    assert ttnn.create_sharded_memory_config_(*arguments).shard_spec.shape == [13, 64]
    assert ttnn.create_sharded_memory_config_(*arguments, tile_layout=True).shard_spec.shape == [16, 64]
    by_layout = ttnn.create_sharded_memory_config_(*arguments[:2], ttnn.TensorMemoryLayout.HEIGHT_SHARDED)
    assert by_layout == ttnn.create_sharded_memory_config_(*arguments)


def test_a_set_of_ranges_needs_the_shape_of_a_shard() -> None:
    cores = core_set((0, 0, 7, 0))
    with pytest.raises(RuntimeError, match="height and width must be shard shape with CoreRangeSet"):
        ttnn.create_sharded_memory_config((1, 1, 32, 64), cores, ttnn.ShardStrategy.WIDTH)
    config = ttnn.create_sharded_memory_config(
        (1, 1, 32, 64), cores, ttnn.ShardStrategy.WIDTH, use_height_and_width_as_shard_shape=True
    )
    assert config.shard_spec.shape == [32, 64] and config.shard_spec.grid == cores
    turned = ttnn.create_sharded_memory_config(
        (32, 64), cores, ttnn.ShardStrategy.WIDTH, ttnn.ShardOrientation.COL_MAJOR, True
    )
    assert turned.shard_spec.shape == [64, 32]
    with pytest.raises(RuntimeError, match="Invalid core_grid type str"):
        ttnn.create_sharded_memory_config((32, 64), "8x8", ttnn.ShardStrategy.WIDTH)
    with pytest.raises(RuntimeError, match="Invalid sharding strategy"):
        ttnn.create_sharded_memory_config((32, 64), ttnn.CoreGrid(x=2, y=1), "width")  # type: ignore[arg-type]


# kernel and program configs


def test_kernel_configs_are_filled_in_for_a_device() -> None:
    arch = ttnn.Arch.WORMHOLE_B0
    made = ttnn.init_device_compute_kernel_config(arch, math_fidelity=ttnn.MathFidelity.HiFi4, fp32_dest_acc_en=True)
    assert made.math_fidelity is ttnn.MathFidelity.HiFi4 and made.fp32_dest_acc_en and made.math_approx_mode
    given = ttnn.WormholeComputeKernelConfig(packer_l1_acc=True)
    filled = ttnn.init_device_compute_kernel_config(arch, given, math_fidelity=ttnn.MathFidelity.HiFi2)
    assert filled.math_fidelity is ttnn.MathFidelity.HiFi2 and filled.packer_l1_acc and filled is not given
    assert ttnn.types.BlackholeComputeKernelConfig is ttnn.WormholeComputeKernelConfig
    with pytest.raises(TypeError, match="math_fidelity='HiFi4'"):
        ttnn.WormholeComputeKernelConfig(math_fidelity="HiFi4")  # type: ignore[arg-type]


def test_ops_take_configs_of_the_right_type_only() -> None:
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as mesh:
        x = ttnn.from_torch(torch.eye(32), layout=ttnn.TILE_LAYOUT, device=mesh)
        config = ttnn.MatmulMultiCoreReuseProgramConfig(
            compute_with_storage_grid_size=ttnn.CoreCoord(8, 8),
            in0_block_w=1,
            out_subblock_h=1,
            out_subblock_w=1,
            per_core_M=1,
            per_core_N=1,
        )
        kernel = ttnn.WormholeComputeKernelConfig(math_fidelity=ttnn.MathFidelity.HiFi4)
        y = ttnn.matmul(x, x, program_config=config, compute_kernel_config=kernel, core_grid=ttnn.CoreGrid(x=8, y=8))
        assert torch.equal(ttnn.to_torch(ttnn.get_device_tensors(y)[0]), torch.eye(32))
        for wrong in ({"program_config": kernel}, {"compute_kernel_config": config}, {"core_grid": 8}):
            with pytest.raises(ArgumentError, match="is of the wrong type"):
                ttnn.matmul(x, x, **wrong)
    with pytest.raises(TypeError, match="per_core_N"):
        ttnn.MatmulMultiCoreReuseProgramConfig(  # type: ignore[call-arg]
            compute_with_storage_grid_size=ttnn.CoreCoord(8, 8),
            in0_block_w=1,
            out_subblock_h=1,
            out_subblock_w=1,
            per_core_M=1,
        )


@pytest.mark.parametrize(
    ("shape", "part", "cores", "expected"),
    [
        ((2, 64, 256), (64, 64), 8, 64 * 64),  # 2 x 4 shards, one each
        ((2, 64, 256), (32, 64), 8, 2 * 32 * 64),  # 16 shards on 8 cores
        ((2, 64, 256), (1, 64, 64), 8, 64 * 64),
        ((3, 2, 64, 64), (1, 64, 64), 6, 64 * 64),  # dims in front count as one
        ((64,), (1, 1, 64), 1, 64),
    ],
)
def test_the_fullest_core_has_so_many_elements(
    shape: tuple[int, ...], part: tuple[int, ...], cores: int, expected: int
) -> None:
    grid = ttnn.num_cores_to_corerangeset(cores, ttnn.CoreCoord(8, 8), row_wise=True)
    if len(part) == 2:
        spec = ttnn.ShardSpec(grid, part, ttnn.ShardOrientation.ROW_MAJOR)
        config = ttnn.MemoryConfig(ttnn.TensorMemoryLayout.BLOCK_SHARDED, ttnn.BufferType.L1, spec)
    else:
        config = ttnn.MemoryConfig(ttnn.BufferType.L1, ttnn.NdShardSpec(part, grid))
    assert memory.share_of_bank(config, shape) == expected
    assert memory.share_of_bank(ttnn.L1_MEMORY_CONFIG, shape) is None
    assert memory.share_of_bank(ttnn.L1_WIDTH_SHARDED_MEMORY_CONFIG, shape) is None  # no shards are told
