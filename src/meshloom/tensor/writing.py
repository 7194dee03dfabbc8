"""Writing into tensors: in-place ops, assignment, `out=`. The target keeps its placements; operands are moved to it."""

from __future__ import annotations

from typing import Any

import torch

from meshloom.engines import private
from meshloom.engines.layout import torch_dtype
from meshloom.errors import DTypeError, MeshloomError, ShapeError, ViewError
from meshloom.ops import OPS
from meshloom.ops.shapes import bounds, indexed_dims
from meshloom.placement import Placement, Topology
from meshloom.runtime import state
from meshloom.tensor.base import Tensor
from meshloom.tensor.dispatch import TRAIL, Resolved, call
from meshloom.tensor.entries import identity, remember
from meshloom.tensor.joining import refuse_plain_results
from meshloom.tensor.moving import carry, same_storage, shadow_of, to_dense
from meshloom.tensor.reading import as_tensor
from meshloom.tensor.views import IN_ORDER, MovedView, is_folded, made_anew, moved_view
from meshloom.tensor.watched import Watched


def note_write(tensor: Tensor) -> None:
    """After a write: torch's own flag and version of the tensor, and of what it is a view of, follow its array."""
    private.increment_version((tensor,))
    if tensor._data.requires_grad:
        tensor._mirror()
    if tensor._view is not None:
        note_write(tensor._view[0])


