"""What every engine offers: ops by name on its own arrays, and collectives between processes where it has them.

An engine computes on the arrays of one worker. Names, arguments and shapes are those of the op table, whatever the
engine: the table binds the arguments and says the results' shapes before any function runs, so that a call that does
not fit is refused in the same words by all. Start with `Engine.run`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from meshloom.errors import ArgumentError, MeshloomError, UnsupportedError, closest
from meshloom.mesh import Mesh
from meshloom.ops import Call, find
from meshloom.ops.binding import bind, refer
from meshloom.placement import Replicate, Topology
from meshloom.types import Shape, short_dtype

Function = Callable[..., Any]
Marked = TypeVar("Marked", bound=Function)
WORKER = Mesh(worker=1)


def aware(function: Marked) -> Marked:
    """Mark a function that gets what the engine knows of the call first, before its arguments."""
    function.is_aware = True  # type: ignore[attr-defined]
    return function


class Engine(ABC):
    """Ops by name on arrays of one kind.

    >>> from meshloom import engines
    >>> engine = engines.load("numpy")
    >>> engine.run("matmul", engine.array([[1, 2]]), engine.array([[3], [4]]))
    array([[11]])
    """

    name: str
    kind: type
    functions: Mapping[str, Function]

    def __repr__(self) -> str:
        return f"engines.load({self.name!r})"

    @property
    def ops(self) -> tuple[str, ...]:
        """The names of the ops that this engine has, in order."""
        return tuple(sorted(self.functions))

    def run(self, op: str, *args: object, **kwargs: object) -> Any:
        """The result of an op of the table; dtypes may be given by name."""
        entry = find(op)
        function = self._function(entry.name)
        try:
            if entry.signature is None:
                positional, named = self._own(args), self._own(kwargs)
            else:
                positional, named = (), self._own(bind(entry, args, kwargs))
            call = self._call(entry.name, positional, named)
            shapes = entry.rule(call).shapes
        except MeshloomError as error:
            raise error.locate(engine=self.name, call=op) from None
        known = (self._facts_of(call, shapes),) if getattr(function, "is_aware", False) else ()
        return function(*known, *positional, **named)

    def _function(self, op: str) -> Function:
        if op not in self.functions:
            raise UnsupportedError(
                f"the {self.name} engine has no {op!r}", fix=f"use the torch engine; {closest(op, self.functions)}"
            )
        return self.functions[op]

    def _own(self, value: Any) -> Any:
        """An argument as functions take it; arrays of another engine are refused, dtypes by name are looked up."""
        if isinstance(value, dict):
            return {k: self.dtype(v) if k == "dtype" and isinstance(v, str) else self._own(v) for k, v in value.items()}
        if isinstance(value, (tuple, list)):
            return tuple(self._own(each) for each in value)
        if not isinstance(value, self.kind) and hasattr(value, "__array__"):
            raise ArgumentError(
                f"the {self.name} engine computes on {_spell(self.kind)} and got a {_spell(type(value))}",
                fix=f"make it one with {self!r}.array(...)",
            )
        return value

    def _call(self, op: str, positional: Sequence[object], named: dict[str, object]) -> Call:
        """The call without data, as rules read it: every array lies whole on one worker."""
        arrays: list[Any] = []
        leaves = tuple(refer(each, arrays, self.kind) for each in positional)
        arguments = {name: refer(value, arrays, self.kind) for name, value in named.items()}
        if not arrays:
            raise ArgumentError(f"{op} needs an array", fix=f"make one with {self!r}.array(...)")
        return Call(op, tuple(self._topology(array) for array in arrays), arguments, leaves)

    def _topology(self, array: Any) -> Topology:
        return Topology(WORKER, (Replicate(),), tuple(array.shape), short_dtype(str(array.dtype)))

    @abstractmethod
    def _facts_of(self, call: Call, shapes: tuple[Shape, ...]) -> Any:
        """What a function marked `aware` gets first."""

    @abstractmethod
    def array(self, values: Any, dtype: str | None = None) -> Any:
        """Numbers, lists or a NumPy array as an array of this engine; Python's floats become float32."""

    @abstractmethod
    def numpy(self, array: Any) -> Any:
        """The array as a NumPy array."""

    @abstractmethod
    def dtype(self, name: str) -> Any:
        """The engine's dtype of a name: "float32", "f32"."""

    @abstractmethod
    def requires_grad_(self, array: Any) -> Any:
        """The array, with gradients from now on."""

    @abstractmethod
    def supports_distributed(self) -> bool:
        """Whether the three collectives below reach other processes."""

    @abstractmethod
    def all_reduce_sum(self, tensor: Any, group: Any = None) -> Any:
        """The sum of what every rank of the group gives, at every rank."""

    @abstractmethod
    def all_gather(self, tensor: Any, group: Any = None) -> Any:
        """What every rank of the group gives, one after the other along dim 0, at every rank."""

    @abstractmethod
    def reduce_scatter(self, tensor: Any, group: Any = None) -> Any:
        """Of the sum of what every rank gives, cut along dim 0: the part of this rank."""


def _spell(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
