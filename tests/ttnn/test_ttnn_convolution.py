"""Convolution and pooling against torch's modules, device by device, and labels that make up the op on wholes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.nn import functional as F

from meshloom import ttnn
from meshloom.errors import OperandError
from ttnn_draws import UNKNOWN, P, R, S, alike_for, placements_for, planes
from ttnn_meshes import mesh_of
from ttnn_parts import NoWhole, check_each, check_whole, convolve, distributed, of_block, random_tensor

LIGHT = settings(max_examples=20, deadline=None)


def pictures(flat: torch.Tensor, n: int, h: int, w: int) -> torch.Tensor:
    """[1, 1, N * H * W, C] as [N, C, H, W]."""
    return flat.reshape(n, h, w, -1).permute(0, 3, 1, 2)


def flat(found: torch.Tensor) -> torch.Tensor:
    return found.permute(0, 2, 3, 1).reshape(1, 1, -1, found.shape[1])


def conv(mesh: Any, x: Any, w: Any, b: Any = None, **options: Any) -> Any:
    sizes = {"batch_size": 2, "input_height": 6, "input_width": 5, "in_channels": 4, "out_channels": 6, **options}
    return ttnn.conv2d(input_tensor=x, weight_tensor=w, bias_tensor=b, device=mesh, **{"kernel_size": (3, 2), **sizes})


@given(data=st.data())
@LIGHT
def test_every_device_convolves_with_its_own_weights(data: st.DataObject) -> None:
    grid, groups = data.draw(planes), data.draw(st.sampled_from([1, 2]))
    stride, dilation = (data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2)])) for _ in range(2))
    padding = data.draw(st.sampled_from([(0, 0), (2, 1), (1, 0, 2, 1)]))
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (1, 1, 2 * 6 * 5, 4), data.draw(alike_for(grid)))
        w = random_tensor(mesh, (6, 4 // groups, 3, 2), data.draw(alike_for(grid)))
        b = random_tensor(mesh, (1, 1, 1, 6), data.draw(alike_for(grid)))
        edges = padding if len(padding) == 4 else (padding[0], padding[0], padding[1], padding[1])

        def one(p: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            module = nn.Conv2d(4, 6, (3, 2), stride=stride, dilation=dilation, groups=groups)
            module.weight, module.bias = nn.Parameter(kernel), nn.Parameter(bias.flatten())
            padded = F.pad(pictures(p, 2, 6, 5), (edges[2], edges[3], edges[0], edges[1]))
            with torch.no_grad():
                return flat(module(padded))

        found, (height, width) = conv(
            mesh, x, w, b, stride=stride, dilation=dilation, padding=padding, groups=groups, return_output_dim=True
        )
        check_each(found, one, x, w, b, close=1e-4)
        assert found.shape[2] == 2 * height * width
        assert found.layout is ttnn.TILE_LAYOUT


def test_the_oracle_of_convolution_can_fail() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 1, 2 * 6 * 5, 4), [True, False])
        w = random_tensor(mesh, (6, 4, 3, 2), [True, False])
        found = conv(mesh, x, w)
        check_each(found, lambda p, k: flat(F.conv2d(pictures(p, 2, 6, 5), k)), x, w, close=1e-4)
        with pytest.raises(AssertionError):
            check_each(found, lambda p, k: flat(F.conv2d(pictures(p, 2, 6, 5), k.flip(-1))), x, w, close=1e-4)


def test_weights_may_be_on_the_host_and_come_back_on_the_device() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (2, 6, 5, 4), [True, False], ttnn.bfloat16)
        w = ttnn.from_torch(torch.randn(6, 4, 3, 2), dtype=ttnn.bfloat16)
        b = ttnn.from_torch(torch.randn(1, 1, 1, 6), dtype=ttnn.bfloat16)
        config = ttnn.Conv2dConfig(weights_dtype=ttnn.bfloat16, activation=ttnn.UnaryWithParam(ttnn.UnaryOpType.RELU))
        found, dims, (weight, bias) = conv(
            mesh, x, w, b, conv_config=config, return_output_dim=True, return_weights_and_bias=True
        )
        assert dims == (4, 4) and found.dtype is ttnn.bfloat16
        assert weight.device() is mesh and bias.device() is mesh
        again, kept = conv(mesh, x, weight, bias, conv_config=config, return_weights_and_bias=True)
        assert torch.equal(again.block, found.block) and kept[0] is weight
        check_each(
            found,
            lambda p, k, c: flat(F.conv2d(pictures(p, 2, 6, 5).float(), k.float(), c.flatten().float()).relu()),
            *(x, weight, bias),
            close=0.05,
        )
        ready = ttnn.prepare_conv_weights(weight_tensor=w, device=mesh, weights_format="OIHW", in_channels=4)
        assert ready.device() is mesh and ready.shape == [6, 4, 3, 2]
        assert isinstance(conv(mesh, x, ready), ttnn.Tensor)


def test_what_a_config_asks_for_is_done() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 1, 60, 4), [True, False])
        w = random_tensor(mesh, (6, 4, 3, 2), [True, True])
        rows = conv(
            mesh, x, w, conv_config=ttnn.Conv2dConfig(output_layout=ttnn.ROW_MAJOR_LAYOUT), dtype=ttnn.bfloat8_b
        )
        assert rows.dtype is ttnn.bfloat8_b
        plain = conv(mesh, x, w, conv_config=ttnn.Conv2dConfig(output_layout=ttnn.ROW_MAJOR_LAYOUT))
        assert plain.layout is ttnn.ROW_MAJOR_LAYOUT
        edges = conv(mesh, x, w, padding=(1, 1), conv_config=ttnn.Conv2dConfig(padding_mode=ttnn.PaddingMode.Replicate))
        check_each(
            edges,
            lambda p, k: flat(F.conv2d(F.pad(pictures(p, 2, 6, 5), (1, 1, 1, 1), mode="replicate"), k)),
            *(x, w),
            close=1e-4,
        )
        near = ttnn.to_memory_config(x, ttnn.L1_MEMORY_CONFIG)
        conv(mesh, near, w, conv_config=ttnn.Conv2dConfig(deallocate_activation=True))
        assert not near.is_allocated()


def test_sizes_that_do_not_fit_are_refused() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 1, 60, 4), [True, False])
        w = random_tensor(mesh, (6, 4, 3, 2), [True, True])
        with pytest.raises(OperandError, match="4 pictures 6x5 with 4 channels are not in"):
            conv(mesh, x, w, batch_size=4)
        with pytest.raises(OperandError, match=r"weights are \[6, 4, 3, 2\], the arguments ask for \[6, 4, 3, 3\]"):
            conv(mesh, x, w, kernel_size=(3, 3))


@given(data=st.data())
@LIGHT
def test_a_convolution_of_lines_is_torchs(data: st.DataObject) -> None:
    grid, groups = data.draw(planes), data.draw(st.sampled_from([1, 2]))
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (2, 9, 4), data.draw(alike_for(grid)))
        w = random_tensor(mesh, (6, 4 // groups, 3), data.draw(alike_for(grid)))
        line = {"batch_size": 2, "input_length": 9, "kernel_size": 3, "stride": 2, "padding": 1, "groups": groups}
        found, length = convolve(ttnn.conv1d, mesh, x, w, (4, 6), **line, return_output_dim=True)
        assert length == 5

        def one(p: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
            lines = F.conv1d(p.transpose(1, 2), kernel, stride=2, padding=1, groups=groups)
            return lines.transpose(1, 2).reshape(1, 1, -1, 6)

        check_each(found, one, x, w, close=1e-4)


@given(data=st.data())
@LIGHT
def test_a_transposed_convolution_is_torchs(data: st.DataObject) -> None:
    grid, groups = data.draw(planes), data.draw(st.sampled_from([1, 2]))
    padding, more = data.draw(st.sampled_from([((1, 0), (1, 0)), ((0, 0), (0, 0)), ((1, 1), (0, 1))]))
    mirrored = data.draw(st.booleans())
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (1, 1, 2 * 4 * 3, 4), data.draw(alike_for(grid)))
        w = random_tensor(mesh, (4, 6 // groups, 3, 2), data.draw(alike_for(grid)))
        sizes = {"batch_size": 2, "input_height": 4, "input_width": 3, "kernel_size": (3, 2), "stride": (2, 2)}
        how = {"padding": padding, "output_padding": more, "groups": groups, "mirror_kernel": not mirrored}
        found, dims = convolve(ttnn.conv_transpose2d, mesh, x, w, (4, 6), **sizes, **how, return_output_dim=True)

        def one(p: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
            turned = kernel.flip((-1, -2)) if mirrored else kernel
            made = F.conv_transpose2d(
                pictures(p, 2, 4, 3), turned, stride=2, padding=padding, output_padding=more, groups=groups
            )
            assert tuple(made.shape[-2:]) == dims
            return flat(made)

        check_each(found, one, x, w, close=1e-4)


# labels


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_labels_of_convolution_make_up_the_op_on_wholes(data: st.DataObject) -> None:
    """Pictures cut by batch or by channels, weights cut by input or output channels, every mix on every axis."""
    grid = data.draw(planes)
    of_x = data.draw(placements_for(grid, [0, 3]))
    of_w = data.draw(placements_for(grid, [0, 1]))
    whole, kernels = torch.randn(12, 4, 4, 12), torch.randn(12, 12, 3, 3)
    with mesh_of(grid) as mesh:
        x, w = distributed(mesh, whole, of_x), distributed(mesh, kernels, of_w)
        if x.shape[-1] != w.shape[1]:
            return
        found = conv(
            mesh,
            x,
            w,
            batch_size=x.shape[0],
            input_height=4,
            input_width=4,
            in_channels=x.shape[-1],
            out_channels=w.shape[0],
            kernel_size=(3, 3),
        )
        expected = flat(F.conv2d(whole.permute(0, 3, 1, 2), kernels))
        told = {(R, R), (S(0), R), (R, S(0)), (S(3), S(1)), (P("sum"), R), (R, P("sum"))}
        if set(zip(of_x, of_w, strict=True)) <= told:
            check_whole(found, expected, close=1e-3)
        else:
            with pytest.raises(NoWhole):
                check_whole(found, expected, close=1e-3)


def test_sums_over_cut_channels_are_terms_and_a_bias_on_every_device_is_too_many() -> None:
    with mesh_of((1, 2)) as mesh:
        whole, kernels = torch.randn(1, 3, 3, 4), torch.randn(5, 4, 3, 3)
        x, w = distributed(mesh, whole, [R, S(3)]), distributed(mesh, kernels, [R, S(1)])
        sizes = {
            "batch_size": 1,
            "input_height": 3,
            "input_width": 3,
            "in_channels": 2,
            "out_channels": 5,
            "kernel_size": (3, 3),
        }
        found = conv(mesh, x, w, **sizes)
        assert found.tensor_topology().placements() == [R, P("sum")]
        check_whole(found, flat(F.conv2d(whole.permute(0, 3, 1, 2), kernels)), close=1e-4)
        b = of_block(mesh, torch.randn(1, 1, 1, 1, 1, 5), [R, R])
        assert conv(mesh, x, w, b, **sizes).tensor_topology().placements() == [R, UNKNOWN]
        active = conv(mesh, x, w, **sizes, conv_config=ttnn.Conv2dConfig(activation="relu"))
        assert active.tensor_topology().placements() == [R, UNKNOWN]


# pooling


@given(data=st.data())
@LIGHT
def test_pooling_is_torchs(data: st.DataObject) -> None:
    grid, ceil = data.draw(planes), data.draw(st.booleans())
    kernel = data.draw(st.sampled_from([(2, 2), (3, 3), (3, 2)]))
    stride = data.draw(st.sampled_from([(2, 2), (1, 2), (3, 2)]))
    padding = data.draw(st.sampled_from([(0, 0), (1, 1), (1, 0)]))
    counted = data.draw(st.booleans())
    divisor = data.draw(st.sampled_from([None, 3]))
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (1, 1, 2 * 7 * 6, 3), data.draw(alike_for(grid)))
        sizes = (2, 7, 6, 3, kernel, stride, padding)
        largest = ttnn.max_pool2d(x, *sizes, (1, 1), ceil_mode=ceil, dtype=ttnn.float32)
        check_each(largest, lambda p: flat(F.max_pool2d(pictures(p, 2, 7, 6), kernel, stride, padding, 1, ceil)), x)
        mean = ttnn.avg_pool2d(x, *sizes, ceil, count_include_pad=counted, divisor_override=divisor, dtype=ttnn.float32)

        def one(p: torch.Tensor) -> torch.Tensor:
            return flat(F.avg_pool2d(pictures(p, 2, 7, 6), kernel, stride, padding, ceil, counted, divisor))

        check_each(mean, one, x, close=1e-5)


def test_results_of_pooling_are_bfloat16_rows_unless_asked_for() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 1, 2 * 4 * 4, 3), [True, False], layout=ttnn.TILE_LAYOUT)
        found = ttnn.max_pool2d(x, 2, 4, 4, 3, [2, 2], [2, 2], [0, 0], [1, 1])
        assert (found.dtype, found.layout, found.shape) == (ttnn.bfloat16, ttnn.ROW_MAJOR_LAYOUT, [1, 1, 8, 3])
        tiles = ttnn.avg_pool2d(x, 2, 4, 4, 3, [2, 2], [2, 2], [0, 0], output_layout=ttnn.TILE_LAYOUT)
        assert tiles.layout is ttnn.TILE_LAYOUT


def test_the_places_of_the_largest_are_those_of_torch() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 1, 2 * 6 * 5, 3), [True, False])
        values, index = ttnn.max_pool2d(
            x, 2, 6, 5, 3, [3, 3], [2, 2], [1, 1], [1, 1], return_indices=True, dtype=ttnn.float32
        )
        assert index.dtype is ttnn.uint16
        for number, found in enumerate((values, index)):
            check_each(
                found, lambda p, n=number: flat(F.max_pool2d(pictures(p, 2, 6, 5), 3, 2, 1, return_indices=True)[n]), x
            )


def test_padding_of_pools_may_differ_by_side() -> None:
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (1, 1, 25, 3), [True, False])
        found = ttnn.max_pool2d(x, 1, 5, 5, 3, [2, 2], [2, 2], [1, 0, 0, 1], [1, 1], dtype=ttnn.float32)
        check_each(
            found, lambda p: flat(F.max_pool2d(F.pad(pictures(p, 1, 5, 5), (0, 1, 1, 0), value=-torch.inf), 2, 2)), x
        )


@given(data=st.data())
@LIGHT
def test_adaptive_and_global_pools_and_larger_pictures_are_torchs(data: st.DataObject) -> None:
    grid, size = data.draw(planes), data.draw(st.sampled_from([(1, 1), (3, 2), (7, 5)]))
    with mesh_of(grid) as mesh:
        x = random_tensor(mesh, (1, 1, 2 * 7 * 6, 3), data.draw(alike_for(grid)))
        mean = ttnn.adaptive_avg_pool2d(x, 2, 7, 6, 3, size)
        check_each(mean, lambda p: flat(F.adaptive_avg_pool2d(pictures(p, 2, 7, 6), size)), x, close=1e-5)
        largest = ttnn.adaptive_max_pool2d(x, 2, 7, 6, 3, size)
        check_each(largest, lambda p: flat(F.adaptive_max_pool2d(pictures(p, 2, 7, 6), size)), x)
        y = random_tensor(mesh, (2, 4, 5, 3), data.draw(alike_for(grid)))
        check_each(ttnn.global_avg_pool2d(y), lambda p: p.mean((1, 2), keepdim=True), y, close=1e-5)
        for mode in ("nearest", "bilinear"):
            grown = ttnn.upsample(y, (2, 3), mode=mode)

            def one(p: torch.Tensor, mode: str = mode) -> torch.Tensor:
                larger = F.interpolate(p.permute(0, 3, 1, 2), scale_factor=(2.0, 3.0), mode=mode)
                return larger.permute(0, 2, 3, 1)

            check_each(grown, one, y, close=1e-5)
        places = random_tensor(mesh, (2, 3, 4, 2), data.draw(alike_for(grid)))
        check_each(
            ttnn.grid_sample(y, places),
            lambda p, g: F.grid_sample(p.permute(0, 3, 1, 2), g, align_corners=False).permute(0, 2, 3, 1),
            *(y, places),
            close=1e-5,
        )


@given(data=st.data())
@LIGHT
def test_labels_of_pooling_make_up_the_op_on_wholes(data: st.DataObject) -> None:
    grid = data.draw(planes)
    placements = data.draw(placements_for(grid, [0, 3], terms=False))
    whole = torch.randn(12, 4, 4, 12)
    with mesh_of(grid) as mesh:
        x = distributed(mesh, whole, placements)
        found = ttnn.max_pool2d(x, x.shape[0], 4, 4, x.shape[3], [2, 2], [2, 2], [0, 0], [1, 1], dtype=ttnn.float32)
        check_whole(found, flat(F.max_pool2d(whole.permute(0, 3, 1, 2), 2)))
        check_whole(ttnn.global_avg_pool2d(x), whole.mean((1, 2), keepdim=True), close=1e-5)
        check_whole(ttnn.upsample(x, 2), whole.repeat_interleave(2, 1).repeat_interleave(2, 2))


def test_terms_go_through_means_and_not_through_maxima() -> None:
    with mesh_of((1, 2)) as mesh:
        x = distributed(mesh, torch.randn(2, 4, 4, 3), [R, P("sum")])
        sizes = (2, 4, 4, 3, [2, 2], [2, 2], [0, 0])
        assert ttnn.avg_pool2d(x, *sizes).tensor_topology().placements() == [R, P("sum")]
        assert ttnn.max_pool2d(x, *sizes, [1, 1]).tensor_topology().placements() == [R, UNKNOWN]


def test_patches_become_channels() -> None:
    """What vision models do first: patches as channels, then a product, is a convolution with that stride."""
    with mesh_of((1, 2)) as mesh:
        x = random_tensor(mesh, (2, 4, 6, 3), [True, False])
        kernels = torch.randn(5, 3, 2, 2)
        folded = ttnn.to_layout(ttnn.fold(x, 2, 2), ttnn.TILE_LAYOUT)
        matrix = kernels.permute(2, 3, 1, 0).reshape(12, 5)
        w = of_block(mesh, matrix[None, None], [R, R], layout=ttnn.TILE_LAYOUT)
        found = ttnn.matmul(folded, w)
        check_each(
            found, lambda p: F.conv2d(p.permute(0, 3, 1, 2), kernels, stride=2).permute(0, 2, 3, 1), x, close=1e-4
        )


def test_a_number_of_pictures_that_does_not_divide_stays_known() -> None:
    with mesh_of((1, 4)) as mesh:
        whole, kernels = torch.randn(6, 4, 4, 3), torch.randn(5, 3, 3, 3)
        x = ttnn.from_torch(whole, device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0), dtype=ttnn.float32)
        y = ttnn.from_torch(
            torch.cat([whole, whole[:1]]),
            device=mesh,
            mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0),
            dtype=ttnn.float32,
        )
        assert (x.shape, y.shape) == ([2, 4, 4, 3], [2, 4, 4, 3])
        w = ttnn.from_torch(kernels, device=mesh, dtype=ttnn.float32)
        for tensor, count in ((x, 6), (y, 7)):
            found = ttnn.conv2d(
                input_tensor=tensor,
                weight_tensor=w,
                device=mesh,
                in_channels=3,
                out_channels=5,
                batch_size=2,
                input_height=4,
                input_width=4,
                kernel_size=(3, 3),
            )
            expected = flat(F.conv2d(torch.cat([whole, whole[:1]])[:count].permute(0, 3, 1, 2), kernels))
            torch.testing.assert_close(ttnn.to_torch(found), expected, atol=1e-4, rtol=1e-4)
            pooled = ttnn.max_pool2d(tensor, 2, 4, 4, 3, [2, 2], [2, 2], [0, 0], [1, 1], dtype=ttnn.float32)
            assert ttnn.to_torch(pooled).shape == (1, 1, count * 4, 3)
