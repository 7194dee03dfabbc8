"""What an error says, whole: tests keep messages as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import meshloom as loom


def refusal(act: Callable[[], object], kind: type[Exception] = loom.MeshloomError) -> str:
    """The message of the error that something must raise."""
    with pytest.raises(kind) as caught:
        act()
    return str(caught.value)
