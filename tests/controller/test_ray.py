"""Workers on Ray: the ranks are actors, what happens to them is told in our words, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import gpt
import meshloom as loom
import sockets
from meshloom.controller import starting
from meshloom.controller.cluster import Cluster
from meshloom.controller.ray_launcher import Node, choose_nodes
from test_cluster_faults import check_gone, raised_within

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="no ray here")
PROGRAMS = Path(__file__).parent


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """A home folder of Ray's own, in which it must leave nothing, and a place for the files of its sessions."""
    with tempfile.TemporaryDirectory(prefix="r") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", folder)
        patch.delenv("RAY_ADDRESS", raising=False)
        yield Path(folder)


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Cluster]:
    with loom.launch(workers=2, on="ray", timeout=20, threads=1) as made:
        yield made


def family_of(pid: int) -> dict[int, str]:
    """The processes that come from one, with their commands."""
    from meshloom.cli.guardian import descendants

    return {each: Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ") for each in [pid, *descendants(pid)]}


@needs_ray
def test_the_gpt_on_ray_trains_as_in_one_process(cluster, monkeypatch):
    wanted = gpt.losses("tensor", 3)
    monkeypatch.setattr(loom, "open_mesh", cluster.open_mesh)
    assert gpt.losses("tensor", 3) == pytest.approx(wanted, rel=1e-5)


@needs_ray
def test_the_ranks_are_actors_that_listen_on_loopback_only_and_leave_the_home_folder_alone(cluster, home):
    family = family_of(cluster._starter.pid)
    pids = [each["pid"] for each in cluster.counters()]
    assert [family[pid].split()[0] for pid in pids] == ["ray::Rank.serve"] * 2
    assert any("gcs_server" in command for command in family.values())
    heard = {address for places in sockets.listening(family).values() for address, _ in places}
    assert heard and heard <= {"127.0.0.1", "::ffff:7f00:1"}, heard
    assert [path for path in home.rglob("*") if ".ray" in path.parts] == []
    told = Path(f"/proc/{pids[0]}/environ").read_text()
    assert "RAY_USAGE_STATS_ENABLED=0" in told and cluster._starter.secret.hex() not in told


@needs_ray
def test_an_op_that_fails_names_the_line_and_the_cluster_goes_on(cluster):
    mesh = cluster.open_mesh((2,), axes=("dp",))
    line = sys._getframe().f_lineno + 1
    rows = torch.nn.functional.embedding(loom.arange(9, mesh=mesh), loom.ones(4, 3, mesh=mesh))
    error = raised_within(20, lambda: rows.sum().item())
    assert "embedding" in str(error) and f"test_ray.py:{line}" in str(error), error
    assert loom.ones(4, mesh=mesh).sum().item() == 4


@needs_ray
def test_an_actor_that_is_killed_is_told_with_worker_call_and_line_and_close_leaves_nothing(cluster, home):
    """The last test of this cluster."""
    family, folder = family_of(cluster._starter.pid), cluster._starter._folder
    x = loom.ones(8, mesh=cluster.open_mesh((2,), axes=("dp",)))
    assert x.sum().item() == 8 and os.path.isdir(folder) and len(family) > 5
    os.kill(cluster.counters()[1]["pid"], signal.SIGKILL)

    def work() -> None:
        for _ in range(1000):
            x.sum().item()
            time.sleep(0.01)

    error = raised_within(15, work)
    assert isinstance(error, loom.PeerLostError)
    assert "worker 1 of Cluster(workers=2) is lost: " in error.headline and "worker process has died" in str(error)
    assert f"test_ray.py:{work.__code__.co_firstlineno + 2}" in str(error) and "sum" in str(error), error
    cluster.close()
    check_gone(list(family))
    assert not os.path.exists(folder)
    assert [path for path in home.rglob("*") if ".ray" in path.parts] == []


@needs_ray
def test_a_client_that_is_killed_takes_ray_along(home):
    program = [
        "import time, meshloom as loom",
        "starter = loom.launch(workers=1, on='ray', timeout=20)._starter",
        "print(starter.pid, starter._folder, flush=True)",
        "time.sleep(60)",
    ]
    with subprocess.Popen([sys.executable, "-c", "\n".join(program)], stdout=subprocess.PIPE, text=True) as client:
        pid, folder = client.stdout.readline().split()
        family = family_of(int(pid))
        assert any("raylet" in command for command in family.values())
        client.kill()
    check_gone(list(family), 30)
    assert not os.path.exists(folder)


@needs_ray
def test_workers_on_two_hosts_of_the_users_own_cluster_and_a_host_that_dies(home):
    told = run_program(home, "RAY_health_check_failure_threshold=20 RAY_health_check_period_ms=500")
    assert told["too many"] == "the Ray cluster has 2 cores for 3 workers"
    assert told["sum"] == "15" and told["raylets"] == "2"
    assert "worker 1 of Cluster(workers=2) is lost" in told["lost"] and "its node has died" in told["lost"]
    assert "ray_program.py:" in told["lost"]
    assert told["alive"] == "1" and told["left"] == "[]"


def run_program(home: Path, variables: str) -> dict[str, str]:
    """What `ray_program.py` prints, by the word before the colon."""
    own = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_TMPDIR": str(home)}
    environment = {**os.environ, **own, **dict(each.split("=") for each in variables.split())}
    done = subprocess.run(
        [sys.executable, str(PROGRAMS / "ray_program.py")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines() if ": " in line)


@needs_ray
def test_a_host_without_memory_is_told(home, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.001")  # Ray's own bound: it ends whatever runs
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    for _ in range(3):
        error = raised_within(100, lambda: loom.launch(workers=1, on="ray", timeout=20))
        if "timed out during startup" not in str(error):  # on a busy machine: Ray gives its own processes 30 s
            break
    assert isinstance(error, loom.LaunchError) and "memory was short" in error.headline, error


def test_what_ray_says_of_memory_becomes_our_error(home):
    starter = starting.RayStarter(None, b"", 1, 5.0)  # type: ignore[arg-type]
    starter._fates, starter._unsure, starter._heard = {}, set(), b""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        starter.process = process
        os.set_blocking(process.stdout.fileno(), False)
        process.stdin.write(b'{"worker": 0, "is_memory": true, "is_sure": true, "how": "memory was short"}\n')
        process.stdin.flush()
        fate = starter.find_fate(0)
    assert isinstance(fate, loom.OutOfMemoryError) and fate.headline == "memory was short"


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(starting.importlib.util, "find_spec", lambda name: None)
    error = raised_within(5, lambda: loom.launch(workers=2, on="ray"))
    assert str(error) == "on=\"ray\" needs Ray, which is not installed\n  fix  pip install 'meshloom[ray]'"


def test_hosts_are_chosen_by_name_or_one_after_the_other():
    a, b = Node("1", ("a", "192.0.2.1"), 4), Node("2", ("b", "192.0.2.2"), 2)
    assert choose_nodes([a, b], 5, None) == [(a, 4), (b, 1)]
    assert choose_nodes([a, b], 3, ["b:1", "192.0.2.1:2"]) == [(b, 1), (a, 2)]
    assert choose_nodes([Node("0", ("head",), 0), a], 2, None) == [(a, 2)]
    with pytest.raises(loom.LaunchError, match="has 6 cores for 7 workers"):
        choose_nodes([a, b], 7, None)
    with pytest.raises(loom.LaunchError, match="no host 'c'"):
        choose_nodes([a, b], 1, ["c:1"])


def test_another_way_to_start_workers_is_refused():
    with pytest.raises(loom.ArgumentError, match="on='rai' is no way to start workers") as found:
        loom.launch(workers=2, on="rai")
    assert "ray" in str(found.value)
    with pytest.raises(loom.BindingError, match="not a host"):
        loom.launch(hosts=["a"])
