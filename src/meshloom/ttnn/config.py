"""Settings, hooks around operations, and the torch function that an operation is compared with.

`TTNN_CONFIG_PATH` names a JSON file and `TTNN_CONFIG_OVERRIDES` is JSON; both are read when this module loads.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshloom import settings
from meshloom.errors import ArgumentError, OperandError, UncoveredError, closest
from meshloom.ttnn.ops.calling import AFTER, BEFORE
from meshloom.ttnn.ops.signatures import FINISH, SPEED
from meshloom.ttnn.tensor.boxes import gather_parts
from meshloom.ttnn.tensor.converting import from_torch
from meshloom.ttnn.tensor.formats import ttnn_dtype_to_torch_dtype
from meshloom.ttnn.tensor.tensor import Tensor

__all__ = (
    "CONFIG CONFIG_OVERRIDES CONFIG_PATH Config attach_golden_function get_fallback_function get_golden_function "
    "load_config_from_dictionary load_config_from_json_file manage_config register_post_operation_hook "
    "register_pre_operation_hook save_config_to_json_file"
).split()


def _cache() -> Path:
    return Path(settings.read("XDG_CACHE_HOME")) / "ttnn"


@dataclass(init=False)
class Config:
    """The settings, with the names of TTNN's: the defaults, or a copy of others. Those that only concern reports are
    kept and have no effect here.

    >>> Config(CONFIG) == CONFIG, Config(CONFIG) is CONFIG
    (True, False)
    """

    cache_path: Path = dataclasses.field(default_factory=_cache)
    model_cache_path: Path = dataclasses.field(default_factory=lambda: _cache() / "models")
    tmp_dir: Path = dataclasses.field(default_factory=lambda: Path(tempfile.gettempdir()) / "ttnn")
    enable_model_cache: bool = False
    enable_fast_runtime_mode: bool = True
    throw_exception_on_fallback: bool = False
    enable_logging: bool = False
    enable_graph_report: bool = False
    enable_graph_python_stack_traces: bool = False
    enable_detailed_buffer_report: bool = False
    enable_detailed_tensor_report: bool = False
    enable_comparison_mode: bool = False
    comparison_mode_pcc: float = 0.9999
    comparison_mode_should_raise_exception: bool = False
    root_report_path: Path = dataclasses.field(default_factory=lambda: Path("generated") / "ttnn" / "reports")
    report_name: Path | None = None
    strict_ccl_topology: bool = False
    validate_program_args: bool = False

    def __init__(self, config: Config | None = None) -> None:
        if not isinstance(config, Config | None):
            raise ArgumentError(f"Config takes another Config, not {config!r}", fix="set what differs afterwards")
        for field in dataclasses.fields(self):
            setattr(self, field.name, _default(field) if config is None else getattr(config, field.name))

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, _check_name(name), _fitting(name, value))

    @classmethod
    def keys(cls) -> list[str]:
        return list(_KINDS)

    @property
    def report_path(self) -> Path | None:
        """Where reports would go."""
        return None if self.report_name is None else self.root_report_path / self.report_name

    def apply_json_overrides(self, json_text: str, strict: bool = True, source: str = "") -> None:
        """Take settings from JSON; unknown ones are an error if it is strict, else left out."""
        try:
            found = json.loads(json_text)
        except ValueError as error:
            raise ArgumentError(f"{source or 'the text'} is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ArgumentError(f"{source or 'the text'} is no JSON object")
        for name, value in found.items():
            if strict or name in _KINDS:
                setattr(self, name, value)

    def load_from_file(self, path: str | os.PathLike[str]) -> None:
        self.apply_json_overrides(Path(path).read_text(), source=str(path))

    def save_to_file(self, path: str | os.PathLike[str]) -> None:
        """Write all settings to a JSON file."""
        values = {name: getattr(self, name) for name in _KINDS}
        written = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
        Path(path).write_text(json.dumps(written, indent=4))


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


_KINDS: dict[str, str] = {field.name: str(field.type) for field in dataclasses.fields(Config)}


def _check_name(name: str) -> str:
    if name not in _KINDS:
        raise ArgumentError(f"there is no setting {name!r}", fix=closest(name, _KINDS))
    return name


def _fitting(name: str, value: Any) -> object:
    """A value of the kind that a setting has."""
    kind = _KINDS[_check_name(name)]
    if kind.startswith("Path"):
        return None if value is None and "None" in kind else Path(value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "float" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    raise ArgumentError(f"{name} is a {kind}, not {value!r}")


CONFIG = Config()


def load_config_from_dictionary(config: Mapping[str, Any], from_file: bool = False) -> None:
    for name, value in config.items():
        setattr(CONFIG, name, value)


load_config_from_json_file, save_config_to_json_file = CONFIG.load_from_file, CONFIG.save_to_file


@contextmanager
def manage_config(name: str, value: object) -> Iterator[None]:
    """A setting has another value inside.

    >>> with manage_config("comparison_mode_pcc", 0.5):
    ...     CONFIG.comparison_mode_pcc
    0.5
    """
    before = getattr(CONFIG, _check_name(name))
    setattr(CONFIG, name, value)
    try:
        yield
    finally:
        setattr(CONFIG, name, before)


def read_environment(environment: Mapping[str, str]) -> None:
    """Take settings from the file and the JSON that the environment names; a file that is not there yet is written."""
    if path := environment.get("TTNN_CONFIG_PATH"):
        (CONFIG.load_from_file if Path(path).exists() else CONFIG.save_to_file)(path)
    if text := environment.get("TTNN_CONFIG_OVERRIDES"):
        CONFIG.apply_json_overrides(text, source="TTNN_CONFIG_OVERRIDES")


read_environment(settings.environment())
CONFIG_PATH: Path | None = Path(settings.read("TTNN_CONFIG_PATH")) if settings.read("TTNN_CONFIG_PATH") else None
CONFIG_OVERRIDES: str | None = settings.read("TTNN_CONFIG_OVERRIDES") or None


# hooks


@contextmanager
def _register(hooks: list[Callable[..., Any]], hook: Callable[..., Any]) -> Iterator[None]:
    hooks.append(hook)
    try:
        yield
    finally:
        hooks.remove(hook)


def register_pre_operation_hook(hook: Callable[..., Any]) -> Any:
    """Inside, a function is called before every operation as `hook(operation, args, kwargs)`."""
    return _register(BEFORE, hook)


def register_post_operation_hook(hook: Callable[..., Any]) -> Any:
    """Inside, a function is called after every operation as `hook(operation, args, kwargs, output)`."""
    return _register(AFTER, hook)


# the torch function that an operation is compared with

_golden: dict[str, Callable[..., Any]] = {}


def attach_golden_function(operation: Any, golden_function: Callable[..., Any], **options: Any) -> None:
    """Say what an operation is compared with."""
    _golden[_name(operation)] = golden_function


def get_golden_function(operation: Any) -> Callable[..., Any]:
    """What an operation is compared with: what was attached, else torch's function of that name.

    >>> from meshloom import ttnn
    >>> get_golden_function(ttnn.relu) is torch.relu
    True
    """
    name = _name(operation)
    if name in _golden:
        return _golden[name]
    last = name.rpartition(".")[2]
    for place in (torch, torch.nn.functional, torch.special, torch.Tensor):
        found: Callable[..., Any] | None = getattr(place, last, None)
        if callable(found):
            return found
    raise UncoveredError(f"{name} has no golden function", fix="ttnn.attach_golden_function(operation, function)")


def get_fallback_function(operation: Any) -> Callable[..., Any]:
    """The torch function behind an operation, on tensors of ttnn: they are read, and the result is put beside them.

    >>> from meshloom import ttnn
    >>> get_fallback_function(ttnn.relu)(ttnn.Tensor([-1.0, 2.0], [2], ttnn.float32, ttnn.ROW_MAJOR_LAYOUT)).to_list()
    [0.0, 2.0]
    """
    golden = get_golden_function(operation)

    def fall_back(*args: Any, **kwargs: Any) -> Any:
        told = {name: value for name, value in kwargs.items() if name not in FINISH and name not in SPEED}
        given = [value for value in (*args, *told.values()) if isinstance(value, Tensor)]
        found = golden(*map(_read, args), **{name: _read(value) for name, value in told.items()})
        if not given or not isinstance(found, torch.Tensor):
            return found
        like = given[0]
        dtype, memory = kwargs.get("dtype") or like.dtype, kwargs.get("memory_config") or like.memory_config()
        return from_torch(found, dtype, layout=like.layout, device=like.device(), memory_config=memory)

    fall_back.__name__ = fall_back.__qualname__ = f"{_name(operation).rpartition('.')[2]}_in_torch"
    return fall_back


def _read(value: Any) -> Any:
    """What torch computes with: the values of a tensor that all devices hold alike."""
    if not isinstance(value, Tensor):
        return value
    value.wait()
    value = gather_parts(value, by_label=True)
    if math.prod(value.block.shape[: len(value.grid)]) > 1:
        raise OperandError(
            f"a fallback computes with one torch tensor, and {value.dtype.name} {list(value.shape)} differs between "
            "devices",
            fix="ttnn.get_golden_function(op) on the torch tensors, or ttnn.get_device_tensors(x)",
        )
    return value.part((0,) * len(value.grid)).to(ttnn_dtype_to_torch_dtype(value.dtype))


def _name(operation: Any) -> str:
    found = getattr(operation, "python_fully_qualified_name", None)
    if found is None:
        raise ArgumentError(f"{operation!r} is not an operation of ttnn")
    return str(found)
