"""What any card must do, whoever makes it: subclass `CardConformance` and say how a driver is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from meshloom.runtime import (
    MeshWorkload,
    Program,
    all_gather,
    all_reduce,
    create_mesh_buffer,
    open_mesh_device,
    reduce_scatter,
)
from meshloom.runtime.card import Card, Driver, LinkedCard

IDS = (0, 1, 2, 3)


def double(x: torch.Tensor, y: torch.Tensor, by: float) -> None:
    y.copy_(x * by)


class CardConformance:
    """The suite: the card by itself, then through the mesh."""

    def driver(self) -> Driver:
        raise NotImplementedError

    @pytest.fixture
    def card(self) -> Iterator[Card]:
        card = self.driver().open(1)
        yield card
        card.close()

    def test_it_satisfies_the_protocols(self, card):
        assert isinstance(self.driver(), Driver) and isinstance(card, Card)
        assert self.driver().enumerate() is None or set(IDS) <= set(self.driver().enumerate())

    def test_it_says_what_it_is(self, card):
        info = card.info()
        assert info.index == 1 and info.path
        assert info.chip.dram > 0 and info.chip.banks > 0 and info.chip.l1 > 0

    def test_what_was_written_is_read(self, card):
        memory = card.alloc(0, (2, 3), torch.float32)
        value = torch.arange(6.0).view(2, 3)
        card.write(memory, value)
        assert card.read(memory).equal(value)
        card.write(memory, torch.tensor([9.0, 8.0]), (slice(None), 1))
        assert card.read(memory, (0, slice(0, None, 2))).tolist() == [0, 2]
        assert card.read(memory).tolist() == [[0, 9, 2], [3, 8, 5]]
        card.free(memory)

    def test_what_was_read_is_a_copy(self, card):
        memory = card.alloc(0, (2,), torch.int64)
        card.write(memory, torch.tensor([1, 2]))
        card.read(memory).zero_()
        assert card.read(memory).tolist() == [1, 2]

    def test_two_pieces_of_memory_are_apart(self, card):
        first, second = card.alloc(0, (4,), torch.int32), card.alloc(64, (4,), torch.int32)
        card.write(first, torch.ones(4, dtype=torch.int32))
        card.write(second, torch.zeros(4, dtype=torch.int32))
        assert card.read(first).tolist() == [1] * 4

    def test_a_kernel_runs_on_memory_with_arguments(self, card):
        x, y = card.alloc(0, (3,), torch.float32), card.alloc(64, (3,), torch.float32)
        card.write(x, torch.tensor([1.0, 2.0, 3.0]))
        loaded = card.load(self.driver().compile(double), double)
        for by in (2.0, 5.0):
            assert card.wait(card.launch(loaded, [x, y], {"by": by}), 10.0)
            assert card.read(y).tolist() == [by, 2 * by, 3 * by]

    def test_a_kernel_that_raises_says_so_and_the_card_goes_on(self, card):
        def broken(x: torch.Tensor) -> None:
            raise ZeroDivisionError("planted")

        x = card.alloc(0, (1,), torch.float32)
        with pytest.raises(ZeroDivisionError):
            card.wait(card.launch(card.load(self.driver().compile(broken), broken), [x], {}), 10.0)
        card.write(x, torch.ones(1))
        assert card.read(x).tolist() == [1.0]

    def test_closing_twice_is_harmless(self, card):
        card.close()
        card.close()

    def test_a_sharded_buffer_goes_through_the_mesh_and_back(self):
        with open_mesh_device((2, 2), driver=self.driver()) as mesh:
            x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 6), shard_shape=(2, 3))
            value = torch.arange(24.0).view(4, 6)
            mesh.queue().enqueue_write(x, value)
            assert mesh.queue().enqueue_read(x).equal(value)
            assert mesh.queue().enqueue_read(x, coordinate=(1, 0)).equal(value[2:, :3])
            assert mesh.get_device(1, 0).read(x.handle(1, 0)).equal(value[2:, :3])

    def test_a_replicated_buffer_may_differ_after_a_write_at_one_coordinate(self):
        with open_mesh_device((2, 2), driver=self.driver()) as mesh:
            x = create_mesh_buffer(mesh, global_shape=(3,))
            queue = mesh.queue()
            queue.enqueue_write(x, [1.0, 2.0, 3.0])
            queue.enqueue_write(x, [7.0, 8.0, 9.0], coordinate=(0, 1))
            assert queue.enqueue_read(x, coordinate=(0, 1)).tolist() == [7, 8, 9]
            assert queue.enqueue_read(x, coordinate=(1, 1)).tolist() == [1, 2, 3]

    def test_a_workload_runs_on_its_range_and_a_trace_of_it_again(self):
        with open_mesh_device((2, 2), driver=self.driver(), num_command_queues=2) as mesh:
            first, second = mesh.queue(0), mesh.queue(1)
            x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(2, 2))
            y = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 4), shard_shape=(2, 2))
            workload = MeshWorkload()
            workload.add_program(((0, 0), (0, 1)), Program(double, [x], [y], args={"by": 3.0}))
            workload.add_program((1, 1), Program(double, [x], [y], args={"by": 5.0}))
            first.enqueue_write(x, torch.ones(4, 4))
            first.enqueue_write(y, torch.zeros(4, 4))
            first.enqueue_workload(workload)
            second.wait_for_event(first.record_event())
            expected = torch.tensor([[3.0, 3, 3, 3], [3, 3, 3, 3], [0, 0, 5, 5], [0, 0, 5, 5]])
            assert second.enqueue_read(y).equal(expected)
            with mesh.capture() as trace:
                first.enqueue_workload(workload)
            first.enqueue_write(x, torch.full((4, 4), 2.0))
            mesh.execute_trace(trace)
            assert first.enqueue_read(y).equal(2 * expected)


class LinkConformance(CardConformance):
    """What cards with links must do beyond that: cards 0 and 1 are neighbours."""

    @pytest.fixture
    def pair(self) -> Iterator[tuple[Any, Any]]:
        driver = self.driver()
        cards = driver.open(0), driver.open(1)
        yield cards
        for card in cards:
            card.close()

    def test_links_lead_both_ways_and_have_slots(self, pair):
        assert all(isinstance(card, LinkedCard) for card in pair)
        assert 1 in pair[0].peers() and 0 in pair[1].peers() and 0 not in pair[0].peers()
        count, size = pair[1].slots(0)
        assert count >= 1 and size >= 64

    def test_a_message_is_the_elements_of_an_index_in_row_major_order(self, pair):
        one, other = pair
        value = torch.arange(40.0 * 40).view(40, 40)
        here, there = one.alloc(0, (40, 40), torch.float32), other.alloc(0, (12,), torch.float32)
        one.write(here, value)
        index = (slice(3, 9), slice(30, 34))
        assert one.wait(one.send(here, index, 5, 17, 1, 0), 10.0)
        assert other.wait(other.receive(there, ..., 0, 12, 0, 0, None), 10.0)
        assert other.read(there).equal(value[index].flatten()[5:17])

    @pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
    def test_what_arrives_is_combined_with_what_is_there(self, pair, op):
        one, other = pair
        here, there = one.alloc(0, (2, 3), torch.int32), other.alloc(0, (2, 3), torch.int32)
        mine, theirs = torch.tensor([[1, -2, 3], [4, 5, -6]]), torch.tensor([[-7, 8, 9], [1, 2, 3]])
        one.write(here, theirs)
        other.write(there, mine)
        assert one.wait(one.send(here, (slice(1, 2),), 0, 3, 1, 0), 10.0)
        assert other.wait(other.receive(there, (slice(1, 2),), 0, 3, 0, 0, op), 10.0)
        combined = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}[op]
        assert other.read(there).equal(torch.stack([mine[0], combined(mine[1], theirs[1])]).int())

    def test_slots_hold_messages_until_they_are_taken(self, pair):
        one, other = pair
        count, _ = other.slots(0)
        here, there = one.alloc(0, (1,), torch.float32), other.alloc(0, (1,), torch.float32)
        for slot in range(count):
            one.write(here, torch.tensor([float(slot)]))
            assert one.wait(one.send(here, ..., 0, 1, 1, slot), 10.0)
        for slot in reversed(range(count)):
            assert other.wait(other.receive(there, ..., 0, 1, 0, slot, None), 10.0)
            assert other.read(there).item() == slot

    def test_a_card_copies_within_its_memory(self, pair):
        card, _ = pair
        source, target = card.alloc(0, (3, 4), torch.float32), card.alloc(1 << 16, (2, 2), torch.float32)
        card.write(source, torch.arange(12.0).view(3, 4))
        assert card.wait(card.copy(source, (slice(1, 3), slice(0, 4, 2)), target, ...), 10.0)
        assert card.read(target).tolist() == [[4, 6], [8, 10]]

    def test_collectives_over_links_are_those_of_the_host(self):
        with open_mesh_device((2,), driver=self.driver()) as mesh:
            x = create_mesh_buffer(mesh, layout="sharded", global_shape=(4, 6), shard_shape=(2, 6))
            value = torch.arange(24.0).view(4, 6)
            mesh.queue().enqueue_write(x, value, blocking=True)
            before = mesh.counts["host_bytes"]
            total, whole, part = (
                all_reduce(x, mode="fabric"),
                all_gather(x, mode="fabric"),
                reduce_scatter(x, 1, mode="fabric"),
            )
            assert mesh.counts["host_bytes"] == before
            assert mesh.queue().enqueue_read(total).equal(value[:2] + value[2:])
            assert mesh.queue().enqueue_read(whole).equal(value)
            assert mesh.queue().enqueue_read(part).equal(value[:2] + value[2:])
