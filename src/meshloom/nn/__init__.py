"""From a model to a mesh: plans of models, what carries them out, and data. Start with `Plan` and `parallelize`."""

from meshloom.nn import data, experts, plans
from meshloom.nn.parallelize import mesh_of, parallelize, plan_of, unparallelize
from meshloom.nn.plan import Plan

__all__ = ["Plan", "data", "experts", "mesh_of", "parallelize", "plan_of", "plans", "unparallelize"]
