"""Bounds of tests leave out the time in which a busy machine kept processes waiting, and no other."""

from __future__ import annotations

import time

import busy_machine


def test_time_that_passes_counts_where_nobody_waits_for_a_core(monkeypatch):
    monkeypatch.setattr(busy_machine, "_stalled", lambda: 5.0)
    waited = busy_machine.Patience()
    time.sleep(0.02)
    assert waited.seconds >= 0.02


def test_time_in_which_processes_wait_for_a_core_does_not_count(monkeypatch):
    stalls = iter([1.0, 1.5])
    monkeypatch.setattr(busy_machine, "_stalled", lambda: next(stalls))
    assert busy_machine.Patience().seconds < 0


def test_what_the_system_tells_is_a_time_that_grows():
    first = busy_machine._stalled()
    assert 0 <= first <= busy_machine._stalled()
