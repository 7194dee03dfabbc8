"""Arrays on cards that share no memory with this process: the stored array of a tensor there.

A `CardArray` is a `torch.Tensor` without memory on the host. It has a `Memory` on the cards and a *twin*: a tensor on
`meta` whose sizes, strides and offset say which elements of that memory it is. Autograd is torch's own, above it, so
what it saves are card arrays too. Below, every call of torch comes to `__torch_dispatch__`: a view is a new twin over
the same memory, a call that the driver has a kernel for is launched on the cards (`card_kernels`), and all others go
through the host: operands are read, torch computes, results are written back, and whoever watches is told of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from meshloom.context import state
from meshloom.engines import private
from meshloom.engines.layout import torch_dtype
from meshloom.placement import Topology
from meshloom.runtime.card_layouts import Blocks, Layout, Spread, placed, strip
from meshloom.runtime.card_memory import HERE, CardStore, Memory, Shards, asked, named, one_op
from meshloom.runtime.recorder import ALIKE
from meshloom.runtime.storage import Scattered
from meshloom.types import Shape, numel

if TYPE_CHECKING:
    from meshloom.runtime.buffer import MeshBuffer

_make: Callable[..., Any] = private.make_wrapper


class CardArray(torch.Tensor):
    """Elements of a memory on cards, as torch sees them."""

    __slots__ = ("memory", "twin")

    memory: Memory
    twin: torch.Tensor

    @staticmethod
    def __new__(cls: type[CardArray], memory: Memory, twin: torch.Tensor, is_meta: bool = False) -> CardArray:
        made: CardArray = _make(
            CardArray, twin.size(), twin.stride(), twin.storage_offset(), None, twin.dtype, torch.strided,
            _META if is_meta else _CPU,
        )  # fmt: skip
        made.memory, made.twin = memory, twin
        if twin.is_conj():
            private.set_conj(made, True)
        if twin.is_neg():
            private.set_neg(made, True)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _perform(func, args, kwargs or {})

    __torch_function__ = private.no_torch_function

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return repr(read(self))

    def tolist(self) -> Any:
        """The numbers, read from the cards."""
        return read(self).tolist()

    def numpy(self, **options: Any) -> Any:
        """The values as an array of the host."""
        return read(self).numpy(**options)

    @property
    def data(self) -> torch.Tensor:
        """The array without its graph; set to another array, it has the memory of that one."""
        found: torch.Tensor = private.TensorBase.data.__get__(self)
        return found

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        assert isinstance(other, CardArray)
        private.TensorBase.data.__set__(self, other)
        self.memory, self.twin = other.memory, other.twin

    def data_ptr(self) -> int:
        """Which memory it is and where it begins there: a number to compare, and no address of this process."""
        return id(self.memory) + int(self.twin.storage_offset()) * self.twin.element_size()

    def is_whole(self, shape: Shape | None = None) -> bool:
        """Whether it is all of its memory, in order, seen in a shape."""
        twin = self.twin
        return (
            twin.dtype == self.memory.dtype
            and twin.numel() == numel(self.memory.layout.shape)
            and twin.is_contiguous()
            and not (twin.is_conj() or twin.is_neg())
            and (shape is None or tuple(twin.shape) == tuple(shape))
        )


_CPU, _META = torch.device("cpu"), torch.device("meta")


def make(store: CardStore, array: torch.Tensor, layout: Layout | None = None) -> CardArray:
    """An array of the host, or one without data, on the cards of a store. It may be kept as it is for a while."""
    flat, twin = _flatten(array)
    fits = layout is not None and twin.is_contiguous() and strip(layout.shape) == strip(twin.shape)
    memory = Memory(store, array.dtype)
    chosen = layout if layout is not None and fits else Spread(store.mesh, tuple(flat.shape))
    memory.set(flat, chosen)
    return CardArray(memory, twin, array.is_meta)


def _flatten(array: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All elements of an array in the order of its memory, and where they lie there."""
    array = array.resolve_conj().resolve_neg()
    if not array.is_contiguous():
        order = sorted(range(array.dim()), key=array.stride, reverse=True)
        if array.permute(order).is_contiguous():
            twin = torch.empty_strided(array.shape, array.stride(), dtype=array.dtype, device="meta")
            return array.permute(order).reshape(-1), twin
        array = array.contiguous()
    return array.view(-1), torch.empty(array.shape, dtype=array.dtype, device="meta")


