"""TTNN's tracer of torch and ttnn calls: what needs no tracing works, and the rest says why it is not here.

The original replaces functions of torch while it traces; nothing of another library is replaced here. `ttnn.graph`
writes down the ops of a program.
"""

from __future__ import annotations

from meshloom.ttnn.surface import refusing
from meshloom.ttnn.tensor.formats import Layout
from meshloom.ttnn.tensor.memory import MemoryConfig

__all__ = "disable_tracing duration_to_string is_tracing_enabled layout_to_string memory_config_to_string".split()

__getattr__ = refusing(
    "tracer",
    {
        "tracing replaces functions of torch while it runs, and nothing of another library is replaced here; "
        "ttnn.graph.begin_graph_capture writes down the ops of a program": (
            "trace enable_tracing create_ttnn_input_tensor trace_ttnn_operation preprocess_args_and_kwargs "
            "preprocess_return_value postprocess_return_value get_input_tensors get_graph get_arg_name_value_pairs "
            "extract_args_and_kwargs_from_arg_name_value_pairs TTNNOperation TTNNTensor TracedTTNNTensor "
            "TracedTorchTensor TorchFunction TorchModule TorchModuleInput TorchParameter TorchTensor InputTensorIndex "
            "PositionalArgumentName"
        ),
        "it needs a traced graph, and there is none; ttnn.graph.pretty_print writes a captured one as text": (
            "visualize visualize_node codegen codegen_submodules codegen_top_level_module get_module_input_nodes "
            "get_module_input_tensor_names get_module_output_nodes module_to_source_code node_to_statement"
        ),
    },
)


def is_tracing_enabled() -> bool:
    """Whether calls are traced: never."""
    return False


def disable_tracing() -> None:
    """Trace nothing, which is always so."""


def duration_to_string(duration: float) -> str:
    """Nanoseconds in the unit that suits them.

    >>> duration_to_string(1500), duration_to_string(2_000_000_000)
    ('1.5 us', '2 s')
    """
    for size, unit in ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "us")):
        if duration >= size:
            return f"{duration / size:g} {unit}"
    return f"{duration:g} ns"


def layout_to_string(layout: Layout) -> str:
    """A layout as code.

    >>> layout_to_string(Layout.TILE)
    'ttnn.TILE_LAYOUT'
    """
    return f"ttnn.{layout.name}_LAYOUT"


def memory_config_to_string(memory_config: MemoryConfig) -> str:
    """A memory config as text."""
    return repr(memory_config)
