"""What all tests share.

Two test processes share two cores: one thread each is faster than two. Properties draw the same cases every time, so
that a run can be repeated; a long run (`MESHLOOM_CASES`) draws new ones, from `MESHLOOM_SEED` on, which it prints.
What tests count with `record_property` is summed and printed at the end.
"""

import gc
import os
import random
import re
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import settings

LONG = frozenset("controller processes cli nn ttnn".split())  # rooms whose tests start processes, and wait
GROUP = re.compile(r"@[^@\]]*$")
BEGUN: dict[str, Path] = {}  # the file whose tests are running

torch.set_num_threads(1)
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("new", deadline=None, database=None, print_blob=True)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background: programs of tests must hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)
for absent in (torch.cuda, torch.xpu, torch.mtia):  # at every seed torch writes the stack down, for each of them
    absent.traceback = SimpleNamespace(format_stack=list)

settings.load_profile("new" if os.environ.get("MESHLOOM_CASES") else "same")
if os.environ.get("MESHLOOM_CASES"):  # the test processes inherit it
    os.environ.setdefault("MESHLOOM_SEED", str(random.SystemRandom().randrange(2**32)))


def pytest_report_header() -> list[str]:
    """Print what a long run draws."""
    return [f"{name}={os.environ[name]}" for name in ("MESHLOOM_CASES", "MESHLOOM_SEED") if name in os.environ]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Append the group to the name of each test, by which xdist deals them out; 3.8 does it in vain on pytest 9.2.

    What takes long begins first, so that nobody waits for it at the end: rooms with processes, and slow tests.
    """
    if hasattr(config, "workerinput") and config.getvalue("loadgroup"):
        groups = {item: group_of(item) or item.nodeid for item in items}
        slow = {groups[item] for item in items if item.get_closest_marker("slow") is not None}
        items.sort(key=lambda item: (item.path.parent.name not in LONG, groups[item] not in slow))
        for item, group in groups.items():
            if group != item.nodeid and not item.nodeid.endswith(f"@{group}"):
                item._id = item.id.parse(f"{item.nodeid}@{group}")


def group_of(item: pytest.Item) -> str | None:
    """The tests of a file run in one process, which makes what they share once; other slow ones go alone."""
    marker = item.get_closest_marker("xdist_group")
    if marker is not None:
        return str(marker.args[0])
    is_single = item.get_closest_marker("slow") is not None and not shares_fixtures(item)
    return None if is_single else item.nodeid.partition("::")[0]


def shares_fixtures(item: pytest.Item) -> bool:
    """Whether it uses what its module makes once."""
    made = item._fixtureinfo.name2fixturedefs.values() if isinstance(item, pytest.Function) else ()
    return any(each[-1].scope == "module" for each in made)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tests are shown by the names by which they can be run again, without the group."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        report.nodeid = GROUP.sub("", report.nodeid)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What is there before a file stays: the collector, which many tests call, need not look at libraries again."""
    if BEGUN.get("file") != item.path:
        BEGUN["file"] = item.path
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests counted, over all processes."""
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "call":
                counts.update(dict(report.user_properties))
    for what, count in sorted(counts.items()):
        terminalreporter.write_line(f"{count:>9,}  {what}")
    for line in pytest_report_header() if counts else ():
        terminalreporter.write_line(line)