def _realise(array: CardArray, flat: torch.Tensor) -> torch.Tensor:
    """The elements of an array in the memory that was read: a view of it."""
    twin = array.twin
    found = torch.empty(0, dtype=twin.dtype, device=flat.device)
    found.set_(flat.untyped_storage(), twin.storage_offset() + _offset(flat, twin), twin.shape, twin.stride())
    found = found.conj() if twin.is_conj() else found
    return private.neg_view(found) if twin.is_neg() else found


def _offset(flat: torch.Tensor, twin: torch.Tensor) -> int:
    """Where the memory begins in its storage, in elements of the twin."""
    return flat.storage_offset() * flat.element_size() // twin.element_size()


# Calls of torch


@cache
def _is_formula(func: Any) -> bool:
    """Whether a call is made of others, of which torch tells where it has not taken it apart itself."""
    return private.has_kernel(func.name(), "CompositeImplicitAutograd")


def _perform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_formula(func):
        return func.decompose(*args, **kwargs)
    if func.is_view or func in _LIKE_VIEWS:
        return _view(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        return _turn(func, args, kwargs)
    if func is _WRITE and _take_over(*args[:2]):
        return args[0]
    if func is _COPY and _is_to_meta(kwargs):
        return func(args[0].twin, **kwargs)
    if func is _CLONE:
        found = _share(args[0], kwargs.get("memory_format"))
        if found is not None:
            return found
    from meshloom.runtime.card_kernels import prepare

    with named(func.overloadpacket.__name__):
        ready = prepare(func, args, kwargs)
        # not in a variable: whoever keeps this frame would keep the array, and torch then copies a gradient
        return _through_host(func, args, kwargs) if ready is None else ready()


_aten: Any = torch.ops.aten
_CLONE, _COPY, _WRITE = _aten.clone.default, _aten._to_copy.default, _aten.copy_.default
_LIKE_VIEWS = frozenset((_aten._unsafe_view.default,))


# calls that look at the shape of their first operand and not at its values
_SHAPES = frozenset(getattr(_aten, name).default for name in (*ALIKE, "rand_like", "randn_like"))


def _is_to_meta(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta"


def without_data(array: CardArray) -> CardArray:
    """An array of the same shape and layout without data: calls tell what they would move, and move nothing."""
    memory = Memory(array.memory.store, array.memory.dtype)
    memory.give(Shards(memory.store, array.memory.layout, memory.dtype, {}, None))
    return CardArray(memory, array.twin, True)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Other elements of the same memory: nothing moves."""
    source: CardArray = args[0]
    found = func(source.twin, *args[1:], **kwargs)
    is_meta = source.is_meta
    with torch.inference_mode(source.is_inference()):  # a view is what its base is
        return private.tree_map_only(torch.Tensor, lambda twin: CardArray(source.memory, twin, is_meta), found)


def _turn(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view in place, such as `squeeze_`: the array itself has other sizes from now on."""
    array: CardArray = args[0]
    func(array.twin, *args[1:], **kwargs)
    with private.DisableTorchDispatch():
        func(*args, **kwargs)
    return array


def _share(array: CardArray, memory_format: object) -> CardArray | None:
    """A copy of a whole array has the same shards: a write gives a memory others."""
    shards = array.memory.shards
    if shards is None or shards.is_borrowed or not array.is_whole():
        return None
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return None
    memory = Memory(array.memory.store, array.dtype)
    memory.give(shards)
    return CardArray(memory, torch.empty(array.shape, dtype=array.dtype, device="meta"), array.is_meta)


def _take_over(target: Any, source: Any) -> bool:
    """A write of one whole array over another: the target has the same shards from now on; False where it cannot."""
    if not (isinstance(target, CardArray) and isinstance(source, CardArray)):
        return False
    held, given = target.memory.shards, source.memory.shards
    if held is None or given is None or held.is_borrowed or given.is_borrowed or held.is_meta != given.is_meta:
        return False
    if target.memory.store is not source.memory.store or target.memory.dtype != source.memory.dtype:
        return False
    if not (target.is_whole() and source.is_whole() and target.shape == source.shape):
        return False
    target.memory.give(given)
    return True


def _through_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read the operands, let torch compute, write the results back."""
    call = Call(func, (args, kwargs))
    found = func(*call.bring(args), **call.bring(kwargs))
    call.write_back(args, kwargs)
    return call.wrap(found)


class Call:
    """One call of torch that goes through the host: what was read, and which array is which."""

    def __init__(self, func: Any, given: Any) -> None:
        self.func = func
        self.is_meta = any(isinstance(each, CardArray) and each.is_meta for each in private.tree_flatten(given)[0])
        self.read: dict[Memory, torch.Tensor] = {}
        self.arrays: list[tuple[torch.Tensor, CardArray]] = []  # on the host, and what it was brought from

    def bring(self, values: Any) -> Any:
        """Arguments with every card array on the host."""
        return private.tree_map_only(torch.Tensor, self._bring, values)

    def _bring(self, array: torch.Tensor) -> torch.Tensor:
        if not isinstance(array, CardArray):
            return array.to("meta") if self.is_meta else array
        memory = array.memory
        if self.func in _SHAPES:
            found = torch.empty_strided(array.shape, array.stride(), dtype=array.dtype, device=array.device)
        else:
            if memory not in self.read:
                self.read[memory] = memory.read()
            found = _realise(array, self.read[memory])
        self.arrays.append((found, array))
        return found

    def write_back(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Give memories that the call wrote to their new value."""
        if not self.func._schema.is_mutable:
            return
        written = []
        for place, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[place] if place < len(args) else kwargs.get(argument.name)
                written += private.tree_flatten(given)[0]
        for memory in {each.memory: None for each in written if each.__class__ is CardArray}:
            memory.write(self.read[memory])

    def wrap(self, results: Any) -> Any:
        """Results on the cards; an operand that was written to is itself."""
        return private.tree_map_only(torch.Tensor, self._wrap, results)

    def _wrap(self, result: torch.Tensor) -> torch.Tensor:
        for brought, array in self.arrays:
            if result is brought:
                return array
        if self._is_given(result):
            return result
        first = self.arrays[0][1]
        held = {each.untyped_storage()._cdata for each, _ in self.arrays}
        if result.untyped_storage()._cdata in held:
            result = result.clone()
        return make(first.memory.store, result, self._layout_like(result))

    def _is_given(self, result: torch.Tensor) -> bool:
        return self.func._schema.is_mutable and not isinstance(result, CardArray)

    def _layout_like(self, result: torch.Tensor) -> Layout | None:
        """The layout of an operand of the same shape: what is computed by element lies like what it comes from."""
        for _, array in self.arrays:
            layout = array.memory.layout
            if isinstance(layout, Blocks) and array.is_whole(tuple(result.shape)):
                return layout
        return None


# Between plain arrays and arrays on cards


def read(array: torch.Tensor) -> torch.Tensor:
    """The values of an array on the host; one that is there is returned itself."""
    if array.__class__ is not CardArray:
        return array
    assert isinstance(array, CardArray)
    with torch.no_grad(), asked("read"):
        flat = array.memory.read()
        return _realise(array, flat if array.memory.shards is not None else flat.clone())


def to_host(array: torch.Tensor) -> torch.Tensor:
    """An array as one of the host; gradients go through it."""
    if array.__class__ is not CardArray:
        return array
    if not array.requires_grad:
        return read(array)
    found: torch.Tensor = ToHost.apply(array)  # type: ignore[no-untyped-call]
    return found


def lay(array: torch.Tensor, topology: Topology, store: CardStore) -> torch.Tensor:
    """The stored array of a tensor on the cards, each of which holds its shard; gradients go through it.

    A view of memory that is used otherwise stays where it is, and so does what has no data.
    """
    if isinstance(array, CardArray) and array.memory.store is not store:
        array = to_host(array)
    if isinstance(array, CardArray):
        if array.is_whole(topology.stored_shape):
            array.memory.lay(placed(topology))
        return array
    if array.is_meta or private.is_functorch_wrapped_tensor(array):  # the latter is refused where it is used
        return array
    if not array.requires_grad:
        return _lay_plain(array, topology, store)
    found: torch.Tensor = ToCards.apply(array, topology, store)  # type: ignore[no-untyped-call]
    return found


def lay_block(block: torch.Tensor, store: CardStore) -> CardArray:
    """A block (mesh axes first, 1 where all hold the same) on the cards, each of which holds its part."""
    if isinstance(block, CardArray) and block.memory.store is not store:
        block = to_host(block)
    layout = Blocks(store.mesh, tuple(block.shape))
    if isinstance(block, CardArray):
        if block.is_whole():
            block.memory.lay(layout)
        return block
    with torch.no_grad(), asked("to_device"):
        return make(store, block.detach().contiguous(), layout)


def _lay_plain(array: torch.Tensor, topology: Topology, store: CardStore) -> CardArray:
    whose = asked("distribute") if HERE.pending is None else nullcontext()
    with torch.no_grad(), whose:
        return make(store, array.detach().contiguous(), placed(topology))


class ToHost(torch.autograd.Function):
    """Read an array; its gradient is put on the cards as the array is."""

    @staticmethod
    def forward(ctx: Any, array: CardArray) -> torch.Tensor:
        """The values."""
        ctx.store, ctx.layout = array.memory.store, array.memory.layout
        return read(array.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient on the cards."""
        return FromHost.apply(gradient, ctx.store, ctx.layout)  # type: ignore[no-untyped-call]


class FromHost(torch.autograd.Function):
    """Put an array on the cards in a layout, if it fits; its gradient is read."""

    @staticmethod
    def forward(ctx: Any, array: torch.Tensor, store: CardStore, layout: Layout) -> torch.Tensor:
        """The array on the cards."""
        with asked("to_torch"):
            return array if isinstance(array, CardArray) else make(store, array, layout)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient on the host."""
        return to_host(gradient), None, None


class ToCards(torch.autograd.Function):
    """Put a plain array on the cards; its gradient is a plain one."""

    @staticmethod
    def forward(ctx: Any, array: torch.Tensor, topology: Topology, store: CardStore) -> torch.Tensor:
        """The array on the cards."""
        return _lay_plain(array, topology, store)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """The gradient on the host."""
        return to_host(gradient), None, None


def run_op(call: str, function: Callable[[], Any], topologies: tuple[Topology, ...], store: CardStore) -> Any:
    """The results of an op, laid on the cards as their topologies say."""
    if state.capture is not None:
        raise state.capture.refuse("tensors on cards with memory of their own are not captured yet")
    with one_op(call):
        results = function()
        if isinstance(results, torch.Tensor):
            return lay(results, topologies[0], store)
        lay_each = partial(lay, store=store)
        return tuple(lay_each(each, topology) for each, topology in zip(results, topologies, strict=True))


def borrow(buffer: MeshBuffer) -> CardArray:
    """The memory of a buffer as an array; it is written in place, and the buffer frees it."""
    store, topology = buffer.device.lease.store, buffer.topology
    assert store is not None and isinstance(buffer.storage, Scattered)
    dtype, layout = torch_dtype(buffer.dtype), placed(topology)
    handles = {place: buffer.storage.at(place) for place in topology.mesh.local_coordinates()}
    shards = Shards(store, layout, dtype, handles, None)
    shards.part_shape = buffer.local_shape
    memory = Memory(store, dtype)
    memory.give(shards)
    return CardArray(memory, torch.empty(topology.stored_shape, dtype=dtype, device="meta"))
