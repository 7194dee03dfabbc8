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


ADD = Goal("extra_us", 2.0, " us")
ROW_MATMUL = Goal("ratio", 1.1, from_devices=2)
COLUMN_MATMUL = Goal("ratio", 1.3, from_devices=2)
MESH_MATMUL = Goal("ratio", 1.3, from_devices=2)
MLP_STEP = Goal("ratio", 1.1, from_devices=2)
GPT_DATA = Goal("ratio", 1.1, from_devices=8)
GPT_TENSOR = Goal("ratio", 1.25)
REPLICATED = Goal("copies", 1.0, " copy")
COLLECTIVE = Goal("ratio", 1.5)
PEER_ADD = Goal("times_ours", 10.0, "x ours", at_least=True)
PEER_COLLECTIVE = Goal("times_ours", 5.0, "x ours", at_least=True)
PEER_STEPS = {
    8: Goal("times_ours", 4.0, "x ours", at_least=True),
    32: Goal("times_ours", 10.0, "x ours", at_least=True),
}


# Rows of docs/checklist.md whose check asks for a time: the works whose goals answer it, held by a test.
CHECKLIST = {
    27: (
        "matmul row",
        "matmul column",
        "matmul batch",
        "matmul inner",
        "matmul 2-D",
    ),  # the chosen plan, within a bound
    41: ("trace commands",),  # a replay costs the host less than enqueuing again
    68: ("read bulk",),  # a bulk read is faster than a read per device
}


def of_peer(work: str, devices: int) -> Goal | None:
    """How much slower than ours a peer ought to be."""
    if work == "MLP step":
        return PEER_STEPS.get(devices)
    return {"add": PEER_ADD, "all-reduce": PEER_COLLECTIVE, "all-gather": PEER_COLLECTIVE}.get(work)


# On 2 processes, as a part of the other side's time; 1.05 is 1.0 within noise.
PROCESS_ADD = Goal("ratio", 0.333)
PROCESS_EXTRA = Goal("ratio", 0.25)  # of the add: what is paid over plain torch on the same shard
PROCESS_WORK = Goal("ratio", 1.05)
PROCESS_LINK = Goal("ratio", 1.02)  # beside DDP over a slow link
EXPOSED = Goal("ratio", 0.5)  # of the sums of gradients, over that link


def of_processes(work: str, detail: str) -> Goal | None:
    """What a work on real processes is held to; the check of every call and the dense add are there to be known."""
    if "always" in detail or detail.startswith("dense"):
        return None
    if "over dense" in detail:
        return PROCESS_EXTRA
    if "Gbit" in detail:
        return EXPOSED if work.startswith("exposed") else PROCESS_LINK
    return PROCESS_ADD if work == "add" else PROCESS_WORK
