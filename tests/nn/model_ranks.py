"""What ranks run in the tests of `nn`: models on a mesh that processes split."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")


import meshloom as loom
import model_matrix


def matrix(cases: list[tuple[str, str]], axes: tuple[str, ...] = ("tp",)) -> list[str]:
    """Models and plans on a mesh of one device per process; what was checked."""
    shape = (int(os.environ["WORLD_SIZE"]),) if len(axes) == 1 else (2, int(os.environ["WORLD_SIZE"]))
    mesh = loom.open_mesh(shape, axes=axes, processes=None if len(axes) == 1 else (1, shape[1]))
    assert mesh.is_split
    for name, plan in cases:
        try:
            model_matrix.check(name, plan, mesh)
        except Exception as error:
            raise AssertionError(f"{name} with plan {plan}") from error
    return [f"{name} {plan}" for name, plan in cases]
