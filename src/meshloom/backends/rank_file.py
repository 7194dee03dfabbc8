"""The path that `processes.rank_file` had, kept for one release."""

from meshloom.processes.rank_file import bindings_from, bindings_to, read_bindings, write_bindings

__all__ = ["bindings_from", "bindings_to", "read_bindings", "write_bindings"]
