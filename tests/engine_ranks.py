"""Real processes for tests of engines: each runs the same programs with its own rank, over Gloo, and hands back values.

run_ranks(2, {"sum": "result = engine.all_reduce_sum(torch.tensor(rank)).item()"})    # {"sum": [1, 1]}
"""

from __future__ import annotations

import textwrap
from typing import Any

import ranks

TIMEOUT = 240


def run_ranks(world: int, programs: dict[str, str], timeout: float = TIMEOUT) -> dict[str, list[Any]]:
    """What each program leaves in `result` at each rank, in the order of ranks."""
    texts = {name: textwrap.dedent(text) for name, text in programs.items()}
    results = ranks.run(world, "engine_ranks:run_programs", texts, timeout=timeout)
    return {name: [each[name] for each in results] for name in programs}


def run_programs(programs: dict[str, str]) -> dict[str, Any]:
    """One rank: join the others, run the programs, give their results."""
    import torch
    import torch.distributed as dist

    from meshloom import engines

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    known = {"torch": torch, "dist": dist, "engine": engines.load("torch"), "rank": rank, "world": world}
    results = {}
    for name, text in programs.items():
        space = dict(known)  # gone after the program, so that no group outlives the world
        exec(compile(text, name, "exec"), space)
        results[name] = space.pop("result", None)
    del space
    dist.barrier()
    dist.destroy_process_group()
    return results
