"""Arguments by name, in any order: a call means what its names say, not the order in which its tensors were written."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

import meshloom as loom
from meshloom import Mesh, Tensor
from meshloom.errors import ArgumentError, OperandError
from meshloom.ops import OPS
from meshloom.ops.binding import _signature
from meshloom.tensor import dispatch
from meshloom.tensor.calling import table_call
from meshloom.tensor.entries import forget_all
from oracle import Made
from samples import SAMPLES, Draw

SETTINGS = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
Seen = tuple[str, tuple[Any, ...], dict[str, Any], Any]  # op, arguments, named ones, result


@contextmanager
def calls_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Seen]]:
    """The calls of the table that are made inside, with their results."""
    forget_all()  # calls seen before take short ways
    found: list[Seen] = []
    call = dispatch.call

    def note(name: str, args: Any, kwargs: Any, output: Any = None) -> Any:
        result = call(name, args, kwargs, output)
        found.append((name, tuple(args), kwargs, result))
        return result

    with monkeypatch.context() as patch:
        patch.setattr("meshloom.tensor.calling.call", note)
        yield found


def name_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments by name, the last first; None where some have no name."""
    signature = _signature(OPS[name].signature or "")
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in signature.parameters.values()):
        return None
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:  # a name of torch's that means one of ours
        return None
    return dict(reversed(bound.items()))


def check_reversed(seen: Seen) -> bool:
    """Whether a call could be made again with its arguments by name, the last first; it must give the same."""
    name, args, kwargs, result = seen
    named = name_arguments(name, args, kwargs)
    if named is None or sum(isinstance(each, Tensor) for each in named.values()) < 2:
        return False
    again = table_call(name, **named)
    pairs = [(result, again)] if isinstance(result, Tensor) else zip(result, again, strict=True)
    for first, second in pairs:
        torch.testing.assert_close(
            second.to_torch(), first.to_torch(), equal_nan=True, msg=lambda text: f"{name} by name, last first: {text}"
        )
    return True


def run_reversed(name: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many calls of an op's samples were made again by name."""
    count = 0

    @SETTINGS
    @given(st.data())
    def run(data: st.DataObject) -> None:
        nonlocal count
        d = Draw(data)
        case, mesh = SAMPLES[name](d), Mesh.of(d.pick(((1,), (2,), (2, 2))))
        made = [Made(d, mesh, operand, False) for operand in case.operands]
        with calls_seen(monkeypatch) as seen:
            case.run(*(each.tensor for each in made))
        count += sum([check_reversed(each) for each in seen if OPS[each[0]].signature is not None])

    run()
    return count


# drawing again gives other values
NAMED = [name for name in sorted(SAMPLES) if OPS[name].signature is not None and "dropout" not in name]


@pytest.mark.parametrize("name", NAMED)
def test_tensors_may_be_named_in_any_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run_reversed(name, monkeypatch)


def test_ops_of_several_tensors_are_among_those_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("layer_norm", "linear", "bilinear", "embedding", "cross_entropy", "scaled_dot_product_attention"):
        assert run_reversed(name, monkeypatch) > 0, name


def test_a_call_that_takes_names_in_the_order_of_writing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "sort_named", lambda op, args, kwargs: (args, kwargs))
    with pytest.raises((AssertionError, OperandError), match="layer_norm"):
        run_reversed("layer_norm", monkeypatch)
    forget_all()


# torch's own functions, with all arguments by name


