"""Calls seen before, by what was typed: one look-up, whatever the door.

Methods, `torch.*`, `F.*` and `loom.*` come here with the function and its arguments. A call that led to exactly one
entry of dispatch, with the tensors that were given and nothing else, is remembered under its topologies and arguments,
and the next one like it goes straight to the kernel. Everything else, and every call while somebody watches, takes the
general way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from meshloom.engines import private
from meshloom.mesh import Lease
from meshloom.ops import ALIASES, OPS
from meshloom.processes.divergence import STORY
from meshloom.runtime import leases, state
from meshloom.tensor.base import Tensor
from meshloom.tensor.binding import NUMBERS
from meshloom.tensor.calling import OVERLOADS, PURE, invoke
from meshloom.tensor.dispatch import TRAIL, Resolved
from meshloom.tensor.entries import CACHES, LIMIT, MASK, Entry, identity, number_arguments
from meshloom.tensor.views import attach, attach_plain
from meshloom.tensor.writing import note_write

_any_autocast = private.is_any_autocast_enabled

# A call seen before: the given tensors, the arrays and numbers of the call and its keywords to the results, wrapped.
Repeat = Callable[[list[Tensor], list[Any], dict[str, Any]], Any]


def _repeat_call(found: Resolved, order: tuple[int, ...] | None, result: object) -> Repeat:
    """The next call like one that led to an entry; `order` says which of the given tensors are its operands."""
    entry = found.entry
    run: Any = found.function() if found.op.signature is not None or order is not None else found.shortest()
    is_short = order is None and result.__class__ is Tensor and not entry.leased
    return _repeat_one(found, run) if is_short else _repeat_any(found, run, order)


def _repeat_one(found: Resolved, run: Callable[..., torch.Tensor]) -> Repeat:
    """Of a call with one result."""
    entry, out, salt = found.entry, found.entry.out, found.entry.salt
    kernel = None if entry.kernel.simple else entry.kernel
    free, tracked, dtype = entry.makers
    is_view, name, args, named = entry.is_view, *_describe_call(found)
    numbers = tuple(number_arguments(args))

    def repeat(tensors: list[Tensor], datas: list[Any], kwargs: dict[str, object]) -> Any:
        number = hash((salt, *[each._number for each in tensors], *numbers)) & MASK if salt else 0  # as `identity`
        if kernel is None:
            result = run(*datas)
        else:
            STORY.identity = number
            result = kernel.run(datas, run)
            STORY.identity = 0
        has_gradient = result.requires_grad
        if has_gradient and entry.communicates_back:
            result = entry.follow(result, tensors, False, 5)
        if result.dtype is dtype and result.is_cpu and result.__class__ is torch.Tensor:  # as `wrap`, a call less
            made = tracked() if has_gradient else free()
            made._data, made.topology = result, out
        else:
            made = entry.wrap(result)
        if is_view:
            attach_plain(tensors[0], made, name, args, named)
        if salt:
            made._number = number
        return made

    return repeat


def _repeat_any(found: Resolved, run: Any, order: tuple[int, ...] | None) -> Repeat:
    """Of a call with several results, on a mesh that may be closed, or whose operands come in another order."""
    entry, kernel = found.entry, None if found.entry.kernel.simple else found.entry.kernel
    name, args, named = _describe_call(found)

    def repeat(tensors: list[Tensor], datas: list[Any], kwargs: dict[str, object]) -> Any:
        if order is not None:
            tensors, datas = [tensors[i] for i in order], [datas[i] for i in order]
        if entry.salt:
            STORY.identity = number = identity(entry.salt, tensors, args)
        results = run(*datas) if kernel is None else kernel.run(datas, run)
        if entry.communicates_back:
            results = entry.follow(results, tensors, False, 5)
        made = entry.wrap(results)
        if entry.is_view:
            if made.__class__ is Tensor:
                attach_plain(tensors[0], made, name, args, named)
            else:
                attach(tensors[0], made, name, args, named)
        if entry.salt:
            STORY.identity = 0
            for i, each in enumerate(made if isinstance(made, tuple) else (made,)):
                each._number = number + i
        return made

    return repeat


def _describe_call(found: Resolved) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The op and its arguments: of a view all, else the numbers; tensors would live as long as this is remembered."""
    if found.entry.is_view:
        return found.op.name, found.args[1:], found.kwargs
    return found.op.name, tuple([each for each in found.args[1:] if each.__class__ in NUMBERS]), {}


