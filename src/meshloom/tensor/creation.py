"""Making tensors: open a mesh, put data on it, fill it, draw it.

Without placements a new tensor is sharded on dim 0 by every mesh axis; a 0-d tensor is replicated. Without a mesh it
goes to the mesh that was opened last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy
import torch

from meshloom.comms import WORLD, move
from meshloom.engines.layout import empty_stored, from_block, short_name, torch_dtype
from meshloom.errors import ArgumentError, MeshError, OutOfMemoryError, PlacementError, ShapeError, closest, expect
from meshloom.mesh import Coordinate, Mesh
from meshloom.placement import Placement, Placements, Replicate, Shard, Topology, as_placements, spell
from meshloom.processes import join
from meshloom.processes.discovery import visible_mesh
from meshloom.processes.divergence import is_compared, note_data
from meshloom.processes.parts import Part, described
from meshloom.processes.splitting import split_mesh
from meshloom.runtime import state
from meshloom.tensor import random
from meshloom.tensor.base import Tensor
from meshloom.tensor.clients import sent
from meshloom.tensor.moving import same_storage
from meshloom.tensor.refusals import refuse_partial_leaf
from meshloom.types import Shape

Dense = Callable[..., torch.Tensor]  # of `dtype` and `device`, by name

_opened: list[Mesh] = []


def open_mesh(
    shape: Sequence[int] | int | None = None,
    axes: Sequence[str] | None = None,
    *,
    device_ids: Sequence[int] | None = None,
    physical: Sequence[int] | None = None,
    processes: Sequence[int] | None = None,
    timeout: float | None = None,
    check: str | None = None,
) -> Mesh:
    """A mesh of virtual devices: any shape, any size, any time. Without a shape, a line of all visible devices.

    `physical` gives the shape of the physical devices under it: a program for 4x4 virtual devices runs on 2x2.

    Under `torchrun` or `meshloom run` the processes split the mesh into equal boxes, left axis first; `processes` gives
    another grid, one number per axis. `timeout` is how many seconds a collective may take before it is reported as
    hung, `check` how often processes compare what they do: "always", "sample" or "off".

    >>> open_mesh((2, 4), axes=("dp", "tp"))
    Mesh(dp=2, tp=4)
    """
    if shape is None:
        seen = visible_mesh()
        shape, device_ids = seen.shape, device_ids or seen.device_ids
    if not isinstance(shape, (int, Sequence)):
        raise MeshError(
            f"shape={shape!r} is of type {type(shape).__name__}", fix="give a size per axis, such as (2, 4)"
        )
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    join(timeout, check)
    _opened[:] = [split_mesh(Mesh.of(sizes, axes, device_ids, physical, processes), processes)]
    return _opened[0]


def current_mesh() -> Mesh:
    """The mesh that was opened last.

    >>> mesh = open_mesh((2, 4))
    >>> current_mesh() is mesh
    True
    """
    if not _opened:
        raise MeshError("no mesh is open", fix='open one: mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))')
    return _opened[-1]


def _choose_mesh(mesh: Mesh | None) -> Mesh:
    found = getattr(mesh, "mesh", mesh) if mesh is not None else current_mesh()  # a MeshDevice has a mesh
    if not isinstance(found, Mesh):
        raise MeshError(f"mesh= takes a mesh, not {found!r}", fix="open one with loom.open_mesh((2, 4))")
    if found.lease is not None:
        found.lease.check_making()
    return found


def automatic(mesh: Mesh, shape: Shape) -> tuple[Placement, ...]:
    """The placements of a tensor nobody placed: every mesh axis shards dim 0, a 0-d tensor is R."""
    return ((Shard(0) if shape else Replicate()),) * mesh.ndim


def _topology(shape: Shape, dtype: torch.dtype, mesh: Mesh | None, placements: Placements | None) -> Topology:
    where = _choose_mesh(mesh)
    placed = automatic(where, shape) if placements is None else as_placements(placements, where, len(shape))
    return Topology(where, placed, shape, short_name(dtype))


def place(data: torch.Tensor, mesh: Mesh | None, placements: Placements | None) -> Tensor:
    """A dense torch tensor on a mesh; may share memory with it."""
    topology = _topology(tuple(data.shape), data.dtype, mesh, placements)
    if topology.mesh.is_elsewhere:
        data = data.to("meta")
    elif topology.mesh.is_split and not data.is_meta:
        data = data.to(WORLD.device)
    return _number(Tensor(topology, move(data, topology.replicated, topology)))


@sent("loom:put_stored")
def put_stored(topology: Topology, stored: torch.Tensor) -> Tensor:
    """A tensor from what this process stores of it."""
    return _number(Tensor(topology, stored))


def _number(made: Tensor) -> Tensor:
    """A tensor that was made of nothing on the mesh: every process makes them in the same order."""
    mesh = made.topology.mesh
    if mesh.is_split:
        made._number = next(_numbers.setdefault(mesh.ranks or WORLD.within, itertools.count(1)))
    return made


_numbers: dict[tuple[int, ...], Iterator[int]] = {}  # by who counts: everybody, or those that hold a submesh


@sent("loom:distribute")
def distribute(value: Any, mesh: Mesh | None = None, placements: Placements | None = None) -> Tensor:
    """Put a dense tensor (torch, numpy, or nested lists) on a mesh; the result has memory of its own.

    >>> mesh = open_mesh((4,), axes=("tp",))
    >>> distribute([[1, 2], [3, 4]], mesh, {"tp": Shard(1)}).topology.notation
    'i64[2, 2](S(1))'
    """
    if isinstance(value, Tensor):
        raise ArgumentError(
            "distribute takes a dense tensor and got one on a mesh",
            tensor=value.topology,
            fix="x.redistribute(placements) moves it on its mesh; x.to_torch() makes it dense",
        )
    data = _check_plain(value) if isinstance(value, torch.Tensor) else _dense(value)
    if _choose_mesh(mesh).is_split and is_compared() and not data.is_meta and state.shadows is None:
        note_data("given to distribute", data, _choose_mesh(mesh).ranks)
    made = place(data, mesh, placements)
    if state.shadows is not None:
        result: Tensor = state.shadows.of(made)
        return result
    if isinstance(value, (torch.Tensor, numpy.ndarray)) and same_storage(made._data, data):
        made._replace(made._data.clone(memory_format=torch.contiguous_format))
    return made


def _check_plain(data: torch.Tensor) -> torch.Tensor:
    """A tensor of numbers, one beside the other; sparse, nested and quantized ones are not, nor what is on a mesh."""
    if isinstance(data, Tensor):
        raise ArgumentError(
            "a plain tensor is wanted and this one lies on a mesh",
            tensor=data.topology,
            fix="x.to_torch() makes it dense",
        )
    if hasattr(data, "device_mesh"):
        raise ArgumentError(
            "a DTensor is on a device mesh already",
            fix="loom.from_dtensor(d) takes it with its placements; d.full_tensor() makes it dense",
        )
    kinds = {"quantized": data.is_quantized, "nested": data.is_nested, "sparse": data.layout is not torch.strided}
    for kind, is_so in kinds.items():
        if is_so:
            name = "mkldnn" if data.is_mkldnn else kind
            raise ArgumentError(
                f"a {name} tensor cannot lie on a mesh",
                fix={"quantized": "x.dequantize()", "nested": "pad it: x.to_padded_tensor(0.0)"}.get(
                    kind, "x.to_dense()"
                ),
            )
    return data


@contextmanager
def _allocating(size: Shape, dtype: torch.dtype) -> Iterator[None]:
    """torch's own words for too little memory, in ours."""
    try:
        yield
    except RuntimeError as error:
        if "allocate" not in str(error) and "Storage size" not in str(error):
            raise
        nbytes = math.prod(size) * dtype.itemsize
        raise OutOfMemoryError(
            f"a tensor of {math.prod(size)} elements needs {nbytes} bytes, and this process cannot have them",
            asked=f"{short_name(dtype)}{list(size)}",
            fix='use device="meta" for a dry run without data, more processes, or a smaller tensor',
        ) from None


