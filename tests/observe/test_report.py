"""The report of a dry run: every figure on the page is that of the run, and the page needs nothing but itself."""

from __future__ import annotations

import copy
import math
import re
from collections import defaultdict
from importlib import resources

import pytest
import torch

import meshloom as loom
from llama import SMALL_7B, Sizes, make_step
from meshloom import Shard
from meshloom.observe.report import collect_figures, fill_page
from meshloom.observe.report.alternatives import Alternatives
from report_pages import check_figures, read_figures, run_small


@pytest.fixture(scope="module")
def figures(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    run.report(path)
    return read_figures(path)


def test_every_figure_of_the_page_is_that_of_the_run(figures, run):
    check_figures(copy.deepcopy(figures), run)


@pytest.mark.parametrize(
    "path",
    [
        ("totals", "time"), ("phases", 1, "exposed"), ("tree", "inside", 0, "compute"), ("memory", "held", 3, 5),
        ("timeline", "duration", 7), ("links", 0, "used"), ("bounds", 0, "seconds"), ("ops", 2, "bytes"),
    ],
)  # fmt: skip
def test_a_figure_that_is_not_that_of_the_run_is_found(figures, run, path):
    wrong = copy.deepcopy(figures)
    *outer, last = path
    place = wrong
    for each in outer:
        place = place[each]
    place[last] = place[last] * 1.01 + 1e-9
    with pytest.raises(AssertionError):
        check_figures(wrong, run)


def test_kinds_add_up_to_their_phase(figures, run):
    for phase in figures["phases"]:
        kinds = [each for each in figures["kinds"] if each["phase"] == phase["name"]]
        assert kinds and len({each["name"] for each in kinds}) == len(kinds)
        for what in ("time", "compute", "exposed", "hidden"):
            assert sum(each[what] for each in kinds) == pytest.approx(phase[what], rel=1e-6, abs=1e-15), what
    assert {each["name"] for each in figures["kinds"]} == {"memory traffic", "all_reduce over dp", "all_reduce over tp"}


def test_the_tensors_at_the_peak_are_folded_and_none_is_lost(figures, run):
    shown = figures["memory"]["alive"]
    assert [each["bytes"] for each in shown] == sorted((each["bytes"] for each in shown), reverse=True)
    by_name = {each["name"]: each for each in shown}
    gate = by_name["Llama.layers.[0-2].feed.gate_proj.weight"]
    one = next(each for each in run.memory.alive if each.name == "Llama.layers.1.feed.gate_proj.weight")
    assert gate["count"] == 3 and gate["bytes"] == 3 * one.bytes and gate["purpose"] == "parameters"
    assert sum(each["count"] for each in shown) <= len(run.memory.alive)


def test_the_calls_that_cost_most_are_those_of_the_run(figures, run):
    seconds = defaultdict(float)
    for each in run.timeline:
        node = run.nodes[each.node]
        key = (node.op, node.phase, run.folding.path(node.module), node.where, node.operands)
        seconds[key] += each.exposed if each.axis else each.duration
    most = sorted(seconds.values(), reverse=True)[:10]
    assert [each["time"] for each in figures["calls"]] == pytest.approx(most)
    for each in figures["calls"]:
        key = (each["op"], each["phase"], each["name"], each["where"], tuple(each["operands"]))
        assert each["time"] == pytest.approx(seconds[key])


def two_products(mesh: loom.Mesh):
    x = loom.empty(1024, 4096, mesh=mesh, placements={"tp": Shard(1)}, device="meta")
    w = loom.empty(4096, 1024, mesh=mesh, placements={"tp": Shard(0)}, device="meta")
    return lambda: x @ w + (2 * x) @ w


def test_a_call_that_could_be_cheaper_says_what_to_ask_for_and_the_price():
    program = two_products(loom.open_mesh((4,), axes=("tp",)))
    with loom.dry_run("t3000") as run:
        program()
    (product,) = [each for each in collect_figures(run)["calls"] if each["op"] == "matmul" and each["moves"]]
    found = product["alternative"]
    assert sorted(each.partition(" at ")[0] for each in found["asks"]) == ["add", "add", "matmul", "matmul"]
    assert sum("output={'tp': 'P(sum)'}" in each for each in found["asks"]) == 3
    with loom.use_machine(run.machine):
        advice = loom.explain(program).advice
    assert (found["before"], found["after"]) == pytest.approx((advice.before, advice.after))


def test_a_call_without_a_cheaper_way_says_nothing():
    mesh = loom.open_mesh((4,), axes=("tp",))
    x = loom.empty(1024, 1024, mesh=mesh, placements={"tp": Shard(0)}, device="meta")
    with loom.dry_run("t3000") as run:
        x.relu()
    assert [each["alternative"] for each in collect_figures(run)["calls"]] == [None]


def test_a_result_that_the_program_redistributes_itself_stays_where_it_lies():
    mesh = loom.open_mesh((4,), axes=("tp",))
    x = loom.empty(1024, 4096, mesh=mesh, placements={"tp": Shard(1)}, device="meta")
    w = loom.empty(4096, 1024, mesh=mesh, placements={"tp": Shard(0)}, device="meta")
    found = []
    for moves in (False, True):
        with loom.dry_run("t3000") as run:
            first = x @ w
            if moves:
                first.redistribute({"tp": Shard(0)})
            first + (2 * x) @ w
        found.append(Alternatives(run).find(run.nodes[0]))
    assert found[0]["asks"][0].endswith("output={'tp': 'P(sum)'}") and found[1] is None


def test_a_node_of_backward_has_the_alternative_of_its_forward_call():
    mesh = loom.open_mesh((4,), axes=("tp",))
    x = loom.empty(1024, 4096, mesh=mesh, placements={"tp": Shard(1)}, device="meta")
    w = loom.Parameter(torch.empty(4096, 1024, device="meta"), mesh, {"tp": Shard(0)})
    with loom.dry_run("t3000") as run:
        (x @ w + (2 * x) @ w).sum().backward()
    found = Alternatives(run)
    backward = [node for node in run.nodes if node.phase == "backward" and node.op == "matmul"]
    assert backward
    for node in backward:
        forward = run.nodes[node.gradient_of]
        assert found.find(node) == found.find(forward) is not None


def test_a_page_loads_nothing_and_no_name_can_break_out_of_it(run):
    machine = loom.Machine("</script><img src=x>", 1e-6, 1e9, 1e12, 1e11)
    x = loom.ones(4, mesh=loom.open_mesh((2,), axes=("dp",)))
    with loom.dry_run(machine) as strange:
        x.sum()
    for page in (fill_page(collect_figures(run)), fill_page(collect_figures(strange))):
        assert "<img" not in page and page.count("</script>") == 2
        addresses = set(re.findall(r"\w+://[^\s\"'<]*", page))
        assert addresses == {"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody loads
        assert not re.search(r"<\w[^>]*\s(?:src|srcset|action)=|@import|url\(|fetch\(|XMLHttpRequest|import\(", page)
        assert "default-src 'none'" in page


def brightness(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
    return sum(weight * each for weight, each in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((brightness(one), brightness(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_text_can_be_read_on_its_ground_in_light_and_in_dark():
    style = resources.files("meshloom.observe.report").joinpath("report.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in style.split("@media")[:2])
    assert set(light) == set(dark) and len(light) > 25
    assert contrast("#ffffff", "#000000") == pytest.approx(21) and contrast("#777777", "#ffffff") < 4.5
    fills = ["wait", "hidden", *(f"phase-{i}" for i in range(4))]
    grounds = [(text, on) for text in ("ink", "soft", "accent", "wait") for on in ("card", "page", "faint")]
    for colours in (light, dark):
        for text, on in [*grounds, ("module-ink", "module"), *(("on-fill", fill) for fill in fills)]:
            assert contrast(colours[text], colours[on]) >= 4.5, f"{text} on {on}"
        assert contrast(colours["focus"], colours["card"]) >= 3


def test_a_limit_that_is_not_there_and_one_that_is_not_kept(tmp_path):
    endless = collect_figures(run_small(memory=math.inf))
    assert endless["totals"]["limit"] is None
    with pytest.raises(loom.OutOfMemoryError), loom.dry_run("galaxy", memory=1000) as over:
        make_step(Sizes(**{**vars(SMALL_SIZES), "layers": 1}))()
    over.report(tmp_path / "over.html")
    totals = read_figures(tmp_path / "over.html")["totals"]
    assert totals["limit"] == 1000 < totals["memory"] == over.memory.peak


SMALL_SIZES = Sizes(width=64, hidden=96, heads=4, groups=4, vocabulary=96, layers=1, dp=2, tp=4, rows=2, length=16)


def test_a_run_without_calls_has_a_report(tmp_path):
    with loom.dry_run("t3000") as run:
        pass
    run.report(tmp_path / "empty.html")
    figures = read_figures(tmp_path / "empty.html")
    assert figures["totals"]["time"] == 0 and figures["calls"] == [] and figures["phases"] == []


def test_a_report_waits_for_the_end_of_the_block(tmp_path):
    with loom.dry_run("t3000") as run, pytest.raises(loom.UnsupportedError, match="when its block has ended"):
        run.report(tmp_path / "early.html")
    assert not (tmp_path / "early.html").exists()


@pytest.mark.slow
def test_thirty_two_layers_stay_below_a_megabyte(tmp_path):
    with loom.dry_run("galaxy", memory=math.inf) as run:
        make_step(Sizes(**SMALL_7B, layers=32, dp=4, tp=8))()
    run.report(tmp_path / "large.html")
    assert (tmp_path / "large.html").stat().st_size < 1e6
    figures = read_figures(tmp_path / "large.html")
    figures["totals"]["limit"] = run.limit
    check_figures(figures, run)
    layers = figures["tree"]["inside"][0]["inside"][1]["inside"]
    assert [(each["name"], each["count"]) for each in layers] == [("[0-31]", 32)]
