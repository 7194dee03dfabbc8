"""A torch model's parameters as ttnn tensors: `preprocess_model_parameters`, and what it is made of.

Modules are visited from the top. A custom preprocessor is asked first, and what it returns stands for the whole module;
else `Linear`, `LayerNorm` and `Embedding` are converted in their way, other modules child by child, parameter by
parameter. Distribution happens where tensors are made: wrap the call in `ttnn.distribute(mapper)`, or give a mapper in
a custom preprocessor. Only at the end are tensors moved to the device.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from meshloom.errors import OperandError
from meshloom.ttnn.config import CONFIG, manage_config
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.models.model_cache import ModelCache
from meshloom.ttnn.models.parameters import ParameterDict, ParameterList, make_parameter_dict
from meshloom.ttnn.models.traced_modules import (
    Conv2d,
    Conv2dArgs,
    MaxPool2d,
    MaxPool2dArgs,
    ModuleArgs,
    infer_ttnn_module_args,
)
from meshloom.ttnn.tensor.converting import INFERRED, from_torch as convert
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.mappers import TensorToMesh
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.transfers import to_device

__all__ = (
    "Conv2d Conv2dArgs MaxPool2d MaxPool2dArgs ModuleArgs ParameterDict ParameterList "
    "convert_torch_model_to_ttnn_model default_preprocessor fold_batch_norm2d_into_conv2d from_torch "
    "infer_ttnn_module_args make_parameter_dict move_to_device preprocess_conv2d preprocess_embedding_weight "
    "preprocess_layernorm_parameter preprocess_linear_bias preprocess_linear_weight preprocess_model "
    "preprocess_model_parameters preprocess_remaining_children_and_parameters"
).split()

logger = logging.getLogger(__name__)

ConvertTest = Callable[[torch.nn.Module, str], bool]
Preprocessor = Callable[..., Any]
Mapper = TensorToMesh | None
Args = ModuleArgs | None

DTYPES = INFERRED | dict.fromkeys((torch.float32, torch.float64), DataType.BFLOAT16)


# single tensors


def preprocess_linear_weight(
    weight: torch.Tensor, *, dtype: DataType, layout: Layout = Layout.TILE, weights_mesh_mapper: Mapper = None
) -> Tensor:
    """A weight of a Linear as a product takes it: transposed."""
    return _convert(weight.T.contiguous(), dtype, layout, weights_mesh_mapper)


def preprocess_linear_bias(
    bias: torch.Tensor, *, dtype: DataType, layout: Layout = Layout.TILE, weights_mesh_mapper: Mapper = None
) -> Tensor:
    """A bias as a row."""
    return _convert(bias.reshape(1, -1), dtype, layout, weights_mesh_mapper)


def preprocess_layernorm_parameter(parameter: torch.Tensor, *, dtype: DataType, layout: Layout = Layout.TILE) -> Tensor:
    """A weight or bias of a LayerNorm as a row."""
    return _convert(parameter.reshape(1, -1), dtype, layout)


def preprocess_embedding_weight(weight: torch.Tensor, *, dtype: DataType, layout: Layout = Layout.ROW_MAJOR) -> Tensor:
    """A table of embeddings, row by row."""
    return _convert(weight, dtype, layout)


def _convert(values: torch.Tensor, dtype: DataType, layout: Layout, mapper: Mapper = None) -> Tensor:
    found: Tensor = convert(values, dtype, layout=layout, mesh_mapper=mapper)
    return found


def fold_batch_norm2d_into_conv2d(conv: torch.nn.Conv2d, bn: torch.nn.BatchNorm2d) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias of one convolution that does what a convolution and a batch norm do one after the other.

    >>> conv, norm = torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3).eval()
    >>> weight, bias = fold_batch_norm2d_into_conv2d(conv, norm)
    >>> x = torch.randn(1, 2, 4, 4)
    >>> torch.allclose(torch.nn.functional.conv2d(x, weight, bias.flatten()), norm(conv(x)), atol=1e-5)
    True
    """
    if not bn.track_running_stats or bn.running_mean is None or bn.running_var is None:
        raise OperandError(
            "BatchNorm2d must have track_running_stats=True to be folded into Conv2d",
            fix="without running statistics it depends on the batch",
        )
    scale = (torch.ones_like(bn.running_var) if bn.weight is None else bn.weight) / torch.sqrt(bn.running_var + bn.eps)
    shift = torch.zeros_like(bn.running_mean) if bn.bias is None else bn.bias
    before = torch.zeros_like(bn.running_mean) if conv.bias is None else conv.bias
    weight = conv.weight * scale.reshape(-1, *(1,) * (conv.weight.dim() - 1))
    bias = (before - bn.running_mean) * scale + shift
    return weight.detach(), bias.detach().reshape(1, 1, 1, -1)


