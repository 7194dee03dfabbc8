"""The torch engine as a whole: its functions by name, and three collectives on `torch.distributed` groups.

The collectives are literal and plain: they take what a rank holds and hand back something new, the input stays. Every
call first compares what the ranks bring (one small all-gather), so that ranks that disagree get an error that shows all
of them, instead of a hang or a wrong sum.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from meshloom.engines import private
from meshloom.engines.engine import Engine
from meshloom.engines.layout import torch_dtype
from meshloom.engines.torch_engine import FUNCTIONS, Local
from meshloom.errors import (
    ArgumentError,
    CommunicationError,
    DivergenceError,
    DTypeError,
    GradientError,
    ShapeError,
    UnsupportedError,
)
from meshloom.ops import Call
from meshloom.types import LONG_NAME, Shape, check_dtype, short_dtype

_KINDS = ("all_reduce_sum", "all_gather", "reduce_scatter")
_DTYPES = tuple(LONG_NAME)
_MOST_DIMS = 16
# integers that Gloo cannot add, and those that hold their sums
_CARRIERS = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


class TorchEngine(Engine):
    """Ops by name on torch tensors, and collectives between processes.

    >>> engine = TorchEngine()
    >>> engine.run("matmul", engine.array([[1, 2]]), engine.array([[3], [4]]))
    tensor([[11]])
    """

    name = "torch"
    kind = torch.Tensor
    functions = FUNCTIONS

    def _facts_of(self, call: Call, shapes: tuple[Shape, ...]) -> Local:
        return Local(call, call.operands, shapes)

    def array(self, values: Any, dtype: str | None = None) -> torch.Tensor:
        """Numbers, lists or a NumPy array as a tensor."""
        return torch.as_tensor(values, dtype=None if dtype is None else self.dtype(dtype))

    def numpy(self, array: Any) -> Any:
        """The tensor's values as a NumPy array."""
        return array.detach().cpu().numpy()

    def dtype(self, name: str) -> torch.dtype:
        """torch's dtype of a name.

        >>> TorchEngine().dtype("bf16")
        torch.bfloat16
        """
        return torch_dtype(check_dtype(name))

    def requires_grad_(self, array: Any) -> Any:
        """The tensor, with gradients from now on."""
        return array.requires_grad_()

    def supports_distributed(self) -> bool:
        """Whether this torch has `torch.distributed`."""
        return dist.is_available()

    def all_reduce_sum(self, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        """The sum of what every rank of the group gives, at every rank; outside the group, the tensor itself."""
        members = self._members("all_reduce_sum", tensor, group)
        if members is None:
            return tensor
        members.compare("all_reduce_sum", tensor)
        _check_sum("all_reduce_sum", tensor)
        sent = _encode(tensor).clone(memory_format=torch.contiguous_format)
        if sent.numel():
            members.handle.allreduce([sent]).wait()
        return _decode(sent, tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        """What every rank of the group gives, one after the other along dim 0; sizes of dim 0 may differ.

        Numbers (0-d tensors) become a vector. Outside the group: the tensor itself.
        """
        members = self._members("all_gather", tensor, group)
        if members is None:
            return tensor
        shapes = members.compare("all_gather", tensor, uneven=True)
        room = members.gather_flat(tensor, max(shape.numel() for shape in shapes))
        if len(set(shapes)) == 1:
            return room.reshape(members.size * (tensor.shape[0] if tensor.dim() else 1), *tensor.shape[1:])
        return torch.cat([row[: shape.numel()].reshape(shape) for row, shape in zip(room, shapes, strict=True)])

    def reduce_scatter(self, tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
        """Of the sum of what every rank gives: rows `i * chunk` on, at rank `i` of the group, chunks of `ceil` size.

        Outside the group: the tensor itself.
        """
        members = self._members("reduce_scatter", tensor, group)
        if members is None:
            return tensor
        members.compare("reduce_scatter", tensor)
        _check_sum("reduce_scatter", tensor)
        if not tensor.dim():
            raise ShapeError("a 0-d tensor has no dim 0 to scatter", fix="use all_reduce_sum, or reshape it to [1]")
        carried = _encode(tensor)
        chunk = -(-len(tensor) // members.size)
        pieces = carried.new_zeros((members.size * chunk, *carried.shape[1:]))
        pieces[: len(tensor)] = carried
        own = torch.empty_like(pieces[:chunk])
        if own.numel():
            members.handle.reduce_scatter([own], [list(pieces.split(chunk))]).wait()
        extent = min(max(len(tensor) - members.rank * chunk, 0), chunk)
        return _decode(own[:extent], tensor.dtype)

    def _members(self, op: str, tensor: torch.Tensor, group: Any) -> Members | None:
        """The group to talk to; None at a rank outside it."""
        _check_tensor(op, tensor)
        if not dist.is_available() or not dist.is_initialized():
            raise CommunicationError(
                f"{op} needs other processes, and this one was started alone",
                fix="start the script with `meshloom run --nproc 4 script.py` or torchrun, and call "
                "torch.distributed.init_process_group()",
            )
        if isinstance(group, dist.ProcessGroup):
            return _find_members(group, tuple(dist.get_process_group_ranks(group)))
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            return None  # what new_group hands to ranks outside it
        ranks = read_ranks(group, dist.get_world_size())
        return GROUPS.find(ranks, backend_of(tensor.device)) if dist.get_rank() in ranks else None


@dataclass(frozen=True, slots=True)
class Members:
    """A group seen from one of its ranks: whom to talk to, and as which of them."""

    handle: Any
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return len(self.ranks)

    def compare(self, op: str, tensor: torch.Tensor, uneven: bool = False) -> list[torch.Size]:
        """The shape that every rank brings; ranks that do not fit together are an error on all of them."""
        header = [_KINDS.index(op), _DTYPES.index(short_dtype(str(tensor.dtype))), tensor.dim(), *tensor.shape]
        own = torch.tensor(header + [0] * (3 + _MOST_DIMS - len(header)), device=tensor.device)
        brought = [tuple(row) for row in self.gather_flat(own, len(own)).tolist()]
        if len({_essence(each, uneven) for each in brought}) > 1:
            raise DivergenceError(
                f"the ranks of this {op} do not fit together",
                **{f"rank {rank}": _spell(each) for rank, each in zip(self.ranks, brought, strict=True)},
                fix="call the same collective everywhere, with the same dtype and the same "
                + ("shape behind dim 0" if uneven else "shape"),
            )
        return [torch.Size(each[3 : 3 + each[2]]) for each in brought]

    def gather_flat(self, tensor: torch.Tensor, longest: int) -> torch.Tensor:
        """The elements of every rank as a row; all rows are as long as the longest. Any dtype travels as bytes."""
        room = tensor.new_zeros((self.size, longest))
        own = tensor.new_zeros(longest)
        own[: tensor.numel()] = tensor.reshape(-1)
        if room.numel():
            self.handle.allgather([list(room.view(torch.uint8))], [own.view(torch.uint8)]).wait()
        return room


def _find_members(handle: Any, ranks: tuple[int, ...]) -> Members | None:
    return Members(handle, ranks, ranks.index(dist.get_rank())) if dist.get_rank() in ranks else None


class Groups:
    """Groups by their ranks, each made once, by its members alone.

    `torch.distributed.new_group` either has to be called by every rank, or names a group by how many groups a rank has
    made before, and ranks with another past wait for each other for ever. So the backends are made here, and meet in
    the store under a name that says who they are. They live as long as the world whose store it is.
    """

    def __init__(self) -> None:
        self._world: Any = lambda: None
        self._known: dict[tuple[tuple[int, ...], str], Any] = {}
        atexit.register(self._known.clear)

    def find(self, ranks: tuple[int, ...], backend: str) -> Members:
        """The group of these ranks, of which this process is one; the world itself where it has the backend."""
        world = dist.group.WORLD
        if len(ranks) == dist.get_world_size() and dist.get_backend(world) == backend:
            return Members(world, ranks, dist.get_rank())
        if self._world() is not world:
            self._known.clear()
            self._world = weakref.ref(world, lambda _: self._known.clear())
        if (ranks, backend) not in self._known:
            self._known[ranks, backend] = self._make(ranks, backend)
        return Members(self._known[ranks, backend], ranks, ranks.index(dist.get_rank()))

    def _make(self, ranks: tuple[int, ...], backend: str) -> Any:
        name = f"meshloom engine {backend} {' '.join(map(str, ranks))}"
        store = dist.PrefixStore(name, private.default_store())
        rank, size = ranks.index(dist.get_rank()), len(ranks)
        if backend == "nccl":
            return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())
        return dist.ProcessGroupGloo(store, rank, size, default_pg_timeout)


GROUPS = Groups()


def backend_of(device: torch.device) -> str:
    """The backend that carries tensors of a device: NCCL between GPUs, Gloo between CPUs.

    >>> backend_of(torch.device("cpu"))
    'gloo'
    """
    if device.type == "cpu":
        return "gloo"
    if device.type != "cuda":
        raise UnsupportedError(f"no backend carries tensors on {device}", fix="move them to the CPU: tensor.cpu()")
    if not dist.is_nccl_available():
        raise UnsupportedError(
            f"tensors on {device} travel by NCCL, which this torch was built without",
            fix="move them to the CPU: tensor.cpu(), or install a torch with CUDA",
        )
    return "nccl"


def read_ranks(group: Iterable[int] | None, world: int) -> tuple[int, ...]:
    """The ranks of a group in order; None means all.

    >>> read_ranks(None, 3), read_ranks([2, 0], 3)
    ((0, 1, 2), (0, 2))
    """
    if group is None:
        return tuple(range(world))
    if isinstance(group, (str, bytes)) or not isinstance(group, Iterable):
        raise ArgumentError(f"group is None, ranks such as [0, 1] or a ProcessGroup, not {group!r}")
    ranks = tuple(sorted(group))
    wrong = [rank for rank in ranks if type(rank) is not int or not 0 <= rank < world]
    if wrong:
        raise ArgumentError(f"there is no rank {wrong[0]!r} among {world}", fix=f"ranks go from 0 to {world - 1}")
    if not ranks or len(set(ranks)) < len(ranks):
        raise ArgumentError(f"a group has one rank or more, each once, and got {list(ranks)}")
    return ranks


def _check_tensor(op: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"{op} takes a torch tensor, not a {type(tensor).__name__}",
            fix=f"make one with array(...); for tensors on a mesh use loom.collectives.{op.removesuffix('_sum')}",
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise GradientError(
            f"{op} of an engine has no gradient", fix="detach the tensor, or use tensors on a mesh, whose ops have them"
        )
    if tensor.dim() > _MOST_DIMS:
        raise ShapeError(f"{op} takes at most {_MOST_DIMS} dims, not {tensor.dim()}", fix="flatten some of them")


def _check_sum(op: str, tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        raise DTypeError(f"{op} adds up, and bool has no sum", fix="convert it: tensor.to(torch.int64)")


def _encode(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in a dtype that is added up on the way; a complex number is two real ones."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.to(_CARRIERS.get(real.dtype, real.dtype))


def _decode(carried: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.view_as_complex(carried) if dtype.is_complex else carried.to(dtype)


def _essence(brought: Sequence[int], uneven: bool) -> tuple[int, ...]:
    """What must be the same on every rank: all of it, or all but the size of dim 0."""
    return (*brought[:3], *brought[4:]) if uneven else tuple(brought)


def _spell(brought: Sequence[int]) -> str:
    kind, dtype, ndim, *sizes = brought
    return f"{_KINDS[kind]} of {_DTYPES[dtype]}{sizes[:ndim]}"
