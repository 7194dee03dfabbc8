"""Presets: whole machines as data, with the source of every figure beside it in `presets/*.toml`.

Start with `preset(name)`; `load_preset(path)` reads a user's own file of the same form.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from meshloom.errors import ArgumentError, FabricError, closest, expect
from meshloom.fabric import reading
from meshloom.fabric.axis import AxisLinks
from meshloom.fabric.fabric import Fabric, Pair, checked_kinds, checked_shape
from meshloom.fabric.links import Link
from meshloom.fabric.machine import Machine

if TYPE_CHECKING:
    from importlib.abc import Traversable

_T = TypeVar("_T")
KEYS = (
    "name title shape kinds levels links.lanes links.latency links.bandwidth links.efficiency links.patterns "
    "links.packet links.packet_latency links.least links.launch links.missing links.extra "
    "device.memory device.memory_bandwidth device.memory_efficiency device.efficiency device.overhead device.combining "
    "device.flops"
).split()
# Where `meshloom calibrate` writes, and `preset("this-machine")` reads.
THIS_MACHINE = os.path.join(os.path.expanduser("~"), ".config", "meshloom", "this-machine.toml")


@dataclass(frozen=True, slots=True)
class Preset:
    """A machine: its grid, its links (per axis; bandwidth raw, of one lane and direction) and its devices.

    `efficiency` is the part of the bandwidth that messages reach; `patterns` the part on axes of another kind, and that
    of messages that are combined where they arrive. `packet` and `packet_latency` (per axis) are the size and latency
    of a full packet, `least` the bytes that the smallest message counts for, `levels` what the links of each axis lie
    between. All else is as in a `Machine`.

    >>> print(preset("t3000"))
    t3000: Tenstorrent T3000, 8 Wormhole chips
      links    2x4 (line, line), 1 lane of 12.5 GB/s x 0.936, 0.93 us
      patterns ring x 0.74, combine x 0.56
      packet   4096 B, 1.2 us; messages count for 3500 B at least
      sums     2.5 us to start a collective, 96 GB/s combined
      device   12 GB at 288 GB/s x 0.92, 4 us per op
      flops    f16 65.5 T, bf16 65.5 T, bfp8 131 T, fp8 233 T, bfp4 233 T, x 0.85
    """

    name: str
    title: str
    shape: tuple[int, ...]
    kinds: tuple[str, ...]
    lanes: tuple[int, ...]
    latency: tuple[float, ...]
    bandwidth: tuple[float, ...]
    efficiency: float
    memory: float
    memory_bandwidth: float
    flops: tuple[tuple[str, float], ...]
    missing: tuple[Pair, ...] = ()
    extra: tuple[Pair | Link, ...] = ()
    patterns: tuple[tuple[str, float], ...] = ()
    packet: float | None = None
    packet_latency: tuple[float, ...] = ()
    least: float = 0.0
    launch: float = 0.0
    levels: tuple[str, ...] = ()
    overhead: float = 0.0
    combining: float | None = None
    flops_efficiency: float = 1.0
    memory_efficiency: float = 1.0

    def __post_init__(self) -> None:
        checked_kinds(checked_shape(self.shape), self.kinds)
        optional = [what for what in ("packet_latency", "levels") if getattr(self, what)]
        for what in ("lanes", "latency", "bandwidth", *optional):
            if len(getattr(self, what)) != len(self.shape):
                raise FabricError(f"preset {self.name!r} needs {what} for each of {len(self.shape)} axes")
        if not 0 < self.efficiency <= 1:
            raise FabricError(f"efficiency of preset {self.name!r} is {self.efficiency!r}", fix="give 0 to 1")
        if (self.packet is None) != (not self.packet_latency):
            raise FabricError(f"preset {self.name!r} has a packet without its latency, or the reverse", fix="give both")
        if not self.flops:
            raise FabricError(f"preset {self.name!r} has no FLOP/s", fix="give at least one dtype, such as f32")

    def __str__(self) -> str:
        ways = zip(self.kinds, self.levels, strict=True) if self.levels else ((kind, "") for kind in self.kinds)
        kinds = ", ".join(f"{kind} of {level}s" if level else kind for kind, level in ways)
        device = f"{_short(self.memory, 1e9)} GB at {_short(self.memory_bandwidth, 1e9)} GB/s"
        flops = ", ".join(f"{dtype} {_short(figure, 1e12)} T" for dtype, figure in self.flops)
        lines = [
            f"{self.name}: {self.title}",
            f"  links    {'x'.join(map(str, self.shape))} ({kinds}), {self._links()}",
            *self._more(),
            f"  device   {device}{_times(self.memory_efficiency)}{self._per_op()}",
            f"  flops    {flops}{_times(self.flops_efficiency, ',')}",
        ]
        return "\n".join(lines)

    def _more(self) -> Iterator[str]:
        if self.patterns:
            yield f"  patterns {', '.join(f'{name} x {part:g}' for name, part in self.patterns)}"
        if self.packet:
            latencies = dict.fromkeys(f"{_short(each, 1e-6)} us" for each in self.packet_latency)
            least = f"; messages count for {self.least:g} B at least" if self.least else ""
            yield f"  packet   {self.packet:g} B, {' | '.join(latencies)}{least}"
        rate = f"{_short(self.combining, 1e9)} GB/s combined" if self.combining else ""
        start = f"{_short(self.launch, 1e-6)} us to start a collective" if self.launch else ""
        if rate or start:
            yield f"  sums     {', '.join(filter(None, (start, rate)))}"

    def _per_op(self) -> str:
        return f", {_short(self.overhead, 1e-6)} us per op" if self.overhead else ""

    def _links(self) -> str:
        axes = zip(self.lanes, self.bandwidth, self.latency, strict=True)
        texts = [
            f"{count} lane{'s' if count > 1 else ''} of {_short(rate, 1e9)} GB/s x {self.efficiency:g}, "
            f"{_short(seconds, 1e-6)} us"
            for count, rate, seconds in axes
        ]
        return " | ".join(texts if len(set(texts)) > 1 else texts[:1])

    def machine(
        self, dtype: str = "f32", shape: Sequence[int] | None = None, kinds: str | Sequence[str] | None = None
    ) -> Machine:
        """What prices come from: the links of every axis, and FLOP/s of a dtype (of f32, or the lowest, without one).

        Another shape or other kinds keep the figures, as those of `fabric` do.

        >>> preset("galaxy").machine("bfp8").flops
        131000000000000.0
        >>> print(*preset("galaxy").machine().axes, sep=" | ")
        ring of 8, 34.8 GB/s, 0.87 us | ring of 4, 34.8 GB/s, 0.87 us
        """
        figures = dict(self.flops)
        axes = self.axes(shape, kinds)
        if not axes:
            raise FabricError(f"a machine of shape {shape!r} has no axis", fix="give one size or more, such as (8,)")
        return Machine(
            self.name,
            latency=max(axis.latency for axis in axes),
            bandwidth=min(axis.bandwidth for axis in axes),
            flops=figures.get(dtype, figures.get("f32", min(figures.values()))),
            memory_bandwidth=self.memory_bandwidth,
            memory=self.memory,
            peaks=self.flops,
            axes=axes,
            launch=self.launch,
            overhead=self.overhead,
            combining=self.combining,
            efficiency=self.flops_efficiency,
            memory_efficiency=self.memory_efficiency,
        )

    def axes(
        self, shape: Sequence[int] | None = None, kinds: str | Sequence[str] | None = None
    ) -> tuple[AxisLinks, ...]:
        """What joins the devices along each axis, with all lanes and at the efficiency of its kind."""
        grid = self.shape if shape is None else checked_shape(shape)
        ways = self._repeat("kinds", self.kinds, grid) if kinds is None else checked_kinds(grid, kinds)
        figures = [self._repeat(what, getattr(self, what), grid) for what in ("latency", "bandwidth", "lanes")]
        packets = self._repeat("packet_latency", self.packet_latency, grid) if self.packet else (None,) * len(grid)
        levels = self._repeat("levels", self.levels, grid) if self.levels else ("",) * len(grid)
        columns = zip(grid, ways, *figures, packets, levels, strict=True)
        return tuple(self._axis(str(number), *column) for number, column in enumerate(columns))

    def _axis(
        self,
        name: str,
        size: int,
        kind: str,
        latency: float,
        bandwidth: float,
        lanes: int,
        packet_latency: float | None,
        level: str,
    ) -> AxisLinks:
        plain, combined = (bandwidth * lanes * self.efficiency_of(kind, combine) for combine in (False, True))
        packet = (self.packet, packet_latency) if self.packet and packet_latency else None
        slow = None if combined == plain else combined
        return AxisLinks(kind, size, latency, plain, slow, packet, self.least, name, level)

    def efficiency_of(self, kind: str, combine: bool = False) -> float:
        """The part of the bandwidth that messages reach on an axis of a kind; if asked, those that are combined.

        >>> preset("galaxy").efficiency_of("line"), preset("galaxy").efficiency_of("line", combine=True)
        (0.936, 0.56)
        """
        known = dict(self.patterns)
        plain = known.get(kind, self.efficiency)
        return known.get(f"{kind}.combine", known.get("combine", plain)) if combine else plain

    def fabric(self, shape: Sequence[int] | None = None, kinds: str | Sequence[str] | None = None) -> Fabric:
        """Its links; another shape or other kinds keep the figures, without the links that are missing or extra here.

        >>> print(preset("galaxy").fabric((32, 32)))
        32x32 fabric 'galaxy' (ring, ring) of 4096 links
        """
        axes = self.axes(shape, kinds)
        grid = tuple(axis.size for axis in axes)
        own = grid == self.shape and kinds is None
        return Fabric.grid(
            grid,
            [axis.kind for axis in axes],
            [axis.latency for axis in axes],
            [axis.bandwidth for axis in axes],
            missing=self.missing if own else (),
            extra=self.extra if own else (),
            name=self.name,
            combined=[axis.combined for axis in axes],
            packets=[axis.packet for axis in axes],
            least=self.least,
            launch=self.launch,
            combining=self.combining,
        )

    def _repeat(self, what: str, values: tuple[_T, ...], shape: tuple[int, ...]) -> tuple[_T, ...]:
        """Values per axis for another shape: as they are for as many axes, and for any number if all are equal."""
        if len(values) == len(shape):
            return values
        if len(set(values)) == 1:
            return values[:1] * len(shape)
        raise FabricError(
            f"the axes of preset {self.name!r} differ in {what}: {len(values)} of them cannot become {len(shape)}",
            fix=f"give a shape of {len(values)} axes",
        )

    def to_toml(self) -> str:
        """The preset as a file that `load_preset` reads back."""
        lines = [f"name = {reading.quote(self.name)}", f"title = {reading.quote(self.title)}"]
        lines += [f"shape = {list(self.shape)}", f"kinds = {_texts(self.kinds)}"]
        lines += [f"levels = {_texts(self.levels)}"] if self.levels else []
        lines += ["", "[links]"]
        lines += [f"{what} = {list(getattr(self, what))}" for what in ("lanes", "latency", "bandwidth")]
        lines += [f"efficiency = {self.efficiency}", f"launch = {self.launch}"]
        lines += [f"least = {self.least}"] if self.least else []
        lines += [f"packet = {self.packet}", f"packet_latency = {list(self.packet_latency)}"] if self.packet else []
        lines += [f"{what} = {_joins(getattr(self, what))}" for what in ("missing", "extra") if getattr(self, what)]
        lines += [f"patterns.{name} = {part}" for name, part in self.patterns]
        lines += ["", "[device]", f"memory = {self.memory}", f"memory_bandwidth = {self.memory_bandwidth}"]
        lines += [f"memory_efficiency = {self.memory_efficiency}", f"efficiency = {self.flops_efficiency}"]
        lines += [f"overhead = {self.overhead}", *([f"combining = {self.combining}"] if self.combining else [])]
        lines += ["", "[device.flops]", *(f"{dtype} = {figure}" for dtype, figure in self.flops)]
        return "\n".join(lines) + "\n"


def _times(part: float, before: str = "") -> str:
    return "" if part == 1 else f"{before} x {part:g}"


def _texts(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(reading.quote, texts))}]"


def _short(figure: float, unit: float) -> str:
    return f"{figure / unit:.4g}"


def _joins(joins: Sequence[Pair | Link]) -> str:
    return f"[{', '.join(_join(each) for each in joins)}]"


def _join(each: Pair | Link) -> str:
    if isinstance(each, Link):
        ends = f"from = {list(each.source)}, to = {list(each.destination)}"
        return f"{{ {ends}, latency = {each.latency}, bandwidth = {each.bandwidth} }}"
    return f"[{list(each[0])}, {list(each[1])}]"


def preset_names() -> tuple[str, ...]:
    """The presets that come with meshloom.

    >>> preset_names()
    ('ethernet16', 'galaxy', 'galaxy4', 'loudbox', 'n300', 'nvlink8', 'nvlink8x16', 'quietbox', 't3000')
    """
    names = [file.name for file in _folder().iterdir()]
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def _folder() -> Traversable:
    from importlib import resources  # 9 ms that planning does not need

    return resources.files("meshloom.fabric") / "presets"


def preset(name: str) -> Preset:
    """A preset that comes with meshloom, by its name in any case; "this-machine" is what `meshloom calibrate` wrote.

    >>> preset("N300").shape
    (1, 2)
    """
    wanted = str(name).lower()
    if wanted == "this-machine":
        if not os.path.exists(THIS_MACHINE):
            raise FabricError("this machine has not been measured", fix="run `meshloom calibrate`")
        return load_preset(THIS_MACHINE)
    if wanted not in preset_names():
        raise FabricError(f"no preset is called {name!r}", fix=closest(wanted, preset_names()))
    return _read_shipped(wanted)


@cache
def _read_shipped(name: str) -> Preset:
    file = _folder() / f"{name}.toml"
    return read_preset(file.read_text(encoding="utf-8"), file=f"{name}.toml", name=name)


def as_machine(given: str | Machine | Preset) -> Machine:
    """A machine; a preset, or the name of one, says which.

    >>> as_machine("galaxy") == preset("galaxy").machine()
    True
    """
    found = preset(given) if isinstance(given, str) else given
    found = found.machine() if isinstance(found, Preset) else found
    if not isinstance(found, Machine):
        raise ArgumentError(f"machine={given!r:.80} is no machine", fix='give a preset\'s name, such as "galaxy"')
    return found


def memory_on(machine: Machine, asked: float | None) -> float | None:
    """The bytes that one device has: as asked for, or the machine's own; None if it does not say."""
    if asked is None:
        return machine.memory
    expect("memory", asked, (int, float), fix="give the bytes that one device has")
    if not asked > 0:
        raise ArgumentError(f"memory={asked!r} is no memory", fix="give the bytes that one device has, above 0")
    return asked