def _dense(value: object) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"a {type(value).__name__} cannot become a tensor",
            reason=error,
            fix="give a torch tensor, an array or numbers",
        ) from None


Parts = Sequence[torch.Tensor] | Mapping[Coordinate, torch.Tensor]


@sent("loom:from_local")
def from_local(parts: Parts, mesh: Mesh | None = None, placements: Placements | None = None) -> Tensor:
    """A tensor from what each device already holds: a list in row-major order of coordinates, or a dict by coordinate.

    The parts must have exactly the shapes that the placements give them, and agree where they are replicated. Where
    processes split the mesh, each gives the parts of its own devices; one device alone may give its tensor as it is.

    >>> mesh = open_mesh((2,), axes=("dp",))
    >>> from_local([torch.tensor([1., 2.]), torch.tensor([3.])], mesh, "S(0)").to_torch()
    tensor([1., 2., 3.])
    """
    chosen = _choose_mesh(mesh)
    expect(
        "parts", parts, (Sequence, Mapping, torch.Tensor), fix="give one part per device, in a list or by coordinate"
    )
    held = _by_coordinate(parts, chosen)
    if chosen.ranks:  # who holds nothing of it learns from the others what it is
        known = described(held, chosen, True)
        dims = len(known[(0,) * chosen.ndim].shape)
        placed = as_placements(placements, chosen, dims)
    else:
        dims = next(iter(held.values())).dim()
        placed = as_placements(placements, chosen, dims)
        known = described(held, chosen, any(isinstance(each, Replicate) for each in placed))
    shape = _global_shape(known, chosen, placed, dims)
    topology = Topology(chosen, placed, shape, known[(0,) * chosen.ndim].dtype)
    for coordinate, part in known.items():
        _check_part(coordinate, part, topology, known)
    if chosen.is_elsewhere:
        return _number(Tensor(topology, empty_stored(topology)))
    blocks = [_pad(held[c], topology.local_shape) for c in _distinct(topology)]
    block = torch.stack(blocks).view(topology.block_shape)
    return _number(Tensor(topology, from_block(block, topology)))


