"""The driver for blackhole-py over a stand-in: the suite of cards, the traps of that driver, programs, faults."""

from __future__ import annotations

import pytest
import torch

from blackhole import MACHINE, driver, install
from runtime_conformance import CardConformance


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)


class TestBlackhole(CardConformance):
    def driver(self):
        return driver()
