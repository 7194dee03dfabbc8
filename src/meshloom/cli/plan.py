"""Search for the fastest plan of a script's model on a machine, print the best ones, and write the report of the first.

The script is run once. It defines `model` and `batch`, or functions of these names that give them: a torch module (on
device="meta" it needs no memory) and what it is called with. It may define loss(model, batch), and
optimizer(parameters).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from meshloom.cli.predict import run_script
from meshloom.cli.report import find_machine
from meshloom.errors import MeshloomError

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `meshloom plan` takes."""
    parser.add_argument("script", type=Path, help="a script that defines model and batch")
    parser.add_argument("--machine", required=True, help="a preset such as t3000, or the path of a TOML file")
    parser.add_argument("--devices", type=int, help="how many devices (default: as many as the machine has)")
    parser.add_argument("--memory", type=read_size, help="bytes of a device, such as 12G (default: the machine's)")
    parser.add_argument("--mode", default="train", help="train, prefill or decode (default %(default)s)")
    parser.add_argument("--keep", type=int, default=5, help="how many plans to print (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("plan.html"), help="the report (default %(default)s)")
    parser.add_argument("--toml", type=Path, help="also write the first plan, as a file for parallelize or pipeline")
    parser.add_argument("--args", default="", help="arguments of the script, in one text: --args '--layers 4'")


def run(options: argparse.Namespace) -> None:
    """Load, search, print, write."""
    machine = find_machine(options.machine)
    defined = run_script(options.script, shlex.split(options.args))
    wanted = {name: _find(options.script, defined, name) for name in ("model", "batch")}
    given = {name: defined[name] for name in ("loss", "optimizer") if callable(defined.get(name))}

    from meshloom.nn import autoplan

    found = autoplan(
        wanted["model"],
        wanted["batch"],
        machine,
        options.devices,
        options.memory,
        mode=options.mode,
        keep=options.keep,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
        **given,
    )
    found.report(options.out)
    print(f"{found}\n\nwrote {options.out}")
    if options.toml is not None:
        options.toml.write_text(found.plan.to_toml(), encoding="utf-8")
        print(f"wrote {options.toml}: {call_of(found.best, str(options.toml))}")


def call_of(best: Any, path: str) -> str:
    """The call that puts the model on the mesh by the plan in a file."""
    if best.stages is None:
        return f"loom.parallelize(model, {best.mesh!r}, {path!r})"
    begins, count = list(best.stages.begins), best.stages.micro_batches
    return f"loom.pipeline(model, {begins}, {best.mesh!r}, micro_batches={count}, plan={path!r}, batch_loss=loss)"


def _find(script: Path, defined: dict[str, Any], name: str) -> Any:
    """What a script defines under a name; a function is called. A model can be called too, but not without a batch."""
    import torch

    found = defined.get(name)
    if found is None:
        raise MeshloomError(
            f"{script} defines no {name}",
            fix="model = ... and batch = ..., or functions of these names that give them",
        )
    return found() if callable(found) and not isinstance(found, torch.nn.Module) else found


def read_size(text: str) -> float:
    """Bytes from text.

    >>> read_size("12G"), read_size("500000")
    (12000000000.0, 500000.0)
    """
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        found = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        found = -1.0
    if not 0 < found < 1e30:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 12G or 80000000000")
    return found
