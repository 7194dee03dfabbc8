"""JAX on forced host devices in one process, beside the same copies.

Runs as `python -m benchmarks.jaxdevices --ranks 8` in a process of its own, since the number of devices is fixed when
JAX starts; prints one line of JSON per work as soon as it is measured.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from benchmarks import moves
from benchmarks.timing import Work, duel

SECONDS = 4.0


def works(ranks: int) -> dict[tuple[str, str], Work]:
    """Compiled collectives, waited for."""
    import jax  # after the number of devices was set
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((ranks,), ("d",))
    sharded, same = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    parts = jax.device_put(np.ones(ranks * moves.elements(), np.float32), sharded)
    whole = jax.device_put(np.ones(moves.elements(), np.float32), sharded)
    add = jax.jit(jax.shard_map(lambda part: jax.lax.psum(part, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()))
    gather = jax.jit(lambda value: value, out_shardings=same)
    _check(add(parts), ranks, moves.elements())
    _check(gather(whole), 1, moves.elements())
    return {
        moves.ALL_REDUCE: lambda: add(parts).block_until_ready(),
        moves.ALL_GATHER: lambda: gather(whole).block_until_ready(),
    }


def _check(found: Any, value: float, size: int) -> None:
    if found.shape != (size,) or float(found[0]) != value or not found.sharding.is_fully_replicated:
        raise AssertionError(f"JAX gave {found.shape} of {float(found[0])}, not {size} times {value} on every device")


def measure(ranks: int, scale: float) -> None:
    """Print the figures of every work on that many devices."""
    baselines = moves.baselines()
    for (name, detail), work in works(ranks).items():
        timing = duel(work, baselines[name, detail], SECONDS * scale)
        found = {"work": name, "detail": detail, "timing": [timing.ours, timing.dense, timing.rounds]}
        print(json.dumps(found), flush=True)


def main() -> None:
    """Read the command line, set the number of devices and measure."""
    parser = argparse.ArgumentParser(description="JAX on forced host devices beside plain copies, as lines of JSON.")
    parser.add_argument("--ranks", type=int, default=8, help="number of host devices (default 8)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the seconds per work (default 1)")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.ranks}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    measure(options.ranks, options.scale)


if __name__ == "__main__":
    main()
