"""What programs rely on and was wrong once: shards of results, padding in reductions, addresses in captures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError, OutOfMemoryError
from ttnn_cases import cores
from ttnn_draws import S
from ttnn_parts import convolve, of_block, part, places


@pytest.fixture
def mesh() -> Iterator[Any]:
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    yield device
    ttnn.close_mesh_device(device)


def on(mesh: Any, values: torch.Tensor, **how: Any) -> Any:
    return ttnn.from_torch(values, device=mesh, **{"dtype": ttnn.float32, "layout": ttnn.ROW_MAJOR_LAYOUT, **how})


def sharded(kind: Any, grid: Any, *shape: int) -> Any:
    return ttnn.MemoryConfig(kind, ttnn.BufferType.L1, ttnn.ShardSpec(grid, shape, ttnn.ShardOrientation.ROW_MAJOR))


HEIGHT, WIDTH, BLOCK = (
    ttnn.TensorMemoryLayout.HEIGHT_SHARDED,
    ttnn.TensorMemoryLayout.WIDTH_SHARDED,
    ttnn.TensorMemoryLayout.BLOCK_SHARDED,
)


# convolutions and pools


def convolve_picture(mesh: Any, x: Any, channels: int = 64, outs: int = 32, **how: Any) -> Any:
    weight = ttnn.from_torch(torch.randn(outs, channels, 3, 3), dtype=ttnn.float32)
    sizes = {"batch_size": 1, "input_height": 16, "input_width": 16, "kernel_size": (3, 3), "padding": (1, 1)}
    return convolve(ttnn.conv2d, mesh, x, weight, (channels, outs), **sizes, **how)


def test_a_convolution_of_a_height_sharded_input_keeps_its_cores(mesh: Any) -> None:
    x = on(mesh, torch.randn(1, 1, 256, 64), memory_config=sharded(HEIGHT, cores(4, 1), 64, 64))
    found = convolve_picture(mesh, x).memory_config()
    assert found == sharded(HEIGHT, cores(4, 1), 64, 32)


def test_a_convolution_of_a_block_sharded_input_has_cores_for_its_own_channels(mesh: Any) -> None:
    x = on(mesh, torch.randn(1, 1, 256, 64), memory_config=sharded(BLOCK, cores(2, 4), 64, 32))
    assert convolve_picture(mesh, x, outs=96).memory_config() == sharded(BLOCK, cores(3, 4), 64, 32)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (HEIGHT, sharded(HEIGHT, cores(8, 1), 32, 160)),  # 8 tiles of rows
        (WIDTH, sharded(WIDTH, cores(5, 1), 256, 32)),  # 5 tiles of channels
        (BLOCK, sharded(BLOCK, cores(5, 8), 32, 32)),
    ],
)
def test_a_convolution_with_a_shard_layout_gives_a_sharded_output(mesh: Any, layout: Any, expected: Any) -> None:
    x = on(mesh, torch.randn(1, 1, 256, 64))
    made = convolve_picture(mesh, x, outs=160, conv_config=ttnn.Conv2dConfig(shard_layout=layout))
    assert made.memory_config() == expected and made.is_allocated()
    assert convolve_picture(mesh, x).memory_config() == ttnn.DRAM_MEMORY_CONFIG
    slices = ttnn.Conv2dSliceConfig(slice_type=ttnn.Conv2dSliceConfig.DRAMSliceHeight, num_slices=2)
    in_slices = convolve_picture(mesh, x, conv_config=ttnn.Conv2dConfig(shard_layout=layout), slice_config=slices)
    assert in_slices.memory_config() == ttnn.DRAM_MEMORY_CONFIG


def test_conv1d_and_conv_transpose2d_shard_their_outputs_too(mesh: Any) -> None:
    config = ttnn.Conv2dConfig(shard_layout=HEIGHT)
    x, weights = on(mesh, torch.randn(1, 64, 32)), ttnn.from_torch(torch.randn(16, 32, 3))
    how = {"batch_size": 1, "input_length": 64, "kernel_size": 3, "padding": 1, "conv_config": config}
    line = convolve(ttnn.conv1d, mesh, x, weights, (32, 16), **how)
    assert line.memory_config() == sharded(HEIGHT, cores(2, 1), 32, 32)
    x = on(mesh, torch.randn(1, 1, 64, 32), memory_config=sharded(HEIGHT, cores(2, 1), 32, 32))
    weights = ttnn.from_torch(torch.randn(32, 16, 2, 2))
    sizes = {"batch_size": 1, "input_height": 8, "input_width": 8, "kernel_size": (2, 2), "stride": (2, 2)}
    grown = convolve(ttnn.conv_transpose2d, mesh, x, weights, (32, 16), **sizes)
    assert grown.memory_config() == sharded(HEIGHT, cores(2, 1), 128, 32)


def test_pools_of_a_sharded_input_are_sharded_over_the_same_cores(mesh: Any) -> None:
    windows = {"kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0)}
    sizes = {"batch_size": 1, "input_h": 16, "input_w": 16, "channels": 48}
    lying = sharded(HEIGHT, cores(4, 1), 64, 48)
    x = on(mesh, torch.randn(1, 1, 256, 48), memory_config=lying)
    for pool in (ttnn.max_pool2d, ttnn.avg_pool2d):
        assert pool(x, **sizes, **windows).memory_config() == sharded(HEIGHT, cores(4, 1), 16, 48)
    adapted = ttnn.adaptive_avg_pool2d(x, **sizes, output_size=(4, 4))
    assert adapted.memory_config() == sharded(HEIGHT, cores(4, 1), 4, 48)
    flat = on(mesh, torch.randn(1, 1, 256, 48))
    assert ttnn.max_pool2d(flat, **sizes, **windows).memory_config() == ttnn.DRAM_MEMORY_CONFIG
    asked = ttnn.max_pool2d(flat, **sizes, **windows, applied_shard_scheme=HEIGHT)
    assert asked.memory_config() == sharded(HEIGHT, cores(2, 1), 32, 64)
    tiled = ttnn.max_pool2d(x, **sizes, **windows, output_layout=ttnn.TILE_LAYOUT)
    assert tiled.layout is ttnn.TILE_LAYOUT and tiled.memory_config() == sharded(HEIGHT, cores(4, 1), 32, 64)


def test_a_convolution_moves_an_input_of_the_host(mesh: Any) -> None:
    values = torch.randn(1, 1, 256, 64)
    weight = torch.randn(32, 64, 3, 3)
    host = ttnn.from_torch(values, dtype=ttnn.float32)
    sizes = {"batch_size": 1, "input_height": 16, "input_width": 16, "kernel_size": (3, 3), "padding": (1, 1)}
    made = convolve(ttnn.conv2d, mesh, host, ttnn.from_torch(weight, dtype=ttnn.float32), (64, 32), **sizes)
    assert made.device() is mesh and host.device() is None
    expected = F.conv2d(values.reshape(1, 16, 16, 64).permute(0, 3, 1, 2), weight, padding=1)
    torch.testing.assert_close(
        part(made, (0, 1)).reshape(16, 16, 32), expected[0].permute(1, 2, 0), atol=1e-3, rtol=1e-3
    )


def test_pictures_with_channels_last_or_first_have_the_shards_of_their_result(mesh: Any) -> None:
    values = torch.randn(1, 2, 3, 1024)
    x = on(mesh, values, memory_config=sharded(WIDTH, cores(8, 1), 6, 128))
    last = ttnn.experimental.convert_to_hwc(x)
    assert last.memory_config() == sharded(HEIGHT, cores(8, 1), 256, 8)
    assert torch.equal(part(last, (0, 0)), values.transpose(-1, -2).reshape(1, 1, 2048, 3))
    one = on(mesh, values[:, :1].transpose(-1, -2), memory_config=sharded(HEIGHT, cores(8, 1), 128, 8))
    first = ttnn.experimental.convert_to_chw(one)
    assert first.memory_config() == sharded(WIDTH, cores(8, 1), 3, 128)
    assert torch.equal(part(first, (0, 0)), values[:, :1])


def test_channels_last_of_a_large_picture_take_as_much_memory_as_they_need(mesh: Any) -> None:
    size = 256 * 256
    x = on(mesh, torch.zeros(1, 1, 3, size), memory_config=sharded(WIDTH, cores(8, 8), 3, size // 64))
    before = mesh.memory_usage("l1")[0, 0].used
    made = ttnn.experimental.convert_to_hwc(x)
    assert mesh.memory_usage("l1")[0, 0].used - before == size * 8 * 4
    assert made.is_allocated()


# decoding


def test_heads_of_fewer_users_are_put_together_for_32() -> None:
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as mesh:
        values = torch.randn(1, 4, 3, 32)
        found = ttnn.experimental.nlp_concat_heads_decode(on(mesh, values), num_heads=2)
        assert found.shape == [1, 1, 32, 64]
        expected = F.pad(values[:, :, :2].reshape(1, 1, 4, 64), (0, 0, 0, 28))
        assert torch.equal(part(found, (0, 0)), expected)
        lying = sharded(HEIGHT, cores(4, 1), 32, 32)
        tiled = on(mesh, values, layout=ttnn.TILE_LAYOUT, memory_config=lying)
        over_cores = ttnn.experimental.nlp_concat_heads_decode(tiled, num_heads=2)
        assert over_cores.memory_config() == sharded(WIDTH, cores(2, 1), 32, 32)
        some = ttnn.experimental.nlp_concat_heads_decode(tiled, num_heads=2, sub_core_grids=cores(1, 4))
        assert some.memory_config() == sharded(WIDTH, cores(1, 2), 32, 32)


# padding of uneven dims


UNEVEN = 10  # over 4 devices: 3, 3, 3 and 1


def uneven(values: torch.Tensor, dim: int) -> tuple[Any, Any]:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 4))
    mapper = ttnn.ShardTensorToMesh(mesh, dim=dim, uneven=True)
    return mesh, ttnn.from_torch(values, device=mesh, dtype=ttnn.float32, mesh_mapper=mapper)


def check_parts(made: Any, expected: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, dim: int) -> None:
    """Every device has what the function makes of its part without padding, at the front."""
    parts = values.chunk(4, dim)
    assert [each.shape[dim] for each in parts] == [3, 3, 3, 1]
    for device, own in enumerate(parts):
        wanted = expected(own)
        found = part(made, (0, device))
        for each, size in enumerate(wanted.shape):
            found = found.narrow(each, 0, size)
        torch.testing.assert_close(found.double(), wanted.double(), atol=1e-4, rtol=1e-4)


NEGATIVE = -1 - torch.rand(4, UNEVEN)  # zeros in the padding would be the largest


LAST: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "softmax": (lambda x: ttnn.softmax(x, dim=-1), lambda p: p.softmax(-1)),
    "softmax_in_place": (ttnn.softmax_in_place, lambda p: p.softmax(-1)),
    "scale_mask_softmax": (lambda x: ttnn.scale_mask_softmax(x, 2.0), lambda p: (2 * p).softmax(-1)),
    "attention_softmax": (ttnn.transformer.attention_softmax, lambda p: p.softmax(-1)),
    "moreh_softmax": (lambda x: ttnn.moreh_softmax(x, -1), lambda p: p.softmax(-1)),
    "moreh_softmin": (lambda x: ttnn.moreh_softmin(x, -1), lambda p: (-p).softmax(-1)),
    "moreh_logsoftmax": (lambda x: ttnn.moreh_logsoftmax(x, -1), lambda p: p.log_softmax(-1)),
    "argmax": (lambda x: ttnn.argmax(x, dim=-1), lambda p: p.argmax(-1)),
    "argmax of all": (ttnn.argmax, lambda p: F.pad(p, (0, 3 - p.shape[1]), value=-torch.inf).argmax()),
    "topk": (lambda x: ttnn.topk(x, 1)[0], lambda p: p.topk(1)[0]),
    "places of topk": (lambda x: ttnn.topk(x, 1)[1], lambda p: p.topk(1)[1]),
    "topk of the smallest": (
        lambda x: ttnn.topk(ttnn.neg(x), 1, largest=False)[0],
        lambda p: (-p).topk(1, largest=False)[0],
    ),
    "sort": (lambda x: ttnn.sort(ttnn.neg(x))[0], lambda p: (-p).sort()[0]),
    "sort from the largest": (lambda x: ttnn.sort(x, descending=True)[0], lambda p: p.sort(descending=True)[0]),
    "layer_norm": (lambda x: ttnn.layer_norm(x, epsilon=1e-5), lambda p: F.layer_norm(p, p.shape[-1:])),
    "rms_norm": (ttnn.rms_norm, lambda p: p * p.square().mean(-1, keepdim=True).rsqrt()),
    "mean": (lambda x: ttnn.mean(x, dim=-1), lambda p: p.mean(-1)),
    "var": (lambda x: ttnn.var(x, dim=-1, correction=False), lambda p: p.var(-1, correction=0)),
    "moreh_mean": (lambda x: ttnn.moreh_mean(x, dim=-1, keepdim=True), lambda p: p.mean(-1, keepdim=True)),
    "moreh_norm": (lambda x: ttnn.moreh_norm(ttnn.add(x, 1.0), 2.0, dim=-1), lambda p: (p + 1).norm(dim=-1)),
    "mse_loss": (
        lambda x: ttnn.mse_loss(x, ttnn.add(x, 2.0), reduction=ttnn.LossReductionMode.SUM),
        lambda p: torch.tensor(4.0 * p.numel()),
    ),
    "sum of squares": (
        lambda x: ttnn.rms_norm_pre_all_gather(ttnn.add(x, 1.0)),
        lambda p: (p + 1).square().sum(-1, keepdim=True).bfloat16(),
    ),
    "cumsum from the end": (
        lambda x: ttnn.cumsum(ttnn.add(x, 1.0), -1, reverse_order=True),
        lambda p: (p + 1).flip(-1).cumsum(-1).flip(-1),
    ),
    "cumprod from the end": (
        lambda x: ttnn.cumprod(x, -1, reverse_order=True),
        lambda p: p.flip(-1).cumprod(-1).flip(-1),
    ),
}


@pytest.mark.parametrize("name", LAST)
def test_ops_along_an_uneven_dim_leave_its_padding_out(name: str) -> None:
    op, expected = LAST[name]
    mesh, x = uneven(NEGATIVE, 1)
    check_parts(op(x), expected, NEGATIVE, 1)
    ttnn.close_mesh_device(mesh)


def test_the_softmax_of_a_device_that_has_only_padding_is_zero() -> None:
    mesh, x = uneven(torch.randn(2, 5), 1)  # 2, 2, 1 and none
    assert part(ttnn.softmax(x, dim=-1), (0, 3)).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert part(ttnn.mean(x, dim=-1), (0, 3)).tolist() == [0.0, 0.0]
    ttnn.close_mesh_device(mesh)


def test_a_norm_from_gathered_statistics_counts_no_padding() -> None:
    values = torch.randn(4, UNEVEN)
    mesh, x = uneven(values, 1)
    stats = ttnn.all_gather(ttnn.layer_norm_pre_all_gather(x), dim=-1, cluster_axis=1)
    found = ttnn.layer_norm_post_all_gather(x, stats, epsilon=1e-5)
    torch.testing.assert_close(ttnn.to_torch(found), F.layer_norm(values, (UNEVEN,)), atol=2e-2, rtol=2e-2)
    ttnn.close_mesh_device(mesh)


def test_norms_of_pictures_count_no_padding_of_their_rows_or_batch() -> None:
    pictures = torch.randn(2, 1, UNEVEN, 8) + 3
    mesh, x = uneven(pictures, 2)
    check_parts(
        ttnn.group_norm(x, num_groups=2, epsilon=1e-5),
        lambda p: F.group_norm(p.squeeze(1).transpose(1, 2), 2).transpose(1, 2).unsqueeze(1),
        pictures,
        2,
    )
    ttnn.close_mesh_device(mesh)
    batch = torch.randn(UNEVEN, 2, 3, 3) + 3
    mesh, y = uneven(batch, 0)
    normal = ttnn.batch_norm(y, training=True)
    check_parts(normal, lambda p: F.batch_norm(p, None, None, training=True), batch, 0)
    ttnn.close_mesh_device(mesh)


def test_the_best_of_a_padded_dim_tell_no_whole_and_in_order_they_do() -> None:
    mesh, x = uneven(NEGATIVE, 1)
    values, _ = ttnn.topk(x, 2)
    assert values.tensor_topology().placements()[-1] == ttnn.PlacementPartial("unknown")
    assert sorted(ttnn.to_torch(ttnn.sort(x)[0])[0].tolist()) == sorted(NEGATIVE[0].tolist())
    ttnn.close_mesh_device(mesh)


# memory


def l1_block(mesh: Any, value: float = 1.0) -> Any:
    return ttnn.from_torch(
        torch.full((64, 64), value), layout=ttnn.TILE_LAYOUT, device=mesh, memory_config=ttnn.L1_MEMORY_CONFIG
    )


def model(x: Any, addresses: list[int]) -> Any:
    """Layers whose results are let go of one after the other, as models do it; the last lies in DRAM."""
    for _ in range(3):
        y = ttnn.add(ttnn.relu(x), 1.0)
        addresses.append(y.buffer_address())
        ttnn.deallocate(x)
        x = ttnn.multiply(y, 2.0)
        addresses.append(x.buffer_address())
        del y
    return ttnn.to_memory_config(x, ttnn.DRAM_MEMORY_CONFIG)


def test_addresses_inside_a_capture_are_those_outside_and_an_input_comes_back(mesh: Any) -> None:
    outside: list[int] = []
    inside: list[int] = []
    ttnn.deallocate(model(l1_block(mesh), outside))
    x = l1_block(mesh)
    address, spec = x.buffer_address(), x.spec
    trace = ttnn.begin_trace_capture(mesh)
    out = model(x, inside)
    again = ttnn.allocate_tensor_on_device(spec, mesh)
    ttnn.end_trace_capture(mesh, trace)
    assert inside == outside and len(set(inside)) < len(inside)
    assert again.buffer_address() == address
    for value in (1.0, 2.0):
        host = ttnn.from_torch(torch.full((64, 64), value), layout=ttnn.TILE_LAYOUT)
        ttnn.copy_host_to_device_tensor(host, again)
        ttnn.execute_trace(mesh, trace)
        assert ttnn.to_torch(out).unique().tolist() == [8 * value + 14]


def test_an_input_that_is_only_let_go_of_comes_back_too(mesh: Any) -> None:
    x = l1_block(mesh)
    address, spec = x.buffer_address(), x.spec
    trace = ttnn.begin_trace_capture(mesh)
    out = ttnn.add(x, 1.0, memory_config=ttnn.DRAM_MEMORY_CONFIG)
    del x
    again = ttnn.allocate_tensor_on_device(spec, mesh)
    ttnn.end_trace_capture(mesh, trace)
    assert again.buffer_address() == address
    ttnn.copy_host_to_device_tensor(ttnn.from_torch(torch.full((64, 64), 4.0), layout=ttnn.TILE_LAYOUT), again)
    ttnn.execute_trace(mesh, trace)
    assert ttnn.to_torch(out).unique().tolist() == [5.0]


def test_what_a_trace_wrote_to_and_let_go_of_is_given_to_nobody_until_it_is_released(mesh: Any) -> None:
    x = l1_block(mesh)
    used = mesh.memory_usage("l1")[0, 0].used
    inside: list[int] = []
    trace = ttnn.begin_trace_capture(mesh)
    out = model(ttnn.add(x, 1.0), inside)
    ttnn.end_trace_capture(mesh, trace)
    gc.collect()
    others = [l1_block(mesh) for _ in range(8)]
    assert set(inside).isdisjoint(each.buffer_address() for each in others)
    ttnn.execute_trace(mesh, trace)
    assert ttnn.to_torch(others[0]).unique().tolist() == [1.0] and ttnn.to_torch(out).unique().tolist() == [30.0]
    ttnn.release_trace(mesh, trace)
    others.clear()
    gc.collect()
    assert mesh.memory_usage("l1")[0, 0].used == used
    assert l1_block(mesh).buffer_address() in inside


def test_a_smaller_worker_l1_is_all_that_tensors_can_have() -> None:
    most = ttnn.get_max_worker_l1_unreserved_size()
    for options, size in (({"worker_l1_size": 65536}, 65536), ({}, most)):
        with ttnn.create_mesh_device(ttnn.MeshShape(1, 1), **options) as mesh:
            assert ttnn.get_memory_view(mesh, ttnn.BufferType.L1).total_bytes_per_bank == size
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 1), worker_l1_size=65536) as mesh:
        fits = sharded(HEIGHT, cores(1, 1), 128, 128)
        assert on(mesh, torch.zeros(128, 128), memory_config=fits).is_allocated()
        with pytest.raises(OutOfMemoryError, match="does not fit into L1"):
            on(mesh, torch.zeros(256, 128), memory_config=sharded(HEIGHT, cores(1, 1), 256, 128))
    with pytest.raises(ArgumentError, match=f"{most} bytes at most"):
        ttnn.open_mesh_device(ttnn.MeshShape(1, 1), worker_l1_size=most + 1)


# programs


def picture_convolution(mesh: Any) -> Callable[[], Any]:
    x, w = on(mesh, torch.randn(1, 1, 64, 4)), on(mesh, torch.randn(6, 4, 3, 3))
    b = on(mesh, torch.randn(1, 1, 1, 6))
    sizes = {"batch_size": 1, "input_height": 8, "input_width": 8, "in_channels": 4, "out_channels": 6}
    config = ttnn.Conv2dConfig(weights_dtype=ttnn.bfloat16)
    return lambda: ttnn.conv2d(
        input_tensor=x, weight_tensor=w, bias_tensor=b, device=mesh, kernel_size=(3, 3), conv_config=config, **sizes
    )


PROGRAMS: dict[str, Callable[[Any, Any, Any], Callable[[], Any]]] = {
    "layer_norm": lambda _, x, row: lambda: ttnn.layer_norm(x, weight=row, bias=row),
    "rms_norm_post_all_gather": lambda _, x, row: lambda: ttnn.rms_norm_post_all_gather(x, x, weight=row),
    "group_norm": lambda mesh, x, row: lambda: ttnn.group_norm(x, num_groups=4, weight=row, bias=row),
    "conv2d": lambda mesh, *_: picture_convolution(mesh),
    "topk": lambda _, x, row: lambda: ttnn.topk(x, 2, indices_tensor=ttnn.typecast(x, ttnn.uint16)),
    "transpose": lambda _, x, row: lambda: ttnn.transpose(x, -1, -2),
    "convert_to_hwc": lambda _, x, row: lambda: ttnn.experimental.convert_to_hwc(x),
    "mse_loss": lambda _, x, row: lambda: ttnn.mse_loss(x, x, reduction=ttnn.LossReductionMode.SUM),
    "concat": lambda _, x, row: lambda: ttnn.concat([x, x], dim=-1),
    "minimal_matmul": lambda _, x, row: lambda: ttnn.experimental.minimal_matmul(x, x, fuse_swiglu=True),  # of tiles
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_op_is_one_program_whatever_it_is_made_of(mesh: Any, name: str) -> None:
    x, row = on(mesh, torch.rand(1, 1, 32, 32)), on(mesh, torch.rand(1, 1, 1, 32))
    if name == "minimal_matmul":
        x = ttnn.to_layout(x, ttnn.TILE_LAYOUT)
    call = PROGRAMS[name](mesh, x, row)
    extra = 1 if name == "topk" else 0  # its indices are an op of their own
    mesh.clear_program_cache()
    for _ in range(2):
        call()
        assert mesh.num_program_cache_entries() == 1 + extra


def test_a_forbidden_miss_names_the_op_that_was_called_and_leaves_nothing_behind(mesh: Any) -> None:
    x = on(mesh, torch.rand(1, 1, 32, 32))
    ttnn.permute(x, (0, 1, 3, 2))
    mesh.set_program_cache_misses_allowed(False)
    with pytest.raises(OperandError, match='Device operation "transpose": program cache miss'):
        ttnn.transpose(x, -1, -2)
    ttnn.permute(x, (0, 1, 3, 2))
    with pytest.raises(OperandError, match='Device operation "exp": program cache miss'):
        ttnn.exp(x)


# group norm


def test_weights_of_group_norm_are_laid_out_core_by_core_and_read_so(mesh: Any) -> None:
    channels, groups = 96, 4
    values, weight = torch.randn(1, 1, 64, channels), torch.rand(channels)
    laid = ttnn.create_group_norm_weight_bias_rm(weight, channels, 2)
    assert laid.shape == (1, 1, 4, 32)
    assert torch.equal(laid.reshape(2, 64)[:, :48].flatten(), weight) and laid.reshape(2, 64)[:, 48:].sum() == 0
    expected = F.group_norm(values[0, 0].T[None], groups, weight, weight)[0].T
    for config in ({}, {"memory_config": sharded(BLOCK, cores(2, 2), 32, 48)}):
        x, w = on(mesh, values, **config), on(mesh, laid)
        found = ttnn.group_norm(x, num_groups=groups, epsilon=1e-5, weight=w, bias=w, core_grid=ttnn.CoreGrid(y=2, x=2))
        torch.testing.assert_close(part(found, (0, 0))[0, 0], expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ArgumentError, match="are not 96 channels over 5 cores"):
        ttnn.create_group_norm_weight_bias_rm(weight, channels, 5)


def test_a_mask_of_group_norm_has_ones_at_the_channels_of_each_group() -> None:
    mask = ttnn.to_torch(ttnn.create_group_norm_input_mask(320, 32, 2))
    assert mask.shape == (1, 32, 32, 64)
    assert mask.sum(-1).unique().tolist() == [10.0]
    first = mask[0, :, 0].argmax(-1)
    assert first.tolist() == [group % 16 * 10 % 32 for group in range(32)]
    other = ttnn.create_group_norm_input_negative_mask(320, 32, 2, ttnn.bfloat8_b)
    assert other.dtype is ttnn.bfloat8_b and other.device() is None
    assert torch.equal(ttnn.to_torch(other).float(), 1 - mask.float())
    with pytest.raises(ArgumentError, match="7 groups of 320 channels"):
        ttnn.create_group_norm_input_mask(320, 7, 1)


# volumes


@pytest.mark.parametrize("is_prepared", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mode", ["zeros", "replicate"])
def test_every_device_convolves_its_own_volumes(mode: str, groups: int, is_prepared: bool) -> None:
    values, bias = torch.randn(2, 2, 2, 4, 5, 6, 64), torch.randn(8)
    weight = torch.randn(8, 64 // groups, 3, 2, 3)
    how = {"stride": (1, 2, 1), "padding": (1, 0, 1), "kernel_size": (3, 2, 3)}
    with ttnn.create_mesh_device(ttnn.MeshShape(2, 2)) as mesh:
        x = of_block(mesh, values, [S(0), S(0)])
        w = ttnn.from_torch(weight, dtype=ttnn.float32)
        config = ttnn.Conv3dConfig(C_in_block=32)
        if is_prepared:
            w = ttnn.experimental.prepare_conv3d_weights(weight_tensor=w, groups=groups, C_in_block=32, device=mesh)
            assert w.shape == [18 * 64 // groups, 8] and w.layout is ttnn.TILE_LAYOUT
        found = ttnn.experimental.conv3d(
            input_tensor=x,
            weight_tensor=w,
            bias_tensor=on(mesh, bias[None]),
            device=mesh,
            config=config,
            dtype=ttnn.float32,
            output_channels=8,
            groups=groups,
            padding_mode=mode,
            **how,
        )
        assert found.layout is ttnn.ROW_MAJOR_LAYOUT and found.tensor_topology().placements() == [S(0), S(0)]
        for place in places((2, 2)):
            around = F.pad(
                values[place].movedim(-1, 1), (1, 1, 0, 0, 1, 1), mode="constant" if mode == "zeros" else mode
            )
            expected = F.conv3d(around, weight, bias, stride=(1, 2, 1), groups=groups).movedim(1, -1)
            torch.testing.assert_close(part(found, place), expected, atol=1e-3, rtol=1e-3)


def test_volumes_that_do_not_fit_their_weights_are_refused(mesh: Any) -> None:
    x, w = on(mesh, torch.randn(1, 4, 4, 4, 32)), on(mesh, torch.randn(8, 16, 3, 3, 3))
    sizes = {"output_channels": 8, "kernel_size": (3, 3, 3), "dtype": ttnn.float32}
    with pytest.raises(OperandError, match=r"weights are \[8, 16, 3, 3, 3\]"):
        ttnn.experimental.conv3d(input_tensor=x, weight_tensor=w, **sizes)
    with pytest.raises(ArgumentError, match="halo_buffer is not covered"):
        ttnn.experimental.conv3d(input_tensor=x, weight_tensor=w, halo_buffer=x, **sizes)
    with pytest.raises(ArgumentError, match="padding_mode='reflect'"):
        ttnn.experimental.conv3d(input_tensor=x, weight_tensor=w, padding_mode="reflect", **sizes)


def test_small_channels_are_aligned_in_prepared_weights(mesh: Any) -> None:
    values, weight = torch.randn(1, 3, 4, 4, 3), torch.randn(5, 3, 2, 2, 2)
    w = ttnn.experimental.prepare_conv3d_weights(weight_tensor=ttnn.from_torch(weight, dtype=ttnn.float32))
    assert w.device() is None and w.shape == [8 * 32, 5]
    found = ttnn.experimental.conv3d(
        input_tensor=on(mesh, values),
        weight_tensor=w,
        device=mesh,
        output_channels=5,
        kernel_size=(2, 2, 2),
        dtype=ttnn.float32,
    )
    expected = F.conv3d(values.movedim(-1, 1), weight).movedim(1, -1)
    torch.testing.assert_close(part(found, (0, 0)), expected, atol=1e-4, rtol=1e-4)
