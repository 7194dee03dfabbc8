"""Block floats against a slow reference: whole numbers only, one element after the other, written from the rules."""

import math
import struct

import numpy
import pytest
import torch

from meshloom import ttnn
from meshloom.errors import ArgumentError
from meshloom.runtime import state
from meshloom.ttnn.tensor import blockfloat

COUNT = 1_000_000
BITS = (7, 3)
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def with_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is without numba; `test_ttnn_blockfloat_loops.py` compares what it is with it."""
    monkeypatch.setattr(blockfloat, "_load_loops", lambda: None)


def bits_of(value: float) -> int:
    """A float32 as its 32 bits."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def slow_level(word: int, shared: int, bits: int) -> int:
    """One element, given as 32 bits, as a whole number of units of a block with that exponent."""
    exponent = word >> 23 & 0xFF
    if exponent == 0:
        return 0
    significand = (0x800000 | word & 0x7FFFFF) >> (shared - exponent)
    drop = 24 - bits
    kept, rest, half = significand >> drop, significand & (1 << drop) - 1, 1 << drop - 1
    if rest > half or (rest == half and kept & 1):
        kept += 1
    kept = min(kept, (1 << bits) - 1)
    return -kept if word >> 31 else kept


def slow_block(words: list[int], bits: int) -> list[float]:
    """What 16 elements read back as."""
    shared = max(word >> 23 & 0xFF for word in words)
    unit = math.ldexp(1.0, shared - 127 - (bits - 1))
    return [
        struct.unpack("<f", struct.pack("<I", word))[0]
        if word >> 23 & 0xFF == 255
        else slow_level(word, shared, bits) * unit
        for word in words
    ]


def slow_rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of any length: the last block of a row is filled up with zeros."""
    words = values.float().contiguous().numpy().view(numpy.uint32).tolist()
    found = []
    for row in words:
        filled = row + [0] * (-len(row) % 16)
        blocks = (slow_block(filled[at : at + 16], bits) for at in range(0, len(filled), 16))
        found.append([value for block in blocks for value in block][: len(row)])
    return torch.tensor(found, dtype=torch.float64).float()


def hostile(count: int, seed: int) -> torch.Tensor:
    """Blocks of 16 of every kind of trouble: all bit patterns, near each other, denormals, ties, tops, infinities."""
    generator = numpy.random.default_rng(seed)
    rows = count // 16
    words = generator.integers(0, 1 << 32, (rows, 16), dtype=numpy.uint32)
    kind = generator.integers(0, 8, rows)
    centre = generator.integers(1, 254, (rows, 1))
    near = numpy.clip(centre + generator.integers(-12, 1, (rows, 16)), 0, 254).astype(numpy.uint32)
    sign, low = words & 0x80000000, words & 0x7FFFFF
    tie = (generator.integers(0, 128, (rows, 16)) << 16).astype(numpy.uint32)
    close = tie + generator.integers(0, 3, (rows, 16)).astype(numpy.uint32)
    top = numpy.uint32(0x7FFFFF) - (low & 0x1FFFF)
    tiny = generator.integers(0, 34, (rows, 16)).astype(numpy.uint32)
    calm = numpy.where((words >> 23 & 0xFF) == 255, words & 0x3FFFFFFF, words)
    kinds = [
        words,  # anything, so that most blocks have an infinity or a NaN
        calm,  # anything finite
        sign | near << 23 | low,  # exponents near each other
        sign | near << 23 | tie,  # halves of units
        sign | near << 23 | close,  # halves, and a little more that falls off
        sign | near << 23 | top,  # all ones, so that rounding would carry
        sign | tiny << 23 | low,  # the smallest exponents, and denormals
        numpy.where(generator.random((rows, 16)) < 0.9, sign, sign | near << 23 | low),  # mostly zeros
    ]
    specials = generator.random((rows, 16)) < 0.002
    found = numpy.choose(kind[:, None], kinds)
    found = numpy.where(specials, sign | 0x7F800000 | numpy.where(low & 1, low, 0), found).astype(numpy.uint32)
    return torch.from_numpy(found.view(numpy.float32).copy())


def check_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, but for the payload of a NaN."""
    assert found.shape == expected.shape
    nan = expected.isnan()
    assert torch.equal(found.isnan(), nan)
    a, b = (torch.where(nan, 0.0, each.float()).contiguous().view(torch.int32) for each in (found, expected))
    if not torch.equal(a, b):
        place = (a != b).nonzero()[0].tolist()
        raise AssertionError(f"{int((a != b).sum())} differ, first at {place}: {found[place[0]]} {expected[place[0]]}")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_million_hostile_values_round_as_the_rules_say(bits: int, dtype: torch.dtype) -> None:
    values = hostile(COUNT, seed=bits * 10 + (dtype is torch.bfloat16)).to(dtype)
    assert values.float().isinf().any() and values.isnan().any() and (values.abs() < 2.0**-126).any()
    check_same(blockfloat.round_blocks(values, bits), slow_rounded(values, bits))


