"""Our names and arguments beside those of the original, which are kept as data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from meshloom import ttnn
from meshloom.errors import ArgumentError, MeshloomError
from meshloom.ttnn import surface
from meshloom.ttnn.ops import calling, omitted, signatures
from ttnn_page import PAGE, covered, overloads, page

ALL = overloads()
COVERED = {name: function for name in ALL if (function := covered(name)) is not None}
LEAST = 700


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


def test_the_guide_gives_the_number_of_covered_operations() -> None:
    guide = (PAGE.parent / "ttnn.md").read_text(encoding="utf-8")
    assert f"{len(COVERED)} of the {len(ALL)} operations are covered" in guide


def test_every_operation_is_covered_or_has_one_reason_why_not() -> None:
    listed = [name for names in omitted.REASONS.values() for name in names.split()]
    assert len(listed) == len(set(listed)) and not set(listed) & set(COVERED)
    assert set(listed) | set(COVERED) == set(ALL)
    with pytest.raises(MeshloomError, match=r"ttnn.generic_op is not covered(.|\n)*kernels that the user wrote"):
        ttnn.generic_op  # noqa: B018


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


def permuted(input_tensor: object, dims: Sequence[int] = (), *, scale: float = 2.0) -> tuple[object, ...]:
    """What a function of an op was given."""
    return input_tensor, dims, scale


def binding(name: str, function: Callable[..., Any] = permuted, **options: Any) -> signatures.Binding:
    """How an op takes its arguments, with the function above behind it."""
    return signatures.Binding((name,), function, {}, options.get("also", "scale"), options.get("more", ()))


def test_arguments_go_to_the_function_to_the_result_or_nowhere() -> None:
    config = ttnn.DRAM_MEMORY_CONFIG
    taken = binding("permute").bind((1, (0, 1), 5.0), {"memory_config": config, "scale": 3.0})
    assert taken == ((1, (0, 1)), {"scale": 3.0}, {"memory_config": config})  # pad_value, the third, is dropped


def test_an_argument_of_the_original_that_nothing_takes_is_noticed() -> None:
    with pytest.raises(ArgumentError, match="nothing takes the argument 'input_tensor_a' of the original"):
        binding("add").read()


def test_what_an_op_does_not_take_is_refused_with_the_nearest_that_it_takes() -> None:
    with pytest.raises(ArgumentError, match=r"unexpected keyword argument 'memory_confg'(.|\n)*memory_config"):
        binding("permute").bind((1,), {"memory_confg": None})
    with pytest.raises(ArgumentError, match="takes 3 positional arguments but 4 were given"):
        binding("permute").bind((1, (0, 1), 0.0, 2.0), {})
    with pytest.raises(ArgumentError, match="multiple values for argument 'pad_value'"):
        binding("permute").bind((1, (0, 1), 0.0), {"pad_value": 0.0})


def test_arguments_that_are_passed_on_are_those_that_the_original_has() -> None:
    def other(*, memory_config: object = 7, secret: int = 1) -> None:
        """Takes more than the original."""

    def open_ended(input_tensor: object, dims: object, **how: Any) -> None:
        """Passes on."""

    found = binding("permute", open_ended, more=(other,), also="")
    assert found.bind((1, 2), {"memory_config": None}) == ((1, 2), {"memory_config": None}, {})
    assert found.signature().parameters["memory_config"].default == 7
    with pytest.raises(ArgumentError, match="secret"):
        found.bind((1, 2), {"secret": 1})


def test_a_public_signature_has_the_arguments_of_the_text_and_the_defaults_of_the_function() -> None:
    shown = str(inspect.signature(ttnn.permute))
    assert shown.startswith("(input_tensor: 'Tensor', dims: 'Sequence[int]', pad_value: 'Any' = None, *, memory_config")
    assert shown.endswith("-> 'Tensor'")
    assert inspect.signature(ttnn.isclose).parameters["rtol"].default == 1e-05


def test_no_op_loses_what_says_how_its_result_is_kept() -> None:
    for name, function in surface.table().items():
        signatures_of = function.binding
        signatures_of.read()
        says = str(inspect.signature(signatures_of.function).return_annotation)
        kept = [argument for argument, key in signatures_of.takes.items() if key]
        told = any(word in says for word in ("Made", "Three", "Gradients", "Found", "Any"))
        assert told or not kept or name == "sharded_to_interleaved_partial", (name, kept, says)


@pytest.mark.parametrize("names", [("add",), ("a_new_op", "mul")])
def test_a_name_that_is_taken_cannot_be_registered_again(names: tuple[str, ...]) -> None:
    before = dict(surface.table())
    with pytest.raises(ArgumentError, match=f"ttnn.{names[-1]} is in the table already"):
        calling.op(*names)(lambda: None)
    assert surface.table() == before