def load_preset(path: str | os.PathLike[str]) -> Preset:
    """A preset from a TOML file; its name is that in the file, or the file's own."""
    expect("path", path, (str, os.PathLike), fix="give the path of a TOML file")
    file = os.fspath(path)
    return read_preset(reading.read_text(file), file=file, name=os.path.basename(file).removesuffix(".toml"))


def read_preset(text: str, file: str, name: str) -> Preset:
    """A preset from TOML text; `file` is what errors call it, `name` its name if the text has none."""
    document = reading.Document(text, file)
    shape = document.take("shape", reading.sizes)
    axes = len(shape)
    found = Preset(
        name=document.take("name", reading.text, name),
        title=document.take("title", reading.text, name),
        shape=shape,
        kinds=document.take("kinds", reading.per_axis(reading.kind, axes)),
        lanes=document.take("links.lanes", reading.per_axis(reading.whole, axes), (1,) * axes),
        latency=document.take("links.latency", reading.per_axis(reading.number, axes)),
        bandwidth=document.take("links.bandwidth", reading.per_axis(reading.number, axes)),
        efficiency=document.take("links.efficiency", reading.share, 1.0),
        memory=document.take("device.memory", reading.number),
        memory_bandwidth=document.take("device.memory_bandwidth", reading.number),
        **_optional(document, axes),
        flops=reading.flops(document, "device.flops"),
        missing=document.take("links.missing", reading.pairs(axes), ()),
        extra=document.take("links.extra", reading.joins(axes), ()),
    )
    document.finish(tuple(KEYS))
    _check_links(found, document)
    return found


