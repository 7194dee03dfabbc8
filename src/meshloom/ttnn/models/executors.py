"""Ways to run a model on one input after the other: with or without a trace, with transfers on a queue of their own.

A model is a function of a tensor in L1. Every executor has a persistent input: where there is a trace, a replay reads
it at the address that it had when the trace was captured. What a trace returns is one tensor that every replay writes:
it has to be read, or copied, before the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.device import queues
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.device.queues import MeshEvent, MeshTraceId
from meshloom.ttnn.ops.calling import TABLE
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.transfers import allocate_tensor_on_device, copy_host_to_device_tensor, shared, to_device

Model = Callable[[Tensor], Any]

COMPUTE, TRANSFER = 0, 1  # the queues where there are two


def tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors that a model returned, however they are nested."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = outputs.values()
    return [tensor for each in outputs for tensor in tensors_in(each)]


def free(outputs: Any) -> None:
    """Give the memory of what a model returned back."""
    for tensor in tensors_in(outputs):
        tensor.deallocate(force=True)


def _reshard(source: Tensor, target: Tensor) -> None:
    """Write a tensor into another one that a device keeps in another way."""
    TABLE["to_memory_config"](source, target.memory_config(), output_tensor=target)


class Executor:
    """Runs a model; `execute` returns what the model returned for the last input, on the device."""

    requires_minimum_inputs = 1

    def __init__(self, model: Model, device: MeshDevice, l1_input_memory_config: MemoryConfig) -> None:
        self.model, self.device, self.l1_input_memory_config = model, device, l1_input_memory_config
        self.output: Any = None
        self._is_compiled = False

    def compile(self, host_input: Tensor) -> None:
        """Run the model once, and prepare what later runs need."""
        raise NotImplementedError

    def execute(self, host_input: Tensor) -> Any:
        """Run the model on an input."""
        raise NotImplementedError

    def execute_all(self, host_inputs: list[Tensor]) -> Any:
        """Run the model on inputs one after the other: an iterator over what it returns for each."""
        for host_input in host_inputs:
            yield self.execute(host_input)

    def get_read_cq(self) -> int:
        """The queue that outputs are to be read on."""
        return COMPUTE

    def signal_read_complete(self) -> None:
        """An output has been read: its memory may be written again."""

    def cleanup(self) -> None:
        """Let go of what was prepared."""

    def _check_compiled(self) -> None:
        if not self._is_compiled:
            raise OperandError(f"{type(self).__name__} has not been compiled", fix="compile(host_input) first")


class ModelExecutor(Executor):
    """One queue, no trace: every input goes to L1 and the model runs."""

    def __init__(self, model: Model, device: MeshDevice, l1_input_memory_config: MemoryConfig, cq_id: int = 0) -> None:
        super().__init__(model, device, l1_input_memory_config)
        self.cq_id = cq_id

    def compile(self, host_input: Tensor) -> None:
        self._is_compiled = True
        free(self.execute(host_input))

    def execute(self, host_input: Tensor) -> Any:
        self._check_compiled()
        moved = to_device(host_input, self.device, self.l1_input_memory_config, queue_id=self.cq_id)
        with queues.command_queue(self.cq_id):
            self.output = self.model(moved)
        return self.output

    def get_read_cq(self) -> int:
        return self.cq_id


class _Persistent(Executor):
    """With an input that stays in DRAM, at one address."""

    def __init__(
        self,
        model: Model,
        device: MeshDevice,
        dram_input_memory_config: MemoryConfig,
        l1_input_memory_config: MemoryConfig,
        cq_id: int = 0,
    ) -> None:
        super().__init__(model, device, l1_input_memory_config)
        self.dram_input_memory_config, self.cq_id = dram_input_memory_config, cq_id
        self.dram_input_tensor: Tensor | None = None
        self.l1_input_tensor: Tensor | None = None
        self.trace_id: MeshTraceId | None = None

    def _allocate_input(self, host_input: Tensor) -> Tensor:
        made: Tensor = allocate_tensor_on_device(
            host_input.shape, host_input.dtype, host_input.layout, self.device, self.dram_input_memory_config
        )
        self.dram_input_tensor = made
        return made

    def _write_input(self, host_input: Tensor, cq_id: int) -> None:
        assert self.dram_input_tensor is not None
        copy_host_to_device_tensor(host_input, self.dram_input_tensor, cq_id)

    def _bring_input(self) -> None:
        """The input from DRAM to where the trace reads it."""
        assert self.dram_input_tensor is not None and self.l1_input_tensor is not None
        _reshard(self.dram_input_tensor, self.l1_input_tensor)

    def _to_l1(self) -> Tensor:
        found: Tensor = TABLE["to_memory_config"](self.dram_input_tensor, self.l1_input_memory_config)
        return found

    def _warm_up(self, host_input: Tensor, cq_id: int) -> None:
        """Run the model once outside of any trace, so that what it prepares on first use is there."""
        self.cleanup()
        copy_host_to_device_tensor(host_input, self._allocate_input(host_input), cq_id)
        self._handed_over(cq_id)
        free(self.model(self._to_l1()))

    def _handed_over(self, cq_id: int) -> None:
        """What a queue has written may be read on the one that computes."""
        if cq_id != self.cq_id:
            queues.wait_for_event(self.cq_id, queues.record_event(self.device, cq_id))

    def _capture(self) -> None:
        """Capture the model on an input in L1, which keeps its place also when the model frees it."""
        given = self._to_l1()
        self.l1_input_tensor = shared(given)
        self.trace_id = queues.begin_trace_capture(self.device, cq_id=self.cq_id)
        try:
            queues.hold(given)
            self.output = self.model(given)
        finally:
            queues.end_trace_capture(self.device, self.trace_id, cq_id=self.cq_id)
        self._is_compiled = True

    def _replay(self) -> None:
        assert self.trace_id is not None
        queues.execute_trace(self.device, self.trace_id, cq_id=self.cq_id, blocking=False)

    def cleanup(self) -> None:
        if self.trace_id is not None:
            queues.release_trace(self.device, self.trace_id)
            self.trace_id = None
        self._is_compiled = False


class TracedModelExecutor(_Persistent):
    """One queue and a trace: inputs are written to DRAM, brought to L1, and the trace is replayed."""

    def compile(self, host_input: Tensor) -> None:
        self._warm_up(host_input, self.cq_id)
        self._capture()

    def execute(self, host_input: Tensor) -> Any:
        self._check_compiled()
        self._write_input(host_input, self.cq_id)
        self._bring_input()
        self._replay()
        return self.output

    def get_read_cq(self) -> int:
        return self.cq_id


class _Overlapped(_Persistent):
    """Two queues: inputs are written on the second while the first computes."""

    _input_read: MeshEvent | None = None  # the input in DRAM may be written again

    def _write(self, host_input: Tensor) -> None:
        """An input to DRAM on the second queue, when the first has read the one before."""
        if self._input_read is not None:
            queues.wait_for_event(TRANSFER, self._input_read)
        self._write_input(host_input, TRANSFER)
        self._handed_over(TRANSFER)

    def _input_was_read(self) -> None:
        self._input_read = queues.record_event(self.device, COMPUTE)


class MultiCQModelOverlappedInputExecutor(_Overlapped):
    """Two queues, no trace."""

    def compile(self, host_input: Tensor) -> None:
        self._allocate_input(host_input)
        self._input_was_read()
        self._is_compiled = True
        free(self.execute(host_input))

    def execute(self, host_input: Tensor) -> Any:
        self._check_compiled()
        self._write(host_input)
        given = self._to_l1()
        self._input_was_read()
        self.output = self.model(given)
        return self.output


class MultiCQTracedModelOverlappedInputExecutor(_Overlapped):
    """Two queues and a trace."""

    def compile(self, host_input: Tensor) -> None:
        self._warm_up(host_input, TRANSFER)
        self._capture()
        self._input_was_read()

    def execute(self, host_input: Tensor) -> Any:
        self._check_compiled()
        self._write(host_input)
        self._bring_input()
        self._input_was_read()
        self._replay()
        return self.output


class MultiCQTracedModelPipelinedIOExecutor(_Overlapped):
    """Two queues and a trace: inputs and outputs go on the second queue, by way of DRAM, while the first computes."""

    requires_minimum_inputs = 2

    def __init__(
        self,
        model: Model,
        device: MeshDevice,
        dram_input_memory_config: MemoryConfig,
        dram_output_memory_config: MemoryConfig,
        l1_input_memory_config: MemoryConfig,
    ) -> None:
        super().__init__(model, device, dram_input_memory_config, l1_input_memory_config)
        self.dram_output_memory_config = dram_output_memory_config
        self.dram_output_tensor: Tensor | None = None
        self._output_read: MeshEvent | None = None  # the output in DRAM may be written again

    def compile(self, host_input: Tensor) -> None:
        self._warm_up(host_input, TRANSFER)
        self._capture()
        self._input_was_read()
        if not isinstance(self.output, Tensor):
            raise ArgumentError(
                f"{type(self).__name__} takes a model with one output, this one returns {type(self.output).__name__}"
            )
        self.dram_output_tensor = TABLE["to_memory_config"](self.output, self.dram_output_memory_config)
        self._handed_out()
        self.signal_read_complete()

    def execute(self, host_input: Tensor) -> Any:
        self._check_compiled()
        self._write(host_input)
        self._bring_input()
        self._input_was_read()
        self._replay()
        if self._output_read is not None:
            queues.wait_for_event(COMPUTE, self._output_read)
        assert self.dram_output_tensor is not None
        _reshard(self.output, self.dram_output_tensor)
        self._handed_out()
        return self.dram_output_tensor

    def _handed_out(self) -> None:
        """The output in DRAM may be read on the second queue."""
        queues.wait_for_event(TRANSFER, queues.record_event(self.device, COMPUTE))

    def get_read_cq(self) -> int:
        return TRANSFER

    def signal_read_complete(self) -> None:
        self._output_read = queues.record_event(self.device, TRANSFER)