@pytest.mark.parametrize("bits", BITS)
def test_packed_and_read_back_is_the_same_as_rounded(bits: int) -> None:
    values = hostile(3 * 96 * 128, seed=bits).reshape(3, 96, 128)
    packed = blockfloat.pack(values, bits)
    assert packed.shape == (3, 12, 1088 if bits == 7 else 576)
    check_same(blockfloat.unpack(packed, values.shape, bits), blockfloat.round_blocks(values, bits))


@pytest.mark.parametrize("bits", BITS)
def test_in_a_capture_where_nothing_has_a_value_the_same_is_computed(
    bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = hostile(1 << 14, seed=bits)
    expected = blockfloat.round_blocks(values, bits)
    monkeypatch.setattr(state, "capture", object())
    check_same(blockfloat.round_blocks(values, bits), expected)


@pytest.mark.parametrize("bits", BITS)
def test_bytes_lie_in_the_order_of_faces_as_the_rules_say(bits: int) -> None:
    values = torch.randn(32, 32, generator=torch.Generator().manual_seed(1)) * 10
    exponents, mantissas = [], []
    for top, left in ((0, 0), (0, 16), (16, 0), (16, 16)):
        for row in range(top, top + 16):
            words = [bits_of(value) for value in values[row, left : left + 16].tolist()]
            shared = max(word >> 23 & 0xFF for word in words)
            exponents.append(shared)
            levels = [slow_level(word, shared, bits) for word in words]
            mantissas += [abs(level) | (level < 0) << bits for level in levels]
    if bits == 3:
        mantissas = [low | high << 4 for low, high in zip(mantissas[::2], mantissas[1::2], strict=True)]
    assert blockfloat.pack(values, bits)[0].tolist() == exponents + mantissas


def test_the_slow_reference_is_right_where_the_answer_is_known() -> None:
    known = {255.0: 254.0, 1.9999: 1.984375, -0.0: 0.0, 1e-40: 0.0, 3.0: 3.0}
    for value, expected in known.items():
        found = slow_rounded(torch.tensor([[value]]), 7)
        assert found.item() == expected and math.copysign(1, found.item()) == 1
        check_same(blockfloat.round_blocks(torch.tensor([value]), 7), torch.tensor([expected]))
    assert slow_rounded(torch.tensor([[255.0]]), 3).item() == 224.0
    mixed = torch.tensor([[math.inf, 5.0, -math.inf, math.nan]])
    assert slow_rounded(mixed, 7)[0, :3].tolist() == [math.inf, 0.0, -math.inf]
    check_same(blockfloat.round_blocks(mixed, 7), slow_rounded(mixed, 7))


@pytest.mark.parametrize("bits", BITS)
def test_the_comparison_fails_for_rounding_that_is_almost_right(bits: int) -> None:
    values = hostile(1 << 16, seed=3)
    values = torch.where(values.isfinite() & (values.abs() >= 2.0**-126), values, 0.0)
    exponent = values.abs().amax(-1, keepdim=True).double().clamp(min=2.0**-126).log2().floor()
    unit = torch.exp2(exponent - (bits - 1))
    direct = ((values.double() / unit).round().clamp(1 - 2**bits, 2**bits - 1) * unit + 0.0).float()  # no bits fall off
    with pytest.raises(AssertionError, match="differ"):
        check_same(direct, slow_rounded(values, bits))


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 17), (0, 16), (2, 0), (40, 33)], ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_any_shape_rounds_packs_and_reads_back(shape: tuple[int, ...], bits: int) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = blockfloat.round_blocks(values, bits)
    rows = values.reshape(-1, shape[-1]) if shape and values.numel() else values.reshape(1, -1)
    expected = slow_rounded(rows, bits).reshape(shape) if values.numel() else values
    check_same(found, expected)
    if values.numel():
        check_same(blockfloat.unpack(blockfloat.pack(values, bits), shape, bits), expected)


