"""Gradients of replicated leaves are summed in buckets, while backward goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

import ranks


@pytest.mark.parametrize("count", [2, 3])
def test_a_large_gradient_leaves_before_backward_has_ended(count: int) -> None:
    for difference, seen in ranks.run(count, "bucket_cases:gradients"):
        assert difference < 5e-6
        large, wait = seen.index(f"sum of {700 * 3000}"), seen.index("wait")
        assert large < seen.index("layer 1") < wait
        rest = 64 * 700 + 700 + 3000 + 3000 * 40 + 40
        assert [each for each in seen if each.startswith("sum")] == [f"sum of {700 * 3000}", f"sum of {rest}"]


def test_small_gradients_fill_buckets() -> None:
    each = 16 * 16 + 16
    for (close, one), (also_close, four) in zip(
        ranks.run(2, "bucket_cases:small_buckets", 100 * each),
        ranks.run(2, "bucket_cases:small_buckets", 2 * each),
        strict=True,
    ):
        assert close < 5e-6 and also_close < 5e-6
        assert (one, four) == (1, 4)


def test_a_failed_backward_leaves_the_next_one_right() -> None:
    for is_told, difference in ranks.run(2, "bucket_cases:failure"):
        assert is_told and difference < 5e-6


def test_a_second_backward_adds_to_the_gradient_that_is_there() -> None:
    assert ranks.run(2, "bucket_cases:kept") == [(True, True, True)] * 2


def test_small_gradients_have_the_memory_of_the_last_pass_unless_somebody_holds_it() -> None:
    assert ranks.run(2, "bucket_cases:rooms") == [[True, False, False, False]] * 2


def test_nothing_leaves_where_communication_is_forbidden() -> None:
    assert ranks.run(2, "bucket_cases:forbidden") == [[], []]


def test_asynchronous_collectives_go_on_while_the_program_does(tmp_path: Path) -> None:
    environment = {"MESHLOOM_CHECK": "off"}  # a check waits for the other process
    for found, is_done in ranks.run(2, "bucket_cases:overlap", str(tmp_path), environment=environment):
        assert found == [3.0, 3.0, 3.0] and is_done


def test_a_collective_that_nobody_joins_ends_in_an_error_where_it_is_waited_for() -> None:
    environment = {"MESHLOOM_CHECK": "off"}
    with pytest.raises(
        AssertionError, match=r"all_reduce \d+ of .* at bucket_cases.py:\d+ on rank 0 has waited longer"
    ):
        ranks.run(2, "bucket_cases:late", environment=environment)
