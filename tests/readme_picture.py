"""`docs/product.svg`, the picture of README: the operands and the result of its first product, as notebooks draw them.

`python tests/readme_picture.py` writes the file; a test compares it.
"""

from __future__ import annotations

import re
from pathlib import Path

import meshloom as loom

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "product.svg"
MESH = "Mesh(dp=2, tp=4)"
SHOWN = (("x", "f32[16, 8](S(0), R)"), ("@ w", "f32[8, 12](R, S(1))"), ("= y", "f32[16, 12](S(0), S(1))"))
WIDTH, HEIGHT = 258, 130  # of one tensor
TEXT = 'font-family="monospace" font-size="12" fill="#222222"'


def draw() -> str:
    """The picture."""
    parts = [_draw(i, name, notation) for i, (name, notation) in enumerate(SHOWN)]
    wide, high = 3 * (WIDTH + 18) + 6, HEIGHT + 52
    said = f"{MESH}: eight devices. Nothing moves: each multiplies what it holds."
    said = f'<text x="12" y="{high - 10}" {TEXT}>{said}</text>'
    body = "\n".join([f'<rect width="{wide}" height="{high}" fill="#ffffff"/>', *parts, said])
    size = f'viewBox="0 0 {wide} {high}" width="{wide}" height="{high}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


def _draw(place: int, name: str, notation: str) -> str:
    html = loom.parse(f"{notation} on {MESH}")._repr_html_()
    found = re.search(r'<svg class="meshloom-tensor"[^>]*viewBox="([^"]*)"[^>]*>(.*?)</svg>', html)
    assert found is not None, html
    x = 12 + place * (WIDTH + 18)
    return (
        f'<text x="{x}" y="18" {TEXT}>{name} {notation}</text>\n'
        f'<svg x="{x}" y="26" width="{WIDTH}" height="{HEIGHT}" viewBox="{found[1]}" preserveAspectRatio="xMinYMin" '
        f'font-family="monospace" font-size="10" fill="#222222">{found[2]}</svg>'
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
    print(f"{PICTURE.name} is written")
