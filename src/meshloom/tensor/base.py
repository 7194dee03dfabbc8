"""The tensor: a topology and the array that holds its block. Ops are attached to it in `tensor.methods`.

To torch it is a tensor of its own class without storage, with the global shape. Its flag `requires_grad` is always that
of its array: `autograd.Function.apply` asks nobody and looks at the flag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from meshloom.comms.deferred import is_waiting
from meshloom.engines import private
from meshloom.engines.layout import padding_of, to_block
from meshloom.errors import CommunicationError, GradientError, PlacementError, UnsupportedError
from meshloom.mesh import Mesh
from meshloom.placement import Placement, Replicate, Topology
from meshloom.placement.picture import draw_html
from meshloom.runtime import state
from meshloom.runtime.card_array import lay, to_host
from meshloom.tensor.accounting import account


def refuse_part(topology: Topology) -> None:
    """An error if this process holds only a part: a file or a message would pass it off as the whole tensor."""
    if not topology.is_whole or topology.mesh.ranks:
        raise UnsupportedError(
            "a tensor that is split over processes cannot be pickled or sent: each process has its own part",
            tensor=topology,
            here="nothing"
            if topology.mesh.is_elsewhere
            else f"{topology.mesh.local_offset} and on, a box of {topology.mesh.local_shape}",
            fix="loom.save(state, folder) and torch.distributed.checkpoint write a part of each process; for one file: "
            "full = x.to_torch() on all ranks, torch.save(full, file) on one",
        )


_make: Callable[..., Any] = private.make_wrapper


def maker(topology: Topology, dtype: torch.dtype, tracked: bool) -> Callable[[], Any]:
    """What makes tensors of a topology on the CPU, quickly: everything that does not change is given beforehand.

    Torch asks a tensor for its layout when a `Function` gives it as a result (`tensor.joining`).
    """
    return partial(
        _make,
        Tensor,
        topology.shape,
        None,
        None,
        None,
        dtype,
        torch.strided,
        _CPU,
        False,
        tracked,
        None,
        False,
        True,
    )


_CPU = torch.device("cpu")


class Tensor(torch.Tensor):
    """A tensor on a mesh, seen globally: `shape` is the global shape, ops communicate by themselves.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((2, 2), axes=("dp", "tp"))
    >>> x = loom.arange(6, mesh=mesh, placements={"dp": loom.Shard(0)})
    >>> x
    Tensor i64[6](S(0), R) on Mesh(dp=2, tp=2)
    tensor([0, 1, 2, 3, 4, 5])
    >>> (x * 2).sum().item()
    30
    """

    __slots__ = ("_data", "topology")

    topology: Topology
    _data: torch.Tensor
    _view: Any = None
    _recipe: Any = None  # how a view was made in which several elements lie in one place
    _number: int = 0  # what it was made from, as a number that is the same in every process; 0 is not known
    _finder: Any  # who knows the array, of a lazy tensor
    _old: Tensor  # what it was before it was turned in place
    # the gradient that was handed out last: its array, itself, whether it is simple, and if processes split the mesh
    _gradient: tuple[torch.Tensor, Tensor, bool, bool] | None = None
    _dense: Any  # a dense copy that somebody has a pointer to
    _guarded: bool  # a Function that loses its gradient is refused
    _is_remote = False  # it lies on a cluster, and here is no data of it
    _stands_on: torch.device | None = None  # of a stand-in without data
    _is_param = False  # torch's mark of a parameter of another class than its own

    if TYPE_CHECKING:  # the ops are attached in tensor.methods

        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, topology: Topology, data: torch.Tensor) -> Tensor:
        lease = topology.mesh.lease
        if lease is not None and lease.store is not None:
            data = lay(data, topology, lease.store)
        tracked = data.requires_grad
        made: Tensor = _make(
            Tensor, topology.shape, None, None, None, data.dtype, torch.strided, data.device, False, tracked, None,
            False, True,
        )  # fmt: skip
        made.topology = topology
        made._data = data
        if lease is not None:
            account(made, data)
        return made

    def _replace(self, data: torch.Tensor) -> None:
        """Give the tensor another array."""
        lease = self.topology.mesh.lease
        if lease is not None and lease.store is not None:
            data = lay(data, self.topology, lease.store)
        self._data = data
        vars(self).pop("_dense", None)
        if lease is not None:
            account(self, data)
        self._mirror()

    def _become(self, other: Tensor) -> None:
        """Take the topology and the array of another tensor, which may have another shape or dtype."""
        with private.DisableTorchFunctionSubclass():
            _FLAG.__set__(self, False)
            private.TensorBase.data.__set__(self, other)
        self.topology = other.topology
        self._replace(other._data)

    def _mirror(self) -> None:
        """Let torch's own flag say what the array's says."""
        self._mirror_to(self._data.requires_grad)

    def _mirror_to(self, tracked: bool) -> None:
        with private.DisableTorchFunctionSubclass():
            _FLAG.__set__(self, tracked)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The global shape."""
        return torch.Size(self.topology.shape)

    @property
    def mesh(self) -> Mesh:
        """The mesh that the tensor is on."""
        return self.topology.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """What each mesh axis does to the tensor."""
        return self.topology.placements

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype."""
        return self._data.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the block is held; of a stand-in, where that of what it stands for is."""
        return self._stands_on or self._data.device

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """The number of dims."""
        return len(self.topology.shape)

    @property
    def block(self) -> torch.Tensor:
        """What this process holds: mesh axes first (size 1 where replicated), then the shard's dims. Shares memory,
        unless cards with memory of their own hold it: then it is read."""
        self.topology.check_open()
        self._guard()
        return to_block(to_host(self._data), self.topology)

    def shard_at(self, coordinate: Sequence[int]) -> torch.Tensor:
        """What the device at a coordinate holds, padding left out.

        >>> import meshloom as loom
        >>> x = loom.arange(7, mesh=loom.open_mesh((2,)), placements="S(0)")
        >>> x.shard_at((1,))
        tensor([4, 5, 6])
        """
        place = self.mesh.check(coordinate)
        start = self.mesh.local_offset
        box = zip(place, start, self.placements, strict=True)
        inside = tuple(0 if isinstance(placement, Replicate) else c - first for c, first, placement in box)
        lacks = any(not 0 <= i < size for i, size in zip(inside, self.topology.block_shape, strict=False))
        if lacks or self.mesh.is_elsewhere:
            raise PlacementError(
                f"the shard at {place} is held by rank {self.mesh.owner(place)} and not by this one",
                tensor=self.topology,
                here="nothing" if self.mesh.is_elsewhere else f"{start} and on, a box of {self.mesh.local_shape}",
                fix="x.to_torch() gathers the whole tensor; loom.current_mesh().local_coordinates() lists what is here",
            )
        part = self.block[inside]
        for dim, extent in enumerate(self.topology.extent(place)):
            part = part.narrow(dim, 0, extent)
        result: torch.Tensor = self._seen(part)
        return result

    def _mask_padding_(self) -> None:
        """Set padding to zero again, in place."""
        padding = padding_of(self.topology, self._data.device) if self.topology.padded else None
        if padding is not None:
            signed = _SIGNED.get(self._data.dtype)
            data = self._data if signed is None else self._data.view(signed)
            data.masked_fill_(padding, 0)

    def _check_summed(self) -> None:
        """An error while parts of the gradient wait to be summed."""
        if id(self) in state.waiting or is_waiting(self._data):
            raise GradientError(
                "the gradient is not summed over the devices yet: its parts wait since a backward inside of "
                "loom.accumulate(), or one that did not end",
                tensor=self.topology,
                fix="run the last backward outside of loom.accumulate(), or call loom.synchronize(parameters) before "
                "the step; to drop the parts: p.grad = None",
            )

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        """A copy; of a parameter without its gradient, as in torch."""
        self.topology.check_open()
        if not self._is_param:
            self._check_summed()  # a copy has the gradient, not what it is still to be summed from
        data = self._data.detach().clone().requires_grad_(self._data.requires_grad)
        copied = Tensor(self.topology, data)
        if self._is_param:
            copied._is_param = True
        elif self._data.is_leaf and self._data.grad is not None:
            data.grad = self._data.grad.detach().clone()
        memo[id(self)] = copied
        return copied

    def __copy__(self) -> Tensor:
        if self._is_param:
            return rebuild(*self._value())
        return Tensor(self.topology, self._data)

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        refuse_part(self.topology)
        return (rebuild, self._value()) if self._is_param else (Tensor, (self.topology, to_host(self._data)))

    def _value(self) -> tuple[Topology, torch.Tensor, bool]:
        return self.topology, to_host(self._data.detach()), self._data.requires_grad

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        name = "Parameter containing:\nTensor" if self._is_param else "Tensor"
        if self.topology.is_closed:
            return f"{name} {self.topology}"
        return f"{name} {self.topology}{self._state()}\n{self._value_text()}"

    def _repr_html_(self) -> str:
        """The tensor in a notebook: its pieces, who holds them, and its values."""
        return draw_html(self.topology, self._state(), self._value_text())

    def _state(self) -> str:
        return ", requires_grad=True" if self._data.requires_grad else ""

    def _value_text(self) -> str:
        if self._data.is_meta and (state.shadows is not None or not self.topology.mesh.is_elsewhere):
            return repr(self._data.detach().new_empty(self.topology.shape))  # not the shape that is stored
        try:
            return repr(self._read("repr"))
        except CommunicationError:
            return "(values not shown: communication is forbidden here)"


# torch fills no wide unsigned integers; zero has the same bits in all
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_FLAG: Any = private.TensorBase.requires_grad


def rebuild(topology: Topology, data: torch.Tensor, requires_grad: bool) -> Tensor:
    """A parameter from what a file or a message has of it."""
    array = data.detach().requires_grad_(requires_grad)
    array._is_parameter = True  # type: ignore[attr-defined]  # also where it is frozen: `comms.weights` looks
    made = Tensor(topology, array)
    made._is_param = True
    return made
