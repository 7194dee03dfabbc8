"""Kernels and arguments as bytes for another interpreter.

A kernel goes as its binary, with copies of what it refers to: globals that its code names, defaults, closure. Functions
of the program go the same way; modules, and functions of installed packages, go by name. What is copied is what was
there when the kernel was loaded: what changes from launch to launch is an argument. The bytes never leave the processes
of one user on one machine.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from meshloom.errors import ArgumentError, is_program
from meshloom.runtime.card import Kernel
from meshloom.runtime.compile_cache import translate

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
State = tuple[dict[str, Any], Any, Any, dict[int, Any]]
FIX = "give it as an argument if it changes, make it inside of the kernel, or use virtual cards of this process"


def dump_kernel(binary: bytes, kernel: Kernel) -> bytes:
    """A compiled kernel with all that it refers to, or an error that names what cannot go along."""
    function: Any = kernel
    try:
        return dump((binary, function.__name__, state_of(function)))
    except Exception as error:
        raise ArgumentError(
            f"kernel {function.__name__!r} cannot go to the process of a card: {_culprit(function, error)}",
            fix=FIX,
        ) from error


def load_kernel(message: bytes) -> Kernel:
    """The kernel as a function of this interpreter."""
    binary, name, state = pickle.loads(message)
    made: Kernel = make_function(binary, name)
    fill_function(made, state)
    return made


def dump(value: object) -> bytes:
    """A value as bytes: functions of the program by what they do, the rest as pickle has it."""
    into = io.BytesIO()
    Pickler(into, pickle.HIGHEST_PROTOCOL).dump(value)
    return into.getvalue()


def dump_arguments(name: str, args: Mapping[str, Any]) -> bytes:
    """The arguments of a launch, or an error that names the one that cannot go along."""
    try:
        return dump(dict(args))
    except Exception as error:
        found = next(_stuck(args), "?")
        raise ArgumentError(
            f"argument {found!r} of kernel {name!r} cannot go to the process of a card: {error}",
            fix="give numbers, texts, tuples or torch tensors",
        ) from error


class Pickler(pickle.Pickler):
    """Pickle, and functions of the program by value."""

    def reducer_override(self, value: Any) -> Any:
        """How a function, a module or a class is made again."""
        if isinstance(value, types.ModuleType) and value.__name__ != "__main__":
            return importlib.import_module, (value.__name__,)
        if isinstance(value, types.FunctionType) and not _is_installed(value):
            return make_function, (translate(value), value.__name__), state_of(value), None, None, fill_function
        if getattr(value, "__module__", None) == "__main__" and isinstance(value, (type, types.ModuleType)):
            raise pickle.PicklingError(f"{value.__name__} is of the main program, which other processes do not run")
        return NotImplemented


def state_of(function: Any) -> State:
    """What a function refers to: globals, defaults, closure."""
    names = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    cells = {place: cell.cell_contents for place, cell in enumerate(function.__closure__ or ()) if _is_filled(cell)}
    return names, function.__defaults__, function.__kwdefaults__, cells


def make_function(binary: bytes, name: str) -> Any:
    """A function of some code that refers to nothing yet: what it refers to may refer to it."""
    code: types.CodeType = marshal.loads(binary)
    closure = tuple(types.CellType() for _ in code.co_freevars)
    names = {"__name__": "kernel", "__builtins__": builtins}  # where C looks for `__import__`
    return types.FunctionType(code, names, name, None, closure)


def fill_function(function: Any, state: State) -> None:
    """Give a function what it refers to."""
    names, function.__defaults__, function.__kwdefaults__, cells = state
    function.__globals__.update(names)
    for place, value in cells.items():
        function.__closure__[place].cell_contents = value


def _is_filled(cell: types.CellType) -> bool:
    try:
        return bool((cell.cell_contents,))
    except ValueError:  # a variable that has no value yet
        return False


def _names(code: types.CodeType) -> Iterator[str]:
    """The globals that code refers to, and the code inside of it."""
    yield from (each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_installed(function: types.FunctionType) -> bool:
    """Whether another process finds it by name: a function of torch, the interpreter or an installed package."""
    found: Any = sys.modules.get(function.__module__ or "")
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    file = function.__code__.co_filename
    return found is function and ("-packages" in file or not is_program(file))


def _culprit(function: Any, error: Exception) -> str:
    """What of a kernel cannot go along."""
    names, defaults, keywords, cells = state_of(function)
    free = {function.__code__.co_freevars[place]: value for place, value in cells.items()}
    held = {**names, **(keywords or {}), **free, "its defaults": defaults}
    found = next(_stuck(held), None)
    return str(error) if found is None else f"it refers to {found}, {held[found]!r:.60} ({error})"


def _stuck(values: Mapping[str, Any]) -> Iterator[str]:
    """The names of values that cannot go along."""
    for name, value in values.items():
        try:
            dump(value)
        except Exception:
            yield name
