"""meshloom: a mesh-native tensor runtime. One logical mesh of devices, tensors with explicit placement, ops that
communicate by themselves.

Names that need torch load on first use, so that planning and drawing start in milliseconds.
"""

from __future__ import annotations

import builtins
from importlib import import_module
from typing import Any

from meshloom import collectives, engines, fabric, runtime
from meshloom.errors import (
    ArgumentError,
    BindingError,
    BoundsError,
    CheckpointError,
    ClosedError,
    CommunicationError,
    DeviceError,
    DeviceTimeoutError,
    DivergenceError,
    DTypeError,
    FabricError,
    GradientError,
    LaunchError,
    LostError,
    MeshError,
    MeshloomError,
    ModeError,
    NotationError,
    OperandError,
    OutOfMemoryError,
    PeerLostError,
    PipelineError,
    PlacementError,
    RaceError,
    ScheduleError,
    ShapeError,
    TraceError,
    UncoveredError,
    UnsupportedError,
    ViewError,
)
from meshloom.fabric import Machine
from meshloom.mesh import Mesh
from meshloom.ops import ALIASES, OPS
from meshloom.placement import Partial, Placement, Replicate, Shard, Topology, parse

__version__ = "0.2.0"

collectives.find_with(lambda name: getattr(import_module("meshloom.tensor.collectives"), name))

# Where the names that need torch (or are seldom needed) come from.
_LAZY = {
    **dict.fromkeys(("Tensor",), "meshloom.tensor.base"),
    **dict.fromkeys(("Parameter",), "meshloom.tensor.parameter"),
    **dict.fromkeys(
        "open_mesh current_mesh distribute from_local full zeros ones arange randn rand zeros_like ones_like full_like "
        "empty_like randn_like rand_like".split(),
        "meshloom.tensor.creation",
    ),
    **dict.fromkeys(
        "bernoulli empty eye linspace logspace multinomial normal randint randint_like randperm".split(),
        "meshloom.tensor.creation_random",
    ),
    **dict.fromkeys(("control", "discover"), "meshloom.processes.discovery"),
    "process": "meshloom.processes.bindings",
    "seconds_waited": "meshloom.processes.divergence",
    **dict.fromkeys("from_dtensor from_device_mesh distribute_tensor".split(), "meshloom.tensor.dtensors"),
    **dict.fromkeys(("from_buffer",), "meshloom.tensor.buffers"),
    **dict.fromkeys(("accumulate", "synchronize"), "meshloom.tensor.gradient_sums"),
    **dict.fromkeys(("dropout",), "meshloom.tensor.torch_api.pointwise"),
    **dict.fromkeys(("explain", "Explanation"), "meshloom.observe.explain"),
    **dict.fromkeys(("simulate", "Simulation"), "meshloom.observe.simulate"),
    **dict.fromkeys(("dry_run", "DryRun"), "meshloom.observe.dry_run"),
    **dict.fromkeys(
        "communication record with_output choose use_fabric use_machine CommunicationWarning FallbackWarning".split(),
        "meshloom.observe.scopes",
    ),
    **dict.fromkeys(("save", "Saving"), "meshloom.checkpoint.saving"),
    **dict.fromkeys(("export",), "meshloom.checkpoint.exporting"),
    "load": "meshloom.checkpoint.loading",
    "latest": "meshloom.checkpoint.folders",
    "RandomState": "meshloom.checkpoint.random_state",
    **dict.fromkeys(("stress",), "meshloom.comms.handles"),
    **dict.fromkeys(
        "Pipeline Plan autoplan data experts parallelize pipeline plans unparallelize".split(), "meshloom.nn"
    ),
    **dict.fromkeys(("draw", "draw_mesh", "communication_table"), "meshloom.observe.pictures"),
}

_SHOWN = {name for name, op in OPS.items() if op.surface != "inner"}
_OPS = sorted(name for name in {*_SHOWN, *ALIASES, "max", "min"} if not name.startswith("_"))

__all__ = [
    "ArgumentError",
    "BindingError",
    "BoundsError",
    "CheckpointError",
    "ClosedError",
    "CommunicationError",
    "DTypeError",
    "DeviceError",
    "DeviceTimeoutError",
    "DivergenceError",
    "FabricError",
    "GradientError",
    "LaunchError",
    "LostError",
    "PeerLostError",
    "PipelineError",
    "Machine",
    "Mesh",
    "MeshError",
    "MeshloomError",
    "ModeError",
    "NotationError",
    "OperandError",
    "OutOfMemoryError",
    "Partial",
    "Placement",
    "PlacementError",
    "RaceError",
    "Replicate",
    "ScheduleError",
    "Shard",
    "ShapeError",
    "Topology",
    "TraceError",
    "UncoveredError",
    "UnsupportedError",
    "ViewError",
    "checkpoint",
    "collectives",
    "distributed",
    "engines",
    "extend",
    "fabric",
    "parse",
    "runtime",
    "ttnn",
    *_LAZY,
    *(name for name in _OPS if not hasattr(builtins, name)),  # `import *` must not hide sum, any, max...
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        found = getattr(import_module(_LAZY[name]), name)
    elif name in ("checkpoint", "distributed", "extend", "nn", "ttnn"):
        found = import_module(f"meshloom.{name}")
    elif name in _OPS:
        found = import_module("meshloom.tensor.named").find_named(name)
    else:
        raise AttributeError(f"module 'meshloom' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_OPS})
