"""What the tests of this room share."""

from __future__ import annotations

import pytest

import meshloom as loom
from report_pages import run_small


@pytest.fixture(scope="module")
def run() -> loom.DryRun:
    """A dry run of a small Llama."""
    return run_small()
