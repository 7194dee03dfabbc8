"""What `torch.*` and `F.*` do on our tensors: which function of torch is which op, and what the fallback gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines import private
from meshloom.ops import ALIASES, OPS
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import INPLACE, invoke, is_written, spellings
from meshloom.tensor.fallback import fallback
from meshloom.tensor.lists import is_of_lists, run_lists
from meshloom.tensor.quick import call_quickly, write_quickly
from meshloom.tensor.torch_api import OVERLOADS


def _known_functions() -> dict[object, str]:
    names = {*OPS, *ALIASES, *OVERLOADS, *(name + "_" for name in OPS if is_written(name + "_")), *INPLACE}
    found: dict[Any, str] = {}
    for name in names:
        for place, bare in spellings(name):
            function = getattr(place, bare, None)
            if callable(function):
                found.setdefault(function, name)
    # torch's names that mean something else than ours, or take their arguments in another order
    for odd in (torch.embedding, torch.layer_norm, torch.Tensor.where, torch.dropout, torch.relu_):
        found.pop(odd, None)
    for name in "batch_norm group_norm instance_norm kl_div binary_cross_entropy_with_logits poisson_nll_loss".split():
        found.pop(getattr(torch, name), None)
    found.pop(F.unfold, None)  # columns of windows
    found.pop(torch.adaptive_max_pool1d, None)  # values with indices
    found[torch.Tensor.where] = "_method_where"
    for name in ("meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"):  # what torch calls for a list of tensors
        found[getattr(private.variable_functions, name)] = name
    found[torch.autograd.grad] = "_autograd_grad"
    found[torch.autograd.backward] = "_autograd_backward"
    return found


KNOWN = _known_functions()


def on_torch(
    cls: type,
    function: Callable[..., object],
    types: object,
    args: tuple[object, ...] = (),
    kwargs: dict[str, object] | None = None,
) -> Any:
    """What `__torch_function__` does: the table if we know the function, else a plain question, else the fallback."""
    found = DOORS.get(function)
    if found is not None:
        name, written = found
        if written is not None and isinstance(args[0], Tensor):
            return write_quickly(name, written, args, kwargs or {})
        return call_quickly(function, name, args, kwargs or {}, function)
    if function in ASKED and args[0].__class__ is Tensor:
        return function(args[0]._data)
    of_lists = LISTS.get(function)
    if of_lists is not None:
        return run_lists(function, of_lists, args, kwargs or {})
    return _ask(function, args, kwargs or {})


def _ask(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    """A function that is no op of ours."""
    name = getattr(function, "__name__", str(function))
    if name in _ACCESS:
        return _access(function, name, args)
    if getattr(function, "__module__", "") == torch.nn.init.__name__:  # its own body, on our methods
        with private.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)
    if args and isinstance(args[0], Tensor):
        if name in QUESTIONS:
            return getattr(args[0], name)(*args[1:], **kwargs)
        if name in NATIVE:
            with private.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
    return fallback(function, args, kwargs, name)


# the in-place forms of pointwise ops, as methods on arrays
WRITTEN = {
    function: getattr(torch.Tensor, name)
    for function, name in KNOWN.items()
    if is_written(name) and name not in OVERLOADS and name not in INPLACE and hasattr(torch.Tensor, name)
}
# each function's op, and its form in place if it is one
DOORS = {function: (name, WRITTEN.get(function)) for function, name in KNOWN.items()}
LISTS = {getattr(torch, name): name for name in dir(torch) if is_of_lists(name)}
# questions about a tensor that its array answers
ASKED = frozenset(
    getattr(place, name)
    for name in "get_device is_complex is_conj is_floating_point is_inference is_neg is_pinned is_shared".split()
    for place in (torch, torch.Tensor)
    if hasattr(place, name)
)
_ACCESS = frozenset(("__get__", "__set__", "__delete__"))


def _access(function: Any, kind: str, args: tuple[Any, ...]) -> Any:
    """An attribute of torch's class that ours does not define."""
    tensor, name = args[0], function.__self__.__name__
    if kind == "__get__" and name in KNOWN_ATTRIBUTES:
        return invoke(name, (tensor,), {}, function)
    if kind == "__get__" and (name.startswith("is_") or name in _OF_ARRAYS):
        return getattr(tensor._data, name)
    with private.DisableTorchFunctionSubclass():
        return function(*args)


KNOWN_ATTRIBUTES = frozenset(("real", "imag", "H", "mH"))
_OF_ARRAYS = frozenset("_backward_hooks _post_accumulate_grad_hooks output_nr grad_dtype".split())
# what torch answers from the tensor itself: global sizes, no storage
NATIVE = frozenset("stride storage_offset is_contiguous is_set_to has_names dim_order sym_numel sym_size".split())


QUESTIONS = frozenset(
    "size numel nelement dim ndimension is_complex is_floating_point is_contiguous element_size item tolist numpy "
    "requires_grad_ retain_grad register_hook detach_ is_signed is_same_size __len__ __bool__ __float__ __int__ "
    "__index__ __contains__ __format__ __array__ __repr__ __hash__ data_ptr untyped_storage storage resolve_conj "
    "resolve_neg share_memory_".split()
)
