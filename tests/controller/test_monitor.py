"""The monitor: what a browser shows of a cluster and of a run while they work, and when nothing runs."""

from __future__ import annotations

import html
import http.client
import json
import re
import subprocess
import sys
import threading
import time

import pytest

import browser
import meshloom as loom
from meshloom.cli import monitor
from meshloom.processes import jobs


@pytest.fixture
def address(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = monitor.make_server(0)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def ask(address: str, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(address, timeout=10)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def text_of(page: str) -> str:
    shown = page.partition("<script>")[0] + page.rpartition("</script>")[2]
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", shown)))


def test_the_page_says_that_no_job_is_there(address, tmp_path):
    assert "no job is running on this host" in text_of(browser.read_page(f"http://{address}/", tmp_path))


def test_only_the_page_and_the_state_are_served_and_only_to_this_host(address):
    assert ask(address, "/")[0] == 200 and json.loads(ask(address, "/state.json")[1]) == {"jobs": []}
    assert ask(address, "/../../etc/passwd")[0] == 404 and ask(address, "/settings.py")[0] == 404
    assert ask(address, "/state.json", host="evil.example:80")[0] == 403
    assert jobs.folder().stat().st_mode & 0o077 == 0


def wait_for(address: str, words: str) -> None:
    """Until the state has some words: jobs write twice a second while somebody watches."""
    deadline = time.monotonic() + 10
    while words not in ask(address, "/state.json")[1].decode():
        assert time.monotonic() < deadline, f"{words!r} is never shown"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_browser_shows_a_cluster_at_work(address, tmp_path):
    ask(address, "/state.json")  # somebody watches
    with loom.launch(workers=2, timeout=30, threads=1) as cluster:
        mesh = cluster.open_mesh((2, 2), axes=("dp", "tp"))
        x = loom.randn(64, 32, mesh=mesh, placements="S(0), R")
        w = loom.randn(32, 16, mesh=mesh, placements="R, S(1)")
        (x @ w).sum().item()
        wait_for(address, "matmul")
        first = text_of(browser.read_page(f"http://{address}/", tmp_path))
        for words in (
            "Cluster(workers=2)", "1 job", "matmul: f32[64, 32](S(0), R), f32[32, 16](R, S(1)) -> f32[64, 16](S(0), S(",
            "dp takes m, tp takes n", "all_reduce(sum) over dp of 2", "test_monitor.py:", "dp=2, tp=2", "w0 w0 w1 w1",
            "ahead of the workers", "gather", "load of its links",
        ):  # fmt: skip
            assert words in first, f"{words!r} is not in: {first}"
        (x * 2).tanh().sum().item()
        wait_for(address, "tanh")
        assert "tanh" in text_of(browser.read_page(f"http://{address}/", tmp_path)), "the page is alive"
    assert "no job is running" in text_of(browser.read_page(f"http://{address}/", tmp_path))


@pytest.mark.slow
def test_a_run_is_shown_too(address, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(20)\n")
    ask(address, "/state.json")
    with subprocess.Popen([sys.executable, "-m", "meshloom", "run", "--nproc", "2", str(script)]) as process:
        found = {}
        for _ in range(100):
            found = json.loads(ask(address, "/state.json")[1])
            if found["jobs"] and all(each["memory"] for each in found["jobs"][0]["workers"]):
                break
            time.sleep(0.1)
        process.terminate()
    (job,) = found["jobs"]
    assert job["kind"] == "run" and "script.py" in job["title"] and len(job["workers"]) == 2
    assert json.loads(ask(address, "/state.json")[1]) == {"jobs": []}


def test_a_job_that_was_killed_is_no_job(address):
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    (jobs.folder() / "cluster-1.json").write_text(json.dumps({"pid": gone.pid}))
    (jobs.folder() / "cluster-2.json").write_text("nonsense")
    assert json.loads(ask(address, "/state.json")[1]) == {"jobs": []}
