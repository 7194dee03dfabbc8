"""Deciding: which row of a rule on which mesh axis, and which collectives bring the operands there.

Start with `plan`. Everything here is a pure function of frozen values, so that every process decides the same.
"""

from meshloom.planner.plan import Considered, Plan, consider, plan, retype
from meshloom.planner.redistribution import moves, route, settle, stations
from meshloom.planner.requests import Advice, Change, Move, Step, cheapest_requests
from meshloom.planner.strategies import STRATEGIES, Strategy, strategy_of

__all__ = [
    "STRATEGIES",
    "Advice",
    "Change",
    "Considered",
    "Move",
    "Plan",
    "Step",
    "Strategy",
    "cheapest_requests",
    "consider",
    "moves",
    "plan",
    "retype",
    "route",
    "settle",
    "stations",
    "strategy_of",
]
