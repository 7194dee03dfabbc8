"""Ops that work element by element: one operand, two, three; in place; comparisons; bits; quantisation.

The dtype of a result is that of the first tensor operand unless `dtype=` or `output_tensor=` says otherwise;
comparisons give ones and zeros of it. Values are worked out once in torch's way (bfloat16 in float32, rounded once).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.activations import UNARY, Activation, BcastOpDim, Function, GeluVariant, activator, divide
from meshloom.ttnn.ops.block_moves import axis_of
from meshloom.ttnn.ops.calling import REQUIRED, Made, Optionals, compute, op, operands, register, result, with_arguments
from meshloom.ttnn.ops.complex_numbers import ComplexTensor, invert, magnitude
from meshloom.ttnn.ops.topologies import EACH, Named, rule_of, topology_of
from meshloom.ttnn.tensor.formats import DataType
from meshloom.ttnn.tensor.parts import Block, aligned
from meshloom.ttnn.tensor.tensor import Tensor

Scalar = int | float
Operand = Tensor | Scalar
Pair = Callable[[Any, Any], Block]  # a function of two operands of which one may be a number


def fine(block: Block, kind: DataType) -> Block:
    """The block in float32 where its result is not kept in bfloat16, so that it is rounded once."""
    return block.float() if block.dtype is torch.bfloat16 and kind is not DataType.BFLOAT16 else block


# one operand


def unary(name: str, function: Function) -> None:
    """Register an op of one tensor and numbers."""

    def plain(input_tensor: Tensor, *, kind: DataType | None = None) -> Made:
        return _unary(name, function, input_tensor, (), kind)

    def with_parameters(input_tensor: Tensor, *values: Any) -> Made:
        *numbers, kind = values
        at = list(function.parameters).index("dim") if "dim" in function.parameters else None
        if at is not None:
            numbers[at] = from_back(name, numbers[at], input_tensor)
        return _unary(name, function, input_tensor, numbers, kind)

    doc, takes = f"{name} of every element.", {"input_tensor": REQUIRED, **function.parameters, "kind": None}
    kinds = {each: "float" for each, default in function.parameters.items() if default is REQUIRED}
    called = with_arguments(name, doc, takes, with_parameters, kinds) if function.parameters else plain
    register(name, doc, called, also=_KEPT)


_KEPT = "fast_and_approximate_mode memory_config output_tensor sub_core_grids"


def from_back(name: str, dim: int, tensor: Tensor) -> int:
    """A dim of the parts counted from the back, as a block takes it."""
    operands(name, tensor)
    rank = len(tensor.shape)
    return axis_of(name, dim, rank) - rank


def _unary(
    name: str, function: Function, tensor: Tensor, values: Sequence[Any] = (), kind: DataType | None = None
) -> Made:
    _, (block,) = operands(name, tensor)
    if len(tensor.shape) < function.rank:
        raise OperandError(f"ttnn.{name} needs a tensor of at least rank {function.rank}, not {list(tensor.shape)}")
    call = function.call
    is_fine = block.dtype is torch.bfloat16 and (kind or tensor.dtype) is not DataType.BFLOAT16
    if is_fine or values:
        call = functools.partial(_apply, call, is_fine, tuple(values))
    label, known = topology_of(function.rule, tensor), None if values else function.call
    return compute(call, (tensor,), label, is_pointwise=function.rank == 0, function=known)


def _apply(call: Callable[..., Block], is_fine: bool, values: tuple[Any, ...], block: Block) -> Block:
    return call(block.float() if is_fine else block, *values)


for _name, _function in UNARY.items():
    if _name not in ("abs", "gelu", "reciprocal"):  # which take complex numbers or a variant, below
        unary(_name, _function)


@op("abs", also=_KEPT)
def abs_(input_tensor: Tensor | ComplexTensor, *, kind=None) -> Made:
    """The absolute value of every element; of complex numbers, their lengths."""
    if isinstance(input_tensor, ComplexTensor):
        return magnitude(input_tensor)
    return _unary("abs", UNARY["abs"], input_tensor, (), kind)


@op("reciprocal", also=_KEPT)
def reciprocal(input_tensor: Tensor | ComplexTensor, *, memory_config=None, kind=None) -> Made | ComplexTensor:
    """One over every element, complex numbers too."""
    if isinstance(input_tensor, ComplexTensor):
        return invert(input_tensor, memory_config)
    made = _unary("reciprocal", UNARY["reciprocal"], input_tensor, (), kind)
    made.memory_config = memory_config
    return made


@op("logical_not_")
def logical_not_(input_tensor) -> Made:
    """1 where an element is zero, else 0, in its place."""
    _, (block,) = operands("logical_not_", input_tensor)
    return Made(torch.logical_not(block), input_tensor, topology_of(EACH, input_tensor), output=input_tensor)


@op("gelu")
def gelu(input_tensor, *, variant=GeluVariant.Accurate, kind=None) -> Made:
    """gelu of every element; the variant Tanh is the usual approximation."""
    return _unary("gelu", UNARY["gelu"], input_tensor, (variant,), kind)


@op("unary_chain")
def unary_chain(input_tensor, ops_chain, *, kind=None) -> Made:
    """One activation after the other."""
    return _unary("unary_chain", Function(activator(ops_chain), {}), input_tensor, (), kind)


@op("polyval")
def polyval(input_tensor_a, coeffs) -> Made:
    """The polynomial whose coefficients stand highest power first."""

    def value(x: Block) -> Block:
        total = torch.zeros_like(x, dtype=torch.float32)
        for each in coeffs:
            total = total * x + each
        return total

    return _unary("polyval", Function(value, {}), input_tensor_a)


# two operands


def _shapes_of(name: str, a: Tensor, b: Tensor) -> int:
    """The rank of what two shapes make together; an error where they do not."""
    first, second = a.shape, b.shape
    rank = max(len(first), len(second))
    if first != second:
        for back, (m, n) in enumerate(zip(reversed(first), reversed(second), strict=False), 1):
            if m != n and 1 not in (m, n):
                raise OperandError(
                    f"ttnn.{name}: Broadcasting rule violation at dimension index -{back} (output rank {rank}), "
                    f"dim a: {m}, dim b: {n}",
                    shapes=f"{list(first)} and {list(second)}",
                    fix="sizes are equal, or one of them is 1",
                )
    return rank


def _pair_kernel(
    name: str, function: Pair, a: Operand, b: Operand, kind: DataType | None
) -> tuple[Callable[..., Block], tuple[Tensor, ...]]:
    """What a function of two operands computes from the blocks of the tensors among them, and these tensors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        _, (x, y) = operands(name, a, b)
        kind = kind or a.dtype
        axes, rank = len(a._grid), 0 if x.shape == y.shape else _shapes_of(name, a, b)
        if aligned(x, axes, rank) is x and aligned(y, axes, rank) is y and fine(x, kind) is x and fine(y, kind) is y:
            return function, (a, b)
        return lambda x, y: function(fine(aligned(x, axes, rank), kind), fine(aligned(y, axes, rank), kind)), (a, b)
    tensor, scalar = (a, b) if isinstance(a, Tensor) else (b, a)
    if not isinstance(tensor, Tensor) or not isinstance(scalar, (int, float)):
        raise ArgumentError(f"ttnn.{name} takes tensors and numbers, not {type(a).__name__} and {type(b).__name__}")
    operands(name, tensor)
    asked = kind or tensor.dtype
    if tensor is a:
        return lambda x: function(fine(x, asked), scalar), (tensor,)
    return lambda y: function(scalar, fine(y, asked)), (tensor,)


