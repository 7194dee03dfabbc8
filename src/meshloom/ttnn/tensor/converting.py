"""Between torch and the mesh: `from_torch`, `to_torch`, and the defaults that `distribute` sets for both.

`from_torch` with a mapper and without a device gives a tensor on the host that knows its mesh; the first op that
computes with it moves it there. `to_torch` without a composer puts the parts together as the label says: sharded dims
are joined, terms are summed, one of equals is taken, padding of uneven dims is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy
import torch

from meshloom.errors import ArgumentError, DTypeError, OperandError
from meshloom.processes.divergence import is_compared, note_data
from meshloom.runtime import MeshShape
from meshloom.runtime.card_array import CardArray
from meshloom.ttnn.device import queues
from meshloom.ttnn.ops.calling import Optionals, op
from meshloom.ttnn.refusal_levels import refuse_addition, refuse_if
from meshloom.ttnn.tensor.boxes import Grid, gather_parts
from meshloom.ttnn.tensor.composers import ListMeshToTensor, MeshToTensor, whole
from meshloom.ttnn.tensor.formats import DataType, Layout, rounded, ttnn_dtype_to_torch_dtype
from meshloom.ttnn.tensor.mappers import ReplicateTensorToMeshWrapper, TensorToMesh, mapper_of
from meshloom.ttnn.tensor.memory import DRAM_MEMORY_CONFIG
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import TILE, Tensor
from meshloom.ttnn.tensor.topology import ALONE
from meshloom.ttnn.tensor.transfers import move_to

__all__ = ["distribute"]

ALONE_GRID = (1, 1)

# The dtype that a tensor gets when none is asked for.
INFERRED = {
    torch.float32: DataType.FLOAT32,
    torch.bfloat16: DataType.BFLOAT16,
    torch.float16: DataType.BFLOAT16,
    torch.int8: DataType.INT8,
    torch.int16: DataType.UINT16,
    torch.int32: DataType.INT32,
    torch.int64: DataType.UINT32,
    torch.uint8: DataType.UINT8,
    torch.uint16: DataType.UINT16,
    torch.uint32: DataType.UINT32,
    torch.bool: DataType.UINT8,
}

Composer = MeshToTensor | ListMeshToTensor

_mapper: ContextVar[TensorToMesh | None] = ContextVar("mapper", default=None)
_composer: ContextVar[Composer | None] = ContextVar("composer", default=None)


@contextmanager
def distribute(default: Any) -> Iterator[None]:
    """Inside, `from_torch` maps with a mapper, or `to_torch` composes with a composer, where none is given."""
    if isinstance(default, (TensorToMesh, ReplicateTensorToMeshWrapper)):
        token: Any = _mapper.set(default.unwrap())
    elif isinstance(default, (MeshToTensor, ListMeshToTensor)):
        token = _composer.set(default)
    else:
        raise ArgumentValueError("Argument must be an instance of either TensorToMesh or MeshToTensor.")
    try:
        yield
    finally:
        token.var.reset(token)


class ArgumentValueError(ArgumentError, ValueError):
    """An argument that TTNN calls a bad value."""


# from torch


_OPTIONS = Optionals("spec tile pad_value cq_id", col_tilize=False)
_UNREAD = Optionals(preserve_nan_values=False, enable_bfloat_opt=False)


@op("from_torch", more=(_OPTIONS, _UNREAD))
def from_torch(
    tensor: torch.Tensor | numpy.ndarray,
    dtype=None,
    *,
    layout=None,
    device=None,
    memory_config=None,
    mesh_mapper=None,
    **how,
) -> Tensor:
    """A torch tensor (or numpy array) as parts of a mesh, or on the host; without a mapper every device gets all of it.

    >>> from meshloom import ttnn
    >>> mesh = ttnn.open_mesh_device(ttnn.MeshShape(2, 4))
    >>> x = ttnn.from_torch(torch.ones(16, 8), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    >>> x.shape, x.tensor_topology().placements()
    (Shape([2, 8]), [PlacementShard(0)])
    """
    spec, tile, pad_value, cq_id, col_tilize = _OPTIONS(how)
    if isinstance(tensor, numpy.ndarray):
        tensor = _from_numpy(tensor)
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(f"ttnn.from_torch takes a torch.Tensor or a numpy array, not a {type(tensor).__name__}")
    if spec is not None:
        given = {"dtype": dtype, "layout": layout, "memory_config": memory_config, "tile": tile}
        for name in [each for each, value in given.items() if value is not None]:
            raise OperandError(f"ttnn.from_torch: {name} must be None when spec is specified")
        dtype, layout, memory_config, tile = spec.dtype, spec.layout, spec.memory_config, spec.tile
    if tensor.is_complex():
        raise DTypeError(f"ttnn has no complex dtypes: got {tensor.dtype}", fix="torch.view_as_real(x)")
    kind = dtype or _infer_dtype(tensor)
    refuse_if(
        tile is not None and tile != TILE and _layout(kind, layout) is Layout.ROW_MAJOR,
        "Configuring a ROW MAJOR page config with a custom tile configuration is not supported.",
    )
    values = tensor.detach().transpose(-2, -1) if col_tilize else tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        raise ArgumentError(
            "ttnn.from_torch takes a dense tensor", got=tensor.layout, fix="x.to_dense(), x.dequantize()"
        )
    mapper = mapper_of(mesh_mapper, device) or _mapper.get()
    grid = mapper.grid if mapper is not None else getattr(device, "grid", None)  # what is no mesh is refused below
    if isinstance(grid, Grid) and is_compared():
        note_data("given to ttnn.from_torch", values)
    block, label, coords = mapper.map(values) if mapper is not None else (values[(None,) * 2], ALONE, None)
    made = Tensor(
        converted(block, kind, values, pad_value or 0.0),
        mapper.grid if mapper is not None else ALONE_GRID,
        kind,
        _layout(kind, layout),
        label,
        None,
        memory_config or DRAM_MEMORY_CONFIG,
        tile or TILE,
        pad_value or 0.0,
        coords,
        home=mapper.mesh if mapper is not None else None,
    )
    if device is not None:
        return move_to(made, device, made.memory_config(), cq_id, copies=False)
    if made.is_sharded():
        flaw = made.flaw_of_shards()
        refuse_if(flaw is not None, str(flaw), "give another shard spec")
    return made


def _from_numpy(array: numpy.ndarray) -> torch.Tensor:
    """An array as a torch tensor, in the order of bytes and the strides that torch has."""
    plain = numpy.require(array, array.dtype.newbyteorder("="), ["C", "W"])
    try:
        return torch.from_numpy(plain)
    except TypeError as error:
        raise DTypeError(f"torch has no counterpart of numpy's {array.dtype}", fix="array.astype('float32')") from error


def _infer_dtype(tensor: torch.Tensor) -> DataType:
    found = INFERRED.get(tensor.dtype)
    if found is None:
        raise DTypeError(
            f"{tensor.dtype} has no counterpart among ttnn's dtypes", fix="say which: from_torch(x, dtype=ttnn.float32)"
        )
    return found


def _layout(kind: DataType, asked: Layout | None) -> Layout:
    if not kind.is_block_float:
        return asked or Layout.ROW_MAJOR
    if asked is Layout.ROW_MAJOR:
        raise OperandError("Layout must be Layout::TILE for bfloat8_b or bfloat4_b!", fix="layout=ttnn.TILE_LAYOUT")
    return Layout.TILE


def converted(block: Block, kind: DataType, source: torch.Tensor | None = None, filled_with: float = 0.0) -> Block:
    """Values as a dtype can say them: fractions are cut off, uint16 stops at its ends, other integers wrap.

    It is never memory of `source`. What tiles are filled up with shares the exponents of block floats.

    >>> x = torch.tensor([1.6, -1.6, 300.0, 70000.0])
    >>> converted(x, DataType.UINT8).tolist(), converted(x, DataType.UINT16).tolist()
    ([1, 255, 44, 112], [1, 0, 300, 65535])
    """
    if block.is_floating_point() and not kind.is_float:
        block = block.trunc().to(torch.int64)
        if kind is DataType.UINT16:
            block = block.clamp(0, 0xFFFF)
    elif not kind.is_float or block.dtype in (torch.uint16, torch.uint32, torch.uint64, torch.bool):
        block = block.to(torch.int64)  # torch has few ops for unsigned ints
    elif kind.is_block_float and block.dtype is torch.float16:
        block = block.to(torch.bfloat16)  # the only way there for halves, rounded twice
    values = rounded(block, kind, filled_with).contiguous()
    is_shared = source is not None and values.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
    return values.clone() if is_shared else values


def from_data(
    data: Any, shape: Any = None, dtype: Any = None, layout: Any = None, *rest: Any, data_type: Any = None, **how: Any
) -> Tensor:
    """A tensor as TTNN's constructors make it: of another, of a list of numbers and a shape, or of an array.

    What else is told goes to `from_torch`; a memory config may be called `mem_config` too.
    """
    if isinstance(data, Tensor):
        return data._like(data.block.clone())
    given = {each: value for each, value in how.items() if value is not None}
    if "mem_config" in given:
        given.setdefault("memory_config", given.pop("mem_config"))
    if isinstance(data, (list, tuple)):
        values, kind = torch.tensor(data).reshape(tuple(shape)), data_type or dtype
        extra = dict(zip(("device", "memory_config", "tile", "pad_value"), rest, strict=False))
    else:  # (array, data_type, device, layout, mem_config, tile)
        values = _from_numpy(data) if isinstance(data, numpy.ndarray) else torch.as_tensor(data)
        kind = data_type or shape
        extra = dict(zip(("device", "memory_config", "tile"), (dtype, *rest), strict=False))
    return from_torch(values, kind, layout=layout, **{**extra, **given})


# to torch


@op("to_torch", spelled={"dtype": "torch_dtype"})
def to_torch(
    tensor, torch_dtype=None, *, torch_rank=None, mesh_composer=None, device=None, cq_id: int | None = None
) -> Any:
    """The whole as a torch tensor, put together by a composer, else as the label says.

    >>> from meshloom import ttnn
    >>> mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    >>> x = ttnn.from_torch(torch.arange(7.0), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    >>> x.shape, ttnn.to_torch(x)
    (Shape([4]), tensor([0., 1., 2., 3., 4., 5., 6.]))
    """
    if isinstance(tensor, torch.Tensor):
        return tensor
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"ttnn.to_torch takes a ttnn.Tensor, not a {type(tensor).__name__}")
    tensor.block  # noqa: B018  an error if it is gone
    if tensor.device() is not None:
        queues.transfer(tensor, cq_id, writes=False)
    if tensor.block.__class__ is CardArray:
        tensor = tensor._like(tensor.block, device=None, home=None)
    composer = mesh_composer if mesh_composer is not None else _composer.get()
    if composer is None and len(tensor.device_coords()) > 1:
        refuse_addition(
            f"Can't convert a tensor distributed on {MeshShape(tensor.grid)} mesh to row-major logical tensor. "
            "Supply a mesh composer to concatenate multi-device shards.",
            "ttnn.to_torch(tensor, mesh_composer=...)",
        )
    parts = gather_parts(tensor, by_label=composer is None)
    found = composer.compose(parts) if composer is not None else whole(parts)
    if torch_dtype is not None and not isinstance(torch_dtype, torch.dtype):
        raise ArgumentError(f"ttnn.to_torch: dtype={torch_dtype!r} is not a torch.dtype")
    kind = torch_dtype or ttnn_dtype_to_torch_dtype(tensor.dtype)
    if isinstance(found, list):
        return [_hand_back(each, kind, torch_rank, parts) for each in found]
    return _hand_back(found, kind, torch_rank, parts)


def _hand_back(values: torch.Tensor, kind: torch.dtype, rank: int | None, source: Tensor) -> torch.Tensor:
    values = values.to(kind)
    while rank is not None and values.dim() > rank:
        if values.shape[0] != 1:
            raise OperandError("ttnn: Unable to squeeze to desired rank!", shape=list(values.shape), rank=rank)
        values = values.squeeze(0)
    is_shared = values.untyped_storage().data_ptr() == source.block.untyped_storage().data_ptr()
    return values.clone(memory_format=torch.contiguous_format) if is_shared else values.contiguous()


def host(values: torch.Tensor, like: Tensor) -> Tensor:
    """One tensor on the host, alone, in the format of another."""
    block = rounded(values[(None,) * 2], like.dtype)
    return Tensor(block, ALONE_GRID, like.dtype, like.layout, ALONE, tile=like.tile)
