"""Ops with a global meaning: any topologies in, the asked one out, communication as needed.

Every op here is one expression of native tensors (`compute`), which plan and communicate by themselves; `spread` does
for all of them what is around it: operands to wholes on one view, dtype and layout as the op of that name in `ttnn`
has them, the result back to parts with a label. Values are computed in float32 where the op sums, and rounded once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshloom.errors import ArgumentError, OperandError
from meshloom.mesh import Mesh
from meshloom.observe.explain import Explanation
from meshloom.observe.scopes import choose, record
from meshloom.placement import Partial, Placement, Replicate
from meshloom.placement.spelling import as_placements
from meshloom.tensor.base import Tensor as Native
from meshloom.tensor.moving import redistribute, same_storage
from meshloom.tensor.named import named
from meshloom.ttnn.distributed.views import asked, carried, lifted, lowered
from meshloom.ttnn.ops.activations import Activation, activate
from meshloom.ttnn.ops.block_moves import inside
from meshloom.ttnn.ops.calling import op, operands, result
from meshloom.ttnn.ops.elementwise import fine
from meshloom.ttnn.ops.reductions import Dims, dims_of, exact
from meshloom.ttnn.tensor.formats import DataType, Layout
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor

SPEED = "program_config compute_kernel_config core_grid sub_core_grids sub_device_id global_cb output_tile num_links"
Operand = Tensor | float | int
Strategy = str | Sequence[str] | None

add_, matmul_, multiply_, sum_, mean_ = (named(each) for each in ("add", "matmul", "mul", "sum", "mean"))
softmax_, embedding_, attention_ = (named(each) for each in ("softmax", "embedding", "scaled_dot_product_attention"))
layer_norm_, rms_norm_ = named("layer_norm"), named("rms_norm")


@dataclass(frozen=True)
class Ask:
    """How an op is wanted: where its result goes, by which strategy, in which format, told or not."""

    output: Any = None
    strategy: Strategy = None
    explain: bool = False
    dtype: DataType | None = None
    layout: Layout | None = None
    memory_config: MemoryConfig | None = None
    activation: Any = None


def spread(
    name: str,
    tensors: Mapping[str, Operand | None],
    compute: Callable[..., Native],
    ask: Ask,
    wide: Callable[[Block], Block] | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """One op on wholes: `compute(output, **operands)` in native tensors, its result as a tensor of parts.

    `wide` says in which dtype a block is computed with; without it, as an elementwise op of `ttnn` computes.
    """
    given = {role: each for role, each in tensors.items() if isinstance(each, Tensor)}
    device, blocks = operands(f"distributed.{name}", *given.values())
    first = like if like is not None else next(iter(given.values()))
    kind = ask.dtype or first.dtype
    widened = wide or (lambda block: fine(block, kind))
    wholes = {role: lifted(each, widened(block)) for (role, each), block in zip(given.items(), blocks, strict=True)}
    wanted = None if ask.output is None else asked(ask.output, device)
    mesh = _meeting(device.runtime.mesh.leased(None), list(wholes.values()), wanted, ask.strategy)
    with _told(ask.explain), _chosen(ask.strategy, mesh):
        met = {role: carried(whole, mesh) for role, whole in wholes.items()}
        numbers = {role: each for role, each in tensors.items() if role not in given}
        output = wanted[1] if wanted is not None and wanted[0] == mesh else None
        found = compute(output, **met, **numbers)
        if wanted is not None:
            found = _brought(found, *wanted)
        block, label = lowered(found, first.grid)
    if any(
        same_storage(block, each) for each in blocks
    ):  # nothing was to be done, and the result is a tensor of its own
        block = block.clone()
    if ask.activation is not None:
        _check_no_terms(name, found)
        block = activate(block, ask.activation)
    return result(
        block,
        first,
        topology=label,
        dtype=kind,
        layout=ask.layout,
        memory_config=ask.memory_config,
        coords=None if first._coords is None else tuple(label.mesh_coords()),
    )


def _meeting(mesh: Mesh, wholes: Sequence[Native], wanted: tuple[Mesh, Any] | None, strategy: Strategy) -> Mesh:
    """The view that operands meet on: the one that all of them have and that is asked for, else the mesh itself."""
    views = {whole.mesh for whole in wholes if any(not isinstance(each, Replicate) for each in whole.placements)}
    if wanted is not None:
        views.add(wanted[0])
    if strategy is not None and not isinstance(strategy, str):
        return mesh
    return views.pop() if len(views) == 1 else mesh


def _brought(found: Native, mesh: Mesh, placements: tuple[Placement, ...]) -> Native:
    moved = carried(found, mesh)
    return redistribute(moved, as_placements(placements, mesh, moved.ndim))


def _check_no_terms(name: str, found: Native) -> None:
    if any(isinstance(each, Partial) for each in found.placements):
        raise ArgumentError(
            f"ttnn.distributed.{name}: an activation of partial sums is not one of their sum",
            asked=found.topology.notation,
            fix="ask for another output, or apply it later",
        )


@contextlib.contextmanager
def _told(explain: bool) -> Iterator[None]:
    if not explain:
        yield
        return
    with record() as log:
        yield
    print(Explanation(log))


STRATEGIES = {"2d": ("row", "column")}  # of the last two axes: every device has a block of the product


def _chosen(strategy: Strategy, mesh: Mesh) -> contextlib.AbstractContextManager[None]:
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


def _tilized(name: str, *tensors: Tensor) -> None:
    if any(isinstance(each, Tensor) and each.layout is not Layout.TILE for each in tensors):
        raise OperandError(
            f"ttnn.distributed.{name}: Inputs to matmul must be tilized", fix="ttnn.to_layout(tensor, ttnn.TILE_LAYOUT)"
        )


# products


def _product(output: Any, a: Native, b: Native, bias: Native | None, turned: tuple[bool, bool]) -> Native:
    x, y = (
        each.transpose(-1, -2) if turn and each.ndim > 1 else each for each, turn in zip((a, b), turned, strict=True)
    )
    found = matmul_(x, y, output=output)
    return found if bias is None else add_(found, bias, output=output)


@op("distributed.matmul", also=SPEED)
def matmul(
    input_tensor_a: Tensor,
    input_tensor_b: Tensor,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    output: Any = None,
    strategy: Strategy = None,
    explain: bool = False,
    dtype: DataType | None = None,
    memory_config: MemoryConfig | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """The product of two wholes, whatever their topologies are; `strategy` names a way, else the cheapest is taken.

    >>> import torch
    >>> from meshloom import ttnn
    >>> with ttnn.create_mesh_device(ttnn.MeshShape(2, 4)) as mesh:
    ...     a = ttnn.from_torch(torch.ones(32, 64), layout=ttnn.TILE_LAYOUT, device=mesh,
    ...                         mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=1))
    ...     b = ttnn.from_torch(torch.ones(64, 96), layout=ttnn.TILE_LAYOUT, device=mesh)
    ...     y = ttnn.distributed.matmul(a, b, output=ttnn.PlacementShard(0))
    >>> y.shape, y.tensor_topology().placements()
    (Shape([4, 96]), [PlacementShard(0)])
    """
    return linear(
        input_tensor_a,
        input_tensor_b,
        transpose_a=transpose_a,
        transpose_b=transpose_b,
        output=output,
        strategy=strategy,
        explain=explain,
        dtype=dtype,
        memory_config=memory_config,
        activation=activation,
    )


@op("distributed.linear", also=SPEED)
def linear(
    input_tensor_a: Tensor,
    input_tensor_b: Tensor,
    *,
    bias: Tensor | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    output: Any = None,
    strategy: Strategy = None,
    explain: bool = False,
    dtype: DataType | None = None,
    memory_config: MemoryConfig | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """The product of two wholes, plus a bias, then an activation."""
    _tilized("linear" if bias is not None else "matmul", input_tensor_a, input_tensor_b)
    turned = (transpose_a, transpose_b)
    return spread(
        "linear" if bias is not None else "matmul",
        {"a": input_tensor_a, "b": input_tensor_b, "bias": bias},
        lambda output, a, b, bias: _product(output, a, b, bias, turned),
        Ask(output, strategy, explain, dtype, None, memory_config, activation),
    )


# element by element


def _pairwise(name: str, function: Callable[..., Native], says: str) -> Callable[..., Tensor]:
    def call(
        input_tensor_a: Operand,
        input_tensor_b: Operand,
        *,
        output: Any = None,
        explain: bool = False,
        dtype: DataType | None = None,
        memory_config: MemoryConfig | None = None,
        activations: Sequence[Activation] = (),
    ) -> Tensor:
        return spread(
            name,
            {"a": input_tensor_a, "b": input_tensor_b},
            lambda output, a, b: function(a, b, output=output),
            Ask(output, None, explain, dtype, None, memory_config, activations or None),
        )

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"{says} of two wholes, or of one and a number."
    return op(f"distributed.{name}", also=SPEED + " use_legacy fast_and_approximate_mode")(call)


add = _pairwise("add", add_, "The sum")
multiply = _pairwise("multiply", multiply_, "The product, element by element,")


# whole rows


@op("distributed.softmax", also=SPEED + " numeric_stable")
def softmax(
    input_tensor: Tensor,
    dim: int = -1,
    *,
    output: Any = None,
    explain: bool = False,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """Softmax along a dim of the whole: of a sharded dim, statistics go around and not the dim."""
    (at,) = dims_of("distributed.softmax", input_tensor, dim)
    return spread(
        "softmax",
        {"x": input_tensor},
        lambda output, x: softmax_(x, at, output=output),
        Ask(output, None, explain, memory_config=memory_config),
        exact,
    )


def _norm(
    name: str,
    norm: Callable[[Any, Native, Native | None, Native | None], Native],
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    ask: Ask,
) -> Tensor:
    def compute(output: Any, x: Native, weight: Any, bias: Any, residual: Any) -> Native:
        x = x if residual is None else add_(x, residual)
        rows = (None if each is None else each.reshape(-1) for each in (weight, bias))
        return norm(output, x, *rows)

    return spread(name, {"x": tensor, "weight": weight, "bias": bias, "residual": residual}, compute, ask, exact)


@op("distributed.layer_norm", also=SPEED)
def layer_norm(
    input_tensor: Tensor,
    *,
    epsilon: float = 1e-12,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual_input_tensor: Tensor | None = None,
    output: Any = None,
    explain: bool = False,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) of every row of the whole, times the weight, plus the bias."""

    def norm(output: Any, x: Native, weight: Native | None, bias: Native | None) -> Native:
        return layer_norm_(x, x.shape[-1:], weight, bias, epsilon, output=output)

    ask = Ask(output, None, explain, memory_config=memory_config)
    return _norm("layer_norm", norm, input_tensor, weight, bias, residual_input_tensor, ask)


