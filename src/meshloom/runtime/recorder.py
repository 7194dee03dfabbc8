"""Array calls written down instead of made: what a trace of tensor ops consists of.

While a capture is open in a thread, every array call below autograd comes here. Its results are allocated, from shapes
alone, and nothing is computed; on replay each call is made once, into the same arrays. Views are free and are taken at
once. What depends on no input (masks, filled arrays, random draws) is a constant: it is computed now, and again on
replay only if something later writes into it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from meshloom.engines import private
from meshloom.engines.private import OpOverload, TorchDispatchMode, tree_flatten, tree_map_only
from meshloom.errors import TraceError

Call = Callable[[], Any]

# Only the shape and dtype of their operand matter.
ALIKE = frozenset(
    "new_zeros new_ones new_empty new_full new_empty_strided zeros_like ones_like empty_like full_like".split()
)
# Their schema says that they make something; they hand out their operand's memory.
_HANDED_ON = frozenset("_unsafe_view lift lift_fresh".split())
# Functions without an `out=` in Python that have one under another name.
_AS: dict[str, Callable[..., Any]] = {
    "relu": lambda x, *, out: torch.clamp_min(x, 0, out=out),
}


@lru_cache(maxsize=4096)
def _kind(func: OpOverload) -> str:
    """What sort of call it is: view, alike, shape (changes an operand's metadata), write, index, value or function."""
    name = func._schema.name.partition("::")[2]
    if not func._schema.name.startswith(("aten::", "prims::")):
        return "foreign"
    if name in _HANDED_ON:
        return "view"
    if name in ALIKE:
        return "alike"
    if torch.Tag.inplace_view in func.tags:
        return "shape"
    if func._schema.is_mutable:
        return "write"
    if func is torch.ops.aten.index.Tensor:
        return "index"
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return "value"
    aliased = any(argument.alias_info is not None for argument in func._schema.arguments)
    return "view" if aliased else "function"


def memory_of(tensor: torch.Tensor) -> int:
    """A name for the memory that an array lies in, for as long as it lives."""
    result: int = tensor.untyped_storage()._cdata
    return result


class Step:
    """One array call: the function, its operands and its results."""

    __slots__ = ("args", "constant", "func", "kwargs", "results", "written")

    def __init__(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        results: Sequence[torch.Tensor],
        written: Sequence[int],
        constant: bool,
    ) -> None:
        self.func, self.args, self.kwargs, self.results = func, args, kwargs, results
        self.written, self.constant = written, constant


class Recorder(TorchDispatchMode):
    """Writes array calls into a list of steps."""

    def __init__(self, note: Callable[[Step], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._constants: set[int] = set()
        self._kept: list[Any] = []  # so that no address comes twice while the capture lasts
        self.rewritten: set[int] = set()  # constants that a later call writes into
        self.made: dict[int, weakref.ref[Any]] = {}  # memory of results, and how large it is
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        kind = _kind(func)
        if kind == "index":  # by numbers the shape is known, by a mask it depends on values
            kind = "value" if any(each.dtype in (torch.bool, torch.uint8) for each in tensors[1:]) else "function"
        if kind in ("view", "shape") or (tensors and all(each.is_meta for each in tensors)):
            return func(*args, **kwargs)
        constant = kind == "alike" or all(memory_of(each) in self._constants for each in tensors if not each.is_meta)
        if kind == "foreign" or (kind == "value" and not constant):
            raise TraceError(
                f"{func} needs values, and while a trace is captured nothing is computed"
                if kind == "value"
                else f"{func} cannot be captured",
                fix="do it before or after the capture",
            )
        if kind == "write":
            return self._write(func, args, kwargs, constant)
        return self._constant(func, args, kwargs) if constant else self._function(func, args, kwargs)

    def _constant(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        results = func(*args, **kwargs)
        made = [each for each in tree_flatten(results)[0] if isinstance(each, torch.Tensor) and not each.is_meta]
        self._constants.update(map(memory_of, made))
        self._add(func, args, kwargs, results, [memory_of(each) for each in made], True)
        return results

    def _function(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        results = tree_map_only(torch.Tensor, self._allocate_noted, _on_meta(func, args, kwargs))
        self._add(func, args, kwargs, results, [], False)
        return results

    def _allocate_noted(self, shape: torch.Tensor) -> torch.Tensor:
        made = _allocate(shape)
        storage = made.untyped_storage()
        self.made[memory_of(made)] = weakref.ref(storage)
        self.sizes[memory_of(made)] = storage.nbytes()
        return made

    def makes(self, array: torch.Tensor) -> bool:
        """Whether an array is a result of a call that was written down."""
        return memory_of(array) in self.made or memory_of(array) in self._constants

    def forget(self) -> None:
        """Let go of the steps: the capture is over."""
        self._kept.clear()

    def _write(self, func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object], constant: bool) -> Any:
        targets = [memory_of(each) for each in _targets(func, args, kwargs)]
        if constant:
            results = func(*args, **kwargs)
            self._add(func, args, kwargs, None, targets, True)
            return results
        self.rewritten.update(target for target in targets if target in self._constants)
        self._constants.difference_update(targets)
        fresh, results = _what_returns(func, args, kwargs)
        self._add(func, args, kwargs, fresh, targets, False)
        return results

    def _add(
        self,
        func: OpOverload,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        results: Any,
        written: Sequence[int],
        constant: bool,
    ) -> None:
        step = Step(func, args, kwargs, results, written, constant)
        self._kept.append(step)
        self._note(step)


def _targets(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> list[torch.Tensor]:
    """The operands that a call writes into."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_flatten(given)[0] if isinstance(each, torch.Tensor)]
    return found


def _what_returns(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any, Any]:
    """What a call that writes returns, without making it: its targets, and new arrays beside them if there are any."""
    targets = iter(_targets(func, args, kwargs))
    returns = func._schema.returns
    if all(each.alias_info is not None for each in returns):
        listed = [next(targets) for _ in returns]
        return None, listed[0] if len(listed) == 1 else tuple(listed) or None
    made = _on_meta(func, args, kwargs)
    shapes = made if isinstance(made, (tuple, list)) else (made,)
    fresh = [None if r.alias_info is not None else _allocate(s) for r, s in zip(returns, shapes, strict=True)]
    listed = [next(targets) if each is None else each for each in fresh]
    return tuple(fresh), listed[0] if len(listed) == 1 else tuple(listed)


def _shape_only(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _allocate(shape: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)


def _on_meta(func: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """What a call gives, as shapes."""
    there = {
        key: torch.device("meta") if key == "device" and value is not None else value for key, value in kwargs.items()
    }
    try:
        return func(*_to_shapes(args), **_to_shapes(there))
    except NotImplementedError as error:
        raise TraceError(f"{func} cannot be captured: its shapes are not known without running it") from error


def _to_shapes(values: object) -> Any:
    return tree_map_only(torch.Tensor, _shape_only, values)


# replay


def replayable(step: Step) -> Call:
    """The fastest way to make a call again into the same arrays: one call into torch where there is one."""
    if step.results is None:
        return _in_place(step)
    if isinstance(step.results, torch.Tensor):
        found = _into(step, step.results)
        if found is not None:
            return found
    return _copying(step)


def _in_place(step: Step) -> Call:
    """A call that writes into its operands: the method of the first, or torch's function with `out=`."""
    name = step.func._schema.name.partition("::")[2]
    method = getattr(torch.Tensor, name, None)
    function = getattr(torch, name, None)
    for candidate in (method if name.endswith("_") else None, function if "out" in step.kwargs else None):
        if candidate is not None and _accepts(candidate, step.args, step.kwargs):
            return partial(candidate, *step.args, **step.kwargs)
    return partial(step.func, *step.args, **step.kwargs)


def _into(step: Step, out: torch.Tensor) -> Call | None:
    """A function whose result goes into an array that is there."""
    if not _has_channels_last(out) and any(map(_has_channels_last, tree_flatten(step.args)[0])):
        return None  # kernels of pictures turn `out` as their operand is, under views that were taken of it
    name = step.func._schema.name.partition("::")[2]
    for candidate in (_AS.get(name), getattr(torch, name, None), getattr(private.nn_functions, name, None)):
        if candidate is not None and _accepts(candidate, step.args, {**step.kwargs, "out": out}):
            return partial(candidate, *step.args, **step.kwargs, out=out)
    return None


def _has_channels_last(value: object) -> bool:
    """Whether it is an array of pictures, or volumes, that has the channels of a place side by side."""
    if not isinstance(value, torch.Tensor):
        return False
    order = _CHANNELS_LAST.get(value.dim())
    return order is not None and value.is_contiguous(memory_format=order) and not value.is_contiguous()


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _accepts(candidate: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether a function takes these arguments as they are, tried on shapes."""
    shapes = _to_shapes(kwargs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = candidate(*_to_shapes(args), **shapes)
    except Exception:  # the way that always works is left
        return False
    return "out" not in kwargs or found is shapes["out"]


def _copying(step: Step) -> Call:
    func, args, kwargs = step.func, step.args, step.kwargs
    kept = tree_flatten(step.results, is_leaf=lambda x: x is None)[0]

    def call() -> None:
        found = func(*args, **kwargs)
        listed = tree_flatten(found, is_leaf=lambda x: x is None)[0]
        for target, value in zip(kept, listed, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(value)

    return call
