"""Collectives on tensors that lie on cards with memory of their own.

Through the host a collective is one op: every card is read once, and every card is written once. Over links a sum is
the schedule of the collective on the cards themselves, and no byte comes near the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshloom.comms.literal import Call, Placed
from meshloom.errors import DeviceTimeoutError, FabricError
from meshloom.mesh import Coordinate
from meshloom.placement import Topology
from meshloom.runtime.card_array import CardArray, lay, to_host
from meshloom.runtime.card_layouts import Placed as PlacedLayout, placed
from meshloom.runtime.card_links import plan_sum, run_sum
from meshloom.runtime.card_memory import CardStore, Memory, Shards, one_op
from meshloom.tensor.base import Tensor


def place(call: Call, act: Callable[[], Placed]) -> Tensor:
    """The result of a collective as a tensor, which lies where the operand does."""
    store = _store_of(call)
    if store is None:
        return Tensor(*act())
    with one_op(call.kind):
        call.operand.data = to_host(call.operand.data)
        topology, data = act()
        return Tensor(topology, lay(data, topology, store))


def _store_of(call: Call) -> CardStore | None:
    lease = call.operand.mesh.lease
    store: CardStore | None = getattr(lease, "store", None)
    return store


def sum_over_links(call: Call, mode: str) -> Tensor | None:
    """An all-reduce over the links between cards; None where it is none, or where gradients or padding are in the way:
    that goes through the host, and is told as such."""
    data, store = call.operand.data, _store_of(call)
    if store is None or mode != "fabric" or call.op != "sum" or not isinstance(data, CardArray):
        return None
    shards, target = data.memory.shards, call.target()
    if shards is None or not _is_ready(data, shards, target):
        return None
    schedules = plan_sum(store, target.mesh, call.operand.axes, shards.part_bytes)
    if schedules is None:
        raise FabricError(
            f"no links lead from card to card along {call.operand.name}", mesh=target.mesh, fix='use mode="host"'
        )
    memory = Memory(store, shards.dtype)
    memory.give(_copy(store, shards, target))
    run_sum(store, memory.shards or shards, schedules)
    return Tensor(target, CardArray(memory, torch.empty(target.stored_shape, dtype=shards.dtype, device="meta")))


def _is_ready(data: CardArray, shards: Shards, target: Topology) -> bool:
    """Whether every card holds just the elements that it will hold the sum of."""
    layout = shards.layout
    return (
        not data.requires_grad
        and not shards.is_meta
        and bool(shards.part_bytes)
        and isinstance(layout, PlacedLayout)
        and not layout.topology.padded_dims
        and data.is_whole(layout.topology.stored_shape)
        and tuple(placed(target).part_shape) == tuple(shards.part_shape)
    )


def _copy(store: CardStore, shards: Shards, target: Topology) -> Shards:
    """The same elements in other memory of each card."""
    made = store.allocate(placed(target), shards.dtype)
    timeout = store.system.launches.timeout

    def copy(place: Coordinate, card: Any) -> None:
        if not card.wait(card.copy(shards.handles[place], ..., made.handles[place], ...), timeout):
            raise DeviceTimeoutError(f"a copy did not end within {timeout} s")

    store.each("copy", made.layout, list(made.handles), copy)
    return made
