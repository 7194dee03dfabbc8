"""Dtype, layout and memory of results follow from their operands by one rule for each family of ops."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from meshloom import ttnn
from ttnn_cases import cores, mesh

TILE, ROWS = ttnn.TILE_LAYOUT, ttnn.ROW_MAJOR_LAYOUT
BF16, F32, BF8, INT, U8, U16 = ttnn.bfloat16, ttnn.float32, ttnn.bfloat8_b, ttnn.int32, ttnn.uint8, ttnn.uint16
HEIGHT, WIDTH, BLOCK = (getattr(ttnn.TensorMemoryLayout, f"{each}_SHARDED") for each in ("HEIGHT", "WIDTH", "BLOCK"))
BY_ROWS, BY_COLUMNS = ttnn.ShardOrientation.ROW_MAJOR, ttnn.ShardOrientation.COL_MAJOR


def made(*shape: int, dtype: Any = BF16, layout: Any = TILE, memory: Any = None) -> Any:
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 7 + 1
    return ttnn.from_torch(values, dtype=dtype, layout=layout, device=mesh((1, 2)), memory_config=memory)


def sharded(kind: Any, over: Any, *part: int, orientation: Any = BY_ROWS) -> Any:
    return ttnn.MemoryConfig(kind, ttnn.BufferType.L1, ttnn.ShardSpec(over, part, orientation))


# dtypes


@pytest.mark.parametrize("name", "eq ne gt ge lt le logical_and logical_or logical_xor".split())
def test_bytes_are_compared_as_uint16_and_all_else_in_its_own_dtype(name: str) -> None:
    compare = getattr(ttnn, name)
    for dtype, expected in ((U8, U16), (U16, U16), (INT, INT), (BF8, BF8), (F32, F32)):
        x = made(4, 32, dtype=dtype)
        assert compare(x, x).dtype is expected and compare(x, 3).dtype is expected


def test_a_quotient_of_integers_is_a_float_unless_it_is_rounded() -> None:
    x, y = made(4, 32, dtype=INT), made(4, 32, dtype=INT)
    for found in (ttnn.divide(x, 2), ttnn.div(x, y), x / 4):
        assert found.dtype is F32
    assert ttnn.to_torch(ttnn.divide(x, 2))[0, 0] == 0.5
    assert ttnn.div(x, y, rounding_mode="floor").dtype is ttnn.floor_div(x, y).dtype is INT
    assert ttnn.divide(x, 2, dtype=BF16).dtype is BF16


def test_integers_between_fractions_are_floats() -> None:
    x = made(4, 32, dtype=INT)
    assert ttnn.clamp(x, 1.5, 3.0).dtype is ttnn.clip(x, max=2.5).dtype is F32
    assert ttnn.to_torch(ttnn.clamp(x, 2.5, 3.0))[0, 0] == 2.5
    assert ttnn.clamp(x, 1, 3).dtype is INT and ttnn.clamp(x, x, x).dtype is INT


def test_integers_divided_by_zero_are_zero() -> None:
    x, zero = made(2, 3, dtype=INT), ttnn.zeros([2, 3], dtype=INT, layout=TILE, device=mesh((1, 2)))
    for name in ("fmod", "remainder", "floor_div"):
        assert not ttnn.to_torch(getattr(ttnn, name)(x, zero)).any()
        assert not ttnn.to_torch(getattr(ttnn, name)(x, 0)).any()
    expected = torch.fmod(torch.tensor([[1, 2, 3], [4, 5, 6]]), 4).int()
    assert torch.equal(ttnn.to_torch(ttnn.fmod(x, 4)), expected)


def test_block_floats_that_are_cut_inside_of_tiles_are_bfloat16() -> None:
    x = made(64, 96, dtype=BF8)
    assert ttnn.slice(x, [32, 0], [64, 40]).dtype is BF8, "it begins where a tile does"
    assert ttnn.slice(x, [0, 16], [64, 96]).dtype is ttnn.slice(x, [0, 0], [64, 96], [1, 2]).dtype is BF16
    assert x[-32:].dtype is BF8 and x[-31:].dtype is BF16 and x[:, :].dtype is BF8
    assert [each.dtype for each in ttnn.split(x, 40, dim=1)] == [BF8, BF16, BF16]
    assert [each.dtype for each in ttnn.chunk(x, 2, 0)] == [BF8, BF8]


def test_block_floats_that_are_joined_inside_of_tiles_are_bfloat16() -> None:
    x, y = made(32, 96, dtype=BF8), made(32, 5, dtype=BF8)
    assert ttnn.concat([x, x], dim=1).dtype is ttnn.concat([y, y], dim=0).dtype is BF8
    assert ttnn.concat([x, y], dim=-1).dtype is BF16
    assert ttnn.stack([x, x], 0).dtype is BF8 and ttnn.stack([x, x], 2).dtype is ttnn.stack([x, x], -2).dtype is BF16
    assert ttnn.embedding(made(4, dtype=ttnn.uint32, layout=ROWS), x).dtype is BF16


def test_places_of_elements_of_four_bytes_are_uint32() -> None:
    for dtype, expected in ((F32, ttnn.uint32), (INT, ttnn.uint32), (BF16, U16), (U16, U16)):
        assert ttnn.sort(made(32, 64, dtype=dtype))[1].dtype is expected


# layouts


def test_a_result_is_in_tiles_if_one_operand_is() -> None:
    rows, tiles = made(3, 32, layout=ROWS), made(3, 32)
    for both in ((rows, tiles), (tiles, rows)):
        assert ttnn.add(*both).layout is ttnn.maximum(*both).layout is ttnn.gt(*both).layout is TILE
        assert ttnn.where(both[0], *both).layout is TILE
    assert ttnn.add(rows, rows).layout is ttnn.add(rows, 2.0).layout is ttnn.relu(rows).layout is ROWS


def test_sums_and_means_keep_rows_and_other_reductions_are_in_tiles() -> None:
    rows = made(3, 32, layout=ROWS)
    assert ttnn.sum(rows, dim=0).layout is ttnn.mean(rows, dim=0).layout is ROWS
    for name in ("max", "min", "std", "var"):
        assert getattr(ttnn, name)(rows, dim=0).layout is TILE


def test_no_dims_are_all_dims() -> None:
    x = made(4, 3, 32)
    for name in ("sum", "mean", "max", "min", "std", "var"):
        assert getattr(ttnn, name)(x, dim=[]).shape == []
        assert getattr(ttnn, name)(x, dim=[], keepdim=True).shape == [1, 1, 1]


def test_an_embedding_has_the_layout_of_its_table() -> None:
    numbers = made(4, dtype=ttnn.uint32, layout=ROWS)
    assert ttnn.embedding(numbers, made(8, 64)).layout is TILE
    assert ttnn.embedding(numbers, made(8, 64, layout=ROWS)).layout is ROWS
    assert ttnn.embedding(numbers, made(8, 64), layout=ROWS).layout is ROWS


def test_what_is_in_a_layout_is_given_back_as_it_is() -> None:
    x = made(3, 32)
    assert ttnn.to_layout(x, TILE, dtype=F32) is x and ttnn.to_layout(x, TILE, memory_config=ttnn.L1_MEMORY_CONFIG) is x
    assert ttnn.to_layout(x, ROWS, memory_config=ttnn.L1_MEMORY_CONFIG).memory_config() == ttnn.L1_MEMORY_CONFIG


# memory


def test_a_result_of_two_is_sharded_as_the_first_that_is() -> None:
    lying = sharded(HEIGHT, cores(2, 1), 32, 64)
    plain, cut = made(64, 64), made(64, 64, memory=lying)
    for found in (ttnn.add(plain, cut), ttnn.add(cut, plain), ttnn.gt(plain, cut), ttnn.addcmul(plain, plain, cut)):
        assert found.memory_config() == lying
    assert ttnn.add(plain, made(64, 64, memory=ttnn.L1_MEMORY_CONFIG)).memory_config() == ttnn.DRAM_MEMORY_CONFIG
    assert ttnn.add(cut, cut, memory_config=ttnn.DRAM_MEMORY_CONFIG).memory_config() == ttnn.DRAM_MEMORY_CONFIG


def test_shards_grow_with_a_result_that_is_larger() -> None:
    row = made(1, 64, memory=sharded(WIDTH, cores(2, 1), 32, 32))
    assert ttnn.add(row, made(96, 64)).memory_config() == sharded(WIDTH, cores(2, 1), 96, 32)


def test_a_choice_is_kept_where_its_values_are() -> None:
    plain, near = made(64, 64), made(64, 64, memory=ttnn.L1_MEMORY_CONFIG)
    assert ttnn.where(plain, near, 0.0).memory_config() == ttnn.L1_MEMORY_CONFIG
    assert ttnn.where(plain, 0.0, near).memory_config() == ttnn.L1_MEMORY_CONFIG
    assert ttnn.where(near, plain, 0.0).memory_config() == ttnn.DRAM_MEMORY_CONFIG


def test_products_are_in_dram_unless_asked_for_elsewhere() -> None:
    near = made(64, 64, memory=ttnn.L1_MEMORY_CONFIG)
    assert ttnn.matmul(near, near).memory_config() == ttnn.linear(near, near).memory_config() == ttnn.DRAM_MEMORY_CONFIG
    assert ttnn.matmul(near, near, memory_config=ttnn.L1_MEMORY_CONFIG).memory_config() == ttnn.L1_MEMORY_CONFIG


def test_rows_that_become_columns_take_their_shards_with_them() -> None:
    down, across = sharded(HEIGHT, cores(2, 1), 32, 96), sharded(WIDTH, cores(2, 1), 96, 32)
    both = sharded(BLOCK, cores(3, 2), 32, 32)
    turned = sharded(BLOCK, cores(3, 2), 32, 32, orientation=BY_COLUMNS)
    for shape, order in (((64, 96), (1, 0)), ((1, 1, 64, 96), (0, 1, 3, 2))):
        for before, after in ((down, across), (both, turned)):
            x = made(*shape, memory=before)
            assert ttnn.permute(x, order).memory_config() == after
            assert ttnn.transpose(x, -1, -2).memory_config() == after


def test_a_tensor_knows_its_shards_in_both_spellings() -> None:
    lying = sharded(BLOCK, cores(2, 2), 32, 32)
    found = made(64, 64, memory=lying).memory_config()
    assert found == lying and hash(found) == hash(lying) and lying.nd_shard_spec is None
    assert found.nd_shard_spec.shard_shape == [32, 32] and found.nd_shard_spec.grid == lying.shard_spec.grid
    nd = ttnn.MemoryConfig(ttnn.BufferType.L1, ttnn.NdShardSpec([1, 32, 64], cores(2, 1)))
    rows = made(2, 32, 64, memory=nd).memory_config()
    assert (rows.memory_layout, rows.shard_spec.shape) == (HEIGHT, [32, 64]) and rows == nd
    assert ttnn.MemoryConfig.from_json(rows.to_json()) == nd and ttnn.MemoryConfig.from_json(found.to_json()) == lying
    apart = ttnn.MemoryConfig(ttnn.BufferType.L1, ttnn.NdShardSpec([2, 32, 32], cores(2, 1)))
    assert made(2, 64, 64, memory=apart).memory_config().shard_spec is None, (
        "rows of two matrices: no piece of a matrix"
    )


def test_rows_are_filled_up_to_whole_shards() -> None:
    x = made(7, 40, layout=ROWS, memory=sharded(BLOCK, cores(2, 1), 8, 32))
    assert x.shape == [7, 40] and x.padded_shape == [7, 64]
    assert ttnn.to_memory_config(x, ttnn.DRAM_MEMORY_CONFIG).padded_shape == [7, 40]


CALLS: list[Any] = [
    lambda x: ttnn.relu(x),
    lambda x: ttnn.add(x, x),
    lambda x: ttnn.sum(x, dim=-1),
    lambda x: ttnn.sum(x),
    lambda x: ttnn.max(x, dim=0, keepdim=True),
    lambda x: ttnn.softmax(x),
    lambda x: ttnn.typecast(x, BF8),
    lambda x: ttnn.slice(x, [0] * len(x.shape), [1] * len(x.shape)),
    lambda x: ttnn.concat([x, x], dim=-1),
    lambda x: ttnn.concat([x, x], dim=0),
    lambda x: ttnn.repeat(x, [2, 3]),
    lambda x: ttnn.transpose(x, -1, -2),
    lambda x: ttnn.transpose(x, 0, -1),
    lambda x: ttnn.pad(x, [(0, 32), (0, 64)], 0.0),
    lambda x: ttnn.unsqueeze(x, 0),
    lambda x: ttnn.argmax(x, dim=-1),
    lambda x: ttnn.clone(x),
    lambda x: ttnn.matmul(x, ttnn.transpose(x, -1, -2)),
]


def random_config(draw: random.Random, height: int, width: int) -> Any:
    """Shards of a matrix of whole tiles that its cores can hold."""
    down, across = (draw.choice([n for n in range(1, 5) if size % (32 * n) == 0]) for size in (height, width))
    if draw.random() < 0.3:
        return sharded(BLOCK, cores(across, down), height // down, width // across)
    if draw.random() < 0.5:
        return sharded(HEIGHT, cores(down, 1), height // down, width)
    return sharded(WIDTH, cores(across, 1), height, width // across)


@pytest.mark.parametrize("seed", range(40))
def test_no_op_makes_shards_that_the_original_would_refuse(seed: int) -> None:
    draw = random.Random(seed)
    batch = draw.choice([(), (2,), (1, 3)])
    height, width = 32 * draw.randint(1, 4), 32 * draw.randint(1, 4)
    config = random_config(draw, height * torch.Size(batch).numel(), width)
    x = made(*batch, height, width, memory=config)
    assert x.memory_config() == config
    for call in draw.sample(CALLS, 6):
        with ttnn.strictness("original"):
            found = call(x)
        assert found.memory_config().buffer_type in (ttnn.BufferType.L1, ttnn.BufferType.DRAM)
        assert found.flaw_of_shards() is None and (not found.is_sharded() or found.memory_config().shard_spec)


# shapes


def test_outer_products_of_fewer_than_four_dims_are_of_the_last_ones() -> None:
    a, b = made(2, 3, dtype=F32), made(2, 5, dtype=F32)
    x, y = ttnn.to_torch(a), ttnn.to_torch(b)
    assert torch.equal(ttnn.to_torch(ttnn.outer(a, b)), x[:, :, None] * y[:, None, :])
    assert ttnn.outer(made(3, 1), made(1, 5)).shape == [3, 5] and ttnn.outer(made(3), made(5)).shape == [3, 5]


def test_numbers_of_repetitions_are_for_the_last_dims() -> None:
    x = made(2, 3, 4, dtype=F32)
    assert torch.equal(ttnn.to_torch(ttnn.repeat(x, [2])), ttnn.to_torch(x).repeat(1, 1, 2))


def test_heads_of_a_decoding_step_have_a_core_for_each_user() -> None:
    x = made(1, 1, 3, 6 * 32)
    q, k, v = ttnn.experimental.nlp_create_qkv_heads_decode(x, num_heads=2, num_kv_heads=2)
    assert {str(each.memory_config()) for each in (q, k, v)} == {str(q.memory_config())}
    assert q.memory_config() == sharded(HEIGHT, cores(3, 1), 32, 32)
    apart = ttnn.experimental.nlp_create_qkv_heads_decode(x, num_heads=2, num_kv_heads=2, overlap_qk_coregrid=False)
    assert not apart[1].memory_config().shard_spec.grid.contains(ttnn.CoreCoord(0, 0))
    asked = ttnn.experimental.nlp_create_qkv_heads_decode(
        x, num_heads=2, num_kv_heads=2, memory_config=ttnn.DRAM_MEMORY_CONFIG
    )
    assert asked[0].memory_config() == ttnn.DRAM_MEMORY_CONFIG


def test_rotated_rows_fill_their_last_tile_with_zeros() -> None:
    x, angles = made(1, 2, 5, 32, dtype=F32), made(1, 1, 5, 32, dtype=F32)
    found = ttnn.to_torch(ttnn.experimental.rotary_embedding(x, angles, angles))
    assert found.shape == (1, 2, 32, 32) and not found[:, :, 5:].any() and found[:, :, :5].any()