def _by_coordinate(parts: Parts, mesh: Mesh) -> dict[Coordinate, torch.Tensor]:
    """The parts that this process holds."""
    here = list(mesh.local_coordinates())
    if isinstance(parts, Mapping):
        held = {mesh.check(c): _part(part) for c, part in parts.items()}
    else:
        alone = isinstance(parts, torch.Tensor) and len(here) == 1 and mesh.is_split
        listed = [parts] if alone else list(parts)
        if len(listed) != len(here):
            fix = "give one part per device" + (" of this process" if mesh.is_split else "")
            raise ShapeError(f"{len(listed)} parts for {len(here)} devices", mesh=mesh, fix=fix)
        held = dict(zip(here, (_part(part) for part in listed), strict=True))
    missing = [c for c in here if c not in held]
    if missing:
        raise ShapeError(f"there is no part for coordinate {missing[0]}", mesh=mesh, fix="give one part per device")
    return {c: held[c] for c in here}


def _part(value: object) -> torch.Tensor:
    return _check_plain(value) if isinstance(value, torch.Tensor) else _dense(value)


def _global_shape(known: Mapping[Coordinate, Part], mesh: Mesh, placements: Sequence[Placement], dims: int) -> Shape:
    """Sizes add up along the axes that shard a dim, seen from coordinate (0, ..., 0)."""
    sizes = list(known[(0,) * mesh.ndim].shape)
    for dim in range(dims):
        axes = [axis for axis, p in enumerate(placements) if isinstance(p, Shard) and p.dim == dim]
        places = itertools.product(*(range(size) if axis in axes else (0,) for axis, size in enumerate(mesh.shape)))
        parts = [known[place] for place in places]
        sizes[dim] = sum(part.shape[dim] if len(part.shape) > dim else 0 for part in parts)
    return tuple(sizes)


