"""Pipelines: a model compiled once, then run on many inputs, with outputs collected on the host.

    pipeline = create_pipeline_from_config(PipelineConfig(use_trace=True), model, mesh, l1_config, dram_config)
    outputs = pipeline.compile(host_input).enqueue(host_inputs).pop_all()

Programs that import it as `models.tt_cnn.tt.pipeline` find it there after `sys.modules["models"] = ttnn.models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.device.cores import CoreCoord, CoreRange, CoreRangeSet
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.device.queues import synchronize_device
from meshloom.ttnn.models.executors import (
    Executor,
    Model,
    ModelExecutor,
    MultiCQModelOverlappedInputExecutor,
    MultiCQTracedModelOverlappedInputExecutor,
    MultiCQTracedModelPipelinedIOExecutor,
    TracedModelExecutor,
    tensors_in,
)
from meshloom.ttnn.tensor.converting import ArgumentValueError
from meshloom.ttnn.tensor.memory import BufferType, MemoryConfig, ShardOrientation, ShardSpec, TensorMemoryLayout
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.transfers import allocate_tensor_on_host, copy_device_to_host_tensor, from_device

__all__ = (
    "Executor ModelExecutor MultiCQModelOverlappedInputExecutor MultiCQTracedModelOverlappedInputExecutor "
    "MultiCQTracedModelPipelinedIOExecutor Pipeline PipelineConfig TracedModelExecutor create_pipeline_from_config "
    "get_memory_config_for_persistent_dram_tensor pipeline"
).split()


@dataclass
class PipelineConfig:
    """How a model is run: with a trace, on how many queues, with outputs read on the queue of transfers."""

    use_trace: bool = True
    num_command_queues: int = 1
    all_transfers_on_separate_command_queue: bool = False


class Pipeline:
    """A model with an executor, and the outputs that it has made so far."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.output_tensors: list[Any] = []
        self.preallocated_output_tensors = False
        self.output_schema: Any = None
        self._specs: list[Any] | None = None
        self._slots: list[Any] = []

    def compile(self, host_input: Tensor) -> Pipeline:
        """Run the model once and prepare what later runs need."""
        _check_host([host_input])
        self.executor.compile(host_input)
        self.output_schema = _schema(self.executor.output)
        self._specs = [(each.shape, each.dtype, each.layout) for each in tensors_in(self.executor.output)]
        return self

    def preallocate_output_tensors_on_host(self, num_output_tensors: int) -> Pipeline:
        """Make room for so many outputs; later outputs are copied there."""
        if self._specs is None:
            raise OperandError("Pipeline must be compiled before outputs are preallocated", fix="compile(...) first")
        device = self.executor.device
        for _ in range(num_output_tensors):
            made = [allocate_tensor_on_host(*spec, device) for spec in self._specs]
            self._slots.append(_fill(self.output_schema, iter(made)))
        self.preallocated_output_tensors = True
        return self

    def enqueue(self, host_inputs: Sequence[Tensor]) -> Pipeline:
        """Run the model on inputs; `pop_all` hands out what it makes of them."""
        listed = list(host_inputs)
        _check_host(listed)
        self._check_count(len(listed))
        self.output_tensors = []
        for number, output in enumerate(self.executor.execute_all(listed)):
            self.output_tensors.append(self._read(output, number))
            self.executor.signal_read_complete()
        return self

    def _check_count(self, count: int) -> None:
        least = self.executor.requires_minimum_inputs
        if count < least:
            raise ArgumentValueError(
                f"{type(self.executor).__name__} needs at least {least} inputs at once, not {count}"
            )
        if self.preallocated_output_tensors and count > len(self._slots):
            raise ArgumentValueError(f"{count} inputs for {len(self._slots)} preallocated output tensors")

    def _read(self, output: object, number: int) -> Any:
        queue = self.executor.get_read_cq()
        found = tensors_in(output)
        if not self.preallocated_output_tensors:
            copies = [from_device(each, False, queue_id=queue) for each in found]
            return _fill(_schema(output), iter(copies))
        for each, slot in zip(found, tensors_in(self._slots[number]), strict=True):
            copy_device_to_host_tensor(each, slot, False, queue)
        return self._slots[number]

    def pop_all(self) -> list[Any]:
        """All outputs, when they are done."""
        synchronize_device(self.executor.device)
        return self.output_tensors

    def cleanup(self) -> None:
        """Let go of the trace."""
        self.executor.cleanup()


