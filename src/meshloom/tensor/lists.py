"""Functions of lists of tensors (`_foreach_*`, `_fused_*`, those of `GradScaler`), as one call on stored arrays.

Optimizers and `clip_grad_norm_` call them. Where the tensors at each place of the lists lie alike, the arrays do what
the tensors would; elsewhere the tensors are taken one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from meshloom.engines import private
from meshloom.engines.layout import fill, short_name
from meshloom.errors import UnsupportedError
from meshloom.ops import OPS
from meshloom.placement import Topology
from meshloom.runtime import state
from meshloom.tensor.base import Tensor, maker
from meshloom.tensor.calling import invoke
from meshloom.tensor.entries import wrap_array
from meshloom.tensor.moving import redistribute, shadow_of
from meshloom.tensor.writing import note_write

_REDUCING = frozenset("_foreach_norm _foreach_max _foreach_powsum".split())
_MIXING = frozenset(("_foreach_mm",))  # an element of a result depends on several of an operand
_CHECK = "_amp_foreach_non_finite_check_and_unscale_"


def is_of_lists(name: str) -> bool:
    """Whether a function of torch takes lists of tensors."""
    return name.startswith(("_foreach_", "_fused_")) or name == _CHECK


def run_lists(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of lists on our tensors: a call seen before goes straight to the arrays."""
    read = _read(name, args, kwargs) if state.plain else None
    if read is None:
        return _run(function, name, args, kwargs)[0]
    key, arrays = read
    alike = _ALIKE.get(key)
    if alike is None:
        results, is_alike = _run(function, name, args, kwargs)
        if is_alike:
            _remember(key, results)
        return results
    results = _call(function, name, arrays, kwargs)
    if name.endswith("_"):
        _note_writes(name, args, alike.is_padded)
        return None
    return type(results)([_wrap_like(data, like) for data, like in zip(results, alike.results, strict=True)])


class _Alike(NamedTuple):
    """A call that ran on arrays: topologies of the results with what makes them, and whether any tensor is padded."""

    results: list[Any]
    is_padded: bool


_ALIKE: dict[object, _Alike] = {}


def _read(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, list[Any]] | None:
    """What a call is known by, and its arrays; None for one that is not known by topologies and kinds of numbers."""
    key: list[object] = [name, *kwargs]
    arrays: list[Any] = []
    for each in args:
        kind = each.__class__
        if kind is list or kind is tuple:
            kinds = set(map(type, each))
            if kinds == _OURS:
                key += map(_topology, each)
                arrays.append([*map(_data, each)])
            elif kinds <= _NUMBERS and not any(item.__class__ is torch.Tensor and item.ndim for item in each):
                key += map(type, each)
                arrays.append([*each])
            else:
                return None
            key.append(len(each))
        elif kind is float or kind is int or (kind is torch.Tensor and not each.ndim):
            key.append(kind)
            arrays.append(each)
        else:
            return None
    for each in kwargs.values():
        if isinstance(each, (list, tuple, Tensor)):
            return None
    return tuple(key), arrays


_topology, _data, _view = map(attrgetter, ("topology", "_data", "_view"))
_OURS = {Tensor}
_NUMBERS = {torch.Tensor, float, int}


def _remember(key: Any, results: Sequence[torch.Tensor]) -> None:
    topologies = [each for each in key if isinstance(each, Topology)]
    if any(each.mesh.lease is not None for each in topologies):
        return  # a mesh that may be closed
    if len(_ALIKE) >= 1 << 10:
        _ALIKE.clear()
    likes = [
        (each.topology, each.dtype, maker(each.topology, each.dtype, False)) if isinstance(each, Tensor) else None
        for each in results or ()
    ]
    _ALIKE[key] = _Alike(likes, any(each.padded for each in topologies))


def _wrap_like(data: torch.Tensor, like: Any) -> Any:
    if like is None:
        return data
    topology, dtype, make = like
    if data.requires_grad or topology.padded or not data.is_cpu or data.dtype is not dtype:
        return wrap_array(topology, fill(data, topology, 0) if topology.padded else data)
    made = make()
    made._data, made.topology = data, topology
    return made


def _note_writes(name: str, args: tuple[object, ...], is_padded: bool) -> None:
    """After a write into the tensors of lists: the padding is zero again, and torch knows of it."""
    lists = [each for each in (args if name.startswith("_fused_") else args[:1]) if isinstance(each, (list, tuple))]
    written = [*chain.from_iterable(each for each in lists if each and each[0].__class__ is Tensor)]
    if is_padded:
        for item in written:
            item._mask_padding_()
    if torch.is_grad_enabled() or any(map(_view, written)):
        for item in written:
            note_write(item)
    else:
        private.increment_version(written)


