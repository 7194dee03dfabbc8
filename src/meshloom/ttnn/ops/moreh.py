"""The moreh family: reductions, softmax, products and steps of optimizers with their backward ops, as torch has them.

They keep dims and take outputs as TTNN's do; what they compute is what the plain ops compute on every device's part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.calling import (
    REQUIRED,
    Made,
    Optionals,
    make,
    op,
    operands,
    register,
    shared_coords,
    with_arguments,
)
from meshloom.ttnn.ops.elementwise import binary
from meshloom.ttnn.ops.gradients import Gradients, Rooms, broadcast_dims, gradients, summed_topology
from meshloom.ttnn.ops.matmul import matmul, multiply
from meshloom.ttnn.ops.reductions import Dims, dims_of, exact, reduce, run
from meshloom.ttnn.ops.topologies import EACH, LINEAR, einsum, moves, topology_of
from meshloom.ttnn.tensor.memory import MemoryConfig
from meshloom.ttnn.tensor.padding import fill_padding
from meshloom.ttnn.tensor.parts import Block
from meshloom.ttnn.tensor.tensor import Tensor


def _check_alike(name: str, tensors: Sequence[Tensor]) -> None:
    for each in tensors[1:]:
        if tuple(each.shape) != tuple(tensors[0].shape):
            raise OperandError(f"ttnn.{name}: shapes {list(tensors[0].shape)} and {list(each.shape)} differ")


# reductions


@op("moreh_sum")
def moreh_sum(input, dim: Dims = None, *, keepdim=False) -> Made:
    """The sum over dims, or all."""
    return reduce("moreh_sum", torch.sum, "sum", input, dim, keepdim)


@op("moreh_mean")
def moreh_mean(input, *, dim: Dims = None, keepdim=False, divisor=None) -> Made:
    """The sum over dims, or all, by its count or by `divisor`."""

    def mean(x: Block, dims: list[int], keep: bool) -> Block:
        return x.mean(dims, keep) if divisor is None else x.sum(dims, keep) / divisor

    return reduce("moreh_mean", mean, "mean" if divisor is None else "sum", input, dim, keepdim)


@op("moreh_norm")
def moreh_norm(input, p, *, dim: Dims = None, keepdim=False) -> Made:
    """The p-norm over dims, or all."""
    return reduce("moreh_norm", lambda x, *how: torch.linalg.vector_norm(x, p, *how), "var", input, dim, keepdim)


@op("moreh_abs_pow")
def moreh_abs_pow(input, p, *, kind=None) -> Made:
    """|x| ** p."""
    return binary("moreh_abs_pow", lambda x, y: x.abs() ** y, input, p, kind=kind)


def _spread(
    name: str, grad: Tensor, shape: Sequence[int], dim: Dims, keepdim: bool, factor: Callable[[int], float]
) -> Made:
    """The gradient of a sum, the same for every summand."""
    _, (block,) = operands(name, grad)
    rank, axes = len(shape), len(grad.grid)
    named = range(rank) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = sorted(each % rank for each in named)
    kept = [1 if place in dims else size for place, size in enumerate(shape)]
    count = torch.Size([shape[each] for each in dims]).numel()
    wide = block.reshape(*block.shape[:axes], *kept).expand(*block.shape[:axes], *shape) * factor(count)
    places = tuple(range(rank)) if keepdim else tuple(each for each in range(rank) if each not in dims)
    return make(wide, moves(places), grad)


@op("moreh_sum_backward")
def moreh_sum_backward(output_grad, *, input=None, dim: Dims = None, keepdim=False, input_grad=None) -> Made:
    """The gradient of a sum: that of its result, for every summand."""
    like = input if input is not None else input_grad
    if like is None:
        raise ArgumentError("ttnn.moreh_sum_backward needs the shape of the input", fix="input= or input_grad=")
    return _spread("moreh_sum_backward", output_grad, like.shape, dim, keepdim, lambda _: 1.0).into(input_grad)


@op("moreh_mean_backward")
def moreh_mean_backward(
    output_grad, *, dim: Dims = None, keepdim=False, input_grad_shape=None, input_grad=None
) -> Made:
    """The gradient of a mean: that of its result by the count, for every element."""
    shape = input_grad_shape if input_grad_shape is not None else input_grad.shape if input_grad is not None else None
    if shape is None:
        raise ArgumentError("ttnn.moreh_mean_backward needs the shape of the input", fix="input_grad_shape=")
    return _spread("moreh_mean_backward", output_grad, shape, dim, keepdim, lambda n: 1 / n).into(input_grad)


# softmax

_SOFT: dict[str, tuple[Callable[[Block, int], Block], Callable[[Block, Block, int], Block]]] = {
    "softmax": (lambda x, d: x.softmax(d), lambda y, g, d: y * (g - (g * y).sum(d, True))),
    "softmin": (lambda x, d: (-x).softmax(d), lambda y, g, d: -y * (g - (g * y).sum(d, True))),
    "logsoftmax": (lambda x, d: x.log_softmax(d), lambda y, g, d: g - y.exp() * g.sum(d, True)),
}


def _soft(kind: str) -> None:
    forward, backward = _SOFT[kind]
    name = f"moreh_{kind}"

    def call(input_tensor, dim) -> Made:
        identity = "min" if kind == "softmin" else "max"
        return run(name, lambda x, at: forward(x.float(), at), input_tensor, dim, identity=identity)

    def call_backward(output_tensor: Tensor, output_grad_tensor: Tensor, dim: int) -> Made:
        _, (y, grad) = operands(f"{name}_backward", output_tensor, output_grad_tensor)
        (at,) = dims_of(name, output_tensor, dim)
        both = (output_grad_tensor, output_tensor)
        _check_alike(f"{name}_backward", both)
        label = topology_of("div", *both)
        grad = fill_padding(grad.float(), output_grad_tensor, [at], "sum")
        return Made(backward(y.float(), grad, at), output_tensor, label, coords=shared_coords(*both))

    register(name, f"The {kind} along a dim of every device's part.", call)
    doc = f"The gradient of {kind}, from its result and the gradient of that."
    register(f"{name}_backward", doc, call_backward)


for _kind in _SOFT:
    _soft(_kind)


# running sums


@op("moreh_cumsum")
def moreh_cumsum(input, dim) -> Made:
    """The sum of all elements up to each one."""
    return run("moreh_cumsum", torch.cumsum, input, dim, rule=LINEAR)


@op("moreh_cumsum_backward")
def moreh_cumsum_backward(output_grad, dim) -> Made:
    """The gradient of a running sum: the sum of all gradients from each one on."""
    return run("moreh_cumsum_backward", torch.cumsum, output_grad, dim, True, LINEAR)


# products


def _dot(x: Block, y: Block) -> Block:
    return (x * y).sum(-1, keepdim=True)


@op("moreh_dot")
def moreh_dot(input_tensor_a, input_tensor_b) -> Made:
    """The inner product of two rows [1, 1, 1, n], as [1, 1, 1, 1]."""
    _, (x, y) = operands("moreh_dot", input_tensor_a, input_tensor_b)
    both = (input_tensor_a, input_tensor_b)
    _check_alike("moreh_dot", both)
    lead = "abcdefg"[: len(input_tensor_a.shape) - 1]
    products = einsum(f"{lead}n, {lead}n -> {lead}.", 0, 1)
    return make(_dot(exact(x), exact(y)), products, *both)


@op("moreh_dot_backward")
def moreh_dot_backward(output_grad, input, other, *, input_grad=None, other_grad=None) -> list[Made]:
    """The gradients of an inner product: each row times the gradient of the other's."""
    return [
        binary("moreh_dot_backward", torch.mul, row, output_grad, "mul", output=room)
        for row, room in ((other, input_grad), (input, other_grad))
    ]


