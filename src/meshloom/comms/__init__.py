"""What leaves a device or this process: groups, three modes of collectives, schedules, redistribution, gradients.

group.py            who communicates: devices along some axes, and the processes that hold them; one process included
wire.py             one collective of `torch.distributed` each
gradients.py        each collective with its counterpart on the way back
peers.py            the processes as the peers of an op's formula
deferred.py         gradients of replicated leaves, summed once at the end of backward
redistribution.py   from one topology to another
weights.py          full sharding: weights gathered for a use, and not kept
scatters.py         full sharding: gradients on their way to the shards
schedules.py        a schedule carried out on arrays, step by step
modes.py            direct, host, fabric: one meaning, three ways to carry it out
literal.py          collectives on what each device holds
handles.py          collectives that are under way
"""

from meshloom.comms.group import WORLD, Group, group_of, members_of
from meshloom.comms.redistribution import move, mover

__all__ = ["WORLD", "Group", "group_of", "members_of", "move", "mover"]
