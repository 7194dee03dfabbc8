"""What a rank runs first: a line to the launcher, then the user's script as `python script.py` would run it.

Started by its path, so that it costs no import of the package. On the line it says how the script ended, before the
interpreter winds down.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from types import TracebackType
from typing import Any

from meshloom import settings
from meshloom.processes.orphans import end_with

LIFELINE = "MESHLOOM_LIFELINE"  # the descriptor of the line, and the process id of the guardian
LONGEST = 600  # characters of an error on the line


def main(arguments: list[str]) -> None:
    """Run a script, or with `-m` a module, and tell the launcher how it ended."""
    line, parent = map(int, settings.environment().pop(LIFELINE).split(":"))
    end_with(parent)
    tell = open_line(line)
    try:
        run(arguments)
    except BaseException as error:
        code = exit_code(error)
        if isinstance(error, SystemExit):
            text = None if error.code is None or isinstance(error.code, int) else str(error.code)
            tell(code, text)
            raise
        tell(code, f"{type(error).__name__}: {error}")
        trace = of_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        sys.exit(code)
    tell(0)


def run(arguments: list[str]) -> None:
    """Give the script the arguments and the import path that it would have alone."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def exit_code(error: BaseException) -> int:
    """What the process ends with: 0 only for an exit that says so."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def open_line(line: int) -> Any:
    """A function that sends what it is given to the launcher; children of this process have none, and say nothing."""
    own, pipe = os.getpid(), os.fstat(line)
    os.set_inheritable(line, False)
    os.register_at_fork(after_in_child=lambda: os.close(line))

    def tell(code: int, error: str | None = None) -> None:
        if os.getpid() == own and is_open(line, pipe):
            shown = None if error is None else error[:LONGEST]  # a pipe takes 4096 bytes as one piece
            text = json.dumps({"code": code, "error": shown}, ensure_ascii=False)
            os.write(line, text.encode(errors="replace") + b"\n")

    return tell


def is_open(line: int, pipe: os.stat_result) -> bool:
    """Whether the line is still what it was: a script may close what it does not know, and open files of its own."""
    try:
        return os.path.samestat(os.fstat(line), pipe)
    except OSError:
        return False


def of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the script on, without the frames that started it."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename in own:
        found = found.tb_next
    return found or trace


if __name__ == "__main__":
    main(sys.argv[1:])