@op("moreh_bmm", more=multiply)
def moreh_bmm(input, mat2, **how) -> Made:
    """The products of two batches of matrices."""
    return multiply("matmul", input, mat2, **how)


@op("moreh_matmul", more=multiply, spelled={"transpose_input": "transpose_a", "transpose_other": "transpose_b"})
def moreh_matmul(input, other, **how) -> Made:
    """The product of every device's matrices, plus a bias."""
    return multiply("linear", input, other, **how)


@op("moreh_linear", more=multiply)
def moreh_linear(input, weight, **how) -> Made:
    """x @ weight.T + bias, with a weight of [out, in]."""
    return multiply("linear", input, weight, transpose_b=True, **how)


_BMM = Rooms("input_grad mat2_grad", (True, True))


@op("moreh_bmm_backward", more=_BMM)
def moreh_bmm_backward(output_grad, input, mat2, **rooms) -> list[Tensor | None]:
    """grad @ mat2.T and input.T @ grad."""
    first, second = _BMM.ask(rooms)
    made = (
        matmul(output_grad, mat2, transpose_b=True, **first),
        matmul(input, output_grad, transpose_a=True, **second),
    )
    return [each if wanted else None for each, wanted in zip(made, _BMM.wanted(rooms), strict=True)]


# steps of optimizers


