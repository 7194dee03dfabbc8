"""`load`: a checkpoint into a state that is there, by all processes together.

    read      the index, checked                                        every process
    plan      the state walked beside the saved one: what goes where    every process; every name, shape and dtype fits
    verify    the checksums of all that this process will read
    agree     all are ready, all have read the same index               a short collective
    act       boxes into the memory of the tensors, then the values

Until all have agreed nothing is changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch

from meshloom.checkpoint.files import Box, Opened, open_files
from meshloom.checkpoint.folders import as_folder
from meshloom.checkpoint.index import Index, Saved, read_index
from meshloom.checkpoint.progress import Progress, check_progress, show
from meshloom.checkpoint.saving import finish_earlier
from meshloom.checkpoint.state import (
    EXTRA,
    check_state,
    find_modules,
    identity,
    is_live,
    is_object,
    join,
    name_of,
    name_parameters,
)
from meshloom.checkpoint.values import DEEPEST, Path, decode, malformed, spell, tag_of
from meshloom.checkpoint.weights import make_room
from meshloom.engines.layout import short_name, torch_dtype
from meshloom.errors import CheckpointError, MeshloomError, closest
from meshloom.placement import Replicate, Shard, Topology, extents
from meshloom.processes.exchange import agree
from meshloom.runtime.card_array import CardArray
from meshloom.tensor.base import Tensor
from meshloom.tensor.clients import sent
from meshloom.tensor.creation import full
from meshloom.tensor.lazy import Lazy
from meshloom.types import Shape

Act = Callable[[], Any]  # what is done once all have agreed; gives the value that takes its place in the state


@sent("loom:load")
def load(folder: str | os.PathLike[str], *, into: dict[str, Any], progress: Progress = None) -> dict[str, Any]:
    """Read a checkpoint into a state: tensors in place, plain values replaced; the state is returned.

    All processes call it, on any mesh and with any placements. What `into` names is read, and all of it must be there
    with the same shapes and dtypes; `into={"model": model}` reads the weights alone. If anything is missing, changed or
    other than expected, an error names it and nothing is changed.

    >>> import tempfile, meshloom as loom
    >>> folder = tempfile.mkdtemp() + "/first"
    >>> saved = loom.save({"weight": torch.arange(3.0), "step": 7}, folder)
    >>> loom.load(folder, into={"weight": torch.zeros(3), "step": 0})
    {'weight': tensor([0., 1., 2.]), 'step': 7}
    """
    check_progress(progress)
    carry_out(folder, lambda index: make_plan(index, into), progress)
    return into


def read_tensors(folder: str | os.PathLike[str], targets: Mapping[str, Tensor]) -> None:
    """Read tensors of a checkpoint by their names in its index; the client of a cluster has planned it."""

    def plan(index: Index) -> Plan:
        return Plan([Read(index.tensors[name], target, target._data) for name, target in targets.items()])

    carry_out(folder, plan, False)


def carry_out(folder: str | os.PathLike[str], make: Callable[[Index], Plan], progress: Progress) -> None:
    """Read, plan, verify, agree, act."""
    finish_earlier()
    found: dict[str, Any] = {}

    def prepare() -> dict[str, Any]:
        place = as_folder(folder)
        index = read_index(place)
        plan = found["plan"] = make(index)
        found["files"] = stack = open_files(index)
        opened = found["opened"] = stack.__enter__()
        jobs = found["jobs"] = [job for read in plan.reads for job in read.jobs(opened)]
        spans = [(box.file, *box.span) for box, _ in jobs]
        with show("comparing", sum(stop - start for _, start, stop in spans), progress) as told:
            opened.verify(spans, told)
        return {"token": index.token}

    try:
        tokens = agree("load", prepare, CheckpointError)
        if any(each != tokens[0] for each in tokens):
            raise CheckpointError(
                f"{folder}: the processes found different checkpoints there", fix="read from a folder that all share"
            )
        agree("load", lambda: _act(found, folder, progress), CheckpointError)
    finally:
        if "opened" in found:
            found["files"].__exit__(None, None, None)


def _act(found: dict[str, Any], folder: Any, progress: Progress) -> None:
    plan, opened, jobs = found["plan"], found["opened"], found["jobs"]
    try:
        with show("loading", sum(view.nbytes for _, view in jobs), progress) as told:
            for box, view in jobs:
                opened.read(box, view, told)
        for read in plan.reads:
            read.finish()
        for act in plan.acts:
            act()
    except MeshloomError as error:
        raise error.locate(state="it was being changed when this happened: load another checkpoint") from error
    except OSError as error:
        raise CheckpointError(
            f"{folder}: it could not be read to its end: {error.strerror}",
            state="it was being changed when this happened: load another checkpoint",
        ) from error


def is_copied_to(target: torch.Tensor) -> bool:
    """Whether files are read beside a tensor and copied in: it asks for its array, or cards hold it."""
    return isinstance(target, Lazy) or (isinstance(target, Tensor) and isinstance(target._data, CardArray))


@dataclass
class Read:
    """A tensor to be read: what is saved, where it goes, and what this process holds of it."""

    saved: Saved
    target: torch.Tensor
    array: torch.Tensor
    is_fresh: bool = False

    def jobs(self, opened: Opened) -> Iterator[tuple[Box, torch.Tensor]]:
        """The boxes of files, each with the memory that it goes to."""
        for start, stop, view in self._views():
            for box, inside in opened.boxes(self.saved, start, stop):
                yield box, view[inside]

    def _views(self) -> Iterator[tuple[Shape, Shape, torch.Tensor]]:
        array = self.array.detach()
        if not isinstance(self.target, Tensor):
            yield (0,) * array.dim(), tuple(array.shape), array
            return
        for extent in extents(self.target.topology):
            yield extent.start, extent.stop, array[extent.stored]

    def finish(self) -> None:
        """Let torch and the tensor know that its memory was written."""
        if self.is_fresh and isinstance(self.target, Tensor) and is_copied_to(self.target):
            with torch.no_grad():
                self.target.copy_(Tensor(self.target.topology, self.array))
            return
        if not self.array.is_inference():
            torch.autograd.graph.increment_version(self.array)
        if isinstance(self.target, Tensor):
            self.target._replace(self.target._data)


@dataclass
class Plan:
    """What a load will do."""

    reads: list[Read] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)


def make_plan(index: Index, into: Any) -> Plan:
    """What is to be read and set; an error if anything does not fit."""
    check_state(into)
    return _Planning(index, into).run()


class _Planning:
    """One walk through a state, beside the tree of a checkpoint."""

    def __init__(self, index: Index, into: dict[str, Any]) -> None:
        self.index, self.into, self.plan = index, into, Plan()
        self.names = name_parameters(into)
        self.parameters = {
            self.names[id(each)]: each for _, module in find_modules(into) for each in module.parameters()
        }
        self.targets: dict[tuple[Any, ...], str] = {}

    def run(self) -> Plan:
        tree = self.index.state
        for key, target in self.into.items():
            if key not in tree:
                raise self.refuse((key,), "it is not in the checkpoint", closest(key, tree))
            self.put(self.into, key, self.walk(tree[key], target, (key,)))
        return self.plan

    def put(self, owner: Any, key: Any, act: Act) -> None:
        """Set an item of a dict or a list once all have agreed."""

        def set_item() -> None:
            value = act()
            if owner[key] is not value:
                owner[key] = value

        self.plan.acts.append(set_item)

    def refuse(self, path: Path, what: str, fix: str | None = None) -> CheckpointError:
        return CheckpointError(f"{spell(path)} cannot be read from {self.index.place}: {what}", fix=fix)

    def walk(self, node: Any, target: Any, path: Path) -> Act:
        """What will become of a target; it is looked at now, and changed later."""
        if len(path) > DEEPEST:
            raise malformed(path[:3], "nested too deeply")
        if isinstance(target, torch.Tensor):
            return self.tensor(node, target, path)
        if isinstance(target, torch.nn.Module):
            return self.module(self.inside(node, "$module", target, path), target, path)
        if isinstance(target, torch.optim.Optimizer):
            return self.optimizer(self.inside(node, "$optimizer", target, path), target, path)
        if isinstance(target, torch.Generator):
            return self.generator(self.inside(node, "$generator", target, path), target, path)
        if not isinstance(target, (dict, list, tuple)) and is_object(target):
            return self.object(self.inside(node, "$object", target, path), target, path)
        if is_live(target):
            return self.container(node, target, path)
        value = decode(node, path, self.refuse_tag)
        return lambda: value

    def inside(self, node: Any, tag: str, target: Any, path: Path) -> Any:
        if tag_of(node) != tag:
            raise self.refuse(path, f"it is {_kind(node)} there and a {type(target).__name__} here")
        return node[tag]

    def refuse_tag(self, tag: str, inside: Any, path: Path) -> NoReturn:
        here = "nothing here to read it into"
        raise self.refuse(
            path, f"it is {_kind({tag: inside})} there, and there is {here}", "put one of the same kind into the state"
        )

    # Containers

    def container(self, node: Any, target: Any, path: Path) -> Act:
        """A dict or a list with something alive in it: every part has its counterpart."""
        if isinstance(target, Mapping):
            parts = self.parts_of(node, target, path)
            self.check_keys(parts, target, path)
            for key in target:
                self.put(target, key, self.walk(parts[key], target[key], (*path, key)))
            return lambda: target
        inside = node[tag] if (tag := tag_of(node)) == "$tuple" else node
        if not isinstance(inside, list) or len(inside) != len(target):
            raise self.refuse(path, f"it is {_kind(node)} there and {len(target)} in a {type(target).__name__} here")
        acts = [self.walk(each, target[n], (*path, n)) for n, each in enumerate(inside)]
        if isinstance(target, list):
            for number, act in enumerate(acts):
                self.put(target, number, act)
            return lambda: target
        return lambda: tuple(act() for act in acts)

    def parts_of(self, node: Any, target: Any, path: Path) -> dict[Any, Any]:
        tag = tag_of(node)
        if tag == "$map" and isinstance(node[tag], list):
            pairs = [pair for pair in node[tag] if isinstance(pair, list) and len(pair) == 2]
            return {decode(key, path, self.refuse_tag): each for key, each in pairs if not isinstance(key, list)}
        if not isinstance(node, dict) or tag is not None:
            raise self.refuse(path, f"it is {_kind(node)} there and a {type(target).__name__} here")
        return node

    def check_keys(self, saved: Iterable[Any], here: Iterable[Any], path: Path) -> None:
        """An error unless both have the same names."""
        there, mine = {str(each) for each in saved}, {str(each) for each in here}
        lacking, more = sorted(mine - there), sorted(there - mine)
        if lacking:
            fix = closest(lacking[0], sorted(there))
            raise self.refuse(
                path, f"it has no {_listed(lacking)} there" + (f", and {_listed(more)}" if more else ""), fix
            )
        if more:
            raise self.refuse(path, f"it also has {_listed(more)} there", closest(more[0], sorted(mine)))

    # Tensors

    def saved(self, node: Any, path: Path) -> Saved:
        tag = tag_of(node)
        name = node[tag] if tag in ("$tensor", "$dense") else None
        if not isinstance(name, str) or name not in self.index.tensors:
            raise self.refuse(path, f"it is {_kind(node)} there and a tensor here")
        return self.index.tensors[name]

    def tensor(self, node: Any, target: torch.Tensor, path: Path) -> Act:
        saved = self.saved(node, path)
        self.check_fits(saved, target, path)
        key, name = identity(target), next(iter(node.values()))
        if target.numel() and self.targets.setdefault(key, name) != name:
            raise self.refuse(path, f"it is the same tensor as {self.targets[key]!r} here, and another one there")
        if isinstance(target, Tensor) and is_copied_to(target):
            self.plan.reads.append(Read(saved, target, make_room(target.topology), True))
        else:
            self.plan.reads.append(Read(saved, target, target._data if isinstance(target, Tensor) else target))
        return lambda: target

    def check_fits(self, saved: Saved, target: torch.Tensor, path: Path) -> None:
        here = f"{short_name(target.dtype)}{list(target.shape)}"
        if str(saved) != here:
            raise self.refuse(
                path, f"it is {saved} there and {here} here", "load into tensors like those that were saved"
            )
        if isinstance(target, Tensor) and target.topology.partial_axes:
            raise self.refuse(path, f"it is {target.topology} here, and a file has the value itself", "redistribute it")
        is_elsewhere = isinstance(target, Tensor) and (target._is_remote or target.mesh.is_elsewhere)
        if (target._data if isinstance(target, Tensor) else target).is_meta and not is_elsewhere:
            raise self.refuse(path, "it has no memory here: it lies on meta", "materialise it first")
        if target.layout is not torch.strided or hasattr(target, "device_mesh"):
            raise self.refuse(
                path, f"it is a {type(target).__name__} here", "load into plain tensors or tensors on a mesh"
            )

    def fresh(
        self, node: Any, topology: Topology | None, path: Path, device: torch.device | None = None
    ) -> torch.Tensor:
        """A new tensor for what is saved: on a mesh, or dense."""
        saved = self.saved(node, path)
        if topology is None:
            made = torch.empty(saved.shape, dtype=torch_dtype(saved.dtype), device=device)
        elif getattr(topology.mesh.lease, "session", None) is not None:  # a cluster's
            kind = torch_dtype(topology.dtype)
            made = full(topology.shape, 0, mesh=topology.mesh, placements=topology.placements, dtype=kind)
        else:
            made = Tensor(topology, make_room(topology))
        here = make_room(topology) if topology is not None and is_copied_to(made) else getattr(made, "_data", made)
        self.plan.reads.append(Read(saved, made, here, True))
        return made

    def fresh_dense(self, tag: str, inside: Any, path: Path) -> torch.Tensor:
        """A new dense tensor for one that was dense; what else it may be is refused."""
        return self.fresh({tag: inside}, None, path) if tag == "$dense" else self.refuse_tag(tag, inside, path)

    # What has a state of its own

    def module(self, inside: Any, module: torch.nn.Module, path: Path) -> Act:
        if not isinstance(inside, dict):
            raise malformed(path, "no table of a module")
        here = module.state_dict()
        self.check_keys(inside, here, path)
        known = {identity(each) for each in (*module.parameters(), *module.buffers())}
        for key, each in here.items():
            place = (*path, key)
            owner, _, last = key.rpartition(".")
            if last == EXTRA:
                value = decode(inside[key], place, self.fresh_dense)
                owning = module.get_submodule(owner)
                self.plan.acts.append(partial(owning.set_extra_state, value))
            elif not isinstance(each, torch.Tensor):
                raise self.refuse(place, f"it is a {type(each).__name__} here, and not a tensor")
            elif each.numel() and not each.is_meta and identity(each) not in known:
                raise self.refuse(
                    place, "the module makes it anew whenever it is asked, so that it cannot be read in place",
                    "load into its state_dict() and give that to load_state_dict()",
                )  # fmt: skip
            else:
                self.tensor(inside[key], each, place)
        return lambda: module

    def generator(self, inside: Any, generator: torch.Generator, path: Path) -> Act:
        state = self.fresh(inside, None, path)
        if state.shape != generator.get_state().shape or state.dtype != torch.uint8:
            raise self.refuse(path, "it is not the state of such a generator")
        return lambda: generator.set_state(state)

    def object(self, inside: Any, target: Any, path: Path) -> Act:
        """An object is given its state by its own `load_state_dict`; tensors lie where those of its state lie now."""
        hints = _find_tensors(target.state_dict(), path)
        values: dict[str, torch.Tensor] = {}

        def decode_tag(tag: str, inside: Any, at: Path) -> Any:
            if tag not in ("$tensor", "$dense"):
                return self.refuse_tag(tag, inside, at)
            hint = hints.get(at)
            if tag == "$tensor" and not isinstance(hint, Tensor) and hint is None:
                raise self.refuse(at, "it lies on a mesh there, and there is no such tensor here to say where it goes")
            topology = None
            if isinstance(hint, Tensor):
                saved = self.saved({tag: inside}, at)
                self.check_fits(saved, hint, at)
                topology = hint.topology
            return values.setdefault(join(at), self.fresh({tag: inside}, topology, at))

        state = decode(inside, path, decode_tag)

        def give() -> Any:
            target.load_state_dict(state)
            return target

        return give

    # Optimizers

    def optimizer(self, inside: Any, optimizer: torch.optim.Optimizer, path: Path) -> Act:
        groups, kept = self.check_optimizer(inside, optimizer, path)
        options = [self.options(saved, group, (*path, "param_groups", n)) for n, (saved, group) in enumerate(groups)]
        state = {
            self.parameters[name]: {key: self.kept(each, name, key, optimizer, path) for key, each in values.items()}
            for name, values in kept.items()
        }

        def give() -> Any:
            for group, values in zip(optimizer.param_groups, options, strict=True):
                group.update(values())
            optimizer.state.clear()
            optimizer.state.update({parameter: {k: v() for k, v in each.items()} for parameter, each in state.items()})
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
            return optimizer

        return give

    def check_optimizer(
        self, inside: Any, optimizer: torch.optim.Optimizer, path: Path
    ) -> tuple[list[tuple[Any, dict[str, Any]]], dict[str, dict[str, Any]]]:
        """The saved groups beside those here, and the saved state by name; an error unless they fit."""
        if not isinstance(inside, dict) or not isinstance(inside.get("groups"), list):
            raise malformed(path, "no groups of an optimizer")
        if inside.get("class") != type(optimizer).__name__:
            raise self.refuse(
                path, f"it is the state of {inside.get('class')!r:.60} there and of {type(optimizer).__name__} here"
            )
        saved, here = inside["groups"], optimizer.param_groups
        if len(saved) != len(here):
            raise self.refuse(path, f"it has {len(saved)} groups of parameters there and {len(here)} here")
        for number, (theirs, group) in enumerate(zip(saved, here, strict=True)):
            if not isinstance(theirs, dict) or not isinstance(theirs.get("params"), list):
                raise malformed(path, "a group without parameters")
            names = [name_of(each, self.names, path) for each in group["params"]]
            self.check_keys(theirs["params"], names, (*path, "param_groups", number))
        kept = inside.get("state")
        if not isinstance(kept, dict) or not all(isinstance(each, dict) for each in kept.values()):
            raise malformed(path, "no state of an optimizer")
        known = {name_of(each, self.names, path) for group in here for each in group["params"]}
        if not set(kept) <= known:
            raise self.refuse(path, f"it also has the state of {_listed(sorted(set(kept) - known))} there")
        return list(zip(saved, here, strict=True)), kept

    def options(self, saved: Mapping[str, Any], group: dict[str, Any], path: Path) -> Act:
        node = saved.get("options")
        if not isinstance(node, dict) or tag_of(node) is not None:
            raise malformed(path, "a group without options")
        values = {key: decode(each, (*path, key), self.fresh_dense) for key, each in node.items()}
        lacking = sorted(set(group) - {"params", "param_names"} - set(values) - _BY_SCHEDULERS)
        if lacking:
            raise self.refuse(
                path, f"it has no {_listed(lacking)} there", "make the optimizer as it was when it was saved"
            )
        return lambda: values

    def kept(self, node: Any, name: str, key: str, optimizer: torch.optim.Optimizer, path: Path) -> Act:
        """One value of an optimizer's state; a tensor goes where its parameter lies."""
        place, parameter = (*path, name, key), self.parameters[name]
        now = optimizer.state[parameter].get(key) if parameter in optimizer.state else None

        def decode_tag(tag: str, inside: Any, at: Path) -> Any:
            saved = self.saved({tag: inside}, at)
            if isinstance(now, torch.Tensor) and at == place and _fits(saved, now):
                return self.tensor({tag: inside}, now, at)()
            device = None if key == "step" else parameter.device  # as torch has it
            return self.fresh({tag: inside}, _beside(parameter, saved, key, tag), at, device)

        value = decode(node, place, decode_tag)
        return lambda: value


