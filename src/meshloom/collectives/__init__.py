"""Collectives as data: what they are called, what they move and how many steps they take."""

from meshloom.collectives.kinds import KINDS, Collective, Kind, price

__all__ = ["KINDS", "Collective", "Kind", "price"]
