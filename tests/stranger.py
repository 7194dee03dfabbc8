"""Another user of this machine: it takes the user id `nobody`, and tries what it can on a run that is not its own.

    python stranger.py FOLDER PID,PID,... PORT,PORT,... SECONDS-TO-WAIT-AT-A-DOOR

It prints, as JSON, what it was able to do.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import sockets

NOBODY = 65534
FAILURE = '{"rank": 1, "headline": "a stranger says so", "cause": "a stranger"}'
GARBAGE = [b"\0" * 4096, b"\xff" * 4096, b"GET / HTTP/1.0\r\n\r\n", FAILURE.encode(), os.urandom(65536)]


def attempts(folder: Path, pids: list[int], ports: list[int], patience: float) -> dict[str, Callable[[], object]]:
    """Every attempt by name: it fails with an OSError, or counts as done."""
    tried: dict[str, Callable[[], object]] = {
        "list the folder": lambda: os.listdir(folder),
        "read the store": lambda: (folder / "store").read_bytes(),
        "read a note": lambda: (folder / "notes" / "status 0").read_bytes(),
        "write a note": lambda: (folder / "notes" / "failure").write_text("- " + FAILURE),
        "put a file into the folder": lambda: (folder / "new").write_text(""),
        "remove the folder": lambda: os.rename(folder, folder.with_name("elsewhere")),
    }
    for pid in pids:
        tried |= {
            f"signal {pid}": lambda pid=pid: os.kill(pid, 0),
            f"read the environment of {pid}": lambda pid=pid: Path(f"/proc/{pid}/environ").read_bytes(),
            f"open the output of {pid}": lambda pid=pid: os.open(f"/proc/{pid}/fd/1", os.O_WRONLY),
        }
    return {
        **tried,
        **{f"write to the store on port {port}": lambda port=port: write(port, patience) for port in ports},
    }


def write(port: int, patience: float) -> None:
    """Say to a store that the run has failed; to whatever else listens there, say all kinds of things."""
    if sockets.is_store("127.0.0.1", port, patience):
        import torch.distributed as dist

        dist.TCPStore("127.0.0.1", port, wait_for_workers=False).set("meshloom/failure", FAILURE)
        return
    for text in GARBAGE:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as call:
            call.sendall(text)
    raise ConnectionError("nobody listened to it")


def try_all(tried: dict[str, Callable[[], object]]) -> list[str]:
    done = []
    for name, act in tried.items():
        try:
            act()
        except OSError:
            continue
        done.append(name)
    return done


if __name__ == "__main__":
    import encodings.idna  # noqa: F401  (while it is still a user who can read the library)

    import torch.distributed  # noqa: F401

    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    where, processes, doors, seconds = sys.argv[1:]
    numbers = [[int(each) for each in text.split(",") if each] for text in (processes, doors)]
    print(json.dumps(try_all(attempts(Path(where), *numbers, float(seconds)))))
