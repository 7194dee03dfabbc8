"""Our names and arguments beside those of the original, which are kept as data."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from meshloom import ttnn
from meshloom.errors import ArgumentError, MeshloomError
from meshloom.ttnn import calling, surface
from ttnn_page import PAGE, covered, overloads, page

ALL = overloads()
COVERED = {name: function for name in ALL if (function := covered(name)) is not None}
LEAST = 400


def check_accepts(name: str, function: Callable[..., Any], arguments: str) -> None:
    """Raise unless a call with all arguments of an overload, as the original takes them, can be bound."""
    signature = inspect.signature(function)
    spelled = getattr(function, "spelled", {})
    positional: list[str] = []
    named: dict[str, object] = {}
    keyword_only = False
    for argument in filter(None, arguments.split(", ")):
        if argument in ("*", "/"):
            keyword_only = True
        elif keyword_only:
            plain = argument.rstrip("=")
            named[spelled.get(plain, plain)] = argument
        else:
            positional.append(argument.rstrip("="))
    try:
        signature.bind(*positional, **named)
        signature.bind(**{spelled.get(each, each): each for each in positional}, **named)
    except TypeError as error:
        raise AssertionError(f"ttnn.{name}({arguments}): {error}; ours is {signature}") from error


def test_every_argument_of_every_overload_of_a_covered_op_is_accepted() -> None:
    problems = []
    for name, function in COVERED.items():
        for arguments in ALL[name]:
            try:
                check_accepts(name, function, arguments)
            except AssertionError as error:
                problems.append(str(error))
    assert not problems, "\n".join(problems)


def test_most_operations_are_covered(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\ncovered {len(COVERED)} of {len(ALL)} operations")
    assert len(ALL) == 802
    assert len(COVERED) >= LEAST


def test_an_argument_that_is_not_there_is_noticed() -> None:
    with pytest.raises(AssertionError, match="speed"):
        check_accepts("add", ttnn.add, "input_tensor_a, input_tensor_b, *, speed=")
    with pytest.raises(AssertionError, match="relu"):
        check_accepts("relu", ttnn.relu, "input_tensor, other")


def test_the_page_agrees_with_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tests/ttnn_page.py"


def test_what_is_not_covered_is_named_with_the_nearest_that_is() -> None:
    missing = next(name for name in ALL if covered(name) is None and "." not in name)
    with pytest.raises(MeshloomError, match=f"ttnn.{missing} is not covered"):
        getattr(ttnn, missing)


@pytest.mark.parametrize("argument", ["memory_config", "dtype", "output_tensor", "sub_core_grids"])
def test_an_argument_of_the_wrong_type_is_refused_by_name(argument: str) -> None:
    mesh = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x = ttnn.ones([32, 32], device=mesh, layout=ttnn.TILE_LAYOUT)
    with pytest.raises(TypeError, match=argument):
        ttnn.add(x, x, **{argument: 3})
    ttnn.close_mesh_device(mesh)


@pytest.mark.parametrize("names", [("add",), ("a_new_op", "mul")])
def test_a_name_that_is_taken_cannot_be_registered_again(names: tuple[str, ...]) -> None:
    before = dict(surface.table())
    with pytest.raises(ArgumentError, match=f"ttnn.{names[-1]} is in the table already"):
        calling.op(*names)(lambda: None)
    assert surface.table() == before