def _check_part(coordinate: Coordinate, part: Part, topology: Topology, known: Mapping[Coordinate, Part]) -> None:
    expected = topology.extent(coordinate)
    if tuple(part.shape) != expected:
        shapes = ", ".join(f"{c}: {list(topology.extent(c))}" for c in itertools.islice(topology.mesh.coordinates(), 8))
        raise PlacementError(
            f"the part at {coordinate} has shape {list(part.shape)} and its placements give it {list(expected)}",
            tensor=topology,
            parts=shapes + (", ..." if topology.mesh.size > 8 else ""),
            fix="cut the parts as shown (chunks are as large as the first, the last ones smaller), "
            "or concatenate them and use loom.distribute",
        )
    if part.dtype != topology.dtype:
        raise PlacementError(
            f"the part at {coordinate} is {part.dtype} and the first is {topology.dtype}",
            tensor=topology,
            fix="cast the parts to one dtype",
        )
    twin = tuple(0 if isinstance(p, Replicate) else c for c, p in zip(coordinate, topology.placements, strict=True))
    if twin != coordinate and part.checksum != known[twin].checksum:
        raise PlacementError(
            f"the parts at {twin} and {coordinate} differ and the placements say they are the same",
            tensor=topology,
            asked=spell(topology.placements),
            fix="use Partial for parts that add up, Shard for parts that follow each other",
        )


def _distinct(topology: Topology) -> list[Coordinate]:
    """The coordinates whose parts a block stores."""
    box = zip(topology.mesh.local_offset, topology.block_shape, strict=False)
    return list(itertools.product(*(range(start, start + size) for start, size in box)))


def _pad(part: torch.Tensor, shape: Shape) -> torch.Tensor:
    for dim, size in enumerate(shape):
        if part.shape[dim] != size:
            missing = part.new_zeros((*part.shape[:dim], size - part.shape[dim], *part.shape[dim + 1 :]))
            part = torch.cat([part, missing], dim)
    return part


def _sizes(size: tuple[Any, ...]) -> Shape:
    if len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = tuple(size[0])
    for each in size:
        if isinstance(each, bool) or not hasattr(each, "__index__") or int(each) < 0:
            raise ShapeError(f"{each!r} is not a size", asked=list(size), fix="sizes are whole numbers, 0 or more")
    return tuple(int(each) for each in size)


def _dtype(dtype: torch.dtype | str | None, default: torch.dtype | None = None) -> torch.dtype:
    if isinstance(dtype, str):
        return torch_dtype(dtype.removeprefix("torch."))
    return dtype or default or torch.get_default_dtype()


def checked_device(device: torch.device | str | int) -> torch.device:
    """A device of torch that is there."""
    try:
        found = torch.device(device)
        if found.type not in ("cpu", "meta"):
            torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            f"device={device!r} cannot be used", reason=reason, fix='use device="cpu" or "meta"'
        ) from None
    return found


def _device(device: torch.device | str | int | None) -> torch.device | str | None:
    if state.shadows is not None:
        return "meta"
    return None if device is None else checked_device(device)


