"""A plan carried out by the processes that share its mesh. Dispatch asks for a kernel here."""

from meshloom.backends.spread import kernel_of

__all__ = ["kernel_of"]
