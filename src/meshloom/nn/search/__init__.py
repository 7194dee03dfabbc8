"""`loom.autoplan`: the fastest plan of a model on a machine that fits into its memory. Start with `autoplan`.

`blocks.py` folds equal blocks, `recipes.py` has what can be chosen, `meshes.py` the meshes, `trials.py` prices a
choice by dry runs, `staging.py` has pipelines, `choosing.py` searches, `ranking.py` is the answer.
"""

from __future__ import annotations

from meshloom.nn.search.autoplan import autoplan
from meshloom.nn.search.ranking import Candidate, Ranking

__all__ = ["Candidate", "Ranking", "autoplan"]
