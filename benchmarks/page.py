"""docs/benchmarks.md and its plot, drawn from results.json. `python -m benchmarks.page` draws them again."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import figure, prediction_line, process_line
from benchmarks.results import JAX, LOCAL_TENSOR, OURS, PROCESSES, Row

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
PLOT = ROOT / "docs" / "benchmarks.svg"
BEGIN, END = "<!-- figures: written by benchmarks/page.py -->", "<!-- end of figures -->"

# What is plotted, a panel each.
PANELS = (("add", "32x32 per device"), ("MLP step", "data-parallel"), ("GPT step", "data-parallel"))
COLOURS = {OURS: "#0b7a75", LOCAL_TENSOR: "#c1440e", JAX: "#5b4b8a"}
NAMES = {OURS: "meshloom", LOCAL_TENSOR: "DTensor LocalTensor", JAX: "JAX host devices"}
WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 200, 48, 40, 62


def read(path: Path = RESULTS) -> tuple[dict[str, Any], list[Row]]:
    """A run: its conditions, and its rows."""
    found = json.loads(path.read_text())
    return found, [Row(**{**row, "mesh": tuple(row["mesh"])}) for row in found.pop("rows")]


def write(path: Path = RESULTS) -> None:
    """Write the plot, and the figures into the page."""
    conditions, rows = read(path)
    PLOT.write_text(plot(rows))
    PAGE.write_text(filled(PAGE.read_text(), conditions, rows))


def filled(page: str, conditions: dict[str, Any], rows: Sequence[Row]) -> str:
    """The page with the figures of a run between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{figures(conditions, rows)}\n{END}{after}"


def figures(conditions: dict[str, Any], rows: Sequence[Row]) -> str:
    """Everything that comes from a run, as Markdown."""
    parts = [_setting(conditions)]
    parts += [f"### {title}\n\n{_table(found)}" for title, found in _parts(rows) if found]
    parts += [*_processes(rows, conditions.get("processes")), *_predictions(rows, conditions.get("predicted"))]
    missing = dict.fromkeys(f"{row.who}: {row.missing}" for row in rows if row.missing is not None)
    return "\n\n".join([*parts, *missing])


Run = dict[str, Any] | None  # when a run of its own was, and the load before it; None for rows of the whole run


def _processes(rows: Sequence[Row], run: Run) -> list[str]:
    together = [row for row in rows if row.who == PROCESSES]
    counts = dict.fromkeys(row.devices for row in together)
    return [_on_processes([row for row in together if row.devices == count], run) for count in counts]


def _on_processes(rows: Sequence[Row], run: Run) -> str:
    head = ("work", "against", "ours", "theirs", "ratio", "theirs / ours", "goal", "")
    lines = [[*process_line(row), _verdict([row])] for row in rows]
    return f"### On {rows[0].devices} processes{_when(run)}\n\n{_markdown(head, lines)}"


def _predictions(rows: Sequence[Row], run: Run) -> list[str]:
    """Predicted beside measured."""
    lines = [prediction_line(row) for row in rows if row.shown == "error"]
    head = ("work", "devices", "predicted", "measured", "error")
    return [f"### Predicted{_when(run)}\n\n{_markdown(head, lines)}"] if lines else []


def _when(run: Run) -> str:
    return f"\n\nMeasured by a run of its own, {run['date'][:10]}, load {run['load']} before it." if run else ""


def _setting(conditions: dict[str, Any]) -> str:
    noisy = "" if conditions["complete"] and not conditions["quick"] else " This run was quick or stopped early."
    return (
        f"torch {conditions['torch']}, Python {conditions['python']}, {conditions['cores']} cores, "
        f"{conditions['threads']} threads, load {conditions['load']} before the run, {conditions['date'][:10]}.{noisy}"
    )


