"""What the machine under the mesh can do, as values that a user can print and replace."""

from meshloom.fabric.axis import AxisLinks
from meshloom.fabric.catalogue import Preset, load_preset, preset, preset_names
from meshloom.fabric.fabric import Fabric
from meshloom.fabric.links import Link
from meshloom.fabric.machine import VIRTUAL, Machine

__all__ = ["VIRTUAL", "AxisLinks", "Fabric", "Link", "Machine", "Preset", "load_preset", "preset", "preset_names"]
