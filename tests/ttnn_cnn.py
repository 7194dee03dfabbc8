"""A small CNN as a user of the multi-device guide would write it: the reference in torch, and what the guide names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshloom import ttnn
from ttnn_parts import convolve

CHANNELS, CLASSES = 3, 10


class SmallCNN(nn.Module):
    """Two convolutions, a pooling between them, the mean of the picture, scores."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(CHANNELS, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.fc = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) to (batch, classes)."""
        x = nn.functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        return self.fc(torch.relu(self.conv2(x)).mean((2, 3)))


def made() -> SmallCNN:
    """The model with fixed weights."""
    torch.manual_seed(0)
    return SmallCNN().eval()


def create_preprocessor(mesh_device: Any, mesh_mapper: Any) -> Callable[..., Any]:
    """A preprocessor that keeps a mapper."""

    def kept(weight: torch.Tensor, layout: Any = ttnn.ROW_MAJOR_LAYOUT) -> Any:
        return ttnn.from_torch(weight.detach(), dtype=ttnn.bfloat16, layout=layout, mesh_mapper=mesh_mapper)

    def preprocessor(model: nn.Module, name: str, ttnn_module_args: Any) -> Any:
        if isinstance(model, nn.Conv2d):
            return {"weight": kept(model.weight), "bias": kept(model.bias.reshape(1, 1, 1, -1))}
        if isinstance(model, nn.Linear):
            tile = ttnn.TILE_LAYOUT
            return {"weight": kept(model.weight.T, tile), "bias": kept(model.bias.reshape(1, 1, 1, -1), tile)}
        return None

    return preprocessor


@dataclass(frozen=True)
class Configs:
    """What `create_model` needs to know."""

    parameters: Any
    height: int
    width: int
    batch: int


def create_model_configs(parameters: Any, input_height: int, input_width: int, batch_size: int) -> Configs:
    """The sizes of one device's input."""
    return Configs(parameters, input_height, input_width, batch_size)


def create_model(configs: Configs, mesh_device: Any) -> Callable[[Any], Any]:
    """The network over [batch, channels, height, width] of every device."""
    parameters, batch = configs.parameters, configs.batch

    def convolved(x: Any, layer: Any, before: int, after: int, height: int, width: int) -> Any:
        sizes = {"batch_size": batch, "input_height": height, "input_width": width, "kernel_size": (3, 3)}
        channels, how = (before, after), {"bias_tensor": layer.bias, "padding": (1, 1)}
        found = convolve(ttnn.conv2d, mesh_device, x, layer.weight, channels, **sizes, **how)
        return ttnn.relu(found)

    def model(x: Any) -> Any:
        height, width = configs.height, configs.width
        x = ttnn.permute(x, (0, 2, 3, 1))
        x = convolved(x, parameters.conv1, CHANNELS, 8, height, width)
        x = ttnn.max_pool2d(x, batch, height, width, 8, [2, 2], [2, 2], [0, 0], [1, 1])
        x = convolved(x, parameters.conv2, 8, 16, height // 2, width // 2)
        pictures = ttnn.reshape(ttnn.to_layout(x, ttnn.ROW_MAJOR_LAYOUT), (batch, 1, -1, 16))
        means = ttnn.mean(ttnn.to_layout(pictures, ttnn.TILE_LAYOUT), dim=2, keepdim=True)
        return ttnn.linear(means, parameters.fc.weight, bias=parameters.fc.bias)

    return model
