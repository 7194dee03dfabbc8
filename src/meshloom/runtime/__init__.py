"""What is going on in this thread: who is watching, what may be communicated, what the next op was asked for."""

from meshloom.runtime.records import Event, Log, Policy, State, state, where

__all__ = ["Event", "Log", "Policy", "State", "state", "where"]
