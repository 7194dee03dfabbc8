"""Tensors, topologies and meshes in a notebook: well-formed HTML of bounded size, and its colours in a real browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import browser
import meshloom as loom
from meshloom.mesh.picture import EMPTY, HIGH, MOST, WIDE, box, colour, page
from meshloom.placement import Piece
from meshloom.placement.picture import HEIGHT, WIDTH

VOID = {"rect"}


class Checked(HTMLParser):
    """Reads HTML and insists that every tag is closed in order; keeps tags with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: Any) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def boxes(self, fill: str | None = None) -> list[dict[str, str | None]]:
        return [found for tag, found in self.tags if tag == "rect" and fill in (None, found["fill"])]


def made(placements: str, shape: tuple[int, ...] = (8, 12), **axes: int) -> loom.Topology:
    mesh = loom.Mesh(**(axes or {"dp": 2, "tp": 4}))
    return loom.parse(f"f32{list(shape)}({placements}) on {mesh}")


def test_a_tag_that_is_not_closed_would_be_noticed():
    with pytest.raises(AssertionError):
        Checked("<div><b></div>")


def test_a_tensor_shows_its_placements_its_values_and_what_a_device_holds():
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    x = loom.arange(16, mesh=mesh, placements="R, S(0)").float().requires_grad_()
    read = Checked(x._repr_html_())
    for said in ("f32[16](R, S(0)) on Mesh(dp=2, tp=4), requires_grad=True", "tp: S(0), cuts dim 0, of 16, in 4"):
        assert said in read.text
    assert "dp: R, the same on all 2" in read.text and "a device holds [4], 16 B" in read.text
    assert repr(x.detach().to_torch()) in read.text


def test_a_parameter_and_its_gradient_show_the_tensor_inside():
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    parameter = loom.Parameter(torch.ones(8, 4), mesh, {"tp": loom.Shard(0)})
    (parameter * 3).sum().backward()
    assert "f32[8, 4](R, S(0)) on Mesh(dp=2, tp=4), requires_grad=True" in Checked(parameter._repr_html_()).text
    assert "[3., 3., 3., 3.]" in Checked(parameter.grad._repr_html_()).text


def test_a_tensor_without_data_has_a_picture():
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    assert "meta" in Checked(loom.zeros(4, 4, mesh=mesh, device="meta")._repr_html_()).text


def test_each_piece_has_one_colour_in_the_tensor_and_on_every_device_that_holds_it():
    topology = made("R, S(1)")
    read = Checked(topology._repr_html_())
    for number in range(4):
        assert len(read.boxes(colour(number))) == 1 + 2
    assert len({colour(number) for number in range(64)}) == 64


def test_devices_that_hold_nothing_are_drawn_empty():
    read = Checked(made("R, S(0)", (2, 3))._repr_html_())
    assert len(read.boxes(EMPTY)) == 2 * 2 and len(read.boxes()) == 2 + 8


def test_a_partial_tensor_says_that_its_parts_add_up():
    read = Checked(made("P(sum), R")._repr_html_())
    assert "dp: P(sum), 2 parts, and the value is their sum" in read.text and "dp=+ tp=*" in read.text
    assert read.boxes()[0]["stroke-dasharray"]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,)])
def test_numbers_and_tensors_without_elements_have_a_picture(shape):
    read = Checked(made("R, R", shape)._repr_html_())
    assert ("no elements" in read.text) == (0 in shape)


def test_large_meshes_are_abbreviated():
    topology = made("S(0), S(1), S(1)", (4096, 4096), pod=64, dp=64, tp=8)
    text = topology._repr_html_()
    read = Checked(text)
    assert len(read.boxes()) <= 2 * MOST * MOST and len(text) < 100_000
    assert "…" in read.text and "device 32767 at (63, 63, 7)" in read.text


def test_everything_that_comes_from_outside_is_escaped():
    hostile = "<script>alert('\"&')</script>"
    for text in (page(hostile, [], [hostile], hostile), box(0, 0, 900, 90, EMPTY, [hostile], hostile)):
        read = Checked(text)
        assert "script" not in {tag for tag, _ in read.tags}
        assert read.text.count(hostile) >= 2


def test_nothing_is_loaded_from_anywhere():
    text = made("S(0), R")._repr_html_() + loom.Mesh(dp=2, tp=4)._repr_html_()
    assert not re.search(r"(?:https?:|//|url\(|src=|href=|<script|<link|@import)", text)


