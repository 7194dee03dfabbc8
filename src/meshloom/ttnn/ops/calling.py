"""What all ops share: the table of them, the checks of their operands, and how a result becomes a tensor.

An op is a function that is registered under its dotted name by `@op`. It names the arguments that it reads, of the
types that `arguments` has for their names; all others of TTNN's are known from the text of signatures. It asks
`operands` for blocks, computes a block with plain array calls, and returns it as `Made` with the label of the result.
`op` does the rest, as the caller's arguments say: dtype and rounding, room in memory, the tensor to write to.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from meshloom.errors import ArgumentError, MeshloomError, OperandError
from meshloom.mesh import Mesh
from meshloom.ops.rule import Rule
from meshloom.runtime import MeshCoordinate, state
from meshloom.ttnn.device import queues
from meshloom.ttnn.device.mesh_device import MeshDevice
from meshloom.ttnn.ops.refusals import judge
from meshloom.ttnn.ops.repeats import FOREIGN, SEEN, kind_of, remember, write_into
from meshloom.ttnn.ops.results import rule_for
from meshloom.ttnn.ops.signatures import Binding, forms
from meshloom.ttnn.ops.topologies import Rows, topology_of
from meshloom.ttnn.refusal_levels import refuse, setting
from meshloom.ttnn.tensor.formats import CAST, DataType, Layout, padded_shape, rounded
from meshloom.ttnn.tensor.memory import MemoryConfig, TensorMemoryLayout, row_of
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.sharding import fit_memory
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology

Function = Callable[..., Any]
Found = TypeVar("Found")
NOTHING: dict[str, Any] = {}

TABLE: dict[str, Function] = {}  # every op by its dotted name: "add", "transformer.concatenate_heads"
BEFORE: list[Function] = []  # hooks that are called as hook(operation, args, kwargs)
AFTER: list[Function] = []  # hooks that are called as hook(operation, args, kwargs, output)


@dataclass(slots=True)
class Made:
    """What an op has made: a block, the operand that it is like in all else, and its label.

    What the caller asks for goes before what stands here: `layout` is that of a result for which nothing was asked.
    """

    block: Block
    like: Tensor
    topology: TensorTopology
    dtype: DataType | None = None
    layout: Layout | None = None
    memory_config: MemoryConfig | None = None
    output: Tensor | None = None
    coords: tuple[MeshCoordinate, ...] | None = None
    frees: Tensor | None = None  # an operand that is given back once the result is there
    memory_like: Tensor | None = None  # the operand that the result is kept as, if it is not `like`
    kernel: Callable[..., Block] | None = None  # what made the block of those of `given`: `compute` tells of it
    given: Sequence[Tensor] = ()
    takes_mesh: bool = False  # the kernel takes the mesh first
    is_pointwise: bool = False  # it works element by element, and may be given pieces of blocks of one shape
    function: Any = None  # of torch or Python, that the kernel is for blocks of one shape in float32
    is_rounded: bool = False  # the kernel gives more than the dtype can say

    def into(self, output: Tensor | None) -> Made:
        """The same, to be written into a tensor if there is one."""
        self.output = output
        return self

    def tensor(
        self,
        dtype: DataType | None = None,
        layout: Layout | None = None,
        memory_config: MemoryConfig | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """The tensor, as asked for."""
        output = self.output if output is None else output
        like = self.like
        kind = dtype or self.dtype or (output.dtype if output is not None else like.dtype)
        number = kind._value_
        self.is_rounded = self.block.dtype is not _EXACT[number]
        values = rounded(self.block, kind) if self.is_rounded else self.block
        if output is not None:
            made = write_into(values, output, like, self.topology, self.coords or like._coords)
        else:
            order = Layout.TILE if number in _TILED else layout or self.layout or like.layout
            memory = memory_config or self.memory_config
            if memory is None:
                kept_as = self.memory_like or like
                memory = kept_as._memory
                if memory.memory_layout is not TensorMemoryLayout.INTERLEAVED:
                    memory = _fit_shards(kept_as, values, order)
            made = Tensor(
                values,
                like._grid,
                kind,
                order,
                self.topology,
                like._device,
                memory,
                like.tile,
                coords=self.coords or like._coords,
                home=like.home,
            )
            if made._device is not None and made._device.watched:
                queues.used(made._device, "op", writes=(made,))
        if self.frees is not None:
            self.frees.deallocate(force=True)
        return made


def _fit_shards(like: Tensor, values: Block, layout: Layout) -> MemoryConfig:
    """Where a result goes for which nothing was asked: where a sharded operand is, with shards that fit it."""
    row = row_of(like._memory)
    had = padded_shape(like.shape, like.layout, like.tile, row)
    has = padded_shape(values.shape[len(like._grid) :], layout, like.tile, row)
    return fit_memory(like._memory, had, has, layout, like.tile)


# By number: the torch dtype of formats whose values need no rounding once they are in it, and formats of whole tiles.
_EXACT = [kind.store if kind in CAST else None for kind in sorted(DataType, key=lambda kind: kind.value)]
_TILED = (DataType.BFLOAT8_B.value, DataType.BFLOAT4_B.value)


class Registering(Protocol):
    """What `op` gives: a function that makes a result becomes an op that returns a tensor."""

    @overload
    def __call__(self, function: Callable[..., Made], /) -> Callable[..., Tensor]: ...
    @overload
    def __call__(self, function: Callable[..., list[Made]], /) -> Callable[..., list[Tensor]]: ...
    @overload
    def __call__(self, function: Callable[..., Found], /) -> Callable[..., Found]: ...


def op(
    name: str,
    *aliases: str,
    spelled: Mapping[str, str] | None = None,
    also: str = "",
    more: Function | Sequence[Function] = (),
    **beside: Any,
) -> Registering:
    """Register an op under its name and its aliases.

    `spelled` maps further spellings of arguments to ours, `also` are arguments that ours takes beside the original's,
    and `more` the functions that take what the op's own takes as `**`. `beside` are the arguments of the original that
    this op drops or refuses: `Binding`.
    """
    other, names = dict(spelled or {}), (name, *aliases, *_twins(name, *aliases))
    taken = [each for each in names if each in TABLE]
    if taken:
        raise ArgumentError(f"ttnn.{taken[0]} is in the table already", fix="change the function that serves it")

    def register(function: Function) -> Any:
        binding = Binding(names, function, other, also, (more,) if callable(more) else more, **beside)
        fill = rule_for(name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            running, kind = _running.op, None
            outermost = running is None
            if (outermost or running is COUNTED) and not BEFORE and not AFTER:
                kind = kind_of(name, args, kwargs, binding.takes)
                if kind is not None and (seen := SEEN.get(kind[0])) is not None:
                    found = seen.run(kind, outermost)
                    if found is not NotImplemented:
                        return found
            refusals = setting.refusals
            if other and kwargs:
                kwargs = {other.get(argument, argument): value for argument, value in kwargs.items()}
            for hook in tuple(BEFORE):
                hook(call, args, kwargs)
            if outermost:
                _running.op = (name, args, kwargs)
            try:
                if kwargs or len(args) > binding.plain:
                    own, passed, rest = binding.bind(args, kwargs)
                    output = function(*own, **passed)
                else:
                    own, passed, rest = args, NOTHING, NOTHING
                    output = function(*args)
                if type(output) is Made:
                    if fill is not None:
                        fill(output, (*own, *passed.values()) if passed else own)
                    made, output = output, output.tensor(**rest)
                    if kind is not None and made.kernel is not None and refusals == setting.refusals:
                        remember(kind, _running.program if outermost else None, [made], [output], None)
                elif type(output) in (list, tuple):
                    several = output
                    if fill is not None:
                        fill(several, (*own, *passed.values()) if passed else own)
                    output = type(several)(each.tensor(**rest) if type(each) is Made else each for each in several)
                    is_made = all(type(each) is Made for each in several)
                    if kind is not None and is_made and refusals == setting.refusals:
                        remember(kind, _running.program if outermost else None, several, output, type(several))
            except FOREIGN as error:
                told = _translate_error(name, error, args, kwargs)
                if told is None:
                    raise
                raise told from error
            finally:
                if outermost:
                    _running.op = None
            for hook in tuple(AFTER):
                hook(call, args, kwargs, output)
            return output

        vars(call).pop("__signature__", None)  # the function's own; `describe` gives the op its public one
        call.spelled = other  # type: ignore[attr-defined]
        call.binding = binding  # type: ignore[attr-defined]
        call.python_fully_qualified_name = f"ttnn.{name}"  # type: ignore[attr-defined]
        for each in names:
            TABLE[each] = call
        return call

    return register


class _Running(threading.local):
    """The op that a program of the user called, by its name and arguments, while it runs; COUNTED once it is counted.

    An op is one entry of the program cache, whatever it is made of: only the first that asks for operands is counted.
    """

    op: tuple[str, Any, Any] | None = None
    program: tuple[Any, ...] = ()  # the key that it was counted under


_running = _Running()
COUNTED = ("", (), NOTHING)


def _tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among arguments, and in lists that are arguments."""
    found: list[Tensor] = []
    for given in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(given, Tensor):
            found.append(given)
        elif type(given) in (list, tuple):
            found += [each for each in given if isinstance(each, Tensor)]
    return found


