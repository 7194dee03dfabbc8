"""Drivers: what opens cards of one kind. The virtual cards of this process are in `runtime.virtual`."""
