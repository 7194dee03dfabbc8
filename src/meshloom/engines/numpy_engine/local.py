"""What a function of the engine may know of its call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from meshloom.ops import Call
from meshloom.types import Shape

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Known:
    """The call without data, and the shapes of its results."""

    call: Call
    shapes: tuple[Shape, ...]
