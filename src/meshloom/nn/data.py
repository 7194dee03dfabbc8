"""A loader that gives every process its part of each global batch, in an order that does not depend on the mesh.

The order of an epoch follows from the seed and the epoch alone. Of each batch a process reads the rows that its devices
hold and no others, through torch's own `DataLoader`. Where a loader is, in samples, is a few numbers: saved with a
checkpoint, another mesh and another number of processes go on with the next sample in mid-epoch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from meshloom.comms import WORLD
from meshloom.engines.layout import empty_stored, short_name
from meshloom.errors import ArgumentError, PlacementError, expect
from meshloom.mesh import Mesh
from meshloom.placement import Partial, Placement, Placements, Replicate, Shard, Topology, as_placements, extents
from meshloom.placement.extents import runs
from meshloom.placement.spelling import spell
from meshloom.tensor.base import Tensor
from meshloom.tensor.creation import _number, current_mesh

_STATE = ("epoch", "samples", "seed", "shuffle", "size")


class Loader:
    """Batches of a dataset as tensors on a mesh.

    `dataset` has a length and items by number: tensors, numbers, or tuples and dictionaries of them. `placements` says
    where a batch lies, rows being dim 0; without them every axis of the mesh shards the rows. An iteration is an epoch,
    or what is left of it after a `break` or `load_state_dict`. A tensor with fewer dims than an axis shards, such as a
    label per row beside tokens that are also sharded by position, is replicated on that axis.

    >>> import meshloom as loom
    >>> mesh = loom.open_mesh((2,), axes=("dp",))
    >>> loader = Loader(torch.arange(10), 4, mesh, {"dp": Shard(0)}, shuffle=False)
    >>> [batch.tolist() for batch in loader]
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> loader
    Loader(10 samples, batches of 4 as (S(0)) on Mesh(dp=2), epoch 1, sample 0)

    In the middle of an epoch its state is what another loader needs to go on, on any mesh:

    >>> batches = iter(loader)
    >>> next(batches).tolist()
    [0, 1, 2, 3]
    >>> other = Loader(torch.arange(10), 3, loom.open_mesh((3,), axes=("dp",)), shuffle=False)
    >>> other.load_state_dict(loader.state_dict())
    >>> [batch.tolist() for batch in other]
    [[4, 5, 6], [7, 8, 9]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        mesh: Mesh | None = None,
        placements: Placements | None = None,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
    ) -> None:
        _check(dataset, batch_size, seed, workers)
        self.mesh = mesh if mesh is not None else current_mesh()
        chosen: Placements = [Shard(0)] * self.mesh.ndim if placements is None else placements
        self.placements = as_placements(chosen, self.mesh)
        _check_placements(self.placements)
        self.dataset, self.batch_size, self.shuffle, self.seed = dataset, batch_size, shuffle, seed
        self.drop_last, self.collate, self.workers = drop_last, collate, workers
        self.epoch, self.samples = 0, 0  # where it is: what was given of this epoch

    def __len__(self) -> int:
        """How many batches an epoch has."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __repr__(self) -> str:
        placed = ", ".join(map(str, self.placements))
        batches = f"batches of {self.batch_size} as ({placed}) on {self.mesh!r}"
        return f"Loader({len(self.dataset)} samples, {batches}, epoch {self.epoch}, sample {self.samples})"

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of this epoch; then the next epoch begins."""
        begin = self.samples
        batches = self._batches(begin)
        fetched = DataLoader(
            self.dataset,
            batch_sampler=[self._own_rows(each) for each in batches],
            num_workers=self.workers,
            collate_fn=self.collate,
        )
        for numbers, rows in zip(batches, fetched, strict=True):
            self.samples += len(numbers)
            yield self._place(rows, len(numbers))
        self.epoch, self.samples = self.epoch + 1, 0

    def _batches(self, begin: int) -> list[list[int]]:
        """The numbers of the samples of each batch that is left."""
        order, size = self._order(), self.batch_size
        batches = [order[at : at + size] for at in range(begin, len(order), size)]
        return [each for each in batches if len(each) == size] if self.drop_last else batches

    def _order(self) -> list[int]:
        count = len(self.dataset)
        if not self.shuffle:
            return list(range(count))
        mixed = zlib.crc32(f"{self.seed} {self.epoch}".encode())  # torch's generator keeps 32 bits of a seed
        generator = torch.Generator().manual_seed(mixed)
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        return order

    def _own_rows(self, numbers: Sequence[int]) -> list[int]:
        """Those of a batch's samples that this process holds; one of others where it holds none, for its shape."""
        held = [numbers[run.start + row] for run in self._runs(len(numbers)) for row in range(run.size)]
        return held or [numbers[0]]

    def _runs(self, count: int) -> list[Any]:
        return runs(Topology(self.mesh, _fit(self.placements, 1), (count,), "i64"), 0)

    # from rows to tensors on the mesh

    def _place(self, value: Any, count: int) -> Any:
        """What was collated of this process's rows, as tensors of all rows of the batch."""
        if isinstance(value, torch.Tensor):
            return self._place_rows(value, count)
        if isinstance(value, Mapping):
            return {key: self._place(each, count) for key, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._place(each, count) for each in value))
        if isinstance(value, (tuple, list)):
            return type(value)(self._place(each, count) for each in value)
        raise ArgumentError(
            f"a batch has a {type(value).__name__}, which cannot be put on a mesh: {value!r:.60}",
            fix="give tensors, numbers, tuples and dictionaries of them, or a `collate` that makes tensors of it",
        )

    def _place_rows(self, rows: torch.Tensor, count: int) -> Tensor:
        held = sum(run.size for run in self._runs(count))
        if rows.dim() == 0 or len(rows) != max(held, 1):
            raise ArgumentError(
                f"`collate` made a tensor of shape {list(rows.shape)} of {max(held, 1)} samples",
                fix="dim 0 of every tensor of a batch has a row per sample",
            )
        shape = (count, *rows.shape[1:])
        topology = Topology(self.mesh, _fit(self.placements, rows.dim()), shape, short_name(rows.dtype))
        first = {run.start: sum(each.size for each in before) for run, before in _with_those_before(self._runs(count))}
        stored = empty_stored(topology)
        for extent in extents(topology):
            at = first[extent.start[0]]
            own = (slice(at, at + extent.shape[0]), *extent.slices[1:])
            stored[extent.stored].copy_(rows[own])
        return _number(
            Tensor(topology, stored.to(WORLD.device) if self.mesh.is_split and not stored.is_meta else stored)
        )

    # where it is

    def state_dict(self) -> dict[str, Any]:
        """Where the loader is: the epoch, the samples that were given of it, and what its order follows from."""
        size = len(self.dataset)
        return dict(zip(_STATE, (self.epoch, self.samples, self.seed, self.shuffle, size), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where another loader of the same dataset was, whatever its mesh and the size of its batches."""
        missing = [name for name in _STATE if name not in state]
        if missing:
            raise ArgumentError(f"a loader's state has no {missing[0]!r}", fix=f"its names are {', '.join(_STATE)}")
        if state["size"] != len(self.dataset):
            raise ArgumentError(
                f"the state is that of a loader of {state['size']} samples, and this one has {len(self.dataset)}",
                fix="go on with the dataset that it was saved with, or begin a new epoch",
            )
        self.epoch, self.samples = int(state["epoch"]), int(state["samples"])
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])


def _with_those_before(listed: Sequence[Any]) -> list[tuple[Any, Sequence[Any]]]:
    return [(each, listed[:number]) for number, each in enumerate(listed)]


def _fit(placements: Sequence[Placement], dims: int) -> tuple[Placement, ...]:
    """The placements of a tensor with so many dims: an axis that shards a dim which it does not have replicates it."""
    return tuple(each if not isinstance(each, Shard) or each.dim < dims else Replicate() for each in placements)


def _check_placements(placements: Sequence[Placement]) -> None:
    for each in placements:
        if isinstance(each, Partial) or (isinstance(each, Shard) and each.dim < 0):
            raise PlacementError(
                f"a batch cannot be {each}",
                asked=spell(placements),
                fix="give S(i) with i from 0 on, or R, for each axis",
            )


def _check(dataset: Any, batch_size: object, seed: object, workers: object) -> None:
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ArgumentError(
            f"a {type(dataset).__name__} has no items by number, so that no process can read only its own",
            fix="give a dataset with __len__ and __getitem__",
        )
    if len(dataset) == 0:
        raise ArgumentError("the dataset is empty", fix="give a dataset with at least one sample")
    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0), ("workers", workers, 0)):
        expect(name, value, int, fix=f"{name}={max(least, 0)}")
        if value < least:  # type: ignore[operator]
            raise ArgumentError(f"{name}={value} is less than {least}", fix=f"give at least {least}")
