"""Figures as a page: the template with style, script and figures inside, so that nothing is loaded from anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from html import escape
from importlib import resources
from typing import Any


def fill_page(figures: Mapping[str, Any]) -> str:
    """The page of some figures, which lie in it as JSON."""
    parts = {
        "title": escape(figures["title"]),
        "style": _read("report.css"),
        "figures": write_json(figures),
        "script": _read("report.js"),
    }
    return re.sub(r"<!--(\w+)-->", lambda place: parts[place[1]], _read("report.html"))


def write_json(figures: Mapping[str, Any]) -> str:
    r"""JSON that may stand inside of a script: no text in it can end the script.

    >>> write_json({"name": "</script>"})
    '{"name":"\\u003c/script>"}'
    """
    text = json.dumps(figures, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _read(name: str) -> str:
    return (resources.files("meshloom.observe.report") / name).read_text(encoding="utf-8")
