"""Look at a checkpoint: what is in it, whether every byte is as it was written, or its weights as files for others.

show lists the parts and the tensors. verify reads all of it and compares the checksums. export writes the weights as
one safetensors file (--out model.safetensors), or as a folder in the layout of Hugging Face (--layout huggingface).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from meshloom.errors import ArgumentError

DEEDS = ("show", "verify", "export")


def arguments(parser: argparse.ArgumentParser) -> None:
    """What `meshloom checkpoint` takes."""
    parser.add_argument("deed", choices=DEEDS, help="what to do")
    parser.add_argument("folder", type=Path, help="a folder that loom.save wrote, or the parent of several")
    parser.add_argument("--out", type=Path, help="export: the file or the folder to write")
    parser.add_argument("--layout", default="file", help="export: file or huggingface (default %(default)s)")
    parser.add_argument("--max-shard", default="5GB", help="export: the largest file of huggingface (%(default)s)")
    parser.add_argument("--part", help="export: the name of the module in the state, if there are several")


def run(options: argparse.Namespace) -> None:
    """Do one of the three."""
    from meshloom.checkpoint import exporting, folders

    folder = options.folder
    if not folders.is_checkpoint(folder):
        folder = folders.latest(folder) or folder
    if options.deed == "show":
        print("\n".join(describe(folder)))
    elif options.deed == "verify":
        index = exporting.verify(folder)
        size = spell_bytes(sum(file.nbytes for file in index.files.values()))
        print(f"{folder}: {size} in {len(index.files)} file{'s' * (len(index.files) != 1)}, all as they were written")
    else:
        if options.out is None:
            raise ArgumentError("export needs the name of what it writes", fix="--out model.safetensors")
        written = exporting.export(
            folder, options.out, layout=options.layout, max_shard=options.max_shard, part=options.part
        )
        print("\n".join(f"wrote {each}" for each in written))


def describe(folder: Path) -> list[str]:
    """What a checkpoint holds, line by line."""
    from meshloom.checkpoint.index import read_index

    index = read_index(folder)
    size, count = spell_bytes(index.nbytes), len(index.files)
    lines = [f"{folder}: {len(index.tensors)} tensors, {size} in {count} file{'s' * (count != 1)}"]
    lines += [f"  {key:<12}  {_kind(node)}" for key, node in index.state.items()]
    width = max((len(name) for name in index.tensors), default=0)
    for name, saved in index.tensors.items():
        count = len(saved.pieces)
        lines.append(f"  {name:<{width}}  {saved}  {spell_bytes(saved.nbytes)}  {count} piece{'s' * (count != 1)}")
    return lines


def _kind(node: object) -> str:
    from meshloom.checkpoint.values import tag_of

    tag = tag_of(node)
    if tag == "$optimizer":
        return f"optimizer {node[tag]['class']}"  # type: ignore[index]
    if tag is not None:
        return {"$dense": "tensor"}.get(tag, tag.removeprefix("$"))
    return f"{node!r:.60}" if not isinstance(node, (dict, list)) else f"{type(node).__name__} of {len(node)}"


def spell_bytes(count: int) -> str:
    """A number of bytes as people write it.

    >>> spell_bytes(12), spell_bytes(2_500_000_000)
    ('12 B', '2.5 GB')
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
