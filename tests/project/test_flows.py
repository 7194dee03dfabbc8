"""The four flows of docs/layout.md are what calls really enter, and each goes from a room only to rooms above it."""

from __future__ import annotations

import pytest

import flows
from test_rooms import ORDER

# The most functions that each may enter: what DESIGN allows for the first two, what they have come to for the others.
MOST = dict(zip(flows.FLOWS, (2, 80, 80, 30), strict=True))


@pytest.mark.parametrize("title", flows.FLOWS)
def test_a_flow_is_drawn_as_it_is_and_goes_one_way(title):
    frames = flows.FLOWS[title]()
    assert 0 < len(frames) <= MOST[title]
    assert flows.steps_back(frames, ORDER) == []
    assert flows.part(title, frames) in flows.PAGE.read_text(), "run: python tests/flows.py"


def test_the_section_has_the_four_flows_and_nothing_else():
    text = flows.PAGE.read_text()
    shown = text[text.index(flows.HEAD) : text.index(flows.END)]
    assert [title for title in flows.FLOWS if title in shown] == list(flows.FLOWS)
    assert shown.count(" functions\n") == len(flows.FLOWS)


def test_the_tracer_sees_a_call_that_plans_and_the_order_of_rooms_can_be_broken():
    mesh = flows.loom.open_mesh((2,), axes=("flow",))
    x = flows.loom.ones(6, 10, mesh=mesh, placements="S(0)")
    frames = flows.trace(lambda: x * x)
    assert any(frame.room == "planner" for frame in frames)
    assert flows.steps_back(frames, ORDER[::-1]) != []
