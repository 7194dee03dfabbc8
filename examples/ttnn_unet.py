"""A U-Net in TTNN's spelling through a traced pipeline: pictures stream in on one queue while the other computes.

    python examples/ttnn_unet.py
    python examples/ttnn_unet.py --mesh 1x1 --queues 1 --size 64

Batch norms are folded into the convolutions. Convolutions ask for shards by height where pictures are large and by
blocks where channels are many; skips wait in DRAM until they are concatenated. Each device has its own part of the
pictures. The pipeline captures the model once and replays it for every batch, from an input that stays where it is.
Masks are compared with the torch model in float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshloom import ttnn
from meshloom.ttnn.model_preprocessing import fold_batch_norm2d_into_conv2d, preprocess_model_parameters
from meshloom.ttnn.pipeline import (
    PipelineConfig,
    create_pipeline_from_config,
    get_memory_config_for_persistent_dram_tensor,
)

HEIGHT, WIDTH, BLOCK = (
    ttnn.TensorMemoryLayout.HEIGHT_SHARDED,
    ttnn.TensorMemoryLayout.WIDTH_SHARDED,
    ttnn.TensorMemoryLayout.BLOCK_SHARDED,
)


# the model in torch


class Pair(nn.Module):
    """Two convolutions, each with a batch norm and a ReLU."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.bn1, self.bn2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Channels change, the size does not."""
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class UNet(nn.Module):
    """Two levels down and up again: once with a transposed convolution, once with larger pixels and a convolution."""

    def __init__(self, channels: int = 3, width: int = 32) -> None:
        super().__init__()
        self.down1, self.down2 = Pair(channels, width), Pair(width, 2 * width)
        self.middle = Pair(2 * width, 4 * width)
        self.grow2, self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), Pair(4 * width, 2 * width)
        self.grow1, self.up1 = nn.Conv2d(2 * width, width, 3, padding=1), Pair(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pictures [batch, channels, height, width] to masks [batch, 1, height, width]."""
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.max_pool2d(second, 2))
        x = self.up2(torch.cat([self.grow2(x), second], 1))
        x = F.relu(self.grow1(F.interpolate(x, scale_factor=2, mode="nearest")))
        return self.head(self.up1(torch.cat([x, first], 1)))


def make_model() -> UNet:
    """The model with random weights and statistics of batch norms that are not those of the start."""
    torch.manual_seed(0)
    model = UNet()
    for _ in range(4):
        model(torch.randn(2, 3, 16, 16))
    return model.eval()


# the same on a mesh


def load_parameters(model: UNet, mesh: Any) -> Any:
    """Weights and biases as convolutions take them, still on the host; batch norms are part of them."""
    everywhere = ttnn.ReplicateTensorToMesh(mesh)

    def keep(weight: torch.Tensor, bias: torch.Tensor) -> dict[str, Any]:
        values = {"weight": weight, "bias": bias.reshape(1, 1, 1, -1)}
        return {
            name: ttnn.from_torch(each.detach(), dtype=ttnn.bfloat16, mesh_mapper=everywhere)
            for name, each in values.items()
        }

    def preprocessor(module: nn.Module, name: str, ttnn_module_args: Any, convert_to_ttnn: Any) -> dict[str, Any]:
        if isinstance(module, Pair):
            pairs = {"conv1": (module.conv1, module.bn1), "conv2": (module.conv2, module.bn2)}
            return {name: keep(*fold_batch_norm2d_into_conv2d(*each)) for name, each in pairs.items()}
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            return keep(module.weight, module.bias)
        return {}

    return preprocess_model_parameters(initialize_model=lambda: model, custom_preprocessor=preprocessor, device=None)


class Convolution:
    """A convolution that keeps its weights on the devices after its first run: a trace cannot bring them there."""

    def __init__(self, parameters: Any, sizes: tuple[int, int, int, int], layout: Any = HEIGHT, **how: Any) -> None:
        self.weight, self.bias = parameters.weight, parameters.bias
        self.sizes = dict(zip(("batch_size", "input_height", "input_width", "in_channels"), sizes, strict=True))
        self.op = how.pop("op", ttnn.conv2d)
        self.out_channels = self.weight.shape[1 if self.op is ttnn.conv_transpose2d else 0]
        relu = ttnn.UnaryWithParam(ttnn.UnaryOpType.RELU) if how.pop("relu", True) else None
        self.config = ttnn.Conv2dConfig(
            weights_dtype=ttnn.bfloat16,
            activation=relu,
            shard_layout=layout,
            reshard_if_not_optimal=True,
            deallocate_activation=True,
        )
        self.how = {"kernel_size": (3, 3), "stride": (1, 1), "padding": (1, 1), "dtype": ttnn.bfloat16, **how}
        if self.op is ttnn.conv2d:
            self.how["slice_config"] = ttnn.Conv2dL1FullSliceConfig  # at once, in L1, also if the input is in DRAM

    def __call__(self, x: Any, device: Any) -> Any:
        x, (self.weight, self.bias) = self.op(
            input_tensor=x,
            weight_tensor=self.weight,
            bias_tensor=self.bias,
            device=device,
            **self.sizes,
            out_channels=self.out_channels,
            **self.how,
            conv_config=self.config,
            return_weights_and_bias=True,
        )
        return x


class TtUNet:
    """The model for pictures [1, batch, channels, height * width] of every device."""

    def __init__(self, parameters: Any, mesh: Any, batch: int, size: int, channels: int = 3, width: int = 32) -> None:
        self.mesh, self.batch, self.size, self.width = mesh, batch, size, width
        p, half, quarter = parameters, size // 2, size // 4

        def pair(each: Any, side: int, before: int, layout: Any = HEIGHT) -> list[Convolution]:
            first = Convolution(each.conv1, (batch, side, side, before), layout)
            return [first, Convolution(each.conv2, (batch, side, side, first.out_channels), layout)]

        self.down1, self.down2 = pair(p.down1, size, channels), pair(p.down2, half, width)
        self.middle = pair(p.middle, quarter, 2 * width, BLOCK)
        self.grow2 = Convolution(
            p.grow2,
            (batch, quarter, quarter, 4 * width),
            op=ttnn.conv_transpose2d,
            relu=False,
            kernel_size=(2, 2),
            stride=(2, 2),
            padding=(0, 0),
        )
        self.up2 = pair(p.up2, half, 4 * width)
        self.grow1, self.up1 = Convolution(p.grow1, (batch, size, size, 2 * width)), pair(p.up1, size, 2 * width)
        self.head = Convolution(p.head, (batch, size, size, width), relu=False, kernel_size=(1, 1), padding=(0, 0))

    def __call__(self, x: Any) -> Any:
        """Masks [1, 1, 1, batch * height * width]."""
        x = ttnn.experimental.convert_to_hwc(x)
        x = self.run(x, *self.down1)
        first, x = ttnn.to_memory_config(x, ttnn.DRAM_MEMORY_CONFIG), self.pool(x, self.size, self.width)
        x = self.run(x, *self.down2)
        second, x = ttnn.to_memory_config(x, ttnn.DRAM_MEMORY_CONFIG), self.pool(x, self.size // 2, 2 * self.width)
        x = self.run(x, *self.middle, self.grow2)
        x = self.run(self.join(x, second), *self.up2)
        x = self.run(self.enlarge(x, self.size // 2, 2 * self.width), self.grow1)
        x = self.run(self.join(x, first), *self.up1, self.head)
        return ttnn.experimental.convert_to_chw(x)

    def run(self, x: Any, *convolutions: Convolution) -> Any:
        """Convolutions one after the other."""
        for each in convolutions:
            x = each(x, self.mesh)
        return x

    def pool(self, x: Any, side: int, channels: int) -> Any:
        """Half of the size."""
        found = ttnn.max_pool2d(
            input_tensor=x,
            batch_size=self.batch,
            input_h=side,
            input_w=side,
            channels=channels,
            kernel_size=[2, 2],
            stride=[2, 2],
            padding=[0, 0],
            dilation=[1, 1],
        )
        ttnn.deallocate(x)
        return found

    def enlarge(self, x: Any, side: int, channels: int) -> Any:
        """Each pixel as four."""
        flat = ttnn.to_layout(ttnn.sharded_to_interleaved(x, ttnn.L1_MEMORY_CONFIG), ttnn.ROW_MAJOR_LAYOUT)
        pictures = ttnn.reshape(flat, (self.batch, side, side, channels))
        return ttnn.reshape(ttnn.upsample(pictures, 2), (1, 1, self.batch * 4 * side * side, channels))

    def join(self, x: Any, skip: Any) -> Any:
        """Channels of both, one after the other."""
        x = ttnn.sharded_to_interleaved(x, ttnn.DRAM_MEMORY_CONFIG)
        found = ttnn.concat([x, skip], dim=3, memory_config=ttnn.DRAM_MEMORY_CONFIG)
        ttnn.deallocate(x)
        ttnn.deallocate(skip)
        return found


def memory_configs(mesh: Any, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Where an input lies in L1, over a row of cores by width, and where it stays in DRAM."""
    rows, columns = shape[1] * shape[2], shape[3]
    cores = mesh.compute_with_storage_grid_size().x
    l1 = ttnn.create_sharded_memory_config(
        shape=(rows, columns // cores),
        core_grid=ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(cores - 1, 0))]),
        strategy=ttnn.ShardStrategy.WIDTH,
        orientation=ttnn.ShardOrientation.ROW_MAJOR,
        use_height_and_width_as_shard_shape=True,
    )
    return l1, get_memory_config_for_persistent_dram_tensor(shape, WIDTH, mesh.dram_grid_size())


