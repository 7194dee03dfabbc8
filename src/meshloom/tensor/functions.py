"""Every way to call an op leads here: methods, operators, `loom.*`, and `torch.*` / `F.*` on our tensors.

`invoke` takes a name: a *front* first (a Python function that sorts out torch's overloads), then the op table, then the
in-place forms; whatever is left goes through the fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from meshloom.engines.layout import fill as fill_padding
from meshloom.errors import ArgumentError, DTypeError, GradientError
from meshloom.ops import ALIASES, OPS
from meshloom.placement import Replicate
from meshloom.runtime import state
from meshloom.tensor import creation
from meshloom.tensor.base import Tensor
from meshloom.tensor.binding import Unhashable
from meshloom.tensor.dispatch import call, cotangent, find_mesh, settle
from meshloom.tensor.fallback import fallback
from meshloom.tensor.moving import shadowed
from meshloom.tensor.writing import assign, fill, write, write_item, write_out, zero


def own(value: Any) -> Any:
    """Our tensor inside a parameter or a gradient; anything else as it is."""
    return getattr(value, "_loom", value) if isinstance(value, torch.Tensor) else value


def table_call(name: str, *args: Any, output: Any = None, out: Any = None, **kwargs: Any) -> Any:
    """An op of the table by name, with `output=` placements and torch's `out=`."""
    result = call(ALIASES.get(name, name), args, kwargs, output)
    return result if out is None else write_out(result, out)


def _max(name: str) -> Callable[..., Any]:
    """max and min: all elements, along a dim, or of two tensors."""
    amax, pair = {"max": ("amax", "maximum"), "min": ("amin", "minimum")}[name]

    def front(input: Any, *args: Any, **kwargs: Any) -> Any:
        other = args[0] if args else kwargs.get("other")
        if isinstance(other, (Tensor, torch.Tensor)):
            return table_call(pair, input, other, **{k: v for k, v in kwargs.items() if k != "other"})
        if args or "dim" in kwargs or "axis" in kwargs:
            return table_call(f"{name}_dim", input, *args, **kwargs)
        return table_call(amax, input, **kwargs)

    return front


def _var(input: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], bool):
        return table_call("var", input, None, *args, **kwargs)
    return table_call("var", input, *args, **kwargs)


def _to(input: Any, *args: Any, **kwargs: Any) -> Any:
    """`to(dtype)`, `to(device)`, `to(other)`, with torch's keywords."""
    tensor = shadowed(own(input))
    target = args[0] if args else kwargs.get("other", kwargs.get("dtype", kwargs.get("device")))
    target = own(target)
    wanted, device = kwargs.get("dtype"), kwargs.get("device")
    if isinstance(target, torch.dtype):
        wanted = target
    elif isinstance(target, (Tensor, torch.Tensor)):
        wanted = target.dtype
    elif args:
        device = target
        wanted = wanted or next((each for each in args[1:] if isinstance(each, torch.dtype)), None)
    if wanted is not None and (wanted != tensor.dtype or kwargs.get("copy") or state.output is not None):
        tensor = table_call("to", tensor, wanted)
    if device is not None and torch.device(device) != tensor.device and state.shadows is None:
        tensor = Tensor(tensor.topology, tensor._data.to(device))
    if kwargs.get("copy") and tensor._data is shadowed(own(input))._data:
        tensor = table_call("clone", tensor)
    return input if tensor is own(input) else tensor


def _cast(dtype: torch.dtype) -> Callable[..., Any]:
    return lambda input, *args, **kwargs: _to(input, dtype)


