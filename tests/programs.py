"""The oracle of programs: the same lines on dense torch and on a mesh, compared after each line and at the end.

A program is a mesh and lines of Python; `draw_program` in `program_steps` draws one from a number. Tensors are called
`v0`, `v1`...; what differs between the sides are these functions: `leaf` makes a tensor, `place` redistributes it,
`asked` and `call` ask for placements, `keep` keeps the handle of a hook, `scale` and `record` are hooks, `like` is a
gradient to start backward from.

`check_program` raises `Difference` where the sides differ; its text ends with the shortest program that shows it:

    PYTHONPATH=tests python -c "import programs; programs.check_program((2,), '''
    v0 = leaf((3,), 'f32', 'S(0)', 1)
    v0.add_(1)
    ''')"
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterable
from functools import lru_cache
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F

import meshloom as loom
from meshloom import Mesh, MeshloomError, Partial
from meshloom.engines.layout import mask_of, short_name
from oracle import check_close

DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "i64": torch.int64, "i32": torch.int32, "bool": torch.bool,
}  # fmt: skip
# What is open, and belongs to a later change of the tensor's class: the reason, and the smallest program that shows it.
# A test runs each without its exemption: delete the entry, and what looks at its name, when that test says it is gone.
EXEMPT: dict[str, tuple[str, tuple[int, ...], str]] = {
    "refusals in torch's words": (
        "some calls that torch refuses are refused by torch's own error and text, not by ours",
        (2,),
        """
        v0 = leaf((4, 3), "f32", "S(1)", 1)
        v1 = v0.index_select(0, torch.tensor([4]))
        """,
    ),
    "hooks on tensors stored as views": (
        "torch forgets the hooks of a view that is written: a tensor that is no view is stored as one after some "
        "redistributions, and its hooks are forgotten too",
        (2, 2),
        """
        v0 = leaf((1, 4), "f64", "R, R", 30, tracked=True)
        v1 = place(v0, "S(0), S(0)")
        keep(v1.register_hook(record("v1")))
        v2 = v1[None, 0]
        v2[:1] = 1.5
        v3 = v0 - v1
        v3.backward(like(v3, 142), retain_graph=True)
        """,
    ),
    "hooks on results stored as views": (
        "the same where torch stores a result as a view that is none here: torch forgets its hooks, and we call them",
        (2,),
        """
        v0 = leaf((1, 2), "f32", "R", 453, tracked=True)
        v1 = v0 @ v0.expand((1, 2, 2))
        keep(v1.register_hook(record("v1")))
        v1.index_add_(0, torch.tensor([0]), plain((1, 1, 2), "f32", 960))
        v1.backward(like(v1, 838), retain_graph=True)
        """,
    ),
    "hooks on partial tensors": (
        "a gradient of P(mean), P(max), P(min) and P(prod) is not one that a hook can be given: refused",
        (2,),
        """
        v0 = leaf((2, 3), "f32", "P(mean)", 1, tracked=True)
        keep(v0.register_hook(record("v0")))
        v0.backward(like(v0, 1), retain_graph=True)
        """,
    ),
}

# torch keeps books for autograd that a mesh does not keep alike: there the sides may differ in whether they refuse.
BOOKKEEPING = (
    "modified by an inplace operation",
    "leaf Variable",
    "is a view and is being modified inplace",
    "view was created",
    "view which was created",
    "has been modified inplace",
    "does not require grad",
    "some elements of the input tensor and the written-to tensor",
    "ZeroTensors are immutable",
    "has changed the type of value",  # a gradient of zero without memory, times a number, is a double in torch
)


class Difference(AssertionError):
    """The two sides of a program differ: `kind` is how, for shrinking."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Side:
    """One side of a program: the names it has, the leaves whose gradients are compared, what hooks saw."""

    def __init__(self) -> None:
        self.leaves: list[Any] = []
        self.seen: dict[str, list[Any]] = {}
        self.handles: list[Any] = []
        given = (self.leaf, self.place, self.asked, self.call, self.record, scale, like, plain)
        self.names: dict[str, Any] = {each.__name__: each for each in given}
        self.names.update(torch=torch, F=F, keep=self.handles.append, Shard=loom.Shard, Replicate=loom.Replicate)

    def run(self, line: str) -> Exception | None:
        """Run a line; what it raised."""
        try:
            exec(compiled(line), self.names)
        except Exception as error:
            return error
        return None

    def record(self, label: str) -> Callable[[Any], None]:
        """A hook that notes the gradients it sees; copies, since torch may add into one that it passed on."""
        seen = self.seen.setdefault(label, [])
        return lambda gradient: seen.append(None if gradient is None else gradient.clone())

    def close(self) -> None:
        """Take the hooks away: they keep their tensors."""
        for handle in self.handles:
            handle.remove()

    def leaf(self, shape: tuple[int, ...], dtype: str, placements: str, seed: int, tracked: bool = False) -> Any:
        raise NotImplementedError

    def place(self, tensor: Any, placements: str) -> Any:
        raise NotImplementedError

    def asked(self, placements: Any) -> Any:
        raise NotImplementedError

    def call(self, name: str, *args: Any, output: str, **kwargs: Any) -> Any:
        raise NotImplementedError


