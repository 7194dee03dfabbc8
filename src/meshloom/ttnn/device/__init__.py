"""What programs run on: devices and meshes of them, cores, queues, links, sockets, processes.

`ttnn.device.name` answers from `mesh_device.py`, as the original's module of that name does.
"""

from __future__ import annotations

from meshloom.ttnn.surface import stand_in

__getattr__ = stand_in(__name__, __path__, "mesh_device")