FUSED = Optionals(activations=(), input_tensor_a_activations=(), input_tensor_b_activations=())


def binary(
    name: str, function: Pair, a: Operand, b: Operand, rule: Named = EACH, output=None, *, kind=None, **fused: Any
) -> Made:
    """A function of two operands of which one may be a number, with activations fused before and after it."""
    if fused:
        after, *before = FUSED(fused)
        if after or any(before):
            function, rule = _fused(function, before, after), EACH
    kernel, tensors = _pair_kernel(name, function, a, b, kind if output is None else output.dtype)
    known = getattr(function, "on_arrays", function) if len(tensors) == 2 else None
    return compute(kernel, tensors, topology_of(rule, a, b), output=output, is_pointwise=True, function=known)


def _fused(function: Pair, before: Sequence[Sequence[Activation]], after: Sequence[Activation]) -> Pair:
    """A function with activations of its operands and of its result."""
    first, second = map(_fuse, before)
    last = activator(after)
    return lambda x, y: last(function(first(x), second(y)))


def _fuse(activations: Sequence[Activation]) -> Callable[[Any], Any]:
    """Activations of an operand, which may be a number."""
    act = activator(activations)
    if not activations:
        return act
    return lambda value: act(value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float32))


_SPELLED = {"input_a": "input_tensor_a", "input_b": "input_tensor_b"}
_SPEED = "fast_and_approximate_mode sub_core_grids sub_device_id " + (
    "activations input_tensor_a_activations input_tensor_b_activations"
)


