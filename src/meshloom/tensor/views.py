"""Views that alias as in torch, also where making the view moved data.

A view whose array shares memory with its base needs nothing. One that had to move, or to copy, remembers its base and
how it was made: it is made again when it is read after its base has changed, and a write to it goes into the base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshloom.engines.layout import tracked_nowhere
from meshloom.ops import OPS
from meshloom.placement import Partial
from meshloom.tensor.base import Tensor
from meshloom.tensor.lazy import STORED, Lazy, ask
from meshloom.tensor.moving import redistribute, same_storage, version_of
from meshloom.tensor.refusals import refuse_transforms


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a view is made of its base: the op, its other arguments, which of its results; `function` is torch's own.

    `is_detached` says that the view was then taken from its graph.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: int | None = None
    function: Callable[..., Any] | None = None
    is_detached: bool = False

    def of_tensor(self, base: Tensor) -> Tensor:
        """The view of a base on the mesh."""
        from meshloom.tensor.calling import invoke

        result: Tensor = self._pick(invoke(self.name, (base, *self.args), self.kwargs, self.function))
        return result

    def of_dense(self, base: torch.Tensor) -> torch.Tensor:
        """The view of a dense base, which shares its memory."""
        from meshloom.tensor.calling import torch_function

        name = "__getitem__" if self.name == "getitem" else self.name
        result: torch.Tensor = self._pick((self.function or torch_function(name))(base, *self.args, **self.kwargs))
        return result

    def _pick(self, results: torch.Tensor | tuple[torch.Tensor, ...]) -> Any:
        return results if self.result is None else results[self.result]


class MovedView:
    """The array of a view that does not share its base's memory: of which version of the base it is.

    One that `is_cut` has a history of its own: it was detached, or its base holds integers (`view(dtype)`).
    """

    __slots__ = ("_base", "_old", "is_cut", "is_detached", "recipe", "source", "tracked", "version")

    def __init__(self, base: Tensor, recipe: Recipe, tracked: bool, is_detached: bool = False) -> None:
        self._base, self._old, self.recipe = base, vars(base).get("_old"), recipe
        self.tracked, self.is_detached = tracked, is_detached
        self.is_cut = is_detached or not (base._data.is_floating_point() or base._data.is_complex())
        self.source = base._data
        self.version = version_of(self.source)

    @property
    def base(self) -> Tensor:
        """The tensor that it is a view of; one that was turned in place since is asked for what it was."""
        while vars(self._base).get("_old") is not self._old:
            self._base = vars(self._base)["_old"]
        return self._base

    def find(self, tensor: Tensor) -> torch.Tensor:
        """The array, made again if the base has changed."""
        data = self.base._data
        if data is not self.source or self.version is None or data._version != self.version:
            with torch.set_grad_enabled(self.tracked):
                made = redistribute(self.recipe.of_tensor(self.base), tensor.topology.placements)
            self._renew(tensor, made._data if made.__class__ is Tensor else STORED.__get__(made))
            self.source, self.version = data, version_of(data)
        found: torch.Tensor = STORED.__get__(tensor)
        return found

    def _renew(self, tensor: Tensor, data: torch.Tensor) -> None:
        """Give the view the value that its base has now; a history of its own stays."""
        held = STORED.__get__(tensor)
        if self.is_cut and held.requires_grad:
            with torch.no_grad():
                held.copy_(data)
        else:
            self.give(tensor, data)

    def give(self, tensor: Tensor, data: torch.Tensor) -> None:
        """Give the view its array. Torch calls a view that was made without gradients tracked if its base is."""
        if self.is_detached:
            data = data.detach()
        elif not self.tracked and self.source.requires_grad and data.is_floating_point():
            data = tracked_nowhere(data)
        STORED.__set__(tensor, data)
        tensor._mirror_to(data.requires_grad)


def moved_view(tensor: Tensor) -> MovedView | None:
    """What is known of a view that does not share its base's memory; None of any other tensor."""
    found = vars(tensor).get("_finder") if tensor.__class__ is Lazy else None
    return found if isinstance(found, MovedView) else None


