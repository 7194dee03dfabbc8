"""Ops with a global meaning: any topologies in, the asked one out, communication as needed.

An op of `ttnn` that is a native op too is bridged: operands to wholes on one view, the native op, which plans and
communicates by itself, and its result back to parts with a label. Arguments, dtype and layout are those of the op of
that name in `ttnn`; where it takes them in another way than the native op does, `OWN` has a function of native tensors
with its arguments. Values are computed in float32 where the op sums, and rounded once.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from meshloom.errors import ArgumentError, OperandError
from meshloom.mesh import Mesh
from meshloom.observe.explain import Explanation
from meshloom.observe.scopes import choose, record
from meshloom.ops import ALIASES, OPS
from meshloom.ops.table import FAMILIES
from meshloom.placement import Partial, Placement, Replicate
from meshloom.placement.spelling import as_placements
from meshloom.tensor.base import Tensor as Native
from meshloom.tensor.moving import redistribute, same_storage
from meshloom.tensor.named import find_named
from meshloom.ttnn import surface
from meshloom.ttnn.distributed.views import carry, lift, lower, read_output
from meshloom.ttnn.ops.activations import GeluVariant, activate
from meshloom.ttnn.ops.block_moves import inside
from meshloom.ttnn.ops.calling import describe, op, operands, result
from meshloom.ttnn.ops.elementwise import fine
from meshloom.ttnn.ops.reductions import exact
from meshloom.ttnn.ops.signatures import SPEED
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.tensor import Tensor

Strategy = str | Sequence[str] | None
Compute = Callable[..., Any]
Output = tuple[Placement, ...] | None

# Native names that mean something else in `ttnn`: images and groups of channels lie flat there, an angle is that of a
# ComplexTensor.
APART = frozenset(
    "conv1d conv2d conv_transpose2d avg_pool2d max_pool2d adaptive_avg_pool2d adaptive_max_pool2d group_norm "
    "angle".split()
)
NATIVE = {"max": "amax", "min": "amin"}  # native ops by another name
BEHIND = {"scaled_dot_product_attention": "transformer.scaled_dot_product_attention"}  # names behind a dot
SUMMING = ("reductions and scans", "softmax, norms, losses, attention")
SUMS = {each.name for family in SUMMING for each in FAMILIES[family]} | {"max", "min"}
ACTIVATIONS = {"input_tensor_a_activations": "input_tensor_a", "input_tensor_b_activations": "input_tensor_b"}
STRATEGIES = {"2d": ("row", "column")}  # of the last two axes: every device has a block of the product
EXTRA = {"output": None, "strategy": None, "explain": False}  # what all of them take beside ttnn's arguments


@cache
def names() -> list[str]:
    """The ops of `ttnn` that have a global meaning."""
    found = {name for name in surface.table() if name in OPS or name in ALIASES or name in NATIVE}
    return sorted((found - APART) | {*BEHIND, "to_topology"})


def bridge(name: str) -> Compute:
    """The op of that name on wholes, with the arguments of `ttnn`'s and `output=`, `strategy=` and `explain=`."""
    with _making:
        return surface.table().get(f"distributed.{name}") or _make_bridge(name)


_making = threading.Lock()


def _make_bridge(name: str) -> Compute:
    original = describe(surface.table()[BEHIND.get(name, name)])
    signature, compute = inspect.signature(original), OWN.get(name) or _plainly(name)
    dropped = SPEED - inspect.signature(compute).parameters.keys()

    def call(*args: Any, **kwargs: Any) -> Any:
        extra = {each: kwargs.pop(each) for each in EXTRA if each in kwargs}
        bound = signature.bind(*args, **kwargs)
        given = {each: value for each, value in bound.arguments.items() if value is not None}
        if compute is _linear:
            _check_tiles(name, given.values())
        extra["activation"] = given.pop("activation", None) or given.pop("activations", None)
        finish = {each: given.pop(each, None) for each in ("dtype", "memory_config", "output_tensor", "layout")}
        taken = {each: value for each, value in given.items() if each not in dropped}
        return run_on_wholes(name, taken, compute, **extra, **finish)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"As `ttnn.{BEHIND.get(name, name)}`, on the global tensors that the labels describe."
    keyword = inspect.Parameter.KEYWORD_ONLY
    more = [inspect.Parameter(each, keyword, default=default) for each, default in EXTRA.items()]
    kept = [each for each in signature.parameters.values() if each.name not in EXTRA]
    call.__signature__ = signature.replace(parameters=[*kept, *more])  # type: ignore[attr-defined]
    return op(f"distributed.{name}")(call)


