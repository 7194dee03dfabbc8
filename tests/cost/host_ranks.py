"""What one of several processes measures of collectives between them, for `test_host.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import meshloom as loom
from meshloom.cli import host_measuring
from meshloom.comms import wire
from meshloom.comms.group import group_of
from meshloom.fabric.host import Host
from meshloom.mesh.process import HERE
from meshloom.processes import join
from meshloom.tensor.host_time import host_time


def price_what_was_measured(host: Host, took: float, size: int) -> dict[str, float]:
    """The price of every collective of `size` bytes, on a host where each of them took so many seconds."""
    join()
    sent, sweep = host_measuring._sent(), replace(host_measuring.QUICK, sent=(size,))
    points = [*host_measuring._sent_points(sent, sweep)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_measuring, "time_rounds", lambda run, rounds: (run(), took)[1])
        readings = host_measuring.read_points(points, lambda what, number, total: None)
    host = replace(host, processes=host_measuring._between(readings, sent, host))
    group = group_of(loom.open_mesh((8,)), [0])
    assert group is not None
    x = torch.zeros(HERE.count, size // 4 // HERE.count)
    run: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: wire.all_reduce(x, group),
        "all_gather": lambda: wire.all_gather(x, group),
        "reduce_scatter": lambda: wire.reduce_scatter(x, group),
        "all_to_all": lambda: wire.all_to_all(x, group),
        "broadcast": lambda: wire.broadcast(x, group, 0),
    }
    return {kind: _price(each, host) for kind, each in run.items()}


def _price(run: Callable[[], object], host: Host) -> float:
    with host_time(host) as found:
        run()
    return found.seconds
