"""Products that sum over labels."""

from __future__ import annotations

from meshloom.ops import contractions
from meshloom.ops.labels import labels
from meshloom.ops.rule import Op

CONTRACTIONS: tuple[Op, ...] = (
    Op("matmul", labels(contractions.matmul_spec, "input", "other"), "input, other", "trimmed"),
    Op("mm", labels("mk, kn -> mn", "input", "mat2"), "input, mat2", "trimmed"),
    Op("bmm", labels("bmk, bkn -> bmn", "input", "mat2"), "input, mat2", "trimmed"),
    Op("mv", labels("mk, k -> m", "input", "vec"), "input, vec", "trimmed"),
    Op("dot", labels("k, k -> ", "input", "tensor"), "input, tensor"),
    Op("linear", labels("...k, nk -> ...n", "input", "weight", bias="bias"), "input, weight, bias=None", "trimmed"),
    Op("einsum", contractions.einsum, "equation, *operands", "trimmed"),
)
