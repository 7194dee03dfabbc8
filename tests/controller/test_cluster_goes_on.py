"""Faults after which a cluster goes on: each fails alone, and the same two workers serve the next test."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

import meshloom as loom
from meshloom.controller import session as sessions
from meshloom.controller.cluster import Cluster
from test_cluster_faults import TIMEOUT, launch, ones, pids_of, raised_within

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    yield from launch()


def test_workers_that_have_no_memory_for_a_tensor(cluster):
    mesh = cluster.open_mesh((2,), axes=("dp",))
    line = sys._getframe().f_lineno + 1
    huge = loom.zeros(1 << 44, mesh=mesh)
    error = raised_within(TIMEOUT, lambda: huge.sum().item())
    assert isinstance(error, loom.OutOfMemoryError) and f"test_cluster_goes_on.py:{line}" in str(error)
    assert loom.ones(4, mesh=mesh).sum().item() == 4  # all failed alike: the cluster goes on


def test_an_op_that_raises_on_the_workers_names_worker_op_and_line(cluster):
    mesh = cluster.open_mesh((2,), axes=("dp",))
    table, places = loom.ones(4, 3, mesh=mesh), loom.arange(9, mesh=mesh)
    line = sys._getframe().f_lineno + 1
    rows = torch.nn.functional.embedding(places, table)
    error = raised_within(TIMEOUT, lambda: rows.sum().item())
    assert "worker" in str(error) and "embedding" in str(error), error
    assert f"test_cluster_goes_on.py:{line}" in str(error), error
    assert table.sum().item() == 12


def test_a_worker_that_was_stopped_for_a_while_goes_on(cluster):
    x, pid = ones(cluster, 8), pids_of(cluster)[1]
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(TIMEOUT / 3, os.kill, (pid, signal.SIGCONT)).start()
    assert (x + 1).sum().item() == 16


def test_arguments_that_are_too_long_to_be_sent_fail_alone(cluster, monkeypatch):
    monkeypatch.setattr("meshloom.controller.wire.MOST_HEADER", 1 << 12)
    x, pid = ones(cluster, 8), pids_of(cluster)[1]
    line = sys._getframe().f_lineno + 1
    rows = x[[0] * 4000]
    error = raised_within(TIMEOUT, lambda: rows.sum().item())
    assert isinstance(error, loom.ArgumentError) and "too long to be sent" in str(error), error
    assert f"test_cluster_goes_on.py:{line}" in str(error)
    os.kill(pid, signal.SIGSTOP)  # so that calls pile up, each of them short enough
    threading.Timer(TIMEOUT / 3, os.kill, (pid, signal.SIGCONT)).start()
    found = [x[[number % 8] * 500] for number in range(100)]
    assert [each.sum().item() for each in found] == [500.0] * 100


def test_two_clusters_do_not_mix_and_end_one_by_one(cluster):
    x = ones(cluster, 8)
    with loom.launch(workers=1, timeout=TIMEOUT, threads=1) as other:
        y = loom.ones(8, mesh=other.open_mesh((2,)))
        with pytest.raises(loom.MeshError, match="two clusters"):
            x + y
        assert y.sum().item() == 8
    assert torch.relu(x).sum().item() == 8 and loom.ones(3, mesh=x.mesh).sum().item() == 3


def test_a_queue_that_is_too_far_ahead_waits(cluster, monkeypatch):
    monkeypatch.setattr(sessions, "AHEAD", 64)
    x = ones(cluster, 2_000_000)
    furthest = 0
    for _ in range(400):
        x.exp_().log_()
        furthest = max(furthest, cluster.session.issued - cluster.session.done)
    assert 32 < furthest <= 64 + sessions.BATCH
    assert x.shape == (2_000_000,)
