"""Notes that only the processes of one run can have written: a value as JSON, under a MAC with the run's secret.

The secret is in `MESHLOOM_SECRET`; `meshloom run` makes one for every run. Without it (a program started with torchrun
or by hand) notes are taken as they are. What cannot be read, or was sealed with another secret, is not a note.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any

from meshloom import settings

VARIABLE = "MESHLOOM_SECRET"


@dataclass(frozen=True, slots=True)
class Seal:
    """A secret, and what it is good for; an empty one seals nothing."""

    secret: bytes

    def wrap(self, name: str, value: object) -> str:
        """A value as text, which is good under this name only.

        >>> Seal(b"").wrap("status 0", {"beats": 1})
        '- {"beats": 1}'
        """
        text = json.dumps(value)
        return f"{self._mac(name, text)} {text}"

    def unwrap(self, name: str, found: bytes | str) -> Any:
        """The value that was wrapped under this name with this secret; None for anything else.

        >>> seal = Seal(b"secret")
        >>> seal.unwrap("one", seal.wrap("one", 5)), seal.unwrap("other", seal.wrap("one", 5)), seal.unwrap("one", b"5")
        (5, None, None)
        """
        try:
            mac, _, text = (found.decode() if isinstance(found, bytes) else found).partition(" ")
            return json.loads(text) if hmac.compare_digest(mac.encode(), self._mac(name, text).encode()) else None
        except (ValueError, RecursionError):  # no text, no JSON, or a thousand brackets
            return None

    def derive(self, purpose: str) -> str:
        """A secret for one purpose, from which nobody learns this one."""
        return hmac.new(self.secret, purpose.encode(), hashlib.sha256).hexdigest()

    def _mac(self, name: str, text: str) -> str:
        return self.derive(f"{name}\0{text}") if self.secret else "-"


def seal_of_run() -> Seal:
    """The seal of the run that this process belongs to."""
    return Seal(settings.read(VARIABLE).encode())
