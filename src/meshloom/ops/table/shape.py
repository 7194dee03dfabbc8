"""Ops that move elements about."""

from __future__ import annotations

from meshloom.ops import arranging, shapes
from meshloom.ops.rule import Op

SHAPE: tuple[Op, ...] = (
    Op("reshape", shapes.reshape, "input, *shape", view="order or copy"),
    Op("view", shapes.reshape, "input, *shape", view="order"),
    Op("flatten", shapes.flatten, "input, start_dim=0, end_dim=-1", view="order or copy"),
    Op("squeeze", shapes.squeeze, "input, dim=None", view="order"),
    Op("unsqueeze", shapes.unsqueeze, "input, dim", view="order"),
    Op("permute", shapes.permute, "input, *dims", view="elements"),
    Op("transpose", shapes.transpose, "input, dim0, dim1", view="elements"),
    Op("expand", shapes.expand, "input, *size, implicit=False", view="repeated"),
    Op("narrow", shapes.narrow, "input, dim, start, length", view="elements"),
    Op("getitem", shapes.getitem, "input, index", view="elements", surface="function"),
    Op("split", shapes.split, "input, sections, dim=0", view="several"),
    Op("chunk", shapes.split, "input, sections, dim=0", view="several"),
    Op("tensor_split", shapes.split, "input, sections, dim=0", view="several"),
    Op("cat", shapes.cat, "tensors, dim=0"),
    Op("stack", shapes.stack, "tensors, dim=0"),
    Op("unflatten", arranging.unflatten, "input, dim, sizes", view="order"),
    Op("ravel", arranging.ravel, "input", view="order or copy"),
    Op("view_as_complex", arranging.as_complex, "input", view="elements", result="complex"),
    Op("view_as_real", arranging.as_real, "input", view="elements", result="real"),
    Op("movedim", arranging.movedim, "input, source, destination", view="elements"),
    Op("unbind", arranging.unbind, "input, dim=0", view="several"),
    Op("unfold", arranging.unfold, "input, dimension, size, step", view="repeated"),
    Op("diagonal", arranging.diagonal, "input, offset=0, dim1=0, dim2=1", view="elements"),
    Op("diag_embed", arranging.diag_embed, "input, offset=0, dim1=-2, dim2=-1"),
    Op("tril", arranging.triangle, "input, diagonal=0", rewrites=True),
    Op("triu", arranging.triangle, "input, diagonal=0", rewrites=True),
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