def _calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    drawn = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=drawn)

    a, b, square, row, other = draw(6, 8), draw(6, 8), draw(8, 8), draw(8), draw(8)
    below, several = torch.randint(0, 8, (6,), generator=drawn), torch.randint(0, 6, (3, 8), generator=drawn)
    places, ends = torch.tensor([0, 2, 1]), row.sort().values
    query, key, value, batch, columns = (
        draw(2, 4, 6, 8),
        draw(2, 4, 6, 8),
        draw(2, 4, 6, 8),
        draw(2, 6, 8),
        draw(2, 8, 5),
    )
    pairs = "add sub div copysign atan2 hypot fmod remainder gt isclose ldexp matmul".split()
    listed: list[tuple[Any, dict[str, Any]]] = [
        *((getattr(torch, name), {"input": a, "other": square if name == "matmul" else b}) for name in pairs),
        (torch.sum, {"input": a, "dim": 1, "keepdim": True}),
        (torch.var, {"input": a, "dim": 0, "correction": 0}),
        (torch.norm, {"input": a, "p": 2, "dim": 1}),
        (torch.quantile, {"input": a, "q": 0.3, "dim": 1}),
        (torch.cat, {"tensors": (a, b), "dim": 0}),
        (torch.stack, {"tensors": (a, b), "dim": 1}),
        (torch.where, {"condition": a > 0, "input": a, "other": b}),
        (torch.clamp, {"input": a, "min": b, "max": b + 1}),
        (torch.lerp, {"input": a, "end": b, "weight": b}),
        (torch.pow, {"input": a.abs(), "exponent": b}),
        (torch.addcmul, {"input": a, "tensor1": b, "tensor2": a, "value": 2}),
        (torch.addcdiv, {"input": a, "tensor1": b, "tensor2": a.abs() + 1, "value": 2}),
        (torch.mm, {"input": a, "mat2": square}),
        (torch.bmm, {"input": batch, "mat2": columns}),
        (torch.addmm, {"input": b, "mat1": a, "mat2": square, "beta": 0.5, "alpha": 2}),
        (torch.outer, {"input": row, "vec2": other}),
        (torch.dot, {"input": row, "tensor": other}),
        (torch.cdist, {"x1": a, "x2": b}),
        (torch.transpose, {"input": a, "dim0": 0, "dim1": 1}),
        (torch.permute, {"input": a, "dims": (1, 0)}),
        (torch.reshape, {"input": a, "shape": (4, 12)}),
        (torch.flip, {"input": a, "dims": (0,)}),
        (torch.roll, {"input": a, "shifts": 1, "dims": 0}),
        (torch.flatten, {"input": query, "start_dim": 1}),
        (torch.unsqueeze, {"input": a, "dim": 1}),
        (torch.split, {"tensor": a, "split_size_or_sections": 2}),
        (torch.chunk, {"input": a, "chunks": 3}),
        (torch.cumsum, {"input": a, "dim": 1}),
        (torch.topk, {"input": a, "k": 2, "dim": 0}),
        (torch.gather, {"input": a, "dim": 0, "index": several}),
        (torch.scatter, {"input": a, "dim": 0, "index": several, "src": b}),
        (torch.index_select, {"input": a, "dim": 0, "index": places}),
        (torch.index_add, {"input": a, "dim": 0, "index": places, "source": b[:3]}),
        (torch.searchsorted, {"sorted_sequence": ends, "input": a}),
        (torch.masked_fill, {"input": a, "mask": a > 0, "value": 3.0}),
        (F.softmax, {"input": a, "dim": -1}),
        (F.linear, {"input": a, "weight": square, "bias": row}),
        (F.bilinear, {"input1": a, "input2": b, "weight": draw(3, 8, 8), "bias": draw(3)}),
        (F.layer_norm, {"input": a, "normalized_shape": [8], "weight": row, "bias": other}),
        (F.group_norm, {"input": a, "num_groups": 2, "weight": row, "bias": other}),
        (F.batch_norm, {"input": a, "running_mean": row, "running_var": row.abs(), "weight": other, "bias": row}),
        (F.conv1d, {"input": draw(2, 4, 9), "weight": draw(6, 4, 3), "bias": draw(6), "padding": 1}),
        (F.embedding, {"input": below, "weight": square}),
        (F.one_hot, {"input": below, "num_classes": 9}),
        (F.cross_entropy, {"input": a, "target": below, "weight": row.abs()}),
        (F.nll_loss, {"input": a, "target": below, "weight": row}),
        (F.mse_loss, {"input": a, "target": b}),
        (F.kl_div, {"input": a, "target": b.softmax(1), "reduction": "sum"}),
        (F.scaled_dot_product_attention, {"query": query, "key": key, "value": value, "is_causal": True}),
        (F.cosine_similarity, {"x1": a, "x2": b, "dim": 1}),
        (F.pad, {"input": a, "pad": (1, 2), "value": 2.0}),
    ]
    return {function.__name__: (function, given) for function, given in listed}


