"""`meshloom.ttnn.pipeline` under the path that TTNN's model collection has it."""

from meshloom.ttnn.pipeline import (
    Pipeline as Pipeline,
)
from meshloom.ttnn.pipeline import (
    PipelineConfig as PipelineConfig,
)
from meshloom.ttnn.pipeline import (
    create_pipeline_from_config as create_pipeline_from_config,
)
from meshloom.ttnn.pipeline import (
    get_memory_config_for_persistent_dram_tensor as get_memory_config_for_persistent_dram_tensor,
)
from meshloom.ttnn.pipeline import (
    pipeline as pipeline,
)