def _optional(document: reading.Document, axes: int) -> dict[str, Any]:
    """What a file may leave out: the packet of links, and figures of devices that are none or all by default."""
    found: dict[str, Any] = {
        "patterns": reading.patterns(document, "links.patterns"),
        "launch": document.take("links.launch", reading.seconds, 0.0),
        "least": document.take("links.least", reading.seconds, 0.0),
        "levels": document.take("levels", reading.per_axis(reading.text, axes)) if document.has("levels") else (),
        "overhead": document.take("device.overhead", reading.seconds, 0.0),
        "flops_efficiency": document.take("device.efficiency", reading.share, 1.0),
        "memory_efficiency": document.take("device.memory_efficiency", reading.share, 1.0),
    }
    if document.has("device.combining"):
        found["combining"] = document.take("device.combining", reading.number)
    if document.has("links.packet"):
        found["packet"] = document.take("links.packet", reading.number)
        found["packet_latency"] = document.take("links.packet_latency", reading.per_axis(reading.number, axes))
    return found


def _check_links(found: Preset, document: reading.Document) -> None:
    """Links of a file that cannot be are said to be of its key `links.missing`, or of `links.extra` without that."""
    if not found.missing and not found.extra:
        return
    try:
        found.fabric()
    except FabricError as error:
        key = "links.missing" if found.missing else "links.extra"
        raise document.refusal(key, f"gives no fabric: {error.headline}", str(error.details.get("fix"))) from None
