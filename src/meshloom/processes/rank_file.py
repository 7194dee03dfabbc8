"""A file that says which rank runs where, in YAML, shaped like TT-Metal's: such a file can be used as it is.

    rank_bindings:
      - rank: 0
        mesh_id: 0
        mesh_host_rank: 0            # may be left out: counted through in each mesh
        host: a                      # may be left out, as may everything below
        visible_devices: [0, 1]      # or TT_VISIBLE_DEVICES among the overrides
        env_overrides:
          OMP_NUM_THREADS: 4

Values are taken as they are written (`on` is "on"). Unknown keys, repeated keys or ranks, and gaps are errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from meshloom.errors import BindingError, closest
from meshloom.processes.bindings import ALONE, VISIBLE, Binding, Bindings, read_devices

GRAPH = "mesh_graph_desc_path"  # passed on to every rank as TT_MESH_GRAPH_DESC_PATH, as tt-run does
DEEPEST = 16
KEYS = ("rank", "mesh_id", "mesh_host_rank", "host", "visible_devices", "env_overrides")


def read_bindings(path: str | Path) -> Bindings:
    """The bindings that a file holds."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BindingError(f"the file of bindings {path} cannot be read: {error}") from error
    return bindings_from(text, str(path))


def bindings_from(text: str, where: str = "text") -> Bindings:
    """The bindings that YAML text holds.

    >>> print(bindings_from("rank_bindings: [{rank: 0, mesh_id: 0, visible_devices: [0, 1]}]"))
    rank  local rank  host       mesh  host rank  devices  environment
    0     0           localhost  0     0          0,1      -
    """
    import yaml

    try:
        _check_depth(yaml.parse(text, Loader=yaml.BaseLoader))
        root = yaml.compose(text, Loader=yaml.BaseLoader)
    except BindingError as error:
        raise error.locate(file=where) from None
    except yaml.YAMLError as error:
        raise BindingError(f"{where} is not YAML", reason=error) from error
    try:
        top = _fields(root, ("rank_bindings", GRAPH), "the file")
        rows = _items(_need(top, "rank_bindings", "the file", root))
        graph = _text(top[GRAPH]) if GRAPH in top else None
        return Bindings.of(_number_rows([_row(row, graph) for row in rows]))
    except BindingError as error:
        raise error.locate(file=where) from None


def _check_depth(events: Iterable[Any]) -> None:
    """An error where lists and mappings nest deeper than bindings do: YAML's reader would follow them down."""
    depth = 0
    for event in events:
        depth += event.__class__.__name__ in ("SequenceStartEvent", "MappingStartEvent")
        depth -= event.__class__.__name__ in ("SequenceEndEvent", "MappingEndEvent")
        if depth > DEEPEST:
            line = event.start_mark.line + 1
            raise BindingError(
                f"line {line}: lists and mappings nest deeper than {DEEPEST}", fix=f"use the keys {KEYS}"
            )


def bindings_to(bindings: Bindings) -> str:
    """The bindings as YAML text; `bindings_from` reads the same value back."""
    import yaml

    rows = [{key: value for key, value in _plain(row).items() if value is not None} for row in bindings]
    return str(yaml.safe_dump({"rank_bindings": rows}, sort_keys=False))


def write_bindings(bindings: Bindings, path: str | Path) -> None:
    """Write the bindings to a file."""
    Path(path).write_text(bindings_to(bindings), encoding="utf-8")


def _plain(row: Binding) -> dict[str, object]:
    return {
        "rank": row.rank,
        "mesh_id": row.mesh_id,
        "mesh_host_rank": row.host_rank,
        "host": row.host,
        "visible_devices": None if row.visible is None else list(row.visible),
        "env_overrides": dict(row.overrides) or None,
    }


