"""The names of torch that torch does not document, in one place, each with its reason. Seen in torch 2.13.0.

Everything that a later torch may rename or drop stands here; the range of torch in `pyproject.toml` is the one that the
tests have run. Attributes of arrays that are used beside these: `_base`, `_version`, `_is_view()`, `_is_zerotensor()`,
`_backward_hooks`, `_post_accumulate_grad_hooks`, `UntypedStorage._cdata`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

# a tensor of a class of one's own, without storage: torch documents the class method for authors of such classes only
make_wrapper: Callable[..., torch.Tensor] = torch.Tensor._make_wrapper_subclass
# torch's own attributes and methods of a tensor, below those of our class
TensorBase: Any = torch._C.TensorBase
# inside, our class is not asked for what torch calls
DisableTorchFunctionSubclass: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunctionSubclass
# one question for all devices; the public one costs five times as much
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
# what `torch.autograd.graph.increment_version` calls, without the checks of its argument
increment_version: Callable[[Iterable[torch.Tensor]], None] = torch._C._increment_version
# one kernel for a list of tensors, which torch's optimizers call
foreach_add_: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_add_
# which pass of backward is under way, and whether it keeps its graph
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
# whether the pass that is under way computes a node
will_execute: Callable[[torch.autograd.graph.Node], bool] = torch._C._will_engine_execute_node
# the node of the graph that backward is at, and the number that the next node of the graph will have
current_node: Callable[[], Any] = torch._C._current_autograd_node
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
# the functions that pack and unpack what autograd saves now, None where nobody asked for any
saved_tensors_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, False)
# a pass of backward without the checks for our class, and calls at its end
engine: Any = torch.autograd.Variable._execution_engine
# whether a reentrant checkpoint may run in this pass
is_checkpoint_valid: Callable[[], bool] = torch.autograd._is_checkpoint_valid
# whether a torch.func transform made a tensor
is_functorch_wrapped_tensor: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
# what torch calls for lists of tensors, and functions of `torch.nn.functional` that are in C++
variable_functions: Any = torch._C._VariableFunctions
nn_functions: Any = torch._C._nn
# how many hold a storage, its tensors and its Python object counted
storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
# a mask of attention as numbers to add
canonical_mask: Callable[..., torch.Tensor | None] = F._canonical_mask
# attention as one kernel, and its gradient, which know shapes without data
fused_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
fused_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# products of tokens with the experts that they belong to
grouped_mm: Callable[..., torch.Tensor] = torch._grouped_mm
# whether there is a kernel of an operator for a dispatch key: "CompositeImplicitAutograd" is a formula of others
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
# what a class of tensors has for `__torch_function__` that wants to be asked for array calls only
no_torch_function: Any = torch._C._disabled_torch_function_impl
# torch's own call on a tensor of a class of ours, which is not asked: `squeeze_` changes its sizes
DisableTorchDispatch: Callable[[], AbstractContextManager[object]] = torch._C._DisableTorchDispatch
# the marks of an array that stands for the conjugate, or the negative, of what lies in its memory
set_conj: Callable[[torch.Tensor, bool], None] = torch._C._set_conj
set_neg: Callable[[torch.Tensor, bool], None] = torch._C._set_neg
# an array seen with the other sign, as imaginary parts of conjugates are
neg_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view
# array calls seen as they are made, by their operator, or left alone; lists and dictionaries of tensors taken apart
disable_current_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes

__all__ = ["OpOverload", "TorchDispatchMode", "tree_flatten", "tree_map_only"]


def default_store() -> Any:
    """The store that the processes met at; looked up late, as a torch without processes lacks it."""
    return dist.distributed_c10d._get_default_store()


def set_group_timeout(timeout: timedelta, group: Any) -> None:
    """How long a group waits; torch's public functions set it only when they make the group."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)


def has_step_hooks(optimizer: Any) -> bool:
    """Whether an optimizer has hooks of its own, which run before a step; torch has no question for it."""
    return bool(optimizer._optimizer_step_pre_hooks)


def leave_uncompiled(*attributes: Any) -> None:
    """`torch.compile` compiles neither the functions among attributes of a class nor what they call.

    The public `torch.compiler.disable` wraps a function, which costs more than a call of ours.
    """
    frames = torch._C._dynamo.eval_frame
    strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for attribute in attributes:
        function = getattr(attribute, "__func__", attribute)
        if isinstance(function, FunctionType):
            frames.set_code_exec_strategy(function.__code__, strategy)
