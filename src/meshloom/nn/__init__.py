"""From a model to a mesh: plans of models, and what carries them out. Start with `Plan` and `parallelize`."""

from meshloom.nn import data

__all__ = ["data"]
