"""`meshloom.ttnn.pipeline` under the path that TTNN's model collection has it."""

from meshloom.ttnn.pipeline import (
    Pipeline as Pipeline,
    PipelineConfig as PipelineConfig,
    create_pipeline_from_config as create_pipeline_from_config,
    get_memory_config_for_persistent_dram_tensor as get_memory_config_for_persistent_dram_tensor,
    pipeline as pipeline,
)
