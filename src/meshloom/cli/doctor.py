"""Run a multi-device program of TTNN and check seven things that such programs get wrong.

The mesh opened with the right shape, weights replicated, inputs sharded at the batch, the batch divisible, outputs put
together, devices waited for, the mesh closed. `import ttnn` in the script means meshloom's, unless ttnn is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import runpy
import sys
import traceback
from importlib import import_module
from pathlib import Path

from meshloom import settings
from meshloom.errors import LaunchError, MeshloomError

ALIASES = ("distributed", "model_preprocessing", "models", "pipeline")  # modules that programs import by a path


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `meshloom doctor` takes."""
    parser.add_argument("--system", help="the devices to imitate: T3000, Galaxy, 2x4, 8 (MESHLOOM_SYSTEM)")
    parser.add_argument("script", type=Path, help="the program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the program takes")


def run(options: argparse.Namespace) -> None:
    """Run the script, print the checklist; an error if an item does not hold or the script failed."""
    if not options.script.is_file():
        raise LaunchError(f"there is no script {options.script}")
    if options.system is not None:
        settings.environment()["MESHLOOM_SYSTEM"] = options.system
    from meshloom.ttnn import doctor
    from meshloom.ttnn.device import system  # loads torch

    if options.system is not None:
        system.get_system(options.system)  # an error at once if there is no such system
    stand_in()
    with doctor.watch() as seen:
        error = _run(options.script, options.arguments)
    if error is not None and not seen.opened:
        if not isinstance(error, MeshloomError):  # it never came to what the checklist is about
            raise LaunchError(
                f"the script {_ending(error)} before it opened a mesh: there is nothing to check", script=options.script
            ) from error
        seen.refused = error.headline
    print(seen.report())
    if error is not None:
        raise LaunchError(f"the script failed: {error!r}") from error
    wrong = [finding.item for finding in seen.findings() if not finding.holds]
    if wrong:
        raise LaunchError(f"{len(wrong)} of 7 items: {'; '.join(wrong)}")


def _ending(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"ended with exit code {error.code}"
    line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
    return f"failed with {type(error).__name__}{line} ({error})"


def stand_in() -> None:
    """Let `import ttnn` and `from models.tt_cnn... import` mean meshloom's where nothing else is installed."""
    found = importlib.util.find_spec("ttnn")
    if found is None or found.origin is None:  # a folder of that name is not TTNN
        sys.modules["ttnn"] = import_module("meshloom.ttnn")
        for name in ALIASES:
            sys.modules[f"ttnn.{name}"] = import_module(f"meshloom.ttnn.{name}")
    if importlib.util.find_spec("models") is None:
        sys.modules["models"] = import_module("meshloom.ttnn.models")


def _run(script: Path, given: list[str]) -> BaseException | None:
    """Run a script as its own program; what it raised, if anything."""
    before, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [str(script), *given], [str(script.parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        return end if end.code else None
    except Exception as error:
        if not isinstance(error, MeshloomError):
            traceback.print_exc()
        return error
    finally:
        sys.argv, sys.path[:] = before, path
    return None
