"""The docs site builds without a warning, and a browser shows its pages: text, pictures, examples and search."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import browser
from readme_picture import PICTURE, draw

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings_handlers")
HEADER = "#4051b5"  # the colour of the bar at the top


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        browser.missing(f"the docs site needs {', '.join(lacking)}: pip install 'meshloom[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^(?:WARNING|ERROR)", done.stderr, re.MULTILINE), done.stderr
    return out


class _Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing about it."""

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    """The address of the site, on loopback."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


PAGES = {
    "index.html": ("Two commands", "f32[16, 12](S(0), S(1)) on Mesh(dp=2, tp=4)"),
    "from_scratch.html": ("The block", "data parallel on one axis"),
    "api/extend.html": ("Make a function on torch tensors an op", "swiglu"),
}


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_three_of_its_pages_open_in_a_browser(site, served, tmp_path) -> None:
    for page, phrases in PAGES.items():
        address = f"{served}/{page}"
        html = browser.read_page(address, tmp_path)
        field = re.search(r'<div class="md-search" data-md-component="search"[^>]*>', html)
        assert field and "hidden" not in field[0], f"{page} shows no field to search in"
        text = re.sub(r"<[^>]*>", "", html)
        for phrase in phrases:
            assert phrase in text, f"{page} does not say {phrase!r}"
        pixels = browser.photograph(address, tmp_path, 700, 400)
        assert pixels.at(5, 5) == HEADER, f"{page} has no bar at its top"
        assert len(pixels.colours()) > 20, f"{page} shows too little"
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    found = {each["location"].partition("#")[0] for each in index if "reduce-scatter" in each["text"]}
    assert {"collectives.html", "placements.html"} <= found, "search finds too little"
    shown = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} <= shown
    assert {"contributing.html", "changelog.html", "examples/first.html", "benchmarks.html"} <= shown
    assert (site / "benchmarks.svg").is_file()


def test_the_picture_of_the_readme_is_what_notebooks_draw() -> None:
    assert PICTURE.read_text(encoding="utf-8") == draw(), "run python tests/readme_picture.py"


def test_without_a_browser_a_test_is_skipped_and_where_ci_is_set_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no browser is installed"):
        browser.chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make browser installs Chromium"):
        browser.chromium()