def _repeat_with_numbers(found: Resolved) -> Repeat:
    """Of a pointwise op with numbers among its arguments, which do not matter to its entry."""
    entry = found.entry
    direct: Any = entry.direct

    def repeat(tensors: list[Tensor], datas: list[object], kwargs: dict[str, object]) -> Any:
        result = direct(*datas, **kwargs)
        if entry.communicates_back and result.requires_grad:
            result = entry.follow(result, tensors, False, 5)
        made = entry.wrap(result)
        if entry.salt:
            made._number = identity(entry.salt, tensors, [each for each in datas if each.__class__ is not torch.Tensor])
        return made

    return repeat


def _return_itself(tensors: list[Tensor], datas: list[object], kwargs: dict[str, object]) -> Tensor:
    """Of a cast to the dtype that the tensor has."""
    return tensors[0]


QUICK: dict[object, Repeat] = {}
POINTWISE = frozenset(
    name for name in (*OPS, *ALIASES) if OPS[ALIASES.get(name, name)].signature is None and name not in OVERLOADS
)


def call_quickly(head: object, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = None) -> Any:
    """A call of `name`, under the key that `head` and the arguments make."""
    if not state.plain or _any_autocast():
        return invoke(name, args, kwargs, function)
    key: list[object] = [head]
    tensors: list[Tensor] = []
    datas: list[Any] = []
    is_pointwise = name in POINTWISE
    for each in (*args, *kwargs.values()) if kwargs and not is_pointwise else args:
        kind = each.__class__
        if kind is Tensor:
            key.append(each.topology)
            tensors.append(each)
            datas.append(each._data)
        elif kind is int or kind is float or kind is bool:
            if is_pointwise:
                key.append(kind)
                datas.append(each)
            elif each or kind is not float:  # 0.0 equals -0.0
                key += (kind, each)
            else:
                key.append(repr(each))
        elif each is None or kind is str or kind is torch.dtype:
            key.append(each)
            if is_pointwise:
                datas.append(each)
        elif is_pointwise or not add_part(key, tensors, datas, each, kind):
            return invoke(name, args, kwargs, function)
    if kwargs:
        if is_pointwise and kwargs.get("inplace") is False:  # as `F.silu` and its like always say
            kwargs = {word: each for word, each in kwargs.items() if word != "inplace"}
        key += (dict, *kwargs)
        if is_pointwise:
            for each in kwargs.values():
                if each.__class__ not in _NUMBERS:
                    return invoke(name, args, kwargs, function)
                key.append(each.__class__)
    found = QUICK.get(tuple(key))
    if found is not None:
        try:
            return found(tensors, datas, kwargs)
        except RuntimeError:
            if len({each.is_meta for each in datas if each.__class__ is torch.Tensor}) < 2:
                raise
            return invoke(name, args, kwargs, function)  # beside one without data the others count for their shapes
    return _call_first(tuple(key), tensors, name, args, kwargs, function)


_NUMBERS = frozenset((int, float))
_BOUND = frozenset((int, type(None)))
_DTYPE = {torch.dtype}
_NOTHING = (0,)


def add_part(key: list[object], tensors: list[Tensor], datas: list[object], value: Any, kind: type) -> bool:
    """Add a list, a tuple, a shape or a slice to a key; False for what no key can hold."""
    if kind is slice:
        start, stop, step = value.start, value.stop, value.step
        if not (start.__class__ in _BOUND and stop.__class__ in _BOUND and step.__class__ in _BOUND):
            return False
        key += (slice, start, stop, step)
        return True
    if kind is tuple or kind is list or kind is torch.Size:
        key += (kind, len(value))  # x[[0, 0]] is not x[0, 0]
        for each in value:
            inner = each.__class__
            if inner is Tensor:
                key.append(each.topology)
                tensors.append(each)
                datas.append(each._data)
            elif inner is int or each is None or each is Ellipsis:
                key.append(each)
            elif inner is torch.Tensor and each.shape == _NOTHING and each.is_cpu and not each.requires_grad:
                key += (inner, each.dtype)  # joined to others it adds nothing: how a cache of keys begins
            elif not (inner is slice and add_part(key, tensors, datas, each, inner)):
                return False
        return True
    if value is Ellipsis:
        key.append(value)
        return True
    return False