def test_a_mesh_shows_its_devices_and_how_processes_split_it():
    mesh = loom.Mesh.of((2, 4), ("dp", "tp"), processes=(2, 1))
    read = Checked(mesh._repr_html_())
    assert len(read.boxes(colour(0))) == len(read.boxes(colour(1))) == 4
    assert "split over processes: dp=2, tp=1; each holds (1, 4)" in read.text
    assert "8 devices" in Checked(loom.Mesh(dp=2, tp=4)._repr_html_()).text
    assert "1 device" in Checked(loom.Mesh()._repr_html_()).text


PLACED = st.sampled_from(["R", "S(0)", "S(1)", "S(2)", "P(sum)"])


@settings(max_examples=60)
@given(st.lists(st.tuples(PLACED, st.integers(1, 5)), max_size=4), st.tuples(*[st.integers(0, 9)] * 3))
def test_any_topology_has_a_picture_with_every_device_and_all_of_the_tensor(axes, shape):
    mesh = loom.Mesh(**{f"a{i}": size for i, (_, size) in enumerate(axes)})
    topology = loom.parse(f"f32{list(shape)}({', '.join(each for each, _ in axes)}) on {mesh}")
    read = Checked(topology._repr_html_())
    rows = mesh.size // mesh.shape[-1] if axes else 1
    devices = min(rows, MOST) * (mesh.shape[-1] if axes else 1)
    boxes = read.boxes()
    pieces, held = boxes[:-devices], boxes[-devices:]
    assert {(each["width"], each["height"]) for each in held} == {(str(WIDE), str(HIGH))}
    if mesh.size <= MOST and 0 not in shape:
        area = sum(float(each["width"]) * float(each["height"]) for each in pieces)
        assert abs(area - WIDTH * HEIGHT) < 0.01 * WIDTH * HEIGHT


# Where each picture goes in the window, whatever the fonts do to the captions.
FIXED = (
    "<style>svg.meshloom-tensor, svg.meshloom-mesh {position: fixed; top: 0 !important; margin: 0 !important}"
    "svg.meshloom-tensor {left: 0} svg.meshloom-mesh {left: 400px}</style>"
)


def in_the_window(topology: loom.Topology, place: tuple[int, ...]) -> tuple[float, float]:
    """A pixel near the upper left corner of the piece of a device, away from its text."""
    (top, _), (left, _) = topology.chunk(place, 0), topology.chunk(place, 1)
    return 1 + WIDTH * left / topology.shape[1] + 4, 1 + HEIGHT * top / topology.shape[0] + 4


def device_in_the_window(topology: loom.Topology, place: tuple[int, ...]) -> tuple[float, float]:
    names = [f"{topology.mesh.axes[0]}={i}" for i in range(topology.mesh.shape[0])]
    left = 8 + 6.1 * max(map(len, names))
    return 400 + left + WIDE * place[1] + 4, 18 + HIGH * place[0] + 4


def check_colours(pixels: browser.Pixels, topology: loom.Topology) -> None:
    """Every piece where its share of the tensor is, and every device, in the colour of what it holds."""
    checked = 0
    for place in topology.mesh.coordinates():
        piece = Piece(topology, place)
        device = pixels.at(*device_in_the_window(topology, place))
        assert device == (EMPTY if piece.is_empty else colour(piece.number)), f"device {place}"
        if not piece.is_empty:
            assert pixels.at(*in_the_window(topology, place)) == colour(piece.number), f"piece {place}"
            checked += 1
    assert checked


@pytest.mark.slow
@pytest.mark.parametrize("placements", ["S(0), S(1)", "S(1), S(0)"])
def test_a_browser_shows_each_shard_in_the_colour_of_its_owner(placements, tmp_path):
    topology = made(placements, (10, 12))
    pixels = browser.screenshot(topology._repr_html_() + FIXED, tmp_path, 800, 300)
    check_colours(pixels, topology)
    with pytest.raises(AssertionError, match="device"):
        check_colours(pixels, made("S(1), R" if placements == "S(0), S(1)" else "R, S(0)", (10, 12)))


@pytest.mark.slow
def test_a_browser_shows_all_colours_of_a_tensor_over_four_axes(tmp_path):
    mesh = loom.open_mesh((2, 2, 3, 2), axes=("pod", "dp", "tp", "sp"))
    tensor = loom.zeros(6, 8, 5, mesh=mesh, placements="S(0), R, S(1), S(2)")
    pixels = browser.screenshot(tensor._repr_html_(), tmp_path, 800, 700)
    assert {colour(number) for number in range(12)} <= pixels.colours()
    assert colour(12) not in pixels.colours()
