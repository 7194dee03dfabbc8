"""Cards in processes of their own pass the suite, compute at the same time, and keep to themselves what goes wrong."""

from __future__ import annotations

from meshloom.runtime import ProcessDriver
from runtime_conformance import CardConformance


class TestProcessCards(CardConformance):
    def driver(self) -> ProcessDriver:
        return ProcessDriver(range(4))
