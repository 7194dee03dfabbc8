"""Plain values as JSON and back: what JSON lacks is tagged, what cannot be told in JSON is refused by its path.

A tag is a table of one key that begins with `$`: `{"$tuple": [1, 2]}`, `{"$float": "inf"}`, `{"$map": [[3, "a"]]}`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy
import torch

from meshloom.errors import ArgumentError, CheckpointError

DEEPEST = 100  # levels of nesting
Path = tuple[str | int, ...]
Encode = Callable[[Any, Path], Any]


def spell(path: Path) -> str:
    """A place in a state, as one would write it in a program.

    >>> spell(("model", "up.weight"))
    "state['model']['up.weight']"
    """
    return "state" + "".join(f"[{key!r:.200}]" for key in path)


def is_scalar(value: Any) -> bool:
    """Whether a value is one that JSON, or a tag, can hold by itself."""
    return value is None or type(value) in (bool, int, float, str) or isinstance(value, numpy.generic)


def encode_scalar(value: Any, path: Path) -> Any:
    """A number, text, truth or nothing, as JSON has it; any other value is refused by name."""
    if isinstance(value, numpy.generic):
        value = value.item()
    if type(value) is float and not math.isfinite(value):
        return {"$float": repr(value)}
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise refusal(value, path)


def refusal(value: Any, path: Path) -> ArgumentError:
    """The error for a value that a checkpoint cannot hold."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    return ArgumentError(
        f"{spell(path)} is a {kind}, which a checkpoint cannot hold",
        value=f"{value!r:.80}",
        fix="save numbers, text, lists, tuples, dicts, tensors, modules, optimizers, or objects with state_dict() and "
        "load_state_dict(); nothing is pickled",
    )


def encode_container(value: Any, path: Path, encode: Encode) -> Any:
    """A list, a tuple or a dict; its parts are encoded by `encode`."""
    if len(path) > DEEPEST:
        raise ArgumentError(f"{spell(path[:3])} is nested more than {DEEPEST} levels deep", fix="does it hold itself?")
    if type(value) is list:
        return [encode(each, (*path, number)) for number, each in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"$tuple": [encode(each, (*path, number)) for number, each in enumerate(value)]}
    if type(value) in (dict, OrderedDict) and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(each, (*path, key)) for key, each in value.items()}
    if type(value) in (dict, OrderedDict, Counter):
        tag = "$counter" if type(value) is Counter else "$map"
        return {tag: [[_encode_key(key, path), encode(each, (*path, key))] for key, each in value.items()]}
    raise refusal(value, path)


def _encode_key(key: Any, path: Path) -> Any:
    if isinstance(key, tuple):
        return {"$tuple": [_encode_key(each, path) for each in key]}
    if not is_scalar(key):
        raise ArgumentError(f"{spell(path)} has the key {key!r:.80}, which a checkpoint cannot hold", fix="use text")
    return encode_scalar(key, path)


def tag_of(node: Any) -> str | None:
    """The tag of a node: `$tuple`, `$tensor`; None for what is plain JSON."""
    if isinstance(node, dict) and len(node) == 1:
        (key,) = node
        return key if key.startswith("$") else None
    return None


def decode(node: Any, path: Path, decode_tag: Callable[[str, Any, Path], Any]) -> Any:
    """A value from its node; tags that are not of plain values are given to `decode_tag`."""
    if len(path) > DEEPEST:
        raise malformed(path, "nested too deeply")
    if isinstance(node, list):
        return [decode(each, (*path, number), decode_tag) for number, each in enumerate(node)]
    tag = tag_of(node)
    if tag is not None:
        return _decode_tagged(tag, node[tag], path, decode_tag)
    if isinstance(node, dict):
        return {key: decode(each, (*path, key), decode_tag) for key, each in node.items()}
    return node


def _decode_tagged(tag: str, inside: Any, path: Path, decode_tag: Callable[[str, Any, Path], Any]) -> Any:
    if tag == "$float":
        if inside not in ("inf", "-inf", "nan"):
            raise malformed(path, f"the number {inside!r:.40}")
        return float(inside)
    if tag in ("$tuple", "$map", "$counter") and not isinstance(inside, list):
        raise malformed(path, f"no list under {tag}")
    if tag == "$tuple":
        return tuple(decode(each, (*path, number), decode_tag) for number, each in enumerate(inside))
    if tag in ("$map", "$counter"):
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in inside):
            raise malformed(path, f"no pairs under {tag}")
        pairs = [(decode(key, path, decode_tag), each) for key, each in inside]
        if not all(is_scalar(key) or isinstance(key, tuple) for key, _ in pairs):
            raise malformed(path, "a key that is none")
        found = {key: decode(each, (*path, _plain(key)), decode_tag) for key, each in pairs}
        return Counter(found) if tag == "$counter" else found
    return decode_tag(tag, inside, path)


def _plain(key: Any) -> str | int:
    return key if isinstance(key, (str, int)) else str(key)


def malformed(path: Path, what: str) -> CheckpointError:
    """The error for an index that says what no `save` has written."""
    return CheckpointError(f"the index of the checkpoint has {what} at {spell(path)}", fix="use another checkpoint")
