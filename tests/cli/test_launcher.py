"""`meshloom run` as users run it: real processes that speak, fail, are killed and stopped; nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from meshloom.cli import main

ROOT = Path(__file__).resolve().parents[2]
SECRET = "0123456789abcdef"  # of hosts that meet; a run on one host makes its own
LIMIT = 240  # seconds after which a run of these tests counts as hung


Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    """Write a script; afterwards no process that runs it may be left."""
    path = tmp_path / "script.py"

    def write(body: str) -> str:
        head = "import os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\n"
        meet = f"""
def meet(name, world):
    folder = pathlib.Path({str(tmp_path)!r})
    (folder / f"{{name}}.{{rank}}").touch()
    while len(list(folder.glob(f"{{name}}.*"))) < world:
        time.sleep(0.002)
"""
        path.write_text(head + meet + textwrap.dedent(body))
        return str(path)

    yield write
    assert running(str(path)) == []


def running(text: str) -> list[int]:
    """The processes whose command line has this text, this one apart; a moment is given for what is just ending."""
    for _ in range(50):
        found = [
            int(each.name) for each in Path("/proc").iterdir() if each.name.isdecimal() and text in command_of(each)
        ]
        if not found:
            return []
        time.sleep(0.1)
    return found


def command_of(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "LOGLEVEL")}
    return {**inherited, "MESHLOOM_SECRET": SECRET, **more}


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A run to its end; lines are held until all ranks have said them or gone on, however slow the machine is."""
    command = [sys.executable, "-m", "meshloom", "run", "--hold", str(LIMIT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment(**more))


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "meshloom", "run", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, text=True, env=environment(), **pipes)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What a run says until it says this; an error if it ends before."""
    assert process.stdout is not None and process.stderr is not None
    heard = ""
    while text not in heard:
        line = process.stdout.readline()
        assert line, f"the run ended without {text!r}: {heard}{process.stderr.read()}"
        heard += line
    return heard


# what is shown


def test_what_all_say_is_shown_once_and_what_one_says_with_its_rank(script):
    path = script("""
        meet("start", 4)
        print("hello", sys.argv[1:])
        print("I am", rank)
        meet("end", 4)
        print("bye")
        print("quiet", file=sys.stderr)
    """)
    done = run("--nproc", "4", path, "a", "--nproc", "7", "-m")
    assert done.returncode == 0, done.stderr
    first, *own, last = done.stdout.splitlines()
    assert first == "[all 4] hello ['a', '--nproc', '7', '-m']" and last == "[all 4] bye"
    assert sorted(own) == [f"[rank {rank}] I am {rank}" for rank in range(4)]
    assert done.stderr == "[all 4] quiet\n"


def test_output_is_shown_while_ranks_run_and_half_a_line_too(script):
    path = script("""
        print("now")
        sys.stdout.write("half")
        while not pathlib.Path(sys.argv[1]).exists():
            time.sleep(0.01)
        print(" whole")
    """)
    go_on = Path(path).with_name("go_on")
    process = start("--nproc", "2", path, str(go_on))
    try:
        heard = read_until(process, "half")
        assert re.fullmatch(r"(\[(all 2|rank \d)\] (now|half)\n)+", heard), heard
        go_on.touch()  # only now can the ranks end: what was read came before that
        rest, told = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert "whole" in rest


def test_a_rank_of_a_run_alone_has_its_number_too(script):
    done = run("--nproc", "1", script("print('x' * 100000)"))
    assert done.stdout == f"[rank 0] {'x' * 100000}\n"


def test_many_lines_are_all_shown_in_order(script):
    done = run("--nproc", "2", script("for number in range(3000): print(rank, number)"))
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        said = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith(f"[rank {rank}]")]
        assert said == [str(number) for number in range(3000)]


def test_a_script_runs_as_it_would_alone(script, tmp_path):
    (tmp_path / "beside.py").write_text("value = 'found'")
    path = script("""
        import multiprocessing
        import beside

        def double(number):
            return 2 * number

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(beside.value, pool.map(double, [1, 2]), sys.argv, "MESHLOOM_LIFELINE" in os.environ)
    """)
    done = run("--nproc", "1", path, "a")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[rank 0] found [2, 4] {[path, 'a']} False\n"


def test_a_module_is_run_by_its_name(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text("import sys; print(__name__, __package__, sys.argv[1:])")
    command = [sys.executable, "-m", "meshloom", "run", "--nproc", "1", "-m", "package.train", "--lr", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, env=environment())
    assert done.stdout == "[rank 0] __main__ package ['--lr', '1']\n", done.stderr


def test_log_files_hold_what_each_rank_said(script, tmp_path):
    folder = tmp_path / "new" / "logs"
    done = run("--nproc", "2", "--log-dir", str(folder), script("print('same'); print(rank, file=sys.stderr)"))
    assert done.returncode == 0, done.stderr
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert found == {
        **{f"rank-{rank}.stdout.log": "same\n" for rank in range(2)},
        **{f"rank-{rank}.stderr.log": f"{rank}\n" for rank in range(2)},
    }


# what ranks are told


def test_a_dry_run_tells_every_rank_its_environment_and_command(tmp_path):
    done = run("--hosts", "a:2,b:1", "--timeout", "30", "--check", "always", "--dry-run", "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("3 ranks on 2 hosts, meeting at a:29500\n\nrank  local rank  host")
    assert re.search(
        r"rank 2 on b\n  environment  RANK=2 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 GROUP_RANK=1 "
        r"GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=\w+ TORCHELASTIC_USE_AGENT_STORE=False MASTER_ADDR=a "
        r"MASTER_PORT=29500 MESHLOOM_TIMEOUT=30.0 MESHLOOM_CHECK=always OMP_NUM_THREADS=\d+\n"
        r"  command      \S*python\S* -u \S*rank\.py train\.py --lr 0\.1\n",
        done.stdout,
    )
    assert not re.search(r"Traceback|torch", done.stderr)


def test_a_user_without_a_name_can_run(monkeypatch, capsys):
    def find_nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", find_nobody)
    assert main(["run", "-n", "2", "--dry-run", "train.py"]) == 0
    assert "rank 1 on localhost" in capsys.readouterr().out


def test_n_is_short_for_nproc():
    short, long = (run(option, "2", "--dry-run", "train.py") for option in ("-n", "--nproc"))
    assert short.returncode == 0 and "rank 1 on localhost" in short.stdout
    ports = re.compile(r"\d{4,}")
    assert ports.sub("", short.stdout) == ports.sub("", long.stdout)


def test_a_dry_run_tells_what_the_ranks_then_find(script, tmp_path):
    ranks = tmp_path / "ranks.yaml"
    ranks.write_text(
        "rank_bindings:\n"
        "  - {rank: 0, mesh_id: 3, visible_devices: [0, 1], env_overrides: {COLOUR: 'deep red', PYTHONHASHSEED: 7}}\n"
        "  - {rank: 1, mesh_id: 3, env_overrides: {TT_VISIBLE_DEVICES: '2,3', OMP_NUM_THREADS: 5}}\n"
    )
    path = script("""
        import shlex
        for name in sorted(os.environ):
            print(f"{name}={shlex.quote(os.environ[name])}")
    """)
    options = ("--bindings", str(ranks), "--timeout", "7")
    told = run(*options, "--dry-run", path).stdout
    done = run(*options, path, TT_VISIBLE_DEVICES="0,1,2,3")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        match = re.search(rf"rank {rank} on localhost\n  environment  (.*)", told)
        assert match is not None
        expected = re.findall(r"(\w+=(?:'[^']*'|\S*))", match[1])
        found = re.findall(rf"^\[(?:all 2|rank {rank})\] (.*)$", done.stdout, re.MULTILINE)
        assert len(expected) >= 12 and set(expected) <= set(found), set(expected) - set(found)
    assert "COLOUR='deep red'" in told and "MESHLOOM_HOST_RANK=1" in told


def test_the_cores_are_shared_out_unless_the_user_has_said_so(script):
    path = script("print(os.environ['OMP_NUM_THREADS'])")
    assert run("--nproc", "2", path).stdout == f"[all 2] {max(1, (os.cpu_count() or 1) // 2)}\n"
    assert run("--nproc", "2", path, OMP_NUM_THREADS="3").stdout == "[all 2] 3\n"


def test_a_script_may_close_every_file_and_open_its_own(script, tmp_path):
    path = script("""
        os.closerange(3, 256)
        own = [open(pathlib.Path(__file__).with_name(f"own{number}"), "w") for number in range(20)]
    """)
    done = run("--nproc", "1", path)
    assert done.returncode == 0, done.stderr
    assert [each.read_text() for each in tmp_path.glob("own*")] == [""] * 20


def test_what_is_typed_goes_to_the_first_rank(script):
    path = script("print(rank, sys.stdin.read())")
    command = [sys.executable, "-m", "meshloom", "run", "--nproc", "2", path]
    done = subprocess.run(command, input="typed", capture_output=True, text=True, timeout=LIMIT, env=environment())
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 0 typed", "[rank 1] 1 "], done.stderr


def test_a_program_of_plain_torch_meets_as_it_does_under_torchrun(script):
    path = script("""
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
        import meshloom as loom

        print(x.tolist(), loom.ones(8, mesh=loom.open_mesh((2,)), placements="S(0)").sum().item())
        dist.destroy_process_group()
    """)
    done = run("--nproc", "2", path)
    assert (done.returncode, done.stdout) == (0, "[all 2] [1.0, 1.0] 8.0\n"), done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def two_hosts(*arguments: str) -> list[str]:
    """What two hosts, here both on loopback, say when they run this."""
    common = ("--rdzv-endpoint", f"localhost:{free_port()}", "--start-timeout", "60")
    hosts = [start(*common, "--node-rank", str(node), *arguments) for node in range(2)]
    try:
        told = [host.communicate(timeout=LIMIT) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [host.returncode for host in hosts] == [0, 0], told
    return [out for out, _ in told]


def test_row_54_two_hosts_meet_and_every_rank_reads_its_binding(script):
    path = script("""
        from meshloom.processes.bindings import from_environment
        found = from_environment()
        print(found.rank, found.local_rank, found.world_size, os.environ["GROUP_RANK"])
    """)
    first, second = two_hosts("--hosts", "a:2,b:1", path)
    assert sorted(first.splitlines()) == ["[rank 0] 0 0 3 0", "[rank 1] 1 1 3 0"]
    assert second.splitlines() == ["[rank 2] 2 0 3 1"]


def end(*hosts: subprocess.Popen[str]) -> list[tuple[int | None, str]]:
    """How each launcher ended, and what it said."""
    try:
        told = [host.communicate(timeout=LIMIT) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    return [(host.returncode, out + error) for host, (out, error) in zip(hosts, told, strict=True)]


def meet(*guests: tuple[str, ...]) -> list[tuple[int | None, str]]:
    """How launchers at one meeting point end; the first argument of each is its number."""
    endpoint = ("--rdzv-endpoint", f"localhost:{free_port()}", "--start-timeout", "20")
    return end(*[start(*endpoint, "--node-rank", node, *arguments) for node, *arguments in guests])


def test_hosts_that_disagree_about_the_hosts_end_together(script):
    path = script("print('ran')")
    ended = meet(("0", "--hosts", "a:2,b:2", path), ("1", "--hosts", "a:2,b:1", path))
    for code, said in ended:
        assert code == 1 and "[rank" not in said
        assert "the hosts differ: node 0 has --hosts a:2,b:2, node 1 has --hosts a:2,b:1" in said


def test_two_hosts_with_one_number_end_together(script):
    path = script("print('ran')")
    ended = meet(*[(node, "--hosts", "a:1,b:1,c:1", path) for node in "011"])
    assert [code for code, _ in ended] == [1, 1, 1]
    assert all("two hosts came as node 1" in said for _, said in ended)


def test_two_jobs_at_one_meeting_point_do_not_mix(script, tmp_path):
    path, other = script("print('ran')"), tmp_path / "other.py"
    other.write_text("print('other')")
    common = ("--hosts", "a:1,b:1", "--rdzv-endpoint", f"localhost:{free_port()}", "--start-timeout", "60")
    first = start(*common, "--node-rank", "0", path)
    ((code, said),) = end(start(*common, "--node-rank", "1", str(other)))
    assert code == 1 and f"another job waits there: {path}" in said and f"here  {other}" in said
    assert end(first, start(*common, "--node-rank", "1", path)) == [(0, "[rank 0] ran\n"), (0, "[rank 1] ran\n")]


# what ranks then do


def test_row_55_two_ranks_of_a_2x4_mesh_hold_2x2_each(script):
    path = script("""
        import meshloom as loom

        mesh = loom.open_mesh((2, 4), axes=("r", "c"), processes=(1, 2))
        seen = loom.control(mesh)
        x = loom.ones(4, 8, mesh=mesh, placements="S(0), S(1)")
        print(seen.mesh_shape("local"), seen.mesh_shape("global"), seen.mesh_offset, seen.mesh_range("local"))
        print(list(mesh.local_coordinates()) == [c for c in mesh.coordinates() if seen.is_local(c)], x.sum().item())
    """)
    done = run("--nproc", "2", path)
    assert done.returncode == 0, done.stderr
    told = sorted(done.stdout.splitlines())
    assert told == [
        "[all 2] True 32.0",
        "[rank 0] (2, 2) (2, 4) (0, 0) (range(0, 2), range(0, 2))",
        "[rank 1] (2, 2) (2, 4) (0, 2) (range(0, 2), range(2, 4))",
    ]


def test_row_60_two_hosts_form_one_1x4_mesh_and_reduce_over_it(script):
    path = script("""
        import torch
        import meshloom as loom

        mesh = loom.open_mesh((1, 4), axes=("r", "c"))
        assert (mesh.processes, mesh.local_shape) == ((1, 2), (1, 2))
        x = loom.distribute(torch.arange(8.0).reshape(4, 2), mesh, "R, S(0)")
        assert torch.equal(x.sum(0).to_torch(), torch.tensor([12.0, 16.0]))
        held = loom.collectives.all_reduce(x, "c")
        assert torch.equal(held.to_torch(), torch.tensor([[12.0, 16.0]])), held.to_torch()
        print("reduced")
    """)
    assert two_hosts("--hosts", "a:1,b:1", path) == ["[rank 0] reduced\n", "[rank 1] reduced\n"]


def documented(section: str) -> tuple[str, str]:
    """The first command of a section of the document, and the text block after it."""
    text = (ROOT / "docs" / "launching.md").read_text().split(f"## {section}\n", 1)[1].split("\n## ")[0]
    found = re.search(r"```sh\n(.*?)\n```(?:\n\n```text\n(.*?)```)?", text, re.DOTALL)
    assert found is not None
    return found[1], found[2] or ""


def run_documented(command: str) -> subprocess.CompletedProcess[str]:
    words = command.split()
    assert words[:2] == ["meshloom", "run"]
    here = [sys.executable, "-m", "meshloom", "run", "--hold", str(LIMIT), *words[2:]]
    return subprocess.run(here, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, env=environment())


def test_row_103_the_documented_command_runs_two_ranks_and_passes():
    command, _ = documented("Tests on several ranks")
    assert "--nproc 2" in command
    done = run_documented(command)
    assert done.returncode == 0, done.stderr
    assert "[all 2] equal to the dense product" in done.stdout


def test_row_103_the_documented_recipe_can_fail(script):
    command, _ = documented("Tests on several ranks")
    done = run_documented(command.replace("examples/ranks.py", script("assert rank == 0, 'wrong'")))
    assert done.returncode == 1 and "AssertionError: wrong" in done.stderr


def test_the_first_documented_command_prints_what_the_document_shows():
    command, shown = documented("One host")
    done = run_documented(command)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(shown.splitlines())


# what is refused before anything starts


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train.py"], "the number of ranks is not given"),
        (["--nproc", "2", "nothing.py"], "there is no script nothing.py"),
        (["--hosts", "a:2,b:2", "train.py"], "missing  --node-rank"),
        (["--hosts", "a:2,b:2", "--node-rank", "2", "train.py"], "--node-rank 2 is out of range for 2 hosts"),
        (["--hosts", "a:2,b", "train.py"], "'b' is not a host with a number of ranks"),
        (["--hosts", "a:2,b:2", "--nproc", "3", "train.py"], "--nproc 3 contradicts 2 ranks on a"),
        (
            ["--hosts", "a:2,b:2", "--node-rank", "0", "--rdzv-endpoint", "a:port", "train.py"],
            "--rdzv-endpoint a:port has no port",
        ),
        (["-n", "2", "--rdzv-endpoint", "fd77::1", "train.py"], "write [fd77::1]:port, as in [fd77::1]:29500"),
        (["-n", "2", "--rdzv-endpoint", "fd77::1:29500", "train.py"], "is an IPv6 address without brackets"),
        (["--bindings", "nothing.yaml", "train.py"], "nothing.yaml cannot be read"),
    ],
)
def test_a_run_that_cannot_be_is_refused_with_the_reason(arguments, says, capsys):
    assert main(["run", *arguments]) == 1
    out, told = capsys.readouterr()
    assert out == "" and told.startswith("meshloom run: ") and says in told


@pytest.mark.parametrize(
    "arguments", [["--nproc", "0", "x.py"], ["--timeout", "-1", "x.py"], ["--check", "no", "x.py"], []]
)
def test_a_wrong_option_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["run", *arguments])
    assert caught.value.code == 2 and "usage: meshloom run" in capsys.readouterr().err


def test_a_log_folder_that_cannot_be_written_is_refused_before_anything_starts(script, tmp_path):
    (tmp_path / "file").write_text("")
    for folder, reason in [(tmp_path / "file" / "logs", "Not a directory"), (Path("/proc/logs"), "No such file")]:
        done = run("--nproc", "2", "--log-dir", str(folder), script(f"pathlib.Path({str(tmp_path / 'ran')!r}).touch()"))
        assert done.returncode == 1
        assert f"the log folder {folder} cannot be written: {reason}" in done.stderr
        assert not (tmp_path / "ran").exists()


def test_hosts_that_do_not_come_are_said_within_the_time(script):
    endpoint = f"localhost:{free_port()}"
    done = run(
        "--hosts", "a:1,b:1", "--node-rank", "0", "--rdzv-endpoint", endpoint, "--start-timeout", "1", script("")
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"meshloom run: the 2 hosts did not meet at {endpoint} within 1 s")
    assert "reason  1 of 2 came\n" in done.stderr


# what goes wrong while it runs


def test_the_rank_that_failed_first_is_named_with_its_error_and_its_last_lines(script):
    path = script("""
        meet("start", 3)
        if rank == 1:
            print("before the end", file=sys.stderr)
            raise ValueError("no such thing")
        time.sleep(60)
    """)
    done = run("--nproc", "3", path)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("meshloom run: ") :]
    assert report.startswith(
        "meshloom run: rank 1 of 3 failed first: exit code 1\n  error   ValueError: no such thing\n"
    )
    assert "before the end" in report and "raise ValueError" in report and "runpy" not in done.stderr
    assert "others" not in report  # the launcher ended them


def test_the_first_failure_is_first_although_others_fail_at_once(script):
    # rank 2 says that it failed before anything else of it ends; the others die of it while it still winds down
    path = script("""
        import atexit

        here = pathlib.Path(__file__)

        def wind_down():
            here.with_name("gone").touch()
            end = time.monotonic() + 20
            while len(list(here.parent.glob("ended.*"))) < 3 and time.monotonic() < end:
                time.sleep(0.001)
            time.sleep(0.5)

        if rank != 2:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it when the first of them has ended
        meet("start", 4)
        if rank == 2:
            atexit.register(wind_down)
            raise RuntimeError("the cause")
        while not here.with_name("gone").exists():
            time.sleep(0.001)
        here.with_name(f"ended.{rank}").touch()
        os._exit(5)
    """)
    done = run("--nproc", "4", path)
    assert done.returncode == 1
    assert "meshloom run: rank 2 of 4 failed first" in done.stderr and "RuntimeError: the cause" in done.stderr
    assert "rank 0: exit code 5" in done.stderr


def test_a_killed_rank_is_named_with_its_signal_and_its_half_line_is_shown(script):
    path = script("""
        if rank == 1:
            sys.stdout.write("half a li")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """)
    done = run("--nproc", "2", path)
    assert done.returncode == 1
    assert "rank 1 of 2 failed first: killed by SIGKILL (signal 9)" in done.stderr
    assert done.stdout == "[rank 1] half a li\n"


@pytest.mark.parametrize(
    ("ending", "says"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("sys.exit('enough')", "exit code 1\n  error   enough\n"),
        ("raise ValueError('long ' * 2000)", "exit code 1\n  error   ValueError: long long"),
        ("raise ValueError('\\U0001f600\\0' * 2000)", "exit code 1\n  error   ValueError: "),
        ("os._exit(4)", "exit code 4"),
        ("os.abort()", "killed by SIGABRT (signal 6)"),
        ("raise KeyboardInterrupt", "exit code 130"),
    ],
)
def test_every_way_to_fail_is_told(script, ending, says):
    done = run("--nproc", "1", script(ending))
    assert done.returncode == 1 and f"rank 0 of 1 failed first: {says}" in done.stderr


def test_a_rank_that_ends_early_without_failing_ends_nobody_else(script):
    path = script("""
        if rank == 0:
            os._exit(0)
        time.sleep(6)  # longer than the grace that follows a failure
        print("done")
    """)
    done = run("--nproc", "2", path)
    assert (done.returncode, done.stdout) == (0, "[rank 1] done\n"), done.stderr


def test_ranks_that_do_not_listen_are_ended_by_force(script):
    path = script("""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        meet("start", 3)
        if rank == 0:
            sys.exit(2)
        for beat in range(600):
            print("beat", beat)
            time.sleep(1)
    """)
    done = run("--nproc", "3", path)
    assert done.returncode == 1 and "rank 0 of 3 failed first: exit code 2" in done.stderr
    assert "beat 25" not in done.stdout  # torchrun alone gives them 30 seconds


def test_children_of_ranks_are_ended_with_them(script):
    path = script("""
        import subprocess
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {__file__}"])
        meet("start", 2)
        if rank == 0:
            sys.exit(2)
        time.sleep(600)
    """)
    assert run("--nproc", "2", path).returncode == 1


def test_a_child_that_has_left_its_session_is_ended_too(script):
    path = script("""
        import subprocess
        subprocess.Popen(["setsid", sys.executable, "-c", f"import time; time.sleep(600)  # {__file__}"])
        meet("start", 2)
        if rank == 0:
            sys.exit(2)
        time.sleep(600)
    """)
    assert run("--nproc", "2", path).returncode == 1


def test_what_a_rank_leaves_running_after_a_good_end_goes_on(script, tmp_path):
    path = script(f"""
        import subprocess
        speak = "import pathlib, time; until = time.time() + 2\\nwhile time.time() < until: print('on', flush=True)"
        save = "import pathlib, time; time.sleep(1); pathlib.Path({str(tmp_path / "saved")!r}).touch()"
        subprocess.Popen([sys.executable, "-c", save], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.Popen([sys.executable, "-c", speak], stderr=subprocess.DEVNULL)  # the launcher does not wait for it
    """)
    assert run("--nproc", "1", path).returncode == 0
    for _ in range(300):
        if (tmp_path / "saved").exists():
            return
        time.sleep(0.1)
    raise AssertionError("the child was ended")


def test_the_rank_that_left_early_is_blamed_for_the_failure_of_others(script):
    path = script("""
        import meshloom as loom
        mesh = loom.open_mesh((2,), timeout=60)
        x = loom.ones(8, mesh=mesh, placements="S(0)")
        x.sum().item()
        if rank == 1:
            sys.exit(0)
        x.sum().item()
    """)
    done = run("--nproc", "2", path)
    assert done.returncode == 1
    assert "meshloom run: rank 1 left before the others, and rank 0 failed of it: exit code 1\n" in done.stderr


STAY = """
    print("up", flush=True)
    {before}
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGINT, 130, "meshloom run: stopped, all 2 ranks have ended"),
        (signal.SIGTERM, 143, "meshloom run: stopped by SIGTERM, all 2 ranks have ended"),
    ],
)
@pytest.mark.parametrize("before", ["pass", "[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]"])
def test_stopping_the_launcher_ends_all_ranks(script, number, code, says, before):
    process = start("--nproc", "2", script(STAY.format(before=before)))
    try:
        read_until(process, "up")
        time.sleep(0.5)
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == code and told.splitlines()[-1] == says, told


