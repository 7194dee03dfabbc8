"""What MkDocs is told besides mkdocs.yml: pages that lie elsewhere in the repository, links to them, and doctests.

README.md is the first page, CONTRIBUTING.md, CHANGELOG.md, LICENSE and the programs of examples/ are pages too. The API
reference lists the public names of meshloom by importing it, so that it follows the code wherever that moves.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import meshloom as loom

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))

# pages of the site whose text lies elsewhere, by their names there
MOVED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "license.md": "LICENSE",
    "measuring.md": "benchmarks/README.md",
    **{f"examples/{name}.md": f"examples/{name}.py" for name in EXAMPLES},
}
PLACES = {source: page for page, source in MOVED.items()}

# the pages of the API reference: a title, and the modules whose public names they show
API = {
    "api/placements.md": ("Meshes and placements", ("meshloom.mesh", "meshloom.placement")),
    "api/tensors.md": ("Tensors", ("meshloom.tensor",)),
    "api/models.md": ("Models", ("meshloom.nn",)),
    "api/observe.md": ("Seeing what happens", ("meshloom",)),
}
ROOMS = {
    "api/collectives.md": ("Collectives", "collectives"),
    "api/checkpoint.md": ("Checkpoints", "checkpoint"),
    "api/fabric.md": ("Fabrics and machines", "fabric"),
    "api/runtime.md": ("The mesh runtime", "runtime"),
    "api/engines.md": ("Engines", "engines"),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The files of docs/ and those that are made."""
    for page, source in MOVED.items():
        files.append(File.generated(config, page, content=_text_of(ROOT / source)))
    for page, text in _api_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def _text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return f"# {path.name}\n\n```python\n{text}```\n"
    return text if path.suffix == ".md" else f"# {path.name.capitalize()}\n\n```text\n{text}```\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page with its links as the site has them."""
    here = page.file.src_uri
    folder = posixpath.dirname(MOVED.get(here, f"docs/{here}"))

    def follow(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, found[1]))
        if target == "examples":
            target = f"examples/{EXAMPLES[0]}.py"
        there = PLACES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if there is None:
            return found[0]
        return f"]({posixpath.relpath(there, posixpath.dirname(here) or '.')}{found[2] or ''})"

    markdown = markdown.replace("```python no-run", "```python")  # a mark for the tests: with it, it is no fence here
    return re.sub(r"\]\((?!\w+:)([^()#\s]+)(#[^()\s]*)?\)", follow, markdown)


# The API reference


def _api_pages() -> dict[str, str]:
    names = _public_names()
    pages, left = {}, dict(names)
    for page, (title, modules) in API.items():
        shown = {name: where for name, where in left.items() if where.startswith(tuple(f"{each}." for each in modules))}
        left = {name: where for name, where in left.items() if name not in shown}
        pages[page] = f"# {title}\n\n" + "".join(f"::: {where}\n\n" for where in shown.values())
    for page, (title, room) in ROOMS.items():
        module = getattr(loom, room)
        shown = {name: _place(getattr(module, name)) for name in module.__all__}
        pages[page] = f"# {title}\n\n" + "".join(f"::: {where}\n\n" for where in shown.values() if where)
    pages["api/extend.md"] = "# Own ops\n\n::: meshloom.extend\n    options:\n      show_root_heading: false\n"
    pages["api/errors.md"] = "# Errors\n\n::: meshloom.errors\n    options:\n      show_root_heading: false\n"
    pages["api/index.md"] = _index(pages)
    return pages


def _public_names() -> dict[str, str]:
    """The classes and functions of `loom.*` without a page of their own, no ops, and where they are written."""
    names = [name for name in loom.__all__ if name not in loom._OPS or name in loom._LAZY]
    found = {name: _place(getattr(loom, name)) for name in names}
    apart = ("meshloom.errors.", "meshloom.fabric.", "meshloom.checkpoint.")
    return {name: where for name, where in found.items() if where and not where.startswith(apart)}


def _place(value: Any) -> str | None:
    module = getattr(value, "__module__", None)
    return f"{module}.{value.__qualname__}" if module and hasattr(value, "__qualname__") else None


def _index(pages: dict[str, str]) -> str:
    lines = [
        f"- [{text.splitlines()[0].removeprefix('# ')}]({page.removeprefix('api/')})" for page, text in pages.items()
    ]
    listed = "\n".join(sorted(lines))
    return (
        "# API reference\n\nMade from the docstrings of the code.\n\n"
        f"{listed}\n\nThe ops (`loom.matmul`, `x.softmax(-1)`, `torch.cat`) have torch's names and arguments, and "
        "`output=` for the placements of the result; [Ops](../ops.md) lists their rules.\n"
    )


class Doctests(griffe.Extension):
    """Examples in docstrings become blocks of code: `>>>` at the start of a line is a quotation in Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Go through a package when all of it is loaded."""
        self._visit(pkg)

    def _visit(self, found: Any) -> None:
        if found.is_alias:
            return
        if found.docstring is not None:
            found.docstring.value = fenced(found.docstring.value)
        for each in found.members.values():
            self._visit(each)


def fenced(text: str) -> str:
    """A docstring with its doctests as blocks of code, and its drawings too.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2\\n").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(">>>") and not inside:
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