def _key_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What the program of an op depends on: the parts of the tensors that it was called with."""
    key: list[Any] = [name]
    for tensor in _tensors_in(args, kwargs):
        key += (tuple(tensor.shape), tensor.dtype._value_, tensor.layout._value_)
    return key


def _twins(*names: str) -> list[str]:
    """The names that the same ops have among those for another chip."""
    twins = [f"experimental.quasar.{each.removeprefix('experimental.')}" for each in names]
    return [each for each in twins if each in forms() and each != _OTHER_ORDER]


_OTHER_ORDER = "experimental.quasar.typecast"  # its arguments stand in another order


def register(names: str, doc: str, function: Function, **how: Any) -> None:
    """Register a function that several ops share the making of, under the names and the text of one of them."""
    function.__name__ = function.__qualname__ = names.split()[0].rpartition(".")[2]
    function.__doc__ = doc
    op(*names.split(), **how)(function)


def describe(operation: Any) -> Any:
    """An op whose public signature is that of the text, for `help` and `inspect`."""
    if hasattr(operation, "binding") and "__signature__" not in vars(operation):
        operation.__signature__ = operation.binding.signature()
    return operation


@functools.cache
def _names_of(function: Function) -> tuple[str, ...]:
    listed = inspect.signature(function).parameters.values()
    return tuple(each.name for each in listed if each.kind is inspect.Parameter.KEYWORD_ONLY)


def take(function: Function, how: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes by name, taken out of those of an op.

    >>> how = {"x": 1, "y": 2}
    >>> take(lambda *, y=0: y, how), how
    ({'y': 2}, {'x': 1})
    """
    return {each: how.pop(each) for each in _names_of(function) if each in how}


