"""Random programs over 1 to 3 queues: they equal a sequential reference, and the race detector is right about all."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshloom.errors import RaceError
from meshloom.runtime import MeshWorkload, Program, create_mesh_buffer, open_mesh_device
from runtime_programs import Maker, Op, Plan, addresses, execute, races, reference

PROGRAMS = int(os.environ.get("MESHLOOM_CASES", "2000"))
DEVICES, WIDTH = 2, 2


def made(seed: int) -> tuple[Maker, Plan]:
    maker = Maker(seed)
    return maker, maker.make(16)


@pytest.mark.slow
def test_no_ordered_program_is_reported_and_each_equals_the_reference():
    collisions = 0
    for seed in range(PROGRAMS):
        maker, plan = made(seed)
        collisions += len(maker.waits)
        assert execute(plan, check="races", stress=seed) == reference(plan), f"seed {seed}"
    assert collisions > PROGRAMS


@pytest.mark.slow
def test_each_program_with_a_removed_event_is_reported_even_if_it_would_have_been_lucky():
    reported = 0
    for seed in range(PROGRAMS):
        maker, plan = made(seed)
        racy = [broken for wait in maker.waits if races(broken := plan.without(wait), addresses(broken))]
        if not racy:
            continue
        broken = racy[maker.random.randrange(len(racy))]
        with pytest.raises(RaceError, match="not ordered after"):
            execute(broken, check="races", dispatch="slow")  # one after the other: lucky for sure
        reported += 1
    assert reported > PROGRAMS // 2


@pytest.mark.slow
def test_programs_on_threads_equal_the_reference():
    for seed in range(PROGRAMS // 10):
        _, plan = made(seed)
        assert execute(plan, vectorised=None) == reference(plan), f"seed {seed}"


def test_the_judge_finds_a_planted_race_and_accepts_its_repair():
    alloc, write = Op("alloc", buffers=(0,)), Op("write", 0, (0,))
    read = Op("read", 1, (0,))
    assert races(Plan(2, [alloc, write, read]), {0: 0}) == [(1, 2)]
    record, wait = Op("record", 0, event=0), Op("wait", 1, event=0)
    assert races(Plan(2, [alloc, write, record, wait, read]), {0: 0}) == []
    assert races(Plan(2, [alloc, write, Op("finish", 0), read]), {0: 0}) == []
    assert races(Plan(2, [alloc, write, Op("finish", 1), read]), {0: 0}) == [(1, 3)]


def test_a_wrong_result_of_a_random_program_would_be_found():
    plan = Plan(1, [Op("alloc", buffers=(0,)), Op("write", 0, (0,), None, 5), Op("read", 0, (0,))])
    changed = Plan(1, [plan.ops[0], Op("write", 0, (0,), None, 6), plan.ops[2]])
    assert execute(plan) == reference(plan) != reference(changed)


class Runtime(RuleBasedStateMachine):
    """A mesh and a sequential reference, step by step; whoever would collide waits for the other queue first."""

    def __init__(self) -> None:
        super().__init__()
        self.mesh = open_mesh_device((DEVICES,), num_command_queues=3, check="races", memory=64 * 12)
        self.held: list[tuple[Any, torch.Tensor]] = []
        self.traces: list[tuple[Any, list[Any]]] = []
        self.last: dict[int, int] = {}  # by buffer's place in memory: the queue that used it last
        self.reads: list[tuple[Any, list[float]]] = []

    def after(self, queue: int, *buffers: Any) -> Any:
        """The queue, after what other queues did to these buffers."""
        target = self.mesh.queue(queue)
        for buffer in buffers:
            used = self.last.get(buffer.address)
            if used is not None and used != queue:
                target.wait_for_event(self.mesh.queue(used).record_event())
            self.last[buffer.address] = queue
        return target

    @precondition(lambda self: len(self.held) < 5)
    @rule(queue=st.integers(0, 2), value=st.integers(0, 99))
    def alloc(self, queue: int, value: int) -> None:
        buffer = create_mesh_buffer(self.mesh, layout="sharded", global_shape=(4,), shard_shape=(WIDTH,))
        model = torch.full((DEVICES, WIDTH), float(value))
        self.after(queue, buffer).enqueue_write(buffer, model.flatten())
        self.held.append((buffer, model))

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9))
    def free(self, pick: int) -> None:
        buffer, _ = self.held.pop(pick % len(self.held))
        buffer.free()
        self.traces = [(trace, works) for trace, works in self.traces if all(w[1] is not buffer for w in works)]

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9), queue=st.integers(0, 2), place=st.integers(0, 1), value=st.integers(0, 99))
    def write_at(self, pick: int, queue: int, place: int, value: int) -> None:
        buffer, model = self.held[pick % len(self.held)]
        self.after(queue, buffer).enqueue_write(buffer, [float(value)] * WIDTH, coordinate=(place,))
        model[place] = value

    def workload(self, buffer: Any, by: int, place: int | None) -> MeshWorkload:
        made = MeshWorkload()
        made.add_program(
            None if place is None else (place,),
            Program(lambda x, by: x.mul_(3).add_(by).remainder_(1009), updates=[buffer], args={"by": by}),
        )
        return made

    def model(self, value: torch.Tensor, by: int, place: int | None) -> None:
        part = value if place is None else value[place]
        part.mul_(3).add_(by).remainder_(1009)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9), queue=st.integers(0, 2), by=st.integers(0, 99), place=st.none() | st.integers(0, 1))
    def work(self, pick: int, queue: int, by: int, place: int | None) -> None:
        buffer, model = self.held[pick % len(self.held)]
        self.after(queue, buffer).enqueue_workload(self.workload(buffer, by, place))
        self.model(model, by, place)

    @precondition(lambda self: self.held and len(self.traces) < 3)
    @rule(pick=st.integers(0, 9), by=st.integers(0, 99), place=st.none() | st.integers(0, 1))
    def capture(self, pick: int, by: int, place: int | None) -> None:
        buffer, model = self.held[pick % len(self.held)]
        with self.mesh.capture() as trace:
            self.mesh.queue().enqueue_workload(self.workload(buffer, by, place))
            self.mesh.queue().enqueue_workload(self.workload(buffer, by + 1, None))
        self.traces.append((trace, [(model, buffer, by, place), (model, buffer, by + 1, None)]))

    @precondition(lambda self: self.traces)
    @rule(pick=st.integers(0, 9), queue=st.integers(0, 2))
    def replay(self, pick: int, queue: int) -> None:
        trace, works = self.traces[pick % len(self.traces)]
        self.after(queue, works[0][1])
        self.mesh.execute_trace(trace, queue, blocking=False)
        for model, _, by, place in works:
            self.model(model, by, place)

    @precondition(lambda self: self.traces)
    @rule(pick=st.integers(0, 9))
    def release(self, pick: int) -> None:
        trace, _ = self.traces.pop(pick % len(self.traces))
        self.mesh.synchronize()
        trace.release()

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 9), queue=st.integers(0, 2))
    def read(self, pick: int, queue: int) -> None:
        buffer, model = self.held[pick % len(self.held)]
        pending = self.after(queue, buffer).enqueue_read(buffer, blocking=False)
        self.reads.append((pending, model.flatten().tolist()))

    @rule(queue=st.integers(0, 2))
    def finish(self, queue: int) -> None:
        self.mesh.queue(queue).finish()

    @invariant()
    def memory_holds_no_more_than_what_is_live(self) -> None:
        assert self.mesh.memory_usage()[0,].used >= 64 * len(self.held)

    def teardown(self) -> None:
        for pending, expected in self.reads:
            assert pending.result().tolist() == expected
        self.mesh.close()
        assert all(usage.used == 0 for usage in self.mesh.memory_usage().values())


TestRuntime = pytest.mark.slow(Runtime.TestCase)
TestRuntime.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