def test_rounding_twice_changes_nothing_and_the_result_is_exact_in_bfloat16() -> None:
    for bits in BITS:
        once = blockfloat.round_blocks(hostile(1 << 14, seed=5), bits)
        check_same(blockfloat.round_blocks(once, bits), once)
        check_same(once.bfloat16().float(), once)
        assert blockfloat.round_blocks(once, bits, torch.bfloat16).dtype is torch.bfloat16


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_function_of_elements_is_rounded_in_pieces_as_it_is_at_once(bits: int, dtype: torch.dtype) -> None:
    count = 3 * 16 * blockfloat.CHUNK + 16 * 40  # the last piece is smaller
    x, y = (hostile(count, seed=seed).to(dtype) for seed in (bits, bits + 20))
    before = x.clone(), y.clone()
    for act in (torch.add, lambda a, b: a, lambda a, b: a > b):  # one of them gives its operand back
        found = blockfloat.round_pointwise(act, bits, x, y)
        assert found.dtype is torch.bfloat16
        check_same(found.float(), blockfloat.round_blocks(act(x.float(), y.float()).float(), bits))
    check_same(x, before[0])
    check_same(y, before[1])
    turned = blockfloat.round_pointwise(torch.add, bits, x.reshape(2, -1).T, y.reshape(2, -1).T)  # not in one piece
    check_same(turned.float(), blockfloat.round_blocks(x.reshape(2, -1).T.float() + y.reshape(2, -1).T.float(), bits))


def beside(companion: float) -> torch.Tensor:
    """Every bit pattern of bfloat16, 15 of them in a block with a companion that the block's exponent may come from."""
    words = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rows = torch.nn.functional.pad(words.float(), (0, -len(words) % 15)).view(-1, 15)
    return torch.cat([torch.full((len(rows), 1), companion), rows], 1).bfloat16()


COMPANIONS = (0.0, 2.0**-126, -(2.0**-96), 1.0, -1.9921875, 127.5, 2.0**103, 3.3895313892515355e38, -math.inf, math.nan)


