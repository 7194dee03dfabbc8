"""From a model to a mesh: plans of models, what carries them out, and data.

Start with `Plan`, `parallelize` and `autoplan`.
"""

from meshloom.nn import data, experts, plans
from meshloom.nn.parallelize import mesh_of, parallelize, plan_of, unparallelize
from meshloom.nn.pipeline import Pipeline, pipeline
from meshloom.nn.plan import Plan
from meshloom.nn.search import Candidate, Ranking, autoplan

__all__ = [
    "Candidate",
    "Pipeline",
    "Plan",
    "Ranking",
    "autoplan",
    "data",
    "experts",
    "mesh_of",
    "parallelize",
    "pipeline",
    "plan_of",
    "plans",
    "unparallelize",
]
