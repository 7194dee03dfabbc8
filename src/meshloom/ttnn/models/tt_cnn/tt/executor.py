"""The executors of `meshloom.ttnn.pipeline` under the path that TTNN's model collection has them."""

from meshloom.ttnn.executors import (
    Executor as Executor,
)
from meshloom.ttnn.executors import (
    ModelExecutor as ModelExecutor,
)
from meshloom.ttnn.executors import (
    MultiCQModelOverlappedInputExecutor as MultiCQModelOverlappedInputExecutor,
)
from meshloom.ttnn.executors import (
    MultiCQTracedModelOverlappedInputExecutor as MultiCQTracedModelOverlappedInputExecutor,
)
from meshloom.ttnn.executors import (
    MultiCQTracedModelPipelinedIOExecutor as MultiCQTracedModelPipelinedIOExecutor,
)
from meshloom.ttnn.executors import (
    TracedModelExecutor as TracedModelExecutor,
)
