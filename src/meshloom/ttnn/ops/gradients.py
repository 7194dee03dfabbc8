"""Backward ops: what reaches each operand of an op when a gradient reaches its result.

They are torch's own derivatives, taken once on blocks. An operand that is the same on all devices is spread over them
first, so that every device gets its own gradient and nothing is summed between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from meshloom.errors import ArgumentError, OperandError
from meshloom.ops.labels import pointwise
from meshloom.ttnn.ops.activations import UNARY, GeluVariant, divide
from meshloom.ttnn.ops.calling import REQUIRED, Made, Optionals, op, operands, shared_coords, with_arguments
from meshloom.ttnn.ops.complex_numbers import ComplexTensor, complex_gradients
from meshloom.ttnn.ops.topologies import EACH, LINEAR, rows, topology_of
from meshloom.ttnn.tensor.parts import Block, aligned, lead
from meshloom.ttnn.tensor.tensor import Tensor
from meshloom.ttnn.tensor.topology import TensorTopology

Operand = Tensor | int | float
Gradients = list[Made | None]


class Rooms(Optionals):
    """What a call says about several results: which are wanted, room for each, and where each is kept.

    An op that has it among its `more` takes a tensor by the name of every result, `<name>_memory_config`, and
    `are_required_outputs`, as far as the original does. Where `room_asks`, room for a result says that it is wanted.
    """

    def __init__(self, names: str, required: Sequence[bool], first_memory: str = "", room_asks: bool = False) -> None:
        self.names, self.required, self.room_asks = names.split(), tuple(required), room_asks
        self.memory = [f"{each}_memory_config" for each in self.names]
        self.memory[0] = first_memory or self.memory[0]
        super().__init__(" ".join((*self.names, *self.memory)), are_required_outputs=self.required)

    def wanted(self, given: Mapping[str, Any]) -> list[bool]:
        """Which results a call asks for."""
        asked = given.get("are_required_outputs", self.required)
        rooms = [self.room_asks and given.get(name) is not None for name in self.names]
        return [wanted or has_room for wanted, has_room in zip(asked, rooms, strict=True)]

    def ask(self, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What a call says about each result, as ops of one result take it."""
        pairs = zip(self.names, self.memory, strict=True)
        return [{"optional_output_tensor": given.get(a), "memory_config": given.get(b)} for a, b in pairs]

    def fill(self, made: Sequence[Made | None], given: Mapping[str, Any]) -> Gradients:
        """Results that are wanted, each for its room or its memory."""
        for each, name, memory in zip(made, self.names, self.memory, strict=True):
            if each is not None:
                each.output, each.memory_config = given.get(name), given.get(memory)
        return [each if wanted else None for each, wanted in zip(made, self.wanted(given), strict=True)]


def gradients(
    name: str,
    function: Callable[..., Block],
    grad: Tensor,
    values: Sequence[Operand],
    outputs: Sequence[Tensor | None] = (),
    required: Sequence[bool] = (),
) -> Gradients:
    """The gradient of every tensor among the operands of a function, given that of its result."""
    tensors = [each for each in values if isinstance(each, Tensor)]
    _, (upper, *blocks) = operands(name, grad, *tensors)
    axes = len(grad.grid)
    sizes = lead((upper, *blocks), axes)
    rank = max(len(each.shape) for each in tensors)
    with torch.enable_grad():
        leaves = [_leaf(block, sizes) for block in blocks]
        own = iter(leaves)
        found = function(*(aligned(next(own), axes, rank) if isinstance(v, Tensor) else v for v in values))
        if tuple(found.shape[axes:]) != tuple(grad.shape):
            raise OperandError(
                f"ttnn.{name}: the gradient has shape {list(grad.shape)}, the result {list(found.shape[axes:])}",
                fix="give the gradient of the result",
            )
        spread = upper.float().expand(*sizes, *upper.shape[axes:])
        flows = torch.autograd.grad(found, leaves, spread, allow_unused=True) if found.requires_grad else [None] * 9
    made: Gradients = []
    wanted, kept = [*required, *[True] * len(tensors)], [*outputs, *[None] * len(tensors)]
    for place, (tensor, leaf) in enumerate(zip(tensors, leaves, strict=True)):
        flow = flows[place]
        found = torch.zeros_like(leaf) if flow is None else flow.detach()
        label, coords = _label(grad, tensors, tensor), shared_coords(grad, *tensors)
        made.append(Made(found, tensor, label, output=kept[place], coords=coords) if wanted[place] else None)
    return made