def _pair(names: str, function: Pair, rule: Named = "", in_place: str = "", **spelled: str) -> None:
    """Register an op of two operands, under several names, and its forms that write into the first."""
    doc, rule = f"{names.split()[0]} of every two elements", rule or rule_of(names.split()[0])
    _two(names, function, rule, f"{doc}.", f"{_SPEED} dtype memory_config output_tensor", {**_SPELLED, **spelled})
    if in_place:
        _two(in_place, function, rule, f"{doc}, written into the first operand.", _SPEED, _SPELLED, writes=True)


def _two(
    names: str, function: Pair, rule: Named, doc: str, also: str, spelled: dict[str, str], writes: bool = False
) -> None:
    name = names.split()[0]

    def call(input_tensor_a: Operand, input_tensor_b: Operand, **how: Any) -> Made:
        output: Any = input_tensor_a if writes else None
        return binary(name, function, input_tensor_a, input_tensor_b, rule, output, **how)

    register(names, doc, call, spelled=spelled, also=also, more=(binary, FUSED))


def _both(function: Callable[[Block, Block], Block]) -> Pair:
    """A function that torch has for arrays only: a number becomes an array of no dims."""

    def call(x: Any, y: Any) -> Block:
        if isinstance(y, torch.Tensor):
            return function(x if isinstance(x, torch.Tensor) else y.new_tensor(x), y)
        return function(x, x.new_tensor(y))

    call.on_arrays = function  # type: ignore[attr-defined]
    return call


def _first(function: Pair) -> Pair:
    """A function whose first argument torch wants as an array."""

    def call(x: Any, y: Any) -> Block:
        return function(x if isinstance(x, torch.Tensor) else torch.full_like(y, x), y)

    call.on_arrays = function  # type: ignore[attr-defined]
    return call


def _squared_difference(x: Any, y: Any) -> Block:
    difference: Block = x - y
    return difference * difference


def _shift_in_zeros(x: Block, y: Any) -> Block:
    wide = x.to(torch.int64) & 0xFFFFFFFF if x.dtype is torch.int32 else x
    return torch.bitwise_right_shift(wide, y).to(x.dtype)


def _by_whole_numbers(function: Pair) -> Pair:
    """A function that divides, with zero where integers are divided by zero."""

    def call(x: Any, y: Any) -> Block:
        is_whole = isinstance(x, (int, torch.Tensor)) and not (isinstance(x, torch.Tensor) and x.is_floating_point())
        if not is_whole or (y.is_floating_point() if isinstance(y, torch.Tensor) else not isinstance(y, int)):
            return function(x, y)
        if not isinstance(y, torch.Tensor):
            return function(x, y) if y else torch.zeros_like(x)
        return torch.where(y == 0, 0, function(x, torch.where(y == 0, 1, y)))

    return call


for _name in "eq ne gt ge lt le".split():
    _pair(_name, _first(getattr(torch, _name)), in_place=f"{_name}_")
for _name in "logical_and logical_or logical_xor logaddexp logaddexp2".split():
    _pair(_name, _both(getattr(torch, _name)), in_place=f"{_name}_")
