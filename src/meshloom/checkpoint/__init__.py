"""Weights and training states in files: any mesh reads what any mesh wrote.

weights.py   files of weights, read by slices
"""

from meshloom.checkpoint.weights import Weights, open_weights

__all__ = ["Weights", "open_weights"]