def _leaf(block: Block, sizes: Sequence[int]) -> Block:
    spread = block.detach().float().expand(*sizes, *block.shape[len(sizes) :])
    return spread.clone().requires_grad_()


_FLOW = pointwise("P(sum), R -> P(sum)", "P(sum), R, R -> P(sum)", "P(sum), R, R, R -> P(sum)")


def _label(grad: Tensor, tensors: Sequence[Tensor], tensor: Tensor) -> TensorTopology:
    """A product with the gradient; where the operand was broadcast, summed over those dims."""
    rank = len(grad.shape)
    if rank < len(tensor.shape):  # of a reduction: the gradient has lost dims, and the operand knows what is cut
        return topology_of(EACH, tensor)
    label = topology_of(_FLOW, grad, *tensors)
    whole = Tensor(grad.block, grad.grid, grad.dtype, grad.layout, label)
    return summed_topology(whole, tensor)


def broadcast_dims(whole: Tensor, like: Tensor) -> list[int]:
    """The dims of a tensor that another has with size 1, or has not."""
    missing = len(whole.shape) - len(like.shape)
    return [dim for dim, size in enumerate(whole.shape) if dim < missing or like.shape[dim - missing] == 1 != size]


def summed_topology(whole: Tensor, like: Tensor) -> TensorTopology:
    """Of a tensor that is summed to the shape of another, over the dims along which that was broadcast.

    A dim of which every device has one row was broadcast too, if all devices have the same row of the other.
    """
    gone, missing = broadcast_dims(whole, like), len(whole.shape) - len(like.shape)
    cuts = ["P(sum), * -> P(sum)"]
    for dim in range(len(whole.shape)):
        if dim not in gone and like.shape[dim - missing] == 1:
            cuts.append(f"S({dim}), R -> P(sum)")
        cuts.append(f"S({dim}), * -> " + ("P(sum)" if dim in gone else f"S({dim - missing})"))
    return topology_of(rows(*cuts, exact=True), whole, like, shape=tuple(like.shape))


def backward(
    name: str,
    function: Callable[..., Block],
    operand_names: Sequence[str],
    parameters: Mapping[str, Any] | None = None,
    spelled: Mapping[str, str] | None = None,
    skips: int = 0,
) -> None:
    """Register the backward op of a function of some operands and numbers; the first ones that it `skips` have none."""
    extra = dict(parameters or {})
    count, grads = len(operand_names), ["input_grad", "other_grad", "third_grad"][: len(operand_names)]

    def call(grad: Any, *given: Any) -> Gradients | list[ComplexTensor]:
        values, numbers = given[:count], given[count : count + len(extra)]
        required, *outputs, memory_config = given[count + len(extra) :]
        with_numbers = lambda *blocks: function(*blocks, *numbers)  # noqa: E731
        if name in _COMPLEX and isinstance(values[0], ComplexTensor):
            return complex_gradients(f"{name}_bw", with_numbers, grad, *values, memory_config=memory_config)
        flags = (*(False,) * skips, *required) if skips else required
        made = gradients(f"{name}_bw", with_numbers, grad, values, outputs, flags)[skips:]
        for each in made:
            if each is not None:
                each.memory_config = memory_config
        return made

    takes = {**dict.fromkeys(["grad_tensor", *operand_names], REQUIRED), **extra, "are_required_outputs": ()}
    doc = f"The gradients of the operands of {name}."
    made = with_arguments(f"{name}_bw", doc, {**takes, **dict.fromkeys([*grads, "memory_config"])}, call)
    op(f"{name}_bw", spelled=spelled)(made)


