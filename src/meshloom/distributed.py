"""`meshloom.distributed`: the names of `meshloom.ttnn.distributed`, which are the same objects. There is one matmul.

>>> from meshloom import distributed, ttnn
>>> distributed.matmul is ttnn.distributed.matmul
True
"""

from __future__ import annotations

from typing import Any

from meshloom.ttnn import distributed as _original

__all__ = _original.__all__


def __getattr__(name: str) -> Any:
    return getattr(_original, name)


def __dir__() -> list[str]:
    return dir(_original)
