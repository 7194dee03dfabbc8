"""Reading the printed notation back: `parse(str(x)) == x` for meshes, placements and topologies."""

from __future__ import annotations

import re

from meshloom.errors import NotationError, expect
from meshloom.mesh import Mesh
from meshloom.placement.placements import Placement
from meshloom.placement.spelling import as_placements, read_placements
from meshloom.placement.topology import Topology
from meshloom.types import check_dtype

_MESH = re.compile(r"Mesh\((?P<axes>[^\[\]]*?)(?:,\s*ids=\[(?P<ids>[\d, ]*)\])?\)\Z")
_AXIS = re.compile(r"\s*(\w+)\s*=\s*(\d+)\s*\Z")
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]\((?P<placements>.*)\) on (?P<mesh>Mesh\(.*\))\Z")


def parse(text: str) -> Mesh | Placement | tuple[Placement, ...] | Topology:
    """The value that a printed text stands for.

    >>> parse("f32[16, 8](S(0), R) on Mesh(dp=2, tp=4)").local_shape
    (8, 8)
    >>> parse("Mesh(dp=2, tp=4)"), parse("S(0)"), parse("(S(0), R)")
    (Mesh(dp=2, tp=4), Shard(dim=0), (Shard(dim=0), Replicate()))
    """
    expect("text", text, str, fix='parse takes the printed notation, such as "f32[16, 8](S(0), R) on Mesh(dp=2, tp=4)"')
    bare = text.strip()
    if bare.startswith("Mesh("):
        return _read_mesh(bare)
    tensor = _TENSOR.match(bare)
    if tensor is not None:
        return _read_topology(tensor)
    found = read_placements(bare)
    return found[0] if len(found) == 1 and not bare.startswith("(") else found


def _read_mesh(text: str) -> Mesh:
    whole = _MESH.match(text)
    parts = [] if whole is None or not whole["axes"].strip() else whole["axes"].split(",")
    axes = [_AXIS.match(part) for part in parts]
    if whole is None or None in axes:
        raise NotationError(f"{text!r} is not a mesh", fix="write it as Mesh(dp=2, tp=4)")
    named = [(axis[1], int(axis[2])) for axis in axes if axis is not None]
    ids = None if whole["ids"] is None else _numbers(whole["ids"])
    return Mesh.of(tuple(size for _, size in named), tuple(name for name, _ in named), device_ids=ids)


def _read_topology(match: re.Match[str]) -> Topology:
    shape, mesh = _numbers(match["shape"]), _read_mesh(match["mesh"])
    placements = as_placements(match["placements"], mesh, len(shape))
    return Topology(mesh, placements, shape, check_dtype(match["dtype"]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())
