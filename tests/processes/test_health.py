"""What a process says of the others, in the moments in which several of them fail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from meshloom.mesh.process import HERE
from meshloom.processes.health import Watch
from meshloom.processes.notes import FolderNotes
from meshloom.processes.status import LEFT
from meshloom.processes.store import Board

SEEN = "all_reduce 3 of sum on rank 1 has waited longer than 4 s: rank 2 is running at program.py:7"


@pytest.mark.parametrize("is_second", [False, True])
def test_who_gives_up_second_says_what_the_first_saw(
    is_second: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HERE, "rank", 0)
    monkeypatch.setattr(HERE, "count", 3)
    board = Board(FolderNotes(tmp_path))
    watch = Watch(SimpleNamespace(timeout=4), board)
    watch.kind, watch.of, watch.number, watch.grid = "all_reduce", "sum", 3, (3,)
    if is_second:  # rank 2, which kept the others waiting, has been ended in the meantime
        board.write("failure", {"rank": 1, "headline": SEEN, "cause": SEEN}, 5)
    ended = {**LEFT, "state": "raised", "call": "all_reduce of sum", "line": "program.py:9"}
    for rank, number in ((1, 3), (2, 2)):
        board.write(f"status {rank}", {**ended, "number": number}, 5)
    error = watch._give_up("all_reduce 3 of sum on rank 0 has waited longer than 4 s")
    told = str(error).splitlines()[0]
    fate = SEEN if is_second else "rank 2 has raised an error"
    assert told == f"all_reduce 3 of sum on rank 0 has waited longer than 4 s: {fate}"
    assert board.read("failure", 5)["headline"] == (SEEN if is_second else told)
