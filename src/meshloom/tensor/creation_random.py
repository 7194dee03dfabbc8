"""More ways to make tensors: grids of numbers, whole random numbers, and draws whose chances are tensors.

As everywhere, random values come from tiles of the global index, so they do not depend on placements. Draws whose
chances are on a mesh stay where these are: a batch that is sharded is drawn from without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from meshloom.errors import ArgumentError, ShapeError
from meshloom.placement import Replicate, Shard
from meshloom.tensor import creation, random
from meshloom.tensor.base import Tensor
from meshloom.tensor.calling import table_call, table_results
from meshloom.tensor.clients import sent
from meshloom.tensor.creation import Options
from meshloom.tensor.moving import shadow_of


@sent("loom:empty")
def empty(*size: int | Sequence[int], **options: Any) -> Tensor:
    """A tensor whose values do not matter; zeros, since padding must be zero anyway.

    >>> empty(3, 2, mesh=creation.open_mesh((2,))).topology.notation
    'f32[3, 2](S(0))'
    """
    return creation.zeros(*size, **options)


@sent("loom:eye")
def eye(n: int, m: int | None = None, **options: Any) -> Tensor:
    """Ones on the diagonal, zeros elsewhere.

    >>> eye(2, mesh=creation.open_mesh((2,))).to_torch()
    tensor([[1., 0.],
            [0., 1.]])
    """
    columns = n if m is None else m
    return Options.read(options).make(partial(torch.eye, n, columns))


@sent("loom:linspace")
def linspace(start: torch.Tensor | float, end: torch.Tensor | float, steps: int, **options: Any) -> Tensor:
    """Evenly spaced numbers, both ends included.

    >>> linspace(0, 1, 3, mesh=creation.open_mesh((2,))).to_torch()
    tensor([0.0000, 0.5000, 1.0000])
    """
    return Options.read(options).make(partial(torch.linspace, start, end, steps))


@sent("loom:logspace")
def logspace(
    start: torch.Tensor | float, end: torch.Tensor | float, steps: int, base: float = 10.0, **options: Any
) -> Tensor:
    """Powers of a base, evenly spaced in the exponent.

    >>> logspace(0, 2, 3, mesh=creation.open_mesh((2,))).to_torch()
    tensor([  1.,  10., 100.])
    """
    return Options.read(options).make(partial(torch.logspace, start, end, steps, base))


def _draw_tiles(
    size: Sequence[int], dtype: torch.dtype, device: Any, draw: random.Draw, generator: torch.Generator | None
) -> torch.Tensor:
    if str(device) == "meta":
        random.note_key(generator)
        return torch.empty(tuple(size), dtype=dtype, device="meta")
    return random.fill_tiles(tuple(size), dtype, draw, random.draw_key(generator)).to(device or "cpu")


@sent("loom:randint")
def randint(*bounds: Any, size: Any = None, generator: torch.Generator | None = None, **options: Any) -> Tensor:
    """Whole numbers from low (0 if left out) to below high: `randint(low, high, size)` or `randint(high, size)`.

    >>> _ = torch.manual_seed(0)
    >>> a = randint(10, (5,), mesh=creation.open_mesh((2,)))
    >>> _ = torch.manual_seed(0)
    >>> a.tolist() == randint(0, 10, (5,), mesh=creation.open_mesh((3,))).tolist()
    True
    """
    *ends, shape = bounds if size is None else (*bounds, size)
    if not 1 <= len(ends) <= 2 or isinstance(shape, int):
        raise ArgumentError("randint takes (high, size) or (low, high, size)", fix="write randint(0, 10, (3,))")
    low, high = (0, ends[0]) if len(ends) == 1 else ends
    if low >= high:
        raise ArgumentError(f"randint needs low below high, not {low} and {high}")

    def draw(out: torch.Tensor, tile: torch.Generator) -> torch.Tensor:
        return out.random_(low, high, generator=tile)

    def dense(dtype: torch.dtype | None, device: torch.device | str | None) -> torch.Tensor:
        return _draw_tiles(shape, dtype or torch.int64, device, draw, generator)

    return Options.read(options).make(dense)


@sent("loom:randint_like")
def randint_like(input: Tensor, *bounds: int, **options: object) -> Tensor:
    """Whole numbers with the shape, dtype, mesh and placements of a tensor.

    >>> randint_like(creation.zeros(4, mesh=creation.open_mesh((2,))), 3).topology.notation
    'f32[4](S(0))'
    """
    return randint(*bounds, size=input.topology.shape, **creation.like(input, options))


@sent("loom:randperm")
def randperm(n: int, *, generator: torch.Generator | None = None, **options: Any) -> Tensor:
    """The numbers below n in random order.

    >>> sorted(randperm(5, mesh=creation.open_mesh((2,))).tolist())
    [0, 1, 2, 3, 4]
    """

    def dense(dtype: torch.dtype | None, device: torch.device | str | None) -> torch.Tensor:
        kind = dtype or torch.int64
        if str(device) == "meta":
            random.note_key(generator)
            return torch.empty(n, dtype=kind, device="meta")
        drawn = torch.randperm(n, generator=random.STREAMS.at(random.draw_key(generator), 0), dtype=kind)
        return drawn.to(device or "cpu")

    return Options.read(options).make(dense)


def _noise(
    like: Tensor, make: Callable[..., Tensor], generator: torch.Generator | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Random values placed as a tensor is."""
    kept = creation.like(like, {"generator": generator, "dtype": dtype})
    return make(like.topology.shape, **kept)


