"""Convolutions and poolings of a torch model as objects to call, with what a run of it has shown of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.models.parameters import ParameterDict
from meshloom.ttnn.ops.calling import TABLE
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.tensor import Tensor

__all__: list[str] = []  # they are found in `ttnn.model_preprocessing`


class ModuleArgs(ParameterDict):
    """What is known of a module and of those below it, by attribute."""


class Conv2dArgs(ModuleArgs):
    """The arguments of a convolution."""


class MaxPool2dArgs(ModuleArgs):
    """The arguments of a max pooling."""


_PAIRS = frozenset("kernel_size stride padding dilation".split())  # for height and width, or one number for both


def _told(module: torch.nn.Module, names: str) -> dict[str, Any]:
    """What a module says of itself."""
    told = {name: getattr(module, name) for name in names.split()}
    return {name: _pair(value) if name in _PAIRS else value for name, value in told.items()}


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _of_conv2d(module: torch.nn.Conv2d, shape: torch.Size) -> Conv2dArgs:
    if isinstance(module.padding, str):
        raise OperandError(f"Conv2d(padding={module.padding!r}) has no numbers", fix="give the padding as numbers")
    batch, _, height, width = shape
    own = _told(module, "in_channels out_channels kernel_size stride padding dilation groups padding_mode")
    sizes = {"batch_size": batch, "input_height": height, "input_width": width}
    return Conv2dArgs(**own, **sizes, dtype=DataType.BFLOAT16, weights_dtype=DataType.BFLOAT16)


def _of_max_pool2d(module: torch.nn.MaxPool2d, shape: torch.Size) -> MaxPool2dArgs:
    batch, channels, height, width = shape
    own = _told(module, "kernel_size stride padding dilation ceil_mode")
    sizes = {"batch_size": batch, "channels": channels, "input_height": height, "input_width": width}
    return MaxPool2dArgs(**own, **sizes, dtype=DataType.BFLOAT16)


_KINDS: dict[type[torch.nn.Module], Callable[[Any, torch.Size], ModuleArgs]] = {
    torch.nn.Conv2d: _of_conv2d,
    torch.nn.MaxPool2d: _of_max_pool2d,
}


def infer_ttnn_module_args(
    *, model: torch.nn.Module, run_model: Callable[[torch.nn.Module], object], device: MeshDevice | None = None
) -> ModuleArgs:
    """What a run of the model shows of its convolutions and poolings: a tree with the names of its modules."""
    seen: dict[str, ModuleArgs] = {}

    def watch(name: str, read: Callable[[Any, torch.Size], ModuleArgs]) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: object) -> None:
            seen.setdefault(name, read(module, inputs[0].shape))

        return hook

    handles = [
        module.register_forward_hook(watch(name, _KINDS[type(module)]))
        for name, module in model.named_modules()
        if type(module) in _KINDS
    ]
    try:
        with torch.no_grad():
            run_model(model)
    finally:
        for handle in handles:
            handle.remove()
    return _tree(seen)


def _tree(seen: dict[str, ModuleArgs]) -> ModuleArgs:
    if "" in seen:  # the model is such a module itself
        return seen[""]
    found = ModuleArgs()
    for name, args in seen.items():
        place: dict[Any, Any] = found
        *above, last = (int(each) if each.isdigit() else each for each in name.split("."))
        for each in above:
            place = place.setdefault(each, ModuleArgs())
        place[last] = args
    return found


class Conv2d:
    """A convolution with its weights: call it with [1, 1, N * H * W, C] or [N, H, W, C]."""

    def __init__(self, args: Conv2dArgs, weight: Tensor, bias: Tensor | None) -> None:
        if args.padding_mode != "zeros":
            raise OperandError(f"Conv2d(padding_mode={args.padding_mode!r}) is not covered", fix="pad by hand")
        self.args, self.weight, self.bias = args, weight, bias

    def __call__(self, activation: Tensor) -> Tensor:
        names = (
            "in_channels out_channels kernel_size stride padding dilation groups batch_size input_height input_width"
        )
        found: Tensor = TABLE["conv2d"](
            input_tensor=activation,
            weight_tensor=self.weight,
            bias_tensor=self.bias,
            device=activation.device(),
            dtype=self.args.dtype,
            **{name: self.args[name] for name in names.split()},
        )
        return found

    def move(self, move: Callable[[Tensor], Tensor]) -> Conv2d:
        """The same with its tensors elsewhere."""
        return Conv2d(self.args, move(self.weight), None if self.bias is None else move(self.bias))

    def tensors(self) -> Iterator[Tensor]:
        """Its weight, and its bias if it has one."""
        yield from (each for each in (self.weight, self.bias) if each is not None)

    def __repr__(self) -> str:
        return f"Conv2d({', '.join(f'{key}={value!r}' for key, value in self.args.items())})"


class MaxPool2d:
    """A max pooling: call it with [1, 1, N * H * W, C]."""

    def __init__(self, args: MaxPool2dArgs) -> None:
        self.args = args

    def __call__(self, activation: Tensor) -> Tensor:
        names = "batch_size input_height input_width channels kernel_size stride padding dilation ceil_mode"
        found: Tensor = TABLE["max_pool2d"](activation, *(self.args[name] for name in names.split()))
        return found

    def __repr__(self) -> str:
        return f"MaxPool2d({', '.join(f'{key}={value!r}' for key, value in self.args.items())})"