class Optionals:
    """Arguments that travel together, by their names and what they are unless given: None, or what is said here.

    An op takes those that it has among its `more`, as far as the original has them, and asks for their values.

    >>> added = Optionals("base factor", scalar=1.0)
    >>> how = {"factor": 2, "bias": 3}
    >>> added(how), how
    ([None, 2, 1.0], {'bias': 3})
    """

    def __init__(self, names: str = "", **defaults: Any) -> None:
        self.defaults = {**dict.fromkeys(names.split()), **defaults}
        named = inspect.Parameter.KEYWORD_ONLY
        listed = [inspect.Parameter(each, named, default=default) for each, default in self.defaults.items()]
        self.__signature__ = inspect.Signature(listed)

    def __call__(self, how: dict[str, Any]) -> list[Any]:
        """Their values, taken out of the arguments of an op."""
        return [how.pop(each, default) for each, default in self.defaults.items()]


KEPT = Optionals("memory_config dtype")  # how a result is kept, for ops that hand it on to another


REQUIRED = inspect.Parameter.empty


def with_arguments(
    name: str, doc: str, takes: Mapping[str, Any], function: Function, kinds: Mapping[str, str] = NOTHING
) -> Function:
    """A function that is told what it takes, with defaults: it is called with all of it, in that order.

    `kinds` are the types of arguments that `help` shows otherwise than by their names.

    >>> with_arguments("scaled", "x * y", {"x": REQUIRED, "y": 2}, lambda x, y: x * y)(x=3)
    6
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [
        inspect.Parameter(each, kind, default=takes[each], annotation=kinds.get(each, REQUIRED)) for each in takes
    ]
    signature = inspect.Signature(listed, return_annotation=function.__annotations__.get("return", REQUIRED))

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(*bound.args)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    call.__module__ = function.__module__
    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


def _translate_error(
    name: str, error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> MeshloomError | None:
    """An error from inside of an op on tensors as one of ours; None if it is one, or the call itself is wrong."""
    tensors = _tensors_in(args, kwargs)
    is_inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
    if isinstance(error, MeshloomError) or not tensors or not is_inside:
        return None
    kind = ArgumentError if isinstance(error, TypeError) else OperandError
    said = str(error).partition("\n")[0]
    return kind(
        f"ttnn.{name} cannot take these operands: {said}",
        operands=", ".join(f"{each.dtype.name} {list(each.shape)}" for each in tensors),
    )


def operands(name: str, *tensors: Tensor) -> tuple[MeshDevice, list[Block]]:
    """The device that all operands are on, and their blocks."""
    device: MeshDevice | None = None
    blocks = []
    called = _running.op
    key: list[Any] = [name]
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"ttnn.{name}: operand {position} is a {type(tensor).__name__}, not a ttnn.Tensor")
        if tensor._device is None and tensor.home is not None:
            tensor.settle()
        here = tensor._device
        if here is None:
            raise OperandError(
                f"ttnn.{name}: Input tensor {chr(65 + position)} must be on device, "
                "got storage type: StorageType::HOST",
                fix="ttnn.to_device(tensor, mesh_device)",
            )
        if here is not device:
            if device is not None:
                raise OperandError(
                    f"ttnn.{name}: Operands to eltwise binary need to be on the same device!",
                    operands=f"on {device} and {here}",
                    fix="move them to one mesh",
                )
            device = here
        block, room = tensor._block, tensor._room
        if block is None or (room is not None and room.region.freed):
            raise OperandError(
                f"ttnn.{name}: Input Tensor {chr(65 + position)} is not allocated",
                fix="deallocate(tensor) only after its last use",
            )
        blocks.append(block)
        key += (block.shape, tensor.dtype._value_, tensor.layout._value_)
    if device is None:
        raise ArgumentError(f"ttnn.{name} needs a tensor")
    if called is not COUNTED:
        if called is not None:
            _running.op = COUNTED
            if called[0] != name:  # a part of another op, which has more operands or others
                key = _key_of(*called)
        _running.program = tuple(key)
        if device.count_program(_running.program) or (_refused and _running.program in _refused):
            _judge(_running.program, tensors if called is None else _tensors_in(called[1], called[2]))
    if device.watched or state.capture is not None:
        queues.used(device, name, reads=tensors)
    return device, blocks


_refused: set[tuple[Any, ...]] = set()  # kinds of calls that the original refuses


def _judge(kind: tuple[Any, ...], tensors: Sequence[Tensor]) -> None:
    """Say it if the original refuses a kind of call; it is judged when it is new, and told on every new line."""
    reason = judge(kind[0], tensors)
    if reason is not None:
        _refused.add(kind)
        refuse(reason)


def blocks_of(name: str, *tensors: Tensor) -> list[Block]:
    """The blocks of operands whose elements are only moved: on the host if all of them are there, else on a device."""
    if not tensors or not all(isinstance(each, Tensor) and each._device is None for each in tensors):
        return operands(name, *tensors)[1]
    grids = {tensor.grid for tensor in tensors}
    if len(grids) > 1:
        raise OperandError(
            f"ttnn.{name}: tensors of the host are meant for meshes of {' and '.join(map(str, sorted(grids)))}",
            fix="map them for one mesh: from_torch(x, mesh_mapper=...)",
        )
    return [tensor.block for tensor in tensors]


def shared_coords(*tensors: Tensor) -> tuple[MeshCoordinate, ...] | None:
    """The devices that hold a part of every operand; None means all."""
    told = [tensor._coords for tensor in tensors if tensor._coords is not None]
    return tuple(place for place in told[0] if all(place in each for each in told)) if told else None


def compute(
    kernel: Callable[..., Block],
    tensors: Sequence[Tensor],
    topology: TensorTopology,
    *,
    mesh: Mesh | None = None,
    **how: Any,
) -> Made:
    """What a kernel makes of the blocks of tensors, which `operands` has checked; like the first in all else.

    The next call of the kind (see `repeats`) runs the kernel alone. So it may depend on arguments, and on what tensors
    are like, but hold no tensor and no block, nor the mesh: if it needs that, it is given it first.
    """
    blocks = [tensor.block for tensor in tensors]
    block = kernel(*blocks) if mesh is None else kernel(mesh, *blocks)
    how.setdefault("coords", shared_coords(*tensors))
    takes_mesh = mesh is not None
    return Made(block, tensors[0], topology, kernel=kernel, given=tensors, takes_mesh=takes_mesh, **how)


def make(
    block: Block, rule: str | Rule | Rows, *operands: Any, scales: bool = False, filled: bool = False, **arguments: Any
) -> Made:
    """What an op has made of operands: like the first tensor of them, with the topology that `topology_of` finds."""
    tensors = [each for each in operands if isinstance(each, Tensor)]
    shape = block.shape[len(tensors[0]._grid) :] if isinstance(rule, tuple) else None
    label = topology_of(rule, *operands, shape=shape, scales=scales, filled=filled, **arguments)
    return Made(block, tensors[0], label, coords=shared_coords(*tensors))


def result(
    block: Block, like: Tensor, *, topology: TensorTopology, output_tensor: Tensor | None = None, **how: Any
) -> Tensor:
    """A block as a tensor: format, label and memory as its first operand's, unless said otherwise."""
    return Made(block, like, topology, output=output_tensor, **how).tensor()
