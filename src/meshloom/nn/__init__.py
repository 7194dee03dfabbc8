"""From a model to a mesh: plans of models, what carries them out, and data. Start with `Plan` and `parallelize`."""

from meshloom.nn import data, plans
from meshloom.nn.parallelize import mesh_of, parallelize, plan_of, unparallelize
from meshloom.nn.plan import Plan
from meshloom.nn.search import autoplan

__all__ = ["Plan", "autoplan", "data", "mesh_of", "parallelize", "plan_of", "plans", "unparallelize"]
