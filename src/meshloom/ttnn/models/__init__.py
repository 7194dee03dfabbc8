"""Module paths of TTNN's model collection, for programs that import `models.tt_cnn.tt.pipeline`.

    import sys
    from meshloom import ttnn
    from meshloom.ttnn import models
    sys.modules["models"] = models

From then on `from models.tt_cnn.tt.pipeline import PipelineConfig, create_pipeline_from_config` works.
"""
