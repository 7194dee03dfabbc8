"""The command line: `meshloom <command>`, or `python -m meshloom <command>`. One file per command, one line in a table.

A command's file has `arguments(parser)` and `run(options)`; it loads torch only when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from meshloom.errors import MeshloomError

COMMANDS = {
    "run": "run a script as several processes, on one host or on several",
    "calibrate": "measure this machine and write its figures as a preset",
    "predict": "say how long a script's step takes on this machine, and compare with the clock",
    "plan": "search for the fastest plan of a script's model on a machine, and write its report",
    "report": "write what a script's step costs on a machine and a mesh as an HTML page",
    "checkpoint": "show what a checkpoint holds, verify it, or export its weights",
    "monitor": "show the jobs of this host on a page that updates itself",
    "doctor": "check a multi-device program of TTNN while it runs",
}


def parser() -> argparse.ArgumentParser:
    """The command line with every command."""
    made = argparse.ArgumentParser(prog="meshloom", description="A mesh-native tensor runtime.")
    commands = made.add_subparsers(title="commands", dest="command", metavar="command", required=True)
    for name, says in COMMANDS.items():
        file = import_module(f"meshloom.cli.{name}")
        command = commands.add_parser(name, help=says, description=file.__doc__)
        file.arguments(command)
        command.set_defaults(run=file.run)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it did its work, 1 with a message if it could not, 130 if it was interrupted."""
    options = parser().parse_args(arguments)
    try:
        options.run(options)
    except (MeshloomError, OSError) as error:
        print(f"meshloom {options.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print(f"meshloom {options.command}: stopped, {str(stop) or 'nothing was written'}", file=sys.stderr)
        return 130
    return 0
