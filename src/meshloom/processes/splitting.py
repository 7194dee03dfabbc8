"""How the processes of a run share a mesh: which of them belong to it, the box of each, and the devices in the box.

Without a mesh id all processes belong to one mesh. With ids (`TT_MESH_ID`) it is the processes of one id that do: all
of them, or each alone. Where processes name the devices that they see (`TT_VISIBLE_DEVICES`), those of a process are
the devices of its box.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import chain

from meshloom.comms.group import WORLD
from meshloom.errors import BindingError, MeshError
from meshloom.mesh import HERE, Mesh
from meshloom.mesh.process import counts, divide
from meshloom.processes.bindings import MESH_ID, VISIBLE, Place, read_place
from meshloom.processes.discovery import control


def split_mesh(mesh: Mesh, processes: Sequence[int] | None = None, stacklevel: int = 3) -> Mesh:
    """A mesh as the processes of this run hold it: split into equal boxes, or with a warning all of it by each.

    `processes` is the grid that it has been split by already. The warning points at the line `stacklevel` calls up.
    """
    if processes is not None and math.prod(processes) not in (1, HERE.count):
        raise MeshError(
            f"a grid of {tuple(processes)} processes needs {math.prod(processes)} of them and there are {HERE.count}",
            mesh=mesh,
            fix="start as many with torchrun or `meshloom run --nproc`, or leave processes= out",
        )
    if processes is not None or HERE.count == 1:
        return mesh
    split = mesh.split(HERE.count)
    if not split.is_split:
        fitting = ", ".join(map(str, counts(mesh.shape)))
        warnings.warn(
            f"{HERE.count} processes cannot split {mesh} into equal boxes, so each of them computes all of it; "
            f"these numbers of processes would split it: {fitting}",
            stacklevel=stacklevel,
        )
    return split


def split_bound(mesh: Mesh, processes: Sequence[int] | None = None, stacklevel: int = 4) -> Mesh:
    """The same for a mesh of a device, which the environment may bind: by mesh id, host rank and visible devices."""
    alone = HERE.count == 1 or is_alone()
    split = mesh if alone else split_mesh(mesh, processes, stacklevel)
    _, host_rank, _ = read_place()
    if host_rank is not None and (split.is_split or alone):
        control(split)  # an error if the host rank is not this process's
    return split


def is_alone() -> bool:
    """Whether the mesh of this process is its own: every process has a mesh id that no other has."""
    places: list[Place] = WORLD.bindings
    ids = [mesh_id for mesh_id, *_ in places]
    if len(set(ids)) <= 1:
        return len(ids) <= 1
    if None in ids:
        raise BindingError(
            f"rank {ids.index(None)} has no mesh id while others do",
            missing=" or ".join(MESH_ID),
            fix="set it for every process, or for none",
        )
    if len(set(ids)) == len(ids):
        return True
    shared = next(each for each in ids if ids.count(each) > 1)
    ranks = ", ".join(str(rank) for rank, each in enumerate(ids) if each == shared)
    raise BindingError(
        f"ranks {ranks} of {len(ids)} belong to mesh {shared}: a mesh over some of the processes is not supported",
        found=f"mesh ids {ids} in the order of ranks",
        fix=f"give all processes one {MESH_ID[1]}, or each its own; or start one run for each mesh",
    )


def visible_ids() -> list[int] | None:
    """The ids of all devices that the processes of this mesh see, in the order of ranks.

    Processes of several hosts may give their devices the same ids: then the devices are counted through. None where
    nothing binds them, or one process has all of them: `discover` then knows.
    """
    seen = _seen_by_each()
    if seen is None:
        return None
    listed = list(chain.from_iterable(seen))
    return listed if len(set(listed)) == len(listed) else list(range(len(listed)))


def bound_ids(shape: Sequence[int]) -> list[int] | None:
    """The ids of the devices of a mesh, row-major: those of a process's box are the first that it sees.

    None where nothing binds them, or one process has all of them.
    """
    seen, grid = _seen_by_each(), divide(shape, HERE.count)
    if seen is None or grid is None:
        return None
    each = math.prod(shape) // len(seen)
    short = next((rank for rank, ids in enumerate(seen) if len(ids) < each), None)
    if short is not None:
        raise BindingError(
            f"a mesh of shape {tuple(shape)} needs {each} devices of each of {len(seen)} processes, and rank {short} "
            f"sees {len(seen[short])}",
            found="; ".join(f"rank {rank}: {','.join(map(str, ids))}" for rank, ids in enumerate(seen)),
            fix=f"open a smaller mesh, or name {each} devices in {VISIBLE[1]} of every process",
        )
    every, starts = visible_ids() or [], [sum(len(ids) for ids in seen[:rank]) for rank in range(len(seen))]
    mesh = Mesh.of(shape, processes=grid)
    found = [0] * mesh.size
    for rank, start in enumerate(starts):
        for number, place in enumerate(mesh.local_coordinates(rank)):
            found[mesh.index(place)] = every[start + number]
    return found


def _seen_by_each() -> list[tuple[int, ...]] | None:
    """The ids that every process of this mesh sees, in the order of ranks; None where nothing restricts them, or one
    process has all of it."""
    if HERE.count == 1 or is_alone():
        return None
    seen = [None if ids is None else tuple(ids) for *_, ids in WORLD.bindings]
    if None in seen and any(each is not None for each in seen):
        raise BindingError(
            f"rank {seen.index(None)} does not name the devices that it sees, while others do",
            missing=" or ".join(VISIBLE),
            fix="set it for every process, or for none",
        )
    return None if None in seen else [each for each in seen if each is not None]