_COMPLEX = frozenset("abs reciprocal add sub mul div".split())  # whose operands may be complex numbers


# one operand

_AS_FORWARD = """abs acos acosh asin asinh atan atanh ceil celu cos cosh deg2rad digamma elu erf erfc erfinv exp exp2
expm1 floor frac hardshrink hardsigmoid hardswish i0 lgamma log log10 log1p log2 log_sigmoid
multigammaln neg rad2deg reciprocal relu relu6 rsqrt sigmoid sign silu sin sinh softplus softshrink
softsign sqrt square tan tanh tanhshrink trunc logit round selu gelu rpow"""
_NONE = frozenset("sigmoid logit round selu".split())  # their backward ops take no parameters


def _one(name: str, function: Callable[..., Block], **parameters: Any) -> None:
    backward(name, function, ["input_tensor"], parameters)


def _forward(name: str) -> None:
    found = UNARY[name]
    if name not in _NONE:
        _one(name, found.call, **found.parameters)
        return
    defaults = list(found.parameters.values())
    _one(name, lambda x: found.call(x, *defaults))


for _name in _AS_FORWARD.split():
    _forward(_name)

_one("fill_zero", torch.zeros_like)
_one("hardtanh", F.hardtanh, min=-1.0, max=1.0)
_one("leaky_relu", F.leaky_relu, negative_slope=0.01)
_one("logiteps", lambda x, eps: torch.logit(x, eps or None), eps=0.0)
_one("polygamma", lambda x, n: torch.polygamma(int(n), x), n=REQUIRED)
_one("pow", torch.pow, exponent=REQUIRED)
_one("rdiv", lambda x, value, mode: divide(torch.full_like(x, value), x, mode), scalar=REQUIRED, rounding_mode=None)
_one("threshold", F.threshold, min=REQUIRED, max=REQUIRED)
_one("div_no_nan", lambda x, value: x / value if value else x * 0, scalar=REQUIRED)


def _limit(x: Block, low: Any, high: Any) -> Block:
    if low is None and high is None:
        raise ArgumentError("ttnn.clamp_bw needs min or max")
    return torch.clamp(x, low, high)


def _clamping(name: str) -> None:
    @op(f"{name}_bw")
    def call(grad_tensor, input_tensor, min=None, max=None) -> Gradients:
        """The gradient where the element was inside of the limits, else zero."""
        limits = [each for each in (min, max) if isinstance(each, Tensor)]

        def clamp(x: Block, *blocks: Block) -> Block:
            given = iter(blocks)
            low, high = (next(given) if isinstance(each, Tensor) else each for each in (min, max))
            return _limit(x, low, high)

        values = [input_tensor, *limits]
        return gradients(f"{name}_bw", clamp, grad_tensor, values)[:1]


_clamping("clamp")
_clamping("clip")


@op("prod_bw")
def prod_bw(grad_tensor, input_tensor, *, dim=None) -> Gradients:
    """The gradient of a product over a dim, or over all, whose dims the gradient has with size 1."""
    rank = len(input_tensor.shape)

    def product(x: Block) -> Block:
        for each in range(-rank, 0) if dim is None else [dim % rank - rank]:
            x = x.prod(each, keepdim=True)
        return x

    return gradients("prod_bw", product, grad_tensor, [input_tensor])


@op("repeat_bw")
def repeat_bw(grad_tensor, input_tensor, shape: Sequence[int]) -> Gradients:
    """The gradient of a tensor that was repeat so many times along each dim: the sum over its copies."""

    def repeat(x: Block) -> Block:
        return x.repeat(*(1,) * (x.dim() - len(shape)), *shape)

    return gradients("repeat_bw", repeat, grad_tensor, [input_tensor])


# two operands

