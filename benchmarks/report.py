"""The run as a table: a line per work, a column per number of devices, the goal and whether it is met."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.results import JAX, LOCAL_TENSOR, OURS, PROCESSES, Row, Setting

# The load average before a run from which its figures are noise: one busy core doubles a two-thread matmul.
NOISY_LOAD = 0.5
_FORMATS = {
    "ratio": "{:.2f}x",
    "extra_us": "{:+.2f} us",
    "ours_us": "{:.1f} us",
    "copies": "{:.2f}",
    "times_ours": "{:.1f}x ours",
    "mb_per_s": "{:.0f} MB/s",
    "error": "{:+.0%}",
}


def figure(row: Row) -> str:
    """What the table shows of a row.

    >>> figure(Row("meshloom", "add", "32x32 per device", (8,), 8, "extra_us", extra_us=0.84))
    '+0.84 us'
    """
    if row.missing is not None:
        return "missing"
    value = row.figure
    if value is None:
        return "-"
    return f"{value:.0f}x" if row.shown == "ratio" and value >= 100 else _FORMATS[row.shown].format(value)


def duration(microseconds: float | None) -> str:
    """A time in the unit that suits it.

    >>> duration(1.7), duration(14200.0), duration(None)
    ('1.7 us', '14.2 ms', '')
    """
    if microseconds is None:
        return ""
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.1f} ms"


def table(rows: Sequence[Row]) -> Table:
    """The rich table of a run."""
    columns = sorted({row.devices for row in rows})
    title = "ratio to dense torch, or time over it (best of many, interleaved)"
    made = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    made.add_column("work", no_wrap=True)
    for devices in columns:
        made.add_column(f"{devices} dev", justify="right", no_wrap=True)
    made.add_column("dense", justify="right", no_wrap=True)
    made.add_column("goal", no_wrap=True)
    made.add_column("", no_wrap=True)
    before = ""
    for lines in _grouped(rows):
        if before and _section(lines[0]) != before:
            made.add_section()
        before = _section(lines[0])
        made.add_row(*_line(lines, columns))
    return made


def predictions(rows: Sequence[Row]) -> Table:
    """Predicted against measured, a line per point."""
    made = Table(title="predicted with figures calibrated in this run", title_justify="left", box=box.SIMPLE)
    made.add_column("work", no_wrap=True)
    for name in ("devices", "predicted", "measured", "error"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*prediction_line(row))
    return made


def prediction_line(row: Row) -> list[str]:
    """Work, devices, predicted, measured, error; of a summary the error alone.

    >>> figures = {"ours_us": 2000.0, "predicted_us": 1500.0, "error": -0.25}
    >>> prediction_line(Row("meshloom", "predicted all-gather", "4 MB", (8,), 8, "error", **figures))
    ['all-gather, 4 MB', '8', '1.5 ms', '2.0 ms', '-25%']
    """
    what = f"{row.work.removeprefix('predicted').strip()}, {row.detail}".removeprefix(", ")
    return [what, str(row.devices or ""), duration(row.predicted_us), duration(row.ours_us), figure(row)]


def processes(rows: Sequence[Row]) -> Table:
    """Ours against others on the same processes, a line per work."""
    made = Table(title=f"on {rows[0].devices} Gloo processes, one thread each", title_justify="left", box=box.SIMPLE)
    made.add_column("work", no_wrap=True)
    made.add_column("against", no_wrap=True)
    for name in ("ours", "theirs", "ratio", "theirs / ours"):
        made.add_column(name, justify="right", no_wrap=True)
    made.add_column("goal", no_wrap=True)
    made.add_column("", no_wrap=True)
    for row in rows:
        made.add_row(*process_line(row), _verdict([row]))
    return made


def process_line(row: Row) -> list[str]:
    """Work, against, ours, theirs, ratio, theirs / ours, goal.

    >>> row = Row("meshloom on processes", "add", "DTensor, 32x32", (2,), 2, "ratio", 2.0, 40.0, 0.05, goal="<= 0.333x")
    >>> process_line(row)
    ['add', 'DTensor, 32x32', '2.0 us', '40.0 us', '0.05x', '20.0x', '<= 0.333x']
    """
    times = "" if not row.ratio else f"{1 / row.ratio:.1f}x"
    both = (duration(row.ours_us), duration(row.dense_us))
    if row.ours_mb is not None:
        both = (f"{row.ours_mb:.1f} MB", f"{row.theirs_mb:.1f} MB")
    return [row.work, row.detail, *both, figure(row), times, row.goal or ""]


def _grouped(rows: Iterable[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.who, row.work, row.detail), []).append(row)
    return list(groups.values())


def _section(row: Row) -> str:
    return row.work.split()[0] if row.who == OURS else row.who


def _line(rows: Sequence[Row], columns: Sequence[int]) -> list[str]:
    first, cells = rows[0], {row.devices: _cell(row) for row in rows}
    title = f"{'' if first.who == OURS else _short(first.who) + ': '}{first.work}, {first.detail}"
    goal = ", ".join(dict.fromkeys(row.goal for row in rows if row.goal is not None))
    return [title, *(cells.get(count, "") for count in columns), duration(rows[-1].dense_us), goal, _verdict(rows)]


def _short(who: str) -> str:
    return {LOCAL_TENSOR: "LocalTensor", JAX: "JAX"}.get(who, who)


def _cell(row: Row) -> str:
    colour = {True: "green", False: "bold red", None: "default"}[row.ok]
    return f"[{colour}]{figure(row)}[/]"


def _verdict(rows: Sequence[Row]) -> str:
    judged = [row.ok for row in rows if row.ok is not None]
    if not judged:
        return ""
    return "[green]ok[/]" if all(judged) else "[bold red]MISS[/]"


def show(console: Console, rows: Sequence[Row], conditions: Setting, complete: bool) -> None:
    """Print the table, what is missing from it, and under what conditions it was made."""
    predicted = [row for row in rows if row.shown == "error"]
    together = [row for row in rows if row.who == PROCESSES]
    compared = [row for row in rows if row not in predicted and row not in together]
    if compared or not rows:
        console.print(table(compared))
    for count in dict.fromkeys(row.devices for row in together):
        console.print(processes([row for row in together if row.devices == count]))
    if predicted:
        console.print(predictions(predicted))
    for reason in dict.fromkeys(f"{row.who}: {row.missing}" for row in rows if row.missing is not None):
        console.print(reason, markup=False)
    console.print(
        f"torch {conditions.torch}, {conditions.threads} threads, load {conditions.load} before the run; "
        "'dense' is the baseline at the most devices; LocalTensor is DTensor's",
        highlight=False,
    )
    if conditions.load > NOISY_LOAD:
        console.print("[yellow]other work shared the cores: run again on a quiet machine before you trust a figure[/]")
    if not complete:
        console.print("[yellow]stopped early: this is what there was[/]")