for _name in "maximum minimum gcd lcm atan2 hypot nextafter".split():
    _pair(_name, _both(getattr(torch, _name)))
for _name in "bitwise_and bitwise_or bitwise_xor bitwise_right_shift".split():
    _pair(_name, _first(getattr(torch, _name)))
_pair("add", torch.add, in_place="add_")
_pair("subtract sub", operator.sub, in_place="subtract_ sub_")
_pair("multiply mul", operator.mul, in_place="multiply_ mul_")
_pair("rsub", lambda x, y: y - x, "sub", "rsub_")
_pair("bitwise_left_shift logical_left_shift", _first(torch.bitwise_left_shift))
_pair("logical_right_shift", _first(_shift_in_zeros))
_pair("ldexp", _both(lambda x, y: x * torch.exp2(y.float())), in_place="ldexp_")
_pair("squared_difference", _squared_difference, in_place="squared_difference_")
_pair("xlogy", _first(torch.special.xlogy))
_pair("remainder", _by_whole_numbers(torch.remainder))
_pair("fmod", _by_whole_numbers(torch.fmod), scalar="input_tensor_b")
_pair("bias_gelu", lambda x, y: torch.nn.functional.gelu(x + y), in_place="bias_gelu_")
_pair("pow", torch.pow, input_tensor="input_tensor_a", exponent="input_tensor_b")


@op("div", "divide", spelled={**_SPELLED, "value": "input_tensor_b"}, more=(binary, FUSED))
def div(input_tensor_a: Operand, input_tensor_b: Operand, *, rounding_mode=None, **how) -> Made:
    """The quotient of every two elements; `rounding_mode` is None, "trunc" or "floor"."""
    if rounding_mode not in (None, "trunc", "floor"):
        raise ArgumentError(f"ttnn.div: rounding_mode={rounding_mode!r}", fix='None, "trunc" or "floor"')
    rule = "div" if rounding_mode is None else EACH
    function = _first(torch.div)
    if rounding_mode is not None:
        function = _by_whole_numbers(_first(lambda x, y: divide(x, y, rounding_mode)))
    return binary("div", function, input_tensor_a, input_tensor_b, rule, **how)


_WRITTEN = "The quotient of every two elements, written into the first operand."
_two("div_ divide_", torch.div, "div", _WRITTEN, _SPEED, _SPELLED, writes=True)
_pair("floor_div", _by_whole_numbers(_first(lambda x, y: divide(x, y, "floor"))), value="input_tensor_b")


def _no_nan(x: Any, y: Any) -> Block:
    if not isinstance(y, torch.Tensor):
        return x / y if y else torch.zeros_like(x)
    return torch.where(y == 0, 0, x / torch.where(y == 0, 1, y))


_pair("div_no_nan", _no_nan, value="input_tensor_b")


@op("isclose")
def isclose(input_tensor_a, input_tensor_b, *, rtol=1e-05, atol=1e-08, equal_nan=False) -> Made:
    """1 where |a - b| <= atol + rtol * |b|."""

    def close(x: Block, y: Block) -> Block:
        return torch.isclose(x.float(), y.float(), rtol, atol, equal_nan)

    return binary("isclose", close, input_tensor_a, input_tensor_b)


def _register_scaled(name: str, doc: str, sign: int) -> None:
    def call(input_tensor_a, input_tensor_b, alpha, *, kind=None) -> Made:
        add = functools.partial(torch.add, alpha=sign * alpha)
        return binary(name, add, input_tensor_a, input_tensor_b, "add", kind=kind)

    register(name, doc, call)


_register_scaled("addalpha", "a + alpha * b.", 1)
_register_scaled("subalpha", "a - alpha * b.", -1)


