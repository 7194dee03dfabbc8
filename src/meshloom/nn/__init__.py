"""From a model to a mesh: plans of models, and what carries them out. Start with `Plan` and `parallelize`."""

from meshloom.nn import plans
from meshloom.nn.parallelize import mesh_of, parallelize, plan_of, unparallelize
from meshloom.nn.plan import Plan

__all__ = ["Plan", "mesh_of", "parallelize", "plan_of", "plans", "unparallelize"]
