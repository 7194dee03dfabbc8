"""Values come to the client: each worker that holds a different part gives it, and the client puts them together."""

from __future__ import annotations

import math
from typing import Any

import torch

from meshloom.controller.calls import note_transfer
from meshloom.controller.session import Session
from meshloom.controller.tensors import RemoteTensor, lease_of, refuse_foreign
from meshloom.engines.layout import torch_dtype
from meshloom.errors import GradientError, OperandError, UnsupportedError
from meshloom.runtime import state
from meshloom.tensor.refusals import refuse_several


def fetch(tensor: RemoteTensor, call: str = "to_torch") -> torch.Tensor:
    """The values of a tensor as a dense one of its own."""
    if state.shadows is not None:
        raise UnsupportedError(
            f"{call}() needs values and this tensor has none",
            tensor=tensor.topology,
            fix="explain knows shapes only: keep value-dependent code outside",
        )
    refuse_foreign(tensor)
    topology = tensor.topology
    lease = lease_of(topology)
    session, holders = lease.session, lease.holders(topology.reduced)
    answers = session.ask(lambda request: ["f", tensor._id, request], wanted=len(holders))
    broken = next((value["broken"] for value, _ in answers if "broken" in value), None)
    if broken is not None:
        session.check()
        raise OperandError(f"this tensor was never made: {broken}", tensor=topology)
    whole = _join(answers, tuple(topology.shape), torch_dtype(topology.dtype))
    note_transfer(session, "gather", whole)
    return whole


def _join(answers: list[Any], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if len(answers) == 1 and len(answers[0][0]["boxes"]) == 1:
        return _array(*answers[0]).view(shape)
    whole = torch.empty(shape, dtype=dtype)
    for value, payload in answers:
        part, at = _array(value, payload), 0
        for start, sizes in value["boxes"]:
            count = math.prod(sizes)
            box = tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))
            whole[box] = part[at : at + count].view(tuple(sizes))
            at += count
    return whole


def _array(value: dict[str, Any], payload: torch.Tensor | None) -> torch.Tensor:
    data = torch.empty(0, dtype=torch.uint8) if payload is None else payload
    return data.view(torch_dtype(value["dtype"])).view(tuple(value["shape"]))


def fetch_plain(session: Session, number: int) -> torch.Tensor:
    """A plain tensor of the workers, which then forget it."""
    ((value, payload),) = session.ask(lambda request: ["f", number, request])
    session.queue.append(number)
    return _array(value, payload)


def to_torch(tensor: RemoteTensor) -> torch.Tensor:
    """The values; where they have a gradient, one that ends here with an error rather than silently."""
    found = fetch(tensor)
    if tensor._tracked and torch.is_grad_enabled():
        ended: torch.Tensor = Fetched.apply(torch.zeros((), requires_grad=True), found)  # type: ignore[no-untyped-call]
        return ended
    return found


class Fetched(torch.autograd.Function):
    """Values of tensors with a gradient: what is computed of them here has none."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GradientError(
            "gradients do not flow from the client back to a cluster",
            fix="compute the loss on the mesh and fetch it, or fetch x.detach().to_torch()",
        )


def item(tensor: RemoteTensor) -> Any:
    """The one number that a tensor has."""
    refuse_several(tensor.topology)
    return fetch(tensor, "item").item()
