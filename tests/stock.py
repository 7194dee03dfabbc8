"""What `test_stock.py` runs in fresh processes: torch's public modules and classes, compared before and after.

    python -m stock [planted]

Everything public that torch has is noted after two dense training steps, which load what torch itself loads late; then
all of meshloom is imported and a model is trained on a mesh, with a reentrant checkpoint. What is another object
afterwards, is gone or is new, is printed. `planted` changes something of torch in between, which must be found.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.tensor
import torch.nn.functional as F
import torch.utils.checkpoint

MODULES = (
    "torch torch.nn torch.nn.functional torch.nn.init torch.nn.parameter torch.nn.modules.module torch.nn.utils "
    "torch.autograd torch.autograd.function torch.autograd.graph torch.autograd.grad_mode torch.optim "
    "torch.optim.optimizer torch.utils.checkpoint torch.utils.data torch.amp torch.func torch.linalg torch.fft "
    "torch.special torch.serialization torch.overrides torch.random torch.distributed torch.distributed.tensor"
).split()
OPTIONAL = frozenset({"meshloom.__main__"})  # runs the command line
Stock = dict[str, tuple[Any, ...]]


def take() -> Stock:
    """Every attribute of torch's public modules, and of the classes in them, by name."""
    found: Stock = {}
    classes: dict[type, str] = {}
    for name in MODULES:
        for attribute, value in vars(importlib.import_module(name)).items():
            if isinstance(value, (types.ModuleType, *COUNTERS)) or attribute.startswith("__"):
                continue
            found[f"{name}.{attribute}"] = parts(value)
            if isinstance(value, type) and value.__module__.startswith("torch"):
                for each in value.__mro__:
                    if each.__module__.startswith("torch"):
                        classes.setdefault(each, f"{each.__module__}.{each.__qualname__}")
    for kind, name in classes.items():
        for attribute, value in vars(kind).items():
            if attribute not in NOT_HELD and not isinstance(value, COUNTERS):
                found[f"{name}.{attribute}"] = parts(value)
    return found


COUNTERS = (int, float)  # of hooks, of steps
NOT_HELD = frozenset({"__dict__", "__weakref__", "__abstractmethods__", "_abc_impl"})


def parts(value: Any) -> tuple[Any, ...]:
    """What must stay: the object, and of a function its code, its names, its defaults and its attributes as well."""
    function = getattr(value, "__func__", value)
    if isinstance(value, property):
        return value, *(piece for each in (value.fget, value.fset, value.fdel) if each for piece in parts(each))
    if not isinstance(function, types.FunctionType):
        return (value,)
    own = [each for pair in sorted(vars(function).items()) for each in pair]
    return value, function.__code__, function.__globals__, function.__defaults__, function.__kwdefaults__, *own


def changes(before: Stock, after: Stock) -> list[str]:
    """The names that are gone, new or other objects."""
    gone = [f"gone: {name}" for name in before.keys() - after.keys()]
    new = [f"new: {name}" for name in after.keys() - before.keys()]
    other = [f"other: {name}" for name in before.keys() & after.keys() if not _same(before[name], after[name])]
    return sorted(gone + new + other)


def _same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    return len(first) == len(second) and all(a is b or _equal_text(a, b) for a, b in zip(first, second, strict=True))


def _equal_text(first: Any, second: Any) -> bool:
    """Names of attributes, which may be other objects."""
    return isinstance(first, str) and first == second


def import_all() -> list[str]:
    """Every module of meshloom; those that need a package that is not installed are left out."""
    import meshloom

    names = [each.name for each in pkgutil.walk_packages(meshloom.__path__, "meshloom.", onerror=_fail)]
    for name in names:
        if name in OPTIONAL:
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] in ("meshloom", "torch", "numpy"):
                raise
    return [name for name in names if name in sys.modules]


def _fail(name: str) -> None:
    raise ImportError(name)


class Block(torch.nn.Module):
    """A layer whose inside is computed again in backward, in the reentrant way."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 10), torch.nn.Linear(10, 6)
        self.norm, self.reentrant = torch.nn.LayerNorm(6), reentrant

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=self.reentrant))


def train(put: Callable[[torch.nn.Module], Any] | None, data: torch.Tensor) -> None:
    """Two steps of each kind of optimizer, with hooks, clipping and both kinds of checkpoints."""
    for reentrant, options in ((True, {}), (False, {"foreach": True})):
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), Block(reentrant), torch.nn.Linear(6, 3))
        if put is not None:
            put(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
        model[1].register_full_backward_hook(lambda *_: None)
        for _ in range(2):
            optimizer.zero_grad()
            model(data).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        assert all(each.grad is not None and bool(each.grad.abs().sum() > 0) for each in model.parameters())


def plant() -> None:
    """Change torch as a library might: methods and functions replaced, altered inside, added, taken away."""
    torch.autograd.Function.apply = classmethod(lambda cls, *args: None)
    torch.Tensor.__setattr__ = object.__setattr__
    torch.Tensor.grad = property(lambda self: None)
    torch.nn.functional.relu = types.FunctionType(F.relu.__code__, dict(F.relu.__globals__))
    F.layer_norm.__code__ = F.layer_norm.__code__.replace(co_name="layer_norm_of_ours")
    F.dropout.note = "seen"
    torch.nn.Module.placements = None
    del torch.nn.Module.half
    torch.matmul = lambda *args: None


def main(planted: bool) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of objects that torch is about to drop, which warn when looked at
    torch.manual_seed(0)
    torch.set_num_threads(1)
    train(None, torch.randn(8, 6))
    before = take()
    assert "meshloom" not in sys.modules
    if planted:
        plant()
        print(*changes(before, take()), sep="\n")
        return
    imported = import_all()
    assert not changes(before, take()), changes(before, take())

    import meshloom as loom

    mesh = loom.open_mesh((2, 2))
    train(lambda model: place(model, mesh), loom.distribute(torch.randn(8, 6), mesh, "S(0), R"))
    print(len(before), len(imported), *imported, sep="\n")
    print(*changes(before, take()), sep="\n")


def place(model: torch.nn.Module, mesh: Any) -> None:
    """All parameters on the mesh."""
    import meshloom as loom

    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            setattr(module, name, loom.Parameter(loom.distribute(each.detach(), mesh, "R, S(0)")))


if __name__ == "__main__":
    main(sys.argv[1:] == ["planted"])