def _check_host(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"a pipeline takes ttnn tensors, not {type(tensor).__name__}")
        if tensor.device() is not None:
            raise ArgumentValueError("Input tensors must be on host: ttnn.from_torch without device=, or tensor.cpu()")


def _schema(outputs: object) -> Any:
    """How outputs are nested: lists, tuples and dictionaries, None in the place of a tensor."""
    if isinstance(outputs, dict):
        return {key: _schema(each) for key, each in outputs.items()}
    return type(outputs)(_schema(each) for each in outputs) if isinstance(outputs, (list, tuple)) else None


def _fill(schema: Any, tensors: Any) -> Any:
    """Tensors nested as a schema says."""
    if isinstance(schema, dict):
        return {key: _fill(each, tensors) for key, each in schema.items()}
    return type(schema)(_fill(each, tensors) for each in schema) if schema is not None else next(tensors)


def pipeline(executor: Executor) -> Pipeline:
    return Pipeline(executor)


def create_pipeline_from_config(
    config: PipelineConfig,
    model: Model,
    device: MeshDevice,
    l1_input_memory_config: MemoryConfig,
    dram_input_memory_config: MemoryConfig | None = None,
    dram_output_memory_config: MemoryConfig | None = None,
) -> Pipeline:
    """The pipeline that a configuration asks for.

    | queues | trace | separate | executor |
    |---|---|---|---|
    | 1 | no | | `ModelExecutor` |
    | 1 | yes | | `TracedModelExecutor` |
    | 2 | no | no | `MultiCQModelOverlappedInputExecutor` |
    | 2 | yes | no | `MultiCQTracedModelOverlappedInputExecutor` |
    | 2 | yes | yes | `MultiCQTracedModelPipelinedIOExecutor` |
    """
    queues, separate = config.num_command_queues, config.all_transfers_on_separate_command_queue
    if queues not in (1, 2):
        raise ArgumentValueError(f"Unsupported pipeline configuration: {config}")
    if queues == 2 and separate and not config.use_trace:
        raise ArgumentValueError("Pipelined I/O on a separate command queue requires tracing (use_trace=True)")
    if queues == 1 and not config.use_trace:
        return Pipeline(ModelExecutor(model, device, l1_input_memory_config))
    if dram_input_memory_config is None:
        raise ArgumentValueError(f"dram_input_memory_config is needed for {config}")
    given = (model, device, dram_input_memory_config)
    if queues == 1:
        return Pipeline(TracedModelExecutor(*given, l1_input_memory_config))
    if not config.use_trace:
        return Pipeline(MultiCQModelOverlappedInputExecutor(*given, l1_input_memory_config))
    if not separate:
        return Pipeline(MultiCQTracedModelOverlappedInputExecutor(*given, l1_input_memory_config))
    if dram_output_memory_config is None:
        raise ArgumentValueError(f"dram_output_memory_config is needed for {config}")
    return Pipeline(MultiCQTracedModelPipelinedIOExecutor(*given, dram_output_memory_config, l1_input_memory_config))


def get_memory_config_for_persistent_dram_tensor(
    shape: Sequence[int], shard_strategy: TensorMemoryLayout, dram_grid_size: CoreCoord
) -> MemoryConfig:
    """A tensor spread evenly over as many banks of DRAM as divide it, by its height or its width."""
    if shard_strategy not in (TensorMemoryLayout.WIDTH_SHARDED, TensorMemoryLayout.HEIGHT_SHARDED):
        raise ArgumentValueError(f"Unsupported shard strategy {shard_strategy}: WIDTH_SHARDED or HEIGHT_SHARDED")
    if dram_grid_size.y != 1:
        raise ArgumentValueError(f"the grid of DRAM banks must have one row, not {dram_grid_size}")
    width, height = shape[-1], 1
    for size in shape[:-1]:
        height *= size
    side = width if shard_strategy is TensorMemoryLayout.WIDTH_SHARDED else height
    cores = max(count for count in range(1, dram_grid_size.x + 1) if side % count == 0)
    shard = (height, width // cores) if shard_strategy is TensorMemoryLayout.WIDTH_SHARDED else (height // cores, width)
    grid = CoreRangeSet([CoreRange(CoreCoord(0, 0), CoreCoord(cores - 1, 0))])
    spec = ShardSpec(grid, shard, ShardOrientation.ROW_MAJOR)
    return MemoryConfig(shard_strategy, BufferType.DRAM, spec)
