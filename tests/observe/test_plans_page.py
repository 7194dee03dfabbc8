"""Plans side by side in a real browser: bars, a table with the figures of each, their lines, and a link to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshloom as loom
from browser_tab import Tab, open_tab
from test_report_page import column, texts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> loom.nn.Ranking:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to("meta")
    return loom.autoplan(model, torch.empty(8, 64, device="meta"), "t3000", 4)


@pytest.fixture(scope="module")
def tab(found, tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "plan.html"
    found.report(path)
    with open_tab(path.as_uri(), tmp_path_factory.mktemp("browser")) as shown:
        yield shown
        assert shown.problems == []
        assert set(shown.requests) == {path.as_uri()}


def test_the_table_has_the_figures_of_every_plan(tab: Tab, found):
    assert texts(tab, "#plans h2") == ["Plans side by side"]
    assert texts(tab, "#plans tbody th") == [each.title for each in found]
    for what in ("time", "memory", "bytes"):
        assert column(tab, "plans", what) == [getattr(each, what) for each in found]
    assert texts(tab, "#plans tbody td:last-child") == [each.why for each in found]


def test_bars_have_one_scale(tab: Tab, found):
    widths = tab.evaluate(
        "[...document.querySelectorAll('#plans .plan .bar')].map(bar => "
        "[...bar.children].reduce((sum, each) => sum + each.getBoundingClientRect().width, 0)"
        " / bar.getBoundingClientRect().width)"
    )
    slowest = max(each.time for each in found)
    assert widths == pytest.approx([each.time / slowest for each in found], abs=0.01)


def test_the_lines_of_each_plan_can_be_opened(tab: Tab, found):
    assert texts(tab, "#plans details pre") == [str(each.plan) for each in found]
    assert not tab.evaluate("document.querySelector('#plans details').open")
    tab.evaluate("document.querySelector('#plans details summary').click()")
    assert tab.evaluate("document.querySelector('#plans details').open")


def test_the_navigation_leads_to_the_plans(tab: Tab):
    assert texts(tab, "nav a")[0] == "Plans"
    assert tab.evaluate("document.querySelector('nav a').getAttribute('href')") == "#plans"


def test_the_page_of_one_run_has_no_plans(tab: Tab, found, tmp_path):
    path = tmp_path / "one.html"
    found.best.run.report(path)
    with open_tab(path.as_uri(), tmp_path / "browser") as other:
        assert texts(other, "#plans") == [] and "Plans" not in texts(other, "nav a")
        assert other.problems == []
