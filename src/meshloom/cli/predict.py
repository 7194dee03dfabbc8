"""Predict how long a script's `step()` takes in this process, from the tables of `meshloom calibrate`.

The script is run once, and has to define a function `step` without arguments. Every kernel of a step is priced; with
--check the step is timed too, and the error is printed.
"""

from __future__ import annotations

import argparse
import inspect
import math
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshloom.errors import MeshloomError
from meshloom.fabric.catalogue import THIS_MACHINE
from meshloom.fabric.host import host_path, load_host


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `meshloom predict` takes."""
    parser.add_argument("script", type=Path, help="a script that defines step()")
    default = host_path(THIS_MACHINE)
    parser.add_argument("--host", type=Path, default=default, help="the tables to price with (default %(default)s)")
    parser.add_argument("--check", action="store_true", help="time the step as well, and print the error")
    parser.add_argument("--seconds", type=seconds, default=3.0, help="how long to time it (default %(default)s)")
    parser.add_argument("--args", default="", help="arguments of the script, in one text: --args '--layers 4'")


def seconds(text: str) -> float:
    """A time above 0 from text.

    >>> seconds("0.5")
    0.5
    """
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time above 0, in seconds")
    return found


def run(options: argparse.Namespace) -> None:
    """Load, predict, and time if asked to."""
    host = load_host(options.host)
    step = load_step(options.script, shlex.split(options.args))
    import torch

    from meshloom.cli.measuring import PASSES, Clock, time_for
    from meshloom.tensor.host_time import host_time

    if torch.get_num_threads() != host.threads:
        raise MeshloomError(
            f"the tables were measured with {host.threads} threads, and torch has {torch.get_num_threads()} here",
            fix=f"OMP_NUM_THREADS={host.threads}, or calibrate again",
        )
    step()  # what is planned the first time is not part of a step
    with host_time(host) as found:
        step()
    print(found)
    if options.check:
        clock = Clock.read()
        took = min(time_for(step, options.seconds / PASSES) for _ in range(PASSES))
        print(f"measured  {took * 1e3:.3f} ms\npredicted {found.seconds * 1e3:.3f} ms, {found.seconds / took - 1:+.1%}")
        others = clock.others()
        if others is not None and others > 0.1:
            print(f"other work took {others:.0%} of the cores meanwhile", file=sys.stderr)


def load_step(script: Path, rest: list[str]) -> Callable[[], object]:
    """Run a script and give its function `step`."""
    found = run_script(script, rest).get("step")
    if not callable(found):
        raise MeshloomError(f"{script} defines no function step", fix="def step(): ... runs one step of the program")
    if inspect.iscoroutinefunction(found) or _needs_arguments(found):
        raise MeshloomError(f"step of {script} cannot be called as step()", fix="def step(): ... without arguments")
    step: Callable[[], object] = found
    return step


def run_script(script: Path, rest: list[str]) -> dict[str, Any]:
    """Run a script with arguments, and give what it defines."""
    if not script.is_file():
        raise MeshloomError(f"there is no script {script}", fix="give the path of a file that defines step()")
    before = sys.argv
    sys.argv = [str(script), *rest]
    try:
        return runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before


def _needs_arguments(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    return False
