"""Products that sum over labels."""

from __future__ import annotations

from meshloom.ops import contractions
from meshloom.ops.labels import labels
from meshloom.ops.rule import Op

_SCALED = ", *, beta=1, alpha=1"
_CDIST = "x1, x2, p=2.0, compute_mode='use_mm_for_euclid_dist_if_necessary'"
_BATCHES = ("batch1", "batch2")

CONTRACTIONS: tuple[Op, ...] = (
    Op(
        "matmul",
        labels(contractions.matmul_spec, "input", "other"),
        "input, other",
        "trimmed",
        is_fresh=True,
        is_cast=True,
        takes_out=True,
    ),
    Op("mm", labels("mk, kn -> mn", "input", "mat2"), "input, mat2", "trimmed", is_fresh=True, takes_out=True),
    Op("bmm", labels("bmk, bkn -> bmn", "input", "mat2"), "input, mat2", "trimmed", is_fresh=True),
    Op("mv", labels("mk, k -> m", "input", "vec"), "input, vec", "trimmed", is_fresh=True),
    Op("dot", labels("k, k -> ", "input", "tensor"), "input, tensor", is_fresh=True),
    Op(
        "linear",
        labels("...k, nk -> ...n", "input", "weight", bias="bias"),
        "input, weight, bias=None",
        "trimmed",
        is_fresh=True,
    ),
    Op(
        "einsum",  # of one operand it is a sum
        contractions.einsum,
        "equation, *operands",
        "trimmed",
        result="einsum",
        is_fresh=True,
        surface="function",
    ),
    Op("outer", labels("m, n -> mn", "input", "vec2"), "input, vec2", "trimmed"),
    Op("inner", labels(contractions.inner_spec, "input", "other"), "input, other", "trimmed"),
    Op("vdot", labels("k, k -> ", "input", "other"), "input, other"),
    Op("tensordot", labels(contractions.tensordot_spec, "a", "b"), "a, b, dims=2", "trimmed"),
    Op(
        "bilinear",
        labels("...i, ...j, oij -> ...o", "input1", "input2", "weight", bias="bias"),
        "input1, input2, weight, bias=None",
        "trimmed",
    ),
    Op("grouped_mm", contractions.grouped_mm, "input, mat2, offs", "trimmed", result="input"),
    Op("expert_mm", contractions.expert_mm, "input, mat2, number", "trimmed", result="input", surface="inner"),
    Op("cdist", contractions.cdist, _CDIST, "trimmed", result="float"),
    # a product that is added to something
    Op("addmm", labels("mk, kn -> mn", "mat1", "mat2", bias="input"), "input, mat1, mat2" + _SCALED, "trimmed"),
    Op("addmv", labels("mk, k -> m", "mat", "vec", bias="input"), "input, mat, vec" + _SCALED, "trimmed"),
    Op("addr", labels("m, n -> mn", "vec1", "vec2", bias="input"), "input, vec1, vec2" + _SCALED, "trimmed"),
    Op("addbmm", labels("bmk, bkn -> mn", *_BATCHES, bias="input"), "input, batch1, batch2" + _SCALED, "trimmed"),
    Op("baddbmm", labels("bmk, bkn -> bmn", *_BATCHES, bias="input"), "input, batch1, batch2" + _SCALED, "trimmed"),
)
