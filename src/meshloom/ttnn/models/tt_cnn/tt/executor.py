"""The executors of `meshloom.ttnn.pipeline` under the path that TTNN's model collection has them."""

from meshloom.ttnn.models.executors import (
    Executor as Executor,
    ModelExecutor as ModelExecutor,
    MultiCQModelOverlappedInputExecutor as MultiCQModelOverlappedInputExecutor,
    MultiCQTracedModelOverlappedInputExecutor as MultiCQTracedModelOverlappedInputExecutor,
    MultiCQTracedModelPipelinedIOExecutor as MultiCQTracedModelPipelinedIOExecutor,
    TracedModelExecutor as TracedModelExecutor,
)