def _run(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """The results in the general way, and whether the arrays gave them."""
    given = [
        [shadow_of(x) if isinstance(x, Tensor) else x for x in each]
        for each in (*args, *kwargs.values())
        if _is_list(each)
    ]
    topologies = _common(given)
    if name in _MIXING:
        topologies = None
    if topologies is not None and not (_looks_at_all(name) and not (state.plain and all(map(_is_plain, topologies)))):
        return _run_arrays(function, name, args, kwargs, topologies), True
    if name == _CHECK:
        _check_each(*args, **kwargs)
        return None, False
    if name.startswith("_fused_"):
        raise UnsupportedError(
            f"{name} needs parameters, gradients and state that lie alike",
            fix="put the state where its parameters are: state.redistribute(p.placements), or use fused=False",
        )
    return _run_each(function, name, args, kwargs), False


def _is_list(value: object) -> bool:
    return isinstance(value, (tuple, list)) and any(isinstance(each, torch.Tensor) for each in value)


def _looks_at_all(name: str) -> bool:
    """Whether a result depends on all elements of a tensor."""
    return name in _REDUCING or name == _CHECK


def _is_plain(topology: Topology | None) -> bool:
    return topology is None or (topology.is_whole and not topology.padded)


def _common(lists: Sequence[Sequence[object]]) -> list[Topology | None] | None:
    """The topology at each place of the lists, if all tensors there lie alike and none is partial."""
    found: list[Topology | None] = []
    for place in range(max(map(len, lists), default=0)):
        here = [each[place] for each in lists if place < len(each)]
        kinds = {each.topology.with_dtype("f32") for each in here if isinstance(each, Tensor)}
        plain = [each for each in here if isinstance(each, torch.Tensor) and not isinstance(each, Tensor) and each.ndim]
        if len(kinds) > 1 or (kinds and plain) or any(each.partial_axes for each in kinds):
            return None
        found.append(next(iter(kinds), None))
    return found


def _array(value: object) -> Any:
    """An argument as the arrays' function takes it."""
    if isinstance(value, Tensor):
        return shadow_of(value)._data
    return [_array(each) for each in value] if isinstance(value, (tuple, list)) else value


def _single(value: object) -> Any:
    """An argument that is no list; a number on the mesh is wanted whole."""
    if isinstance(value, Tensor):
        return redistribute(value, value.topology.replicated.placements)._data
    return _array(value)


def _run_arrays(
    function: Callable[..., object], name: str, args: Any, kwargs: dict[str, Any], topologies: Sequence[Topology | None]
) -> Any:
    for log in state.logs:
        for each in chain.from_iterable(filter(_is_list, (*args, *kwargs.values()))):
            if isinstance(each, Tensor):
                log.note_tensor(shadow_of(each))
    arrays = [_array(each) if _is_list(each) else _single(each) for each in args]
    named = {key: _array(each) if _is_list(each) else _single(each) for key, each in kwargs.items()}
    results = _call(function, name, arrays, named)
    if name.endswith("_"):
        for each in (*args, *kwargs.values()) if name.startswith("_fused_") else args[:1]:
            for tensor in each if _is_list(each) else ():
                if isinstance(tensor, Tensor):
                    shadow_of(tensor)._mask_padding_()
                    note_write(tensor)
        return None
    return _wrap(name, results, topologies)


def _call(function: Callable[..., Any], name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The function on arrays. Torch's fused ones go through memory from end to end, whatever the strides are.

    So they are given all arrays of a place in the order of its parameter, and what they write is copied back.
    """
    if not name.startswith("_fused_"):
        return function(*args, **kwargs)
    lists = [each for each in (*args, *kwargs.values()) if _is_list(each)]
    read = lists[1] if kwargs.get("grad_scale") is None else None  # gradients are written where they are scaled back
    turned = []
    for i, parameter in enumerate(lists[0]):
        like = parameter if is_dense(parameter) else torch.empty_like(parameter)
        for each in lists:
            array = each[i] if i < len(each) else None
            if isinstance(array, torch.Tensor) and array.ndim and not is_ordered_as(array, like):
                each[i] = torch.empty_like(like, dtype=array.dtype).copy_(array)
                turned += [(array, each[i])] if each is not read else []
    written = [array for each in lists if each is not read for array in each if isinstance(array, torch.Tensor)]
    results = function(*args, **kwargs)
    private.increment_version(
        written
    )  # torch's own leave that out, and weights that are gathered would stay as they were
    for array, copy in turned:
        array.copy_(copy)
    return results


def is_dense(array: torch.Tensor) -> bool:
    """Whether an array's elements fill its memory, in whatever order.

    >>> wide = torch.ones(4, 6)
    >>> is_dense(wide.t()), is_dense(wide[:, :3])
    (True, False)
    """
    return array.is_contiguous() or is_ordered_as(array, torch.empty_like(array))


def is_ordered_as(array: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two arrays of one shape have their elements in the same places of their memory.

    >>> is_ordered_as(torch.ones(3, 1), torch.ones(1, 3).t()), is_ordered_as(torch.ones(3, 3), torch.ones(3, 3).t())
    (True, False)
    """
    one, two = array.stride(), other.stride()
    return one == two or all(a == b for a, b, size in zip(one, two, array.shape, strict=True) if size > 1)


def _wrap(name: str, results: Any, topologies: Sequence[Topology | None]) -> Any:
    def wrap(data: torch.Tensor, topology: Topology | None) -> Any:
        if topology is None:
            return data
        shape = tuple(data.shape) if name in _REDUCING else topology.shape
        target = Topology(topology.mesh, topology.placements, shape, short_name(data.dtype)) if shape else None
        if target is None:
            there = topology.replicated.placements
            return Tensor(Topology(topology.mesh, there, (), short_name(data.dtype)), data)
        return Tensor(target, fill(data, target, 0) if target.padded else data)

    return type(results)(wrap(data, topology) for data, topology in zip(results, topologies, strict=True))


def _run_each(function: Callable[..., object], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function of one tensor, on each; plain ones among them are torch's."""
    op = name.removeprefix("_foreach_")
    count = max(len(each) for each in (*args, *kwargs.values()) if _is_list(each))
    results = [
        _call_one(op, *taken) if _is_ours(*taken) else _call_plain(function, i, count, args, kwargs)
        for i in range(count)
        for taken in [_at(i, count, args, kwargs)]
    ]
    return None if name.endswith("_") else tuple(results)


def _at(
    place: int, count: int, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[list[Any], dict[str, Any]]:
    def take(value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim == 1:  # numbers, one for each
            return value[place].item()
        return value[place] if isinstance(value, (tuple, list)) and len(value) == count else value

    return [take(each) for each in args], {key: take(each) for key, each in kwargs.items()}


def _is_ours(args: list[object], kwargs: dict[str, object]) -> bool:
    return any(isinstance(each, Tensor) for each in (*args, *kwargs.values()))


def _call_plain(
    function: Callable[..., Any], place: int, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The function on lists of one, of which none is ours."""

    def take(value: object) -> Any:
        if isinstance(value, torch.Tensor) and value.ndim == 1:
            return value[place : place + 1]
        return value[place : place + 1] if isinstance(value, (tuple, list)) and len(value) == count else value

    results = function(*map(take, args), **{key: take(each) for key, each in kwargs.items()})
    return None if results is None else results[0]


def _call_one(op: str, args: list[object], kwargs: dict[str, object]) -> Any:
    name = op.rstrip("_")
    if name == "norm":
        return invoke("linalg_vector_norm", tuple(args[:1]), {"ord": (args[1:] or [2])[0], **kwargs})
    if name == "powsum":
        power = kwargs.pop("ord", (args[1:] or [2])[0])
        return invoke("sum", (invoke("pow", (invoke("abs", (args[0],), {}), power), {}),), kwargs)
    if name == "max":
        return invoke("amax", tuple(args), kwargs)
    if name in _LIMITS:
        limit = _LIMITS[name] if isinstance(args[1], (int, float)) else name
        made = invoke(limit, tuple(args), kwargs)
        return invoke("copy_", (args[0], made), {}) if op.endswith("_") else made  # torch has no maximum_ of one tensor
    if name in OPS and OPS[name].number == "value" and len(args) == 4:
        value = args.pop()
        kwargs = {"value": value.item() if isinstance(value, torch.Tensor) else value, **kwargs}
    return invoke(op, tuple(args), kwargs)


_LIMITS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # by a number under another name


def _check_each(tensors: Sequence[Any], found: torch.Tensor, scale: torch.Tensor) -> None:
    """Scale gradients back and note whether one of them is not finite, anywhere on the mesh."""
    for tensor in tensors:
        is_finite = invoke("isfinite", (tensor,), {}) if isinstance(tensor, Tensor) else tensor.isfinite()
        if not is_finite.all().item():
            found.fill_(1.0)
        if isinstance(tensor, Tensor):
            invoke("mul_", (tensor, scale), {})
        else:
            tensor.mul_(scale)
