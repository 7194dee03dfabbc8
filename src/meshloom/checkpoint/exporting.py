"""`export`: the weights of a checkpoint as files that anybody reads: one safetensors file, or Hugging Face's layout.

Tensors are read and written in blocks, so that a model larger than memory can be exported. It takes one process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshloom.checkpoint.files import Opened, Part, Told, open_files, read_part, sync_folder, write_file, write_synced
from meshloom.checkpoint.folders import as_folder
from meshloom.checkpoint.index import Index, Saved, read_index
from meshloom.checkpoint.progress import Progress, check_progress, show
from meshloom.checkpoint.values import tag_of
from meshloom.errors import ArgumentError, CheckpointError, closest

LAYOUTS = ("file", "huggingface")
BLOCK = 1 << 26  # bytes of a tensor that are in memory at a time
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_ABOUT = {"format": "pt"}  # what readers of Hugging Face look for


def export(
    folder: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    layout: str = "file",
    max_shard: str | int = "5GB",
    part: str | None = None,
    progress: Progress = None,
) -> list[Path]:
    """Write the weights of a checkpoint for others: the files that were written.

    `layout="file"` writes one safetensors file, `layout="huggingface"` a folder of files of at most `max_shard` with an
    index. `part` names the module in the state if there are several. Checksums are compared on the way.

    >>> import tempfile
    >>> import meshloom as loom
    >>> from safetensors.torch import load_file
    >>> parent = tempfile.mkdtemp()
    >>> saved = loom.save({"model": torch.nn.Linear(2, 3), "step": 1}, parent + "/step-000001")
    >>> written = export(parent + "/step-000001", parent + "/model.safetensors")
    >>> {name: tuple(value.shape) for name, value in sorted(load_file(written[0]).items())}
    {'bias': (3,), 'weight': (3, 2)}
    """
    check_progress(progress)
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout={layout!r} is not known", fix=closest(layout, LAYOUTS))
    limit = read_size(max_shard)
    index = read_index(as_folder(folder))
    tensors = weights_of(index, part)
    total = sum(each.nbytes for each in tensors.values())
    goal = Path(os.path.abspath(os.fspath(target)))
    with open_files(index) as opened, show("exporting", total, progress) as told:
        if layout == "file":
            return [_write(goal, tensors, opened, told)]
        return _write_shards(goal, tensors, limit, opened, told)


def read_size(text: str | int) -> int:
    """A number of bytes: `5GB`, `500MB`, `2GiB`, or a number.

    >>> read_size("5GB"), read_size("1.5 MiB"), read_size(100)
    (5000000000, 1572864, 100)
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)?\s*", str(text), re.IGNORECASE)
    if isinstance(text, bool) or matched is None or float(matched[1]) <= 0:
        raise ArgumentError(f"max_shard={text!r} is not a size", fix='give bytes, such as "5GB"')
    return int(float(matched[1]) * _UNITS[(matched[2] or "").upper()])


def find_modules(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The modules in the tree of a checkpoint, with their places."""
    tag = tag_of(tree)
    if tag == "$module" and isinstance(tree[tag], dict):
        yield "/".join(path), tree[tag]
    elif isinstance(tree, dict) and tag in (None, "$object"):
        for key, each in tree.items():
            yield from find_modules(each, (*path, key) if tag is None else path)


def weights_of(index: Index, part: str | None) -> dict[str, Saved]:
    """The tensors of a module in a checkpoint, by the names that the module gives them."""
    modules = dict(find_modules(index.state))
    if part is None and len(modules) == 1:
        (part,) = modules
    if part is None or part not in modules:
        what = f"there is no module {part!r}" if part is not None else f"there are {len(modules)} modules"
        names = ", ".join(repr(each) for each in modules) or "none"
        raise CheckpointError(f"{index.place}: {what} in it", modules=names, fix="part= names the one to take")
    named = {key: node[tag] for key, node in modules[part].items() if (tag := tag_of(node)) in ("$tensor", "$dense")}
    lost = [name for name in named.values() if name not in index.tensors]
    if lost:
        raise CheckpointError(f"{index.place}: its index has no tensor {lost[0]!r:.80}", fix="use another checkpoint")
    return {key: index.tensors[name] for key, name in named.items()}


def _write(path: Path, tensors: Mapping[str, Saved], opened: Opened, told: Told) -> Path:
    """One file: written aside, synced, renamed."""
    parts = [
        Part(key, saved.dtype, saved.shape, partial(_blocks, opened, saved)) for key, saved in sorted(tensors.items())
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp-{os.urandom(8).hex()}")
    try:
        write_file(aside, parts, told, _ABOUT)
        os.rename(aside, path)
    except OSError as error:
        raise CheckpointError(f"{path}: it cannot be written: {error.strerror}") from error
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)
    return path


def _blocks(opened: Opened, saved: Saved) -> Iterator[torch.Tensor]:
    """A tensor from its first row to its last, some rows at a time."""
    if not saved.shape or saved.nbytes <= BLOCK:
        yield read_part(opened, saved, (0,) * len(saved.shape), saved.shape)
        return
    row = max(1, saved.nbytes // saved.shape[0])
    count, rest = max(1, BLOCK // row), saved.shape[1:]
    for first in range(0, saved.shape[0], count):
        stop = min(first + count, saved.shape[0])
        yield read_part(opened, saved, (first, *(0 for _ in rest)), (stop, *rest))


def _write_shards(folder: Path, tensors: Mapping[str, Saved], limit: int, opened: Opened, told: Told) -> list[Path]:
    """A folder as Hugging Face has it, made aside; one that is there already is not touched."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: it is there already", fix="export to a new folder")
    shards = _pack(tensors, limit)
    aside = folder.with_name(f"{folder.name}.tmp-{os.urandom(8).hex()}")
    aside.mkdir(parents=True)
    try:
        where: dict[str, str] = {}
        for number, shard in enumerate(shards, 1):
            many = len(shards) > 1
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if many else "model.safetensors"
            _write(aside / name, shard, opened, told)
            where |= dict.fromkeys(shard, name)
        if len(shards) > 1:
            total = sum(each.nbytes for each in tensors.values())
            table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            write_synced(aside / "model.safetensors.index.json", json.dumps(table, indent=2).encode())
        sync_folder(aside)
        os.rename(aside, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(folder.parent)
    return sorted(folder.iterdir())


def _pack(tensors: Mapping[str, Saved], limit: int) -> list[dict[str, Saved]]:
    """Tensors in files of at most so many bytes; a larger tensor has a file of its own."""
    shards: list[dict[str, Saved]] = [{}]
    size = 0
    for key, saved in sorted(tensors.items()):
        if shards[-1] and size + saved.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][key] = saved
        size += saved.nbytes
    return shards


def verify(folder: str | os.PathLike[str], *, progress: Progress = None) -> Index:
    """Compare every byte of a checkpoint with its checksums; the index, or an error that names a damaged file.

    >>> import tempfile
    >>> import meshloom as loom
    >>> folder = tempfile.mkdtemp() + "/step-000001"
    >>> saved = loom.save({"weight": torch.ones(3)}, folder)
    >>> verify(folder).nbytes
    12
    """
    check_progress(progress)
    index = read_index(as_folder(folder))
    total = sum(file.nbytes for file in index.files.values())
    with open_files(index) as opened, show("comparing", total, progress) as told:
        opened.verify([(name, 0, file.nbytes) for name, file in index.files.items()], told)
        opened.check_headers()
    return index
