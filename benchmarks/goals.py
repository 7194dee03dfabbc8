"""What the figures are measured against: the goals of the design, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on one figure of a row, from some number of devices on.

    >>> str(ROW_MATMUL), ROW_MATMUL.met(1.05), ROW_MATMUL.met(1.2)
    ('<= 1.1x', True, False)
    """

    figure: str
    bound: float
    unit: str = "x"
    at_least: bool = False
    from_devices: int = 1

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        plus = "+" if self.unit == " us" else ""
        return f"{sign} {plus}{self.bound:g}{self.unit}"

    def met(self, value: float) -> bool:
        """Whether a figure reaches the goal."""
        return value >= self.bound if self.at_least else value <= self.bound


ADD = Goal("extra_us", 4.0, " us")
ROW_MATMUL = Goal("ratio", 1.1, from_devices=2)
COLUMN_MATMUL = Goal("ratio", 1.3, from_devices=2)
MESH_MATMUL = Goal("ratio", 1.3, from_devices=2)
MLP_STEP = Goal("ratio", 1.1, from_devices=2)
REPLICATED = Goal("copies", 1.0, " copy")
COLLECTIVE = Goal("ratio", 1.5)
PEER_ADD = Goal("times_ours", 10.0, "x ours", at_least=True)
PEER_COLLECTIVE = Goal("times_ours", 5.0, "x ours", at_least=True)
# What a peer is held to, by work.
PEERS = {"add": PEER_ADD, "all-reduce": PEER_COLLECTIVE, "all-gather": PEER_COLLECTIVE}