def _call_first(
    key: object,
    tensors: list[Tensor],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    function: Callable[..., object],
) -> Any:
    """A call in the general way; what it led to is remembered."""
    if name in OVERLOADS:
        if name not in PURE:
            return invoke(name, args, kwargs, function)
    elif ALIASES.get(name, name) not in OPS:
        return invoke(name, args, kwargs, function)
    before, TRAIL.calls = TRAIL.calls, []
    try:
        result = invoke(name, args, kwargs, function)
        calls = TRAIL.calls
    finally:
        TRAIL.calls = before
    if len(calls) == 1 and calls[0][1] is result:
        found = calls[0][0]
        order = _order(found.tensors, tensors)
        if order is not None and (quick := _quick(name, found, result, order, len(args) + len(kwargs))) is not None:
            _remember(QUICK, key, quick)
    elif args and result is args[0] and name in PURE and not kwargs and {*map(type, args[1:])} <= _DTYPE:
        _remember(QUICK, key, _return_itself)
    return result


def _quick(name: str, found: Resolved, result: object, order: tuple[int, ...], arguments: int) -> Repeat | None:
    """What the next call like this one needs; None where that would be no shorter."""
    in_order = None if order == tuple(range(len(order))) else order
    if name not in POINTWISE or arguments == len(order):
        return _repeat_call(found, in_order, result)
    return _repeat_with_numbers(found) if found.entry.direct is not None and in_order is None else None


def _order(operands: list[Tensor], given: list[Tensor]) -> tuple[int, ...] | None:
    """Which of the given tensors each operand is; None unless all are used, each once."""
    left = list(range(len(given)))
    found = []
    for operand in operands:
        place = next((i for i in left if given[i] is operand), None)
        if place is None:
            return None
        left.remove(place)
        found.append(place)
    return None if left else tuple(found)


# Calls in place


WRITES: dict[object, Entry] = {}


def write_quickly(name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A pointwise op in place: torch's own on the arrays, where a call like it has been that before."""
    target = args[0]
    if target.__class__ is not Tensor or target._recipe is not None or not state.plain:  # autocast leaves writes alone
        return invoke(name, args, kwargs)
    key: list[object] = [name]
    datas: list[Any] = []
    for each in args:
        kind = each.__class__
        if kind is Tensor:
            key.append(each.topology)
            datas.append(each._data)
        elif kind is float or kind is int:
            key.append(kind)
            datas.append(each)
        else:
            return invoke(name, args, kwargs)
    if kwargs:
        key += kwargs
        for each in kwargs.values():
            if each.__class__ not in _NUMBERS:
                return invoke(name, args, kwargs)
            key.append(each.__class__)
    entry = WRITES.get(tuple(key))
    if entry is None:
        return _write_first(tuple(key), name, args, kwargs)
    data, is_padded = datas[0], entry.out.padded
    tracked, salt = data.requires_grad, entry.salt
    if (is_padded or salt) and torch.is_grad_enabled() and _is_any_tracked(datas):
        return invoke(name, args, kwargs)  # padding is not zeroed behind autograd's back; gradients may communicate
    function(*datas, **kwargs)
    if salt:
        for each in args:  # as `identity` does
            part = each._number if each.__class__ is Tensor else hash(each) if each == each else 0
            salt = (salt * 1000003 + part) & MASK
        target._number = salt
    if is_padded:
        target._mask_padding_()
    if data.requires_grad and torch.is_grad_enabled():
        if entry.communicates_back:
            entry.follow(data, [each for each in args if each.__class__ is Tensor], is_written=True)
        if not tracked:
            target._mirror()
    _increment_version((target,))
    if target._view is not None:
        note_write(target._view[0])
    return target


_increment_version = private.increment_version


def _is_any_tracked(datas: list[Any]) -> bool:
    return any(torch.is_tensor(each) and each.requires_grad for each in datas)


def _write_first(key: object, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """A call in place in the general way; if torch's own on the arrays did it, it is remembered."""
    before, TRAIL.written = TRAIL.written, []
    try:
        result = invoke(name, args, kwargs)
        written = TRAIL.written
    finally:
        TRAIL.written = before
    entry = written[0].entry if len(written) == 1 else None
    is_plain = entry is not None and all(each is None for each in entry.kernel.prepare)
    if entry is not None and is_plain and not entry.out.partial_axes:
        _remember(WRITES, key, entry)
    return result


_lock = threading.Lock()


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep what the next call like this one needs; the oldest goes when the cache is full."""
    with _lock:
        if len(cache) >= LIMIT:
            del cache[next(iter(cache))]
        cache[key] = value


def _forget(_: Lease) -> None:
    with _lock:
        QUICK.clear()
        WRITES.clear()


CACHES += (QUICK, WRITES)
leases.listen(_forget)
