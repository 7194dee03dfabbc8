"""torch's own operator database on a mesh: each function with torch's own samples, at random placements, beside dense.

`calls` are a function's first samples on one mesh. `matrix` has cells of function, dtype and mesh, and a cell's calls
are later samples; `tenth` is a fixed part of it in which every function is met.

`python tests/op_database.py [op ...]` prints every sample of both that differs and the counts: by rule, by fallback,
skipped.
"""

from __future__ import annotations

import math
import random
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, islice
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch.utils import _pytree as tree

import meshloom as loom
from meshloom import Mesh, Partial, Placement, Replicate, Shard
from meshloom.engines.layout import mask_of
from oracle import check_close, check_result, partial_ops

MESH = Mesh.of((2, 3))
DTYPES = (torch.float32, torch.int64)
PER_OP = 3  # samples of each function and dtype
MESHES = tuple(map(Mesh.of, ((2,), (8,), (2, 4), (3,), (2, 3))))
ALL_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
LATER = 4  # samples of a cell of the matrix, from those after the first
LARGEST = 30_000  # elements of a sample's largest tensor

RULE, FALLBACK = "by rule", "by fallback"

RANDOM = "random values, drawn by key and not as torch draws them"
UNINITIALISED = "uninitialised memory"

# Functions without one right answer, by name, and why.
SKIPPED: dict[str, str] = {
    **dict.fromkeys(
        "bernoulli cauchy exponential geometric log_normal multinomial normal normal_in_place normal_number_mean "
        "nn_functional_alpha_dropout nn_functional_dropout nn_functional_dropout2d nn_functional_dropout3d "
        "nn_functional_feature_alpha_dropout_with_train rand_like randint_like randn_like uniform".split(),
        RANDOM,
    ),
    **dict.fromkeys("empty_like new_empty new_empty_strided".split(), UNINITIALISED),
    **dict.fromkeys(
        "jiterator_unary jiterator_binary jiterator_4inputs_with_extra_args jiterator_binary_return_by_ref "
        "jiterator_2inputs_2outputs".split(),
        "torch itself raises: needs a GPU",
    ),
    "as_strided_partial_views": "reads storage outside its operand",
    "resize_": "changes the shape of its operand: refused",
    "resize_as_": "changes the shape of its operand: refused",
}
# Complex vectors of these are right up to a phase, which depends on how a matrix lies in memory.
TURNED = "svd linalg_svd linalg_eig linalg_eigh svd_lowrank pca_lowrank".split()
PHASE = "vectors up to a phase"
NO_TENSOR, SPARSE, LARGE = "takes no tensor", "sparse operands", f"more than {LARGEST:,} elements"


@dataclass(frozen=True)
class Call:
    """One sample of a function."""

    name: str
    dtype: torch.dtype
    number: int
    run: Callable[..., Any]
    sample: Any
    mesh: Mesh = MESH

    def __str__(self) -> str:
        where = "" if self.mesh is MESH else f" on {self.mesh}"
        return f"{self.name} {str(self.dtype).removeprefix('torch.')} {self.number}{where}"

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Input, further arguments, named ones."""
        return self.sample.input, self.sample.args, self.sample.kwargs


@cache
def database() -> tuple[Any, ...]:
    """Every function of torch's table; its import takes some seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.opinfo import core
    for module in (common_utils, core):  # it looks for torch's own test among all callers, at every sample
        module.extract_test_fn = lambda: None
    return tuple(op_db)


def calls(op: Any) -> Iterator[Call]:
    """The first samples of a function in every dtype that it takes."""
    for dtype in DTYPES:
        if op.supports_dtype(dtype, "cpu"):
            torch.manual_seed(0)
            tracked = op.supports_autograd and dtype.is_floating_point
            for number, sample in enumerate(islice(op.sample_inputs("cpu", dtype, requires_grad=tracked), PER_OP)):
                yield Call(op.formatted_name, dtype, number, callable_of(op), sample)


@dataclass(frozen=True)
class Cell:
    """A function, a dtype and a mesh."""

    name: str
    dtype: torch.dtype
    mesh: Mesh

    @property
    def mark(self) -> int:
        """A number that is the same on every machine."""
        return zlib.crc32(f"{self.name} {self.dtype} {self.mesh.shape}".encode())


@cache
def by_name() -> dict[str, Any]:
    return {op.formatted_name: op for op in database()}


