"""What things cost: the one place that planner, explain and simulator ask.

`compute` prices what one device does for a call, `collectives` what a collective takes. The figures come from a
`Machine`, which a user can print and replace.
"""

from meshloom.cost.collectives import fastest, price, price_of
from meshloom.cost.compute import Load, load_of

__all__ = ["Load", "fastest", "load_of", "price", "price_of"]