def _update(
    name: str,
    function: Callable[..., Sequence[Block | None]],
    tensors: Sequence[Tensor | None],
    outputs: Sequence[Tensor | None],
    memory_config: MemoryConfig | None = None,
) -> Gradients:
    """New values for the first tensor and its state, each where it is, or in the output that is given for it."""
    given = [each for each in tensors if each is not None]
    operands(name, *given)
    _check_alike(name, given)
    label = topology_of(EACH, *given)
    found = function(*(None if each is None else each.block.float() for each in tensors))
    return [
        None if block is None else Made(block, given[0], label, memory_config=memory_config, output=output)
        for block, output in zip(found, outputs, strict=True)
    ]


_STATE = "param_out exp_avg_out exp_avg_sq_out max_exp_avg_sq_out"


def _adam(name: str, decoupled: bool) -> None:
    def call(param, grad, m_in, v_in, lr, beta1, beta2, eps, decay, step, amsgrad, top_in, *outputs) -> Gradients:
        def advance(p: Block, g: Block, m: Block, v: Block, top: Block | None) -> Sequence[Block | None]:
            if decoupled:
                p = p * (1 - lr * decay)
            else:
                g = g + decay * p
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            top = torch.maximum(top, v) if amsgrad and top is not None else None
            spread = ((v if top is None else top) / (1 - beta2**step)).sqrt() + eps
            return p - lr * (m / (1 - beta1**step)) / spread, m, v, top

        if amsgrad and top_in is None:
            raise ArgumentError(f"ttnn.{name}: amsgrad needs max_exp_avg_sq_in")
        if step < 1:
            raise ArgumentError(f"ttnn.{name}: step={step}", fix="steps are counted from 1")
        return _update(name, advance, (param, grad, m_in, v_in, top_in if amsgrad else None), outputs)

    takes = dict.fromkeys("param_in grad exp_avg_in exp_avg_sq_in".split(), REQUIRED)
    numbers = {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-08, "weight_decay": 0.01 if decoupled else 0.0}
    state = {"step": 0, "amsgrad": False, "max_exp_avg_sq_in": None, **dict.fromkeys(_STATE.split())}
    doc = f"One step of Adam{' with decoupled decay' if decoupled else ''}: the parameter and its state."
    op(name)(with_arguments(name, doc, {**takes, **numbers, **state}, call))


_adam("moreh_adam", decoupled=False)
_adam("moreh_adamw", decoupled=True)


def _descend(
    *, lr=0.001, momentum=0, dampening=0, weight_decay=0, nesterov=False, momentum_initialized
) -> Callable[..., Sequence[Block | None]]:
    def advance(p: Block, g: Block, moving: Block | None) -> Sequence[Block | None]:
        g = g + weight_decay * p
        if momentum == 0:
            return p - lr * g, None
        kept = momentum * moving + (1 - dampening) * g if momentum_initialized and moving is not None else g
        return p - lr * (g + momentum * kept if nesterov else kept), kept

    return advance


_STEPPED = Optionals("param_out momentum_buffer_out param_out_memory_config")


@op("moreh_sgd", more=(_descend, _STEPPED))
def moreh_sgd(param_in, grad, momentum_buffer_in=None, **how) -> Gradients:
    """One step of stochastic gradient descent: the parameter and its momentum."""
    *outputs, memory = _STEPPED(how)
    return _update("moreh_sgd", _descend(**how), (param_in, grad, momentum_buffer_in), outputs, memory)


_MATMUL = Rooms("input_a_grad input_b_grad", (True, True))


@op("moreh_matmul_backward", more=_MATMUL)
def moreh_matmul_backward(output_grad, input_a, input_b, **rooms) -> Gradients:
    """The gradients of a product of matrices; batches that were broadcast are summed over."""
    wanted = _MATMUL.wanted(rooms)
    first = sum_to(matmul(output_grad, input_b, transpose_b=True), input_a) if wanted[0] else None
    second = sum_to(matmul(input_a, output_grad, transpose_a=True), input_b) if wanted[1] else None
    return _MATMUL.fill([first, second], rooms)


def sum_to(whole: Tensor, like: Tensor) -> Made:
    """A gradient summed over the dims that its operand has with size 1, or has not."""
    axes, gone = len(whole.grid), broadcast_dims(whole, like)
    block = exact(whole.block)
    if gone:
        block = block.sum([axes + dim for dim in gone], keepdim=True).reshape(*block.shape[:axes], *like.shape)
    return Made(block, like, summed_topology(whole, like))


@op("moreh_norm_backward")
def moreh_norm_backward(input, output, output_grad, p, *, dim: Dims = None, keepdim=False) -> Made:
    """The gradient of a p-norm."""
    dims = dims_of("moreh_norm_backward", input, dim)

    def norm(x: Block) -> Block:
        found: Block = torch.linalg.vector_norm(x, p, dims, keepdim)
        return found

    (found,) = gradients("moreh_norm_backward", norm, output_grad, [input])
    assert found is not None
    return found
