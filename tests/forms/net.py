"""What a distributed form may use: the op on what a device holds, and collectives that are written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom import Shard
from meshloom.engines.torch_engine import FUNCTIONS, Local
from meshloom.ops import OPS, Call, Ref, Row
from oracle import REDUCE


class Net:
    """The only way for devices to learn from each other: an all-reduce that is written down."""

    def __init__(self) -> None:
        self.log: list[tuple[str, tuple[int, ...]]] = []

    def all_reduce(self, parts: Sequence[torch.Tensor], op: str) -> torch.Tensor:
        self.log.append((op, tuple(parts[0].shape)))
        return REDUCE[op](torch.stack(list(parts)))

    def all_gather(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What every device has, in their order, for all to see."""
        self.log.append(("all_gather", tuple(parts[0].shape)))
        return list(parts)

    def shift(self, parts: list[Any]) -> list[Any]:
        """What each device has goes to the next one, the last one's to the first."""
        self.log.append(("shift", tuple(max(parts, key=torch.numel).shape)))
        return [parts[-1], *parts[:-1]]

    def best(self, values: Sequence[torch.Tensor], indices: Sequence[torch.Tensor], largest: bool) -> tuple[Any, Any]:
        """The best value with its index; of equal values the first device's."""
        self.log.append(("max", tuple(values[0].shape)))
        stacked = torch.stack(list(values))
        winner = (stacked.max(0) if largest else stacked.min(0)).indices
        pick = winner.unsqueeze(0)
        return stacked.gather(0, pick)[0], torch.stack(list(indices)).gather(0, pick)[0]


def compute(call: Call, datas: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, ...]:
    """The engine's function on what one device holds."""
    function = FUNCTIONS[call.op]

    def value(each: Any) -> Any:
        if isinstance(each, Ref):
            return datas[each.index]
        return tuple(value(part) for part in each) if isinstance(each, tuple) else each

    named = {name: value(each) for name, each in call.arguments.items()}
    if OPS[call.op].signature is None:
        result = function(*(value(each) for each in call.leaves), **named)
    else:
        lead = (Local(call, call.operands, tuple(shapes)),) if getattr(function, "is_aware", False) else ()
        result = function(*lead, **named)
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


Form = Callable[[Call, Row, list[list[torch.Tensor]], Net], list[torch.Tensor]]


def sharded_dim(row: Row, operand: int = 0) -> int:
    placement = row.ins[operand]
    assert isinstance(placement, Shard)
    return placement.dim


def with_dims(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    for d in sorted(dims) if keepdim else ():
        x = x.unsqueeze(d)
    return x