def run_on_wholes(
    name: str,
    arguments: Mapping[str, Any],
    compute: Compute,
    *,
    output: Any = None,
    strategy: Strategy = None,
    explain: bool = False,
    dtype: DataType | None = None,
    layout: Layout | None = None,
    memory_config: MemoryConfig | None = None,
    output_tensor: Tensor | None = None,
    activation: Any = None,
) -> Any:
    """`compute(**arguments, output=placements)` in native tensors, and what it gives as tensors of parts."""
    given = [each for value in arguments.values() for each in _as_list(value) if isinstance(each, Tensor)]
    device, blocks = operands(f"distributed.{name}", *given)
    like = given[LIKE.get(name, 0)] if len(given) > 1 else given[0]
    kind = dtype or (like if output_tensor is None else output_tensor).dtype
    cast = exact if name in SUMS else lambda block: fine(block, kind)
    wholes = [lift(each, cast(block)) for each, block in zip(given, blocks, strict=True)]
    wanted = None if output is None else read_output(output, device)
    mesh = _meeting(device.runtime.mesh.with_lease(None), wholes, wanted, strategy)
    with _print_plan(explain), _choose_rows(strategy, mesh):
        met = iter([carry(whole, mesh) for whole in wholes])
        given_natives = {each: _replace(value, met) for each, value in arguments.items()}
        found = compute(**given_natives, output=wanted[1] if wanted is not None and wanted[0] == mesh else None)
        several = [each if wanted is None else _bring(each, *wanted) for each in _as_list(found)]
        parts = [lower(each, like.grid) for each in several]
    if activation is not None:
        _check_no_terms(name, several)
        parts = [(activate(block, activation), label) for block, label in parts]
    kept: dict[str, Any] = {
        "layout": layout or LAYOUTS.get(name),
        "memory_config": memory_config,
        "output_tensor": output_tensor,
    }
    made = []
    for place, (block, label) in enumerate(parts):
        own = block.clone() if any(same_storage(block, each) for each in blocks) else block
        dtype, coords = _kind_at(name, place, kind, wholes[0]), None if like._coords is None else label.mesh_coords()
        made.append(result(own, like, topology=label, dtype=dtype, coords=coords and tuple(coords), **kept))
    return made if isinstance(found, (tuple, list)) else made[0]


LIKE = {"embedding": 1, "where": 1}  # the operand whose format the result has, if not the first
LAYOUTS = {"embedding": Layout.ROW_MAJOR, "argmax": Layout.ROW_MAJOR}


def _kind_at(name: str, place: int, kind: DataType, of: Native) -> DataType:
    """The dtype of a result: numbers of places are as wide as the original has them."""
    if name == "argmax" or (name in ("sort", "topk") and place == 1 and max(of.shape) >= 1 << 16):
        return DataType.UINT32
    return DataType.UINT16 if name in ("sort", "topk") and place == 1 else kind


def _check_tiles(name: str, given: Iterable[object]) -> None:
    if any(isinstance(each, Tensor) and each.layout is not Layout.TILE for each in given):
        raise OperandError(
            f"ttnn.distributed.{name}: Inputs to matmul must be tilized", fix="ttnn.to_layout(tensor, ttnn.TILE_LAYOUT)"
        )


def _as_list(value: object) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


def _replace(value: object, natives: Iterator[Native]) -> Any:
    """An argument with the next native tensor in the place of each of its tensors."""
    if isinstance(value, (list, tuple)):
        return [_replace(each, natives) for each in value]
    return next(natives) if isinstance(value, Tensor) else value


def _meeting(mesh: Mesh, wholes: Sequence[Native], wanted: tuple[Mesh, object] | None, strategy: Strategy) -> Mesh:
    """The view that operands meet on: the one that all of them have and that is asked for, else the mesh itself."""
    views = {whole.mesh for whole in wholes if any(not isinstance(each, Replicate) for each in whole.placements)}
    if wanted is not None:
        views.add(wanted[0])
    if strategy is not None and not isinstance(strategy, str):
        return mesh
    return views.pop() if len(views) == 1 else mesh


def _bring(found: Native, mesh: Mesh, placements: tuple[Placement, ...]) -> Native:
    moved = carry(found, mesh)
    return redistribute(moved, as_placements(placements, mesh, moved.ndim))


def _check_no_terms(name: str, several: Sequence[Native]) -> None:
    for found in several:
        if any(isinstance(each, Partial) for each in found.placements):
            raise ArgumentError(
                f"ttnn.distributed.{name}: an activation of partial sums is not one of their sum",
                asked=found.topology.notation,
                fix="ask for another output, or apply it later",
            )


