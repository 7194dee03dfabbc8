"""Full sharding between processes: weights are gathered for a use and not kept, gradients scattered; all is dense.

With MESHLOOM_MODELS=all in the environment, as in `make full`, on more processes and devices.
"""

from __future__ import annotations

import os

import pytest

import ranks
import weight_cases

IS_WHOLE = os.environ.get("MESHLOOM_MODELS") == "all"
AROUND = [(2, 1, "sample"), (3, 1, "always"), (2, 3, "off"), (4, 1, "sample")]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_steps_are_dense_on_every_mesh_and_weights_are_gathered(count: int) -> None:
    for found in ranks.run(count, "weight_cases:layouts"):
        assert all(found.values()), found


@pytest.mark.parametrize("how", ["trained", "frozen", "recomputed", "turned"])
def test_after_forward_no_storage_of_a_gathered_weight_is_alive(how: str) -> None:
    for in_all, after_forward, after_backward in ranks.run(2, "weight_cases:nothing_kept", how):
        assert in_all > 10 and after_forward == after_backward == 0, (in_all, after_forward, after_backward)


def test_the_look_at_storages_finds_what_autograd_keeps() -> None:
    for in_all, after_forward, after_backward in ranks.run(2, "weight_cases:nothing_kept", "kept"):
        assert in_all > 10 and after_forward > 5 and after_backward == 0


def test_under_autocast_no_cast_copy_of_a_gathered_weight_is_kept() -> None:
    for kept, held in ranks.run(2, "weight_cases:kept_under_autocast"):
        assert kept and not kept & held, kept & held


def test_a_forward_pass_without_gradients_keeps_nothing() -> None:
    assert all(found > 10 for found in ranks.run(2, "weight_cases:evaluation"))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "devices", "check"), AROUND if IS_WHOLE else AROUND[:1])
def test_gradients_are_dense_whatever_happens_around_them(count: int, devices: int, check: str) -> None:
    for found in ranks.run(count, "weight_cases:one_thing_each", devices, check, timeout=150):
        assert all(found.values()), found


def test_small_weights_and_gradients_travel_together_once_the_order_is_known() -> None:
    for told in ranks.run(2, "weight_cases:joined"):
        assert told[0]["all_gather"] > 20
        assert told[-1]["all_gather"] < 8 and told[-1]["reduce_scatter"] == 1
        assert told[-1] == told[-2]


def test_one_large_weight_is_gathered_ahead_and_no_more() -> None:
    for seen in ranks.run(2, "weight_cases:ahead"):
        assert len(seen) == 3 * 11  # the first weight of six is not needed in backward
        assert not any(is_there for is_there, _, _ in seen[:11])
        for forward in (seen[11:17], seen[22:28]):
            assert [is_there for is_there, _, _ in forward] == [False, True, True, True, True, True]
        for backward in (seen[17:22], seen[28:]):
            assert [is_there for is_there, _, _ in backward] == [False, True, True, True, True]
        assert all(on_their_way <= largest for _, on_their_way, largest in seen)


def test_the_weights_of_the_next_unit_of_a_plan_are_on_their_way() -> None:
    for seen in ranks.run(2, "weight_cases:ahead", True):
        weight, unit = 96 * 96 * 4, 2 * 96 * 96 * 4
        assert {largest for _, _, largest in seen} == {unit}
        assert max(on_their_way for _, on_their_way, _ in seen) == unit
        assert all(is_there for is_there, _, _ in seen[12:17])
        assert seen[11][1] == unit and seen[16][1] == 0 and seen[15][1] == weight


def test_processes_do_the_same_whenever_a_weight_goes() -> None:
    assert ranks.run(2, "weight_cases:gone")[0] == 0


def test_two_gradients_are_under_way_and_no_more() -> None:
    assert ranks.run(2, "weight_cases:in_flight") == [2, 2]


def test_a_weight_that_was_written_to_is_gathered_again() -> None:
    ranks.run(2, "weight_cases:stale")


def test_a_stale_weight_would_be_noticed() -> None:
    assert all("result" in text for text in ranks.run(2, "weight_cases:stale_with_a_fault"))


def test_the_gather_of_backward_is_recorded_and_forbidden_with_the_line_of_forward() -> None:
    for told, lines, text in ranks.run(2, "weight_cases:events"):
        linear = 2 * 3 + 1
        biases = 2 * 3  # gathered for the use, and not needed in backward
        assert told == {
            ("forward", "all_gather"): linear + biases,
            ("backward", "all_gather"): linear,
            ("backward", "reduce_scatter"): linear + biases,
        }
        assert lines == {"weight_cases.py"}
        assert text.startswith("linear would communicate") and "where communication is forbidden" in text


def test_a_dry_run_in_one_process_tells_the_collectives_of_two_real_ones() -> None:
    alone = weight_cases.told_by_a_dry_run()
    for found in ranks.run(2, "weight_cases:told_by_a_dry_run"):
        assert found == alone
    assert weight_cases.told_by_a_dry_run("meta") == alone
    weights = 2 * 3 + 1 + 2 * 3  # of the products, and weight and bias of the norms
    for how, expected in {"trained": weights, "turned": weights, "recomputed": 1}.items():
        assert sum(n for key, n in alone[how].items() if key[:2] == ("backward", "all_gather")) == expected, how


def test_dry_runs_of_processes_without_data_tell_the_same() -> None:
    assert ranks.run(2, "weight_cases:told_by_a_dry_run", "meta") == [weight_cases.told_by_a_dry_run("meta")] * 2
