"""A mesh of ttnn on several processes: each holds its own box, and all of them give what one process gives."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
import ttnn_rank_cases

sys.path.append(str(Path(__file__).parents[2] / "examples"))

COUNTS = (2, 4)
MODELS = ("mlp", "decoder")
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
def test_processes_give_what_one_process_gives(count: int, name: str) -> None:
    for rank, found in enumerate(on_ranks(count, NAMES, (2, 4))):
        check_same(found[name], alone(name, (2, 4)), f"{name} on rank {rank} of {count}")


@pytest.mark.parametrize("shape", GRIDS)
def test_meshes_of_other_shapes_give_it_too(shape: tuple[int, ...]) -> None:
    names = tuple(name for name in NAMES if name not in ("decoder", "mlp"))
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
