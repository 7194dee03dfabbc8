"""The environment, read here and nowhere else: one line per variable, with its type, its default and its meaning.

A setting that a program can give is an argument first (`open_mesh(timeout=60)`); a variable says it from outside.
`docs/settings.md` shows this table, and a test compares the two.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import NamedTuple


class Variable(NamedTuple):
    """One variable: the type of its text, what holds where it is not set, and what it means."""

    name: str
    kind: str
    default: str
    meaning: str


_TABLE = """
MESHLOOM_TIMEOUT          seconds  300        how long a collective may take before it is reported
MESHLOOM_CHECK            words    sample     how often ranks compare: always, sample, off; races: check ttnn's queues
MESHLOOM_DEVICE           text     -          cpu keeps the blocks of a rank off its GPU
MESHLOOM_DISPATCH         text     fast       slow runs every command of the mesh runtime at once, card by card
MESHLOOM_CACHE            path     -          the folder of compiled kernels; only its user may write there
MESHLOOM_BLACKHOLE        path     -          the folder of blackhole-py, the driver of Tenstorrent cards
MESHLOOM_SYSTEM           text     -          the devices that ttnn imitates: T3000, Galaxy, 2x4, 8
MESHLOOM_VIRTUAL_DEVICES  number   -          how many virtual devices there are, instead of looking for real ones
MESHLOOM_VISIBLE_DEVICES  numbers  -          the ids of the devices that this process sees; set and empty: none
MESHLOOM_MESH_ID          number   -          the mesh that this process belongs to
MESHLOOM_HOST_RANK        number   -          its place among the processes of that mesh, in the order of ranks
MESHLOOM_SECRET           text     -          the secret that the hosts of a run share
MESHLOOM_SECRET_FILE      path     -          the file of the secret; meshloom/secret in XDG_CONFIG_HOME
MESHLOOM_STORE            URL      -          where the ranks meet; set by `meshloom run`
MESHLOOM_CONTROLLER       text     -          where a worker finds its client, and their secret; set by loom.launch
MESHLOOM_LIFELINE         text     -          how a rank reports to its launcher; set by `meshloom run`
TT_VISIBLE_DEVICES        numbers  -          the same as MESHLOOM_VISIBLE_DEVICES
TT_MESH_ID                number   -          the same as MESHLOOM_MESH_ID
TT_MESH_HOST_RANK         number   -          the same as MESHLOOM_HOST_RANK
TT_METAL_CACHE            path     -          the folder of compiled kernels, where MESHLOOM_CACHE is not set
TT_MESH_GRAPH_DESC_PATH   path     -          handed on to ranks whose rank file names a mesh graph; not read
TTNN_CONFIG_PATH          path     -          a JSON file with settings of ttnn.CONFIG
TTNN_CONFIG_OVERRIDES     JSON     -          settings of ttnn.CONFIG, after those of the file
RANK                      number   0          the number of this process; set by torchrun or `meshloom run`
WORLD_SIZE                number   1          how many processes run the program together; set by them too
LOCAL_RANK                number   0          its number on this host, which chooses its GPU
LOCAL_WORLD_SIZE          number   -          how many processes there are on this host
GROUP_RANK                number   -          the number of this host
MASTER_ADDR               text     -          the address at which processes meet
MASTER_PORT               number   -          the port at which processes meet
TORCHELASTIC_USE_AGENT_STORE text  -          True where torchrun holds the store
GLOO_SOCKET_IFNAME        text     -          the network interface that joins the hosts
OMP_NUM_THREADS           number   -          the threads of a rank; `meshloom run` shares the cores out
RAY_ADDRESS               text     -          the Ray cluster on which loom.launch(on="ray") starts workers
XDG_CACHE_HOME            path     ~/.cache   the folder in which ttnn has its cache
XDG_CONFIG_HOME           path     ~/.config  the folder in which the file of the secret lies
"""


def _variable(line: str) -> Variable:
    name, kind, default, meaning = line.split(maxsplit=3)
    return Variable(name, kind, "" if default == "-" else default, meaning)


VARIABLES: dict[str, Variable] = {each.name: each for each in map(_variable, _TABLE.strip().splitlines())}


def read(name: str) -> str:
    """The text of a variable of the table; its default where it is not set, or empty.

    >>> read("MESHLOOM_DISPATCH")
    'fast'
    """
    return os.environ.get(name) or os.path.expanduser(VARIABLES[name].default)


def is_set(name: str) -> bool:
    """Whether a variable of the table is set, be it to nothing."""
    return VARIABLES[name].name in os.environ


def environment() -> MutableMapping[str, str]:
    """All of it: for what binds a process, and for what its children get."""
    return os.environ
