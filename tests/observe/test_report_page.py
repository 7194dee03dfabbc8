"""The report in a real browser: what it shows, clicks, keys and zoom, dark and light, and that it asks for nothing."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

import meshloom as loom
from browser_tab import Tab, open_tab
from report_pages import run_small

pytestmark = pytest.mark.slow
LAYERS = 32
TIMES = "\N{MULTIPLICATION SIGN}"
LAYER = f"Llama.layers.[0-{LAYERS - 1}]"
SECTIONS = ("headline", "time", "memory", "modules", "links", "timeline", "calls", "assumptions")


@pytest.fixture(scope="module")
def run() -> loom.DryRun:
    return run_small(LAYERS)


@pytest.fixture(scope="module")
def address(run, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    run.report(path)
    return path.as_uri()


@pytest.fixture(scope="module")
def shared(address, tmp_path_factory):
    with open_tab(address, tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture
def tab(shared: Tab, address: str):
    """The page as it opens, and no complaint of the browser at the end of a test."""
    shared.is_loaded = False
    shared.send("Page.navigate", url=address)
    while not shared.is_loaded:
        shared.settle()
    yield shared
    assert shared.problems == []
    assert set(shared.requests) == {address}


def texts(tab: Tab, selector: str) -> list[str]:
    """What elements say."""
    return tab.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(each => each.textContent)")


SIZES = {"GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1}


def said(value: float, units: dict[str, float]) -> str:
    """A number in the unit that suits it, with three digits."""
    name, size = next(each for each in units.items() if value >= each[1])
    return f"{value / size:.{2 - (value >= 10 * size) - (value >= 100 * size)}f} {name}"


def column(tab: Tab, section: str, what: str, table: int = 0) -> list[float]:
    """The values of a column of a table."""
    cells = f"document.querySelectorAll('#{section} table')[{table}].querySelectorAll('td[data-of={what}]')"
    return [float(each) for each in tab.evaluate(f"[...{cells}].map(each => each.dataset.value)")]


def test_the_headline_has_the_totals(tab, run):
    shown = dict(
        tab.evaluate("[...document.querySelectorAll('.big')].map(each => [each.dataset.of, each.textContent])")
    )
    assert shown["total time"] == said(run.time, {"s": 1, "ms": 1e-3, "µs": 1e-6})
    assert shown["total mfu"] == f"{100 * run.mfu:.1f} %"
    assert shown["total memory"] == said(run.memory.peak, SIZES)
    assert shown["total bound"] == next(iter(run.bounds))
    assert "12.0 GB" in texts(tab, "#headline .tile")[2]


def test_tables_show_the_figures_of_the_run(tab, run):
    phases = run.table("phase").rows
    assert texts(tab, "#time tr.group th") == [row.name for row in phases]
    groups = "#time tr.group td[data-of={}]"
    for what in ("calls", "time", "compute", "exposed", "bytes"):
        values = tab.evaluate(
            f"[...document.querySelectorAll('{groups.format(what)}')].map(each => Number(each.dataset.value))"
        )
        assert values == [getattr(row, what) for row in phases], what
    modules = run.table("module").rows
    assert texts(tab, "#modules tbody th") == [
        row.name if row.count == 1 else f"{row.name} {TIMES}{row.count}" for row in modules
    ]
    assert column(tab, "modules", "time") == [row.time for row in modules]
    assert column(tab, "links", "bytes") == [load.bytes for load in run.links.values()]
    assert column(tab, "memory", "at_peak") == [
        run.memory.at_peak[what] for what, most in run.memory.peaks.items() if most
    ]
    assert texts(tab, "#assumptions tbody th") == [each.what for each in run.assumptions]
    assert len(texts(tab, "#calls tbody tr")) == 10


def test_every_number_in_a_table_is_its_value_in_the_unit_of_its_column(tab):
    cells = tab.evaluate(
        "[...document.querySelectorAll('[data-unit]')]"
        ".map(each => [each.textContent, each.dataset.value, each.dataset.unit])"
    )
    assert len(cells) > 300
    for text, value, unit in cells:
        digits = len(text.partition(".")[2])
        assert float(text) == pytest.approx(float(value) / float(unit), abs=0.5000001 * 10.0**-digits), (text, value)
    others = tab.evaluate(
        "[...document.querySelectorAll('.number[data-value]:not([data-unit])')]"
        ".map(each => [each.textContent, each.dataset.value])"
    )
    assert others
    for text, value in others:
        number = float(text.rstrip(" %").replace(",", "")) / (100 if text.endswith("%") else 1)
        assert number == pytest.approx(float(value), abs=0.000501), text


def zoom_of(tab: Tab) -> str:
    return tab.evaluate("document.getElementById('flame').dataset.zoom")


def box_in_flame(path: str) -> str:
    return f'#flame button[data-path="{path}"]'


def test_a_click_in_the_flame_graph_zooms_and_the_trail_leads_back(tab, run):
    assert zoom_of(tab) == "step"
    layers = run.tree.children["Llama"].children["layers"].children[f"[0-{LAYERS - 1}]"]
    label = texts(tab, box_in_flame(LAYER))
    assert len(label) == 1 and label[0].startswith(f"[0-{LAYERS - 1}] {TIMES}{LAYERS} · ")
    before = tab.box(box_in_flame(f"{LAYER}.feed"))["width"]
    tab.click(box_in_flame(LAYER))
    assert zoom_of(tab) == f"step / Llama / layers / [0-{LAYERS - 1}]"
    whole = tab.box("#flame")["width"]
    assert tab.box(box_in_flame(LAYER))["width"] == pytest.approx(whole, abs=1)
    feed = tab.box(box_in_flame(f"{LAYER}.feed"))["width"]
    assert feed > before and feed == pytest.approx(
        whole * layers.children["feed"].total.time / layers.total.time, abs=1
    )
    tab.click("#trail button")
    assert zoom_of(tab) == "step" and len(texts(tab, "#trail button")) == 1


def test_the_flame_graph_can_be_walked_with_keys(tab):
    def focus() -> str:
        return tab.evaluate("document.activeElement.dataset.path")

    tab.evaluate("document.querySelector('#flame button').focus()")
    walked = [focus()]
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowDown"):
        tab.press(key)
        walked.append(focus())
    assert walked == ["", "Llama", "Llama.embedding", "Llama.layers", LAYER]
    assert texts(tab, "#flame-readout b") == [f"step / Llama / layers / [0-{LAYERS - 1}] {TIMES}{LAYERS}"]
    tab.press("Enter")
    assert zoom_of(tab).endswith(f"[0-{LAYERS - 1}]") and focus() == LAYER
    tab.press("Escape")
    assert zoom_of(tab) == "step / Llama / layers" and focus() == "Llama.layers"
    assert tab.evaluate("document.querySelectorAll('#flame button[tabindex=\"0\"]').length") == 1


def view_of(tab: Tab) -> tuple[float, float]:
    return tuple(map(float, tab.evaluate("(({from, to}) => [from, to])(document.getElementById('canvas').dataset)")))


def test_the_timeline_zooms_and_moves_by_keys_wheel_and_buttons(tab, run):
    assert view_of(tab) == (0, run.time)
    tab.turn_wheel("#canvas", -100)
    assert view_of(tab) == (0, run.time), "without focus the wheel scrolls the page"
    tab.evaluate("document.getElementById('canvas').focus()")
    tab.turn_wheel("#canvas", -100)
    start, end = view_of(tab)
    assert 0 < start < end < run.time and end - start == pytest.approx(0.8 * run.time)
    tab.press("+")
    start, end = view_of(tab)
    assert end - start == pytest.approx(0.4 * run.time)
    tab.press("ArrowRight")
    assert view_of(tab)[0] == pytest.approx(start + 0.2 * (end - start))
    tab.press("0")
    assert view_of(tab) == (0, run.time)
    tab.click("#timeline .tools button")  # zoom in
    assert view_of(tab)[1] - view_of(tab)[0] == pytest.approx(run.time / 2)
    shown = int(tab.evaluate("document.getElementById('canvas').dataset.boxes"))
    start, end = view_of(tab)
    inside = [each for each in run.timeline if each.end >= start and each.start <= end]
    assert abs(shown - len(inside)) <= 2 and shown < len(run.timeline)  # two may end at the edge, by rounding


def test_a_box_of_the_timeline_can_be_read_by_click_and_by_keys(tab, run):
    longest = max((each for each in run.timeline if each.axis == "tp"), key=lambda each: each.duration)
    lanes = tab.evaluate("JSON.parse(document.getElementById('figures').textContent).timeline.lanes.map(e => e.name)")
    names = 90 / tab.box("#canvas")["width"]  # the part at the left where the names of the lanes are
    across = names + (1 - names) * (longest.start + longest.duration / 2) / run.time
    tab.click("#canvas", across, (lanes.index("tp") + 0.5) * 34 / (34 * len(lanes) + 26))
    (read,) = texts(tab, "#timeline-readout")
    assert read.startswith("all_reduce from ") and "over tp" in read and "llama.py:" in read
    tab.evaluate("document.getElementById('canvas').focus()")
    tab.press("p")
    (before,) = texts(tab, "#timeline-readout")
    assert before != read
    tab.press("n")
    assert texts(tab, "#timeline-readout") == [read]


def test_what_the_timeline_shows_is_in_its_table(tab, run):
    tab.click("#slices summary")
    (caption,) = texts(tab, "#slice-table caption")
    assert caption == f"The 100 longest of {len(run.timeline):,} boxes in view"
    assert len(texts(tab, "#slice-table tbody tr")) == 100
    tab.evaluate("document.getElementById('canvas').focus()")
    for _ in range(8):
        tab.press("+")
    (caption,) = texts(tab, "#slice-table caption")
    shown = int(re.search(r"(\d+) boxes in view", caption)[1])
    assert shown == len(texts(tab, "#slice-table tbody tr")) < 100


def test_memory_can_be_read_with_keys(tab, run):
    tab.evaluate("document.getElementById('memory-picture').focus()")
    tab.press("Home")
    (first,) = texts(tab, "#memory-readout")
    most = max(point.bytes for point in run.memory.timeline if point.time < run.time / 500)
    assert first.startswith(f"{said(most, SIZES)} at ")
    tab.press("ArrowRight")
    (second,) = texts(tab, "#memory-readout")
    assert second != first and "parameters" in second
    assert f"peak {said(run.memory.peak, SIZES)}" in texts(tab, "#memory-picture text")


def level(used: float) -> int:
    """Which of the four colours a load has."""
    return sum(used >= step for step in (0.02, 0.25, 0.6))


def test_links_of_an_axis_have_the_colour_of_its_load(tab, run):
    colours = {
        axis: set(
            tab.evaluate(
                f"[...document.querySelectorAll('.link[data-axis={axis}]')].map(e => e.getAttribute('stroke'))"
            )
        )
        for axis in run.links
    }
    assert colours == {axis: {f"var(--load-{level(load.used)})"} for axis, load in run.links.items()}
    assert tab.evaluate("document.querySelectorAll('.device').length") == 8
    assert tab.evaluate("document.querySelectorAll('.link').length") == 3 * 2 + 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_part_is_drawn_in_the_colours_that_the_reader_prefers(tab, run, scheme):
    tab.prefer(scheme)
    page = {"light": "#f6f7f9", "dark": "#10151c"}[scheme]
    card = {"light": "#ffffff", "dark": "#18202a"}[scheme]
    assert tab.photograph("header").at(3, 3) == page
    for section in SECTIONS:
        pixels = tab.photograph(f"#{section}", scale=0.25)
        assert card in pixels.colours() and len(pixels.colours()) > 20, section
    for selector, colours in {
        "#memory-picture": [f"--held-{i}" for i in (0, 1, 2, 3)],
        "#canvas": ["--phase-0", "--phase-2", "--phase-3", "--wait"],
        "#flame": ["--module", "--wait", "--phase-0"],
        "svg.mesh": ["--faint", f"--load-{level(run.links['tp'].used)}"],
    }.items():
        found = tab.photograph(selector).colours()
        for name in colours:
            value = tab.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('{name}').trim()")
            assert value in found, f"{selector} has nothing of {name}"


OVERLAPS = """(() => {
  const found = [];
  for (const picture of document.querySelectorAll("svg")) {
    const boxes = [...picture.querySelectorAll("text")].map(each => [each.textContent, each.getBoundingClientRect()]);
    boxes.forEach(([a, one], i) => boxes.slice(i + 1).forEach(([b, two]) => {
      if (one.left < two.right - 1 && two.left < one.right - 1 && one.top < two.bottom - 1 && two.top < one.bottom - 1)
        found.push([a, b]);
    }));
  }
  return found;
})()"""


@pytest.mark.parametrize("width", [1240, 700])
def test_nothing_overlaps_and_the_page_is_no_wider_than_the_window(tab, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    tab.send("Emulation.setDeviceMetricsOverride", **metrics)
    tab.settle()
    assert tab.evaluate(OVERLAPS) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.send("Emulation.setDeviceMetricsOverride", **{**metrics, "width": 1240})
    tab.settle()


def test_a_screen_reader_finds_landmarks_headings_captions_and_names(tab):
    tree = tab.send("Accessibility.getFullAXTree")["nodes"]
    shown = [each for each in tree if not each.get("ignored")]
    roles = [each["role"]["value"] for each in shown]
    for landmark in ("banner", "navigation", "main", "contentinfo"):
        assert roles.count(landmark) == 1, landmark
    assert roles.count("region") >= len(SECTIONS)
    named = ("button", "link", "treeitem", "image", "img", "table", "region", "heading")
    assert [each for each in shown if each["role"]["value"] in named and not each["name"]["value"]] == []
    levels = tab.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(each => Number(each.tagName[1]))")
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    tables = "[...document.querySelectorAll('table')]"
    assert tab.evaluate(f"{tables}.every(each => each.caption && each.caption.textContent)")
    assert tab.evaluate(f"{tables}.every(each => [...each.querySelectorAll('th')].every(cell => cell.scope))")
    assert tab.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)") == tab.evaluate(
        "[...new Set([...document.querySelectorAll('[id]')].map(e => e.id))]"
    )


def test_tab_reaches_the_pictures_and_focus_can_be_seen(tab):
    reached = []
    for _ in range(40):
        tab.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id || document.activeElement.className"))
        outline = tab.evaluate("(it => it.outlineStyle + it.outlineWidth)(getComputedStyle(document.activeElement))")
        assert outline == "solid3px", reached[-1]
        if reached[-1] == "canvas":
            break
    assert reached[0] == "skip"
    assert "memory-picture" in reached and "module" in reached and reached[-1] == "canvas"


def open_report(run: loom.DryRun, folder: Path):
    """A page of its own for a run."""
    folder.mkdir()
    run.report(folder / "report.html")
    return open_tab((folder / "report.html").as_uri(), folder)


def test_a_step_without_calls_and_one_on_three_axes_open_too(tmp_path: Path):
    mesh = loom.open_mesh((2, 32, 16), axes=("pp", "dp", "tp"))
    x = loom.empty(64, 64, 64, mesh=mesh, placements="S(0), S(1), S(2)", device="meta")
    with loom.dry_run("t3000") as deep:
        x.sum()
    with loom.dry_run("t3000", memory=1e12) as empty:
        pass
    for number, (found, axes) in enumerate(((deep, ["dp", "pp", "tp"]), (empty, []))):
        with open_report(found, tmp_path / str(number)) as tab:
            assert tab.problems == [] and len(tab.requests) == 1
            assert tab.evaluate(OVERLAPS) == []
            assert len(texts(tab, "section h2")) == len(SECTIONS)
            drawn = "[...new Set([...document.querySelectorAll('.link')].map(e => e.dataset.axis))].sort()"
            assert tab.evaluate(drawn) == axes


def test_devices_of_different_kinds_have_a_timeline_each(tmp_path: Path):
    whole = loom.open_mesh((4,), axes=("tp",))
    x, y = (
        loom.empty(64, 64, mesh=mesh, placements="S(1)", device="meta")
        for mesh in (whole, whole.submesh(tp=slice(0, 2)))
    )
    with loom.dry_run("t3000") as run:
        (x @ x.T).relu()
        (y @ y.T).relu()
    boxes = "document.getElementById('canvas').dataset.boxes"
    with open_report(run, tmp_path / "kinds") as tab:
        on = [sum(each.mesh in kind.meshes for each in run.timeline) for kind in run.graph.classes]
        assert len(on) == 2 and len(set(on)) == 2
        for number, count in enumerate(on):
            tab.click(f"#timeline .tools button:nth-of-type({6 + number})")
            assert int(tab.evaluate(boxes)) == count
        assert len(texts(tab, "svg.mesh")) == 2 and tab.problems == []
