"""Block floats in compiled loops against torch's way and the slow reference; and what happens without numba."""

import importlib.util
import math
import multiprocessing
import operator
import sys
import warnings

import pytest
import torch

from meshloom import ttnn
from meshloom.context import FallbackWarning
from meshloom.ttnn.tensor import blockfloat, blockfloat_loops
from test_ttnn_blockfloat import BITS, COMPANIONS, beside, check_same, hostile, mixed_pieces, slow_rounded

needs_numba = pytest.mark.skipif(blockfloat_loops.numba is None, reason="numba is not installed: the extra `fast`")
FUNCTIONS = list(blockfloat_loops.CODES)
PAIRS = {torch.add, torch.sub, operator.sub, torch.mul, operator.mul, torch.div, torch.maximum, torch.minimum}


def without_loops(act):
    """What a call gives where numba is missing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockfloat, "_load_loops", lambda: None)
        return act()


@pytest.fixture
def three_threads(monkeypatch):
    """Shares so small that three threads have some of a thousand blocks."""
    had = torch.get_num_threads()
    torch.set_num_threads(3)
    monkeypatch.setattr(blockfloat_loops, "SHARE", blockfloat_loops.PIECE)
    yield
    torch.set_num_threads(had)


def small_pieces(monkeypatch):
    """Arrays of more than 64 blocks count as large ones."""
    monkeypatch.setattr(blockfloat, "CHUNK", 64)


@needs_numba
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_every_op_of_the_table_has_the_bits_of_torchs_way(function, bits, three_threads, monkeypatch):
    small_pieces(monkeypatch)
    count = 16 * 1000 + 16 * 7  # no multiple of a piece, nor of a share
    operands = [hostile(count, seed).bfloat16() for seed in (bits, bits + 30)[: 1 + (function in PAIRS)]]
    before = [each.clone() for each in operands]
    found = blockfloat.round_pointwise(function, bits, *operands, known=function)
    expected = without_loops(lambda: blockfloat.round_pointwise(function, bits, *operands))
    assert found.dtype is torch.bfloat16 and expected.isnan().any() and expected.isinf().any()
    check_same(found, expected)
    for each, was in zip(operands, before, strict=True):
        check_same(each, was)


@needs_numba
@pytest.mark.parametrize("bits", BITS)
def test_every_pattern_of_bfloat16_and_all_hostile_floats_round_as_the_rules_say(bits, monkeypatch):
    small_pieces(monkeypatch)
    values = torch.cat([beside(each) for each in COMPANIONS])
    expected = slow_rounded(values, bits)
    check_same(blockfloat.round_pointwise(torch.clone, bits, values, known=torch.clone).float(), expected)
    check_same(blockfloat.round_pointwise(lambda x: x, bits, values).float(), expected)
    fine = hostile(1 << 16, seed=bits)
    check_same(blockfloat.round_blocks(fine, bits, torch.bfloat16).float(), slow_rounded(fine, bits))


@needs_numba
@pytest.mark.parametrize("bits", BITS)
def test_ties_and_bits_that_fall_off_are_seen_in_a_sum(bits, monkeypatch):
    small_pieces(monkeypatch)
    x, y = mixed_pieces()
    expected = slow_rounded(x.float() + y.float(), bits)
    check_same(blockfloat.round_pointwise(torch.add, bits, x, y, known=torch.add).float(), expected)
    if bits == 7:  # a sum that is rounded to bfloat16 first is another one
        with pytest.raises(AssertionError, match="differ"):
            check_same(blockfloat.round_pointwise(torch.clone, bits, x + y, known=torch.clone).float(), expected)


@needs_numba
@pytest.mark.parametrize("shape", [(3, 41, 50), (129, 16), (1, 1, 2000), (2, 0), (5, 700), ()], ids=str)
def test_any_shape_is_rounded_as_torch_does(shape, monkeypatch):
    small_pieces(monkeypatch)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100
    for given in (values, values.bfloat16(), values.double(), values.mT if values.dim() > 1 else values):
        found = blockfloat.round_blocks(given, 7, torch.bfloat16, filled_with=3.0)
        check_same(found, without_loops(lambda given=given: blockfloat.round_blocks(given, 7, torch.bfloat16, 3.0)))
        twice = blockfloat.round_pointwise(torch.add, 7, given, given, known=torch.add)
        check_same(twice, without_loops(lambda given=given: blockfloat.round_pointwise(torch.add, 7, given, given)))


@needs_numba
def test_ops_on_large_tensors_take_the_loop_and_others_round_in_it(monkeypatch):
    taken = []
    combine, rounds = blockfloat_loops.combine, blockfloat_loops.round_floats
    monkeypatch.setattr(blockfloat_loops, "combine", lambda code, *rest: (taken.append(code), combine(code, *rest))[1])
    monkeypatch.setattr(blockfloat_loops, "round_floats", lambda *rest: (taken.append("rounded"), rounds(*rest))[1])
    x, y = (torch.randn(544, 512, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    with ttnn.create_mesh_device(ttnn.MeshShape(1, 1)) as mesh:
        a, b = (ttnn.from_torch(each, dtype=ttnn.bfloat8_b, layout=ttnn.TILE_LAYOUT, device=mesh) for each in (x, y))
        for act, code in (
            (lambda: ttnn.add(a, b), 1),
            (lambda: ttnn.subtract(a, b), 2),
            (lambda: ttnn.multiply(a, b), 3),
            (lambda: ttnn.div(a, b), 4),
            (lambda: ttnn.maximum(a, b), 5),
            (lambda: ttnn.minimum(a, b), 6),
            (lambda: ttnn.relu(a), 7),
            (lambda: ttnn.neg(a), 8),
            (lambda: ttnn.abs(a), 9),
            (lambda: ttnn.square(a), 10),
            (lambda: ttnn.multiply(a, 3.0), "rounded"),
            (lambda: ttnn.div(a, b, rounding_mode="floor"), "rounded"),
            (lambda: ttnn.add(a, b, activations=["relu"]), "rounded"),
            (lambda: ttnn.tanh(a), "rounded"),
        ):
            act()
            taken.clear()
            found = ttnn.to_torch(act())  # of a kind that was seen
            assert set(taken) == {code}
            check_same(found, without_loops(lambda act=act: ttnn.to_torch(act())))


def test_without_numba_torch_gives_the_result_and_nothing_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    blockfloat._load_loops.cache_clear()
    try:
        assert blockfloat._load_loops() is None
        small_pieces(monkeypatch)
        values = hostile(1 << 12, seed=8).bfloat16()
        found = blockfloat.round_pointwise(torch.clone, 7, values, known=torch.clone)
        check_same(found.float(), slow_rounded(values, 7))
    finally:
        blockfloat._load_loops.cache_clear()


def test_a_numba_that_cannot_be_loaded_is_told_of_once(monkeypatch):
    def fail(name):
        raise ImportError("numba needs another numpy")

    monkeypatch.setattr(blockfloat.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(blockfloat, "import_module", fail)
    blockfloat._load_loops.cache_clear()
    try:
        with pytest.warns(FallbackWarning, match="needs another numpy.*rounded with torch.*meshloom\\[fast\\]"):
            assert blockfloat._load_loops() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert blockfloat._load_loops() is None
    finally:
        blockfloat._load_loops.cache_clear()


def plain_loops(monkeypatch):
    """A second copy of the loops, as they are without numba."""
    spec = importlib.util.spec_from_file_location("plain_blockfloat_loops", blockfloat_loops.__file__)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        spec.loader.exec_module(module)
    assert module.numba is None
    return module


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("bits", BITS)
def test_the_loops_are_right_as_plain_python_too(bits, monkeypatch):
    plain, values = plain_loops(monkeypatch), hostile(64 * 16, seed=bits)
    into = torch.empty(values.shape, dtype=torch.bfloat16)
    plain.round_floats(values, into, bits)
    check_same(into.float(), slow_rounded(values, bits))
    summed = plain.combine(1, bits, values.bfloat16(), values.bfloat16())
    check_same(summed.float(), slow_rounded(values.bfloat16().float() * 2, bits))


@needs_numba
def test_where_nothing_can_be_kept_every_process_compiles_for_itself(monkeypatch):
    njit = blockfloat_loops.numba.njit

    def refuse(cache=False, **how):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**how)

    monkeypatch.setattr(blockfloat_loops.numba, "njit", refuse)
    assert blockfloat_loops._compile(lambda x: x + 1, is_kept=True)(2) == 3


def _add_in_child(send):
    values = torch.full((256, 16), 200.0).bfloat16()
    send.send(blockfloat.round_pointwise(torch.add, 7, values, values, known=torch.add).float().sum().item())


@needs_numba
def test_a_fork_has_threads_of_its_own(three_threads, monkeypatch):
    small_pieces(monkeypatch)
    values = torch.full((1000, 16), math.pi).bfloat16()
    blockfloat.round_pointwise(torch.add, 7, values, values, known=torch.add)
    assert blockfloat_loops._pools
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_add_in_child, args=(send,), daemon=True)
    child.start()
    try:
        assert receive.poll(30) and receive.recv() == 400.0 * 256 * 16
    finally:
        child.join(10)
        child.kill()
