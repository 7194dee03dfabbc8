"""The search: meshes and recipes are priced on the folded model, the best few are verified on the whole one.

1. Every source of candidates (`SOURCES`) is priced: the named plans on every mesh, and plans that are built by role.
2. The best of the built ones are refined: the choices of their parts by dynamic programming (`chain.py`), the data axis
   cut into a replicated and a sharded one, blocks that recompute where memory is short.
3. The best one is polished: each layer alone is put otherwise, and what is faster stays.
4. The best of the built ones are tried inside of the stages of pipelines (`staging.py`).
5. Candidates are verified in the order of their price, until enough are known to fit; the best named one is among them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from meshloom.errors import MeshloomError
from meshloom.mesh import Mesh
from meshloom.nn import plans
from meshloom.nn.search.chain import frontier
from meshloom.nn.search.meshes import divisors, make_mesh, orders, tensor_sizes
from meshloom.nn.search.recipes import ALL, WAYS, Built, Named, expert_counts, gathered, other_ways, parts_of
from meshloom.nn.search.staging import Staged, Stager
from meshloom.nn.search.trials import Price, Recipe, Task, Trials
from meshloom.observe.dry_run import DryRun, show_seconds
from meshloom.observe.memory_use import show_bytes

PIPED = 2  # plans by role that are tried inside of stages
REFINED = 4  # plans by role that are refined,
NEAR = 1.3  # if their price is so near to the best
CLOSE = 1.05  # so near to the best, a named plan is verified,
MUST = 3  # but no more of them than this
ATTEMPTS = 4  # whole runs of one plan, to find how many blocks recompute


@dataclass(frozen=True)
class Found:
    """A recipe on a mesh with its price."""

    mesh: Mesh
    recipe: Recipe
    price: Price
    saved: float = 0.0  # bytes that one more block saves if it recomputes

    @property
    def is_named(self) -> bool:
        """Whether it is a plan with a name."""
        return isinstance(self.recipe, Named)


@dataclass(frozen=True)
class Verified:
    """A recipe on a mesh with the dry run of the whole model."""

    mesh: Mesh
    recipe: Recipe
    run: DryRun


Source = Callable[[Task], Iterator[tuple[Mesh, Recipe]]]


def named_plans(task: Task) -> Iterator[tuple[Mesh, Recipe]]:
    """Every plan with a name on every mesh that its axes can have."""
    for name in plans.NAMES:
        for mesh in _meshes_for(name, task):
            yield mesh, Named(name)


def _meshes_for(name: str, task: Task) -> Iterator[Mesh]:
    devices, sizes = task.devices, tensor_sizes(task.machine, task.devices)
    if name in ("data", "fsdp"):
        inner = [devices]
    elif name == "hsdp":
        inner = [each for each in divisors(devices) if 1 < each < devices]
    else:
        inner = [each for each in sizes if each > 1]
    outer, last = _AXES.get(name, ("dp", "tp"))
    for size in inner:
        if _has_rows(task, devices if last in ("dp", "fsdp", "ep") else devices // size):
            yield from orders(task.machine, make_mesh(**{outer: devices // size, last: size}))


_AXES = {
    "data": ("tp", "dp"), "fsdp": ("tp", "fsdp"), "hsdp": ("dp", "fsdp"), "fsdp+tensor": ("fsdp", "tp"),
    "context": ("dp", "cp"), "expert": ("dp", "ep"),
}  # fmt: skip


def _has_rows(task: Task, parts: int) -> bool:
    return parts <= task.rows


def built_plans(task: Task) -> Iterator[tuple[Mesh, Recipe]]:
    """Each part by its role, on every mesh; weights replicated or sharded over the devices that share no rows."""
    for size in tensor_sizes(task.machine, task.devices):
        rest = task.devices // size
        for cut in _cuts(task, rest):
            for weights in ("dp", "fsdp"):
                mesh = make_mesh(**{weights: rest // cut, "cp": cut, "tp": size})
                for each in orders(task.machine, mesh):
                    yield each, Built()
                    if size == 1 and weights == "fsdp":
                        yield each, gathered(task.module)
                    if size > 1 and task.length >= size * cut:
                        yield each, Built(is_sequence=True)


def _cuts(task: Task, devices: int) -> list[int]:
    """How sequences may be cut where there are fewer rows than devices: not at all, if rows are enough."""
    if _has_rows(task, devices):
        return [1]
    return [each for each in divisors(devices) if _has_rows(task, devices // each) and task.length >= each][:2]


def expert_plans(task: Task) -> Iterator[tuple[Mesh, Recipe]]:
    """Where a model has experts: they over an axis of their own, other weights replicated or sharded."""
    counts = expert_counts(task.module)
    if counts and _has_rows(task, task.devices):
        for size in [each for each in tensor_sizes(task.machine, task.devices) if 1 < each <= min(counts)]:
            for weights in ("dp", "fsdp"):
                mesh = make_mesh(**{weights: task.devices // size, "ep": size})
                yield from ((each, Built()) for each in orders(task.machine, mesh))


# Where candidates come from. Other kinds of parallelism join here: a function that gives meshes and recipes. Pipelines
# are made of what was found (`Search._add_stages`): a stage does what a plan does.
SOURCES: tuple[Source, ...] = (named_plans, built_plans, expert_plans)


class Search:
    """One search, with all that was priced on the way."""

    def __init__(self, task: Task, tell: Callable[[str], None]) -> None:
        self.task, self.tell = task, tell
        self.trials = Trials(task)
        self.found: dict[object, Found] = {}
        self.built: list[Found] = []  # plans by role, also those that have a name too
        self.parts = parts_of(self.trials.sample)
        self.too_large: list[Found] = []  # with all blocks that recompute, and still no room
        self.stager = Stager(self.trials)

    def run(self, keep: int) -> list[Verified]:
        """Plans that fit, verified, the fastest first."""
        for source in (*(source(self.task) for source in SOURCES), self._with_context()):
            for mesh, recipe in source:
                self._consider(mesh, recipe)
        self.tell(f"{len(self.found)} plans priced; the best by now: {self._best_line()}")
        for each in self._promising():
            self.refine(each)
        self.polish()
        self._add_stages()
        self.tell(f"{len(self.found)} plans priced; the best by now: {self._best_line()}")
        return self.verify(keep)

    def _consider(self, mesh: Mesh, recipe: Recipe) -> None:
        found = self.price(mesh, recipe)
        if found is not None and isinstance(recipe, Built):
            self.built.append(found)

    def _with_context(self) -> Iterator[tuple[Mesh, Recipe]]:
        """If the plan `context` does well, its context axis beside sharded weights and a tensor axis."""
        priced = list(self.found.values())
        least = min((each.price.time for each in priced), default=0.0)
        near = [each for each in priced if "cp" in each.mesh.axes and each.price.time <= NEAR * least]
        for each in sorted(near, key=lambda each: each.price.time)[:1]:
            cut = each.mesh.shape[each.mesh.axes.index("cp")]
            rest = self.task.devices // cut
            for size in [size for size in tensor_sizes(self.task.machine, rest) if rest % size == 0]:
                yield make_mesh(fsdp=rest // size, cp=cut, tp=size), Built()

    def _add_stages(self) -> None:
        """Pipelines: the best plans by role, each inside of stages."""
        is_short = not self.fitting()
        shapes: dict[object, tuple[Mesh, Built]] = {}
        for each in sorted(self.built, key=lambda each: each.price.memory if is_short else each.price.time):
            assert isinstance(each.recipe, Built)
            sizes = dict(zip(each.mesh.axes, each.mesh.shape, strict=True))
            if sizes.get("dp", 1) * sizes.get("fsdp", 1) > 1:  # which becomes stages
                shapes.setdefault((sizes.get("tp"), sizes.get("ep")), (each.mesh, each.recipe))
        for mesh, recipe, price in self.stager.candidates([*shapes.values()][:PIPED], is_short):
            self.found[mesh, recipe] = Found(mesh, recipe, price)

    def price(self, mesh: Mesh, recipe: Recipe) -> Found | None:
        """A recipe on a mesh with its price; None if it cannot be used there."""
        price = self.trials.price(mesh, recipe)
        if price is None:
            return None
        found = Found(mesh, recipe, price)
        self.found.setdefault(self.trials.key(mesh, recipe), found)  # the first name of what two recipes do
        return found

    def fitting(self) -> list[Found]:
        """All that fits, the fastest first."""
        fit = [each for each in self.found.values() if self.task.fits(each.price.memory)]
        return sorted(fit, key=lambda each: each.price.time)

    def _promising(self) -> list[Found]:
        """The plans by role that are fastest once they fit, one for each shape of a mesh.

        Of replicated and sharded weights both, since other choices are open to them; of rows over `dp` and `fsdp` in
        several ways one, since `refine` cuts them.
        """
        ready = [fit for each in self.built if (fit := self.fit(each)) is not None]
        best: dict[object, Found] = {}
        for each in sorted(ready, key=lambda each: each.price.time):
            sizes = dict(zip(each.mesh.axes, each.mesh.shape, strict=True))
            best.setdefault((sizes.get("tp"), sizes.get("cp"), sizes.get("ep"), "fsdp" in sizes), each)
        least = min((each.price.time for each in [*ready, *self.fitting()]), default=0.0)
        return [each for each in best.values() if each.price.time <= NEAR * least][:REFINED]

    def fit(self, found: Found) -> Found | None:
        """The same with as few blocks that recompute as it needs to fit; None if it cannot."""
        recipe = found.recipe
        if self.task.fits(found.price.memory):
            return found
        if not isinstance(recipe, Built) or self.task.mode != "train" or not self.trials.folded.counts:
            self.too_large.append(found)
            return None
        every = self.trials.price(found.mesh, replace(recipe, recompute=ALL))
        if every is None or not self.task.fits(every.memory):
            self.too_large.append(found if every is None else Found(found.mesh, replace(recipe, recompute=ALL), every))
            return None
        assert self.task.memory is not None
        blocks = sum(self.trials.folded.counts.values())
        saved = (found.price.memory - every.memory) / blocks
        count = min(blocks, math.ceil((found.price.memory - self.task.memory) / saved))
        price = found.price + (every - found.price).times(count / blocks)
        fitted = Found(found.mesh, replace(recipe, recompute=ALL if count == blocks else count), price, saved)
        return self.found.setdefault((self.trials.key(found.mesh, fitted.recipe), count), fitted)

    def refine(self, found: Found) -> None:
        """Choose the parts, then cut the data axis, then recompute if memory is short."""
        recipe = found.recipe
        assert isinstance(recipe, Built)
        chosen = [*self._choose_parts(replace(found, recipe=replace(recipe, recompute=0)))]
        ready = [each for each in chosen if self.fit(each) is not None]
        best = min(ready or chosen, key=lambda each: each.price.time)
        for mesh in self._cut_data(best.mesh):
            cut = self.price(mesh, best.recipe)
            if cut is not None:
                self.fit(cut)

    def _choose_parts(self, found: Found) -> Iterator[Found]:
        """The best choices for all parts by what each of them adds alone, priced together."""
        recipe = found.recipe
        base = self.trials.price(found.mesh, recipe)
        assert isinstance(recipe, Built) and base is not None
        yield replace(found, price=base)
        changes: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
        for (part, axis), ways in other_ways(self.parts, found.mesh).items():
            for way in ways:
                other = self.price(found.mesh, recipe.changed(part, axis, way))
                if other is not None:
                    added = other.price - base
                    changes.setdefault((part, axis), {})[way] = (added.time, added.memory)
        best = frontier(changes)
        fit = [each for each in best if self.task.fits(base.memory + each.memory)]
        for each in dict.fromkeys([*fit[:1], best[0], best[-1]]):
            chosen = recipe
            for part, axis, way in each.ways:
                chosen = chosen.changed(part, axis, way)
            together = self.price(found.mesh, chosen)
            if together is not None and each.ways:
                yield together

    def _cut_data(self, mesh: Mesh) -> Iterator[Mesh]:
        """The same mesh with its data axis in two: replicated over the outer part, sharded over the inner one."""
        sizes = dict(zip(mesh.axes, mesh.shape, strict=True))
        data = sizes.get("dp", 1) * sizes.get("fsdp", 1)
        rest = {axis: size for axis, size in sizes.items() if axis not in ("dp", "fsdp")}
        inner = [each for each in divisors(data) if 1 < each < data]
        near = {axis.size for axis in self.task.machine.axes} | {math.isqrt(data)}
        chosen = inner if len(inner) <= 3 else [each for each in inner if each in near or each == inner[-1]]
        for size in [1, *chosen, data]:
            yield make_mesh(dp=data // size, fsdp=size, **rest)

    def polish(self) -> None:
        """Put each layer of the best plan otherwise, and keep what is faster."""
        ready = [each for each in [*self.fitting(), *self.built] if self._can_be_polished(each)]
        best = min(ready, key=lambda each: each.price.time, default=None)
        if best is None:
            return
        recipe, least = best.recipe, best.price.time
        assert isinstance(recipe, Built)
        layers = [layer for part in self.parts for layer in part.layers]
        for layer, axis in itertools.product(layers, [axis for axis in WAYS if axis in best.mesh.axes]):
            for way in WAYS[axis]:
                changed = recipe.changed(layer, axis, way)
                other = self.price(best.mesh, changed)
                if other is not None and self.task.fits(other.price.memory) and other.price.time < least:
                    recipe, least = changed, other.price.time

    def _can_be_polished(self, found: Found) -> bool:
        """Whether it has choices that the folded model can price: it has too few blocks for some that recompute."""
        recipe = found.recipe
        is_built = isinstance(recipe, Built) and recipe.recompute in (0, ALL)
        return is_built and bool(WAYS.keys() & set(found.mesh.axes)) and self.task.fits(found.price.memory)

    def verify(self, keep: int) -> list[Verified]:
        """The best that fit when the whole model is run; more blocks recompute where the estimate was short."""
        order = self.fitting()
        found: dict[object, Verified] = {}
        for each in self._in_turn(order, keep, found):
            done = self._verify(each)
            if done is not None:
                found[done.mesh, done.recipe] = done
                costs = f"{show_seconds(done.run.time)}, {show_bytes(done.run.memory.peak)}"
                self.tell(f"verified {costs}: {done.recipe.title} on {done.mesh}")
        return sorted(found.values(), key=lambda each: each.run.time)[:keep]

    def _in_turn(self, order: list[Found], keep: int, found: Mapping[object, Verified]) -> Iterator[Found]:
        """What to verify next: named plans until one fits, and those near to the best; then the best of all others."""
        tried: list[Found] = []
        for each in [each for each in order if each.is_named]:
            if found and (len(tried) >= MUST or each.price.time > CLOSE * order[0].price.time):
                break
            tried.append(each)
            yield each
        others = [each for each in order if each not in tried]
        least = max(keep, len(found) + 2)
        yield from (each for each in others if len(found) < least)

    def _verify(self, found: Found) -> Verified | None:
        """The whole model, with fewer or more blocks that recompute where the estimate was a little off."""
        if isinstance(found.recipe, Staged):
            return self._verify_stages(found.mesh, found.recipe)
        best, count = None, self._count(found.recipe)
        tried: set[int] = set()
        while count not in tried and len(tried) < ATTEMPTS:
            tried.add(count)
            recipe = self._with_count(found.recipe, count)
            run = self._run(found.mesh, recipe)
            fits = self.task.fits(run.memory.peak)
            best = Verified(found.mesh, recipe, run) if fits else best
            if not count or not found.saved or self.task.memory is None or (best is not None and not fits):
                break
            room = (self.task.memory - run.memory.peak) / found.saved
            count -= math.floor(room + 0.5) if fits else min(-1, math.floor(room))
            count = min(max(count, 0), sum(self.trials.folded.counts.values()))
        return best

    def _verify_stages(self, mesh: Mesh, recipe: Staged) -> Verified | None:
        for each in dict.fromkeys((recipe, replace(recipe, inside=replace(recipe.inside, recompute=ALL)))):
            try:
                run = self._run(mesh, each)
            except MeshloomError as error:  # such as a model that calls its modules in another order
                self.trials.refused[mesh, each.title] = error
                return None
            if self.task.fits(run.memory.peak):
                return Verified(mesh, each, run)
        return None

    def _run(self, mesh: Mesh, recipe: Recipe) -> DryRun:
        """The dry run of the whole model."""
        if isinstance(recipe, Staged):
            return self.stager.verify(mesh, recipe)
        return self.trials.verify(mesh, recipe)

    def _count(self, recipe: Recipe) -> int:
        """How many blocks recompute."""
        return sum(self.trials.folded.counts.values()) if recipe.recompute == ALL else recipe.recompute

    def _with_count(self, recipe: Recipe, count: int) -> Recipe:
        if not isinstance(recipe, Built):
            return recipe
        return replace(recipe, recompute=ALL if count and count == self._count(Built(recompute=ALL)) else count)

    def _best_line(self) -> str:
        best = next(iter(self.fitting()), None)
        if best is None:
            return "none fits"
        return f"{show_seconds(best.price.time)}, {best.recipe.title} on {best.mesh}"