@dataclass(frozen=True, slots=True)
class Options:
    """Where a new tensor goes, and as what: the arguments of every function that makes one."""

    mesh: Mesh | None = None
    placements: Placements | None = None
    dtype: torch.dtype | str | None = None
    device: torch.device | str | int | None = None
    requires_grad: bool = False

    @classmethod
    def read(cls, given: dict[str, Any]) -> Options:
        """Those that were given by name."""
        for name in given:
            if name not in cls.__slots__:
                fix = closest(name, cls.__slots__)
                raise ArgumentError(f"no tensor is made with {name}={given[name]!r:.80}", fix=fix)
        return cls(**given)

    def make(self, dense: Dense) -> Tensor:
        """A dense tensor, made with a dtype and a device, on the mesh."""
        data = dense(dtype=None if self.dtype is None else _dtype(self.dtype), device=_device(self.device))
        with _allocating(tuple(data.shape), data.dtype):
            made = place(data, self.mesh, self.placements)
            if not made._data.is_contiguous():
                made._replace(made._data.contiguous())
            return self.finish(made)

    def finish(self, made: Tensor) -> Tensor:
        """A tensor that was made, as a leaf with a gradient if it is to be one."""
        if self.requires_grad:
            refuse_partial_leaf(made.topology)
            made._replace(made._data.detach().requires_grad_())
        return made


@sent("loom:full")
def full(size: Sequence[int], fill_value: complex | torch.Tensor, **options: Any) -> Tensor:
    """A tensor with one value everywhere.

    As all that make tensors, it takes `mesh`, `placements`, `dtype`, `device` and `requires_grad` by name.

    >>> full((2, 2), 7, mesh=open_mesh((2,))).to_torch()
    tensor([[7, 7],
            [7, 7]])
    """
    asked, sizes = Options.read(options), _sizes((size,))
    if not isinstance(fill_value, (int, float, complex, numpy.generic, torch.Tensor)):
        raise ArgumentError(f"fill_value={fill_value!r:.80} is no number", fix="give one number")
    value: Any = fill_value
    return asked.make(lambda dtype, device: torch.full((), value, dtype=dtype, device=device).expand(sizes))


def zeros(*size: int | Sequence[int], dtype: torch.dtype | str | None = None, **options: Any) -> Tensor:
    """A tensor of zeros.

    >>> zeros(13, 4, mesh=open_mesh((4,))).topology.local_shape
    (4, 4)
    """
    return full(_sizes(size), 0, dtype=_dtype(dtype), **options)


def ones(*size: int | Sequence[int], dtype: torch.dtype | str | None = None, **options: Any) -> Tensor:
    """A tensor of ones.

    >>> ones(3, mesh=open_mesh((2,)), placements="R").topology.notation
    'f32[3](R)'
    """
    return full(_sizes(size), 1, dtype=_dtype(dtype), **options)


