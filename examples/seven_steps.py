"""The seven steps of a mesh program: open, allocate, build, write, enqueue, synchronise, trace."""

from __future__ import annotations

import torch

from meshloom.runtime import MeshCoordinateRange, MeshWorkload, Program, create_mesh_buffer, open_mesh_device


def add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    c.copy_(a + b)


def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    c.copy_(a * b)


def scale(c: torch.Tensor, by: float) -> None:
    c.mul_(by)


def main() -> None:
    """Add on the left half of a 2x4 mesh, multiply on the right half, then scale all of it, again and again."""
    with open_mesh_device((2, 4), num_command_queues=2) as mesh:
        data, work = mesh.queue(0), mesh.queue(1)
        print(f"1 open       {mesh} with {len(mesh.queues)} queues")

        a, b, c = (
            create_mesh_buffer(mesh, layout="sharded", global_shape=(8, 16), shard_shape=(4, 4), name=name)
            for name in "abc"
        )
        print(f"2 allocate   a, b and c: {a.layout}, at {a.address:#x}, {b.address:#x} and {c.address:#x}")

        compute, scaling = MeshWorkload(), MeshWorkload()
        compute.add_program(MeshCoordinateRange((0, 0), (1, 1)), Program(add, [a, b], [c]))
        compute.add_program(MeshCoordinateRange((0, 2), (1, 3)), Program(multiply, [a, b], [c]))
        scaling.add_program(None, Program(scale, updates=[c], args={"by": 2.0}))
        print("3 program    add on the left half, multiply on the right; scale everywhere")

        left, right = torch.full((8, 16), 3.0), torch.full((8, 16), 5.0)
        data.enqueue_write(a, left)
        data.enqueue_write(b, right)
        written = data.record_event()
        print("4 write      a and b, on queue 0")

        work.wait_for_event(written)
        work.enqueue_workload(compute)
        print("5 enqueue    the workload on queue 1, after the event")

        work.finish()
        found = work.enqueue_read(c)
        print(f"6 synchronise and read: {found[0, 0]:g} on the left, {found[0, -1]:g} on the right")
        assert found.equal(torch.cat([(left + right)[:, :8], (left * right)[:, 8:]], 1))

        with mesh.capture(cq_id=1) as trace:
            work.enqueue_workload(compute)
            work.enqueue_workload(scaling)
        for step in range(3):
            data.enqueue_write(a, torch.full((8, 16), float(step)))
            work.wait_for_event(data.record_event())
            mesh.execute_trace(trace, cq_id=1, blocking=False)
            data.wait_for_event(work.record_event())
            print(f"7 trace      step {step}: {data.enqueue_read(c)[0].unique().tolist()}")


if __name__ == "__main__":
    main()