@contextlib.contextmanager
def _print_plan(explain: bool) -> Iterator[None]:
    if not explain:
        yield
        return
    with record() as log:
        yield
    print(Explanation(log))


def _choose_rows(strategy: Strategy, mesh: Mesh) -> contextlib.AbstractContextManager[None]:
    """The rows of the rule that a strategy names: one for all axes, or one for each."""
    if strategy is None:
        return contextlib.nullcontext()
    rows = STRATEGIES.get(strategy, (strategy,) * mesh.ndim) if isinstance(strategy, str) else tuple(strategy)
    if len(rows) != mesh.ndim:
        raise OperandError(
            f"strategy {strategy!r} is about {len(rows)} axes, the mesh has {mesh.ndim}",
            mesh=mesh,
            fix='one of "row", "column", "inner", or one for each axis',
        )
    return choose(**dict(zip(mesh.axes, rows, strict=True)))


# what is computed: a function takes the arguments of an op, with native tensors for those of ttnn


def _plainly(name: str) -> Compute:
    """The native op, with ttnn's positional arguments in their order and the others by name."""
    order = list(inspect.signature(describe(surface.table()[name])).parameters.values())
    places = [each.name for each in order if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

    def compute(*, output: Output, **given: Any) -> Any:
        for option, operand in ACTIVATIONS.items():
            if option in given:
                given[operand] = activate(given[operand], given.pop(option))
        if "index" in given:
            given["index"] = given["index"].long()
        count = next((at for at, each in enumerate(places) if each not in given), len(places))
        ordered = [given.pop(each) for each in places[:count]]
        return native(NATIVE.get(name, name), *ordered, **given, output=output)

    return compute


_function = cache(find_named)


def native(name: str, *args: object, **options: object) -> Native:
    """What the native op of that name gives."""
    found: Native = _function(name)(*args, **options)
    return found


def _linear(*, output, input_tensor_a, input_tensor_b, transpose_a=False, transpose_b=False, bias=None) -> Native:
    turns = ((input_tensor_a, transpose_a), (input_tensor_b, transpose_b))
    found = native("matmul", *(x.transpose(-1, -2) if turn and x.ndim > 1 else x for x, turn in turns), output=output)
    return found if bias is None else native("add", found, bias, output=output)


def _norm(
    name: str, *, output, input_tensor, epsilon=1e-12, weight=None, bias=None, residual_input_tensor=None
) -> Native:
    """A norm of every row; its weight and bias may have any shape of one row, and a residual is added first."""
    x = input_tensor if residual_input_tensor is None else native("add", input_tensor, residual_input_tensor)
    scale, shift = (None if each is None else each.reshape(-1) for each in (weight, bias))
    if name == "layer_norm":
        return native(name, x, x.shape[-1:], scale, shift, epsilon, output=output)
    found = native(name, x, x.shape[-1:], scale, epsilon, output=output)
    return found if shift is None else native("add", found, shift, output=output)


def _reduction(name: str, *, output, input_tensor, dim=None, scalar=1.0, correction=True, **keeps: bool) -> Native:
    dims = list(range(input_tensor.ndim) if dim is None else _as_list(dim))
    more = {"correction": int(correction)} if name in ("std", "var") else {}
    found = input_tensor
    if dims:
        found = native(NATIVE.get(name, name), found, dims, **keeps, **more, output=output)
    return found if scalar == 1.0 else native("mul", found, scalar, output=output)


def _scan(name: str, *, output, dim, reverse_order=False, **given: Native) -> Native:
    (x,) = given.values()
    found = native(name, x.flip(dim) if reverse_order else x, dim, output=output)
    return native("flip", found, (dim,)) if reverse_order else found


def _loss(name: str, *, output, reduction=None, **both: Native) -> Native:
    return native(
        name, *both.values(), reduction="none" if reduction is None else reduction.name.lower(), output=output
    )


def _prelu(*, output, input_tensor_a, weight) -> Native:
    x = input_tensor_a
    if isinstance(weight, Native) and weight.ndim == 1 < x.ndim:
        weight = weight.reshape(1, -1, *(1,) * (x.ndim - 2))
    return native("where", x < 0, x * weight, x, output=output)


def _outer(*, output, input_tensor_a, input_tensor_b) -> Native:
    lead = (1,) * (max(input_tensor_a.ndim, 2) - 2)
    return native("mul", input_tensor_a.reshape(*lead, -1, 1), input_tensor_b.reshape(*lead, 1, -1), output=output)


def _pad(*, output, input_tensor, padding, input_tensor_start=0.0, value=0.0) -> Native:
    if padding and not isinstance(padding[0], (tuple, list)):  # the shape of the result, and where the tensor starts
        starts = _as_list(input_tensor_start) if input_tensor_start else (0,) * input_tensor.ndim
        sizes = zip(padding, input_tensor.shape, starts, strict=True)
        padding = [(first, total - size - first) for total, size, first in sizes]
    elif isinstance(input_tensor_start, (int, float)):  # the value, third in the form with pairs
        value = input_tensor_start or value
    flat = [size for pair in reversed(padding) for size in pair]
    return native("pad", input_tensor, flat, value=value, output=output)


def _embedding(*, output, input_tensor, weight, padding_idx=None) -> Native:
    if any(size != 1 for size in weight.shape[:-2]):
        raise OperandError(f"ttnn.distributed.embedding: weight is {list(weight.shape)}", fix="give a table [V, H]")
    rows, index = weight.reshape(-1, weight.shape[-1]), input_tensor
    inside("distributed.embedding", index._data, rows.shape[0], "row")
    if index.ndim == 4 and tuple(index.shape[1:3]) == (1, 1):
        index = index.reshape(index.shape[0], index.shape[-1])
    return native("embedding", index, rows, output=output)


def _attention(
    *, output, input_tensor_q, input_tensor_k, input_tensor_v, attn_mask=None, is_causal=True, scale=None
) -> Native:
    name = "scaled_dot_product_attention"
    if is_causal and attn_mask is not None:
        raise OperandError(
            f"ttnn.distributed.{name}: is_causal=True and attn_mask exclude each other", fix="is_causal=False"
        )
    operands = (input_tensor_q, input_tensor_k, input_tensor_v, attn_mask)
    shared = input_tensor_q.shape[-3] != input_tensor_k.shape[-3]
    return native(name, *operands, is_causal=is_causal, scale=scale, enable_gqa=shared, output=output)


OWN: dict[str, Compute] = {
    "matmul": _linear,
    "linear": _linear,
    "softmax": lambda output, input_tensor, dim=-1: native("softmax", input_tensor, dim, output=output),
    "batch_norm": lambda output, input, eps=1e-05, **rows: native(
        "batch_norm", input, **{each: row.reshape(-1) for each, row in rows.items()}, eps=eps, output=output
    ),
    **{each: partial(_scan, each) for each in ("cumsum", "cumprod")},
    "topk": lambda output, input_tensor, k=32, **how: native("topk", input_tensor, k, **how, output=output),
    "gelu": lambda output, input_tensor, variant=None: native(
        "gelu", input_tensor, approximate="tanh" if variant is GeluVariant.Tanh else "none", output=output
    ),
    "heaviside": lambda output, input_tensor, value: native(
        "heaviside", input_tensor, input_tensor.new_tensor(value), output=output
    ),
    "prelu": _prelu,
    "where": lambda output, predicate, true_value, false_value: native(
        "where", predicate != 0, true_value, false_value, output=output
    ),
    "outer": _outer,
    "pad": _pad,
    "embedding": _embedding,
    "scaled_dot_product_attention": _attention,
    **{each: partial(_norm, each) for each in ("layer_norm", "rms_norm")},
    **{each: partial(_reduction, each) for each in ("sum", "mean", "max", "min", "std", "var")},
    **{each: partial(_loss, each) for each in ("l1_loss", "mse_loss")},
}


@op("distributed.to_topology")
def to_topology(
    input_tensor: Tensor, output: object, *, explain: bool = False, memory_config: MemoryConfig | None = None
) -> Tensor:
    """The same whole placed otherwise: any topology to any; the tensor itself where nothing is to be done.

    >>> import torch
    >>> from meshloom import ttnn
    >>> with ttnn.create_mesh_device(ttnn.MeshShape(2, 2)) as mesh:
    ...     x = ttnn.from_torch(torch.arange(8), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    ...     y = ttnn.distributed.to_topology(x, [ttnn.PlacementShard(0), ttnn.PlacementReplicate()])
    ...     x.shape, y.shape, y.to_torch().tolist() == list(range(8))
    (Shape([2]), Shape([4]), True)
    """
    found: Tensor = run_on_wholes(
        "to_topology",
        {"x": input_tensor},
        lambda output, x: x,
        output=output,
        explain=explain,
        memory_config=memory_config,
    )
    settled = found.tensor_topology() == input_tensor.tensor_topology() and memory_config is None
    return input_tensor if settled else found