def attach(
    base: Tensor, views: Sequence[Tensor], name: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    """Tie results of a view op to their base."""
    data, has_moved = base._data, moved_view(base) is not None
    for i, view in enumerate(views):
        made = name, args, kwargs, i if len(views) > 1 or name in _SEVERAL else None
        if has_moved or not is_alias(view._data, data):
            tie(view, base, Recipe(*made))
        else:
            view._view = (base, False, made)
        if view._view is not None and (base._recipe is not None or _overlaps(name, view, base)):
            view._recipe = Recipe(*made)


def attach_plain(base: Tensor, view: Tensor, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """`attach`, for the one result of a call seen before: nearly always a view of the memory that its base has."""
    data = base._data
    root = data._base
    if view._data._base is (data if root is None else root) and base._recipe is None and name not in _OVERLAPPING:
        view._view = (base, False, (name, args, kwargs, None))
    else:
        attach(base, (view,), name, args, kwargs)


def recipe_of(tensor: Tensor) -> Recipe | None:
    """How a view was made of its base; None of what is no view, or was made by a function without a rule."""
    moved = moved_view(tensor)
    if moved is not None or tensor._view is None:
        return None if moved is None else moved.recipe
    return None if tensor._view[2] is None else Recipe(*tensor._view[2])


def _overlaps(name: str, view: Tensor, base: Tensor) -> bool:
    """Whether several elements of a view may lie in one place: `expand` to as many elements as before repeats none."""
    if name == "expand":
        return math.prod(view.topology.shape) != math.prod(base.topology.shape)
    return name in _OVERLAPPING


def _names(*kinds: str) -> frozenset[str]:
    return frozenset(name for name, op in OPS.items() if op.view in kinds)


_OVERLAPPING, _SEVERAL = _names("repeated"), _names("several")
_SOMETIMES_COPIED = _names("order or copy")
IN_ORDER = _names("order", "order or copy")


def tie(view: Tensor, base: Tensor, recipe: Recipe | None) -> None:
    """Tie a view to its base; with a recipe if they do not share memory."""
    if recipe is None:
        view._view = (base, False, None)
    elif not (recipe.name in _SOMETIMES_COPIED and _is_copied(base, recipe)):
        view._view = (base, True, None)
        moved, data = MovedView(base, recipe, torch.is_grad_enabled()), view._data
        ask(view, moved)
        moved.give(view, data)


def is_alias(view: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether an array shares memory with the one that it was made from."""
    root = data if data._base is None else data._base
    if view is data or view._base is root:
        return True
    refuse_transforms(view)
    return same_storage(view, data)


@torch.inference_mode(False)  # in that mode no tensor says that it is a view
def _is_copied(base: Tensor, recipe: Recipe) -> bool:
    """Whether torch would copy: `reshape` of what is not contiguous where it is dense."""
    like = dense_like(base)
    return not recipe.of_dense(like)._is_view() and recipe.of_dense(like) is not like


def dense_like(tensor: Tensor) -> torch.Tensor:
    """A dense tensor without data, with the strides that this view would have."""
    recipe, data = recipe_of(tensor), tensor._data
    if recipe is not None:
        return recipe.of_dense(dense_like(base_of(tensor)))
    if tensor._view is not None and tuple(data.shape) == tensor.topology.shape:
        return torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device="meta")
    return torch.empty(tensor.topology.shape, dtype=data.dtype, device="meta")


def base_of(view: Tensor) -> Tensor:
    """The tensor that a view was made of."""
    moved = moved_view(view)
    base: Tensor = view._view[0] if moved is None else moved.base
    return base


def path_of(view: Tensor) -> tuple[Tensor, list[Recipe]]:
    """The tensor whose elements lie apart behind a view whose elements do not, and how the view is made of it."""
    recipes: list[Recipe] = []
    while view._recipe is not None:
        recipes.insert(0, view._recipe)
        view = base_of(view)
    return view, recipes


def made_anew(tensor: Tensor) -> Tensor:
    """A view as its base gives it now: torch forgets the hooks of views that are written through."""
    if not (torch.is_grad_enabled() and tensor._view is not None and tensor._data.requires_grad):
        return tensor
    view, data = moved_view(tensor), tensor._data
    if view is not None:
        return redistribute(view.recipe.of_tensor(made_anew(view.base)), tensor.topology.placements)
    root = data._base
    if root is None or root.dtype != data.dtype or not _is_hooked(tensor):
        return tensor
    return Tensor(tensor.topology, root.as_strided(data.shape, data.stride(), data.storage_offset()))


def _is_hooked(tensor: Tensor) -> bool:
    return bool(tensor._data._backward_hooks) or (tensor._view is not None and _is_hooked(tensor._view[0]))


def detach_view(tensor: Tensor, made: Tensor) -> Tensor:
    """A tensor without its graph is a view of what it was a view of."""
    view = moved_view(tensor)
    made._view, made._recipe = tensor._view, tensor._recipe
    detached = not made._data.requires_grad
    if made._recipe is not None and detached:
        made._recipe = replace(made._recipe, is_detached=True)
    if view is not None:
        ask(made, MovedView(view.base, view.recipe, view.tracked and not detached, detached))
    elif detached and made._recipe is None and is_folded(tensor):  # a write must go through what has the gradient
        made._view = (tensor, True, None)
        ask(made, MovedView(tensor, Recipe("detach", (), {}), False, True))
    return made


def is_folded(tensor: Tensor) -> bool:
    """Whether gradients of a tensor's reduction depend on the values of its parts."""
    return any(tensor.placements[axis] in _FOLDED for axis in tensor.topology.partial_axes)


_FOLDED = frozenset(map(Partial, ("max", "min", "prod")))


def turn(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Make a tensor a view of what it was, as `t_()` does; its views stay those of what it was."""
    old, view = Tensor(tensor.topology, tensor._data), moved_view(tensor)
    old._view, old._recipe = tensor._view, tensor._recipe
    if "_old" in vars(tensor):  # it was turned before
        old._old = tensor._old
    if view is not None:
        ask(old, MovedView(view.base, view.recipe, view.tracked, view.is_detached))
    made = change(old)
    if made is old:
        return
    view = moved_view(made)
    tensor._become(made)
    tensor._view, tensor._recipe, tensor._old = made._view, made._recipe, old
    if view is not None:
        ask(tensor, view)