def preprocess_conv2d(weight: torch.Tensor, bias: torch.Tensor | None, args: Mapping[str, object]) -> dict[str, Any]:
    """Weight and bias of a convolution as `ttnn.conv2d` takes them."""
    found = {"weight": convert(weight, args.get("weights_dtype", DataType.BFLOAT16))}
    if bias is not None:
        found["bias"] = convert(bias.reshape(1, 1, 1, -1), args.get("weights_dtype", DataType.BFLOAT16))
    return found


# modules


def default_preprocessor(model: torch.nn.Module, name: str, ttnn_module_args: Args = None) -> dict[str, Any]:
    """The tensors of a module of a known kind; nothing for others."""
    kind = DataType.BFLOAT16
    if isinstance(model, torch.nn.Linear):
        found = {"weight": preprocess_linear_weight(model.weight, dtype=kind)}
        if model.bias is not None:
            found["bias"] = preprocess_linear_bias(model.bias, dtype=kind)
        return found
    if isinstance(model, torch.nn.LayerNorm):
        given = {"weight": model.weight, "bias": model.bias}
        return {
            each: preprocess_layernorm_parameter(value, dtype=kind)
            for each, value in given.items()
            if value is not None
        }
    if isinstance(model, torch.nn.Embedding):
        return {"weight": preprocess_embedding_weight(model.weight, dtype=kind)}
    if isinstance(model, torch.nn.Conv2d) and isinstance(ttnn_module_args, Conv2dArgs):
        return preprocess_conv2d(model.weight, model.bias, ttnn_module_args)
    return {}


def convert_torch_model_to_ttnn_model(
    model: torch.nn.Module,
    *,
    convert_to_ttnn: ConvertTest | None = None,
    custom_preprocessor: Preprocessor | None = None,
    name: str = "",
    ttnn_module_args: Args = None,
) -> ParameterDict | ParameterList:
    """The parameters of a module and all below it."""
    test = convert_to_ttnn or (lambda module, full_name: True)
    options = {"convert_to_ttnn": test, "custom_preprocessor": custom_preprocessor}
    if isinstance(model, torch.nn.ModuleList):
        return ParameterList(
            convert_torch_model_to_ttnn_model(
                child, name=_below(name, str(index)), ttnn_module_args=_args_of(ttnn_module_args, index), **options
            )
            for index, child in enumerate(model)
        )
    if custom_preprocessor is not None:
        found = _ask(custom_preprocessor, model, name, ttnn_module_args, test)
        if found:
            return make_parameter_dict(found)
    if test(model, name):
        found = default_preprocessor(model, name, ttnn_module_args)
        if found:
            _check_all_converted(model, found)
            return make_parameter_dict(found)
    return preprocess_remaining_children_and_parameters(
        model, name=name, already_preprocessed_children=(), ttnn_module_args=ttnn_module_args, **options
    )


def _check_all_converted(model: torch.nn.Module, found: Mapping[str, object]) -> None:
    if len(found) != len(list(model.named_children())) + len(_own_parameters(model)):
        raise OperandError(
            "Not all children or parameters were converted using default_preprocessor_parameters!",
            module=type(model).__name__,
            converted=", ".join(found),
            fix="give a custom_preprocessor for this kind of module",
        )


def preprocess_remaining_children_and_parameters(
    model: torch.nn.Module,
    *,
    name: str = "",
    convert_to_ttnn: ConvertTest | None = None,
    custom_preprocessor: Preprocessor | None = None,
    already_preprocessed_children: Sequence[str] = (),
    ttnn_module_args: Args = None,
) -> ParameterDict:
    """The parameters of a module child by child, without those that a custom preprocessor has done."""
    test = convert_to_ttnn or (lambda module, full_name: True)
    found: dict[str | int, Any] = {}
    for child_name, child in model.named_children():
        if child_name in already_preprocessed_children:
            continue
        key = int(child_name) if child_name.isdigit() else child_name
        below = convert_torch_model_to_ttnn_model(
            child,
            convert_to_ttnn=test,
            custom_preprocessor=custom_preprocessor,
            name=_below(name, child_name),
            ttnn_module_args=_args_of(ttnn_module_args, key),
        )
        if below:
            found[key] = below
    for each, parameter in _own_parameters(model).items():
        if each not in already_preprocessed_children:
            found[each] = _parameter(model, name, each, parameter, test)
    return make_parameter_dict(found)


def _parameter(model: torch.nn.Module, name: str, each: str, parameter: torch.Tensor, test: ConvertTest) -> Any:
    if test(model, name):
        return convert(parameter, DTYPES[parameter.dtype])
    is_transposed = isinstance(model, torch.nn.Linear) and each == "weight"
    return parameter.T.contiguous() if is_transposed else parameter


def _own_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(recurse=False))


