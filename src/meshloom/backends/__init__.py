"""What leaves this process: nothing, or `torch.distributed`. Dispatch asks for a kernel and for movement here."""

from meshloom.backends.leaves import collect, drop, summed, twins
from meshloom.backends.moving import dense, move
from meshloom.backends.spread import Spread
from meshloom.backends.world import WORLD, join
from meshloom.engines.kernel import Kernel
from meshloom.planner import Plan


def kernel_of(plan: Plan) -> Kernel:
    """What carries a plan out: in this process, or with the others that hold the mesh."""
    return Spread(plan) if plan.mesh.is_split else Kernel(plan)


__all__ = ["WORLD", "collect", "dense", "drop", "join", "kernel_of", "move", "summed", "twins"]
