"""What the machine under the mesh can do, as values that a user can print and replace."""

from meshloom.fabric.machine import VIRTUAL, Machine

__all__ = ["VIRTUAL", "Machine"]