def _below(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child


def _args_of(args: Args, key: str | int) -> Args:
    return None if args is None else args.get(key)


def _ask(preprocessor: Preprocessor, model: torch.nn.Module, name: str, args: Args, test: ConvertTest) -> Any:
    """A custom preprocessor's answer; beside model and name it may take two further arguments, by their names."""
    offered = {"ttnn_module_args": args, "convert_to_ttnn": test}
    parameters = list(inspect.signature(preprocessor).parameters.values())
    places = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if len(places) < 2 and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise OperandError(
            f"custom_preprocessor takes {len(places)} arguments", fix="custom_preprocessor(model, name, ...)"
        )
    wanted = [each.name for each in places[2:]]
    for each in wanted:
        if each not in offered:
            raise OperandError(
                f"custom_preprocessor has an argument {each!r} that nobody gives", fix=f"it may take {list(offered)}"
            )
    return preprocessor(model, name, **{each: offered[each] for each in wanted})


# whole models


def from_torch(model: torch.nn.Module, **options: Any) -> Any:
    """The parameters of a model, without logs of the ops that make them: `convert_torch_model_to_ttnn_model`."""
    with manage_config("enable_logging", False), manage_config("enable_comparison_mode", False):
        return convert_torch_model_to_ttnn_model(model, **options)


def move_to_device(object: Any, device: MeshDevice) -> Any:
    """Every tensor of a tree of parameters on a device."""
    if isinstance(object, ParameterDict):
        return ParameterDict({key: move_to_device(value, device) for key, value in object.items()})
    if isinstance(object, ParameterList):
        return ParameterList(move_to_device(value, device) for value in object)
    if isinstance(object, Conv2d):
        return object.move(lambda tensor: move_to_device(tensor, device))
    return to_device(object, device) if isinstance(object, Tensor) else object


def _initialize(initialize_model: Callable[[], torch.nn.Module] | None) -> torch.nn.Module:
    if initialize_model is None:
        raise OperandError('Cached parameters not found! Please provide "initialize_model" argument')
    model = initialize_model()
    if model.training:
        logger.warning("the model is in training mode: it is put into evaluation mode")
        model.eval()
    return model


def preprocess_model_parameters(
    *,
    model_name: str | None = None,
    version: str | None = None,
    initialize_model: Callable[[], torch.nn.Module] | None = None,
    convert_to_ttnn: ConvertTest | None = None,
    custom_preprocessor: Preprocessor | None = None,
    device: MeshDevice | None = None,
    prefix: str = "",
    run_model: Callable[[torch.nn.Module], Any] | None = None,
) -> Any:
    """The parameters of a torch model as ttnn tensors, by attribute: `parameters.encoder.layer[0].weight`.

    With a `model_name` and `CONFIG.enable_model_cache` they are kept in files and come from there the next time. With
    `run_model(model)`, which runs the torch model once, convolutions and poolings that it meets become objects to call.

    >>> parameters = preprocess_model_parameters(initialize_model=lambda: torch.nn.Linear(4, 8))
    >>> parameters.weight.shape, parameters.bias.shape, parameters.weight.layout
    (Shape([4, 8]), Shape([1, 8]), Layout.TILE)
    """
    how = {"convert_to_ttnn": convert_to_ttnn, "custom_preprocessor": custom_preprocessor, "name": prefix}

    def make() -> Any:
        model = _initialize(initialize_model)
        args = None if run_model is None else infer_ttnn_module_args(model=model, run_model=run_model, device=device)
        return _with_modules(from_torch(model, **how, ttnn_module_args=args), args)

    is_kept = model_name is not None and CONFIG.enable_model_cache
    cache = ModelCache(CONFIG.model_cache_path, model_name if is_kept else None, version)
    found = cache.get(make, initialize_model is not None)
    return found if device is None else move_to_device(found, device)


def preprocess_model(*, reader_patterns_cache: dict[object, object] | None = None, **options: Any) -> Any:
    """As `preprocess_model_parameters`."""
    return preprocess_model_parameters(**options)


def _with_modules(parameters: Any, args: Args) -> Any:
    """A tree of parameters with an object in the place of every convolution and pooling that was met."""
    if isinstance(args, Conv2dArgs):
        return Conv2d(args, parameters["weight"], parameters.get("bias"))
    if isinstance(args, MaxPool2dArgs):
        return MaxPool2d(args)
    if not args:
        return parameters
    if isinstance(parameters, ParameterList):
        return ParameterList(_with_modules(each, _args_of(args, index)) for index, each in enumerate(parameters))
    found = dict(parameters or {})
    for key, below in args.items():
        made = _with_modules(found.get(key, ParameterDict()), below)
        if isinstance(made, (Conv2d, MaxPool2d)) or made:
            found[key] = made
    return make_parameter_dict(found)


def tensors_of(parameters: object) -> Iterator[Tensor]:
    """Every ttnn tensor of a tree of parameters."""
    if isinstance(parameters, Tensor):
        yield parameters
    elif isinstance(parameters, Conv2d):
        yield from parameters.tensors()
    elif isinstance(parameters, Mapping):
        for each in parameters.values():
            yield from tensors_of(each)
    elif isinstance(parameters, list):
        for each in parameters:
            yield from tensors_of(each)
