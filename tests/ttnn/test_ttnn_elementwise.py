"""Ops that work element by element, against torch on every device's part and on wholes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.nn import functional as F

from meshloom import ttnn
from meshloom.errors import ArgumentError, OperandError
from meshloom.ttnn.ops.activations import UNARY
from meshloom.ttnn.ops.calling import TABLE
from ttnn_cases import check_claim, check_op, check_parts, distributed, each_device, label, mesh, tensor_of
from ttnn_draws import DTYPES, GRIDS, P, R, S, blocks, cuts, grids, shapes

# Values of the parameters that an op asks for.
ASKED: dict[str, tuple[Any, ...]] = {
    "fill": (3.5,),
    "heaviside": (0.5,),
    "leaky_relu": (0.1,),
    "polygamma": (2,),
    "rdiv": (2.0,),
    "relu_max": (0.5,),
    "relu_min": (0.2,),
    "rpow": (2.0,),
    "softcap": (3.0,),
    "threshold": (0.3, 7.0),
}
# What is not the function of that name in torch or torch.nn.functional.
GOLDEN: dict[str, Any] = {
    "alt_complex_rotate90": lambda x: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * 1j).flatten(
        -2
    ),
    "cbrt": lambda x: torch.from_numpy(__import__("numpy").cbrt(x.numpy())),
    "eqz": lambda x: torch.eq(x, 0),
    "xielu": lambda x, positive=0.8, negative=0.8: (
        torch.where(x > 0, positive * x * x, negative * (torch.exp(x.clamp(max=0)) - 1 - x)) + x / 2
    ),
    "nez": lambda x: torch.ne(x, 0),
    "gez": lambda x: torch.ge(x, 0),
    "gtz": lambda x: torch.gt(x, 0),
    "lez": lambda x: torch.le(x, 0),
    "ltz": lambda x: torch.lt(x, 0),
    "fill": lambda x, value: torch.zeros_like(x) + value,
    "heaviside": lambda x, value: torch.heaviside(x, torch.tensor(value)),
    "hardmish": lambda x: x * torch.minimum(torch.tensor(5.0), torch.relu(x + 2.8)) * 0.2,
    "identity": lambda x: x,
    "log_sigmoid": F.logsigmoid,
    "multigammaln": lambda x: torch.special.multigammaln(x, 4),
    "polygamma": lambda x, n: torch.special.polygamma(n, x),
    "rdiv": lambda x, value: value / x,
    "relu_max": lambda x, limit: torch.relu(torch.clamp(x, max=limit)),
    "relu_min": lambda x, limit: torch.relu(torch.clamp(x, min=limit)),
    "rpow": lambda x, base: torch.exp(x * torch.log(torch.tensor(base))),
    "selu": F.selu,
    "sigmoid_accurate": torch.sigmoid,
    "softcap": lambda x, beta: torch.tanh(x / beta) * beta,
    "swish": F.silu,
    "i0": torch.special.i0,
    "i1": torch.special.i1,
    "glu": F.glu,
    "reglu": lambda x: x.chunk(2, -1)[0] * F.relu(x.chunk(2, -1)[1]),
    "swiglu": lambda x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]),
    "geglu": lambda x: x.chunk(2, -1)[0] * F.gelu(x.chunk(2, -1)[1]),
}
DOMAIN = {"acosh": (1.1, 4.0), "multigammaln": (2.0, 6.0), "erfinv": (-0.9, 0.9), "acos": (-0.9, 0.9)}
POSITIVE = "asin atanh digamma lgamma log log10 log1p log2 logit rsqrt sqrt polygamma rdiv reciprocal".split()


def golden(name: str) -> Any:
    return GOLDEN.get(name) or getattr(torch, name, None) or getattr(F, name)


def values(grid: tuple[int, ...], shape: tuple[int, ...], low: float, high: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand((*grid, *shape), generator=generator) * (high - low) + low


@pytest.mark.parametrize("name", sorted(set(UNARY) - {"bitwise_not"}))
def test_a_function_of_one_tensor_is_torchs_on_every_device(name: str) -> None:
    low, high = DOMAIN.get(name, (0.1, 0.9) if name in POSITIVE else (-2.0, 2.0))
    for number, grid in enumerate(GRIDS):
        dtype = DTYPES[number % 2]
        x = tensor_of(values(grid, (2, 3, 6), low, high, number), grid, dtype=dtype)
        asked = ASKED.get(name, ())
        found = getattr(ttnn, name)(x, *asked)
        assert found.dtype is dtype and found.layout is x.layout
        check_op(found, lambda part, *rest: golden(name)(part, *rest), x, *asked, rtol=1e-4, atol=1e-5)


def test_the_oracle_of_devices_notices_one_wrong_part() -> None:
    x = tensor_of(values((2, 3), (4, 4), -1, 1, 0), (2, 3))
    wrong = ttnn.exp(x)
    wrong.block[1, 2, 3, 3] += 0.1
    with pytest.raises(AssertionError):
        check_op(wrong, torch.exp, x)


BINARY = {
    "add": torch.add,
    "subtract": torch.sub,
    "sub": torch.sub,
    "multiply": torch.mul,
    "mul": torch.mul,
    "divide": torch.div,
    "div": torch.div,
    "rsub": lambda x, y: y - x,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "eq": torch.eq,
    "ne": torch.ne,
    "gt": torch.gt,
    "ge": torch.ge,
    "lt": torch.lt,
    "le": torch.le,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_xor": torch.logical_xor,
    "ldexp": torch.ldexp,
    "logaddexp": torch.logaddexp,
    "logaddexp2": torch.logaddexp2,
    "squared_difference": lambda x, y: (x - y) ** 2,
    "xlogy": torch.xlogy,
    "remainder": torch.remainder,
    "fmod": torch.fmod,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "pow": torch.pow,
    "bias_gelu": lambda x, y: F.gelu(x + y),
    "floor_div": torch.floor_divide,
    "div_no_nan": lambda x, y: torch.nan_to_num(x / y, 0.0, 0.0, 0.0),
}


@pytest.mark.parametrize("name", sorted(BINARY))
def test_a_function_of_two_tensors_is_torchs_on_every_device(name: str) -> None:
    for number, grid in enumerate(GRIDS):
        a = tensor_of(values(grid, (2, 1, 5), 0.1, 2, number), grid)
        b = tensor_of(values((1,) * len(grid), (4, 1), 0.1, 2, number + 7), grid)
        check_op(getattr(ttnn, name)(a, b), BINARY[name], a, b, rtol=1e-4)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), grid=grids(), name=st.sampled_from(["add", "sub", "mul", "maximum", "gt", "squared_difference"]))
def test_shapes_broadcast_as_in_torch_on_every_device(data: st.DataObject, grid: tuple[int, ...], name: str) -> None:
    shape = data.draw(shapes())
    other = [1 if data.draw(st.booleans()) else size for size in shape[data.draw(st.integers(0, len(shape) - 1)) :]]
    first, second = data.draw(st.permutations([tuple(shape), tuple(other)]))
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in range(2)]
    a = tensor_of(data.draw(blocks(grid, first)), grid, dtype=dtypes[0])
    b = tensor_of(data.draw(blocks(grid, second)), grid, dtype=dtypes[1])
    found = getattr(ttnn, name)(a, b)
    assert found.dtype is dtypes[0]
    check_op(found, BINARY[name], a, b)


@settings(max_examples=120, deadline=None)
@given(data=st.data(), grid=grids(), name=st.sampled_from(["add", "sub", "mul", "div", "maximum", "rsub", "pow"]))
def test_a_label_of_two_operands_claims_only_what_is_so(data: st.DataObject, grid: tuple[int, ...], name: str) -> None:
    shape = [data.draw(st.sampled_from([1, 6, 12])) for _ in range(3)]
    other = [1 if data.draw(st.booleans()) else size for size in shape]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    wholes = [torch.rand(each, generator=generator) + 0.5 for each in (shape, other)]
    a, b = (distributed(whole, grid, data.draw(cuts(grid, whole.shape)), seed=n) for n, whole in enumerate(wholes))
    try:
        found = getattr(ttnn, name)(a, b)
    except OperandError:
        return  # the parts do not fit: each was cut along another dim
    if whole_shape(found) == torch.broadcast_shapes(*(each.shape for each in wholes)):
        check_claim(found, BINARY[name](*wholes))  # else parts fit by chance, and the label tells of another whole


def whole_shape(tensor: Any) -> tuple[int, ...]:
    sizes = list(tensor.shape)
    for size, placement in zip(tensor.grid, tensor.tensor_topology().placements(), strict=True):
        if isinstance(placement, ttnn.PlacementShard):
            sizes[placement.dim] *= size
    return tuple(sizes)


def test_sums_keep_terms_and_what_is_not_linear_does_not() -> None:
    whole = torch.rand(4, 6)
    p, q = (distributed(whole, (2, 3), [R, P()], seed=seed) for seed in (1, 2))
    r = distributed(whole, (2, 3), [R, R])
    unknown = P("unknown")
    assert label(ttnn.add(p, q)) == [R, P()] and check_claim(ttnn.add(p, q), 2 * whole)
    assert label(ttnn.multiply(p, r)) == label(ttnn.multiply(r, p)) == [R, P()]
    assert check_claim(ttnn.multiply(p, r), whole * whole)
    assert label(ttnn.multiply(p, 3.0)) == label(ttnn.divide(p, r)) == label(ttnn.neg(p)) == [R, P()]
    for wrong in (ttnn.add(p, r), ttnn.add(p, 1.0), ttnn.multiply(p, q), ttnn.divide(r, p), ttnn.gelu(p)):
        assert label(wrong) == [R, unknown] and not check_claim(wrong, whole)


def test_the_oracle_of_labels_notices_a_false_claim() -> None:
    whole = torch.rand(4, 6)
    found = ttnn.gelu(distributed(whole, (3,), [P()]))
    found.update_tensor_topology(found.tensor_topology().with_placements([P()]))
    with pytest.raises(AssertionError):
        check_claim(found, F.gelu(whole))
    found.update_tensor_topology(found.tensor_topology().with_placements([R]))
    with pytest.raises(AssertionError):
        check_claim(found, F.gelu(whole))


def test_a_shard_of_size_1_that_is_broadcast_makes_no_whole() -> None:
    gate = distributed(torch.rand(1, 4), (4,), [S(1)])
    x = distributed(torch.rand(3, 5), (4,), [R])
    assert label(ttnn.multiply(x, gate)) == [P("unknown")]
    column = distributed(torch.rand(4, 1), (4,), [S(0)])
    rows = distributed(torch.rand(4, 5), (4,), [S(0)])
    assert label(ttnn.multiply(rows, column)) == [S(0)]


def test_a_distribution_over_one_dim_on_a_mesh_of_two_keeps_its_form() -> None:
    device = mesh((2, 3))
    whole = torch.rand(12, 5)
    mapper = ttnn.ShardTensorToMesh(device, 0)
    x = ttnn.from_torch(whole, dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, device=device, mesh_mapper=mapper)
    y = ttnn.add(x, x)
    assert tuple(y.tensor_topology().distribution_shape()) == (6,) and label(y) == [S(0)]
    weight = ttnn.from_torch(torch.rand(5), dtype=ttnn.float32, layout=ttnn.TILE_LAYOUT, device=device)
    z = ttnn.multiply(y, weight)
    assert tuple(z.tensor_topology().distribution_shape()) == (6,) and label(z) == [S(0)]
    both = ttnn.add(x, distributed(whole, (2, 3), [S(0), S(0)]))
    assert check_claim(both, whole * 2)
    total = ttnn.sum(x, dim=0)
    assert label(total) == [P("sum")] and check_claim(total, whole.sum(0))


def test_numbers_stand_on_either_side() -> None:
    x = tensor_of(values((2, 3), (4, 4), 0.5, 2, 0), (2, 3))
    check_op(ttnn.add(x, 3), lambda a: a + 3, x)
    check_op(ttnn.subtract(2.5, x), lambda a: 2.5 - a, x)
    check_op(1 / x, lambda a: 1 / a, x)
    check_op(2 - x, lambda a: 2 - a, x)
    check_op(ttnn.pow(2.0, x), lambda a: 2.0**a, x)
    check_op(ttnn.rsub(x, 2.0), lambda a: 2.0 - a, x)
    check_op(ttnn.gt(1.0, x), lambda a: (a < 1.0).float(), x)
    check_op(ttnn.maximum(x, 1), lambda a: a.clamp(min=1), x)
    with pytest.raises(ArgumentError, match=r"ttnn\.add takes tensors and numbers"):
        ttnn.add(x, "1")


@pytest.mark.parametrize("name", ["add_", "subtract_", "sub_", "multiply_", "mul_", "divide_", "div_", "gt_", "rsub_"])
def test_in_place_forms_write_into_their_first_operand(name: str) -> None:
    grid = (2, 3)
    first = values((1, 3), (4, 4), 0.5, 2, 0)
    x, b = tensor_of(first.clone(), grid), tensor_of(values(grid, (1, 4), 0.5, 2, 1), grid)
    address = x.buffer_address()
    found = getattr(ttnn, name)(x, b)
    assert found is x and x.buffer_address() == address
    check_op(x, BINARY[{"rsub_": "rsub"}.get(name, name[:-1])], tensor_of(first, grid), b)


def test_integers_wrap_and_shift_as_their_width_says() -> None:
    grid = (2,)
    a = tensor_of(torch.tensor([[7, -8, 1 << 30], [5, 6, -1]]), grid, dtype=ttnn.int32)
    b = tensor_of(torch.tensor([[3, 2, 1], [1, 2, 28]]), grid, dtype=ttnn.int32)
    check_op(ttnn.add(a, b), torch.add, a, b)
    assert ttnn.add(a, b).dtype is ttnn.int32
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "gcd", "lcm"):
        check_op(getattr(ttnn, name)(a, b), getattr(torch, name), a, b)
    check_op(ttnn.bitwise_not(a), torch.bitwise_not, a)
    shifted = ttnn.logical_right_shift(a, b)
    assert shifted.block[1, 2].item() == 0xFFFFFFFF >> 28
    u = tensor_of(torch.tensor([[0, 1, 2], [3, 4, 5]]), grid, dtype=ttnn.uint32)
    assert ttnn.subtract(u, 1).block[0, 0].item() == 0xFFFFFFFF


def test_activations_are_fused_before_and_after() -> None:
    a, b = (tensor_of(values((2,), (3, 4), -2, 2, seed), (2,)) for seed in (0, 1))
    kind, given = ttnn.UnaryOpType, ttnn.UnaryWithParam
    found = ttnn.add(
        a,
        b,
        activations=[given(kind.POWER, 2)],
        input_tensor_a_activations=["relu"],
        input_tensor_b_activations=[kind.EXP],
    )
    check_op(found, lambda x, y: (F.relu(x) + y.exp()) ** 2, a, b)
    check_op(ttnn.multiply(a, b, activations=["silu"]), lambda x, y: F.silu(x * y), a, b)
    check_op(ttnn.unary_chain(a, [given(kind.RELU), given(kind.ADD_UNARY_SFPU, 1.0)]), lambda x: F.relu(x) + 1, a)
    with pytest.raises(ArgumentError, match="no activation is called 'rellu'"):
        ttnn.add(a, b, activations=["rellu"])
    with pytest.raises(ArgumentError, match="LEAKY_RELU needs parameters"):
        ttnn.add(a, b, activations=["leaky_relu"])


def test_three_operands_equal_torch() -> None:
    a, b, c = (tensor_of(values((2, 3), (4, 5), 0.5, 2, seed), (2, 3)) for seed in range(3))
    row = tensor_of(values((1, 3), (5,), 0.5, 2, 9), (2, 3))
    check_op(ttnn.addcmul(a, b, row, value=0.5), lambda x, y, z: torch.addcmul(x, y, z, value=0.5), a, b, row)
    check_op(ttnn.addcdiv(a, b, c, value=2.0), lambda x, y, z: torch.addcdiv(x, y, z, value=2.0), a, b, c)
    check_op(ttnn.lerp(a, b, 0.25), lambda x, y: torch.lerp(x, y, 0.25), a, b)
    check_op(ttnn.lerp(a, b, c), torch.lerp, a, b, c)
    check_op(ttnn.mac(a, b, c), lambda x, y, z: x * y + z, a, b, c)
    check_op(ttnn.mac(a, 2.0, value=1.0), lambda x: x * 2 + 1, a)
    check_op(ttnn.where(ttnn.gt(a, b), a, 0.0), lambda x, y: torch.where(x > y, x, 0.0), a, b)
    check_op(ttnn.where(ttnn.gt(a, b), row, c), lambda x, y, z, w: torch.where(x > y, z, w), a, b, row, c)
    check_op(ttnn.clamp(a, 0.7, 1.2), lambda x: x.clamp(0.7, 1.2), a)
    check_op(ttnn.clamp(a, max=b), lambda x, y: torch.minimum(x, y), a, b)
    check_op(ttnn.clip(a, min=1.0), lambda x: x.clamp(min=1.0), a)
    check_op(ttnn.prelu(ttnn.neg(a), 0.25), lambda x: -0.25 * x, a)
    check_op(ttnn.polyval(a, [1.0, -2.0, 3.0]), lambda x: x * x - 2 * x + 3, a)
    check_op(ttnn.isclose(a, a), lambda x: torch.ones_like(x), a)
    check_op(ttnn.addalpha(a, b, 3.0), lambda x, y: x + 3 * y, a, b)
    check_op(ttnn.subalpha(a, b, 3.0), lambda x, y: x - 3 * y, a, b)
    check_op(ttnn.snake_beta(a, row, row), lambda x, y: x + torch.sin(x * y) ** 2 / y, a, row)
    with pytest.raises(OperandError, match="min"):
        ttnn.clamp(a)


def test_bcast_repeats_its_second_operand() -> None:
    a = tensor_of(values((2,), (1, 1, 3, 4), 0.5, 2, 0), (2,))
    for dim, shape in (("H", (1, 1, 1, 4)), ("W", (1, 1, 3, 1)), ("HW", (1, 1, 1, 1))):
        b = tensor_of(values((2,), shape, 0.5, 2, 1), (2,))
        for how, function in (("ADD", torch.add), ("SUB", torch.sub), ("MUL", torch.mul)):
            found = ttnn.bcast(a, b, math_op=ttnn.BcastOpMath[how], dim=ttnn.BcastOpDim[dim])
            check_op(found, function, a, b)
    with pytest.raises(OperandError, match="along H"):
        ttnn.bcast(a, a, ttnn.BcastOpMath.ADD, ttnn.BcastOpDim.H)


def test_where_takes_the_dtype_of_its_values() -> None:
    mask = tensor_of(torch.tensor([[1, 0]]), (1,), dtype=ttnn.int32)
    x = tensor_of(torch.tensor([[0.5, 0.5]]), (1,))
    found = ttnn.where(mask, x, 2.0)
    assert found.dtype is ttnn.float32 and found.block.flatten().tolist() == [0.5, 2.0]
    found = ttnn.where(mask, 1.0, x)
    assert found.dtype is ttnn.float32 and found.block.flatten().tolist() == [1.0, 0.5]


def test_quantisation_goes_there_and_back() -> None:
    x = tensor_of(values((2,), (4, 8), -1, 1, 0), (2,))
    q = ttnn.quantize(x, 0.01, 3)
    assert q.dtype is ttnn.int32
    check_op(q, lambda part: (part / 0.01).round() + 3, x)
    back = ttnn.dequantize(q, 0.01, 3, dtype=ttnn.float32)
    check_parts(back, each_device(lambda part: part, x), rtol=0, atol=0.006)
    scales = tensor_of(torch.rand(1, 8) + 0.1, (2,))
    by_column = ttnn.quantize(x, scales, 0, axis=1)
    check_op(by_column, lambda part, s: (part / s).round().clamp(-128, 127), x, scales)
    check_op(ttnn.requantize(q, 0.25, 3, 0.5, 0), lambda part: ((part - 3) * 0.5).round(), q)


@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_division_rounds_as_it_is_told(mode: str) -> None:
    a, b = (tensor_of(values((2,), (3, 4), -5, 5, seed), (2,)) for seed in (0, 1))
    check_op(ttnn.div(a, b, rounding_mode=mode), lambda x, y: torch.div(x, y, rounding_mode=mode), a, b)
    with pytest.raises(ArgumentError, match="rounding_mode='up'"):
        ttnn.div(a, b, rounding_mode="up")


def test_the_first_operand_gives_the_dtype_unless_it_is_asked_for() -> None:
    x = {dtype: tensor_of(values((2,), (32, 32), -1, 1, 0), (2,), dtype=dtype) for dtype in DTYPES}
    small, large = x[ttnn.bfloat16], x[ttnn.float32]
    assert ttnn.add(small, large).dtype is ttnn.bfloat16 and ttnn.add(large, small).dtype is ttnn.float32
    assert ttnn.add(small, small, dtype=ttnn.float32).dtype is ttnn.float32
    exact = ttnn.add(small, small, dtype=ttnn.float32)
    assert torch.equal(exact.block, small.block.float() * 2)
    block_float = ttnn.add(large, large, dtype=ttnn.bfloat8_b)
    assert block_float.dtype is ttnn.bfloat8_b and block_float.layout is ttnn.TILE_LAYOUT
    check_parts(block_float, each_device(lambda part: part * 2, large), rtol=0.02, atol=0.02)


def test_an_output_tensor_is_written_and_keeps_its_format() -> None:
    a = tensor_of(values((2,), (3, 4), -5, 5, 0), (2,))
    room = tensor_of(torch.zeros(1, 3, 4), (2,), dtype=ttnn.bfloat16)
    found = ttnn.add(a, 1.0, output_tensor=room)
    assert found is room and room.dtype is ttnn.bfloat16
    check_op(room, lambda x: x + 1, a)
    with pytest.raises(OperandError, match=r"output_tensor has shape \[3, 4\], the result \[3, 5\]"):
        ttnn.exp(tensor_of(torch.zeros(1, 3, 5), (2,)), output_tensor=room)


def test_operands_that_do_not_go_together_are_refused_in_the_words_of_the_original() -> None:
    a, b = tensor_of(torch.zeros(1, 1, 1, 32, 64), (2,)), tensor_of(torch.zeros(1, 1, 1, 32, 32), (2,))
    text = r"Broadcasting rule violation at dimension index -1 \(output rank 4\), dim a: 64, dim b: 32"
    with pytest.raises(RuntimeError, match=text):
        ttnn.add(a, b)
    with pytest.raises(RuntimeError, match="Operands to eltwise binary need to be on the same device!"):
        ttnn.add(a, tensor_of(torch.zeros(1, 32, 64), (4,)))
    with pytest.raises(RuntimeError, match="must be on device, got storage type: StorageType::HOST"):
        ttnn.add(a, ttnn.ones([32, 64]))
    gone = tensor_of(torch.zeros(1, 32, 64), (2,))
    ttnn.deallocate(gone)
    with pytest.raises(RuntimeError, match="Input Tensor B is not allocated"):
        ttnn.add(a, gone)
    with pytest.raises(TypeError, match=r"is a list, not a ttnn\.Tensor"):
        ttnn.relu([1.0])


def test_a_program_that_was_run_before_is_counted_once() -> None:
    device = ttnn.open_mesh_device(ttnn.MeshShape(1, 2))
    x = ttnn.ones([32, 32], device=device, layout=ttnn.TILE_LAYOUT)
    before = device.num_program_cache_entries()
    for _ in range(3):
        ttnn.add(x, x)
    assert device.num_program_cache_entries() == before + 1
    ttnn.exp(x)
    assert device.num_program_cache_entries() == before + 2
    ttnn.close_mesh_device(device)


def test_hooks_see_an_op_before_and_after_it_runs() -> None:
    x, seen = tensor_of(torch.zeros(1, 4, 4), (2,)), []
    with (
        ttnn.register_pre_operation_hook(lambda op, args, kwargs: seen.append((op.__name__, len(args)))),
        ttnn.register_post_operation_hook(lambda op, args, kwargs, output: seen.append(output)),
    ):
        y = ttnn.add(x, 1.0)
    ttnn.add(x, 1.0)
    assert seen == [("add", 2), y] or (seen[0] == ("add", 2) and seen[1] is y and len(seen) == 2)


# backward

SCALED = {"add": 2.0, "sub": 2.0}
BACKWARD_ONE = [name for name in UNARY if f"{name}_bw" in TABLE and name not in ("fill", "rdiv", "threshold")]


@pytest.mark.parametrize("name", sorted(BACKWARD_ONE))
def test_the_gradient_of_one_operand_is_autograds_on_every_device(name: str) -> None:
    low, high = DOMAIN.get(name, (0.1, 0.9) if name in POSITIVE else (-2.0, 2.0))
    grid = (2, 2)
    x = tensor_of(values((1, 2), (3, 4), low, high, 1), grid)
    grad = tensor_of(values((2, 1), (3, 4), -1, 1, 2), grid)
    asked = ASKED.get(name, ())
    (found,) = getattr(ttnn, f"{name}_bw")(grad, x, *asked)

    def wanted(g: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        leaf = part.clone().requires_grad_()
        result = golden(name)(leaf, *asked)
        (flow,) = torch.autograd.grad(result, leaf, g) if result.requires_grad else (torch.zeros_like(leaf),)
        return flow

    if name in ("cbrt", "hardmish", "rpow", "polygamma", "multigammaln"):
        assert found.shape == x.shape
    check_parts(found, each_device(wanted, grad, x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "div", "atan2", "hypot", "logaddexp", "squared_difference", "xlogy"]
)
def test_the_gradients_of_two_operands_are_autograds_on_every_device(name: str) -> None:
    grid = (2, 2)
    a, b = (tensor_of(values((2, 1), (3, 4), 0.5, 2, seed), grid) for seed in (0, 1))
    grad = tensor_of(values((1, 2), (3, 4), -1, 1, 2), grid)
    found = getattr(ttnn, f"{name}_bw")(grad, a, b)

    def wanted(which: int) -> Any:
        def call(g: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
            return torch.autograd.grad(BINARY[name](*leaves), leaves, g)[which]

        return call

    for which in (0, 1):
        check_parts(found[which], each_device(wanted(which), grad, a, b), rtol=1e-4, atol=1e-5)
    only = getattr(ttnn, f"{name}_bw")(grad, a, b, are_required_outputs=[False, True])
    assert only[0] is None and only[1] is not None


def test_the_gradient_of_a_broadcast_operand_is_summed_and_labelled_so() -> None:
    x = distributed(torch.rand(4, 6), (2,), [S(0)])
    row = distributed(torch.rand(1, 6), (2,), [R])
    grad = distributed(torch.rand(4, 6), (2,), [S(0)])
    whole_x, whole_row, whole_grad = (torch.cat(list(each.block.unbind(0))) for each in (x, row, grad))
    first, second = ttnn.mul_bw(grad, x, row)
    assert label(first) == [S(0)] and label(second) == [P()]
    assert check_claim(first, whole_grad * whole_row) and check_claim(
        second, (whole_grad * whole_x).sum(0, keepdim=True)
    )


@pytest.mark.parametrize("name", ["glu", "reglu", "swiglu", "geglu"])
@pytest.mark.parametrize("grid", [(4,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("dim", [0, 1, 3, -2])
def test_gates_take_dims_of_the_parts_counted_from_either_end(name: str, grid: tuple[int, ...], dim: int) -> None:
    gates = {"glu": torch.sigmoid, "reglu": F.relu, "swiglu": F.silu, "geglu": F.gelu}
    x = tensor_of(torch.randn(*grid, 2, 4, 6, 8, generator=torch.Generator().manual_seed(0)), grid)

    def gated(part: torch.Tensor) -> torch.Tensor:
        kept, gate = part.chunk(2, dim)
        return kept * gates[name](gate)

    check_op(getattr(ttnn, name)(x, dim), gated, x)


def test_gates_and_triangles_refuse_what_has_no_halves_or_no_rows() -> None:
    with pytest.raises(OperandError, match="dim -1 has size 5"):
        ttnn.glu(tensor_of(torch.ones(2, 2, 4, 5), (2, 2)))
    with pytest.raises(OperandError, match="dim 4 is out of range"):
        ttnn.swiglu(tensor_of(torch.ones(2, 2, 4, 6), (2, 2)), 4)
    for triangle in (ttnn.tril, ttnn.triu):
        with pytest.raises(OperandError, match="at least rank 2"):  # devices are not the rows
            triangle(tensor_of(torch.ones(2, 2, 4), (2, 2)))


def test_operands_cut_at_one_dim_along_different_axes_make_no_whole() -> None:
    whole = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    rows, columns = distributed(whole, (2, 2), [S(0), R]), distributed(whole, (2, 2), [R, S(0)])
    found = ttnn.add(rows, columns)
    assert not check_claim(found, whole + whole)
    assert found.tensor_topology().placements() == [P("unknown"), P("unknown")]
    assert check_claim(ttnn.add(rows, rows), whole + whole)
    both = distributed(whole, (2, 2), [S(0), S(1)])
    assert check_claim(ttnn.multiply(both, both), whole * whole)


@pytest.mark.parametrize("name", ["ones_like", "full_like"])
def test_one_value_is_no_terms_of_a_sum(name: str) -> None:
    terms = distributed(torch.ones(4, 6), (2, 3), [P("sum"), S(1)])
    found = ttnn.ones_like(terms) if name == "ones_like" else ttnn.full_like(terms, 2.5)
    assert check_claim(found, torch.full((4, 6), 1.0 if name == "ones_like" else 2.5))


@pytest.mark.parametrize("name", ["bitwise_and", "gcd", "bitwise_left_shift"])
def test_what_torch_cannot_take_is_told_with_the_op_and_its_operands(name: str) -> None:
    x = tensor_of(torch.ones(2, 2, 3, 4), (2, 2))
    with pytest.raises(OperandError, match=f"ttnn.{name} cannot take these operands") as told:
        getattr(ttnn, name)(x, x)
    assert "FLOAT32 [3, 4], FLOAT32 [3, 4]" in str(told.value) and told.value.__cause__ is not None


def test_wrong_calls_and_types_inside_are_type_errors() -> None:
    x = tensor_of(torch.ones(2, 2, 3, 4), (2, 2))
    with pytest.raises(ArgumentError, match=r"ttnn\.sum cannot take these operands"):
        ttnn.sum(x, dim="rows")
    with pytest.raises(TypeError, match="unexpected keyword"):
        ttnn.relu(x, slope=1)
