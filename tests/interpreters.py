"""Programs as `python ...` would run them, forked off a process that has imported torch: a start costs milliseconds.

    done = interpreters.run(["examples/first.py", "--mesh", "2x4"])
    assert done.returncode == 0, done.stderr

What a start itself must do or leave alone (imports, options of the interpreter) is tested with `sys.executable`.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import ranks

TESTS = str(Path(__file__).parent)
_CLONE_NEWNET = 0x40000000


def run(
    arguments: Sequence[str], environment: dict[str, str] | None = None, timeout: float = 120.0
) -> subprocess.CompletedProcess[str]:
    """A script or `-m module` with its arguments: its exit code, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        given = dict(os.environ) if environment is None else environment
        process = ranks.FORKS.Process(
            target=ranks.live, args=(str(output), given, interpret, list(arguments), os.getcwd(), str(errors))
        )
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            raise subprocess.TimeoutExpired(arguments, timeout, output.read_bytes(), errors.read_bytes())
        said = (each.read_text("utf-8", errors="replace") for each in (output, errors))
        return subprocess.CompletedProcess(arguments, process.exitcode, *said)


def interpret(arguments: list[str], folder: str, errors: str | None = None, network: str | None = None) -> None:
    """Run a script or a module as the interpreter would: arguments, import path, warnings.

    Its errors may go to another file, and it may live in a network namespace.
    """
    if network is not None:
        enter(network)
    if errors is not None:
        with open(errors, "wb") as file:
            os.dup2(file.fileno(), 2)
    os.chdir(folder)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")
    sys.path[:] = [each for each in sys.path if not each.startswith(TESTS)]
    if os.environ.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, folder)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def enter(network: str) -> None:
    """From now on this process has the interfaces of a namespace, as under `ip netns exec`."""
    with open(f"/run/netns/{network}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {network}")