def _parts(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    others = [row for row in rows if row.who not in (OURS, PROCESSES)]
    return [("meshloom", [row for row in rows if row.who == OURS and row.shown != "error"]), ("Peers", others)]


def _table(rows: Sequence[Row]) -> str:
    counts = sorted({row.devices for row in rows})
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault((row.who, row.work, row.detail), []).append(row)
    head = ("work", *(f"{count} dev" for count in counts), "goal", "")
    return _markdown(head, [_line(found, counts) for found in lines.values()])


def _line(rows: Sequence[Row], counts: Sequence[int]) -> list[str]:
    cells = {row.devices: figure(row) for row in rows}
    who = "" if rows[0].who == OURS else f"{NAMES[rows[0].who]}: "
    goals = dict.fromkeys(row.goal for row in rows if row.goal)
    title = f"{who}{rows[0].work}, {rows[0].detail}"
    return [title, *(cells.get(count, "") for count in counts), "; ".join(goals), _verdict(rows)]


def _verdict(rows: Iterable[Row]) -> str:
    judged = [row.ok for row in rows if row.ok is not None]
    return "" if not judged else "ok" if all(judged) else "MISS"


def _markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = "|".join(["", *("---" for _ in head), ""])
    return "\n".join(["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)])


def series(rows: Sequence[Row], work: str, detail: str) -> dict[str, list[tuple[int, float]]]:
    """For each system the ratio to dense torch by number of devices."""
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if (row.work, row.detail) == (work, detail) and row.who in NAMES and row.ratio is not None:
            found.setdefault(row.who, []).append((row.devices, row.ratio))
    return {who: sorted(points) for who, points in found.items()}


def plot(rows: Sequence[Row]) -> str:
    """A panel per work: time over dense torch by number of devices, both on logarithmic scales."""
    panels = [(work, detail, series(rows, work, detail)) for work, detail in PANELS]
    panels = [panel for panel in panels if panel[2]]
    width = LEFT + len(panels) * (WIDTH + GAP)
    body = [_panel(number, *panel) for number, panel in enumerate(panels)]
    seen = dict.fromkeys(who for _, _, lines in panels for who in lines)
    keys = [_key(number, who) for number, who in enumerate(seen)]
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 66}" font-family="sans-serif" '
        'font-size="11" fill="#333">',
        '<rect width="100%" height="100%" fill="white"/>',
        *body, *keys, "</svg>", "",
    ])  # fmt: skip


def _key(number: int, who: str) -> str:
    x, y = LEFT + 170 * number, TOP + HEIGHT + 52
    return (
        f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{COLOURS[who]}" stroke-width="2"/>'
        f'<text x="{x + 24}" y="{y}">{NAMES[who]}</text>'
    )


def _panel(number: int, work: str, detail: str, lines: dict[str, list[tuple[int, float]]]) -> str:
    devices = sorted({count for points in lines.values() for count, _ in points})
    ratios = [ratio for points in lines.values() for _, ratio in points]
    low, high = 10 ** math.floor(math.log10(min(*ratios, 1.0))), 10 ** math.ceil(math.log10(max(*ratios, 2.0)))
    left = LEFT + number * (WIDTH + GAP)
    wide = max(math.log2(devices[-1]), 1)

    def x(count: float) -> float:
        return round(left + WIDTH * math.log2(count) / wide, 1)

    def y(ratio: float) -> float:
        return round(TOP + HEIGHT * (1 - math.log(ratio / low) / math.log(high / low)), 1)

    parts = [f'<text x="{left}" y="{TOP - 18}" font-size="13">{work}, {detail}</text>']
    parts += [_across(left, y(10.0**power), f"{10.0**power:g}x") for power in _powers(low, high)]
    parts += [f'<text x="{x(count)}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{count}</text>' for count in devices]
    parts.append(f'<text x="{left + WIDTH}" y="{TOP + HEIGHT + 30}" text-anchor="end">devices</text>')
    for who, points in lines.items():
        path = " ".join(f"{x(count)},{y(ratio)}" for count, ratio in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[who]}" stroke-width="2"/>')
        for count, ratio in points:
            told = f"{NAMES[who]}, {count} devices: {ratio:.2f}x"
            place = f'cx="{x(count)}" cy="{y(ratio)}" r="3" fill="{COLOURS[who]}"'
            parts.append(f"<circle {place}><title>{told}</title></circle>")
    return "\n".join(parts)


def _powers(low: float, high: float) -> range:
    return range(round(math.log10(low)), round(math.log10(high)) + 1)


def _across(left: float, height: float, label: str) -> str:
    return (
        f'<line x1="{left}" x2="{left + WIDTH}" y1="{height}" y2="{height}" stroke="#ddd"/>'
        f'<text x="{left - 6}" y="{height + 4}" text-anchor="end">{label}</text>'
    )


if __name__ == "__main__":
    write()
