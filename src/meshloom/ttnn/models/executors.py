"""Ways to run a model on one input after the other: with or without a trace, with transfers on a queue of their own.

A model is a function of a tensor in L1. Every executor has a persistent input: where there is a trace, a replay reads
it at the address that it had when the trace was captured. What a trace returns is one tensor that every replay writes:
it has to be read, or copied, before the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from meshloom.errors import ArgumentError, OperandError
from meshloom.runtime.events import MeshEvent
from meshloom.ttnn.device import queues
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.device.queues import MeshTraceId
from meshloom.ttnn.ops.calling import TABLE
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.transfers import allocate_tensor_on_device, copy_host_to_device_tensor, share, to_device

Model = Callable[[Tensor], Any]

COMPUTE, TRANSFER = 0, 1  # the queues where there are two


def tensors_in(outputs: Any) -> list[Tensor]:
    """The tensors that a model returned, however they are nested."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, dict):
        outputs = outputs.values()
    return [tensor for each in outputs for tensor in tensors_in(each)]


def free(outputs: object) -> None:
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
    """With an input that stays in DRAM, at one address: traced or not, written on one queue or another."""

    is_traced = True
    writes_on: int | None = None  # the queue of transfers, if there are two
    _input_read: MeshEvent | None = None  # since when the input in DRAM may be written again

    def __init__(
        self,
        model: Model,
        device: MeshDevice,
        dram_input_memory_config: MemoryConfig,
        l1_input_memory_config: MemoryConfig,
        cq_id: int = COMPUTE,
    ) -> None:
        super().__init__(model, device, l1_input_memory_config)
        self.dram_input_memory_config, self.cq_id = dram_input_memory_config, cq_id
        self.dram_input_tensor: Tensor | None = None
        self.l1_input_tensor: Tensor | None = None
        self.trace_id: MeshTraceId | None = None

    def compile(self, host_input: Tensor) -> None:
        self.cleanup()
        self.dram_input_tensor = allocate_tensor_on_device(
            host_input.shape, host_input.dtype, host_input.layout, self.device, self.dram_input_memory_config
        )
        self._write(host_input)  # one run outside of any trace: what a model prepares on first use is there
        self.output = self.model(self._to_l1())
        free(self.output)
        if self.is_traced:
            self._capture()
        self._note_input_read()
        self._is_compiled = True

    def execute(self, host_input: Tensor) -> Any:
        self._check_compiled()
        self._write(host_input)
        if self.is_traced:
            assert self.dram_input_tensor is not None and self.l1_input_tensor is not None
            _reshard(self.dram_input_tensor, self.l1_input_tensor)
            self._note_input_read()
            assert self.trace_id is not None
            queues.execute_trace(self.device, self.trace_id, cq_id=self.cq_id, blocking=False)
        else:
            given = self._to_l1()
            self._note_input_read()
            self.output = self.model(given)
        return self.output

    def get_read_cq(self) -> int:
        return self.cq_id

    def cleanup(self) -> None:
        if self.trace_id is not None:
            queues.release_trace(self.device, self.trace_id)
            self.trace_id = None
        self._is_compiled, self._input_read = False, None

    def _write(self, host_input: Tensor) -> None:
        """An input to DRAM; on a queue of its own, when the other has read the one before."""
        assert self.dram_input_tensor is not None
        if self.writes_on is None:
            copy_host_to_device_tensor(host_input, self.dram_input_tensor, self.cq_id)
            return
        if self._input_read is not None:
            queues.wait_for_event(self.writes_on, self._input_read)
        copy_host_to_device_tensor(host_input, self.dram_input_tensor, self.writes_on)
        self._hand_over()

    def _hand_over(self) -> None:
        """What the queue of transfers has written may be read on the one that computes."""
        queues.wait_for_event(self.cq_id, queues.record_event(self.device, self.writes_on))

    def _note_input_read(self) -> None:
        if self.writes_on is not None:
            self._input_read = queues.record_event(self.device, self.cq_id)

    def _to_l1(self) -> Tensor:
        found: Tensor = TABLE["to_memory_config"](self.dram_input_tensor, self.l1_input_memory_config)
        return found

    def _capture(self) -> None:
        """Capture the model on an input in L1, which keeps its place also when the model frees it."""
        given = self._to_l1()
        self.l1_input_tensor = share(given)
        self.trace_id = queues.begin_trace_capture(self.device, cq_id=self.cq_id)
        try:
            queues.hold(given)
            self.output = self.model(given)
        finally:
            queues.end_trace_capture(self.device, self.trace_id, cq_id=self.cq_id)


class TracedModelExecutor(_Persistent):
    """One queue and a trace: inputs are written to DRAM, brought to L1, and the trace is replayed."""


class MultiCQModelOverlappedInputExecutor(_Persistent):
    """Two queues, no trace: inputs are written on the second while the first computes."""

    is_traced, writes_on = False, TRANSFER


class MultiCQTracedModelOverlappedInputExecutor(_Persistent):
    """Two queues and a trace: inputs are written on the second while the first computes."""

    writes_on = TRANSFER


class MultiCQTracedModelPipelinedIOExecutor(_Persistent):
    """Two queues and a trace: inputs and outputs go on the second queue, by way of DRAM, while the first computes."""

    requires_minimum_inputs, writes_on = 2, TRANSFER

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
        self._output_read: MeshEvent | None = None  # since when the output in DRAM may be written again

    def compile(self, host_input: Tensor) -> None:
        super().compile(host_input)
        if not isinstance(self.output, Tensor):
            raise ArgumentError(
                f"{type(self).__name__} takes a model with one output, this one returns {type(self.output).__name__}"
            )
        self.dram_output_tensor = TABLE["to_memory_config"](self.output, self.dram_output_memory_config)
        self._hand_out()
        self.signal_read_complete()

    def execute(self, host_input: Tensor) -> Any:
        super().execute(host_input)
        if self._output_read is not None:
            queues.wait_for_event(COMPUTE, self._output_read)
        assert self.dram_output_tensor is not None
        _reshard(self.output, self.dram_output_tensor)
        self._hand_out()
        return self.dram_output_tensor

    def _hand_out(self) -> None:
        """The output in DRAM may be read on the second queue."""
        queues.wait_for_event(TRANSFER, queues.record_event(self.device, COMPUTE))

    def get_read_cq(self) -> int:
        return TRANSFER

    def signal_read_complete(self) -> None:
        self._output_read = queues.record_event(self.device, TRANSFER)