_BY_SCHEDULERS = {"initial_lr"}


def _fits(saved: Saved, now: torch.Tensor) -> bool:
    return str(saved) == f"{short_name(now.dtype)}{list(now.shape)}" and not isinstance(now, Lazy) and not now.is_meta


def _beside(parameter: torch.Tensor, saved: Saved, key: str, tag: str) -> Topology | None:
    """Where a tensor of an optimizer's state lies: as its parameter does, in the dims that both have.

    A count of steps is one number on the host, as torch makes it.
    """
    if not isinstance(parameter, Tensor) or (key == "step" and tag == "$dense"):
        return None
    where = parameter.topology
    if len(saved.shape) != where.ndim:
        if tag == "$dense":
            return None
        return Topology(where.mesh, (Replicate(),) * where.mesh.ndim, saved.shape, saved.dtype)
    placements = tuple(
        each if isinstance(each, Shard) and saved.shape[each.dim] == where.shape[each.dim] else Replicate()
        for each in where.placements
    )
    return Topology(where.mesh, placements, saved.shape, saved.dtype)


def _find_tensors(value: Any, path: Path) -> dict[Path, torch.Tensor]:
    """The tensors inside of plain containers, by their paths."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        pairs = value.items()
    elif isinstance(value, (list, tuple)):
        pairs = enumerate(value)
    return {at: each for key, inside in pairs for at, each in _find_tensors(inside, (*path, key)).items()}


def _kind(node: Any) -> str:
    names = {
        "$tensor": "a tensor", "$dense": "a tensor", "$module": "a module", "$optimizer": "an optimizer",
        "$object": "an object with a state", "$generator": "a generator", "$tuple": "a tuple", "$map": "a dict",
    }  # fmt: skip
    tag = tag_of(node)
    if tag is not None:
        return names.get(tag, "a value")
    return "a dict" if isinstance(node, dict) else "a list" if isinstance(node, list) else f"{node!r:.60}"


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(each) for each in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")


__all__ = ["load", "make_plan"]
