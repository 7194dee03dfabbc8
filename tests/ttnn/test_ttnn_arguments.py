"""What the arguments of ops are, by their names, and arguments that travel together."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from meshloom import ttnn
from meshloom.errors import ArgumentError
from meshloom.ttnn import surface
from meshloom.ttnn.ops import arguments, calling, signatures
from meshloom.ttnn.ops.gradients import Rooms

OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def named(name: str, default: Any = inspect.Parameter.empty, **how: Any) -> str:
    """An argument as `help` shows it."""
    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, **how)
    return str(arguments.annotate(parameter))


def test_help_says_what_every_argument_of_every_op_is() -> None:
    listed = {name: inspect.signature(calling.describe(each)) for name, each in surface.table().items()}
    silent = [
        (name, each.name)
        for name, signature in listed.items()
        for each in signature.parameters.values()
        if each.kind not in OPEN and each.annotation is inspect.Parameter.empty and not name.startswith("distributed.")
    ]
    assert len(listed) > 700 and silent == []


def test_every_name_of_the_table_is_an_argument_of_an_op() -> None:
    told = {each for op in surface.table().values() for each in inspect.signature(calling.describe(op)).parameters}
    assert sorted(arguments.KINDS.keys() - told) == []


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (named("scale"), "scale: 'float'"),
        (named("scale", None), "scale: 'float | None' = None"),
        (named("is_causal", True), "is_causal: 'bool' = True"),
        (named("variant", ttnn.GeluVariant.Tanh), f"variant: 'GeluVariant' = {ttnn.GeluVariant.Tanh!r}"),
        (named("mean_memory_config", None), "mean_memory_config: 'MemoryConfig | None' = None"),
        (named("some_tensor"), "some_tensor: 'Tensor'"),
        (named("nobody_knows", None), "nobody_knows: 'Any' = None"),
        (named("nobody_knows", 3), "nobody_knows: 'int' = 3"),
        (named("scale", annotation="int"), "scale: 'int'"),
    ],
)
def test_an_argument_is_what_its_function_its_default_or_its_name_says(shown: str, wanted: str) -> None:
    assert shown == wanted


def test_arguments_that_travel_together_are_taken_as_far_as_the_original_has_them() -> None:
    group = calling.Optionals("pad_value secret", scale=2.0)

    def permuted(input_tensor: object, dims: object, **how: Any) -> tuple[list[Any], dict[str, Any]]:
        return group(how), how

    binding = signatures.Binding(("permute",), permuted, {}, "", (group,))
    args, own, rest = binding.bind((1, 2), {"pad_value": 3, "memory_config": ttnn.DRAM_MEMORY_CONFIG})
    assert permuted(*args, **own) == ([3, None, 2.0], {}) and rest == {"memory_config": ttnn.DRAM_MEMORY_CONFIG}
    for unknown in ("secret", "scale"):
        with pytest.raises(ArgumentError, match=unknown):
            binding.bind((1, 2), {unknown: 1})


def test_a_result_is_wanted_if_it_is_required_or_if_room_asks_for_it() -> None:
    plain, asking = (Rooms("a_grad b_grad", (True, False), room_asks=asks) for asks in (False, True))
    assert plain.wanted({"b_grad": object()}) == [True, False]
    assert asking.wanted({"b_grad": object()}) == [True, True]
    assert asking.wanted({"are_required_outputs": (False, True)}) == [False, True]
    assert plain.ask({"b_grad_memory_config": 7})[1] == {"optional_output_tensor": None, "memory_config": 7}
