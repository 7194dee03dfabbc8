"""torch's own module database on a mesh: each module with torch's own inputs, trained and not, at random placements.

`python tests/module_database.py [module ...]` prints every input that differs and the counts.
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as tree

import meshloom as loom
from meshloom import Mesh, Replicate, Shard
from op_database import (
    ALL_DTYPES,
    LARGE,
    LARGEST,
    LATER,
    MESHES,
    RANDOM,
    check_tree,
    described,
    mesh_leaf,
    spaced,
)
from oracle import check_result

SKIPPED = dict.fromkeys(("nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d"), RANDOM)
SAME = "equal"
LAZY = "has no parameters before its first input"


@dataclass(frozen=True)
class Cell:
    """A module, a dtype, training or not, and a mesh."""

    name: str
    dtype: torch.dtype
    training: bool
    mesh: Mesh

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.name} {kind} {'trained' if self.training else 'evaluated'} on {self.mesh}"

    @property
    def mark(self) -> int:
        """A number that is the same on every machine."""
        return zlib.crc32(f"{self.name} {self.dtype} {self.training} {self.mesh.shape}".encode())


@cache
def database() -> dict[str, Any]:
    """Every module of torch's table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_utils
        from torch.testing._internal.common_modules import module_db
    common_utils.extract_test_fn = lambda: None  # it looks for torch's own test among all callers, at every sample
    return {module.name: module for module in module_db}


@cache
def matrix() -> tuple[Cell, ...]:
    """Every module in every dtype that it takes, in both modes where they differ, on five meshes."""
    found = []
    for name, info in database().items():
        modes = (True, False) if info.train_and_eval_differ else (True,)
        typed = [(dtype, training) for dtype in ALL_DTYPES if dtype in info.dtypes for training in modes]
        found += [Cell(name, dtype, training, mesh) for dtype, training in typed for mesh in MESHES]
    return tuple(found)


def inputs(cell: Cell, count: int = LATER) -> Iterator[tuple[int, Any]]:
    """Inputs of a module, numbered."""
    info = database()[cell.name]
    torch.manual_seed(0)
    tracked = cell.dtype.is_floating_point or cell.dtype.is_complex
    numbered = list(enumerate(info.module_inputs_func(info, "cpu", cell.dtype, tracked, cell.training)))
    yield from spaced(numbered, count, cell.mark)


def why_not(cell: Cell, given: Any) -> str:
    """Why a module cannot be compared, if it cannot."""
    if "Lazy" in cell.name:
        return LAZY
    random = any(value for key, value in given.constructor_input.kwargs.items() if key.startswith("dropout"))
    return SKIPPED.get(cell.name) or (RANDOM if random and cell.training else "")


def make(cell: Cell, given: Any) -> torch.nn.Module:
    """The module, dense, with the same parameters every time."""
    torch.manual_seed(1)
    made = given.constructor_input
    return database()[cell.name].module_cls(*made.args, **made.kwargs).to(cell.dtype).train(cell.training)


def put(module: torch.nn.Module, mesh: Mesh, draw: random.Random) -> torch.nn.Module:
    """The same module with its parameters on a mesh, anywhere."""
    module = copy.deepcopy(module)
    for layer in module.modules():
        for name, parameter in list(layer.named_parameters(recurse=False)):
            shape = parameter.shape
            held = [
                Shard(draw.randrange(len(shape))) if shape and draw.random() < 0.6 else Replicate() for _ in mesh.shape
            ]
            made = loom.Parameter(parameter.detach().clone(), mesh, held)
            setattr(layer, name, made.requires_grad_(parameter.requires_grad))
    return module


class Side:
    """A module with its arguments and their leaves."""

    def __init__(self, module: torch.nn.Module, arguments: Any, leaves: list[Any]) -> None:
        self.module, self.arguments, self.leaves = module, arguments, leaves

    def run(self) -> Any:
        args, kwargs = self.arguments
        return self.module(*args, **kwargs)


def dense_side(module: torch.nn.Module, given: Any) -> Side:
    leaves: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> torch.Tensor:
        leaves.append(tensor.detach().clone().requires_grad_(tensor.requires_grad))
        return leaves[-1].clone()

    found = given.forward_input
    return Side(copy.deepcopy(module), tree.tree_map_only(torch.Tensor, take, (found.args, found.kwargs)), leaves)


def mesh_side(cell: Cell, number: int, module: torch.nn.Module, given: Any) -> Side:
    draw = random.Random(f"{cell} {number}")
    leaves: list[Any] = []

    def take(tensor: torch.Tensor) -> Any:
        value, leaf = mesh_leaf(draw, cell.mesh, tensor)
        leaves.append(leaf)
        return value

    found = given.forward_input
    arguments = tree.tree_map_only(torch.Tensor, take, (found.args, found.kwargs))
    return Side(put(module, cell.mesh, draw), arguments, leaves)


def check(cell: Cell, number: int, given: Any) -> str:
    """How the module was compared, or why it was not; raises if values or gradients differ from dense."""
    reason = why_not(cell, given)
    if reason:
        return reason
    module = make(cell, given)
    tensors = [each for each in tree.tree_leaves(given.forward_input.args) if isinstance(each, torch.Tensor)]
    if max([each.numel() for each in [*tensors, *module.parameters()]], default=0) > LARGEST:
        return LARGE
    dense, ours = dense_side(module, given), mesh_side(cell, number, module, given)
    theirs, mine = dense.run(), ours.run()
    what = f"{cell} {number}: {described(ours.arguments)}"
    check_tree(mine, theirs, what)
    check_gradients(ours, dense, mine, theirs, what)
    check_state(ours.module, dense.module, what)
    return SAME


def check_gradients(ours: Side, dense: Side, mine: Any, theirs: Any, what: str) -> None:
    """Gradients of inputs and parameters."""
    generator = torch.Generator().manual_seed(0)
    for each, other in zip(tree.tree_leaves(mine), tree.tree_leaves(theirs), strict=True):
        if isinstance(other, torch.Tensor) and other.requires_grad:
            seed = torch.randn(other.shape, generator=generator, dtype=other.dtype)
            other.backward(seed, retain_graph=True)
            each.backward(seed, retain_graph=True)
    for each, other in zip(ours.leaves, dense.leaves, strict=True):
        if each is not None and other.grad is not None:
            assert each.grad is not None, f"{what}: an input has no gradient"
            check_result(each.grad, other.grad, f"{what}: gradient of {each.topology}")
    for (name, each), other in zip(ours.module.named_parameters(), dense.module.parameters(), strict=True):
        if other.grad is not None:
            assert each.grad is not None, f"{what}: {name} has no gradient"
            check_result(each.grad, other.grad, f"{what}: gradient of {name} {each.topology}")


def check_state(ours: torch.nn.Module, dense: torch.nn.Module, what: str) -> None:
    """Buffers: running means and their kind."""
    for (name, each), other in zip(ours.named_buffers(), dense.buffers(), strict=True):
        check_tree(each, other, f"{what}: {name}")


def main() -> None:
    """Check every module, or those that are named; print what differs, and the counts."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    wanted = sys.argv[1:]
    for cell in (each for each in matrix() if not wanted or each.name in wanted):
        for number, given in inputs(cell, 100):
            try:
                counts[check(cell, number, given)] += 1
            except Exception as error:
                counts["WRONG"] += 1
                print("WRONG", cell, number, type(error).__name__, str(error).replace("\n", " | ")[:400], flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main()
