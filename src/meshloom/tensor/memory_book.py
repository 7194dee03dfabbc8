"""The storages of a step, from the kernel that makes each until nobody holds it, and what each is held for.

A storage is known by the address of its memory, and followed by a weak reference: torch drops it when the last array on
it is gone. What devices need and stored arrays do not, such as a gathered operand, is added by hand.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from meshloom.engines.layout import short_name
from meshloom.placement import Topology
from meshloom.tensor.base import Tensor
from meshloom.tensor.kernel_work import Kernel, address_of
from meshloom.tensor.layouts import infer_share, layout_of
from meshloom.tensor.step_drafts import Called, Draft, Held

if TYPE_CHECKING:
    from meshloom.tensor.recording import Recorder

BUCKET = "small gradients, to be summed"


class MemoryBook:
    """The storages of a step, from the kernel that makes each until nobody holds it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.alive: dict[int, Held] = {}  # by address
        self.watches: dict[int, weakref.ref[Any]] = {}
        self.all: list[Held] = []
        self.leaves: dict[int, weakref.ref[torch.Tensor]] = {}

    def counted(self) -> Iterator[Held]:
        """Those that are on the devices."""
        return (held for held in self.all if held.is_counted)

    def knows(self, arrays: Sequence[torch.Tensor]) -> bool:
        """Whether one of these arrays is on the devices."""
        found = (self.alive.get(address_of(each)) for each in arrays)
        return any(held is not None and held.is_counted for held in found)

    def mesh_of(self, arrays: Sequence[torch.Tensor]) -> int:
        """The number of the mesh that arrays are on."""
        found = (self.alive.get(address_of(each)) for each in arrays)
        return next((held.mesh for held in found if held is not None and held.is_counted), 0)

    def hold(self, array: torch.Tensor, name: str) -> Held:
        """The storage of an array; one that nobody saw before was there before."""
        return self.alive.get(address_of(array)) or self._start(array, name, -1, None)

    def hold_tensor(self, tensor: Tensor, topology: Topology) -> Held:
        """The storage of an operand, which lies as its topology says."""
        array = tensor._data
        held = self.hold(array, topology.notation)
        if not held.is_exact:
            held.place(layout_of(topology), self.recorder.number_of(topology.mesh))
            held.name = topology.notation if held.node is None else held.name
        is_leaf = array.requires_grad and array.is_leaf
        if tensor._is_param or (is_leaf and held.made < 0):
            held.held_for = "parameters"
            held.name = self.recorder.modules.name_of(tensor) or held.name
            held.module = held.name.rpartition(".")[0] if "[" not in held.name else ""
        if is_leaf:
            self.leaves.setdefault(id(array), weakref.ref(array))
        return held

    def hold_parameter(self, tensor: Tensor, name: str) -> None:
        """A parameter of a model that is about to run."""
        self.hold_tensor(tensor, tensor.topology)

    def make(self, array: torch.Tensor, name: str, draft: Draft | None, share: float | None) -> Held:
        """Memory that a kernel has made, of which one device holds a share, as far as that is known."""
        text = f"{draft.op if draft is not None else name} {short_name(array.dtype)}{list(array.shape)}"
        held = self._start(array, text, self.recorder.kernel, draft)
        if share is not None:
            held.share, held.is_counted = share, True
        if draft is not None and draft.gradient_of is not None:
            self._make_gathered(draft, draft.gradient_of, held)
        return held

    def share_like(
        self, array: torch.Tensor, place: int, inputs: Sequence[torch.Tensor], read: Sequence[Held]
    ) -> float | None:
        """What one device holds of a kernel's result, from its operands; of lists the one at the same place counts."""
        pairs = [pair for pair in zip(inputs, read, strict=True) if pair[1].is_counted]
        same = [held for each, held in pairs if each.numel() == array.numel()]
        if same:
            return read[place].share if place < len(read) and read[place] in same else same[0].share
        return infer_share(tuple(array.shape), [held.layout for _, held in pairs if held.is_exact])

    # Memory that the devices need and the stored arrays do not: there a gather is the array as it is

    def add_buffer(self, name: str, size: int, draft: Draft) -> Held:
        """Memory of its own, for one kernel as long as nobody says more."""
        buffer = Held(name, size, self.recorder.kernel, draft)
        buffer.is_counted, buffer.freed = True, self.recorder.kernel
        self.all.append(buffer)
        return buffer

    def add_gathered(self, name: str, size: int, draft: Draft) -> Held:
        """An operand as a call needs it."""
        buffer = self.add_buffer(name, size, draft)
        buffer.held_for = "gathered"
        return buffer

    def add_to_bucket(self, size: int, draft: Draft) -> None:
        """A small gradient is summed with others in one buffer beside them, after the last kernel of backward."""
        last = self.all[-1]
        if last.name != BUCKET or last.made != self.recorder.kernel - 1:
            last = self.add_buffer(BUCKET, 0, draft)
            last.made = last.freed = self.recorder.kernel - 1
        last.whole += size

    def use_gathered(self, call: Called, read: Sequence[Held]) -> None:
        """Backward reads an operand that was gathered: the buffer was kept until now."""
        for held in read:
            if held in call.gathered:
                call.gathered[held][0].freed = self.recorder.kernel

    def _make_gathered(self, draft: Draft, call: Called, made: Held) -> None:
        """The gradient of a gathered operand is whole before it is reduced and scattered."""
        for held, (_, topology) in call.gathered.items():
            if made.whole == held.whole:
                self.add_gathered(f"gradient {topology.notation}", topology.local_bytes, draft)

    # Lives

    def _start(self, array: torch.Tensor, name: str, made: int, draft: Draft | None) -> Held:
        held = Held(name, array.untyped_storage().nbytes(), made, draft)
        self.all.append(held)
        self._follow(array, held)
        return held

    def _follow(self, array: torch.Tensor, held: Held) -> None:
        """Keep watch over an array's memory until it is freed."""
        address, mine = address_of(array), weakref.ref(self)
        held.arrays += 1

        def free(_: object) -> None:
            book = mine()
            if book is not None and book.alive.get(address) is held:
                del book.alive[address], book.watches[address]
                held.arrays -= 1
                if not held.arrays:
                    held.freed = max(book.recorder.kernel - 1, held.made)

        self.alive[address] = held
        self.watches[address] = weakref.ref(array.untyped_storage(), free)

    def stand_for(self, kernel: Kernel) -> bool:
        """Whether a copy is one without data of an array that has some: it stands for the same memory."""
        if len(kernel.fresh) != 1 or not kernel.fresh[0].is_meta or kernel.inputs[0].is_meta:
            return False
        self._follow(kernel.fresh[0], self.hold(kernel.inputs[0], kernel.name))
        return True

    # What memory is held for

    def mark_gradients(self) -> None:
        """The gradients that leaves have now; those that were summed together lie in one storage."""
        local: dict[Held, float] = defaultdict(float)
        for found in list(self.leaves.values()):
            leaf = found()
            if leaf is None or leaf.grad is None:
                continue
            held, of = self.hold(leaf.grad, "gradient"), self.alive.get(address_of(leaf))
            held.held_for = "gradients"
            if of is not None:
                held.place(of.layout, of.mesh)
                held.name, held.module = f"gradient of {of.name}", of.module
                local[held] += leaf.grad.numel() * leaf.grad.element_size() * of.share
        for held, size in local.items():
            held.share = size / held.whole if held.whole else 1.0

    def mark_state(self, optimizer: Any) -> None:
        """The tensors that an optimizer keeps for each parameter."""
        for parameter, table in optimizer.state.items():
            of = self.alive.get(address_of(parameter._data)) if isinstance(parameter, Tensor) else None
            for key, value in table.items() if isinstance(table, dict) else ():
                if isinstance(value, Tensor):
                    held = self.hold(value._data, key)
                    held.place(layout_of(value.topology), self.recorder.number_of(value.mesh))
                    held.held_for = "optimizer state"
                    held.name = f"{key} of {of.name}" if of is not None else key
                    held.module = of.module if of is not None else ""
