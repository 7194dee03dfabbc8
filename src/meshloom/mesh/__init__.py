"""The mesh: an N-D grid of device coordinates with named axes. Start with `Mesh`."""

from meshloom.mesh.mesh import Coordinate, Lease, Mesh
from meshloom.mesh.process import HERE, Process

__all__ = ["HERE", "Coordinate", "Lease", "Mesh", "Process"]