@op("prelu")
def prelu(input_tensor_a, weight: Tensor | Scalar | Sequence[float]) -> Made:
    """Where negative, times the weight: a number, or one for every element of dim 1."""
    if isinstance(weight, Sequence):
        if len(weight) != 1:
            raise ArgumentError("ttnn.prelu takes one weight in a list", fix="give a tensor with one for every channel")
        weight = weight[0]
    if isinstance(weight, Tensor) and len(weight.shape) == 1 and len(input_tensor_a.shape) > 1:
        channels = (1, *weight.shape, *(1,) * (len(input_tensor_a.shape) - 2))
        block = weight.block.reshape(*weight.block.shape[: len(weight.grid)], *channels)
        weight = result(block, weight, topology=weight.tensor_topology())
    return binary("prelu", lambda x, y: torch.where(x < 0, x * y, x), input_tensor_a, weight)


@op("bcast")
def bcast(input_a, input_b, math_op, dim: BcastOpDim, *, kind=None) -> Made:
    """Sum, difference or product with an operand that is repeated along the named dims."""
    name = math_op.name.lower()
    for side, where in (("H", -2), ("W", -1)):
        if side in dim.name and input_b.shape[where] != 1:
            raise OperandError(
                f"ttnn.bcast along {dim.name}: dim {where} of the second operand is {input_b.shape[where]}"
            )
    return binary("bcast", getattr(torch, name), input_a, input_b, name, kind=kind)


# three operands


def several(name: str, function: Callable[..., Block], values: Sequence[Operand], kind: DataType | None = None) -> Made:
    """A function of several operands of which some may be numbers; the result is as the first tensor."""
    tensors = tuple(each for each in values if isinstance(each, Tensor))
    if not tensors:
        raise ArgumentError(f"ttnn.{name} needs a tensor")
    operands(name, *tensors)
    for each in tensors[1:]:
        _shapes_of(name, tensors[0], each)
    rank, axes = max(len(each.shape) for each in tensors), len(tensors[0].grid)
    dtype = kind or tensors[0].dtype
    numbers = [_HERE if isinstance(each, Tensor) else each for each in values]

    def kernel(*blocks: Block) -> Block:
        given = iter(blocks)
        return function(*(fine(aligned(next(given), axes, rank), dtype) if n is _HERE else n for n in numbers))

    return compute(kernel, tensors, topology_of(EACH, *tensors))


_HERE = object()  # where a tensor stands among numbers


@op("where")
def where(predicate, true_value, false_value, *, output_tensor=None) -> Made:
    """The second operand where the first is not zero, else the third."""
    like = next((each for each in (true_value, false_value) if isinstance(each, Tensor)), predicate)

    store = like.dtype.store

    def choose(condition: Block, yes: Any, no: Any) -> Block:
        found = torch.where(condition != 0, yes, no)
        return found if found.dtype is store or found.dtype.is_floating_point else found.to(store)

    values = (predicate, true_value, false_value)
    if like is predicate or like.dtype is predicate.dtype or output_tensor is not None:
        kind = None if output_tensor is None else output_tensor.dtype
        return several("where", choose, values, kind).into(output_tensor)
    ordered = (like, *(each for each in values if each is not like))
    places = [next(i for i, each in enumerate(ordered) if each is value) for value in values]
    return several("where", lambda *blocks: choose(*(blocks[i] for i in places)), ordered)


def _three(name: str, doc: str, arguments: str, function: Callable[..., Block], **numbers: Any) -> None:
    """Register an op of several operands and numbers, worked out in float32."""
    takes = {**dict.fromkeys(arguments.split(), REQUIRED), **numbers, "kind": None}
    count = len(arguments.split())

    def call(*given: Any) -> Made:
        extra = dict(zip(numbers, given[count:], strict=False))

        def exact(*blocks: Any) -> Block:
            return function(*(b.float() if isinstance(b, torch.Tensor) else b for b in blocks), **extra)

        return several(name, exact, given[:count], given[-1])

    op(name)(with_arguments(name, doc, takes, call))


_three("addcmul", "a + value * b * c.", "input_a input_b input_c", torch.addcmul, value=1.0)
_three("addcdiv", "a + value * b / c.", "input_a input_b input_c", torch.addcdiv, value=1.0)
_three("lerp", "The way from the first to the second, as far as the weight says.", "input end weight", torch.lerp)
_three(
    "snake_beta",
    "x + sin(alpha * x) ** 2 / beta.",
    "input_tensor alpha beta",
    lambda x, a, b: x + torch.sin(a * x).square() / b,
)


