"""Finding blackhole-py: a folder of modules that import each other by their plain names.

It is named by an argument or by MESHLOOM_BLACKHOLE; otherwise `import device` must find it. The folder then stays on
the path of imports, because its modules import others when they need them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from meshloom import settings
from meshloom.errors import ArgumentError, DeviceError

VARIABLE = "MESHLOOM_BLACKHOLE"
# What the driver uses, and in which modules it may be.
NAMES = {"Device": ("device",), "DramBuffer": ("dram",), "Compiler": ("codegen", "compiler", "device")}
LINKS, KERNELS = "ethernet", "meshloom_kernels"
FIX = f"name its folder: {VARIABLE}=/path/to/blackhole-py, or BlackholeDriver(path=...)"


@dataclass(frozen=True)
class Modules:
    """What the driver uses of blackhole-py. `links` and `kernels` are files that may lie beside it, or None."""

    folder: Path
    Device: Any
    DramBuffer: Any
    Compiler: Any
    links: ModuleType | None
    kernels: ModuleType | None


def find_folder(path: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder of blackhole-py: the one that was named, or that imports find; None if it is nowhere."""
    named = path if path is not None else settings.read(VARIABLE) or None
    if named is not None:
        found = Path(named)
        if not (found / "device.py").is_file():
            raise ArgumentError(f"{found} is no folder of blackhole-py: it has no device.py", fix=FIX)
        return found.resolve()
    spec = importlib.util.find_spec("device")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / "dram.py").is_file():
        return None
    return Path(spec.origin).resolve().parent


def load(path: str | os.PathLike[str] | None = None) -> Modules:
    """The modules of blackhole-py, or an error that says what is missing."""
    folder = find_folder(path)
    if folder is None:
        raise DeviceError("blackhole-py, the driver of Tenstorrent cards, is not installed here", fix=FIX)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    found = {name: _find(name, folder) for name in NAMES}
    optional = [_import(name, folder) if (folder / f"{name}.py").is_file() else None for name in (LINKS, KERNELS)]
    return Modules(folder, *found.values(), *optional)


def _find(name: str, folder: Path) -> Any:
    for module in NAMES[name]:
        if (folder / f"{module}.py").is_file():
            found = getattr(_import(module, folder), name, None)
            if found is not None:
                return found
    raise DeviceError(
        f"{folder} has no {name} in {' or '.join(NAMES[name])}",
        fix="use the files of February 2026, with Device, DramBuffer and Compiler: later ones have other calls",
    )


def _import(name: str, folder: Path) -> ModuleType:
    """A module of the folder; one of the same name from elsewhere is in the way."""
    try:
        found = importlib.import_module(name)
    except Exception as error:
        raise DeviceError(
            f"{folder / name}.py cannot be imported", reason=f"{type(error).__name__}: {error}"
        ) from error
    origin = Path(found.__file__ or "").resolve()
    if origin.parent != folder:
        raise DeviceError(
            f"a module {name!r} is already imported from {origin}, and blackhole-py has one of that name",
            fix="rename that module, or run the cards in a process of their own",
        )
    return found