def write(name: str, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The pointwise op `name` of the table, in place."""
    tensor = shadow_of(target)
    if tensor._recipe is not None:
        return _write_shared(f"{name}_", target, args, kwargs)
    if moved_view(tensor) is not None or _keeps_gradients(tensor):
        return _write_view(name, target, tensor, args, kwargs)
    if OPS[name].result == "bool" and tensor.topology.partial_axes:  # a truth value cannot be P(sum)
        return assign(target, call(name, (tensor, *args), kwargs, tensor.topology.reduced.placements), f"{name}_")
    found = Resolved(name, (tensor, *args), kwargs, None, kept=tensor.placements)
    if found.entry.plan.outs[0].shape != tensor.topology.shape:
        _check_fit(f"{name}_", found.entry.plan.outs[0], tensor.topology)
    tracked = torch.is_grad_enabled() and any(each._data.requires_grad for each in found.tensors)
    # masking the padding afterwards would spoil what `sigmoid_` and the like keep of their result for backward
    if not _is_direct(found) or (tracked and tensor.topology.padded):
        _write_result(found, tensor, tracked)
    else:
        _write_directly(found, tensor)
    if found.entry.salt:
        tensor._number = identity(found.entry.salt, found.tensors, found.args)
    note_write(tensor)
    return target


def _write_view(
    name: str, target: Tensor, tensor: Tensor, args: tuple[object, ...], kwargs: dict[str, object]
) -> Tensor:
    """An op in place on a view that does not share its base's memory: the base is written."""
    result = call(name, (made_anew(tensor), *args), kwargs, tensor.topology.reduced.placements)
    _check_fit(f"{name}_", result.topology, tensor.topology)
    return assign(target, result, f"{name}_")


def _check_fit(name: str, result: Topology, target: Topology) -> None:
    """An error if a result does not fit into the target of an op in place."""
    if result.shape != target.shape:
        raise ShapeError(
            f"{name} would give shape {list(result.shape)}, which does not fit into its target",
            target=target,
            fix=f"use {name[:-1]} without the underscore",
        )
    if not torch.can_cast(torch_dtype(result.dtype), torch_dtype(target.dtype)):
        raise DTypeError(f"{name} gives {result.dtype}, which {target.dtype} cannot hold")


def rewrite(name: str, target: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    """An op of the table that changes some elements of its first operand, in place: `scatter_`, `index_put_`."""
    tensor = shadow_of(target)
    if tensor._recipe is not None:  # all of it is written back, and what stays would overwrite what changed
        return _write_shared(f"{name}_", target, args, kwargs)
    # backward may need the value that is about to be overwritten
    source = Tensor(tensor.topology, made_anew(tensor)._data.clone()) if torch.is_grad_enabled() else tensor
    return assign(target, call(name, (source, *args), kwargs, tensor.topology.reduced.placements), f"{name}_")


def _write_result(found: Resolved, tensor: Tensor, tracked: bool) -> None:
    """Compute the op beside its target, then copy the result in."""
    if tracked:  # backward may need the value that is about to be overwritten
        found.tensors[0] = Tensor(tensor.topology, made_anew(tensor)._data.clone())
    result, held = found.perform(), tensor.topology.dtype
    if not torch.can_cast(result.dtype, tensor.dtype):
        raise DTypeError(f"{found.op.name}_ gives {result.topology.dtype}, which {held} cannot hold")
    tensor._data.copy_(result._data)


def _write_directly(found: Resolved, tensor: Tensor) -> None:
    """Let torch's own in-place op write into the target's array."""
    name, held = found.op.name + "_", tensor.topology.dtype
    watched = None
    if state.watching:
        watched = Watched(found.entry, found.tensors)
        state.check(watched.forward)
    ready = found.entry.kernel.prepared([each._data for each in found.tensors])
    try:
        function = found.function(getattr(torch.Tensor, name))
        function(*ready) if watched is None else watched.run(function, *ready)
    except RuntimeError as error:
        if "can't be cast" in str(error):
            raise DTypeError(f"{name} gives a dtype that {held} cannot hold", target=tensor.topology) from error
        raise
    if watched is not None:
        watched.log(found.entry, tensor._data)
    if found.entry.communicates_back and torch.is_grad_enabled():
        found.entry.follow(tensor._data, found.tensors, is_written=True)
    tensor._mask_padding_()
    if not found.known:
        remember(found.key, found.entry)
    if TRAIL.written is not None:
        TRAIL.written.append(found)


def _is_direct(found: Resolved) -> bool:
    """Whether torch's own in-place op on the target's array does it."""
    kernel, plan = found.entry.kernel, found.entry.plan
    name = found.op.name + "_"
    return (
        not kernel.leads
        and kernel.prepare[0] is None
        and plan.raw[0].placements == plan.outs[0].placements
        and hasattr(torch.Tensor, name)
    )


def assign(target: Tensor, value: object, name: str = "copy_") -> Tensor:
    """Copy a value (broadcast, cast, moved as needed) into a tensor."""
    tensor = shadow_of(target)
    if tensor._recipe is not None:
        return _write_shared("copy_", target, (value,), {})
    source = value if isinstance(value, Tensor) else as_tensor(torch.as_tensor(value), tensor.mesh)
    source = shadow_of(source)
    if source.mesh != tensor.mesh:
        source = as_tensor(to_dense(source, name, on_host=True), tensor.mesh)
    if source.topology.shape != tensor.topology.shape:
        source = call("expand", (source, *tensor.topology.shape), {})
    there = source.topology.with_placements(_settle_placements(tensor.topology, source.topology.dtype))
    if there.placements != tensor.placements:
        source = call("to", (source, tensor.dtype), {})
        there = source.topology.with_placements(tensor.placements)
    view = moved_view(tensor)
    if view is not None:
        _write_base(view, source, name) if not view.is_cut else _write_cut(view, tensor, source, there, name)
    elif _keeps_gradients(tensor):
        _overwrite(tensor, source, name)
    else:
        tensor._data.copy_(carry(source, there, name))
        note_write(tensor)
    return target


def _keeps_gradients(tensor: Tensor) -> bool:
    """Whether a write without gradients would change those of a reduction that depend on the parts' values."""
    return not torch.is_grad_enabled() and tensor._data.requires_grad and is_folded(tensor)


def _overwrite(tensor: Tensor, source: Tensor, name: str) -> None:
    """Set a value and keep its gradient, as a dense write without gradients does: the parts are made anew from it."""
    reduced = tensor.topology.reduced
    with torch.enable_grad():
        value = carry(tensor, reduced, name).clone()
        value.detach().copy_(carry(source, source.topology.with_placements(reduced.placements), name).detach())
        parts = carry(Tensor(reduced, value), tensor.topology, name)
    data = tensor._data
    with torch.set_grad_enabled(not (data.is_leaf or (data._base is not None and data._base.is_leaf))):
        data.copy_(parts)
    note_write(tensor)


def _write_shared(name: str, target: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    """A write into a view of which several elements lie in one place: torch does it, on the dense base."""
    from meshloom.tensor.fallback import fallback

    try:
        fallback(getattr(torch.Tensor, name), (target, *args), kwargs, name)
    except RuntimeError as error:
        if isinstance(error, MeshloomError) or "single memory location" not in str(error):
            raise
        raise ViewError(
            f"{name} cannot write into this view: elements of it share memory",
            view=target.topology,
            fix=f"write to the base, or take a copy first: view.clone().{name}(...)",
        ) from error
    note_write(target)
    return target


def _write_cut(view: MovedView, tensor: Tensor, source: Tensor, there: Topology, name: str) -> None:
    """Write into the base of a view with a history of its own: the base's does not change, the view's may begin."""
    with torch.no_grad():
        _write_base(view, Tensor(source.topology, source._data.detach()), name)
    if torch.is_grad_enabled() and source._data.requires_grad:
        tensor._data.copy_(carry(source, there, name))
        tensor._mirror()


def _write_base(view: MovedView, source: Tensor, name: str) -> None:
    """Write a value of the view's shape into the view's base."""
    recipe, base = view.recipe, view.base
    if recipe.name == "getitem" and not recipe.kwargs:
        write_item(base, recipe.args[0], source)
    elif recipe.name in IN_ORDER and recipe.function is None:
        assign(base, call("reshape", (source, base.topology.shape), {}), name)
    elif recipe.name == "transpose" and not recipe.kwargs:
        assign(base, call("transpose", (source, *recipe.args), {}), name)
    else:
        whole = to_dense(made_anew(base), name)
        whole = whole.clone() if same_storage(whole, base._data) else whole
        recipe.of_dense(whole).copy_(to_dense(source, name))
        assign(base, Tensor(base.topology.replicated, whole), name)


def _settle_placements(topology: Topology, dtype: str) -> tuple[Placement, ...]:
    """The target's placements if the source's dtype can be partial that way, else reduced ones."""
    same = dtype == topology.dtype or not topology.partial_axes
    return topology.placements if same else topology.reduced.placements


def fill(target: Tensor, value: Any) -> Tensor:
    """Set every element."""
    tensor = shadow_of(target)
    if tensor._recipe is not None:
        return _write_shared("fill_", target, (value,), {})
    if tensor.topology.partial_axes or moved_view(tensor) is not None:
        if isinstance(value, Tensor):
            return assign(target, value, "fill_")
        full = torch.full(tensor.topology.shape, float("nan") if value != value else value, dtype=tensor.dtype)
        return assign(target, full, "fill_")
    tensor._data.fill_(to_dense(value, "fill_") if isinstance(value, Tensor) else value)
    tensor._mask_padding_()
    note_write(tensor)
    return target


def zero(target: Tensor) -> Tensor:
    """Set every element to zero."""
    tensor = shadow_of(target)
    if tensor._recipe is not None or moved_view(tensor) is not None or _keeps_gradients(tensor):
        return fill(target, 0)
    tensor._data.zero_()
    note_write(tensor)
    return target


def write_item(target: Tensor, index: object, value: object) -> None:
    """`x[index] = value` for ints, slices, None and an ellipsis."""
    tensor = shadow_of(target)
    topology = tensor.topology
    if tensor._recipe is not None:
        _write_shared("__setitem__", target, (index, value), {})
        return
    if moved_view(tensor) is not None:
        copied = call("clone", (made_anew(tensor),), {})
        write_item(copied, index, value)
        assign(target, copied, "setitem")
        return
    given = value if isinstance(value, Tensor) or not isinstance(value, torch.Tensor) else as_tensor(value, tensor.mesh)
    content = to_dense(shadow_of(given), "setitem") if isinstance(given, Tensor) else given
    if isinstance(content, torch.Tensor) and same_storage(content, tensor._data):
        content = content.clone()  # torch does not write an array from itself at other places
    where = _stored_index(index, topology)
    crosses = any(topology.crosses(dim) for dim in range(topology.ndim))
    if crosses or topology.partial_axes or any(len(topology.axes_of[dim]) > 1 for dim in topology.padded_dims):
        whole = to_dense(made_anew(tensor), "setitem").clone()
        _put(whole, where, content, topology)
        assign(target, Tensor(topology.replicated, whole), "setitem")
        return
    _put(tensor._data, where, content, topology)
    note_write(tensor)


def _put(array: torch.Tensor, where: tuple[Any, ...], content: Any, topology: Topology) -> None:
    try:
        array[where] = content
    except RuntimeError as error:
        if "size" not in str(error) and "shape" not in str(error):
            raise
        found = list(content.shape) if isinstance(content, torch.Tensor) else content
        raise ShapeError(
            f"a value of shape {found} does not fit into x[index]", tensor=topology, index=where, reason=error
        ) from None


def _stored_index(index: object, topology: Topology) -> tuple[Any, ...]:
    """The index in the stored array; padding of a dim sharded by one axis is at its end, so positions agree."""
    shape = topology.shape
    return tuple(None if dim is None else _position(each, shape[dim]) for each, dim in indexed_dims(index, shape))


def _position(each: int | slice, size: int) -> int | slice:
    if not isinstance(each, slice):
        return each % size
    taken = bounds(each, size)
    return slice(taken.start, max(taken.stop, taken.start), taken.step)


def write_out(result: Any, out: Any) -> Any:
    """Store a result where `out=` says, and return that."""
    if isinstance(out, (tuple, list)):
        return type(out)(write_out(each, where) for each, where in zip(result, out, strict=True))
    target = out
    if tuple(target.shape) != tuple(result.shape):
        raise ShapeError(f"out= has shape {list(target.shape)} and the result has {list(result.shape)}")
    if not torch.can_cast(result.dtype, target.dtype):
        raise DTypeError(f"the result is {result.dtype} and out= holds {target.dtype}")
    if isinstance(target, Tensor):
        assign(target, result, "out=")
    elif state.shadows is None:  # what is explained is not written
        refuse_plain_results(result)
        target.copy_(to_dense(result, "out=", on_host=True))
    return out