def stream(model: UNet, batches: list[torch.Tensor], mesh: Any, config: PipelineConfig) -> Iterator[torch.Tensor]:
    """Masks [pictures, 1, height, width] of batches [pictures, channels, height, width], all through one pipeline."""
    devices, (count, channels, size, _) = mesh.get_num_devices(), batches[0].shape
    batch = count // devices
    unet = TtUNet(load_parameters(model, mesh), mesh, batch, size)
    l1, dram = memory_configs(mesh, (1, batch, channels, size * size))
    pipeline = create_pipeline_from_config(config, unet, mesh, l1, dram, ttnn.DRAM_MEMORY_CONFIG)
    cut = ttnn.ShardTensorToMesh(mesh, dim=1)
    inputs = [
        ttnn.from_torch(each.reshape(1, count, channels, size * size), dtype=ttnn.bfloat16, mesh_mapper=cut)
        for each in batches
    ]
    pipeline.compile(inputs[0])
    pipeline.preallocate_output_tensors_on_host(len(inputs))
    for output in pipeline.enqueue(inputs).pop_all():
        masks = ttnn.to_torch(output, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=3))
        yield masks.float().reshape(count, 1, size, size)
    pipeline.cleanup()


def correlation(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's coefficient."""
    return float(torch.corrcoef(torch.stack([found.float().flatten(), expected.float().flatten()]))[0, 1])


def draw_batches(count: int, pictures: int, size: int) -> list[torch.Tensor]:
    """Random pictures."""
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(pictures, 3, size, size, generator=draw).bfloat16().float() for _ in range(count)]


