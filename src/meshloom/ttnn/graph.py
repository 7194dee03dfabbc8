"""The ops of a program written down as a graph: `begin_graph_capture`, the program, `end_graph_capture`.

A graph is a list of nodes as TTNN gives it, in the order of the program: a capture's start and end, a function's start
and end, and tensors. Every node has a number (`counter`), a type, what is known of it (`params`), and the numbers of
the nodes that come after it (`connections`). Ops run while they are captured, in both run modes. What concerns kernels,
their buffers and their times is not here, and every such function says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshloom.errors import OperandError, where
from meshloom.ttnn.choices import Choice
from meshloom.ttnn.ops.calling import AFTER, BEFORE
from meshloom.ttnn.surface import refusing
from meshloom.ttnn.tensor.formats import DataType, Layout, Shape
from meshloom.ttnn.tensor.tensor import Tensor

__all__ = (
    "RunMode TensorInfo begin_graph_capture count_intermediate_and_output_tensors disable_detailed_buffer_tracing "
    "disable_python_stack_traces enable_python_stack_traces end_graph_capture end_graph_capture_to_file "
    "extract_calltrace extract_output_info extract_output_tensors is_detailed_buffer_tracing_enabled "
    "is_graph_capture_active is_python_stack_trace_enabled pretty_format pretty_print track_function_end "
    "track_function_start"
).split()

Node = dict[str, Any]

__getattr__ = refusing(
    "graph",
    {
        "an op is one array call here and has no kernels, circular buffers or pages in L1": (
            "extract_peak_L1_memory_usage extract_resource_usage_per_core enable_detailed_buffer_tracing"
        ),
        "times are not those of hardware; meshloom.simulate predicts collectives": (
            "extract_operation_durations extract_total_duration_from_graph"
        ),
        "pictures of graphs need graphviz; pretty_print writes the graph as text": (
            "visualize visualize_node visualize_edge extract_levelized_graph"
        ),
        "there is no database of reports; end_graph_capture_to_file writes the graph as JSON": (
            "full_graph_capture import_report flush_comparison_records_to_db has_comparison_records "
            "record_tensor_comparison_data reset_comparison_records_data store_captured_graph store_output_tensor_ids "
            "append_python_io_record enable_python_io_recording disable_python_io_recording "
            "is_python_io_recording_enabled record_python_operation record_python_operation_error"
        ),
    },
)


class RunMode(Choice):
    """Whether ops run while they are captured; here they do in both."""

    NORMAL, NO_DISPATCH = 0, 1


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor that comes out of a graph."""

    shape: Shape
    size: int
    dtype: DataType
    layout: Layout


@dataclass
class Capture:
    """A graph in the making: its nodes, the functions that have begun (`op` is None for one of the program), and the
    nodes of tensors by their ids."""

    nodes: list[Node] = field(default_factory=list)
    begun: list[tuple[Any, int]] = field(default_factory=list)
    tensors: dict[int, int] = field(default_factory=dict)

    def add(self, kind: str, sources: Sequence[int] = (), **params: Any) -> int:
        """A node after others."""
        counter = len(self.nodes)
        told = {name: str(value) for name, value in params.items()}
        self.nodes.append({"counter": counter, "node_type": kind, "params": told, "connections": [], "arguments": []})
        for source in sources:
            self.nodes[source]["connections"].append(counter)
        return counter

    def tensor(self, tensor: Tensor, source: int | None = None) -> int:
        """The node of a tensor: that of the function that made it, or one of its own."""
        if tensor.tensor_id not in self.tensors:
            self.tensors[tensor.tensor_id] = self.add(
                "tensor",
                () if source is None else (source,),
                tensor_id=tensor.tensor_id,
                shape=tensor.shape,
                dtype=tensor.dtype,
                layout=tensor.layout,
                size=tensor.volume() * tensor.element_size(),
            )
        return self.tensors[tensor.tensor_id]

    def begin(self, op: Any, name: str, arguments: Sequence[Any] = ()) -> None:
        """A function starts inside of the one that began last."""
        inputs = [self.tensor(each) for each in _tensors(arguments)]
        around = [self.begun[-1][1]] if self.begun else [0]
        more = {"stack_trace": where()} if _shown["stack"] else {}
        counter = self.add("function_start", [*around, *inputs], name=name, inputs=len(arguments), **more)
        self.nodes[counter]["arguments"] = [_argument(each) for each in arguments]
        self.begun.append((op, counter))

    def finish(self, op: Any, output: Any = None) -> bool:
        """A function ends, if it has begun; those that began inside of it and never ended were stopped by an error."""
        places = [place for place, (each, _) in enumerate(self.begun) if each is op]
        if not places:
            return False
        start = self.begun[places[-1]][1]
        del self.begun[places[-1] :]
        counter = self.add("function_end", (start,), name=self.nodes[start]["params"]["name"])
        for each in _tensors([output]):
            self.tensor(each, counter)
        return True


_shown = {"stack": False}
_captures: list[Capture] = []  # the one that is being made, or none


