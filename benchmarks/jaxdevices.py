"""JAX on forced host devices in one process, beside ours, dense torch and plain copies.

Runs as `python -m benchmarks.jaxdevices --ranks 8` in a process of its own, since the number of devices is fixed when
JAX starts; prints one line of JSON per work as soon as it is measured. Every function is compiled, and waited for.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import moves
from benchmarks.beside import compare, our_work, tell, works_of
from benchmarks.peers import MEMORY
from benchmarks.timing import Side, Work
from benchmarks.works import BATCH, FEATURES, REPLICATED_BYTES, SIZE, mlp, training_step

Make = Callable[["Devices"], tuple[Work, Work]]


class Devices:
    """The forced host devices as a mesh of one axis, and arrays on them."""

    def __init__(self, ranks: int) -> None:
        import jax  # after the number of devices was set

        self.jax, self.ranks = jax, ranks
        self.mesh = jax.make_mesh((ranks,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        if len(jax.devices()) != ranks:
            raise RuntimeError(f"JAX has {len(jax.devices())} devices, not {ranks}")

    def sharding(self, *axes: str | None) -> Any:
        """A sharding: for each dim the mesh axis that splits it, or None."""
        return self.jax.sharding.NamedSharding(self.mesh, self.jax.sharding.PartitionSpec(*axes))

    def put(self, value: Any, *axes: str | None) -> Any:
        """An array on the devices."""
        return self.jax.device_put(value.numpy() if isinstance(value, torch.Tensor) else value, self.sharding(*axes))

    def run(self, function: Callable[..., Any], *operands: Any, out: tuple[str | None, ...]) -> Callable[[], Any]:
        """A compiled function of these operands, waited for."""
        compiled = self.jax.jit(function, out_shardings=self.sharding(*out))
        return lambda: compiled(*operands).block_until_ready()


def _close(found: Any, dense: torch.Tensor, what: str) -> None:
    import numpy as np

    if not np.allclose(np.asarray(found), dense.detach().numpy(), rtol=1e-3, atol=1e-2):
        raise AssertionError(f"{what}: JAX differs from dense torch")


def _checked(ours: Work, dense: Work, what: str) -> tuple[Work, Work]:
    _close(ours(), dense(), what)  # type: ignore[arg-type]
    return ours, dense


def _add(devices: Devices) -> tuple[Work, Work]:
    x, y = (torch.randn(32 * devices.ranks, 32) for _ in range(2))
    a, b = (devices.put(each, "d") for each in (x, y))
    return _checked(devices.run(lambda a, b: a + b, a, b, out=("d",)), lambda: x + y, "add")


def _matmul(first: tuple[str | None, ...], second: tuple[str | None, ...], out: tuple[str | None, ...]) -> Make:
    def make(devices: Devices) -> tuple[Work, Work]:
        x, y = (torch.randn(SIZE, SIZE) for _ in range(2))
        a, b = devices.put(x, *first), devices.put(y, *second)
        return _checked(devices.run(lambda a, b: a @ b, a, b, out=out), lambda: x @ y, "matmul")

    return make


def _mlp(devices: Devices) -> tuple[Work, Work]:
    """Data-parallel: the batch is split, parameters and their update are the same everywhere."""
    jax = devices.jax
    dense = mlp()
    x, y = torch.randn(BATCH, FEATURES[0]), torch.randn(BATCH, FEATURES[-1])
    a, b = (devices.put(each, "d") for each in (x, y))
    parameters = [devices.put(each.detach().clone()) for each in dense.parameters()]

    def loss(parameters: list[Any], a: Any, b: Any) -> Any:
        first, shift, second, other = parameters
        return ((jax.nn.relu(a @ first.T + shift) @ second.T + other - b) ** 2).mean()

    def update(parameters: list[Any], a: Any, b: Any) -> Any:
        value, found = jax.value_and_grad(loss)(parameters, a, b)
        return [each - 0.01 * slope for each, slope in zip(parameters, found, strict=True)], value

    # what comes in is given away: the update is in place, as torch's
    compiled = jax.jit(update, out_shardings=devices.sharding(), donate_argnums=0)

    def step() -> Any:
        nonlocal parameters
        parameters, value = compiled(parameters, a, b)
        jax.block_until_ready(parameters)
        return value

    ours, theirs = _checked(step, training_step(dense, x, y), "MLP step")
    _close(parameters[0], next(dense.parameters()), "MLP step, first weight")
    return ours, theirs


def _all_reduce(devices: Devices) -> tuple[Work, Work]:
    jax, spec = devices.jax, devices.jax.sharding.PartitionSpec
    x = torch.ones(devices.ranks, moves.elements())
    parts = devices.put(x.flatten(), "d")
    add = jax.shard_map(lambda part: jax.lax.psum(part, "d"), mesh=devices.mesh, in_specs=spec("d"), out_specs=spec())
    ours = devices.run(add, parts, out=())
    _everywhere(ours(), devices.ranks)
    return ours, moves.reduce_traffic(x)


def _all_gather(devices: Devices) -> tuple[Work, Work]:
    x = torch.ones(moves.elements())
    ours = devices.run(lambda value: value, devices.put(x, "d"), out=())
    _everywhere(ours(), 1)
    return ours, moves.gather_traffic(x)


def _everywhere(found: Any, value: float) -> None:
    if found.shape != (moves.elements(),) or float(found[0]) != value or not found.sharding.is_fully_replicated:
        raise AssertionError(f"JAX gave {found.shape} of {float(found[0])}, not {value} on every device")


MAKES: dict[str, Make] = {
    "add": _add,
    "matmul row": _matmul(("d",), (), ("d",)),
    "matmul inner": _matmul((None, "d"), ("d",), ()),
    "MLP step": _mlp,
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
}


def copies(devices: Devices) -> float:
    """How often a replicated array is stored: the memory of all devices, each piece once.

    An array that was computed: `device_put` may borrow the host's memory, which is not on any device.
    """
    whole = devices.run(lambda value: value + 1, devices.put(torch.ones(REPLICATED_BYTES // 4)), out=())()
    pieces = {each.data.unsafe_buffer_pointer(): each.data.nbytes for each in whole.addressable_shards}
    return sum(pieces.values()) / REPLICATED_BYTES


def measure(ranks: int, scale: float) -> None:
    """Print the figures of every work on that many devices."""
    devices = Devices(ranks)
    torch.manual_seed(0)
    tell(MEMORY, copies=copies(devices))
    for work, (make, seconds) in works_of(MAKES, ranks).items():
        theirs, dense = make(devices)
        compare(work, Side(theirs), our_work(work, ranks), dense, seconds * scale)


def main() -> None:
    """Read the command line, set the number of devices and measure."""
    parser = argparse.ArgumentParser(description="JAX on forced host devices beside ours, as lines of JSON.")
    parser.add_argument("--ranks", type=int, default=8, help="number of host devices (default 8)")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the seconds per work (default 1)")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.ranks}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    measure(options.ranks, options.scale)


if __name__ == "__main__":
    main()
