"""Asynchronous collectives: started at once, valid after wait(); stress finds a consumer that does not wait."""

from __future__ import annotations

import threading

import pytest
import torch

import meshloom as loom
from meshloom import Mesh, RaceError, Shard
from meshloom.collectives import ASYNCHRONOUS, ON_TENSORS
from meshloom.tensor import collectives

MESH = Mesh(x=2, y=4)
SEEDS = range(200)


def value(seed: int = 0) -> loom.Tensor:
    torch.manual_seed(seed)
    return loom.randn(8, 8, mesh=MESH, placements={"y": Shard(0)})


ARGUMENTS = {
    "all_gather": {"dim": 0}, "reduce_scatter": {"dim": 1}, "all_to_all": {"split_dim": 1, "concat_dim": 0},
    "gather": {"dim": 0}, "scatter": {"dim": 1}, "send_recv": {"source": 0, "destination": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", [each for each in ON_TENSORS if each != "barrier"])
@pytest.mark.parametrize("mode", ["direct", "fabric"])
def test_the_asynchronous_form_gives_what_the_plain_one_gives(name: str, mode: str) -> None:
    x = value()
    options = {"axis": "y", "mode": mode, **ARGUMENTS.get(name, {})}
    expected = getattr(loom.collectives, name)(x, **options)
    found = getattr(loom.collectives, f"{name}_async")(x, **options).wait()
    assert found.topology is expected.topology
    torch.testing.assert_close(found.to_torch(), expected.to_torch(), equal_nan=True)


def test_every_collective_but_the_barrier_has_an_asynchronous_form() -> None:
    assert {each.removesuffix("_async") for each in ASYNCHRONOUS} == set(ON_TENSORS) - {"barrier"}


def test_row_045_all_reduce_async_returns_at_once_and_is_valid_after_its_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    plain = collectives.all_reduce

    def slow(x: loom.Tensor, *args: object, **kwargs: object) -> loom.Tensor:
        if not x.is_meta and loom.runtime.state.shadows is None:
            assert gate.wait(10)
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(collectives, "all_reduce", slow)
    x = value()
    handle = loom.collectives.all_reduce_async(x, axis="y")
    assert not handle.done()
    with pytest.raises(RaceError, match="the result of all_reduce is used while it is under way"):
        _ = handle.tensor
    gate.set()
    torch.testing.assert_close(handle.wait().to_torch(), plain(x, axis="y").to_torch())
    assert handle.done() and handle.tensor is handle.wait()


def test_row_127_collectives_of_two_submeshes_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits until the other has started: one after the other they would never end."""
    both = threading.Barrier(2)
    plain = collectives.all_reduce

    def meeting(x: loom.Tensor, *args: object, **kwargs: object) -> loom.Tensor:
        if loom.runtime.state.shadows is None:
            both.wait(10)
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(collectives, "all_reduce", meeting)
    tensors = [loom.ones(4, mesh=MESH.submesh(x=row), placements="S(0)") for row in range(2)]
    started = [loom.collectives.all_reduce_async(each) for each in tensors]
    assert [handle.wait(10).to_torch().item() for handle in started] == [4.0, 4.0]


def test_a_collective_is_recorded_where_it_is_started_and_forbidden_there() -> None:
    x = value()
    with loom.record() as log:
        handle = loom.collectives.all_reduce_async(x, axis="y")
        assert [event.kind for event in log] == ["all_reduce"]
        handle.wait()
    assert len(log) == 1
    with loom.communication("forbid"), pytest.raises(loom.CommunicationError):
        loom.collectives.all_reduce_async(x, axis="y")


def test_gradients_flow_through_an_asynchronous_collective() -> None:
    x, y = value().requires_grad_(), value().requires_grad_()
    loom.collectives.all_reduce(x, axis="y").square().sum().backward()
    loom.collectives.all_reduce_async(y, axis="y").wait().square().sum().backward()
    torch.testing.assert_close(y.grad.to_torch(), x.grad.to_torch())


def ordered(seed: int) -> torch.Tensor:
    """Three collectives under way at once, each waited for before its result is used."""
    with loom.stress(seed):
        first = loom.collectives.all_reduce_async(value(1), axis="y")
        second = loom.collectives.all_gather_async(value(2), 0, axis="y")
        third = loom.collectives.all_reduce_async(value(3), axis="y", op="max")
        total = first.wait() + third.wait()
        return total.to_torch() + second.wait().to_torch()[:2]


def racing(seed: int) -> torch.Tensor:
    """The same, but the third result is used without waiting."""
    with loom.stress(seed):
        first = loom.collectives.all_reduce_async(value(1), axis="y")
        second = loom.collectives.all_gather_async(value(2), 0, axis="y")
        third = loom.collectives.all_reduce_async(value(3), axis="y", op="max")
        total = first.wait() + third.tensor
        return total.to_torch() + second.wait().to_torch()[:2]


def expected() -> torch.Tensor:
    one, two, three = value(1), value(2), value(3)
    total = loom.collectives.all_reduce(one, axis="y") + loom.collectives.all_reduce(three, axis="y", op="max")
    return total.to_torch() + two.to_torch()[:2]


def test_row_098_a_planted_race_is_found_and_a_correct_program_passes_200_seeds() -> None:
    right = expected()
    assert all(torch.equal(ordered(seed), right) for seed in SEEDS)
    wrong = [seed for seed in SEEDS if not torch.equal(racing(seed), right)]
    assert 20 < len(wrong) <= 200, "the race hides behind the order of completion"


def test_a_seed_repeats_its_order() -> None:
    for seed in (3, 11, 42):
        torch.testing.assert_close(racing(seed), racing(seed), equal_nan=True, rtol=0, atol=0)


def test_what_nobody_waited_for_is_complete_when_the_scope_ends() -> None:
    with loom.stress(5):
        handle = loom.collectives.all_reduce_async(value(), axis="y")
    assert handle.done()
    torch.testing.assert_close(handle.tensor.to_torch(), loom.collectives.all_reduce(value(), axis="y").to_torch())


def test_stress_may_be_asked_of_one_call() -> None:
    handle = loom.collectives.all_reduce_async(value(), axis="y", stress=True)
    torch.testing.assert_close(handle.wait().to_torch(), loom.collectives.all_reduce(value(), axis="y").to_torch())


def test_an_error_of_the_work_is_raised_at_wait_and_one_of_the_arguments_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(loom.MeshError, match="the mesh has no axis 'z'"):
        loom.collectives.all_reduce_async(value(), axis="z")
    plain = collectives.all_reduce

    def broken(x: loom.Tensor, *args: object, **kwargs: object) -> loom.Tensor:
        if loom.runtime.state.shadows is None:
            raise RuntimeError("a link fell out")
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(collectives, "all_reduce", broken)
    handle = loom.collectives.all_reduce_async(value(), axis="y")
    with pytest.raises(RuntimeError, match="a link fell out"):
        handle.wait()


def test_waiting_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = collectives.all_reduce
    gate = threading.Event()

    def stuck(x: loom.Tensor, *args: object, **kwargs: object) -> loom.Tensor:
        if loom.runtime.state.shadows is None:
            gate.wait(10)
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(collectives, "all_reduce", stuck)
    handle = loom.collectives.all_reduce_async(value(), axis="y")
    with pytest.raises(TimeoutError):
        handle.wait(timeout=0.05)
    gate.set()
    handle.wait()