def test_ctrl_c_lets_ranks_tidy_up(script):
    path = script("""
        try:
            print("up", flush=True)  # inside: the signal may come as soon as this is heard
            time.sleep(600)
        finally:
            print("tidy")
    """)
    process = start("--hold", str(LIMIT), "--nproc", "2", path)
    try:
        read_until(process, "[all 2] up")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130 and out == "[all 2] tidy\n"


def test_ctrl_c_is_heard_while_hosts_meet(script):
    with socket.create_server(("localhost", 0)) as silent:  # the other host: it takes the call and never answers
        silent.settimeout(LIMIT)
        endpoint = f"localhost:{silent.getsockname()[1]}"
        process = start("--hosts", "a:1,b:1", "--node-rank", "1", "--rdzv-endpoint", endpoint, script(""))
        try:
            call, _ = silent.accept()
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=20)
            call.close()
        finally:
            process.kill()
    assert (process.returncode, told) == (130, "meshloom run: stopped, no rank had started\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_ranks_end_when_the_launcher_is_killed(script):
    process = start("--nproc", "2", script(STAY.format(before="pass")))
    try:
        read_until(process, "up")
    finally:
        process.kill()
        process.communicate(timeout=30)


def test_nothing_stays_behind_when_the_launcher_is_killed(script, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    path = script("""
        import subprocess
        wait = [sys.executable, "-c", f"import time; time.sleep(600)  # {__file__}"]
        subprocess.Popen(wait)
        subprocess.Popen(["setsid", *wait])
        subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.Popen({wait})"]).wait()
        print("up", flush=True)
        time.sleep(600)
    """)
    process = subprocess.Popen(
        [sys.executable, "-m", "meshloom", "run", "--nproc", "2", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(TMPDIR=str(folder)),
    )
    try:
        read_until(process, "up")
        assert len(list(folder.iterdir())) == 1
    finally:
        process.kill()
        process.communicate(timeout=30)
    assert running(path) == []
    assert list(folder.iterdir()) == []


def test_ranks_end_when_their_guardian_is_killed(script, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    process = start("--nproc", "2", script(STAY.format(before="pass")))
    try:
        read_until(process, "up")
        (guardian,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(guardian), signal.SIGKILL)
        _, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1 and "the guardian of the ranks was killed" in told
    assert list(folder.iterdir()) == []


def test_nohup_is_respected(script, tmp_path):
    path = script(f"""
        print("up", flush=True)
        while not pathlib.Path({str(tmp_path / "go_on")!r}).exists():
            time.sleep(0.01)
        print("done")
    """)
    command = ["nohup", sys.executable, "-m", "meshloom", "run", "--nproc", "2", path]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, env=environment()
    )
    try:
        read_until(process, "up")
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        (tmp_path / "go_on").touch()
        out, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0 and "done" in out, told


# a screen that does not take what ranks say: how the shell opens it, and what stderr then says
SCREENS = {
    "full": (">/dev/full", "meshloom run: stdout is no longer shown: No space left on device\n"),
    "closed": (">&-", ""),
    "both full": (">/dev/full 2>&1", ""),
    "both closed": (">&- 2>&-", ""),
    "all closed": ("<&- >&- 2>&-", ""),
    "stderr closed": ("2>&- >/dev/null", ""),
}


@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_that_takes_nothing_keeps_no_rank_waiting(screen, script, tmp_path):
    path = script("""
        for _ in range(3000):
            print("x" * 100)
            print("y" * 100, file=sys.stderr)
        pathlib.Path(__file__).with_name(f"done.{rank}").touch()
    """)
    opened, says = SCREENS[screen]
    command = ["sh", "-c", f'exec "$@" {opened}', "sh", sys.executable, "-m", "meshloom", "run", "-n", "2", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0, done.stderr[-1000:]
    assert says in done.stderr
    assert len(list(tmp_path.glob("done.*"))) == 2


def test_a_run_whose_reader_does_not_read_can_be_stopped(script, tmp_path):
    path = script("""
        while True:
            print("x" * 1000)
            pathlib.Path(__file__).with_name("speaks").touch()
    """)
    process = start("--nproc", "2", path)
    try:
        while not (tmp_path / "speaks").exists():
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=40) == 143
    finally:
        process.kill()
        process.communicate()


def test_a_reader_that_goes_away_ends_the_run(script):
    process = start("--nproc", "2", script("while True: print('more')"))
    try:
        read_until(process, "more")
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(timeout=30) == 143
    finally:
        process.kill()
        assert process.stderr is not None
        process.stderr.close()


def test_nothing_is_left_in_the_folder_for_temporary_files(script, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    assert run("--nproc", "2", script("print(1)"), TMPDIR=str(folder)).returncode == 0
    assert run("--nproc", "2", script("sys.exit(rank)"), TMPDIR=str(folder)).returncode == 1
    assert list(folder.iterdir()) == []


def test_a_full_folder_for_temporary_files_is_named(script, monkeypatch, capsys):
    def full(**_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert main(["run", "--nproc", "2", script("")]) == 1
    said = capsys.readouterr().err
    assert f"the folder for temporary files {tempfile.gettempdir()} cannot be written: No space left on" in said


def test_the_check_for_processes_left_behind_can_fail(tmp_path):
    mark = str(tmp_path / "left.py")
    process = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(600)  # {mark}"])
    own = Path("/proc") / str(process.pid)
    try:
        for _ in range(1000):  # it has its command line a moment after it has its id
            if mark in command_of(own):
                break
            time.sleep(0.01)
        assert running(mark) == [process.pid]
    finally:
        process.kill()
        process.wait()
    assert running(mark) == []