CALLS = _calls()


def put(value: Any, mesh: Mesh, number: int) -> Any:
    """A dense tensor somewhere on the mesh, each number elsewhere; tuples of them; all else as it is."""
    if isinstance(value, tuple) and isinstance(value[0], torch.Tensor):
        return tuple(put(each, mesh, number + place) for place, each in enumerate(value))
    if not isinstance(value, torch.Tensor):
        return value
    ways = [*(f"S({dim})" for dim in range(min(value.ndim, 2))), "R"]
    return loom.distribute(value, mesh, f"{ways[number % len(ways)]}, {ways[number // 3 % len(ways)]}")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_functions_of_torch_take_all_of_their_arguments_by_name(name: str, is_reversed: bool) -> None:
    (function, given), mesh = CALLS[name], loom.open_mesh((2, 2))
    dense = function(**given)
    for number in (0, 1, 5):
        order = [*reversed(given)] if is_reversed else [*given]
        found = function(**{each: put(given[each], mesh, number + 3 * i) for i, each in enumerate(order)})
        pairs = [(found, dense)] if isinstance(dense, torch.Tensor) else zip(found, dense, strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours.to_torch(), theirs, rtol=1e-4, atol=1e-5)


METHODS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "view": ((6, 8), {"size": (4, 12)}),
    "reshape": ((6, 8), {"shape": (4, 12)}),
    "expand": ((6, 1, 8), {"size": (6, 3, 8)}),
    "repeat": ((6, 8), {"repeats": (2, 1)}),
    "tile": ((6, 8), {"dims": (2, 1)}),
    "permute": ((6, 8), {"dims": (1, 0)}),
    "swapaxes": ((6, 8), {"axis0": 0, "axis1": 1}),
    "movedim": ((2, 4, 6), {"source": 0, "destination": 2}),
    "unflatten": ((6, 8), {"dim": 1, "sizes": (2, 4)}),
    "unfold": ((6, 8), {"dimension": 1, "size": 3, "step": 2}),
    "narrow": ((6, 8), {"dim": 0, "start": 1, "length": 3}),
    "diagonal": ((2, 6, 8), {"offset": 1, "dim1": 1, "dim2": 2}),
    "split": ((6, 8), {"split_size": 2}),
    "new_full": ((6, 8), {"size": (2, 3), "fill_value": 2}),
    "new_zeros": ((6, 8), {"size": (2, 3)}),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_take_all_of_their_arguments_by_name(name: str) -> None:
    shape, given = METHODS[name]
    dense, mesh = torch.arange(float(torch.Size(shape).numel())).reshape(shape), loom.open_mesh((2, 2))
    theirs = getattr(dense, name)(**given)
    for number in (0, 1, 5):
        ours = getattr(put(dense, mesh, number), name)(**dict(reversed(given.items())))
        pairs = [(ours, theirs)] if isinstance(theirs, torch.Tensor) else zip(ours, theirs, strict=True)
        for mine, other in pairs:
            torch.testing.assert_close(mine.to_torch(), other)


@pytest.mark.parametrize(("name", "word"), [("sum", "dims"), ("softmax", "size"), ("permute", "axis")])
def test_a_name_that_an_op_does_not_have_is_told_as_it_was_written(name: str, word: str) -> None:
    x = put(torch.ones(6, 8), loom.open_mesh((2, 2)), 0)
    with pytest.raises(ArgumentError, match=f"{name}: got an unexpected keyword argument '{word}'"):
        getattr(x, name)(**{word: 0})
