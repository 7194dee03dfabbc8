"""Collective algorithms: pure functions from a group and a fabric to a schedule, in one table."""

from meshloom.collectives.algorithms.choice import Candidate, best, candidates, choose
from meshloom.collectives.algorithms.formulas import Formula
from meshloom.collectives.algorithms.table import ALGORITHMS, NEEDS, Algorithm, algorithm, algorithms_of

__all__ = [
    "ALGORITHMS",
    "NEEDS",
    "Algorithm",
    "Candidate",
    "Formula",
    "algorithm",
    "algorithms_of",
    "best",
    "candidates",
    "choose",
]
