"""Parameters of models in files: a directory with a version, an index of the tree, and a file per tensor.

ttnn tensors are in files of `ttnn.files`, torch tensors in numpy's format. Nothing is unpickled. The index is written
last and moved to its place when complete, so a directory without one is no cache.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.models.parameters import ParameterDict, ParameterList
from meshloom.ttnn.models.traced_modules import Conv2d, Conv2dArgs, MaxPool2d, MaxPool2dArgs
from meshloom.ttnn.tensor.files import UNREADABLE, dump_tensor, load_tensor
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.tensor import Tensor

INDEX, VERSION = "index.json", "version.txt"
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes that numpy has, by size


def _folder_of(model_name: str) -> str:
    """The folder of a model inside the cache: its name, never a way out of the cache or the cache itself."""
    name = model_name.replace("/", "_") if isinstance(model_name, str) else ""
    if name in ("", ".", "..") or "\0" in name:
        raise ArgumentError(f"model_name={model_name!r} names no folder", fix='give a name such as "resnet50"')
    return name


def _file_of(name: object, folder: Path) -> Path:
    """A file of the index, in the folder of its model and nowhere else."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file in the folder")
    return folder / name


class ModelCache:
    """The parameters of one model; without a name nothing is kept."""

    def __init__(self, path: Path, model_name: str | None, version: str | None) -> None:
        self._folder = None if model_name is None else path / _folder_of(model_name)
        self._version = version

    def get(self, make: Callable[[], Any], can_make: bool) -> Any:
        """What is kept, if it is of the same version; else what is made, and kept from now on."""
        if self._folder is None:
            return make()
        version = self._version if self._version is not None else current_version()
        if self._has(version):
            return self._load()
        if not can_make:
            raise OperandError(
                'Cached model not found! Please provide "initialize_model" argument',
                folder=self._folder,
                version=version,
            )
        made = make()
        self._save(made, version)
        return made

    def _has(self, version: str) -> bool:
        assert self._folder is not None
        told = self._folder / VERSION
        return (self._folder / INDEX).exists() and told.exists() and told.read_bytes() == version.encode()

    def _save(self, parameters: object, version: str) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / INDEX).unlink(missing_ok=True)
        tree = _Saver(self._folder).save(parameters)
        (self._folder / VERSION).write_bytes(version.encode())
        beside = self._folder / f"{INDEX}.{os.getpid()}"
        beside.write_text(json.dumps(tree))
        os.replace(beside, self._folder / INDEX)

    def _load(self) -> Any:
        assert self._folder is not None
        try:
            tree = json.loads((self._folder / INDEX).read_text())
            return _load_tree(tree, self._folder)
        except (*UNREADABLE, EOFError, OSError) as error:
            raise OperandError(
                f"the model cache in {self._folder} cannot be read: {error!s:.400}",
                fix="delete the folder, and it is made again",
            ) from error


def current_version() -> str:
    """The commit that the program's repository is at; empty outside of one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, timeout=10
        )
    except OSError:
        return ""
    return found.stdout.strip()


class _Saver:
    """Writes the leaves of a tree, numbered, and tells the tree."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def save(self, value: object) -> Any:
        if isinstance(value, ParameterDict):
            return {"dict": [[key, self.save(each)] for key, each in value.items()]}
        if isinstance(value, ParameterList):
            return {"list": [self.save(each) for each in value]}
        if isinstance(value, Tensor):
            return {"ttnn": self._ttnn(value)}
        if isinstance(value, torch.Tensor):
            return {"torch": self._torch(value), "dtype": str(value.dtype).removeprefix("torch.")}
        if isinstance(value, Conv2d):
            tensors = {"weight": self.save(value.weight), "bias": self.save(value.bias)}
            return {"conv2d": _plain(value.args), **tensors}
        if isinstance(value, MaxPool2d):
            return {"max_pool2d": _plain(value.args)}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        raise OperandError(
            f"a {type(value).__name__} cannot be kept in a model cache", fix="return tensors from custom_preprocessor"
        )

    def _next(self, suffix: str) -> str:
        self._count += 1
        return f"{self._count - 1:05}{suffix}"

    def _ttnn(self, tensor: Tensor) -> str:
        name = self._next(".tensorbin")
        dump_tensor(self._folder / name, tensor)
        return name

    def _torch(self, tensor: torch.Tensor) -> str:
        name = self._next(".npy")
        bits = tensor.detach().contiguous().view(BITS[tensor.element_size()])
        numpy.save(self._folder / name, bits.numpy(), allow_pickle=False)
        return name


def _plain(args: Any) -> dict[str, Any]:
    return {key: {"dtype": value.name} if isinstance(value, DataType) else value for key, value in args.items()}


def _args(found: dict[str, object]) -> dict[str, Any]:
    def one(value: object) -> Any:
        if isinstance(value, dict):
            return DataType[value["dtype"]]
        return tuple(value) if isinstance(value, list) else value

    return {key: one(value) for key, value in found.items()}


def _bits(path: Path) -> numpy.ndarray[Any, Any]:
    """The array of a file, after a look at its size: its first lines may promise more than there is."""
    with path.open("rb") as file:
        version = numpy.lib.format.read_magic(file)
        if version != (1, 0):  # what `numpy.save` writes for integers
            raise ValueError(f"{path.name} has version {version} of numpy's format")
        shape, _, dtype = numpy.lib.format.read_array_header_1_0(file)
        nbytes = math.prod(shape) * dtype.itemsize
        found = os.fstat(file.fileno()).st_size - file.tell()
    if dtype.hasobject or min(shape, default=0) < 0 or found != nbytes:
        raise ValueError(f"{path.name} promises {nbytes} bytes of {dtype} and has {found}")
    bits: numpy.ndarray[Any, Any] = numpy.load(path, allow_pickle=False)
    return bits


def _load_tree(tree: Any, folder: Path) -> Any:
    if "dict" in tree:
        return ParameterDict({key: _load_tree(each, folder) for key, each in tree["dict"]})
    if "list" in tree:
        return ParameterList(_load_tree(each, folder) for each in tree["list"])
    if "ttnn" in tree:
        return load_tensor(_file_of(tree["ttnn"], folder))
    if "torch" in tree:
        bits = torch.from_numpy(_bits(_file_of(tree["torch"], folder)))
        dtype = getattr(torch, tree["dtype"])
        if not isinstance(dtype, torch.dtype) or dtype.itemsize != bits.itemsize:
            raise ValueError(f"{tree['torch']} holds {bits.dtype}, the index says {tree['dtype']}")
        return bits.view(dtype)
    if "conv2d" in tree:
        tensors = (_load_tree(tree[each], folder) for each in ("weight", "bias"))
        return Conv2d(Conv2dArgs(_args(tree["conv2d"])), *tensors)
    return MaxPool2d(MaxPool2dArgs(_args(tree["max_pool2d"]))) if "max_pool2d" in tree else tree["value"]