def _tensors(values: Any) -> Iterator[Tensor]:
    for each in values.values() if isinstance(values, dict) else values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (list, tuple, dict)):
            yield from _tensors(each)


def _argument(value: Any) -> str:
    return f"tensor {value.tensor_id}" if isinstance(value, Tensor) else f"{value!r:.200}"


def _before(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name = str(operation.python_fully_qualified_name).replace(".", "::")
    _captures[0].begin(operation, name, (*args, *kwargs.values()))


def _after(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    _captures[0].finish(operation, output)


def _active() -> Capture:
    if not _captures:
        raise OperandError("no graph is being captured", fix="ttnn.graph.begin_graph_capture()")
    return _captures[0]


# capture


def begin_graph_capture(run_mode: RunMode | None = None) -> None:
    """Write down every op from now on.

    >>> from meshloom import ttnn
    >>> begin_graph_capture(RunMode.NORMAL)
    >>> x = ttnn.reshape(ttnn.ones([2, 3]), (3, 2))
    >>> extract_calltrace(end_graph_capture())
    ['ttnn::ones', 'ttnn::reshape']
    """
    if _captures:
        raise OperandError("a graph is already being captured", fix="ttnn.graph.end_graph_capture()")
    made = Capture()
    made.add("capture_start")
    _captures.append(made)
    BEFORE.append(_before)
    AFTER.append(_after)


def end_graph_capture() -> list[Node]:
    """The nodes of the graph since `begin_graph_capture`."""
    made = _active()
    BEFORE.remove(_before)
    AFTER.remove(_after)
    _captures.clear()
    made.add("capture_end", (0,))
    return made.nodes


def end_graph_capture_to_file(report_path: str | os.PathLike[str]) -> list[Node]:
    """The nodes of the graph, also written to a file as JSON."""
    nodes = end_graph_capture()
    Path(report_path).write_text(json.dumps(nodes, indent=1))
    return nodes


def is_graph_capture_active() -> bool:
    return bool(_captures)


def track_function_start(function_name: str) -> None:
    """A function of the program begins: what runs until its end is inside of it."""
    _active().begin(None, function_name)


def track_function_end() -> None:
    """The function of the program that began last ends."""
    if not _active().finish(None):
        raise OperandError("no function of the program has begun", fix="ttnn.graph.track_function_start(name)")


def enable_python_stack_traces() -> None:
    """Write the line of the program beside every function."""
    _shown["stack"] = True


def disable_python_stack_traces() -> None:
    """Write no lines of the program."""
    _shown["stack"] = False


def is_python_stack_trace_enabled() -> bool:
    return _shown["stack"]


def is_detailed_buffer_tracing_enabled() -> bool:
    """Whether pages of buffers are written down: never."""
    return False


def disable_detailed_buffer_tracing() -> None:
    """Write no pages of buffers, which is always so."""


# reading


def extract_calltrace(trace: Sequence[Node]) -> list[str]:
    """The names of the functions, in the order in which they began."""
    return [node["params"]["name"] for node in trace if node["node_type"] == "function_start"]


def _outputs(trace: Sequence[Node]) -> list[Node]:
    """The tensors that a function of the graph made and none took."""
    made = {place for node in trace if node["node_type"] == "function_end" for place in node["connections"]}
    return [node for node in trace if node["counter"] in made and not node["connections"]]


def extract_output_tensors(trace: Sequence[Node]) -> set[int]:
    """The ids of the tensors that come out: made in the graph, and taken by no function of it."""
    return {int(node["params"]["tensor_id"]) for node in _outputs(trace)}


def extract_output_info(trace: Sequence[Node]) -> list[TensorInfo]:
    """Shape, bytes, dtype and layout of the tensors that come out."""
    return [
        TensorInfo(
            Shape(json.loads(told["shape"].removeprefix("Shape(").removesuffix(")"))),
            int(told["size"]),
            DataType[told["dtype"].rpartition(".")[2]],
            Layout[told["layout"].rpartition(".")[2]],
        )
        for told in (node["params"] for node in _outputs(trace))
    ]


def count_intermediate_and_output_tensors(trace: Sequence[Node]) -> tuple[int, int]:
    """How many tensors the functions of the graph made that others took, and how many come out."""
    made = {place for node in trace if node["node_type"] == "function_end" for place in node["connections"]}
    outputs = len(_outputs(trace))
    return len([node for node in trace if node["counter"] in made and node["node_type"] == "tensor"]) - outputs, outputs


def pretty_format(captured_graph: Sequence[Node]) -> str:
    """One line for every function and tensor, those inside of a function indented."""
    lines, depth = [], 0
    for node in captured_graph:
        depth -= node["node_type"] in ("function_end", "capture_end")
        said = ", ".join(f"{name}={value}" for name, value in node["params"].items())
        lines.append(f"{'    ' * depth}{node['counter']}: {node['node_type']}" + (f" ({said})" if said else ""))
        depth += node["node_type"] in ("function_start", "capture_start")
    return "\n".join(lines)


def pretty_print(captured_graph: Sequence[Node]) -> None:
    print(pretty_format(captured_graph))