@op("distributed.rms_norm", also=SPEED)
def rms_norm(
    input_tensor: Tensor,
    *,
    epsilon: float = 1e-12,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual_input_tensor: Tensor | None = None,
    output: Any = None,
    explain: bool = False,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """x / sqrt(mean of squares + epsilon) of every row of the whole, times the weight, plus the bias."""

    def norm(output: Any, x: Native, weight: Native | None, bias: Native | None) -> Native:
        found = rms_norm_(x, x.shape[-1:], weight, epsilon, output=output)
        return found if bias is None else add_(found, bias, output=output)

    ask = Ask(output, None, explain, memory_config=memory_config)
    return _norm("rms_norm", norm, input_tensor, weight, bias, residual_input_tensor, ask)


# reductions


def _summing(name: str, function: Callable[..., Native]) -> Callable[..., Tensor]:
    def call(
        input_tensor: Tensor,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        scalar: float = 1.0,
        output: Any = None,
        explain: bool = False,
        memory_config: MemoryConfig | None = None,
    ) -> Tensor:
        dims = dims_of(f"distributed.{name}", input_tensor, dim)

        def compute(output: Any, x: Native) -> Native:
            found = function(x, dims, keepdim, output=output) if dims else x
            return found if scalar == 1.0 else multiply_(found, scalar, output=output)

        return spread(
            name, {"x": input_tensor}, compute, Ask(output, None, explain, memory_config=memory_config), exact
        )

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"The {name} over a dim of the whole, several, or all; `scalar` multiplies it."
    return op(f"distributed.{name}", also=SPEED)(call)


sum = _summing("sum", sum_)
mean = _summing("mean", mean_)


# tables and attention


@op("distributed.embedding", also=SPEED + " embeddings_type")
def embedding(
    input_tensor: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    layout: Layout | None = None,
    output: Any = None,
    explain: bool = False,
    dtype: DataType | None = None,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """Rows of a table by number; of a table that is cut at its rows every device looks up what it has."""

    def compute(output: Any, index: Native, table: Native) -> Native:
        rows = table.reshape(-1, table.shape[-1])
        inside("distributed.embedding", index._data, rows.shape[0], "row")
        numbers = index.reshape(index.shape[0], index.shape[-1]) if _is_flat(index) else index
        return embedding_(numbers, rows, output=output)

    if len(weight.shape) > 2 and any(size != 1 for size in weight.shape[:-2]):
        raise OperandError(f"ttnn.distributed.embedding: weight is {list(weight.shape)}", fix="give a table [V, H]")
    ask = Ask(output, None, explain, dtype, layout or Layout.ROW_MAJOR, memory_config or input_tensor.memory_config())
    return spread("embedding", {"index": input_tensor, "table": weight}, compute, ask, like=weight)


def _is_flat(index: Native) -> bool:
    return index.ndim == 4 and tuple(index.shape[1:3]) == (1, 1)


@op("distributed.scaled_dot_product_attention", "distributed.transformer.scaled_dot_product_attention", also=SPEED)
def scaled_dot_product_attention(
    input_tensor_q: Tensor,
    input_tensor_k: Tensor,
    input_tensor_v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    output: Any = None,
    explain: bool = False,
    memory_config: MemoryConfig | None = None,
) -> Tensor:
    """softmax(q @ k.T * scale + mask) @ v of wholes; causal unless said otherwise, heads of k and v may be shared."""
    name = "scaled_dot_product_attention"
    if is_causal and attn_mask is not None:
        raise OperandError(
            f"ttnn.distributed.{name}: is_causal=True and attn_mask exclude each other", fix="is_causal=False"
        )

    def compute(output: Any, q: Native, k: Native, v: Native, mask: Any) -> Native:
        shared = q.shape[-3] != k.shape[-3]
        return attention_(q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=shared, output=output)

    return spread(
        name,
        {"q": input_tensor_q, "k": input_tensor_k, "v": input_tensor_v, "mask": attn_mask},
        compute,
        Ask(output, None, explain, memory_config=memory_config),
        exact,
    )


# movement


@op("distributed.to_topology")
def to_topology(
    input_tensor: Tensor, output: Any, *, explain: bool = False, memory_config: MemoryConfig | None = None
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
    found = spread(
        "to_topology",
        {"x": input_tensor},
        lambda output, x: x,
        Ask(output, None, explain, memory_config=memory_config),
        lambda block: block,
    )
    settled = found.tensor_topology() == input_tensor.tensor_topology() and memory_config is None
    return input_tensor if settled else found
