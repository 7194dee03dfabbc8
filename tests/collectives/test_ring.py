"""Ring attention: sequences on several processes equal dense attention, and nobody holds all keys."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks


@pytest.mark.parametrize(
    ("count", "shape", "grid"), [(2, (4,), (2,)), (3, (3,), (3,)), (4, (2, 2), (2, 2)), (4, (2, 4), (1, 4))]
)
def test_attention_over_a_ring_of_processes_equals_dense_forward_and_backward(count, shape, grid):
    assert min(ranks.run(count, "attention_cases:attention_equals_dense", shape, grid)) > 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from Linux's /proc")
def test_no_process_of_a_ring_holds_all_keys():
    """With all keys and values at hand, forward would grow by `whole`, and with their gradients by twice that."""
    for forward, both, whole in ranks.run(8, "attention_cases:peak_of_attention", 8, 1 << 18):
        assert forward < 0.75 * whole, f"forward grew by {forward >> 20} MB, keys and values have {whole >> 20} MB"
        assert both < 1.5 * whole, f"backward grew by {both >> 20} MB, keys and values have {whole >> 20} MB"
