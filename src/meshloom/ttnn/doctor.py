"""The checklist of a multi-device program, looked at while the program runs: seven items, each with what was seen.

    with doctor.watch() as seen:
        program()
    print(seen.report())

A tensor that came from torch is a weight if an op takes it as one (the second operand of a product, the weight of a
norm or a convolution), and an input if an op takes it first; what only changes format or shape passes that on.
`meshloom doctor script.py` does this for a script.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from meshloom.errors import where
from meshloom.ttnn import surface
from meshloom.ttnn.device import system
from meshloom.ttnn.ops import calling
from meshloom.ttnn.tensor.composers import ListMeshToTensor
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import PlacementReplicate, PlacementShard, TensorTopology

MAKES = frozenset("from_torch as_tensor distribute_tensor".split())
PASSES_ON = frozenset(
    "to_device to_layout to_dtype to_memory_config typecast clone move reallocate reshape view permute transpose "
    "squeeze unsqueeze unsqueeze_to_4D tilize untilize tilize_with_zero_padding pad".split()
)
TAKES_WEIGHTS = frozenset(
    "linear matmul sparse_matmul experimental.minimal_matmul embedding layer_norm layer_norm_post_all_gather rms_norm "
    "rms_norm_post_all_gather group_norm batch_norm conv1d conv2d conv_transpose2d experimental.conv3d".split()
)
WEIGHTS = frozenset("input_tensor_b weight weight_tensor bias bias_tensor".split())
SUMS = frozenset("all_reduce all_gather reduce_scatter".split())
READS = frozenset("to_torch from_device copy_device_to_host_tensor".split())


@dataclass
class Origin:
    """A tensor that came from torch: its label, where that was, and what ops took it for."""

    label: TensorTopology
    devices: int
    held: int
    line: str
    shape: tuple[int, ...]
    roles: set[str] = field(default_factory=set)

    @property
    def is_replicated(self) -> bool:
        """Whether every device has all of it."""
        return all(isinstance(each, PlacementReplicate) for each in self.label.placements())

    @property
    def cuts(self) -> list[PlacementShard]:
        """The placements that cut it."""
        return [each for each in self.label.placements() if isinstance(each, PlacementShard)]

    @property
    def has_batch_cut(self) -> bool:
        """Whether devices have other elements of its batch, which is the first dim, or comes after dims of size 1."""
        dims = (cut.dim % len(self.shape) for cut in self.cuts)
        return any(all(size == 1 for size in self.shape[:dim]) for dim in dims)

    def __str__(self) -> str:
        return f"{list(self.shape)} with {self.label.placements()} from {self.line}"


class Finding(NamedTuple):
    """One item of the checklist: whether it holds, and what was seen."""

    item: str
    holds: bool
    seen: str

    def __str__(self) -> str:
        return f"[{'ok' if self.holds else 'no'}] {self.item:<46} {self.seen}"


@dataclass
class Seen:
    """What a program did, and what follows from it."""

    opened: list[str] = field(default_factory=list)
    refused: str = ""
    still_open: dict[int, str] = field(default_factory=dict)
    origins: dict[int, Origin] = field(default_factory=dict)  # by the number of the tensor
    sums: int = 0
    reads: list[tuple[str, bool]] = field(default_factory=list)  # what was read, and whether that was right
    unwaited: list[str] = field(default_factory=list)  # reads that nobody has waited for yet
    waits: int = 0

    def findings(self) -> list[Finding]:
        """The seven items in order."""
        checks: Sequence[tuple[str, Callable[[], tuple[bool, str]]]] = (
            ("mesh device opened with the right shape", self._shape),
            ("weights replicated to all devices", self._weights),
            ("inputs sharded along the batch", self._inputs),
            ("batch divisible by the number of devices", self._divisible),
            ("outputs gathered with a fitting composer", self._composers),
            ("devices synchronized before results are read", self._waits),
            ("mesh device closed", self._closing),
        )
        return [Finding(f"{number} {item}", *check()) for number, (item, check) in enumerate(checks, 1)]

    def report(self) -> str:
        """The seven items as text."""
        found = self.findings()
        wrong = sum(not each.holds for each in found)
        end = "all 7 items hold" if not wrong else f"{wrong} of 7 items {'does' if wrong == 1 else 'do'} not hold"
        return "\n".join([*map(str, found), end])

    def _of(self, role: str) -> list[Origin]:
        """Tensors of that role on more than one device; what is a weight anywhere is no input."""
        unique = {id(each): each for each in self.origins.values() if each.devices > 1}
        return [each for each in unique.values() if each.roles == {role} or (role == "weight" and role in each.roles)]

    def _shape(self) -> tuple[bool, str]:
        if self.refused:
            return False, self.refused
        return bool(self.opened), ", ".join(self.opened) or "no mesh was opened: ttnn.open_mesh_device(...)"

    def _weights(self) -> tuple[bool, str]:
        weights = self._of("weight")
        cut = [each for each in weights if not each.is_replicated]
        if not cut:
            return True, f"{len(weights)} replicated" if weights else "none on several devices"
        if self.sums:
            return True, f"{len(cut)} of {len(weights)} sharded, and {self.sums} collectives put the results together"
        return False, f"sharded, and no collective puts the results together: {cut[0]}"

    def _inputs(self) -> tuple[bool, str]:
        inputs = self._of("input")
        whole = [each for each in inputs if not each.has_batch_cut]
        if not whole:
            return True, f"{len(inputs)} sharded" if inputs else "none on several devices"
        if any(not each.is_replicated for each in self._of("weight")):
            return True, f"{len(whole)} of {len(inputs)} not sharded at the batch, beside weights that are sharded"
        return False, f"every device computes the same: ttnn.ShardTensorToMesh(mesh_device, dim=0) for {whole[0]}"

    def _divisible(self) -> tuple[bool, str]:
        uneven = [each for each in self._of("input") if each.held < each.devices or any(cut.size for cut in each.cuts)]
        if not uneven:
            return True, "no device has less than the others"
        first = uneven[0]
        size = next((cut.size for cut in first.cuts if cut.size), first.held * first.shape[0])
        return False, f"{size} does not divide over {first.devices} devices: pad the batch from {first.line}"

    def _composers(self) -> tuple[bool, str]:
        wrong = [line for line, right in self.reads if not right]
        if wrong:
            return False, f"copies of a replicated tensor are put together at {wrong[0]}: leave the composer out"
        if not self.reads and self._of("input"):
            return False, "no result was read: ttnn.to_torch(output, mesh_composer=ttnn.ConcatMeshToTensor(dim=0))"
        return True, f"{len(self.reads)} read"

    def _waits(self) -> tuple[bool, str]:
        if self.unwaited:
            return False, f"read without blocking and never waited for: {self.unwaited[0]}"
        return True, f"{self.waits} waits; to_torch waits by itself" if self.waits else "to_torch waits by itself"

    def _closing(self) -> tuple[bool, str]:
        if self.still_open:
            return False, f"ttnn.close_mesh_device(...) for {', '.join(self.still_open.values())}"
        return True, f"{len(self.opened)} closed"

    # what is told while the program runs

    def device(self, what: str, device: Any) -> None:
        """A mesh was opened, closed or waited for."""
        if what == "opened" and device.parent is None:
            self.opened.append(repr(device))
            self.still_open[device.id()] = repr(device)
        elif what == "closed":
            self.still_open.pop(device.id(), None)
        elif what == "waited":
            self.waits += 1
            self.unwaited.clear()

    def before(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An op is about to run: what does it take its operands for?"""
        full = operation.python_fully_qualified_name.removeprefix("ttnn.")
        name = full.removeprefix("distributed.")
        if name in MAKES or name in PASSES_ON:
            return
        given = _arguments(operation, args, kwargs)
        if name in READS:
            self._read(given)
            return
        self.sums += full != name or name.rpartition(".")[2].removesuffix("_async") in SUMS
        first = next(iter(given), None)
        for argument, value in given.items():
            origin = self.origins.get(value.tensor_id) if isinstance(value, Tensor) else None
            if origin is not None and name in TAKES_WEIGHTS and argument in WEIGHTS:
                origin.roles.add("weight")
            elif origin is not None and argument == first:
                origin.roles.add("input")

    def _read(self, given: dict[str, Any]) -> None:
        tensor = given.get("tensor", given.get("device_tensor"))
        if not isinstance(tensor, Tensor) or tensor.device() is None or len(tensor.device_coords()) < 2:
            return
        if given.get("blocking") is False:
            self.unwaited.append(where())
        composer = given.get("mesh_composer")
        alike = all(isinstance(each, PlacementReplicate) for each in tensor.tensor_topology().placements())
        self.reads.append((where(), composer is None or isinstance(composer, ListMeshToTensor) or not alike))

    def after(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """An op has run: does its result come from torch?"""
        name = operation.python_fully_qualified_name.removeprefix("ttnn.")
        if name in MAKES and isinstance(output, Tensor) and output.home is not None:
            devices = output.home.get_num_devices()
            held = len(output.device_coords())
            label = output.tensor_topology()
            self.origins[output.tensor_id] = Origin(label, devices, held, where(), tuple(output.shape))
        elif name in PASSES_ON and isinstance(output, Tensor):
            source = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
            if source is not None and source.tensor_id in self.origins:
                self.origins[output.tensor_id] = self.origins[source.tensor_id]


@cache
def _signature(operation: Any) -> inspect.Signature:
    return inspect.signature(calling.describe(operation))


def _arguments(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    try:
        return dict(_signature(operation).bind(*args, **kwargs).arguments)
    except TypeError:  # the op itself will say what is wrong with the call
        return dict(kwargs)


@contextmanager
def watch() -> Iterator[Seen]:
    """What a program inside does with meshes and tensors.

    >>> import torch
    >>> from meshloom import ttnn
    >>> with watch() as seen, ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as mesh:
    ...     x = ttnn.from_torch(torch.ones(4, 4), device=mesh, mesh_mapper=ttnn.ShardTensorToMesh(mesh, dim=0))
    ...     y = ttnn.to_torch(ttnn.relu(x), mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0))
    >>> [finding.holds for finding in seen.findings()]
    [True, True, True, True, True, True, True]
    """
    surface.table()  # ops load now, and not in the middle of what is watched
    seen = Seen()
    hooks: list[tuple[list[Any], Any]] = [
        (calling.BEFORE, seen.before),
        (calling.AFTER, seen.after),
        (system.WATCHERS, seen.device),
    ]
    for listed, hook in hooks:
        listed.append(hook)
    try:
        yield seen
    finally:
        for listed, hook in hooks:
            listed.remove(hook)