@op("mac", spelled={"value1": "input_tensor_b", "value2": "input_tensor_c"})
def mac(input_tensor_a, input_tensor_b: Operand | None = None, input_tensor_c=None, *, value=None, kind=None) -> Made:
    """a * b + c; `value=` stands for the one of b and c that is left out."""
    b = value if input_tensor_b is None else input_tensor_b
    c = value if input_tensor_c is None else input_tensor_c
    if b is None or c is None:
        raise ArgumentError("ttnn.mac needs a factor and a summand")
    return several("mac", _multiply_and_add, (input_tensor_a, b, c), kind)


def _multiply_and_add(a: Block, b: Block | Scalar, c: Block | Scalar) -> Block:
    return (a.float() if a.dtype is torch.bfloat16 else a) * b + c


def _clamp(name: str) -> None:
    def call(input_tensor, min=None, max=None, *, kind=None) -> Made:
        limits = [(each, how) for each, how in ((min, torch.maximum), (max, torch.minimum)) if each is not None]
        hows = [how for _, how in limits]
        if not limits:
            raise OperandError(f"ttnn.{name}: Only one of 'min' or 'max' can be None. Please provide at least one")

        def limit(x: Block, *given: Any) -> Block:
            if not x.is_floating_point() and any(isinstance(value, float) for value in given):
                x = x.float()
            for value, how in zip(given, hows, strict=True):
                x = how(x, value if isinstance(value, torch.Tensor) else torch.full_like(x, value))
            return x

        return several(name, limit, (input_tensor, *(each for each, _ in limits)), kind)

    register(name, "Every element, but at least `min` and at most `max`; either may be left out.", call)


_clamp("clamp")
_clamp("clip")


# quantisation: q = round(x / scale) + zero_point


def _spread(value: Tensor | Scalar, tensor: Tensor, axis: int | None) -> Tensor | Scalar:
    """A scale or zero point for every element of a dim, shaped so that it lies along that dim."""
    if axis is None or not isinstance(value, Tensor):
        return value
    rank, axes = len(tensor.shape), len(tensor.grid)
    shape = [1] * rank
    shape[axis % rank] = -1
    block = value.block.reshape(*value.block.shape[:axes], *shape)
    return result(block, value, topology=value.tensor_topology())


def _register_quantised(name: str, doc: str, takes: str, function: Callable[..., Block], kind: DataType) -> None:
    """Register an op of a tensor and some scales and zero points, which are numbers, or tensors along `axis`."""

    def call(tensor, *given: Any) -> Made:
        *values, axis = given
        spread = [_spread(value, tensor, axis) for value in values]
        tensors = tuple(each for each in (tensor, *spread) if isinstance(each, Tensor))
        operands(name, *tensors)
        rank, axes = len(tensor.shape), len(tensor.grid)
        blocks = [aligned(each.block, axes, rank).float() if isinstance(each, Tensor) else each for each in spread]
        return Made(function(tensor.block.float(), *blocks), tensor, topology_of(EACH, *tensors), kind)

    required = dict.fromkeys(f"input_tensor {takes}".split(), REQUIRED)
    kinds = dict.fromkeys(takes.split(), "Tensor | Scalar")
    op(name)(with_arguments(name, doc, {**required, "axis": None}, call, kinds))


_register_quantised(
    "quantize",
    "round(x / scale) + zero_point, as integers of 8 bits with a sign.",
    "scale zero_point",
    lambda x, s, z: (torch.round(x / s) + z).clamp(-128, 127),
    DataType.INT32,
)
_register_quantised(
    "dequantize", "(q - zero_point) * scale.", "scale zero_point", lambda q, s, z: (q - z) * s, DataType.BFLOAT16
)
_register_quantised(
    "requantize",
    "From one scale and zero point to another.",
    "in_scale in_zero_point out_scale out_zero_point",
    lambda q, s, z, t, y: (torch.round((q - z) * s / t) + y).clamp(-128, 127),
    DataType.INT32,
)
