"""What is going on in this thread: who is watching, what may be communicated, what the next op was asked for."""

from meshloom.errors import where
from meshloom.runtime.records import Event, Log, Policy, State, state

__all__ = ["Event", "Log", "Policy", "State", "state", "where"]
