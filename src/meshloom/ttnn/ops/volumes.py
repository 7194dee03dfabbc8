"""Convolution of volumes, [N, D, H, W, C]: every device its own, in one call.

Weights are [O, I / groups, d, h, w], or prepared: a matrix of d * h * w * I / groups rows, in which blocks of input
channels come first, then the places of the kernel, then the channels of the block. Input channels of prepared weights
are filled up with zeros to an alignment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch.nn import functional as F

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.block_moves import fresh, whole
from meshloom.ttnn.ops.calling import Made, Optionals, op, operands, shared_coords, take
from meshloom.ttnn.ops.convolution import bring, fold_devices
from meshloom.ttnn.ops.convolution_configs import Conv3dConfig
from meshloom.ttnn.ops.topologies import moves, rows, topology_of
from meshloom.ttnn.tensor.formats import Layout
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.padding import fill_padding
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology

MODES = {"zeros": "constant", "replicate": "replicate"}  # padding modes, as torch's pad has them


_TENSORS = Optionals("device bias_tensor config")
_WINDOW = Optionals(stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1))
_UNCOVERED = Optionals(
    "halo_buffer pad_offset_tensor weight_lo_tensor", logical_h_mask=0, logical_w_mask=0, output_pad_h=0, output_pad_w=0
)


@op("experimental.conv3d", more=(_TENSORS, _WINDOW, _UNCOVERED))
def conv3d(*, input_tensor, weight_tensor, output_channels, kernel_size, padding_mode="zeros", groups=1, **how) -> Made:
    """A convolution of [N, D, H, W, C]: [N, D', H', W', O]."""
    name, (device, bias_tensor, config) = "experimental.conv3d", _TENSORS(how)
    _refuse(name, take(_UNCOVERED, how))
    config = config or Conv3dConfig()
    if padding_mode not in MODES:
        raise ArgumentError(f"ttnn.{name}: padding_mode={padding_mode!r}", fix=" or ".join(map(repr, MODES)))
    kernel, steps, edges, holes = (whole(each, 3) for each in (kernel_size, *_WINDOW(how)))
    holes = whole(config.dilation, 3) if holes == (1, 1, 1) else holes
    tensors = [bring(each, device) for each in (input_tensor, weight_tensor, bias_tensor) if each is not None]
    tensor, weight = tensors[:2]
    _, (block, kernels, *biases) = operands(name, *tensors)
    axes = len(tensor.grid)
    if len(tensor.shape) != 5:
        raise OperandError(f"ttnn.{name} takes [N, D, H, W, C], not {list(tensor.shape)}")
    unpacked = _unpack(name, kernels, weight, kernel, (output_channels, tensor.shape[-1], groups), config.C_in_block)

    def convolve(volumes: Block, weights: Block, several: int) -> Block:
        around = [edge for each in reversed(edges) for edge in (each, each)]  # of the last dim first, as torch's pad
        padded = F.pad(volumes, around, mode=MODES[padding_mode]) if any(edges) else volumes
        return F.conv3d(padded, weights, stride=steps, dilation=holes, groups=several)

    several = tensor.shape[-1] // unpacked.shape[axes + 1]
    volumes = fill_padding(block, tensor, [-1], "sum").float().movedim(-1, axes + 1)
    found = fold_devices(volumes, unpacked.float(), axes, several, several == 1, convolve)
    values = fresh(found.movedim(axes + 1, -1))
    for bias in biases:
        values = values + bias.float().flatten(axes).reshape(*bias.shape[:axes], 1, 1, 1, 1, -1)
    label = _topology(tensors, values.shape[axes:], several)
    memory = MemoryConfig(buffer_type=tensor.memory_config().buffer_type)
    return Made(values, tensor, label, None, config.output_layout, memory, coords=shared_coords(*tensors))


def _refuse(name: str, uncovered: Mapping[str, object]) -> None:
    for argument, value in uncovered.items():
        if value is not None and not (isinstance(value, int) and value == 0):
            raise ArgumentError(f"ttnn.{name}: {argument} is not covered", fix="leave it out")


def _unpack(
    name: str, kernels: Block, weight: Tensor, kernel: Sequence[int], sizes: tuple[int, int, int], block: int
) -> Block:
    """Weights of every device as [*mesh, O, I / groups, d, h, w], without channels that are there for alignment."""
    outs, channels, groups = sizes
    axes, rank = len(weight.grid), len(weight.shape)
    if rank == 5 and tuple(weight.shape) == (outs, channels // groups, *kernel):
        return kernels
    places = math.prod(kernel)
    inner = weight.shape[0] // places if rank == 2 else 0
    if not inner or weight.shape[0] % places or weight.shape[1] != outs or inner % (block or inner):
        raise OperandError(
            f"ttnn.{name}: weights are {list(weight.shape)}",
            fix=f"[{outs}, {channels // groups}, {', '.join(map(str, kernel))}], or what prepare_conv3d_weights makes",
        )
    apart = kernels.reshape(*kernels.shape[:axes], -1, *kernel, block or inner, outs)
    order = (5, 0, 4, 1, 2, 3)  # [blocks, d, h, w, channels, O] as [O, blocks, channels, d, h, w]
    turned = apart.permute(*range(axes), *(axes + each for each in order)).flatten(axes + 1, axes + 2)
    return turned.narrow(axes + 1, 0, min(inner, channels // groups))


def _topology(tensors: Sequence[Tensor], shape: Sequence[int], groups: int) -> TensorTopology:
    """Cut at the batch, at the output channels, or (sums over input channels that are cut) terms of a sum."""
    weight, *biases = tensors[1:]
    is_packed = len(weight.shape) == 2
    outer, bias = int(is_packed), ", R" * len(biases)
    cuts = [f"S(0), R{bias} -> S(0)"]
    if groups == 1:
        beside = [f", S({dim})" for dim in range(len(biases[0].shape))] if biases else []
        cuts += [f"R, S({outer}){end} -> S(4)" for end in (*beside, bias)]
    terms = bias.replace("R", "P(sum)")
    if groups == 1 and not is_packed:
        cuts.append(f"S(4), S(1){terms} -> P(sum)")
    cuts += [f"P(sum), R{terms} -> P(sum)", f"R, P(sum){terms} -> P(sum)"]
    return topology_of(rows(*cuts), *tensors, shape=tuple(shape), scales=True, filled=True)


@op("experimental.prepare_conv3d_weights")
def prepare_conv3d_weights(*, weight_tensor, groups=1, C_in_block=0, alignment=32, device=None) -> Tensor:
    """Weights [O, I / groups, d, h, w] as the matrix that `conv3d` takes, on the device if one is named."""
    tensor = bring(weight_tensor, device)
    if len(tensor.shape) != 5:
        raise OperandError(f"weights of conv3d are [O, I / groups, d, h, w], not {list(tensor.shape)}")
    axes, (outs, channels, *_) = len(tensor.grid), tensor.shape
    inner = -(-channels // alignment) * alignment
    if inner % (C_in_block or inner):
        raise ArgumentError(f"C_in_block={C_in_block} does not divide {inner} channels", fix="a divisor, or 0 for all")
    padded = F.pad(tensor.block, (0, 0, 0, 0, 0, 0, 0, inner - channels))
    apart = padded.unflatten(axes + 1, (-1, C_in_block or inner))  # [O, blocks, channels, d, h, w]
    turned = fresh(apart.permute(*range(axes), *(axes + each for each in (1, 3, 4, 5, 2, 0))))
    values = turned.reshape(*turned.shape[:axes], -1, outs)
    label = topology_of(moves((1, None, None, None, None)), tensor, shape=values.shape[axes:])
    return tensor._like(values, layout=Layout.TILE, topology=label)