def main() -> None:
    """Stream some batches through a pipeline and compare the masks with torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", default="1x2", help="rows x columns of the mesh (default 1x2)")
    parser.add_argument("--queues", type=int, default=2, choices=(1, 2), help="command queues (default 2)")
    parser.add_argument("--batches", type=int, default=3, help="batches (default 3)")
    parser.add_argument("--pictures", type=int, default=1, help="pictures of a batch for each device (default 1)")
    parser.add_argument("--size", type=int, default=32, help="their height and width, a multiple of 32 (default 32)")
    options = parser.parse_args()
    if options.size % 32:
        parser.error(f"--size {options.size} is no multiple of 32")
    model = make_model()
    config = PipelineConfig(use_trace=True, num_command_queues=options.queues)
    shape = ttnn.MeshShape(*map(int, options.mesh.split("x")))
    with ttnn.create_mesh_device(
        shape, num_command_queues=options.queues, l1_small_size=1 << 15, trace_region_size=1 << 24
    ) as mesh:
        print(mesh)
        batches = draw_batches(options.batches, options.pictures * mesh.get_num_devices(), options.size)
        for number, (given, found) in enumerate(zip(batches, stream(model, batches, mesh, config), strict=True)):
            with torch.no_grad():
                print(f"batch {number} of {len(given)} pictures PCC {correlation(found, model(given)):.6f}")


if __name__ == "__main__":
    main()
