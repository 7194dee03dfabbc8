"""What any card must do, whoever makes it: subclass `CardConformance` and say how a driver is made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from meshloom.runtime import MeshWorkload, Program, create_mesh_buffer, open_mesh_device
from meshloom.runtime.card import Card, Driver

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