@pytest.mark.parametrize("bits", BITS)
def test_every_pattern_of_bfloat16_is_rounded_beside_any_size(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.cat([beside(each) for each in COMPANIONS])
    monkeypatch.setattr(blockfloat, "CHUNK", 1 << 12)  # many pieces, so that what needs no truncating is told apart
    expected = slow_rounded(values, bits)
    check_same(blockfloat.round_blocks(values, bits), expected)
    check_same(blockfloat.round_pointwise(torch.clone, bits, values).float(), expected)


def mixed_pieces() -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of three pieces. Beside 1.5, 1 + 2^-7 is a tie, and in the second piece the other operand moves it off.
    In the third, beside 128 the last bit of 1 + 2^-23 falls off, and what is left is a tie again."""
    x, y = torch.zeros(3 * 64, 16), torch.zeros(3 * 64, 16)
    x[:, 0], x[:, 1], x[:, 2], x[:, 3] = 1.5, 1 + 2.0**-7, -(1 + 3 * 2.0**-7), 1 + 2.0**-6
    y[64:, 1], y[64:, 2] = 2.0**-17, -(2.0**-17)
    x[128:, 0], x[128:, 1], x[128:, 2] = 128.0, 1 + 2.0**-7, -(3 + 2.0**-6)
    y[128:, 1], y[128:, 2] = 2.0**-16, -(2.0**-16)
    x[160:, 0], x[160:, 1], y[160:, 1] = 128.0, 1.0, 2.0**-23
    return x.bfloat16(), y.bfloat16()


@pytest.mark.parametrize("bits", BITS)
def test_pieces_of_a_sum_are_truncated_wherever_bits_fall_off(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = mixed_pieces()
    monkeypatch.setattr(blockfloat, "CHUNK", 64)
    exact = x.float() + y.float()
    assert not blockfloat._has_fine_bits(exact[:64], bits) and blockfloat._has_fine_bits(exact[128:], bits)
    check_same(blockfloat.round_pointwise(torch.add, bits, x, y).float(), slow_rounded(exact, bits))


def test_the_comparison_sees_bits_that_are_not_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = mixed_pieces()
    monkeypatch.setattr(blockfloat, "CHUNK", 64)
    monkeypatch.setattr(blockfloat, "_has_fine_bits", lambda values, bits: False)
    with pytest.raises(AssertionError, match="differ"):
        check_same(blockfloat.round_pointwise(torch.add, 7, x, y).float(), slow_rounded(x.float() + y.float(), 7))


def slow_value(byte: int, exponent: int, bits: int) -> float:
    """What a sign and a mantissa mean beside an exponent."""
    size = byte & (1 << bits) - 1
    if exponent == 255 and size >= 1 << bits - 1:
        found = math.inf if size == 1 << bits - 1 else math.nan
    else:
        found = math.ldexp(size, exponent - 126 - bits)
    return -found if byte >> bits and size else found


@pytest.mark.parametrize("bits", BITS)
def test_every_byte_is_read_beside_every_exponent_as_the_rules_say(bits: int) -> None:
    elements, per_byte = 1 << bits + 1, 1 if bits == 7 else 2
    exponents = torch.arange(1, 256, dtype=torch.uint8)
    blocks = torch.arange(elements).view(-1, 16).repeat(len(exponents), 1)  # every element in each of so many blocks
    blocks = torch.nn.functional.pad(blocks, (0, 0, 0, -len(blocks) % 64))
    packed = blocks.view(-1, 64, 16)
    if per_byte == 2:
        packed = packed[..., ::2] | packed[..., 1::2] << 4
    heads = exponents.repeat_interleave(elements // 16)
    heads = torch.nn.functional.pad(heads, (0, -len(heads) % 64))
    tiles = torch.cat([heads.view(-1, 64).int(), packed.flatten(1)], 1).to(torch.uint8)
    found = blockfloat.unpack(tiles, (len(tiles), 32, 32), bits)
    faces = found.view(-1, 2, 16, 2, 16).transpose(2, 3).reshape(-1, 16)
    kept = len(exponents) * elements // 16
    expected = [[slow_value(byte, int(heads[row]), bits) for byte in blocks[row].tolist()] for row in range(kept)]
    check_same(faces[:kept], torch.tensor(expected, dtype=torch.float64).float())


def test_bytes_that_are_no_tiles_are_refused() -> None:
    with pytest.raises(ArgumentError, match="are not the tiles of shape"):
        blockfloat.unpack(torch.zeros(1087, dtype=torch.uint8), (32, 32), 7)
    with pytest.raises(ArgumentError, match="5 bits of mantissa"):
        blockfloat.pack(torch.zeros(32, 32), 5)


def test_row_112_sixteen_elements_share_an_exponent_and_the_round_trip_is_within_its_bound():
    values = torch.randn(2, 1, 64, 128, generator=torch.Generator().manual_seed(0))
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 2)) as mesh:
        mapper = ttnn.ShardTensorToMesh(mesh, dim=0)
        tensor = ttnn.from_torch(values, dtype=ttnn.bfloat8_b, layout=ttnn.TILE_LAYOUT, device=mesh, mesh_mapper=mapper)
        found = ttnn.to_torch(tensor, mesh_composer=ttnn.ConcatMeshToTensor(mesh, dim=0))
    blocks, read = (each.reshape(-1, 16) for each in (values, found))
    exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True)).exponent - 1
    step = torch.exp2(exponent - 6.0)
    assert torch.equal(read / step, (read / step).round())  # all of a block are multiples of one step
    assert ((read - blocks).abs() <= step).all()
    assert torch.corrcoef(torch.stack([values.flatten(), found.flatten()]))[0, 1] > 0.999
