"""Convolutions: conv1d, conv2d, conv_transpose2d, and what prepares their weights.

Every device convolves its own pictures with its own weights, in one call. Mesh axes along which weights are the same
are part of the batch; those along which they differ are groups of channels. Sums are kept in float32 and rounded once.

Weights are [O, I / groups, h, w] ([I, O / groups, h, w] for the transposed one) on the host or on the device, and stay
so: preparing them means moving them to the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch.nn import functional as F

from meshloom.errors import OperandError
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.ops.activations import activate
from meshloom.ttnn.ops.block_moves import whole
from meshloom.ttnn.ops.calling import Made, Optionals, op, operands, shared_coords, take
from meshloom.ttnn.ops.convolution_configs import Conv2dConfig, Op2DSliceConfig, PaddingMode
from meshloom.ttnn.ops.copies import typecast
from meshloom.ttnn.ops.picture_memory import memory_of_pictures
from meshloom.ttnn.ops.sliding import Window, channels_first, flatten_pictures, pictures_dim, windows
from meshloom.ttnn.ops.topologies import rows, topology_of
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.memory import BufferType
from meshloom.ttnn.tensor.parts import Block, lead
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology
from meshloom.ttnn.tensor.transfers import to_device

__all__ = (
    "get_conv_output_dim prepare_conv_bias prepare_conv_transpose2d_bias prepare_conv_transpose2d_weights "
    "prepare_conv_weights"
).split()


Found = Any  # a tensor, or a tuple of it with its size and with the weights


Sizes = tuple[int, int, int, int]  # of pictures: how many, height, width, channels
Convolve = Callable[[Block, Block, int, str], Block]  # of pictures, weights, a number of groups, and how to pad


def _convolution(
    name: str,
    convolve: Convolve,
    sizes: Sizes,
    weights: tuple[int, ...],
    size: Any,
    groups,
    *,
    input_tensor,
    weight_tensor,
    device,
    bias_tensor=None,
    conv_config: Conv2dConfig | None = None,
    return_output_dim=False,
    return_weights_and_bias=False,
    slice_config: Op2DSliceConfig | None = None,
    dram_slice_config: Op2DSliceConfig | None = None,
) -> Found:
    """The convolution of pictures of these sizes with weights of this shape; its own results are of `size`."""
    config = conv_config or Conv2dConfig()
    weight, bias = _prepare(weight_tensor, bias_tensor, device, config)
    _check(name, weight, weights)
    pictures = bring(input_tensor, device, None)
    mode = "replicate" if config.padding_mode is PaddingMode.Replicate else "constant"
    tensors = (pictures, weight) if bias is None else (pictures, weight, bias)
    values = _convolve(name, tensors, sizes, groups, lambda x, w, n: convolve(x, w, n, mode))
    made = _finish(name, values, tensors, groups, config, slice_config or dram_slice_config)
    kept = ((weight, bias),) if return_weights_and_bias else ()
    return (made, *((size,) if return_output_dim else ()), *kept) if return_output_dim or kept else made


def _window(*, kernel_size, stride=(1, 1), padding=(0, 0), dilation=(1, 1)) -> Window:
    return Window(kernel_size=kernel_size, stride=stride, padding=padding, dilation=dilation)


@op("conv2d", more=(_window, _convolution))
def conv2d(*, in_channels, out_channels, batch_size, input_height, input_width, groups=1, **how) -> Found:
    """A convolution of [1, 1, N * H * W, C] or [N, H, W, C]: [1, 1, N * H' * W', O].

    With `return_output_dim` also (H', W'), with `return_weights_and_bias` also (weights, bias) as the device has them.
    """
    window = _window(**take(_window, how))

    def convolve(pictures: Block, kernels: Block, several: int, mode: str) -> Block:
        padded = window.pad(pictures, mode=mode)
        return F.conv2d(padded, kernels, stride=window.steps, dilation=window.holes, groups=several)

    sizes = (batch_size, input_height, input_width, in_channels)
    weights = (out_channels, in_channels // groups, *window.kernel)
    size = window.count(input_height, input_width)
    return _convolution("conv2d", convolve, sizes, weights, size, groups, **how)


def _line(*, kernel_size: int, stride: int = 1, padding: int | Sequence[int] = 0, dilation: int = 1) -> tuple[int, ...]:
    return (kernel_size, stride, *whole(padding, 2), dilation)


@op("conv1d", more=(_line, _convolution))
def conv1d(*, in_channels, out_channels, batch_size, input_length, groups=1, **how) -> Found:
    """A convolution of [N, L, C] or [1, 1, N * L, C]: [1, 1, N * L', O]; weights are [O, I / groups, k]."""
    kernel, stride, before, after, dilation = _line(**take(_line, how))

    def convolve(pictures: Block, kernels: Block, several: int, mode: str) -> Block:
        padded = F.pad(pictures, (before, after, 0, 0), mode=mode) if before or after else pictures
        rows = kernels if kernels.dim() == 4 else kernels.unsqueeze(-2)
        return F.conv2d(padded, rows, stride=(1, stride), dilation=(1, dilation), groups=several)

    sizes, weights = (batch_size, 1, input_length, in_channels), (out_channels, in_channels // groups, kernel)
    size = windows(input_length, kernel, stride, before, after, dilation)
    return _convolution("conv1d", convolve, sizes, weights, size, groups, **how)


_TRANSPOSED = Optionals(output_padding=(0, 0), mirror_kernel=True)


@op("conv_transpose2d", more=(_window, _TRANSPOSED, _convolution))
def conv_transpose2d(*, in_channels, out_channels, batch_size, input_height, input_width, groups=1, **how) -> Found:
    """The transposed convolution; with `mirror_kernel=False` weights were mirrored already."""
    window, (padding, mirror_kernel) = _window(**take(_window, how)), _TRANSPOSED(how)
    more = whole(padding, 2)
    kernel, steps, holes, edges = window.kernel, window.steps, window.holes, window.edges
    height = _grown_size(input_height, kernel[0], steps[0], edges[0] + edges[1], holes[0], more[0])
    width = _grown_size(input_width, kernel[1], steps[1], edges[2] + edges[3], holes[1], more[1])

    def convolve(pictures: Block, kernels: Block, several: int, mode: str) -> Block:
        turned = kernels if mirror_kernel else kernels.flip((-2, -1))
        # An output padding of its own size leaves the whole result there, from which edges are cut.
        full = F.conv_transpose2d(pictures, turned, stride=steps, dilation=holes, groups=several)
        grown = F.pad(full, (0, more[1], 0, more[0]))
        return grown[..., edges[0] : edges[0] + height, edges[2] : edges[2] + width]

    sizes = (batch_size, input_height, input_width, in_channels)
    weights = (in_channels, out_channels // groups, *kernel)
    return _convolution("conv_transpose2d", convolve, sizes, weights, (height, width), groups, **how)


def _grown_size(size: int, kernel: int, stride: int, padding: int, dilation: int, more: int) -> int:
    return (size - 1) * stride - padding + dilation * (kernel - 1) + more + 1


def get_conv_output_dim(input: int, window: int, stride: int = 1, pad: int = 0, dilation: int = 1) -> int:
    """The size that a convolution leaves of one.

    >>> get_conv_output_dim(224, 7, 2, 3)
    112
    """
    return windows(input, window, stride, pad, pad, dilation)


# operands


def _prepare(
    weight: Tensor, bias: Tensor | None, device: MeshDevice, config: Conv2dConfig
) -> tuple[Tensor, Tensor | None]:
    """Weights and bias on the device, in the dtype that the config asks for."""
    return bring(weight, device, config.weights_dtype), None if bias is None else bring(bias, device, None)


def bring(tensor: Tensor, device: MeshDevice | None, dtype: DataType | None = None) -> Tensor:
    """A tensor on the device that was named, if it is not on one already; maybe in another dtype."""
    if device is not None and tensor.device() is None and tensor.home is device:
        tensor.settle()
    moved = tensor if tensor.device() is not None or device is None else to_device(tensor, device)
    return moved if dtype in (None, moved.dtype) else typecast(moved, dtype)


def _check(name: str, weight: Tensor, wanted: tuple[int, ...]) -> None:
    if tuple(weight.shape) not in (wanted, (*wanted[:2], 1, *wanted[2:])[:4] if len(wanted) == 3 else wanted):
        raise OperandError(
            f"ttnn.{name}: weights are {list(weight.shape)}, the arguments ask for {list(wanted)}",
            fix="sizes are those of one device",
        )


def _convolve(
    name: str, tensors: Sequence[Tensor], sizes: Sizes, groups: int, convolve: Callable[[Block, Block, int], Block]
) -> Block:
    """Flattened results of all devices. `convolve` takes [B, C, H, W], weights and a number of groups."""
    _, (_, kernels, *biases) = operands(name, *tensors)
    tensor = tensors[0]
    axes = len(tensor.grid)
    pictures = channels_first(name, tensor, sizes)
    one = groups == 1 and name != "conv_transpose2d"
    found = fold_devices(pictures.float(), kernels.float(), axes, groups, one, convolve)
    values = flatten_pictures(found, axes)
    for added in biases:
        flat = added.float().flatten(axes)
        values = values + flat.reshape(*flat.shape[:axes], 1, 1, 1, flat.shape[-1])
    return values


def fold_devices(
    pictures: Block, kernels: Block, axes: int, groups: int, one: bool, convolve: Callable[[Block, Block, int], Block]
) -> Block:
    """[*mesh, N, C, ...] with [*mesh, ...] weights: axes along which weights differ become groups of channels.

    If `one`, more weights for one picture are more output channels.
    """
    sizes = lead([pictures, kernels], axes)
    own = [axis for axis in range(axes) if kernels.shape[axis] > 1]
    alike = [axis for axis in range(axes) if kernels.shape[axis] == 1]
    copies = math.prod(sizes[axis] for axis in own)
    shared = one and all(pictures.shape[axis] == 1 for axis in own)
    wide = [pictures.shape[axis] if shared and axis in own else sizes[axis] for axis in range(axes)]
    spread = pictures.expand(*wide, *pictures.shape[axes:])
    turned = spread.permute(*alike, axes, *own, *range(axes + 1, pictures.dim()))
    batch = turned.shape[: len(alike) + 1]
    folded = turned.reshape(math.prod(batch), -1, *pictures.shape[axes + 2 :])
    found = convolve(folded, kernels.reshape(-1, *kernels.shape[axes + 1 :]), groups if shared else groups * copies)
    apart = found.reshape(*batch, *(sizes[axis] for axis in own), -1, *found.shape[2:])
    order = [*alike, axes, *own]  # where each dim of `apart` belongs
    back = [order.index(each) for each in range(axes + 1)]
    return apart.permute(*back, *range(axes + 1, apart.dim()))


# results


def _finish(
    name: str,
    values: Block,
    tensors: Sequence[Tensor],
    groups: int,
    config: Conv2dConfig,
    slices: Op2DSliceConfig | None,
) -> Made:
    if config.activation is not None:
        values = activate(values, config.activation)
    tensor, (rows_, channels) = tensors[0], values.shape[-2:]
    label = _topology(name, tensors, rows_, groups, config.activation is None)
    cores = config.core_grid if config.override_sharding_config else None
    lying: dict[str, Any] = {"asked": config.shard_layout, "cores": cores, "turned": config.transpose_shards}
    memory = memory_of_pictures(tensor, (rows_, channels), config.output_layout, **lying, slices=slices)
    made = Made(values, tensor, label, None, config.output_layout, memory, coords=shared_coords(*tensors))
    if config.deallocate_activation and tensor.memory_config().buffer_type is BufferType.L1:
        made.frees = tensor
    return made


def _topology(name: str, tensors: Sequence[Tensor], rows_: int, groups: int, linear: bool) -> TensorTopology:
    """Cut at the pictures, at the output channels, or (sums over input channels that are cut) terms of a sum."""
    tensor, weight, *biases = tensors
    pictures, channels, bias = pictures_dim(tensor), len(tensor.shape) - 1, ", R" * len(biases)
    inner, outer = (0, 1) if name == "conv_transpose2d" else (1, 0)
    cuts = [f"S({pictures}), R{bias} -> S(2)"]
    for dim in range(len(biases[0].shape)) if biases else ():
        cuts.append(f"R, S({outer}), S({dim}) -> S(3)")
    cuts.append(f"R, S({outer}){bias} -> S(3)")
    if groups > 1:
        cuts += [f"S({channels}), S(0){end} -> S(3)" for end in (bias, *(f", S({dim})" for dim in range(4) if biases))]
    terms = bias.replace("R", "P(sum)")
    if linear and groups == 1:
        cuts.append(f"S({channels}), S({inner}){terms} -> P(sum)")
    if linear:
        cuts += [f"P(sum), R{terms} -> P(sum)", f"R, P(sum){terms} -> P(sum)"]
    wide = weight.shape[outer] * (groups if outer else 1)
    return topology_of(rows(*cuts), *tensors, shape=(1, 1, rows_, wide), scales=True, filled=True)


# weights beforehand


def prepare_conv_weights(
    *, weight_tensor: Tensor, device: MeshDevice, conv_config: Conv2dConfig | None = None, **sizes: object
) -> Tensor:
    """Weights on the device, as convolutions take them; the sizes of the convolution are known to it anyway."""
    if sizes.get("weights_format", "OIHW") not in ("OIHW", "IOHW"):
        raise OperandError(f"ttnn.prepare_conv_weights: weights_format={sizes['weights_format']!r}", fix="'OIHW'")
    return bring(weight_tensor, device, (conv_config or Conv2dConfig()).weights_dtype)


def prepare_conv_bias(*, bias_tensor: Tensor, device: MeshDevice, **sizes: object) -> Tensor:
    """A bias on the device."""
    return bring(bias_tensor, device, None)


prepare_conv_transpose2d_weights = prepare_conv_weights
prepare_conv_transpose2d_bias = prepare_conv_bias
