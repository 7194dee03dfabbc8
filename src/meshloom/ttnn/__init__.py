"""The TTNN surface on the mesh: what every device holds, literal collectives, no hidden communication.

`from meshloom import ttnn` stands in for `import ttnn`. Names load on first use; where they come from is decided in
`ttnn.surface`.

>>> from meshloom import ttnn
>>> ttnn.MeshShape(2, 4).mesh_size(), ttnn.bfloat16
(8, DataType.BFLOAT16)
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

_FILES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _FILES:
        return import_module(f"{__name__}.{name}")
    found = import_module(f"{__name__}.surface").find(name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_FILES, *import_module(f"{__name__}.surface").names()})
