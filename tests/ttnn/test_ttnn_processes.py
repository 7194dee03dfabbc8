"""A mesh of ttnn on several processes: each holds its own box, and all of them give what one process gives."""

from __future__ import annotations

import os
import pickle
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import faults
import namespaces
import ranks
import ttnn_rank_cases

sys.path.append(str(Path(__file__).parents[2] / "examples"))

COUNTS = (2, 4)
MODELS = ("mlp", "decoder", "moe")
SINGLE = ("bytes_held", "scopes")  # what differs from process to process
NAMES = tuple(name for name in ttnn_rank_cases.PROGRAMS if name not in SINGLE)
GRIDS = [(1, 4), (3, 4), (4, 1)]  # 3x4 is split by columns: no process holds one run of devices
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
BFLOAT16 = {"rtol": 2.0**-7, "atol": 1e-3}  # a unit of the last place: sums in float32 may come in another order


@cache
def on_ranks(count: int, names: tuple[str, ...], shape: tuple[int, ...]) -> list[Any]:
    return ranks.run(count, "ttnn_rank_cases:run", names, shape, timeout=300)


@cache
def alone(name: str, shape: tuple[int, ...]) -> Any:
    return ttnn_rank_cases.run([name], shape)[name]


def check_same(found: Any, wanted: Any, where: str) -> None:
    """Raise unless both are the same, tensors but for the order of sums."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), where
        near = BFLOAT16 if wanted.dtype is torch.bfloat16 else TOLERANCE
        torch.testing.assert_close(found, wanted, **near, equal_nan=True, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key, each in wanted.items():
            check_same(found[key], each, f"{where}[{key}]")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for number, each in enumerate(wanted):
            check_same(found[number], each, f"{where}[{number}]")
    else:
        assert found == wanted, f"{where}: {found!r} and {wanted!r}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", COUNTS)
def test_row_173_processes_give_what_one_process_gives(count: int, name: str) -> None:
    for rank, found in enumerate(on_ranks(count, NAMES, (2, 4))):
        check_same(found[name], alone(name, (2, 4)), f"{name} on rank {rank} of {count}")


@pytest.mark.parametrize("shape", GRIDS)
def test_meshes_of_other_shapes_give_it_too(shape: tuple[int, ...]) -> None:
    names = tuple(name for name in NAMES if name not in MODELS)
    for rank, found in enumerate(on_ranks(2, names, shape)):
        for name in names:
            check_same(found[name], alone(name, shape), f"{name} on {shape}, rank {rank}")


def test_a_wrong_part_is_noticed() -> None:
    wanted = alone("all_gather", (2, 4))
    changed = [[dict(each) for each in dim] for dim in wanted]
    changed[1][3]["parts"] = [part + (number == 5) for number, part in enumerate(changed[1][3]["parts"])]
    with pytest.raises(AssertionError, match=r"all_gather\[1\]\[3\]\[parts\]\[5\]"):
        check_same(changed, wanted, "all_gather")


@pytest.mark.parametrize("count", COUNTS)
def test_all_processes_together_hold_a_tensor_once(count: int) -> None:
    whole = ttnn_rank_cases.run(["bytes_held"])["bytes_held"]
    held = [each["bytes_held"] for each in on_ranks(count, SINGLE, (2, 4))]
    for name, size in whole.items():
        assert [each[name] for each in held] == [size // count] * count, name
    assert whole["mapped"] == 64 * 64 * 4


@pytest.mark.parametrize("count", COUNTS)
def test_every_process_says_which_devices_it_holds(count: int) -> None:
    seen = [each["scopes"] for each in on_ranks(count, SINGLE, (2, 4))]
    places = [(row, column) for row in range(2) for column in range(4)]
    assert sorted(place for each in seen for place in each["here"]) == places
    assert [each["here"] for each in seen] == [
        places[rank * 8 // count : (rank + 1) * 8 // count] for rank in range(count)
    ]
    for each in seen:
        assert (each["ids"], each["shape"]) == (list(range(8)), (2, 4))
        assert each["recorded"] == ["all_gather"]  # the add is local


def test_a_mesh_that_processes_cannot_split_is_whole_in_each_with_one_warning() -> None:
    for caught, shape, total in ranks.run(3, "ttnn_rank_cases:unsplit"):
        (warning,) = caught
        assert "3 processes cannot split" in warning and "1, 2, 4, 8" in warning
        assert shape == [2, 4, 1, 8]
        torch.testing.assert_close(total, ttnn_rank_cases.numbers(8, 8).sum(0, keepdim=True), **TOLERANCE)


def test_what_a_split_mesh_cannot_do_is_refused_in_plain_words() -> None:
    for rank, told in enumerate(ranks.run(2, "ttnn_rank_cases:refusals")):
        assert told == [
            "ttnn.all_gather: a trace cannot hold a collective on a mesh that several processes split",
            "a socket on MeshDevice(2x4 grid, 8 devices), which several processes split, is not supported",
            f"another process holds the device at {(1 - rank, 0)}",
        ]


# what the environment binds


def bind(host_ranks: tuple[int, ...] = (0, 1), **more: tuple[str, str]) -> list[dict[str, str]]:
    """The variables of two ranks of one mesh."""
    return [
        {"TT_MESH_ID": "0", "TT_MESH_HOST_RANK": str(host), **{name: texts[rank] for name, texts in more.items()}}
        for rank, host in enumerate(host_ranks)
    ]


VISIBLE = [
    (("0,1,2,3", "4,5,6,7"), [0, 1, 2, 3, 4, 5, 6, 7]),
    (("5,4,7,6", "0,1,2,3"), [5, 4, 7, 6, 0, 1, 2, 3]),
    (("0,1,2,3", "0,1,2,3"), [0, 1, 2, 3, 4, 5, 6, 7]),  # of two hosts: counted through
]


@pytest.mark.parametrize(("visible", "ids"), VISIBLE)
def test_row_059_and_173_the_devices_of_a_box_are_those_that_its_process_sees(
    visible: tuple[str, str], ids: list[int]
) -> None:
    for rank, found in enumerate(ranks.run(2, "ttnn_rank_cases:bound", bind(TT_VISIBLE_DEVICES=visible))):
        mine = [(rank, column) for column in range(4)]
        here = [rank == 0] * 4 + [rank == 1] * 4
        assert found["ids"] == (ids, ids[4 * rank : 4 * rank + 4])
        assert found["shapes"] == ((2, 4), (1, 4), 8, 4)
        assert (found["offset"], found["range"]) == ((rank, 0), mine)
        assert found["system"] == ((1, 8), (1, 4), False)
        assert found["here"] == found["in the buffer"] == found["held"] == here
        assert found["sum"] == pytest.approx(float(ttnn_rank_cases.numbers(24, 24).sum()), abs=1e-3)


def test_the_devices_of_columns_are_those_of_the_process_that_holds_the_columns() -> None:
    variables = bind(TT_VISIBLE_DEVICES=("0,1,2,3,4,5", "6,7,8,9,10,11"))
    for rank, found in enumerate(ranks.run(2, "ttnn_rank_cases:bound", variables, (3, 4))):
        assert found["ids"][0] == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
        assert found["ids"][1] == [list(range(6)), list(range(6, 12))][rank]
        assert found["offset"] == (0, 2 * rank)


IMPOSSIBLE = [
    (bind((0, 2)), (None, "host rank 2 is out of range for 2 processes (2x1)")),
    (
        bind((1, 0)),
        (
            "MESHLOOM_HOST_RANK=1 says place (1, 0), but rank 0 holds place (0, 0)",
            "MESHLOOM_HOST_RANK=0 says place (0, 0), but rank 1 holds place (1, 0)",
        ),
    ),
    (
        bind(TT_VISIBLE_DEVICES=("0,1,2,3,4,5", "0,1")),
        ("needs 4 devices of each of 2 processes, and rank 1 sees 2",) * 2,
    ),
    ([{"TT_MESH_ID": "0"}, {}], ("rank 1 has no mesh id while others do",) * 2),
    ([{"TT_VISIBLE_DEVICES": "0"}, {}], ("rank 1 does not name the devices that it sees, while others do",) * 2),
    ([{"TT_MESH_ID": "0"}, {"TT_MESH_HOST_RANK": "1"}], (None, "TT_MESH_HOST_RANK=1 is set without a mesh id")),
]


@pytest.mark.parametrize(("variables", "wanted"), IMPOSSIBLE)
def test_row_059_and_173_what_cannot_be_bound_is_refused(
    variables: list[dict[str, str]], wanted: tuple[str | None, ...]
) -> None:
    """None: a rank that is well itself, and is told that the other one failed."""
    try:
        told = ranks.run(2, "ttnn_rank_cases:bound", variables, environment={"MESHLOOM_TIMEOUT": "8"})
    except AssertionError as error:
        told = [str(error)] * 2
    for found, text in zip(told, wanted, strict=True):
        assert text is None or text in str(found)


def test_a_host_rank_that_no_process_has_is_refused_alone() -> None:
    (told,) = ranks.run(1, "ttnn_rank_cases:bound", [{"TT_MESH_ID": "0", "TT_MESH_HOST_RANK": "1"}])
    assert told == "host rank 1 is out of range for 1 processes (1x1)"


# two hosts

BINDINGS = """
rank_bindings:
  - {rank: 0, mesh_id: 0, mesh_host_rank: 0, host: a, visible_devices: [0, 1, 2, 3]}
  - {rank: 1, mesh_id: 0, mesh_host_rank: 1, host: b, visible_devices: [0, 1, 2, 3]}