def _row(node: object, graph: str | None) -> tuple[object, dict[str, object]]:
    """One rank's line and values."""
    found = _fields(node, KEYS, "a rank")
    _need(found, "rank", "a rank", node)
    values: dict[str, Any] = {key: READERS[key](value) for key, value in found.items()}
    overrides = values.pop("env_overrides", {})
    if graph is not None:
        overrides.setdefault("TT_MESH_GRAPH_DESC_PATH", graph)
    told = {overrides.pop(name) for name in VISIBLE if name in overrides}
    seen = {read_devices(text, "visible devices") for text in told}
    if "visible_devices" in values:
        seen.add(values.pop("visible_devices"))
    if len(seen) > 1:
        raise BindingError(f"rank {values['rank']} sees different devices", line=_line(node), found=sorted(seen))
    values |= {"visible": next(iter(seen), None), "overrides": tuple(sorted(overrides.items()))}
    if "mesh_host_rank" in values:
        values["host_rank"] = values.pop("mesh_host_rank")
    return node, values


def _number_rows(rows: list[tuple[Any, dict[str, Any]]]) -> list[Binding]:
    """The rows as bindings, with ranks checked for repetition and local ranks counted on each host."""
    seen: dict[int, int] = {}
    for node, values in rows:
        other = seen.setdefault(values["rank"], _line(node))
        if other != _line(node):
            raise BindingError(
                f"rank {values['rank']} is bound twice", lines=f"{other} and {_line(node)}", fix="bind each rank once"
            )
    missing = sorted(set(range(len(rows))) - set(seen))
    if missing:
        raise BindingError(
            f"rank {missing[0]} is missing",
            found=", ".join(map(str, sorted(seen))),
            fix=f"ranks go from 0 to {len(rows) - 1} without gaps",
        )
    made, counts = [], dict[str, int]()
    for node, values in sorted(rows, key=lambda row: row[1]["rank"]):
        host = values.setdefault("host", ALONE)
        local_rank = counts.get(host, 0)
        counts[host] = local_rank + 1
        try:
            made.append(Binding(**values, local_rank=local_rank, world_size=len(rows)))
        except BindingError as error:
            raise error.locate(line=_line(node)) from None
    return made


def _fields(node: Any, known: tuple[str, ...] | None, what: str) -> dict[str, Any]:
    """The keys of a mapping with their nodes; unknown and repeated ones are refused."""
    if node is None or node.id != "mapping":
        raise BindingError(f"{what} is not a mapping of keys to values", line=_line(node))
    found: dict[str, Any] = {}
    for key, value in node.value:
        name = _text(key)
        if known is not None and name not in known:
            raise BindingError(f"{what} has an unknown key {name!r}", line=_line(key), fix=closest(name, known))
        if name in found:
            raise BindingError(f"{what} has the key {name!r} twice", line=_line(key))
        found[name] = value
    return found


def _need(found: Mapping[str, object], key: str, what: str, node: object) -> Any:
    if key not in found:
        raise BindingError(f"{what} has no {key!r}", line=_line(node), missing=key)
    return found[key]


def _items(node: Any) -> list[Any]:
    if node.id != "sequence":
        raise BindingError("rank_bindings is not a list", line=_line(node), fix="begin each rank with '- rank: 0'")
    return list(node.value)


def _text(node: Any) -> str:
    if node.id != "scalar":
        raise BindingError("a single value was expected", line=_line(node))
    return str(node.value)


def _number(node: object) -> int:
    text = _text(node)
    if not text.isdecimal():
        raise BindingError(f"{text!r} is not a number", line=_line(node), fix="write 0, 1, 2 and so on")
    return int(text)


def _devices(node: Any) -> tuple[int, ...]:
    text = ",".join(map(_text, node.value)) if node.id == "sequence" else _text(node)
    try:
        return read_devices(text, "visible_devices")
    except BindingError as error:
        raise error.locate(line=_line(node)) from None


def _overrides(node: object) -> dict[str, str]:
    return {name: _text(value) for name, value in _fields(node, None, "env_overrides").items()}


READERS: dict[str, Callable[[Any], Any]] = {
    "rank": _number,
    "mesh_id": _number,
    "mesh_host_rank": _number,
    "host": _text,
    "visible_devices": _devices,
    "env_overrides": _overrides,
}


def _line(node: Any) -> int:
    return 1 if node is None else node.start_mark.line + 1
