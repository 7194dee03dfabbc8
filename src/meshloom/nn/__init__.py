"""From a model to a mesh: plans of models, what carries them out, and data. Start with `Plan` and `parallelize`."""

from meshloom.nn import data, plans
from meshloom.nn.parallelize import mesh_of, parallelize, plan_of, unparallelize
from meshloom.nn.pipeline import Pipeline, pipeline
from meshloom.nn.plan import Plan

__all__ = [
    "Pipeline",
    "Plan",
    "data",
    "mesh_of",
    "parallelize",
    "pipeline",
    "plan_of",
    "plans",
    "unparallelize",
]