_OTHER = {
    "input_tensor": "input_tensor_a",
    "other_tensor": "input_tensor_b",
    "scalar": "input_tensor_b",
    "bias": "input_tensor_b",
    "input_a_grad": "input_grad",
    "input_b_grad": "other_grad",
}


def _two(name: str, function: Callable[..., Block], **parameters: Any) -> None:
    backward(name, function, ["input_tensor_a", "input_tensor_b"], parameters, _OTHER)


def _both(function: Callable[[Block, Block], Block]) -> Callable[..., Block]:
    return lambda x, y, *rest: function(x, y if isinstance(y, torch.Tensor) else x.new_tensor(y), *rest)


def _bias_gelu(x: Block, y: Any, variant: GeluVariant, approximate: str | None) -> Block:
    fast = approximate == "tanh" or variant is GeluVariant.Tanh
    return F.gelu(x + y, approximate="tanh" if fast else "none")


_two("add", lambda x, y, alpha: x + alpha * y, alpha=1.0)
_two("sub", lambda x, y, alpha: x - alpha * y, alpha=1.0)
_two("mul", lambda x, y: x * y)
_two("div", divide, rounding_mode=None)
_two("rsub", lambda x, y: y - x)
_two("addalpha", lambda x, y, alpha: x + alpha * y, alpha=1.0)
_two("subalpha", lambda x, y, alpha: x - alpha * y, alpha=1.0)
_two("atan2", _both(torch.atan2))
_two("hypot", _both(torch.hypot))
_two("ldexp", _both(lambda x, y: x * torch.exp2(y)))
_two("logaddexp", _both(torch.logaddexp))
_two("logaddexp2", _both(torch.logaddexp2))
_two("max", _both(torch.maximum))
_two("min", _both(torch.minimum))
_two("squared_difference", lambda x, y: (x - y).square())
_two("xlogy", torch.special.xlogy)
_two("fmod", torch.fmod)
_two("remainder", torch.remainder)
_two("bias_gelu", _bias_gelu, variant=GeluVariant.Accurate, approximate=None)


_PAIR = Rooms("input_a_grad input_b_grad", (True, True))


@op("assign_bw", spelled={"input_tensor": "input_tensor_a"}, more=_PAIR)
def assign_bw(grad_tensor, input_tensor_a, input_tensor_b=None, **rooms) -> Gradients:
    """The gradient as it is; nothing for what was written over."""
    values = [input_tensor_a] if input_tensor_b is None else [input_tensor_a, input_tensor_b]
    outputs = [rooms.get(each) for each in _PAIR.names]
    return gradients("assign_bw", lambda x, *_: x.clone(), grad_tensor, values, outputs, _PAIR.wanted(rooms))


@op("concat_bw", more=_PAIR)
def concat_bw(grad_tensor, input_tensor_a, input_tensor_b, dim=0, **rooms) -> Gradients:
    """The piece of the gradient that belongs to each operand."""
    both = (input_tensor_a, input_tensor_b)
    _, (block, *_) = operands("concat_bw", grad_tensor, *both)
    at = dim % len(grad_tensor.shape) - len(grad_tensor.shape)
    pieces = block.split([each.shape[at] for each in both], at)
    label = topology_of(LINEAR, grad_tensor)
    return _PAIR.fill([Made(piece.clone(), like, label) for piece, like in zip(pieces, both, strict=True)], rooms)


# three operands

_THREE = ["input_tensor_a", "input_tensor_b", "input_tensor_c"]
backward("addcmul", lambda a, b, c, alpha: torch.addcmul(a, b, c, value=alpha), _THREE, {"alpha": REQUIRED})
backward("addcdiv", lambda a, b, c, alpha: torch.addcdiv(a, b, c, value=alpha), _THREE, {"alpha": REQUIRED})
backward("lerp", torch.lerp, _THREE, spelled={"scalar": "input_tensor_c"})
backward(
    "where",
    lambda condition, yes, no: torch.where(condition != 0, yes, no),
    _THREE,
    spelled={"input_a_grad": "other_grad", "input_b_grad": "third_grad"},
    skips=1,
)
