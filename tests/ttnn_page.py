"""`docs/ttnn_ops.md` from the table of TTNN ops: what is covered, by family, and what is not.

`python tests/ttnn_page.py` writes the page; a test compares it with the table. The operations of the original and the
names of their arguments are in `ttnn/ops/signatures.txt`, one line for every overload.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from meshloom.ttnn import surface
from meshloom.ttnn.ops import signatures
from meshloom.ttnn.ops.omitted import reason_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ttnn_ops.md"
MOVING = frozenset(
    "literal asynchronous distributed_norms experts fused_products ring_attention transfers".split()
)  # modules whose ops move between devices
INTRO = """# Operations of `meshloom.ttnn`

Made from the table of ops by `python tests/ttnn_page.py`. {covered} of the {all} operations of the original (version
0.81.1) are covered: every argument name of every overload is accepted, and a test says so. Arguments that only concern
the speed of hardware are checked for their type and then left alone. An operation that is not covered raises an error
that names it and the nearest covered one.

Only the families that say so communicate; all others work on what a device holds.

"""


def overloads() -> dict[str, list[str]]:
    """The argument lists of every operation of the original: `input_tensor, *, memory_config=`."""
    return {name: list(listed) for name, listed in signatures.forms().items()}


def covered(name: str) -> Callable[..., Any] | None:
    """Our function for an operation of the original; None if there is none."""
    inside, _, last = name.rpartition(".")
    found = surface.look(last, inside)
    return found if callable(found) and not inspect.isclass(found) else None


def family(function: Callable[..., Any]) -> str:
    """The module that an op is written in."""
    return inspect.unwrap(function).__module__


def title(module: str) -> str:
    """The first sentence of a module, which says what its ops do."""
    text = " ".join((import_module(module).__doc__ or "").split("\n\n")[0].split())
    return text.split(": ")[0].rstrip(".")


def page() -> str:
    """The whole page."""
    names = overloads()
    functions = {name: covered(name) for name in names}
    families: dict[str, list[str]] = defaultdict(list)
    for name, function in functions.items():
        if function is not None:
            families[family(function)].append(name)
    lines = [INTRO.format(covered=sum(map(len, families.values())), all=len(names)) + "## Covered\n"]
    lines += ["| family | communicates | operations |", "|---|---|---|"]
    for module in sorted(families):
        says = "between devices" if module.rpartition(".")[2] in MOVING else "nothing"
        listed = " ".join(f"`{name}`" for name in families[module])
        lines.append(f"| {title(module)} | {says} | {listed} |")
    missing = [name for name, function in functions.items() if function is None]
    lines += ["", f"## Not covered ({len(missing)})", "", "| why | operations |", "|---|---|"]
    for reason in dict.fromkeys(map(reason_of, missing)):
        listed = " ".join(f"`{name}`" for name in missing if reason_of(name) == reason)
        lines.append(f"| {reason} | {listed} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
