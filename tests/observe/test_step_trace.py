"""The timeline of a dry run as a file that Perfetto opens."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

import meshloom as loom
from meshloom.cost.step import HELD_FOR
from meshloom.observe.step_trace import waits


@pytest.fixture(scope="module")
def events(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    run.write_timeline(path)
    found = json.loads(path.read_text(encoding="utf-8"))
    assert set(found) == {"displayTimeUnit", "traceEvents"}
    return found["traceEvents"]


def of_kind(events, kind):
    return [each for each in events if each["ph"] == kind]


def test_every_slice_is_a_box_with_its_time_its_line_and_its_phase(events, run):
    boxes = of_kind(events, "X")
    assert len(boxes) == len(run.timeline)
    for box, each in zip(boxes, run.timeline, strict=True):
        node = run.nodes[each.node]
        assert (box["ts"], box["dur"]) == pytest.approx((each.start * 1e6, each.duration * 1e6))
        assert box["name"] == each.name and box["cat"] == box["args"]["phase"] == node.phase
        assert (box["args"]["module"], box["args"]["line"]) == (node.module, node.where)
        assert box["args"].get("bytes", 0) == each.bytes
    assert {box["args"]["phase"] for box in boxes} == {"forward", "backward", "optimizer"}


def test_tracks_have_names_and_boxes_of_one_never_overlap(events):
    named = {(each["pid"], each["tid"]): each["args"]["name"] for each in of_kind(events, "M") if "tid" in each
             and each["name"] == "thread_name"}  # fmt: skip
    assert set(named.values()) == {"compute", "links of dp", "links of tp"}
    ends = defaultdict(float)
    for box in of_kind(events, "X"):
        track = (box["pid"], box["tid"])
        assert track in named and box["ts"] >= ends[track] - 1e-6
        ends[track] = box["ts"] + box["dur"]


def test_memory_is_a_counter_that_reaches_the_peak(events, run):
    counters = of_kind(events, "C")
    assert all(set(each["args"]) == set(HELD_FOR) for each in counters)
    assert max(sum(each["args"].values()) for each in counters) == run.memory.peak
    times = [each["ts"] for each in counters]
    assert times == sorted(times)


def test_arrows_come_in_pairs_from_a_box_to_a_later_one(events, run):
    starts, ends = ({each["id"]: each for each in of_kind(events, kind)} for kind in ("s", "f"))
    assert len(starts) == len(ends) == len(of_kind(events, "s")) and set(starts) == set(ends)
    assert len(starts) >= sum(1 for each in run.timeline if each.axis == "tp")
    boxes = defaultdict(list)
    for box in of_kind(events, "X"):
        boxes[box["pid"], box["tid"]].append((box["ts"], box["ts"] + box["dur"]))
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"] + 1e-6 and end["bp"] == "e"
        for each in (start, end):
            assert any(a - 1e-6 <= each["ts"] <= b + 1e-6 for a, b in boxes[each["pid"], each["tid"]])


def test_what_waits_never_starts_before_what_it_waits_for_has_ended(run):
    found = list(waits(run))
    assert any(before.axis and not after.axis for before, after in found)
    assert any(after.axis and not before.axis for before, after in found)
    assert all(after.start >= before.end - 1e-12 for before, after in found)


def test_stages_on_meshes_of_their_own_are_processes_of_their_own(tmp_path):
    whole = loom.open_mesh((4,), axes=("tp",))
    x = loom.empty(64, 64, mesh=whole, placements="S(1)", device="meta")
    y = loom.empty(64, 64, mesh=whole.submesh(tp=slice(0, 2)), placements="S(1)", device="meta")
    with loom.dry_run("t3000") as run:
        (x @ x.T).relu()
        (y @ y.T).relu()
    run.write_timeline(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    titles = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert titles == [f"one of {each.devices} devices of t3000" for each in run.graph.classes] and len(titles) == 2