def _type(input: Any, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None:
        return torch.empty(0, dtype=own(input).dtype).type()
    return _to(input, dtype)


def _type_as(input: Any, other: Any) -> Any:
    return _to(input, own(other).dtype)


def _swapped(name: str) -> Callable[..., Any]:
    return lambda input, other, **kwargs: table_call(name, other, input, **kwargs)


def _rsub(input: Any, other: Any, alpha: Any = 1) -> Any:
    scaled = input if alpha == 1 else table_call("mul", input, alpha)
    return _reversed("sub", scaled, other)


def _reversed(name: str, input: Any, other: Any) -> Any:
    """`other op input` where `other` may be a number: torch wants a tensor first."""
    if isinstance(other, (Tensor, torch.Tensor)):
        return table_call(name, other, input)
    held = own(input).dtype
    dtype = torch.result_type(torch.empty((1,), dtype=held), other)
    if name == "div":  # as torch does, so that the last bit is the same
        return table_call("mul", table_call("reciprocal", input), other)
    if name == "sub" and (held == torch.bool or isinstance(other, bool)):
        raise DTypeError("subtraction has no meaning for bool", fix="use ~x or logical_not")
    if name == "sub" and dtype == held and not dtype.is_complex:
        return table_call("add", table_call("neg", input), other)
    widest = {int: torch.int64, float: torch.float64, complex: torch.complex128}.get(type(other))
    return table_call(name, torch.as_tensor(other, dtype=widest).to(dtype), input)


def _reverse(name: str) -> Callable[..., Any]:
    return lambda input, other: _reversed(name, input, other)


def _activation(name: str) -> Callable[..., Any]:
    def front(input: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
        if args and isinstance(args[0], bool):
            inplace, args = args[0], args[1:]
        if inplace:
            return invoke(name + "_", (input, *args), kwargs)
        return table_call(name, input, *args, **kwargs)

    return front


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    output: Any = None,
) -> Any:
    if max_norm is not None or scale_grad_by_freq or sparse:
        options = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        return fallback(F.embedding, (input, weight, *options), {}, "embedding")
    return table_call("embedding", input, weight, padding_idx, output=output)


def _cross_entropy(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    legacy = [kwargs.get("size_average"), kwargs.get("reduce"), *args[1:2], *args[3:4]]
    if any(each is not None for each in legacy):
        return fallback(F.cross_entropy, (input, target, *args), kwargs, "cross_entropy")
    return table_call("cross_entropy", input, target, *args, **kwargs)


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Zero each element with probability p and scale the rest; the same elements for any placements.

    >>> import meshloom as loom
    >>> sorted(set(dropout(loom.ones(64, mesh=loom.open_mesh((4,)))).tolist()))
    [0.0, 2.0]
    """
    if not 0.0 <= p <= 1.0:
        raise ArgumentError(f"dropout probability {p} is not between 0 and 1")
    if not training or p == 0.0:
        return input
    tensor = shadowed(own(input))
    mask = creation.dropout_mask(tensor, 1.0 - p)
    return write("mul", own(input), (mask,), {}) if inplace else table_call("mul", tensor, mask)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    output: Any = None,
) -> Any:
    if not dropout_p:
        options = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        given = {name: each for name, each in options.items() if each is not None and each is not False}
        return table_call("scaled_dot_product_attention", query, key, value, output=output, **given)
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (invoke("repeat_interleave", (each, groups), {"dim": -3}) for each in (key, value))
    scores = invoke("matmul", (query, invoke("transpose", (key, -2, -1), {})), {})
    scores = invoke("mul", (scores, scale if scale is not None else query.shape[-1] ** -0.5), {})
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        scores = invoke("masked_fill", (scores, ~allowed, float("-inf")), {})
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = invoke("masked_fill", (scores, invoke("logical_not", (attn_mask,), {}), float("-inf")), {})
    elif attn_mask is not None:
        scores = invoke("add", (scores, attn_mask), {})
    weights = dropout(invoke("softmax", (scores, -1), {}), dropout_p)
    return invoke("matmul", (weights, value), {})


def _getitem(input: Any, index: Any) -> Any:
    if _is_basic(index):
        return table_call("getitem", input, index)
    return fallback(torch.Tensor.__getitem__, (input, index), {}, "getitem")


def _copy_(input: Any, src: Any, non_blocking: bool = False) -> Any:
    if isinstance(own(input), Tensor):
        return assign(own(input), own(src))
    return fallback(torch.Tensor.copy_, (input, src), {}, "copy_")


def _fill_(input: Any, value: Any) -> Any:
    if isinstance(own(input), Tensor):
        return fill(own(input), own(value))
    return fallback(torch.Tensor.fill_, (input, value), {}, "fill_")


def _setitem(input: Any, index: Any, value: Any) -> None:
    if _is_basic(index) and isinstance(own(input), Tensor):
        write_item(own(input), index, own(value))
    else:
        fallback(torch.Tensor.__setitem__, (input, index, value), {}, "setitem")


def _is_basic(index: Any) -> bool:
    """Whether an index is made of ints, slices of ints, None and an ellipsis only."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(each is None or each is Ellipsis or _is_int(each) or _is_plain_slice(each) for each in parts)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_plain_slice(value: Any) -> bool:
    return isinstance(value, slice) and all(p is None or _is_int(p) for p in (value.start, value.stop, value.step))


def _transposed_matrix(input: Any) -> Any:
    if own(input).ndim > 2:
        raise ArgumentError(f"t() takes a tensor of at most 2 dims, not {own(input).ndim}", fix="use transpose or mT")
    return table_call("transpose", input, 0, 1) if own(input).ndim == 2 else input


def _view(input: Any, *shape: Any, **kwargs: Any) -> Any:
    if (shape and isinstance(shape[0], torch.dtype)) or isinstance(kwargs.get("dtype"), torch.dtype):
        return fallback(torch.Tensor.view, (input, *shape), kwargs, "view")
    return table_call("view", input, *shape, **kwargs)


def _where(condition: Any, input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    if input is None:
        return fallback(torch.where, (condition,), {}, "where")
    return table_call("where", condition, input, other, **kwargs)


def _einsum(equation: Any, *operands: Any, output: Any = None) -> Any:
    if not isinstance(equation, str):
        return fallback(torch.einsum, (equation, *operands), {}, "einsum")
    listed = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    return table_call("einsum", equation, *listed, output=output)


def _like(make: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda input, *args, **kwargs: make(shadowed(own(input)), *args, **kwargs)


def _new(name: str) -> Callable[..., Any]:
    """new_zeros and the like: replicated, since the shape says nothing about placement."""

    def front(input: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = own(input)
        sizes = (size,) if isinstance(size, int) and name != "full" else size
        if isinstance(size, int) and args and name != "full":
            sizes, args = (size, *args), ()
        options = {"mesh": tensor.mesh, "placements": (Replicate(),) * tensor.mesh.ndim}
        kept = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "requires_grad")}
        return getattr(creation, name)(sizes, *args, **options, **{"dtype": tensor.dtype, **kept})

    return front


def _same(input: Any, *args: Any, **kwargs: Any) -> Any:
    return input


def _contiguous(input: Any, *args: Any, **kwargs: Any) -> Any:
    """The tensor itself; a view with other strides is copied, as in torch, so that writes do not reach its base."""
    tensor = shadowed(own(input))
    return input if tensor._view is None or tensor._data.is_contiguous() else table_call("clone", tensor)


def _softmax(name: str) -> Callable[..., Any]:
    """`dtype=` is cast to first: an integer cannot hold the -inf that padding needs."""

    def front(input: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        wanted = dtype or next((each for each in args if isinstance(each, torch.dtype)), None)
        cast = input if wanted is None else _to(input, wanted)
        return table_call(name, cast, *args[:1], **kwargs)

    return front


def _linear(input: Any, weight: Any, bias: Any = None, **kwargs: Any) -> Any:
    if own(weight).ndim == 1:
        return fallback(F.linear, (input, weight, bias), kwargs, "linear")
    return table_call("linear", input, weight, bias, **kwargs)


def _detach(input: Any) -> Any:
    tensor = shadowed(own(input))
    made = Tensor(tensor.topology, tensor._data.detach())
    made._view = tensor._view
    return made


def _as(name: str) -> Callable[..., Any]:
    return lambda input, other: table_call(name, input, *own(other).shape)


def _autograd_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.autograd.grad` for our tensors: gradients have the placements of their values."""
    ins = _listed(inputs)
    start, seeded = _starts(outputs, grad_outputs)
    held = [_array_of(own(each)) for each in ins]
    found = torch.autograd.grad(start, held, seeded, *args, **kwargs)
    return tuple(_dual(own(value), each) for value, each in zip(ins, found, strict=True))


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (tuple, list)) else [values]


def _dual(value: Any, gradient: torch.Tensor | None) -> Any:
    if gradient is None or not isinstance(value, Tensor):
        return gradient
    settle(value)
    topology = value.topology.reduced
    return Tensor(topology, fill_padding(cotangent(gradient, value.topology), topology, 0))


def _root(value: Any) -> torch.Tensor:
    """The array that backward starts from: a partial sum is reduced first."""
    if not isinstance(value, Tensor):
        return value
    tensor = shadowed(value)
    if tensor.topology.partial_axes:
        tensor = tensor.redistribute(tensor.topology.reduced.placements)
    return tensor._data


def _seed(seed: Any, out: Any) -> torch.Tensor:
    tensor = shadowed(own(out))
    if isinstance(seed, Tensor):
        return seed.redistribute(tensor.topology.reduced.placements)._data
    return creation.place(seed, tensor.mesh, tensor.topology.reduced.placements)._data


def _start(value: Any, seed: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where backward starts from, and with what; a number starts with 1."""
    root = _root(value)
    if not isinstance(value, Tensor):
        return root, seed
    if seed is None and value.numel() != 1:
        raise GradientError(
            "backward starts from one number and this tensor has more",
            tensor=value.topology,
            fix="reduce it first, as in y.sum().backward(), or give backward(gradient=...)",
        )
    if seed is None and root.numel() != 1:
        seed = creation.ones_like(shadowed(value))
    return root, None if seed is None else _seed(seed, value)


def _starts(outputs: Any, seeds: Any) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    outs = _listed(outputs)
    given = [None] * len(outs) if seeds is None else _listed(seeds)
    pairs = [_start(own(out), own(seed)) for out, seed in zip(outs, given, strict=True)]
    return [root for root, _ in pairs], [seed for _, seed in pairs]


def backward(
    self: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Accumulate gradients in the leaves that this tensor was computed from."""
    _autograd_backward([self], [gradient], retain_graph, create_graph, inputs=inputs)


def _autograd_backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    roots, seeds = _starts(tensors, grad_tensors)
    leaves = None if inputs is None else [_array_of(own(each)) for each in _listed(inputs)]
    torch.autograd.backward(roots, seeds, retain_graph, create_graph, inputs=leaves)


def _array_of(value: Any) -> torch.Tensor:
    return shadowed(value)._data if isinstance(value, Tensor) else value


FRONTS: dict[str, Callable[..., Any]] = {
    "max": _max("max"),
    "min": _max("min"),
    "var": _var,
    "to": _to,
    "type": _type,
    "type_as": _type_as,
    "float": _cast(torch.float32),
    "double": _cast(torch.float64),
    "half": _cast(torch.float16),
    "bfloat16": _cast(torch.bfloat16),
    "int": _cast(torch.int32),
    "long": _cast(torch.int64),
    "short": _cast(torch.int16),
    "char": _cast(torch.int8),
    "byte": _cast(torch.uint8),
    "bool": _cast(torch.bool),
    "rsub": _rsub,
    "__rsub__": _reverse("sub"),
    "__rtruediv__": _reverse("div"),
    "__rdiv__": _reverse("div"),
    "__rpow__": _reverse("pow"),
    "__rmod__": _reverse("remainder"),
    "__rfloordiv__": _reverse("floor_divide"),
    "__rmatmul__": _swapped("matmul"),
    "relu": _activation("relu"),
    "silu": _activation("silu"),
    "embedding": _embedding,
    "cross_entropy": _cross_entropy,
    "dropout": dropout,
    "scaled_dot_product_attention": _attention,
    "getitem": _getitem,
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "t": _transposed_matrix,
    "view": _view,
    "where": _where,
    "einsum": _einsum,
    "zeros_like": _like(creation.zeros_like),
    "ones_like": _like(creation.ones_like),
    "full_like": _like(creation.full_like),
    "empty_like": _like(creation.empty_like),
    "randn_like": _like(creation.randn_like),
    "rand_like": _like(creation.rand_like),
    "new_zeros": _new("zeros"),
    "new_ones": _new("ones"),
    "new_empty": _new("zeros"),
    "new_full": _new("full"),
    "contiguous": _contiguous,
    "linear": _linear,
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "cpu": _same,
    "detach": _detach,
    "expand_as": _as("expand"),
    "view_as": _as("view"),
    "reshape_as": _as("reshape"),
    "backward": backward,
    "copy_": _copy_,
    "fill_": _fill_,
    "zero_": lambda input: zero(own(input)),
}


def invoke(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], function: Callable[..., Any] | None = None) -> Any:
    """Call anything by name; `function` is torch's own for the fallback."""
    try:
        front = FRONTS.get(name)
        if front is not None:
            result = front(*args, **kwargs)
        elif ALIASES.get(name, name) in OPS:
            result = table_call(name, *args, **kwargs)
        elif is_written(name) and find_mesh(args[:1]) is not None:
            result = write(_written(name), own(args[0]), args[1:], kwargs)
        else:
            result = fallback(function or torch_function(name), args, kwargs, name)
    except Unhashable:
        return fallback(function or torch_function(name), args, kwargs, name)
    # an in-place op returns what it was given, be it a parameter
    return args[0] if args and result is not None and result is not args[0] and result is own(args[0]) else result


INPLACE = {f"__i{name}__": op for name, op in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide", "mod": "remainder",
    "pow": "pow", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}.items()}  # fmt: skip


def _written(name: str) -> str:
    bare = INPLACE.get(name) or name[:-1]
    return ALIASES.get(bare, bare)


def is_written(name: str) -> bool:
    """Whether a name is the in-place form of a pointwise op of the table."""
    if name not in INPLACE and (not name.endswith("_") or name.endswith("__")):
        return False
    op = OPS.get(_written(name))
    return op is not None and op.signature is None and op.name not in ("where", "clone")


def torch_function(name: str) -> Callable[..., Any]:
    """torch's own function of a name, for the fallback."""
    for place in (torch.Tensor, torch, F):
        found = getattr(place, name, None)
        if callable(found):
            return found
    raise ArgumentError(f"torch has no function {name!r}")


def _known_functions() -> dict[Any, str]:
    names = {*OPS, *ALIASES, *FRONTS, *(name + "_" for name in OPS if is_written(name + "_")), *INPLACE}
    found: dict[Any, str] = {}
    for name in names:
        for place in (torch, torch.Tensor, F):
            function = getattr(place, name, None)
            if callable(function):
                found.setdefault(function, name)
    # torch's names that mean something else than ours, or take their arguments in another order
    for odd in (torch.embedding, torch.layer_norm, torch.Tensor.where, torch.dropout, torch.relu_):
        found.pop(odd, None)
    found[torch.special.expit] = "special_expit"
    found[torch.Tensor.where] = "_method_where"
    found[torch.autograd.grad] = "_autograd_grad"
    found[torch.autograd.backward] = "_autograd_backward"
    return found


FRONTS["_method_where"] = lambda input, condition, other: _where(condition, input, other)
FRONTS["_autograd_grad"] = _autograd_grad
FRONTS["_autograd_backward"] = _autograd_backward
KNOWN = _known_functions()


def on_torch(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `__torch_function__` does: the table if we know the function, else a plain question, else the fallback."""
    name = KNOWN.get(function)
    if name is not None:
        return invoke(name, args, kwargs, function)
    name = getattr(function, "__name__", str(function))
    if name in QUESTIONS and args and isinstance(own(args[0]), Tensor):
        return getattr(own(args[0]), name)(*args[1:], **kwargs)
    return fallback(function, args, kwargs, name)


QUESTIONS = frozenset(
    "size numel nelement dim ndimension is_complex is_floating_point is_contiguous element_size item tolist numpy "
    "requires_grad_ retain_grad register_hook detach_ is_signed is_same_size __len__ __bool__ __float__ __int__ "
    "__index__ __contains__ __format__ __array__ __repr__ __hash__ data_ptr".split()
)
