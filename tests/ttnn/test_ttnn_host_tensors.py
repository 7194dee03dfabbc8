"""Tensors of the host: what stays there, what moves, relabelled padding, truth, and tensors in pickles."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable

import pytest
import torch

from meshloom import ttnn
from meshloom.errors import OperandError

pytest_plugins = ("ttnn_meshes",)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float32).reshape(shape)


@pytest.fixture
def mesh(open_mesh):
    return open_mesh(2, 4)


def on_host(mesh, x: torch.Tensor, dim: int = 0, **options) -> ttnn.Tensor:
    """A tensor of the host that knows its mesh."""
    return ttnn.from_torch(x, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=dim), **options)


def parts(tensor: ttnn.Tensor) -> list[torch.Tensor]:
    return [ttnn.to_torch(each) for each in ttnn.get_device_tensors(tensor)]


# truth


def test_a_tensor_is_true_whatever_it_holds(mesh):
    for values in (torch.zeros(1), torch.zeros(2, 2), torch.zeros(0, 4), torch.tensor(0.0)):
        assert bool(ttnn.from_torch(values))
    assert ttnn.from_torch(torch.zeros(2), device=mesh) and on_host(mesh, torch.zeros(8))
    gone = ttnn.from_torch(torch.zeros(2), device=mesh)
    ttnn.deallocate(gone)
    assert gone
    mask: ttnn.Tensor | None = None
    assert (mask or "none") == "none"


# what stays on the host

MOVES: dict[str, tuple[Callable[[ttnn.Tensor], ttnn.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "unsqueeze": (lambda t: ttnn.unsqueeze(t, 1), lambda x: x.unsqueeze(1)),
    "unsqueeze_to_4D": (ttnn.unsqueeze_to_4D, lambda x: x[None]),
    "squeeze": (lambda t: ttnn.squeeze(t, 0), lambda x: x.squeeze(0)),
    "reshape, rows whole": (lambda t: ttnn.reshape(t, (3, 1, 4)), lambda x: x.reshape(3, 1, 4)),
    "reshape, rows cut": (lambda t: ttnn.reshape(t, (1, 6, 2)), lambda x: x.reshape(1, 6, 2)),
    "the method reshape": (lambda t: t.reshape(1, 6, 2), lambda x: x.reshape(1, 6, 2)),
    "view": (lambda t: ttnn.view(t, (3, 1, 4)), lambda x: x.reshape(3, 1, 4)),
    "to_layout": (lambda t: ttnn.to_layout(t, ttnn.TILE_LAYOUT), lambda x: x),
    "the method to": (lambda t: t.to(ttnn.TILE_LAYOUT), lambda x: x),
    "typecast": (lambda t: ttnn.typecast(t, ttnn.int32), lambda x: x.int()),
    "to_dtype": (lambda t: ttnn.to_dtype(t, ttnn.int32), lambda x: x.int()),
    "clone": (ttnn.clone, lambda x: x),
    "pad": (lambda t: ttnn.pad(t, [(0, 0), (1, 2), (0, 1)], 7.0), lambda x: pad(x, (0, 1, 1, 2), value=7.0)),
    "permute": (lambda t: ttnn.permute(t, (2, 0, 1)), lambda x: x.permute(2, 0, 1)),
    "transpose": (lambda t: ttnn.transpose(t, 1, 2), lambda x: x.transpose(1, 2)),
    "slice": (lambda t: ttnn.slice(t, [0, 1, 0], [1, 3, 4]), lambda x: x[:, 1:3]),
    "narrow": (lambda t: ttnn.narrow(t, 1, 1, 2), lambda x: x[:, 1:3]),
    "an index": (lambda t: t[0], lambda x: x[0]),
    "a range": (lambda t: t[:, 1:, ::2], lambda x: x[:, 1:, ::2]),
    "split": (lambda t: ttnn.split(t, 2, 2)[1], lambda x: x[..., 2:]),
    "chunk": (lambda t: ttnn.chunk(t, 2, 2)[0], lambda x: x[..., :2]),
    "concat": (lambda t: ttnn.concat([t, t], 1), lambda x: torch.cat([x, x], 1)),
    "stack": (lambda t: ttnn.stack([t, t], 0), lambda x: torch.stack([x, x])),
    "repeat": (lambda t: ttnn.repeat(t, (1, 2, 1)), lambda x: x.repeat(1, 2, 1)),
    "expand": (lambda t: ttnn.expand(t, (5, -1, -1)), lambda x: x.expand(5, -1, -1)),
    "roll": (lambda t: ttnn.roll(t, 1, 1), lambda x: x.roll(1, 1)),
}
pad = torch.nn.functional.pad


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("mapped", [True, False])
def test_what_only_moves_elements_works_on_the_host_and_stays_there(mesh, name, mapped):
    ours, theirs = MOVES[name]
    x = numbers(8, 3, 4)
    tensor = on_host(mesh, x) if mapped else ttnn.from_torch(x[:1])
    held = parts(tensor)
    found = ours(tensor)
    assert tensor.device() is None and found.device() is None and found.storage_type() is ttnn.StorageType.HOST
    assert len(parts(found)) == len(held) == (8 if mapped else 1)
    for got, part in zip(parts(found), held, strict=True):
        assert torch.equal(got, theirs(part).to(got.dtype))


def test_the_result_goes_to_the_mesh_with_the_first_op_that_computes(mesh):
    x = numbers(8, 4)
    host = on_host(mesh, x)
    seen = ttnn.to_layout(ttnn.unsqueeze(host, 0), ttnn.TILE_LAYOUT)
    total = ttnn.add(seen, 1.0)
    assert host.device() is None and seen.device() is mesh and total.device() is mesh
    assert torch.equal(total.to_torch(), x[None] + 1)
    moved = ttnn.to_device(ttnn.permute(host, (1, 0)), mesh)
    assert moved.device() is mesh and host.device() is None and torch.equal(moved.to_torch(), x.T)


def test_a_view_on_the_host_keeps_its_values_when_its_source_is_moved_and_written(mesh):
    x = numbers(8, 4)
    host = on_host(mesh, x)
    seen = ttnn.unsqueeze(host, 0)
    ttnn.add(host, 1.0, output_tensor=host)
    assert host.device() is mesh and torch.equal(host.to_torch(), x + 1)
    assert seen.device() is None and torch.equal(seen.to_torch(), x[None])


def test_a_host_tensor_keeps_its_label_its_format_and_takes_no_memory_of_the_mesh(mesh):
    host = on_host(mesh, numbers(8, 4), dtype=ttnn.bfloat16)
    turned = ttnn.permute(ttnn.to_layout(host, ttnn.TILE_LAYOUT), (1, 0))
    assert turned.tensor_topology().placements() == [ttnn.PlacementShard(1)]
    assert (turned.dtype, turned.layout, turned.shape) == (ttnn.bfloat16, ttnn.TILE_LAYOUT, [4, 1])
    with pytest.raises(OperandError, match="a tensor on the host has no buffer"):
        turned.buffer_address()


def test_an_index_of_a_host_tensor_may_leave_no_dims():
    found = ttnn.from_torch(numbers(33), dtype=ttnn.bfloat16, layout=ttnn.TILE_LAYOUT)[-1]
    assert (found.shape, found.padded_shape, found.item()) == ([], [32, 32], 33.0)


def test_host_tensors_for_different_meshes_are_not_put_together(mesh, open_mesh):
    other = on_host(open_mesh(1, 2), numbers(2, 4))
    with pytest.raises(OperandError, match=r"meant for meshes of \(1, 2\) and \(2, 4\)"):
        ttnn.concat([on_host(mesh, numbers(8, 4)), other], 0)


def test_what_computes_still_refuses_a_host_tensor_without_a_mesh(mesh):
    plain = ttnn.from_torch(numbers(2, 2))
    for call in (lambda: ttnn.add(plain, 1.0), lambda: ttnn.concat([plain, ttnn.to_device(plain, mesh)], 0)):
        with pytest.raises(RuntimeError, match="must be on device, got storage type: StorageType::HOST"):
            call()


# padding


@pytest.mark.parametrize("rows", [1, 5, 31])
def test_reshape_with_a_padded_shape_says_which_rows_are_padding(mesh, rows):
    x = numbers(1, 1, 32, 64)
    whole = ttnn.from_torch(x, device=mesh, layout=ttnn.TILE_LAYOUT)
    found = ttnn.reshape(whole, (1, 1, rows, 64), (1, 1, 32, 64))
    assert (found.shape, found.padded_shape) == ([1, 1, rows, 64], [1, 1, 32, 64])
    assert found.buffer_address() == whole.buffer_address()
    assert torch.equal(found.to_torch(), x[:, :, :rows])
    again = ttnn.reshape(found, logical_shape=(1, 1, 32, 64), padded_shape=(1, 1, 32, 64))
    assert again.shape == [1, 1, 32, 64] and torch.equal(again.to_torch(), x)
    assert again.buffer_address() == whole.buffer_address()


@pytest.mark.parametrize("layout", [ttnn.TILE_LAYOUT, ttnn.ROW_MAJOR_LAYOUT])
def test_what_was_relabelled_shares_memory_with_its_source(mesh, layout):
    whole = ttnn.from_torch(torch.zeros(1, 1, 32, 64), device=mesh, layout=layout)
    found = ttnn.reshape(whole, (1, 1, 2, 64), (1, 1, 32, 64))
    ttnn.add(found, 1.0, output_tensor=found)
    assert [float(each.sum()) for each in whole.to_torch()[0, 0, :3]] == [64.0, 64.0, 0.0]
    assert torch.equal(ttnn.reshape(found, (1, 1, 32, 64), (1, 1, 32, 64)).to_torch(), whole.to_torch())


def test_padding_that_no_reshape_made_is_what_tiles_are_filled_up_with(mesh):
    x = ttnn.from_torch(torch.ones(1, 1, 2, 40), device=mesh, layout=ttnn.TILE_LAYOUT)
    found = ttnn.reshape(x, (1, 1, 3, 41), (1, 1, 32, 64)).to_torch()
    assert found.sum() == 80 and found[0, 0, 2].sum() == 0 and found[0, 0, :, 40].sum() == 0


def test_relabelled_rows_are_those_of_every_device_and_can_be_computed_with(mesh):
    x = numbers(1, 1, 8 * 32, 64)
    whole = ttnn.from_torch(x, device=mesh, layout=ttnn.TILE_LAYOUT, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=2))
    found = ttnn.reshape(whole, ttnn.Shape((1, 1, 1, 64)), ttnn.Shape((1, 1, 32, 64)))
    assert torch.equal(ttnn.add(found, 1.0).to_torch(), x[:, :, ::32] + 1)
    heads = ttnn.reshape(found, (1, 1, 4, 16))
    assert torch.equal(parts(heads)[3], x[:, :, 96].reshape(1, 1, 4, 16))


def test_relabelling_works_on_the_host_and_moves_rows_of_tiles_between_dims(mesh):
    host = ttnn.from_torch(numbers(1, 1, 64, 32), layout=ttnn.TILE_LAYOUT)
    found = ttnn.reshape(host, (1, 2, 3, 32), (1, 2, 32, 32))
    assert found.device() is None
    assert torch.equal(found.to_torch(), numbers(1, 1, 64, 32).reshape(1, 2, 32, 32)[:, :, :3])


def test_a_padded_shape_that_is_not_what_lies_in_memory_is_refused(mesh):
    x = ttnn.from_torch(numbers(1, 1, 32, 64), device=mesh, layout=ttnn.TILE_LAYOUT)
    for padded in ((1, 1, 64, 64), (1, 1, 64, 32), (1, 32, 64), (1, 1, 1, 64)):
        with pytest.raises(RuntimeError, match="Invalid arguments to reshape"):
            ttnn.reshape(x, (1, 1, 5, 64), padded)
    with pytest.raises(RuntimeError, match="Invalid arguments to reshape"):
        ttnn.reshape(x, (1, 1, 5, 64))
    assert ttnn.reshape(x, (1, 32, 1, 64), (1, 32, 32, 64)).padded_shape == [1, 32, 32, 64]


# squeeze


def test_squeeze_takes_a_tensor_without_dims(mesh):
    for scalar in (ttnn.from_torch(torch.tensor(3.0)), ttnn.from_torch(torch.tensor(3.0), device=mesh)):
        for found in (
            ttnn.squeeze(scalar),
            ttnn.squeeze(scalar, 0),
            ttnn.squeeze(scalar, -1),
            ttnn.squeeze(scalar, [0]),
        ):
            assert found.shape == [] and found.item() == 3.0
        with pytest.raises(RuntimeError, match="dim 1 is out of range"):
            ttnn.squeeze(scalar, 1)


@pytest.mark.parametrize("dims", [[0, 0], [0, -3], [1, 2, 1]])
def test_squeeze_refuses_a_dim_that_is_named_twice(mesh, dims):
    x = ttnn.from_torch(numbers(1, 4, 1), device=mesh)
    with pytest.raises(RuntimeError, match="appears multiple times in the list of dims"):
        ttnn.squeeze(x, dims)
    assert ttnn.squeeze(x, [0, 2]).shape == [4]


# pickles


def saved_and_loaded(tensor: ttnn.Tensor) -> ttnn.Tensor:
    file = io.BytesIO()
    torch.save({"weight": tensor}, file)
    file.seek(0)
    return torch.load(file)["weight"]


READ_BACK = {"pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)), "torch.save": saved_and_loaded}


@pytest.mark.parametrize("how", READ_BACK)
@pytest.mark.parametrize("place", ["alone", "host", "device"])
@pytest.mark.parametrize("dtype", [ttnn.bfloat16, ttnn.float32, ttnn.uint32, ttnn.bfloat8_b])
def test_a_tensor_can_be_pickled_and_is_read_back_on_the_host(mesh, how, place, dtype):
    x, options = numbers(8, 40) % 99, {"dtype": dtype, "layout": ttnn.TILE_LAYOUT}
    if place == "alone":
        tensor = ttnn.from_torch(x, **options)
    else:
        tensor = on_host(mesh, x, device=mesh if place == "device" else None, **options)
    found = READ_BACK[how](tensor)
    assert found.device() is None and found.tensor_topology() is tensor.tensor_topology()
    assert (found.dtype, found.layout, found.shape) == (tensor.dtype, tensor.layout, tensor.shape)
    assert torch.equal(found.to_torch(), tensor.to_torch())
    assert torch.equal(ttnn.to_device(found, mesh).to_torch(), tensor.to_torch())


def test_a_pickle_has_the_tensor_alone_and_its_memory_config(mesh):
    memory = ttnn.create_sharded_memory_config((64, 32), ttnn.CoreGrid(x=2, y=1), ttnn.ShardStrategy.HEIGHT)
    whole = ttnn.from_torch(numbers(1000, 32))
    assert len(pickle.dumps(ttnn.reshape(whole, (1, 32), (1000, 32)))) < 3000
    found = pickle.loads(pickle.dumps(ttnn.from_torch(numbers(64, 32), device=mesh, memory_config=memory)))
    assert found.memory_config() == memory
    both = pickle.loads(pickle.dumps([whole, whole]))
    assert both[0] is both[1]


def test_a_damaged_pickle_and_a_deallocated_tensor_are_refused(mesh):
    restore, (block, header) = ttnn.from_torch(numbers(2, 2)).__reduce_ex__(2)
    other = header.replace("ROW_MAJOR", "COLUMN_MAJOR")
    for broken in ((block, "{"), (block[..., :1], header), (block.int(), header), (block, other)):
        with pytest.raises(OperandError, match="a pickled tensor is damaged"):
            restore(*broken)
    gone = ttnn.from_torch(numbers(2, 2), device=mesh)
    ttnn.deallocate(gone)
    with pytest.raises(OperandError, match="is not allocated"):
        pickle.dumps(gone)


def test_a_deep_copy_has_memory_of_its_own_where_the_tensor_is(mesh):
    x = numbers(8, 4)
    tensor = on_host(mesh, x, device=mesh)
    tree = {"weights": [tensor, tensor]}
    copied = copy.deepcopy(tree)["weights"]
    assert copied[0] is copied[1] and copied[0] is not tensor and copied[0].device() is mesh
    assert copied[0].buffer_address() != tensor.buffer_address()
    ttnn.add(tensor, 1.0, output_tensor=tensor)
    assert torch.equal(copied[0].to_torch(), x) and torch.equal(tensor.to_torch(), x + 1)
    host = on_host(mesh, x)
    assert copy.deepcopy(host).device() is None and torch.equal(copy.deepcopy(host).to_torch(), x)