class Dense(Side):
    """Dense torch."""

    def run(self, line: str) -> Exception | None:
        """Run a line. Gradients of leaves that lie in one memory come apart: torch would add to one and change both."""
        error = super().run(line)
        if ".backward(" in line:
            for each in self.leaves:
                if each.grad is not None:
                    each.grad = each.grad.clone()
        return error

    def leaf(self, shape: tuple[int, ...], dtype: str, placements: str, seed: int, tracked: bool = False) -> Any:
        made = plain(shape, dtype, seed).requires_grad_(tracked)
        self.leaves.append(made)
        return made.clone() if "P" in placements else made

    def place(self, tensor: Any, placements: str) -> Any:
        return tensor.clone()

    def asked(self, placements: Any) -> Any:
        return contextlib.nullcontext()

    def call(self, name: str, *args: Any, output: str, **kwargs: Any) -> Any:
        return getattr(torch, name)(*args, **kwargs)


class OnMesh(Side):
    """meshloom, on a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def leaf(self, shape: tuple[int, ...], dtype: str, placements: str, seed: int, tracked: bool = False) -> Any:
        reduced = re.sub(r"P\(\w+\)", "R", placements)
        made = loom.distribute(plain(shape, dtype, seed), self.mesh, reduced).requires_grad_(tracked)
        self.leaves.append(made)
        return made if reduced == placements else spread(made.redistribute(placements))

    def place(self, tensor: Any, placements: str) -> Any:
        made = tensor.redistribute(placements)
        return made.clone() if made is tensor else made

    def asked(self, placements: Any) -> Any:
        return loom.with_output(placements)

    def call(self, name: str, *args: Any, output: str, **kwargs: Any) -> Any:
        made = getattr(loom, name)(*args, output=output, **kwargs)
        found = ", ".join(map(str, made.placements))
        if found != output:
            raise Difference("placements", f"{name} was asked for {output} and gave {found}")
        return made


@lru_cache(4096)
def compiled(line: str) -> CodeType:
    return compile(line, "<program>", "exec")


def plain(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """A dense tensor of eighths between -3 and 3: sums and products of few of them are exact."""
    generator = torch.Generator().manual_seed(seed)
    eighths = torch.randint(-24, 25, shape, generator=generator)
    if dtype == "bool":
        return eighths > 0
    return eighths.to(DTYPES[dtype]) / 8 if dtype.startswith("f") else (eighths // 6).to(DTYPES[dtype])


def like(tensor: Any, seed: int) -> torch.Tensor:
    """A gradient for a result, to start backward from."""
    return plain(tuple(tensor.shape), short_name(tensor.dtype), seed)


def scale(factor: float) -> Callable[[Any], Any]:
    """A hook that changes the gradient."""
    return lambda gradient: None if gradient is None else gradient * factor


# What is added to (for a product: multiplied with) the parts on the first, second... device; the value stays the same.
SPREAD: dict[str, Callable[[int], list[float]]] = {
    "sum": lambda count: [count - 1] + [-1] * (count - 1),
    "mean": lambda count: [count - 1] + [-1] * (count - 1),
    "max": lambda count: list(range(0, -count, -1)),
    "min": lambda count: list(range(count)),
    "prod": lambda count: [-1, -1][: count - count % 2] + [1] * (count - 2 if count > 1 else count),
}


def spread(tensor: Any) -> Any:
    """The same value from other parts: those of `redistribute` are the value and zeros, which many wrong rules keep."""
    topology, data = tensor.topology, tensor._data
    axes = topology.partial_axes
    if topology.dtype == "bool":
        return tensor
    shape = tuple(topology.mesh.shape[axis] for axis in axes)
    op = topology.placements[axes[0]].op
    parts = SPREAD[op](math.prod(shape))
    if len(parts) != math.prod(shape):
        return tensor
    change = torch.tensor(parts).to(data.dtype).view(*shape, *(1,) * (data.ndim - len(axes)))
    moved = data * change if op == "prod" else data + change
    mask = mask_of(topology, data.device)
    return loom.Tensor(topology, moved if mask is None else moved.where(mask, 0))


NAME = re.compile(r"\bv\d+\b")
DEFINES = re.compile(r"^(?:with [^:]*: )?((?:v\d+, )*v\d+),? = ")


def names_in(line: str) -> list[str]:
    """The names of tensors in a line, in its order."""
    return NAME.findall(re.sub(r"'[^']*'|\"[^\"]*\"", "", line))


def defined_by(line: str) -> list[str]:
    """The names that a line binds."""
    found = DEFINES.match(line)
    return found[1].split(", ") if found else []


class Run:
    """A program under way on both sides."""

    def __init__(self, mesh: tuple[int, ...], exempt: Iterable[str] = EXEMPT) -> None:
        self.mesh, self.exempt = mesh, frozenset(exempt)
        self.dense, self.ours = Dense(), OnMesh(Mesh.of(mesh))
        self.pairs: dict[str, tuple[torch.Tensor, Any]] = {}
        self.ran: list[str] = []
        self.refused = self.started = 0
        self.has_gradients = True

    def take(self, line: str) -> None:
        """One line on both sides, compared; a line that uses a name that is not there is left out."""
        new, used = defined_by(line), names_in(line)
        if any(name not in self.pairs for name in used if name not in new) or self.is_exempt(line):
            return self.forget(new)
        if ".backward(" in line and not self.pairs[used[0]][0].requires_grad:
            return None  # what tracked it was left out
        versions = {name: dense._version for name, (dense, _) in self.pairs.items()}
        mine = self.ours.run(line)
        theirs = self.dense.run(line)
        self.ran.append(line)
        if mine is not None or theirs is not None:
            self.compare_refusals(line, mine, theirs)
            return self.forget(new)
        self.started += ".backward(" in line
        written = [name for name, version in versions.items() if self.pairs[name][0]._version != version]
        for name in new:
            self.pairs[name] = self.dense.names[name], self.ours.names[name]
        if written:
            self.forget([name for name in self.pairs if not is_readable(self.pairs[name][0])])
        for name in new or written:
            if name in self.pairs:
                self.compare(name, line)
        return None

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.pairs.pop(name, None)

    def is_exempt(self, line: str) -> bool:
        """Whether a line meets what is open, before it is run."""
        if ".register_hook(" not in line or "hooks on partial tensors" not in self.exempt:
            return False
        ours = self.pairs[names_in(line)[0]][1]
        return bool({each.op for each in ours.placements if isinstance(each, Partial)} - {"sum"})

    def compare_refusals(self, line: str, mine: Exception | None, theirs: Exception | None) -> None:
        """Both refuse, and ours with an error of ours; else the sides differ."""
        backward = ".backward(" in line
        self.has_gradients = self.has_gradients and not backward
        if isinstance(mine, Difference):
            raise mine
        if backward and any(text in str(theirs) for text in BOOKKEEPING):
            return
        if mine is not None and theirs is not None:
            self.refused += 1
            if isinstance(mine, MeshloomError) or any(text in str(mine) for text in BOOKKEEPING):
                return
            if "refusals in torch's words" in self.exempt and type(mine) is type(theirs) and str(mine) == str(theirs):
                return
            raise Difference(f"foreign {type(mine).__name__}", f"{line}\n{type(mine).__name__}: {mine}")
        if theirs is not None:
            raise Difference("accepted", f"{line}\nis accepted; torch refuses: {type(theirs).__name__}: {theirs}")
        raise Difference(f"refused {type(mine).__name__}", f"{line}\n{type(mine).__name__}: {mine}")

    def compare(self, name: str, line: str) -> None:
        dense, ours = self.pairs[name]
        check_same(ours, dense, f"{name} after {line}")
        if ours.requires_grad != dense.requires_grad:
            raise Difference("requires_grad", f"{name} after {line}: requires_grad is {ours.requires_grad}")

    def finish(self) -> None:
        """Compare every tensor that is left, the gradients of all leaves, and what hooks saw."""
        for name in self.pairs:
            self.compare(name, "all lines")
        if self.has_gradients and not self.forgets_hooks():
            self.compare_gradients()

    def forgets_hooks(self) -> bool:
        """Whether a tensor with a hook was written that only one side stores as a view."""
        hooked = {name for line in self.ran if ".register_hook(" in line for name in names_in(line)}
        pairs = [self.pairs[name] for name in hooked if name in self.pairs]
        stored = any(d._version and not d._is_view() and ours._data._is_view() for d, ours in pairs)
        other = any(d._version and d._is_view() and ours._view is None for d, ours in pairs)
        return (stored and "hooks on tensors stored as views" in self.exempt) or (
            other and "hooks on results stored as views" in self.exempt
        )

    def compare_gradients(self) -> None:
        for number, (ours, dense) in enumerate(zip(self.ours.leaves, self.dense.leaves, strict=True)):
            if dense.grad is not None or ours.grad is not None:
                what = f"the gradient of leaf {number}"
                if dense.grad is None or ours.grad is None:
                    raise Difference("gradient", f"{what} is {ours.grad} for {dense.grad}")
                check_same(ours.grad, dense.grad, what)
        for label, seen in self.dense.seen.items():
            mine = self.ours.seen[label]
            if len(mine) != len(seen):
                raise Difference("hooks", f"the hook {label} was called {len(mine)} times for {len(seen)}")
            for each, other in zip(mine, seen, strict=True):
                if other is not None:
                    check_same(each, other, f"what the hook {label} saw")

    def close(self) -> None:
        self.dense.close()
        self.ours.close()


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements lie in one place, as after `expand` and `unfold`."""
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return True
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() > reach


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether torch lets a view be used: one of several results whose base was written is not."""
    try:
        return tensor.grad_fn is None or True
    except RuntimeError:
        return False


def storage_of(tensor: Any) -> int:
    """The memory that a tensor is kept in, empty or not."""
    return (tensor._data if isinstance(tensor, loom.Tensor) else tensor).untyped_storage()._cdata


def check_same(ours: Any, dense: torch.Tensor, what: str) -> None:
    """Values, shape, dtype, and the padding, which is zero."""
    if not isinstance(ours, loom.Tensor):
        raise Difference("type", f"{what} is a {type(ours).__name__}")
    topology, data = ours.topology, ours._data.detach()
    if topology.shape != tuple(dense.shape) or not topology.dtype == short_name(dense.dtype) == short_name(data.dtype):
        raise Difference("shape", f"{what} is {topology} for {list(dense.shape)} {dense.dtype}")
    if tuple(data.shape) != topology.stored_shape:
        raise Difference("shape", f"{what} is stored as {list(data.shape)} and is {topology}")
    mask = mask_of(topology, data.device)
    if mask is not None and data.masked_fill(mask, 0).count_nonzero():
        raise Difference("padding", f"{what}: padding is not zero in {topology}")
    mine, theirs = ours.to_torch().detach(), dense.detach()
    if torch.equal(mine, theirs):
        return
    try:
        check_close(mine, theirs, what)
    except AssertionError as error:
        raise Difference("values", f"{error}\nours {mine.tolist()}\ndense {theirs.tolist()}\n{topology}") from None


def listed(steps: str | Iterable[str]) -> list[str]:
    """The lines of a program."""
    lines = steps.splitlines() if isinstance(steps, str) else steps
    return [line.strip() for line in lines if line.strip()]


def run_program(mesh: tuple[int, ...], steps: str | Iterable[str], exempt: Iterable[str] = EXEMPT) -> Run:
    """Run a program on both sides; raises `Difference` where they differ."""
    run = Run(mesh, exempt)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for line in listed(steps):
                run.take(line)
            run.finish()
    finally:
        run.close()
    return run


def difference_of(mesh: tuple[int, ...], steps: Iterable[str], exempt: Iterable[str] = EXEMPT) -> Difference | None:
    try:
        run_program(mesh, steps, exempt)
    except Difference as found:
        return found
    return None


def shrink(mesh: tuple[int, ...], steps: Iterable[str], kind: str, exempt: Iterable[str] = EXEMPT) -> list[str]:
    """Fewer lines, and simpler placements, that differ in the same way."""

    def still(lines: list[str]) -> bool:
        found = difference_of(mesh, lines, exempt)
        return found is not None and found.kind == kind

    lines, before = listed(steps), None
    while lines != before:
        before = lines
        for place in reversed(range(len(lines))):
            shorter = lines[:place] + lines[place + 1 :]
            lines = shorter if still(shorter) else lines
        for place, line in enumerate(lines):
            for found in reversed(list(re.finditer(r"[SP]\(\w+\)", line))):
                simpler = line[: found.start()] + "R" + line[found.end() :]
                if still([*lines[:place], simpler, *lines[place + 1 :]]):
                    lines, line = [*lines[:place], simpler, *lines[place + 1 :]], simpler
    return lines


def script(mesh: tuple[int, ...], steps: Iterable[str]) -> str:
    """A program as a command that runs it."""
    body = "\n".join(steps)
    return f"PYTHONPATH=tests python - <<'end'\nimport programs\nprograms.check_program({mesh}, '''\n{body}\n''')\nend"


def check_program(mesh: tuple[int, ...], steps: str | Iterable[str], exempt: Iterable[str] = EXEMPT) -> Run:
    """Run a program on both sides; what differs is raised with the shortest program that shows it."""
    lines = listed(steps)
    try:
        return run_program(mesh, lines, exempt)
    except Difference as found:
        fewer = shrink(mesh, lines, found.kind, exempt)
        why = difference_of(mesh, fewer, exempt) or found
        raise Difference(found.kind, f"{why}\n\n{script(mesh, fewer)}") from None
