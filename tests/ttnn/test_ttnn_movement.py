"""Ops that move elements: every device as torch does it in a loop, and labels that make up the op on wholes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

from meshloom import ttnn
from meshloom.errors import OperandError
from ttnn_draws import PLANES, UNKNOWN, P, R, S, alike_for, cuts_of, placements_for, planes
from ttnn_meshes import mesh_of
from ttnn_parts import NoWhole, check_each, check_whole, composed, distributed, of_block, part, places, random_tensor

LIGHT = settings(max_examples=25, deadline=None)


# every device alone


ONE = {
    "permute": (lambda x: ttnn.permute(x, (2, 0, 3, 1)), lambda x: x.permute(2, 0, 3, 1)),
    "permute by negative dims": (lambda x: ttnn.permute(x, (-1, 0, 1, -2)), lambda x: x.permute(3, 0, 1, 2)),
    "transpose": (lambda x: ttnn.transpose(x, 1, -1), lambda x: x.transpose(1, 3)),
    "reshape": (lambda x: ttnn.reshape(x, (6, -1)), lambda x: x.reshape(6, -1)),
    "reshape to more": (lambda x: ttnn.reshape(x, (2, 3, 2, 2, 6)), lambda x: x.reshape(2, 3, 2, 2, 6)),
    "reshape on device": (lambda x: ttnn.reshape_on_device(x, 1, 4, 3, 12), lambda x: x.reshape(1, 4, 3, 12)),
    "view": (lambda x: ttnn.view(x, (2, 12, 6)), lambda x: x.reshape(2, 12, 6)),
    "unsqueeze": (lambda x: ttnn.unsqueeze(x, 2), lambda x: x.unsqueeze(2)),
    "unsqueeze at the end": (lambda x: ttnn.unsqueeze(x, -1), lambda x: x.unsqueeze(-1)),
    "repeat": (lambda x: ttnn.repeat(x, (1, 2, 1, 3)), lambda x: x.repeat(1, 2, 1, 3)),
    "repeat with new dims": (lambda x: ttnn.repeat(x, (2, 1, 1, 1, 1)), lambda x: x.repeat(2, 1, 1, 1, 1)),
    "repeat_interleave": (lambda x: ttnn.repeat_interleave(x, 2, -2), lambda x: x.repeat_interleave(2, -2)),
    "roll": (lambda x: ttnn.roll(x, [1, -2], [0, 3]), lambda x: x.roll([1, -2], [0, 3])),
    "roll of all": (lambda x: ttnn.roll(x, 5), lambda x: x.roll(5)),
    "slice": (lambda x: ttnn.slice(x, [0, 1, 0, 2], [2, 3, 4, 6]), lambda x: x[0:2, 1:3, :, 2:6]),
    "slice in steps": (lambda x: ttnn.slice(x, [0, 0, 0, 0], [2, 3, 4, 6], [1, 2, 1, 3]), lambda x: x[:, ::2, :, ::3]),
    "slice from the end": (lambda x: ttnn.slice(x, [0, 0, -2, 0], [2, 3, 4, -1]), lambda x: x[:, :, -2:, :-1]),
    "narrow": (lambda x: ttnn.narrow(x, 2, 1, 2), lambda x: x.narrow(2, 1, 2)),
    "pad": (
        lambda x: ttnn.pad(x, [(0, 1), (2, 0)], 7.0),
        lambda x: torch.nn.functional.pad(x, (2, 0, 0, 1), value=7.0),
    ),
    "pad to a shape": (
        lambda x: ttnn.pad(x, [2, 5, 4, 8], [0, 1, 0, 2], 1.5),
        lambda x: torch.nn.functional.pad(x, (2, 0, 0, 0, 1, 1), value=1.5),
    ),
    "expand": (lambda x: ttnn.expand(ttnn.unsqueeze(x, 0), [5, -1, -1, -1, -1]), lambda x: x.expand(5, -1, -1, -1, -1)),
    "split": (lambda x: ttnn.split(x, 4, dim=3)[1], lambda x: x.split(4, dim=3)[1]),
    "split by sizes": (lambda x: ttnn.split(x, [1, 3, 2], dim=-1)[1], lambda x: x.split([1, 3, 2], dim=-1)[1]),
    "chunk": (lambda x: ttnn.chunk(x, 2, 2)[1], lambda x: x.chunk(2, 2)[1]),
    "stack": (lambda x: ttnn.stack([x, x], 1), lambda x: torch.stack([x, x], 1)),
    "concat": (lambda x: ttnn.concat([x, x, x], -1), lambda x: torch.cat([x, x, x], -1)),
    "concat in groups": (
        lambda x: ttnn.concat([x, x], 3, groups=2),
        lambda x: torch.cat([x[..., :3], x[..., :3], x[..., 3:], x[..., 3:]], -1),
    ),
    "fold": (lambda x: ttnn.fold(x, 3, 2), lambda x: x.reshape(2, 1, 3, 2, 2, 6).transpose(2, 3).reshape(2, 1, 2, 36)),
    "transpose_rm": (lambda x: ttnn.experimental.transpose_rm(x), lambda x: x.transpose(-1, -2)),
    "rotate_half": (lambda x: ttnn.experimental.rotate_half(x), lambda x: torch.cat([-x[..., 3:], x[..., :3]], -1)),
}


@pytest.mark.parametrize("name", ONE)
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_every_device_moves_its_own_elements_as_torch_does(name: str, data: st.DataObject) -> None:
    ours, torchs = ONE[name]
    grid = data.draw(planes)
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (2, 3, 4, 6), data.draw(alike_for(grid)))
        before = x.block.clone()
        found = ours(x)
        check_each(found, torchs, x)
        assert torch.equal(x.block, before)
        assert found.block.shape[: len(grid)] == x.block.shape[: len(grid)]


def test_the_loop_oracle_fails_on_a_wrong_function() -> None:
    with mesh_of((2, 2)) as mesh:
        x = random_tensor(mesh, (3, 3), [False, False])
        with pytest.raises(AssertionError):
            check_each(ttnn.transpose(x, 0, 1), lambda part: part, x)


def test_the_loop_oracle_sees_one_wrong_device() -> None:
    with mesh_of((2, 2)) as mesh:
        x = random_tensor(mesh, (3, 3), [False, False])
        found = ttnn.transpose(x, 0, 1)
        found.block[1, 0, 0, 0] += 1
        with pytest.raises(AssertionError):
            check_each(found, lambda part: part.T, x)


@given(data=st.data())
@LIGHT
def test_operands_that_differ_on_different_axes_are_joined(data: st.DataObject) -> None:
    grid = data.draw(planes)
    with mesh_of(grid) as mesh:
        a, b = (random_tensor(mesh, (2, n, 4), data.draw(alike_for(grid))) for n in (3, 2))
        check_each(ttnn.concat([a, b], 1), lambda x, y: torch.cat([x, y], 1), a, b)
        c = random_tensor(mesh, (2, 3, 4), data.draw(alike_for(grid)))
        check_each(ttnn.stack([a, c], -1), lambda x, y: torch.stack([x, y], -1), a, c)


@given(data=st.data())
@LIGHT
def test_gather_and_scatter_use_every_devices_own_numbers(data: st.DataObject) -> None:
    grid, dim = data.draw(planes), data.draw(st.integers(-3, 2))
    with mesh_of(grid) as mesh:
        x, source = (random_tensor(mesh, (3, 4, 5), data.draw(alike_for(grid))) for _ in range(2))
        index = random_tensor(mesh, (3, 4, 5), data.draw(alike_for(grid)), high=(3, 4, 5)[dim])
        check_each(ttnn.gather(x, dim, index), lambda p, i: p.gather(dim, i.long()), x, index)
        check_each(
            ttnn.scatter_add(x, dim, index, source),
            lambda p, i, s: p.scatter_add(dim, i.long(), s),
            *(x, index, source),
            close=1e-5,
        )
        order = torch.argsort(torch.rand(3, 4, 5), dim=dim)  # numbers that occur once: no order of writes matters
        once = of_block(mesh, order[(None,) * len(grid)], [R] * len(grid))
        check_each(ttnn.scatter(x, dim, once, source), lambda p, i, s: p.scatter(dim, i.long(), s), x, once, source)


@given(data=st.data())
@LIGHT
def test_embedding_reads_rows_of_every_devices_own_table(data: st.DataObject) -> None:
    grid = data.draw(planes)
    with mesh_of(grid) as mesh:
        table = random_tensor(mesh, (7, 4), data.draw(alike_for(grid)), ttnn.bfloat16)
        index = random_tensor(mesh, (2, 5), data.draw(alike_for(grid)), ttnn.uint32, high=7)
        found = ttnn.embedding(index, table)
        check_each(found, lambda i, t: torch.nn.functional.embedding(i, t), index, table)
        assert (found.layout, found.dtype) == (ttnn.ROW_MAJOR_LAYOUT, ttnn.bfloat16)
        assert ttnn.embedding(index, table, layout=ttnn.TILE_LAYOUT).layout is ttnn.TILE_LAYOUT


@given(data=st.data())
@LIGHT
def test_the_gradient_of_a_table_sums_over_uses(data: st.DataObject) -> None:
    grid = data.draw(planes)
    with mesh_of(grid) as mesh:
        table = random_tensor(mesh, (7, 4), [True] * len(grid))
        index = random_tensor(mesh, (2, 5), data.draw(alike_for(grid)), ttnn.uint32, high=7)
        grad = random_tensor(mesh, (1, 1, 10, 4), data.draw(alike_for(grid)))

        def slow(i: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            rows = torch.zeros(1, 1, 7, 4)
            for place, row in enumerate(i.flatten().tolist()):
                rows[0, 0, row] += g[0, 0, place]
            return rows

        check_each(ttnn.embedding_bw(index, table, grad), slow, index, grad, close=1e-5)


@given(data=st.data())
@LIGHT
def test_other_ops_by_number_are_those_of_torch(data: st.DataObject) -> None:
    grid = data.draw(planes)
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (4, 3, 5), data.draw(alike_for(grid)))
        rows = random_tensor(mesh, (2,), data.draw(alike_for(grid)), ttnn.uint32, high=3)
        check_each(ttnn.index_fill(x, 1, rows, 2.5), lambda p, i: p.index_fill(1, i.long(), 2.5), x, rows)
        check_each(ttnn.moreh_getitem(x, [rows, rows], [0, 1]), lambda p, i: p[i.long(), i.long()], x, rows)
        other = random_tensor(mesh, (2, 3, 5), data.draw(alike_for(grid)))
        named = of_block(mesh, torch.tensor([3, 1])[(None,) * len(grid)], [R] * len(grid), ttnn.uint32)

        def filled(p: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
            p = p.clone()
            p[3], p[1] = o[0], o[1]
            return p

        check_each(ttnn.indexed_fill(named, x, other), filled, x, other)
        flags = random_tensor(mesh, (1, 1, 1, 9), data.draw(alike_for(grid)), high=2)
        count, numbers = ttnn.nonzero(flags)
        for place in places(grid):
            expected = part(flags, place).flatten().nonzero().flatten()
            assert int(part(count, place)) == len(expected)
            assert torch.equal(part(numbers, place).flatten()[: len(expected)], expected)


@given(data=st.data())
@LIGHT
def test_slices_by_tensors_begin_where_every_device_says(data: st.DataObject) -> None:
    grid = data.draw(planes)
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (2, 8), data.draw(alike_for(grid)))
        first = random_tensor(mesh, (2,), data.draw(alike_for(grid)), high=1)
        first.block[..., 1] = torch.randint(0, 5, first.block.shape[:-1])
        last = of_block(mesh, first.block + torch.tensor([2, 4]), first.tensor_topology().placements())
        check_each(ttnn.slice(x, first, last), lambda p, f: p[:, int(f[1]) : int(f[1]) + 4], x, first)
        halves = ttnn.slice(x, first, last, slice_dim=1, num_devices=2)
        check_each(halves, lambda p, f: p[:, int(f[1]) : int(f[1]) + 4], x, first)


# memory


def test_results_have_memory_of_their_own() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 4), [True, False])
        for made in (
            ttnn.permute(x, (0, 1)),
            ttnn.roll(x, 0, 0),
            ttnn.slice(x, [0, 0], [1, 4]),
            ttnn.repeat(x, (1, 1)),
        ):
            before = made.block.clone()
            x.block.add_(1)
            assert torch.equal(made.block, before)
            assert made.buffer_address() != x.buffer_address()


def test_a_view_is_the_same_memory_and_a_reshape_that_keeps_rows_is_a_view() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (2, 3, 4), [True, False])
        seen, rows = ttnn.view(x, (6, 4)), ttnn.reshape(x, (3, 2, 4))
        x.block.add_(1)
        assert torch.equal(seen.block, x.block.reshape(1, 2, 6, 4))
        assert torch.equal(rows.block, x.block.reshape(1, 2, 3, 2, 4))
        assert seen.buffer_address() == rows.buffer_address() == x.buffer_address()
        other = ttnn.reshape(x, (2, 12))
        assert other.buffer_address() != x.buffer_address()


def test_a_view_of_tiles_needs_whole_tiles() -> None:
    with mesh_of((1, 1)) as mesh:
        x = random_tensor(mesh, (2, 32, 32), [True, True], layout=ttnn.TILE_LAYOUT)
        assert ttnn.view(x, (64, 32)).shape == [64, 32]
        ragged = random_tensor(mesh, (2, 5, 32), [True, True], layout=ttnn.TILE_LAYOUT)
        with pytest.raises(OperandError, match="in place"):
            ttnn.view(ragged, (10, 32))
        assert ttnn.reshape(ragged, (10, 32)).shape == [10, 32]


def test_a_tensor_can_be_written_slice_by_slice() -> None:
    with mesh_of((2, 2)) as mesh:
        room = of_block(mesh, torch.zeros(1, 1, 2, 6), [R, R])
        piece = random_tensor(mesh, (2, 3), [False, True])
        address = room.buffer_address()
        made = ttnn.experimental.slice_write(piece, room, [0, 3], [2, 6], [1, 1])
        assert made is room and room.buffer_address() == address
        check_each(room, lambda p: torch.cat([torch.zeros(2, 3), p], 1), piece)
        assert room.tensor_topology().placements() == [UNKNOWN, R]


# formats


def test_layouts_change_and_values_stay() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 1, 5, 7), [True, False], ttnn.bfloat16)
        tiled = ttnn.tilize_with_zero_padding(x)
        assert (tiled.layout, tiled.shape, tiled.padded_shape) == (ttnn.TILE_LAYOUT, [1, 1, 5, 7], [1, 1, 32, 32])
        rows = ttnn.untilize(tiled)
        assert rows.layout is ttnn.ROW_MAJOR_LAYOUT and torch.equal(rows.block, x.block)
        with pytest.raises(RuntimeError, match=r"Input tensor width \(7\) must be divisible by tile width \(32\)"):
            ttnn.tilize(x)
        assert ttnn.untilize_with_unpadding(tiled, (0, 0, 2, 6)).shape == [1, 1, 3, 7]
        small = ttnn.tilize_with_zero_padding(x, output_dtype=ttnn.bfloat8_b)
        assert (small.dtype, ttnn.untilize(small).dtype) == (ttnn.bfloat8_b, ttnn.bfloat16)


def test_parts_go_over_cores_and_back() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 1, 64, 32), [True, False], ttnn.bfloat16, ttnn.TILE_LAYOUT)
        spread = ttnn.interleaved_to_sharded(
            x, ttnn.CoreCoord(2, 1), [32, 32], ttnn.TensorMemoryLayout.HEIGHT_SHARDED, ttnn.ShardOrientation.ROW_MAJOR
        )
        assert spread.memory_config().is_sharded() and torch.equal(spread.block, x.block)
        again = ttnn.interleaved_to_sharded(x, spread.memory_config(), ttnn.bfloat8_b)
        assert again.dtype is ttnn.bfloat8_b and again.memory_config() == spread.memory_config()
        back = ttnn.sharded_to_interleaved(spread, ttnn.L1_MEMORY_CONFIG)
        assert back.memory_config() == ttnn.L1_MEMORY_CONFIG
        assert ttnn.sharded_to_interleaved(spread).memory_config() == ttnn.DRAM_MEMORY_CONFIG
        with pytest.raises(OperandError, match="is not sharded"):
            ttnn.interleaved_to_sharded(x, ttnn.L1_MEMORY_CONFIG)


def test_metadata_is_that_of_the_original() -> None:
    """Shapes, dtypes and layouts that were seen on the original."""
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 1, 32, 64), [True, False], ttnn.bfloat16, ttnn.TILE_LAYOUT)
        seen = {
            "reshape": (ttnn.reshape(x, (1, 32, 1, 64)), [1, 32, 1, 64], [1, 32, 32, 64]),
            "reshape -1": (ttnn.reshape(x, (1, 2, 32, -1)), [1, 2, 32, 32], [1, 2, 32, 32]),
            "permute": (ttnn.permute(x, (0, 1, 3, 2)), [1, 1, 64, 32], [1, 1, 64, 32]),
            "concat": (ttnn.concat([x, x], -1), [1, 1, 32, 128], [1, 1, 32, 128]),
            "slice": (ttnn.slice(x, (0, 0, 0, 0), (1, 1, 32, 32)), [1, 1, 32, 32], [1, 1, 32, 32]),
            "pad": (ttnn.pad(x, [(0, 0), (0, 0), (0, 32), (0, 0)], 0.0), [1, 1, 64, 64], [1, 1, 64, 64]),
            "repeat": (ttnn.repeat(x, (1, 2, 1, 1)), [1, 2, 32, 64], [1, 2, 32, 64]),
            "squeeze": (ttnn.squeeze(x, 0), [1, 32, 64], [1, 32, 64]),
            "unsqueeze": (ttnn.unsqueeze(x, 0), [1, 1, 1, 32, 64], [1, 1, 1, 32, 64]),
            "unsqueeze_to_4D": (ttnn.unsqueeze_to_4D(ttnn.squeeze(x)), [1, 1, 32, 64], [1, 1, 32, 64]),
            "stack": (ttnn.stack([x, x], 0), [2, 1, 1, 32, 64], [2, 1, 1, 32, 64]),
        }
        for name, (found, shape, padded) in seen.items():
            assert (found.shape, found.padded_shape) == (shape, padded), name
            assert (found.dtype, found.layout) == (ttnn.bfloat16, ttnn.TILE_LAYOUT), name


REFUSED = {
    "Invalid arguments to reshape": lambda x: ttnn.reshape(x, (5, 5)),
    "All dimensions must be the same size except for the dimension along which the contenation": lambda x: ttnn.concat(
        [x, ttnn.slice(x, [0, 0], [2, 3])], 0
    ),
    "should have same dtypes": lambda x: ttnn.concat([x, ttnn.typecast(x, ttnn.float32)], 0),
    "need 1 or more tensors": lambda x: ttnn.concat([], 0),
    "does not match the length of the desired ordering": lambda x: ttnn.permute(x, (0, 1, 2)),
    "names a dim twice": lambda x: ttnn.permute(x, (0, 0)),
    "is no slice of dim 1": lambda x: ttnn.slice(x, [0, 2], [2, 9]),
    "out of range": lambda x: ttnn.transpose(x, 0, 2),
    "sizes that sum to 4": lambda x: ttnn.split(x, [1, 2], dim=1),
    "only dims of size 1 grow": lambda x: ttnn.expand(x, [4, 4]),
}


@pytest.mark.parametrize("phrase", REFUSED)
def test_refusals_are_runtime_errors_with_the_phrase_of_the_original(phrase: str) -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (2, 4), [True, False], ttnn.bfloat16)
        with pytest.raises(RuntimeError, match=phrase):
            REFUSED[phrase](x)


def test_numbers_outside_of_a_table_are_refused() -> None:
    with mesh_of((1, 2)) as mesh:
        table = random_tensor(mesh, (4, 3), [True, True])
        index = of_block(mesh, torch.tensor([[[[0, 4]]]]), [R, R], ttnn.uint32)
        with pytest.raises(OperandError, match="row 4 is out of range, there are 4"):
            ttnn.embedding(index, table)


# labels


MOVES: dict[str, tuple[Any, Any, tuple[int, ...]]] = {  # ours, torch's on the whole, dims that may not be cut
    "permute": (lambda x: ttnn.permute(x, (2, 0, 3, 1)), lambda w: w.permute(2, 0, 3, 1), ()),
    "transpose": (lambda x: ttnn.transpose(x, 1, -1), lambda w: w.transpose(1, 3), ()),
    "unsqueeze": (lambda x: ttnn.unsqueeze(x, 1), lambda w: w.unsqueeze(1), ()),
    "repeat": (lambda x: ttnn.repeat(x, (2, 1, 1, 3)), lambda w: w.repeat(2, 1, 1, 3), (0, 3)),
    "repeat_interleave": (lambda x: ttnn.repeat_interleave(x, 3, 1), lambda w: w.repeat_interleave(3, 1), ()),
    "slice": (lambda x: ttnn.slice(x, [0, 0, 1, 0], [12, 12, 3, 12]), lambda w: w[:, :, 1:3], (2,)),
    "pad": (lambda x: ttnn.pad(x, [(1, 2), (0, 0)], 0.0), lambda w: torch.nn.functional.pad(w, (0, 0, 1, 2)), (2,)),
    "roll": (lambda x: ttnn.roll(x, 1, 0), lambda w: w.roll(1, 0), (0,)),
    "concat": (lambda x: ttnn.concat([x, x], 2), lambda w: torch.cat([w, w], 2), (2,)),
    "stack": (lambda x: ttnn.stack([x, x], 0), lambda w: torch.stack([w, w], 0), ()),
    "chunk": (lambda x: ttnn.chunk(x, 2, 3)[1], lambda w: w.chunk(2, 3)[1], (3,)),
    "tilize": (lambda x: ttnn.tilize_with_zero_padding(x), lambda w: w, ()),
}


@pytest.mark.parametrize("name", MOVES)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_labels_make_up_the_op_on_wholes(name: str, data: st.DataObject) -> None:
    ours, torchs, fixed = MOVES[name]
    grid = data.draw(planes)
    placements = data.draw(placements_for(grid, [dim for dim in range(4) if dim not in fixed]))
    whole = torch.randn(12, 12, 12, 12)
    with mesh_of(grid) as mesh:
        x = distributed(mesh, whole, placements)
        if name == "slice":  # ends are those of a part
            part_ends = [size if dim != 2 else 3 for dim, size in enumerate(x.shape)]
            check_whole(ttnn.slice(x, [0, 0, 1, 0], part_ends), torchs(whole))
        else:
            check_whole(ours(x), torchs(whole))


def test_the_label_oracle_fails_on_a_stale_label() -> None:
    """What the original does: dims are not numbered anew."""
    with mesh_of((2, 2)) as mesh:
        whole = torch.randn(4, 6)
        x = distributed(mesh, whole, [S(0), R])
        found = ttnn.transpose(x, 0, 1)
        check_whole(found, whole.T)
        found.update_tensor_topology(x.tensor_topology())
        with pytest.raises(AssertionError):
            check_whole(found, whole.T)


def test_the_label_oracle_fails_when_replicas_differ() -> None:
    with mesh_of((1, 2)) as mesh:
        x = of_block(mesh, torch.randn(1, 2, 3), [R, R])
        with pytest.raises(AssertionError, match="differ"):
            composed(x)


def _factored(data: st.DataObject, size: int) -> list[int]:
    """A shape of so many elements."""
    shape = []
    while size > 1:
        factor = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
        shape.append(factor)
        size //= factor
        if len(shape) == 3:
            break
    return [*shape, size] if size > 1 or not shape else shape


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_a_reshape_is_labelled_as_a_reshape_of_the_whole_or_not_at_all(data: st.DataObject) -> None:
    """A reshape keeps the order of elements, so the whole of the result is that of the operand, element by element."""
    grid = data.draw(planes)
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    placements = data.draw(placements_for(grid, range(len(shape))))
    whole = torch.randn([size * cuts_of(grid, placements, dim) for dim, size in enumerate(shape)])
    with mesh_of(grid) as mesh:
        x = distributed(mesh, whole, placements)
        found = ttnn.reshape(x, _factored(data, math.prod(shape)))
        try:
            made = composed(found)
        except NoWhole:
            return
        torch.testing.assert_close(made.flatten(), whole.flatten())


def test_a_reshape_keeps_a_cut_that_it_can_keep() -> None:
    cases = [
        ((4, 6, 5), 1, (4, 3, 10), 1),
        ((4, 6, 5), 1, (4, 30), 1),
        ((4, 6, 5), 0, (24, 5), 0),
        ((4, 6, 5), 2, (2, 2, 6, 5), 3),
        ((1, 8), 1, (1, 1, 1, 8), 3),
        ((1, 1, 8, 4), 2, (8, 4), 0),
        ((2, 1, 3), 1, (2, 3), 1),
    ]
    with mesh_of((1, 2)) as mesh:
        for shape, dim, other, place in cases:
            x = of_block(mesh, torch.randn(1, 2, *shape), [R, S(dim)])
            assert ttnn.reshape(x, other).tensor_topology().placements() == [R, S(place)], (shape, dim, other)
        x = of_block(mesh, torch.randn(1, 2, 4, 6, 5), [R, S(1)])
        assert ttnn.reshape(x, (24, 5)).tensor_topology().placements() == [R, UNKNOWN]


def test_two_axes_that_cut_two_dims_stay_in_order_when_dims_are_merged() -> None:
    with mesh_of((2, 3)) as mesh:
        whole = torch.randn(2, 3, 5)
        x = distributed(mesh, whole, [S(0), S(1)])  # parts [1, 1, 5]: merged, axis 0 is the major one
        torch.testing.assert_close(composed(ttnn.reshape(x, (1, 5))).flatten(), whole.flatten())
        turned = distributed(mesh, torch.randn(3, 2, 5), [S(1), S(0)])
        with pytest.raises(NoWhole):
            composed(ttnn.reshape(turned, (1, 5)))


def test_squeezing_a_cut_dim_joins_it_with_the_next() -> None:
    with mesh_of((1, 2)) as mesh:
        whole = torch.randn(2, 3, 4)
        found = ttnn.squeeze(distributed(mesh, whole, [R, S(0)]), 0)
        assert found.shape == [3, 4]
        check_whole(found, whole.reshape(6, 4))


@given(data=st.data())
@LIGHT
def test_labels_of_embedding_make_up_the_lookup_of_wholes(data: st.DataObject) -> None:
    grid = data.draw(planes)
    of_index = data.draw(placements_for(grid, [0, 1], terms=False))
    of_table = data.draw(placements_for(grid, [1]))
    table, index = torch.randn(9, 12), torch.randint(0, 9, (12, 12))
    with mesh_of(grid) as mesh:
        found = ttnn.embedding(
            distributed(mesh, index, of_index, ttnn.uint32), distributed(mesh, table, of_table, ttnn.float32)
        )
        try:
            check_whole(found, table[index])
        except NoWhole:  # tokens and table cut by one axis: every device has some rows of some columns
            assert any(a != R and b != R for a, b in zip(of_index, of_table, strict=True))


def test_a_table_cut_at_its_rows_makes_no_whole() -> None:
    with mesh_of((1, 2)) as mesh:
        index = of_block(mesh, torch.zeros(1, 1, 2, 3, dtype=torch.int64), [R, R], ttnn.uint32)
        table = distributed(mesh, torch.randn(8, 4), [R, S(0)])
        assert ttnn.embedding(index, table).tensor_topology().placements() == [R, UNKNOWN]


@given(data=st.data())
@LIGHT
def test_what_different_cuts_make_is_told_or_not_told_never_wrong(data: st.DataObject) -> None:
    grid = data.draw(planes)
    ways = [data.draw(placements_for(grid, [0, 1])) for _ in range(2)]
    with mesh_of(grid) as mesh:
        wholes = [torch.randn(12, 12, 3), torch.randn(12, 12, 3)]
        a, b = (distributed(mesh, whole, way) for whole, way in zip(wholes, ways, strict=True))
        assume(tuple(a.shape) == tuple(b.shape))
        found = ttnn.concat([a, b], 2)
        try:
            made = composed(found)
        except NoWhole:
            return
        if ways[0] == ways[1]:
            torch.testing.assert_close(made, torch.cat(wholes, 2))


def test_terms_with_something_else_than_zero_around_them_make_no_whole() -> None:
    with mesh_of((1, 2)) as mesh:
        x = distributed(mesh, torch.randn(2, 2), [R, P("sum")])
        assert ttnn.pad(x, [(0, 1), (0, 0)], 0.0).tensor_topology().placements() == [R, P("sum")]
        assert ttnn.pad(x, [(0, 1), (0, 0)], 1.0).tensor_topology().placements() == [R, UNKNOWN]
        other = of_block(mesh, torch.randn(1, 1, 2, 2), [R, R])
        assert ttnn.concat([x, other], 0).tensor_topology().placements() == [R, UNKNOWN]


@pytest.mark.parametrize("grid", PLANES)
def test_what_is_alike_is_stored_once(grid: tuple[int, ...]) -> None:
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (2, 3), [True] * len(grid))
        for found in (ttnn.permute(x, (1, 0)), ttnn.concat([x, x], 0), ttnn.repeat(x, (2, 2))):
            assert found.block.shape[: len(grid)] == (1,) * len(grid)


def test_the_padding_of_a_dim_that_does_not_divide_goes_along() -> None:
    with mesh_of((1, 4)) as mesh:
        whole = torch.randn(10, 6)
        x = ttnn.from_torch(whole, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0), dtype=ttnn.float32)
        assert x.shape == [3, 6]
        moved = {
            "transpose": (ttnn.transpose(x, 0, 1), whole.T),
            "unsqueeze": (ttnn.unsqueeze(x, 0), whole[None]),
            "reshape": (ttnn.reshape(x, (3, 2, 3)), whole.reshape(10, 2, 3)),
            "slice": (ttnn.slice(x, [0, 2], [3, 4]), whole[:, 2:4]),
            "concat": (ttnn.concat([x, x], 1), torch.cat([whole, whole], 1)),
            "repeat_interleave": (ttnn.repeat_interleave(x, 2, 0), whole.repeat_interleave(2, 0)),
        }
        for name, (found, expected) in moved.items():
            assert torch.equal(ttnn.to_torch(found), expected), name


def test_numbers_cut_where_the_tensor_is_not_make_no_whole() -> None:
    whole = torch.randn(4, 6)
    numbers = torch.randint(0, 6, (4, 6))
    with mesh_of((2, 2)) as device:
        index = distributed(device, numbers, [S(0), R])
        assert composed_or_none(ttnn.gather(distributed(device, whole, [R, R]), 1, index)) is None
        check_whole(ttnn.gather(distributed(device, whole, [S(0), R]), 1, index), whole.gather(1, numbers))
        along = distributed(device, numbers, [S(1), R])
        check_whole(ttnn.gather(distributed(device, whole, [R, R]), 1, along), whole.gather(1, numbers))
        source = distributed(device, whole, [S(0), R])
        found = ttnn.scatter(distributed(device, whole, [R, R]), 1, index, source)
        assert composed_or_none(found) is None


def composed_or_none(tensor: Any) -> torch.Tensor | None:
    try:
        return composed(tensor)
    except NoWhole:
        return None


def test_folding_puts_cut_channels_between_each_other() -> None:
    whole = torch.randn(2, 4, 4, 6)
    with mesh_of((2, 2)) as device:
        assert ttnn.fold(distributed(device, whole, [S(3), S(0)]), 2, 2).tensor_topology().placements() == [
            UNKNOWN,
            S(0),
        ]
        check_whole(ttnn.fold(distributed(device, whole, [S(3), S(0)]), 1, 1), whole)


def test_the_gradient_of_a_cut_table_is_not_that_of_the_whole() -> None:
    numbers, table, grad = torch.randint(0, 4, (2, 3)), torch.randn(8, 4), torch.randn(1, 1, 6, 4)
    whole = torch.zeros(8, 4).index_add(0, numbers.flatten(), grad[0, 0])
    with mesh_of((2, 2)) as device:
        index, flow = distributed(device, numbers, [R, R]), distributed(device, grad, [R, R])
        found = ttnn.embedding_bw(index, distributed(device, table, [S(0), R]), flow)
        assert found.tensor_topology().placements() == [UNKNOWN, R]
        check_whole(ttnn.embedding_bw(index, distributed(device, table, [R, R]), flow), whole[None, None], close=1e-5)
