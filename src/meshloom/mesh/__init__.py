"""The mesh: an N-D grid of device coordinates with named axes. Start with `Mesh`."""

from meshloom.mesh.mesh import Coordinate, Mesh

__all__ = ["Coordinate", "Mesh"]
