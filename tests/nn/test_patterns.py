"""Patterns of dotted names."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

import meshloom as loom
from meshloom.nn.patterns import check_pattern, fits, fold, generalise

PARTS = st.lists(st.sampled_from(["layers", "0", "11", "q_proj", "weight", "a"]), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("pattern", "name", "is_fit"),
    [
        ("weight", "weight", True),
        ("weight", "a.weight", False),
        ("*", "a", True),
        ("*", "a.b", False),
        ("**", "a.b.c", True),
        ("**.weight", "weight", True),
        ("**.weight", "a.b.weight", True),
        ("**.weight", "a.xweight", False),
        ("a.**", "a", True),
        ("a.**", "a.b.c", True),
        ("a.**", "ab", False),
        ("a.**.z", "a.z", True),
        ("a.**.z", "a.b.c.z", True),
        ("a.**.z", "az", False),
        ("layers.*.{q,k}_proj.?eight", "layers.7.k_proj.weight", True),
        ("layers.*.{q,k}_proj.weight", "layers.7.v_proj.weight", False),
        ("layers.{0,1*}.a", "layers.12.a", True),
        ("layers.{0,1*}.a", "layers.2.a", False),
        ("a.b", "axb", False),
        ("a+b", "a+b", True),
        ("a+b", "aab", False),
        ("a,b", "a,b", True),
    ],
)
def test_a_pattern_fits_whole_names(pattern, name, is_fit):
    assert fits(pattern, name) is is_fit


@given(PARTS)
def test_a_name_fits_itself_and_its_general_form(parts):
    name = ".".join(parts)
    assert fits(name, name)
    assert fits(generalise(name), name)
    assert fits("**", name) and fits(f"**.{parts[-1]}", name) and fits(f"{parts[0]}.**", name)


@pytest.mark.parametrize("pattern", ["", "a b", "{a", "a}", "{a{b}}", "a.{b"])
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(loom.NotationError):
        check_pattern(pattern)


def test_names_that_differ_in_numbers_are_folded():
    assert fold(["a.0.b", "a.1.b", "c"]) == "a.*.b x2, c"
    assert fold(["a.0.b"]) == "a.0.b"
