"""A real browser for tests: what a page looks like, pixel by pixel. Nothing but Chromium and zlib is needed."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars --force-device-scale-factor=1 "
    "--force-color-profile=srgb --no-first-run --disable-sync --disable-extensions --disable-background-networking "
    "--disable-component-update --disable-default-apps --disable-domain-reliability --disable-breakpad"
).split()


def chromium() -> str:
    """The program; without one a test is skipped and says what is missing, and fails where CI is set."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        missing(f"no browser is installed: none of {', '.join(NAMES)} is on the path (make browser installs Chromium)")
    return found


def missing(what: str) -> NoReturn:
    """Skip a test for which something is not installed; where CI is set everything must be."""
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)


@dataclass(frozen=True)
class Pixels:
    """A picture: rows of bytes, some of them for each pixel."""

    width: int
    height: int
    depth: int
    rows: list[bytes]

    def at(self, x: float, y: float) -> str:
        """The colour of a pixel, as `#rrggbb`."""
        start = int(x) * self.depth
        return "#" + self.rows[int(y)][start : start + 3].hex()

    def colours(self) -> set[str]:
        """Every colour that occurs."""
        cut = range(0, self.width * self.depth, self.depth)
        return {"#" + each for each in {row[i : i + 3].hex() for row in set(self.rows) for i in cut}}


def screenshot(page: str, folder: Path, width: int = 900, height: int = 600) -> Pixels:
    """What a page looks like in a window of this size."""
    source = folder / "page.html"
    source.write_text(f'<!doctype html><meta charset="utf-8"><body style="margin:0;background:#fff">{page}', "utf-8")
    return photograph(source.as_uri(), folder, width, height)


def photograph(address: str, folder: Path, width: int = 900, height: int = 600) -> Pixels:
    """What the page at an address looks like in a window of this size."""
    picture = folder / "page.png"
    picture.unlink(missing_ok=True)
    done = _run(folder, f"--window-size={width},{height}", f"--screenshot={picture}", address)
    assert picture.is_file(), f"no picture, and chromium ended with {done.returncode}\n{done.stderr}"
    return read_png(picture.read_bytes())


def read_page(address: str, folder: Path) -> str:
    """The HTML of the page at an address after its scripts have run for some seconds."""
    done = _run(folder, "--virtual-time-budget=8000", "--dump-dom", address)
    assert done.returncode == 0 and "</html>" in done.stdout, f"chromium ended with {done.returncode}\n{done.stderr}"
    return done.stdout


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [chromium(), *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def read_png(data: bytes) -> Pixels:
    """A PNG of 8 bits per channel, RGB or RGBA, not interlaced: what browsers write."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, start = {}, 8
    while start < len(data):
        (length,) = struct.unpack(">I", data[start : start + 4])
        kind = data[start + 4 : start + 8]
        chunks[kind] = chunks.get(kind, b"") + data[start + 8 : start + 8 + length]
        start += length + 12
    width, height, bits, colour, *_, interlaced = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (bits, interlaced) == (8, 0) and colour in (2, 6), f"bits {bits}, colour {colour}, interlaced {interlaced}"
    depth = 3 if colour == 2 else 4
    return Pixels(width, height, depth, _unfilter(zlib.decompress(chunks[b"IDAT"]), width * depth, depth))


def _unfilter(data: bytes, stride: int, depth: int) -> list[bytes]:
    """Rows as they were: each was stored as a difference to its left, upper or upper left neighbours."""
    rows, before = [], bytes(stride)
    for start in range(0, len(data), stride + 1):
        kind, row = data[start], bytearray(data[start + 1 : start + 1 + stride])
        for i in range(stride if kind else 0):
            left, corner = (row[i - depth], before[i - depth]) if i >= depth else (0, 0)
            row[i] = (row[i] + _guess(kind, left, before[i], corner)) & 255
        before = bytes(row)
        rows.append(before)
    return rows


def _guess(kind: int, left: int, up: int, corner: int) -> int:
    if kind == 4:
        ahead = left + up - corner
        return min((left, up, corner), key=lambda each: abs(ahead - each))
    return (0, left, up, (left + up) // 2)[kind]
