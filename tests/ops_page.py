"""`docs/ops.md` from the op table: every op, its rows for a sample call, and what they communicate.

`python tests/ops_page.py` writes the page; a test compares it with the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import meshloom as loom
from meshloom.ops import CONDITIONS, OPS, Call, Inner, Op, Row
from meshloom.ops.table import FAMILIES
from test_surface import SAMPLES, ways

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ops.md"
INTRO = """# Ops

Every op of the table, made from it by `python tests/ops_page.py`. {count} ops have a rule; any other function of torch
works through the fallback, which gathers its operands and says so.

A line shows the rows of one sample call, for one mesh axis: the operands' placements, the result's, and what the row
communicates inside, forward and (after `;`) backward. Ops with the same rows share a line. Every op also has the row in
which all is replicated. A partial result is reduced by the op itself (an all-reduce, or a reduce-scatter if `output=`
asks for shards), unless `output=` asks for it as it is. A `shift` goes around the whole ring: one less than there are
devices.

A row with partial operands is offered only where its identity holds for every value of the dtype: sums and products
keep their dtype, and the numbers that scale them are positive and finite (for integers: integers). Where it is not
offered, `output=` has its operands reduced first and the result made partial again. The word after `if` says what a row
needs besides:

{conditions}

*Padding* says what an op does where a chunk is shorter than the others: nothing (`zero`), mask its result (`finite`),
fill with 1 first (`singular`), or take the padding off (`trimmed`); `fill` is a fill of its own.

"""


def sample_call(name: str) -> Call:
    """The call that the surface's sample makes."""
    args, kwargs = SAMPLES[name]()
    _, function = next(ways(name))
    return loom.explain(lambda: function(*args, **kwargs)).plans[-1].call


def shown_row(row: Row) -> str:
    text = f"`{row.label}`: {row}"
    inside = shown_inner(row.inner)
    behind = shown_inner(row.backward)
    return text + (f", {inside}" if inside else "") + (f"; {behind}" if behind else "")


def shown_inner(inner: tuple[Inner, ...]) -> str:
    return " + ".join(str(each) for each in inner)


def shown_padding(op: Op, call: Call) -> str:
    return op.at_zero + (", fill" if op.fill(call) else "")


def shown_op(op: Op) -> tuple[str, str, str]:
    """The sample's operands, the rows, and the padding: what ops on one line have in common."""
    call = sample_call(op.name)
    rows = [shown_row(row) for row in op.rule(call).rows if row.label != "none"]
    operands = ", ".join(f"{each.dtype}{list(each.shape)}" for each in call.operands)
    return operands, "<br>".join(rows) or "replicated only", shown_padding(op, call)


def lines_of(ops: tuple[Op, ...]) -> Iterator[str]:
    shared: dict[tuple[str, str, str], list[str]] = {}
    for op in ops:
        shared.setdefault(shown_op(op), []).append(f"`{op.name}`")
    for (operands, rows, padding), names in shared.items():
        yield f"| {', '.join(names)} | {operands} | {rows} | {padding} |"


def page() -> str:
    """The whole page."""
    needs = "\n".join(f"- `{word}`: it holds {each.meaning}." for word, each in CONDITIONS.items())
    parts = [INTRO.replace("{count}", str(len(OPS))).replace("{conditions}", needs)]
    for title, ops in FAMILIES.items():
        parts.append(f"## {title.capitalize()}\n\n| op | sample | rows | padding |\n|---|---|---|---|\n")
        parts.append("\n".join(lines_of(ops)) + "\n\n")
    return "".join(parts) + LEFT


LEFT = """## Left to the fallback

These have no rule, because none is sensible or none would save anything:

| functions | why |
|---|---|
| `unique`, `unique_consecutive` | the shape of the result depends on all values |
| `median`, `nanmedian` of all elements | one order over everything; along a dim they have a rule |
| `linalg.norm`, `linalg.matrix_norm` by singular values, or of rows and columns | the whole matrix meets |
| `kron`, `cdist`, `corrcoef`, `cov`, `renorm`, `trapezoid` | seldom used; what they are made of has rules |
| `rrelu` in training, `instance_norm` with running statistics | torch's own random numbers or side effects |
| losses with `size_average=` or `reduce=` | torch's old arguments |
| `mvlgamma`, `polygamma`, `frexp` | their arguments cannot be padded, come first, or give two dtypes |
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{len(OPS)} ops in {PAGE}")