"""
TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_rank_binding_file_starts_the_same_program_on_two_hosts(tmp_path: Path) -> None:
    (tmp_path / "ranks.yaml").write_text(BINDINGS)
    paths = [str(TESTS), str(TESTS.parent / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**faults.clean(), "MESHLOOM_SECRET": "0123456789abcdef", "PYTHONPATH": os.pathsep.join(paths)}
    command = [
        sys.executable,
        "-m",
        "meshloom",
        "run",
        "--hosts",
        "a:1,b:1",
        "--bindings",
        str(tmp_path / "ranks.yaml"),
    ]
    program = [str(TESTS / "ttnn_host_program.py"), str(tmp_path), *MODELS]
    with namespaces.pair() as hosts:
        command += ["--rdzv-endpoint", f"{hosts[0].address}:{namespaces.PORT}", "--start-timeout", "60"]
        started = [
            host.start([*command, "--node-rank", str(node), *program], tmp_path / f"host-{node}", environment)
            for node, host in enumerate(hosts)
        ]
        faults.wait_for(started, tmp_path)
        said = "".join((tmp_path / f"host-{node}").read_text() for node in range(2))
        assert [each.returncode for each in started] == [0, 0], said
    for rank in range(2):
        found = pickle.loads((tmp_path / f"found-{rank}").read_bytes())
        assert found["scopes"]["here"] == [(rank, column) for column in range(4)]
        for name in MODELS:
            check_same(found[name], alone(name, (2, 4)), f"{name} on host {rank}")
