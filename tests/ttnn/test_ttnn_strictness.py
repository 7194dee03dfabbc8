"""What the original refuses is told once per line, raised, or left unsaid; and costs nothing for calls seen before."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshloom import ttnn
from meshloom.ttnn.ops import calling
from ttnn_cases import mesh

INTEGERS = "Unary: UnaryOpType::SQRT does not support integer input dtype DataType::INT32"


def whole(*shape: int) -> Any:
    return ttnn.from_torch(torch.ones(shape, dtype=torch.int32), device=mesh((1, 2)), layout=ttnn.TILE_LAYOUT)


@pytest.fixture(autouse=True)
def level() -> Iterator[None]:
    with ttnn.strictness("warn"):
        yield


def told(call: Any) -> list[str]:
    """The headlines of what was told while a call ran."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    assert all(each.category is ttnn.RefusalWarning for each in seen)
    return [str(each.message).partition("\n")[0] for each in seen]


def test_a_refusal_is_told_once_on_each_line_with_the_reason_of_the_original() -> None:
    x = whole(3, 5)

    def twice() -> None:
        for _ in range(2):
            ttnn.sqrt(x)

    assert told(twice) == [f"TTNN refuses this call: {INTEGERS}"]
    assert told(twice) == []
    assert told(lambda: ttnn.sqrt(x)) == [f"TTNN refuses this call: {INTEGERS}"], "another line, a call seen before"


def test_a_warning_names_the_line_of_the_program() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ttnn.sqrt(whole(3, 6))
    assert seen[0].filename == __file__ and "fix" not in str(seen[0].message)


def test_original_raises_every_time_and_lenient_says_nothing() -> None:
    x = whole(4, 4)
    with ttnn.strictness("original"):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="does not support integer input dtype"):
                ttnn.sqrt(x)
    with ttnn.strictness("lenient"):
        assert told(lambda: ttnn.sqrt(x)) == []
        assert ttnn.to_torch(ttnn.sqrt(x)).tolist() == [[1] * 4] * 4


def test_a_call_holds_from_there_on_and_a_scope_gives_back_what_was_there() -> None:
    ttnn.strictness("original")
    with ttnn.strictness("lenient"):
        ttnn.sqrt(whole(2, 2))
    with pytest.raises(RuntimeError, match="integer"):
        ttnn.sqrt(whole(2, 2))
    with pytest.raises(TypeError, match="strictness 'strict' is not known"):
        ttnn.strictness("strict")


def test_what_the_original_takes_is_not_told() -> None:
    x = whole(2, 3)
    floats = ttnn.typecast(x, ttnn.float32)
    with ttnn.strictness("original"):
        ttnn.sqrt(floats)
        ttnn.add(x, x)
        ttnn.add(floats, ttnn.typecast(x, ttnn.bfloat16))
        ttnn.add(x, 2)
        ttnn.addcmul(floats, floats, floats)


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (lambda x, y: ttnn.add(x, y), "Mixed dtype is not supported for binary operation BinaryOpType::ADD"),
        (lambda x, y: ttnn.multiply_(y, x), "BinaryOpType::MUL, dtype A: DataType::FLOAT32, dtype B: DataType::INT32"),
        (lambda x, y: x - y, "BinaryOpType::SUB"),
        (lambda x, y: ttnn.reciprocal(x), "UnaryOpType::RECIP"),
        (lambda x, y: ttnn.matmul(x, x), "Unsupported data format"),
        (lambda x, y: ttnn.max(ttnn.typecast(x, ttnn.uint16)), "generic reduction - got DataType::UINT16"),
        (lambda x, y: ttnn.to_dtype(x, ttnn.float32), "Expected Tensor with HostStorage"),
    ],
)
def test_families_refuse_by_their_table(refused: Any, reason: str) -> None:
    x = whole(32, 32)
    y = ttnn.typecast(x, ttnn.float32)
    with ttnn.strictness("original"), pytest.raises(RuntimeError, match=reason):
        refused(x, y)


CORES = ttnn.CoreRangeSet([ttnn.CoreRange(ttnn.CoreCoord(0, 0), ttnn.CoreCoord(1, 0))])
BLOCK, HEIGHT, WIDTH = (getattr(ttnn.TensorMemoryLayout, f"{each}_SHARDED") for each in ("BLOCK", "HEIGHT", "WIDTH"))


@pytest.mark.parametrize(
    ("layout", "part", "reason"),
    [
        (HEIGHT, (32, 64), "Number of shards along height 4 must not exceed number of cores 2"),
        (HEIGHT, (64, 32), "Shard width 32 must match physical width 64 for height sharded"),
        (WIDTH, (64, 32), "Shard height 64 must match physical height 128 for width sharded"),
        (WIDTH, (128, 20), r"Physical shard shape \(128, 20\) must be tile \{32, 32\} sized!"),
        (
            BLOCK,
            (64, 32),
            "Number of shards along height 2 must not exceed number of rows 1 for row major orientation!",
        ),
        (HEIGHT, (64, 64), None),
        (WIDTH, (128, 32), None),
        (BLOCK, (128, 32), None),
    ],
)
def test_shards_are_those_that_the_cores_can_hold(layout: Any, part: Any, reason: str | None) -> None:
    config = ttnn.MemoryConfig(layout, ttnn.BufferType.L1, ttnn.ShardSpec(CORES, part, ttnn.ShardOrientation.ROW_MAJOR))
    x = ttnn.from_torch(torch.ones(2, 64, 64), layout=ttnn.TILE_LAYOUT, device=mesh((1, 2)))
    with ttnn.strictness("original"):
        if reason is None:
            assert ttnn.to_memory_config(x, config).memory_config() == config
        else:
            with pytest.raises(RuntimeError, match=reason):
                ttnn.to_memory_config(x, config)
    with ttnn.strictness("lenient"):
        assert torch.equal(ttnn.to_torch(ttnn.to_memory_config(x, config)), torch.ones(2, 64, 64))


def test_a_call_seen_before_is_not_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    x = ttnn.from_torch(torch.ones(3, 7), device=mesh((1, 2)), layout=ttnn.TILE_LAYOUT)
    ttnn.add(x, x)
    monkeypatch.setattr(calling, "judge", None)
    ttnn.add(x, x)
    with pytest.raises(TypeError):
        ttnn.add(x, ttnn.typecast(x, ttnn.bfloat16))


def test_what_our_pages_offer_beyond_the_original_is_refused_at_its_level_only() -> None:
    two = mesh((1, 2))
    x = ttnn.from_torch(torch.ones(4, 4), device=two)
    mapper = ttnn.ShardTensorToMesh(two, dim=0)
    refused = {
        "Supply a mesh composer": lambda: ttnn.to_torch(x),
        r"Shard shape mismatch: expected Shape\(\[2, 4\]\) but got Shape\(\[1, 4\]\)": lambda: ttnn.from_torch(
            torch.ones(3, 4), mesh_mapper=mapper
        ),
        "un-initialized fabric context": lambda: ttnn.all_gather(x, dim=0),
    }
    for reason, call in refused.items():
        assert told(call) == []
        with ttnn.strictness("original"), pytest.raises(RuntimeError, match=reason):
            call()