@sent("loom:normal")
def normal(
    mean: torch.Tensor | float,
    std: torch.Tensor | float = 1.0,
    size: Sequence[int] | None = None,
    *,
    generator: torch.Generator | None = None,
    **options: object,
) -> Tensor:
    """Normal values; mean and std may be tensors, and then the values lie as these do.

    >>> normal(2.0, 0.0, (3,), mesh=creation.open_mesh((2,))).tolist()
    [2.0, 2.0, 2.0]
    """
    if size is not None:
        drawn = creation.randn(size, generator=generator, **options)
    else:
        drawn = _noise(_broadcast_pair(mean, std), creation.randn, generator)
    result: Tensor = table_call("add", table_call("mul", drawn, std), mean)
    return result


def _broadcast_pair(mean: object, std: object) -> Tensor:
    """A tensor with the shape that mean and std broadcast to."""
    tensors: list[Any] = [each for each in (mean, std) if isinstance(each, torch.Tensor)]
    if not tensors:
        raise ArgumentError("normal takes a size where neither mean nor std is a tensor", fix="normal(0, 1, (3,))")
    return shadow_of(tensors[0] if len(tensors) == 1 else table_call("mul", *tensors))


@sent("loom:bernoulli")
def bernoulli(
    input: Tensor, p: torch.Tensor | float | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    """1 with the chance that each element says, else 0; placed as the chances are.

    >>> bernoulli(creation.ones(3, mesh=creation.open_mesh((2,)))).tolist()
    [1.0, 1.0, 1.0]
    """
    chances = shadow_of(input)
    wide = torch.float64 if chances.dtype == torch.float64 else torch.float32
    drawn = _noise(chances, creation.rand, generator, wide)
    result: Tensor = table_call("to", table_call("lt", drawn, chances if p is None else p), chances.dtype)
    return result


@sent("loom:multinomial")
def multinomial(
    input: Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Tensor:
    """Indices drawn with the chances that each line says; a sharded batch is drawn from without communication.

    >>> chances = creation.distribute([[0.0, 1.0], [3.0, 0.0]], creation.open_mesh((2,)))
    >>> multinomial(chances, 1).tolist()
    [[1], [0]]
    """
    chances = shadow_of(input)
    _check_chances(chances, num_samples, replacement)
    if replacement and num_samples != 1:
        return _drawn_again(chances, num_samples, generator)
    # the first to arrive: p / exponential is largest with chance p / sum(p)
    waits = _noise(chances, _exponential, generator, torch.float32)
    result: Tensor = table_results("topk", table_call("div", chances, waits), num_samples, -1)[1]
    return result


def _check_chances(chances: Tensor, count: int, replacement: bool) -> None:
    shape = chances.topology.shape
    if not 1 <= len(shape) <= 2 or not chances._data.is_floating_point():
        raise ShapeError(f"multinomial needs lines of chances and got {chances.topology.notation}")
    if count < 1 or (not replacement and count > shape[-1]):
        raise ArgumentError(
            f"{count} draws from {shape[-1]} without replacement", fix="draw fewer, or replacement=True"
        )
    if chances._data.is_meta:
        return
    good = table_call("logical_and", table_call("isfinite", chances), table_call("ge", chances, 0))
    if not bool(table_call("all", good)) or not bool(table_call("all", table_call("gt", chances.sum(-1), 0))):
        raise ArgumentError("chances must be finite, not negative, and some of each line above zero")


def _exponential(size: Sequence[int], **options: Any) -> Tensor:
    generator = options.pop("generator")
    kept = random.exponential
    return Options.read(options).make(
        lambda dtype, device: _draw_tiles(size, dtype or torch.float32, device, kept, generator)
    )


def _drawn_again(chances: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """With replacement: where a number below the total falls among the running sums."""
    sums = table_call("cumsum", table_call("to", chances, torch.float64), -1)
    last = len(chances.topology.shape) - 1
    placed = tuple(Replicate() if each == Shard(last) else each for each in chances.topology.reduced.placements)
    size = (*chances.topology.shape[:-1], count)
    numbers = creation.rand(
        size, mesh=chances.mesh, placements=placed, dtype=torch.float64, device=chances.device, generator=generator
    )
    total = table_call("narrow", sums, -1, chances.topology.shape[-1] - 1, 1)
    found = table_call("searchsorted", sums, table_call("mul", numbers, total), right=True)
    result: Tensor = table_call("clamp", found, max=chances.topology.shape[-1] - 1)
    return result
