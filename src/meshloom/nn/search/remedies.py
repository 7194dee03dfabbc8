"""When no plan fits: the one that needs least, and what would make it fit, each remedy tried before it is named."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshloom.errors import MeshloomError, OutOfMemoryError
from meshloom.nn.search.choosing import Found, Search
from meshloom.nn.search.meshes import make_mesh
from meshloom.nn.search.recipes import ALL, Built
from meshloom.nn.search.staging import Staged
from meshloom.nn.search.trials import Trials
from meshloom.observe.memory_use import show_bytes

FURTHER = 6  # times that devices are doubled, or rows halved


def nothing_fits(search: Search) -> MeshloomError:
    """The error for a search that has found nothing, with the closest figures and what would help."""
    task = search.task
    tried = [each for each in (*search.too_large, *search.found.values()) if not isinstance(each.recipe, Staged)]
    if not tried:
        first = next(iter(search.trials.refused.values()), None)
        return first or MeshloomError(
            f"a batch of {task.rows} rows cannot be dealt out to {task.devices} devices",
            fix="give more rows, or fewer devices",
        )
    least = min(tried, key=lambda each: each.price.memory)
    limit = math.inf if task.memory is None else task.memory
    helps = [*_more_devices(search, least), *_fewer_rows(search, least)]
    return OutOfMemoryError(
        f"no plan fits: one device needs {show_bytes(least.price.memory)} and has {show_bytes(limit)}",
        closest=f"{least.recipe.title} on {least.mesh}",
        fix="; or ".join(helps) or "use devices with more memory, or a smaller model",
    )


def _more_devices(search: Search, least: Found) -> Iterator[str]:
    """The same plan with its weights over twice as many devices, and twice as many again."""
    sizes = dict(zip(least.mesh.axes, least.mesh.shape, strict=True))
    recipe = Built(recompute=ALL) if search.task.mode == "train" else Built()
    for factor in (2**power for power in range(1, FURTHER + 1)):
        longer = {"dp": sizes.get("dp", 1), "fsdp": sizes.get("fsdp", 1) * factor}
        mesh = make_mesh(**longer, **{axis: size for axis, size in sizes.items() if axis not in longer})
        price = search.trials.price(mesh, recipe)
        if price is not None and search.task.fits(price.memory):
            yield f"use {search.task.devices * factor} devices: {show_bytes(price.memory)} each, on {mesh}"
            return


def _fewer_rows(search: Search, least: Found) -> Iterator[str]:
    """The same plan for half of the rows, and half of those."""
    rows = search.task.rows
    for _ in range(FURTHER):
        rows //= 2
        if not rows:
            return
        price = Trials(search.task.with_rows(rows)).price(least.mesh, least.recipe)
        if price is not None and search.task.fits(price.memory):
            yield f"use batches of {rows} rows: {show_bytes(price.memory)}"
            return
