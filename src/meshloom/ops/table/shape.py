"""Ops that move elements about."""

from __future__ import annotations

from meshloom.ops import arranging, shapes
from meshloom.ops.rule import Op

SHAPE: tuple[Op, ...] = (
    Op("reshape", shapes.reshape, "input, *shape", is_view=True),
    Op("view", shapes.reshape, "input, *shape", is_view=True),
    Op("flatten", shapes.flatten, "input, start_dim=0, end_dim=-1", is_view=True),
    Op("squeeze", shapes.squeeze, "input, dim=None", is_view=True),
    Op("unsqueeze", shapes.unsqueeze, "input, dim", is_view=True),
    Op("permute", shapes.permute, "input, *dims", is_view=True),
    Op("transpose", shapes.transpose, "input, dim0, dim1", is_view=True),
    Op("expand", shapes.expand, "input, *size, implicit=False", is_view=True),
    Op("narrow", shapes.narrow, "input, dim, start, length", is_view=True),
    Op("getitem", shapes.getitem, "input, index", is_view=True, surface="function"),
    Op("split", shapes.split, "input, sections, dim=0", is_view=True),
    Op("chunk", shapes.split, "input, sections, dim=0", is_view=True),
    Op("tensor_split", shapes.split, "input, sections, dim=0", is_view=True),
    Op("cat", shapes.cat, "tensors, dim=0"),
    Op("stack", shapes.stack, "tensors, dim=0"),
    Op("unflatten", arranging.unflatten, "input, dim, sizes", is_view=True),
    Op("ravel", arranging.ravel, "input", is_view=True),
    Op("view_as_complex", arranging.as_complex, "input", is_view=True, result="complex"),
    Op("view_as_real", arranging.as_real, "input", is_view=True, result="real"),
    Op("movedim", arranging.movedim, "input, source, destination", is_view=True),
    Op("unbind", arranging.unbind, "input, dim=0", is_view=True),
    Op("unfold", arranging.unfold, "input, dimension, size, step", is_view=True),
    Op("diagonal", arranging.diagonal, "input, offset=0, dim1=0, dim2=1", is_view=True),
    Op("diag_embed", arranging.diag_embed, "input, offset=0, dim1=-2, dim2=-1"),
    Op("tril", arranging.triangle, "input, diagonal=0"),
    Op("triu", arranging.triangle, "input, diagonal=0"),
    Op("repeat", arranging.repeat, "input, *repeats"),
    Op("tile", arranging.repeat, "input, *repeats"),
    Op("repeat_interleave", arranging.repeat_interleave, "input, repeats, dim=None, *, output_size=None"),
    Op("roll", arranging.roll, "input, shifts, dims=None"),
    Op("flip", arranging.flip, "input, *dims"),
    Op("rot90", arranging.rot90, "input, k=1, dims=(0, 1)"),
    Op("pad", arranging.pad, "input, pad, mode='constant', value=None", "finite"),
    Op("meshgrid", arranging.meshgrid, "*tensors, indexing=None", "finite"),
    Op("pixel_shuffle", arranging.pixel_shuffle, "input, upscale_factor"),
    Op("pixel_unshuffle", arranging.pixel_shuffle, "input, downscale_factor"),
)
