"""The report of a dry run: one HTML page that opens offline, with every figure in it once. Start with `write_report`.

`figures.py` reads the run into plain values, `alternatives.py` looks for cheaper calls, `page.py` puts the values into
`report.html` with `report.css` and `report.js`, which draw them.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from meshloom.observe.report.figures import collect_figures, compare_plans
from meshloom.observe.report.page import fill_page

if TYPE_CHECKING:
    from meshloom.observe.dry_run import DryRun


def write_report(run: DryRun, path: str | PathLike[str], plans: Sequence[tuple[DryRun, str, str, str]] = ()) -> None:
    """The report of a dry run as a file; `plans` are shown side by side: run, title, why it is slower, lines.

    >>> import tempfile
    >>> import meshloom as loom
    >>> x = loom.ones(8, 8, mesh=loom.open_mesh((4,), axes=("tp",)), placements="S(1)")
    >>> with loom.dry_run("t3000") as run:
    ...     total = x.sum()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(run, f"{folder}/report.html")
    ...     print(Path(folder, "report.html").read_text(encoding="utf-8")[:15])
    <!doctype html>
    """
    figures = collect_figures(run)
    if plans:
        figures["plans"] = compare_plans(plans)
    Path(path).write_text(fill_page(figures), encoding="utf-8")


__all__ = ["collect_figures", "fill_page", "write_report"]