@cache
def matrix() -> tuple[Cell, ...]:
    """Every function that is not skipped, in every dtype that it takes, on five meshes."""
    kept = (op for op in database() if op.formatted_name not in SKIPPED)
    typed = ((op, dtype) for op in kept for dtype in ALL_DTYPES if op.supports_dtype(dtype, "cpu"))
    return tuple(Cell(op.formatted_name, dtype, mesh) for op, dtype in typed for mesh in MESHES)


def tenth(cells: Iterable[Any]) -> list[Any]:
    """About every tenth cell, always the same, and at least one of every name."""
    cells = tuple(cells)
    least: dict[str, Any] = {}
    for cell in cells:
        least[cell.name] = min(least.get(cell.name, cell), cell, key=lambda each: each.mark)
    return [cell for cell in cells if cell.mark % 10 == 0 or least[cell.name] is cell]


def spaced(values: list[Any], count: int, mark: int) -> list[Any]:
    """Some of them, spaced; which ones depends on the mark of the cell, so that together cells meet many."""
    step = max(1, len(values) // count)
    return values[mark % step :: step][:count]


def later_calls(cell: Cell, count: int = LATER) -> Iterator[Call]:
    """Later samples of a function."""
    op = by_name()[cell.name]
    torch.manual_seed(0)
    tracked = op.supports_autograd and cell.dtype in op.supported_backward_dtypes("cpu")
    numbered = list(enumerate(islice(op.sample_inputs("cpu", cell.dtype, requires_grad=tracked), 100)))
    for number, sample in spaced(numbered[PER_OP:] or numbered, count, cell.mark):
        yield Call(cell.name, cell.dtype, number, callable_of(op), sample, cell.mesh)


def callable_of(op: Any) -> Callable[..., Any]:
    """The function; a method of torch's class as the method of whatever it is called on, for ours is no subclass."""
    if op.name == "item" or isinstance(op.op, (MethodDescriptorType, WrapperDescriptorType)):
        return lambda first, *args, **kwargs: getattr(first, op.name)(*args, **kwargs)
    return op.op


def check(call: Call) -> str:
    """How the call was carried out, or why it was not; raises if values or gradients differ from dense."""
    reason = why_not(call)
    if reason:
        return reason
    dense, ours = Side(call, dense_leaf), Side(call, partial(mesh_leaf, random.Random(str(call)), call.mesh))
    theirs = answer(call, *dense.arguments)
    with loom.record() as log:
        mine = answer(call, *ours.arguments)
    what = f"{call}: {described(ours.arguments)}"
    check_tree(mine, theirs, what)
    check_gradients(ours, dense, mine, theirs, what)
    return FALLBACK if log.fallbacks else RULE


class Side:
    """The arguments of a call, dense or on the mesh: copies, since some functions write into them, and their leaves."""

    def __init__(self, call: Call, make: Callable[[torch.Tensor], tuple[Any, Any]]) -> None:
        self.leaves: list[Any] = []

        def take(tensor: torch.Tensor) -> Any:
            value, leaf = make(tensor)
            self.leaves.append(leaf)
            return value

        self.arguments = tree.tree_map_only(torch.Tensor, take, call.arguments)


def dense_leaf(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy to work on, and the leaf that its gradient goes to."""
    leaf = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return leaf.clone(), leaf


def mesh_leaf(draw: random.Random, mesh: Mesh, tensor: torch.Tensor) -> tuple[loom.Tensor, loom.Tensor]:
    """The same somewhere on the mesh: sharded, replicated, or in parts to be reduced."""
    found = [drawn(tensor, draw) for _ in range(mesh.ndim)]
    kind = next((each for each in found if isinstance(each, Partial)), None)  # one way to reduce per tensor
    kept = [Replicate() if isinstance(each, Partial) else each for each in found]
    leaf = loom.distribute(tensor.detach().clone(), mesh, kept).requires_grad_(tensor.requires_grad)
    return apart(leaf.clone().redistribute([kind if isinstance(each, Partial) else each for each in found])), leaf


# What is added to the parts on the first, second, third... device: the value stays, and no part is the value.
APART: dict[str, Callable[[int], list[int]]] = {
    "sum": lambda count: [count - 1] + [-1] * (count - 1),
    "max": lambda count: list(range(0, -count, -1)),
    "min": lambda count: list(range(count)),
}


def apart(tensor: loom.Tensor) -> loom.Tensor:
    """The same value from other parts: those of `redistribute` are the value and zeros, which many wrong rules keep."""
    topology, data = tensor.topology, tensor._data
    axes = topology.partial_axes
    op = topology.placements[axes[0]].op if axes else ""
    if op not in APART or topology.dtype == "bool":
        return tensor
    shape = tuple(topology.mesh.shape[axis] for axis in axes)
    count = math.prod(shape)
    if op == "sum" and (data.is_floating_point() or data.is_complex()):
        # two halves, which add up without rounding: some functions tell values apart that are equal but for that
        flat = data.flatten(0, len(axes) - 1)
        moved = torch.cat([flat[:1] / 2, flat[:1] / 2, flat[2:]]).view_as(data) if count > 1 else data
    else:
        moved = data + torch.tensor(APART[op](count)).view(*shape, *(1,) * (data.ndim - len(axes)))
    mask = mask_of(topology, data.device)
    return loom.Tensor(topology, moved if mask is None else moved.where(mask, 0))


EXACT = (torch.float32, torch.float64, torch.int64, torch.bool)  # bf16 would round the parts


def drawn(tensor: torch.Tensor, draw: random.Random) -> Placement:
    """What one mesh axis does to a tensor."""
    kind = draw.random()
    if kind < 0.15 and tensor.dtype in EXACT:
        # a mean of three parts is rounded, which tan shows near its poles
        return Partial(draw.choice([op for op in partial_ops(tensor.dtype) if op != "mean"]))
    return Shard(draw.randrange(tensor.ndim)) if kind < 0.8 and tensor.ndim else Replicate()


def why_not(call: Call) -> str:
    """Why a call cannot be compared, if it cannot."""
    tensors = [each for each in tree.tree_leaves(call.arguments) if isinstance(each, torch.Tensor)]
    if not tensors:
        return NO_TENSOR
    if any(each.layout is not torch.strided for each in tensors):
        return SPARSE
    if max(each.numel() for each in tensors) > LARGEST:
        return LARGE
    if call.sample.kwargs.get("dropout_p"):
        return RANDOM
    if call.dtype.is_complex and call.name in TURNED:
        return PHASE
    return SKIPPED.get(call.name, "")


def answer(call: Call, first: Any, args: Any, kwargs: Any) -> Any:
    """What the function returns, or the part of it that torch itself compares."""
    return call.sample.output_process_fn_grad(call.run(first, *args, **kwargs))


def described(value: Any) -> list[str]:
    """The tensors among the arguments, in the printed notation."""
    return [str(each.topology) for each in tree.tree_leaves(value) if isinstance(each, loom.Tensor)]


def check_tree(ours: Any, dense: Any, what: str) -> None:
    """Results of any form, leaf by leaf."""
    mine, theirs = tree.tree_leaves(ours), tree.tree_leaves(dense)
    assert len(mine) == len(theirs), f"{what}: {len(mine)} results for {len(theirs)}"
    for each, other in zip(mine, theirs, strict=True):
        if isinstance(each, loom.Tensor):
            check_result(each, other, what)
        elif isinstance(other, torch.Tensor):
            assert isinstance(each, torch.Tensor), f"{what}: {type(each).__name__} for a tensor"
            check_close(each, other, what)
        else:
            assert each == other and type(each) is type(other), f"{what}: {each!r} for {other!r}"


def check_gradients(ours: Side, dense: Side, mine: Any, theirs: Any, what: str) -> None:
    """Gradients of every leaf, for random ones of every result."""
    generator = torch.Generator().manual_seed(0)
    for each, other in zip(tree.tree_leaves(mine), tree.tree_leaves(theirs), strict=True):
        if isinstance(other, torch.Tensor) and other.requires_grad:
            assert each.requires_grad, f"{what}: the result has no gradient"
            seed = torch.randn(other.shape, generator=generator, dtype=other.dtype)
            other.backward(seed, retain_graph=True)
            each.backward(seed, retain_graph=True)
    for each, other in zip(ours.leaves, dense.leaves, strict=True):
        if other.grad is not None:
            assert each.grad is not None, f"{what}: a leaf has no gradient"
            check_result(each.grad, other.grad, f"{what}: gradient of {each.topology}")


def main() -> None:
    """Check every function, or those that are named; print what differs, and the counts."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    wanted = sys.argv[1:]
    for op in (each for each in database() if not wanted or each.formatted_name in wanted):
        cells = [cell for cell in matrix() if cell.name == op.formatted_name]
        for call in chain(calls(op), *(later_calls(cell, 100) for cell in cells)):
            try:
                counts[check(call)] += 1
            except Exception as error:
                counts["WRONG"] += 1
                print("WRONG", call, type(error).__name__, str(error).replace("\n", " | ")[:400], flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