@sent("loom:arange")
def arange(*bounds: float, **options: Any) -> Tensor:
    """The numbers from start to end by step, as `torch.arange`.

    >>> arange(1, 6, 2, mesh=open_mesh((2,))).shard_at((1,))
    tensor([5])
    """

    def dense(dtype: torch.dtype | None, device: Any) -> torch.Tensor:
        try:
            return torch.arange(*bounds, dtype=dtype, device=device)
        except (TypeError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ArgumentError(
                f"arange{bounds!r:.80} cannot be made", reason=reason, fix="arange(start, end, step)"
            ) from None

    return Options.read(options).make(dense)


def _draw(size: Shape, draw: random.Draw, generator: torch.Generator | None, **options: Any) -> Tensor:
    asked = Options.read(options)
    kind = _dtype(asked.dtype)
    if not kind.is_floating_point:
        raise ArgumentError(f"random values need a floating dtype, not {short_name(kind)}")
    if str(_device(asked.device)) == "meta":
        random.note_key(generator)
        return replace(asked, dtype=kind).make(partial(torch.empty, size))
    topology = _topology(size, kind, asked.mesh, asked.placements)  # raises before a key is drawn
    if generator is not None:
        expect("generator", generator, torch.Generator, fix="torch.Generator().manual_seed(0)")
    with _allocating(size, kind):
        return asked.finish(draw_like(topology, draw, random.draw_key(generator), asked.device))


def draw_like(
    topology: Topology, draw: random.Draw, key: int, device: torch.device | str | int | None = None
) -> Tensor:
    """Random numbers that lie as a topology says; of a partial one they are the value."""
    whole = topology.reduced
    if whole.mesh.is_elsewhere:
        return Tensor(topology, torch.empty(topology.stored_shape, dtype=torch_dtype(topology.dtype), device="meta"))
    data = random.fill(whole, draw, key).to(WORLD.device if whole.mesh.is_split else device or "cpu")
    return _number(Tensor(topology, move(data, whole, topology)))


@sent("loom:randn")
def randn(*size: int | Sequence[int], generator: torch.Generator | None = None, **options: Any) -> Tensor:
    """Standard normal values; the same for any placements, mesh and number of devices.

    >>> _ = torch.manual_seed(0)
    >>> a = randn(5, mesh=open_mesh((2,)))
    >>> _ = torch.manual_seed(0)
    >>> b = randn(5, mesh=open_mesh((3,)))
    >>> bool((a.to_torch() == b.to_torch()).all())
    True
    """
    return _draw(_sizes(size), random.normal, generator, **options)


@sent("loom:rand")
def rand(*size: int | Sequence[int], generator: torch.Generator | None = None, **options: Any) -> Tensor:
    """Uniform values in [0, 1); the same for any placements, mesh and number of devices."""
    return _draw(_sizes(size), random.uniform, generator, **options)


def like(tensor: Tensor, options: dict[str, object]) -> dict[str, Any]:
    """Options that make a tensor like another: its mesh, its placements (partial ones reduced), its dtype."""
    expect("input", tensor, Tensor, fix="the _like functions take a tensor on a mesh")
    kept = {key: value for key, value in options.items() if key not in ("memory_format", "layout", "pin_memory")}
    kept.setdefault("mesh", tensor.mesh)
    kept.setdefault("placements", tensor.topology.reduced.placements)
    kept["dtype"] = kept.get("dtype") or tensor.dtype
    kept["device"] = kept.get("device") or tensor.device
    return kept


def _made_like(make: Callable[..., Tensor], tensor: Tensor, options: dict[str, object]) -> Tensor:
    kept = like(tensor, options)
    return make(tensor.topology.shape, **kept)


def zeros_like(input: Tensor, **options: object) -> Tensor:
    """Zeros with the shape, dtype, mesh and placements of a tensor.

    >>> zeros_like(arange(6, mesh=open_mesh((2,)), placements="S(0)")).topology.notation
    'i64[6](S(0))'
    """
    return _made_like(zeros, input, options)


def ones_like(input: Tensor, **options: Any) -> Tensor:
    """Ones with the shape, dtype, mesh and placements of a tensor."""
    return _made_like(ones, input, options)


def full_like(input: Tensor, fill_value: complex | torch.Tensor, **options: Any) -> Tensor:
    """One value with the shape, dtype, mesh and placements of a tensor."""
    return _made_like(lambda size, **kept: full(size, fill_value, **kept), input, options)


def empty_like(input: Tensor, **options: object) -> Tensor:
    """A tensor like another whose values do not matter; zeros, since padding must be zero anyway."""
    return zeros_like(input, **options)


def randn_like(input: Tensor, **options: object) -> Tensor:
    """Standard normal values like a tensor."""
    return _made_like(randn, input, options)


def rand_like(input: Tensor, **options: object) -> Tensor:
    """Uniform values like a tensor."""
    return _made_like(rand, input, options)


def dropout_mask(tensor: Tensor, keep: float) -> Tensor:
    """1 / keep where an element is kept, 0 elsewhere, placed as the tensor is."""
    topology = tensor.topology.reduced
    if tensor._data.is_meta:
        random.note_key()
        if topology.mesh.is_elsewhere and state.shadows is None:
            random.draw_key()  # those that hold it draw one too
        return Tensor(topology, torch.empty(topology.stored_shape, dtype=tensor.dtype, device="meta"))
    drawn = random.fill(topology.with_dtype("f32"), random.uniform, random.draw_key())
    scale = 1.0 / keep if keep > 0 else 0.0
    return Tensor(topology, (drawn < keep).to(tensor.dtype).mul_(scale).to(tensor.device))
