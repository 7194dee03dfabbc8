"""Modules with parameters on a mesh: registration, state, copies, training equal to dense, and what communicates."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshloom as loom
from meshloom import Replicate, Shard


class Attention(nn.Module):
    """Self-attention with two heads."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, 3 * width, bias=False)  # the gradient of a key bias is rounding alone
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        parts = self.into(self.norm(x)).reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return x + self.out(found.transpose(1, 2).reshape(batch, length, width))


class Language(nn.Module):
    """A very small language model: embedding, attention, a feed-forward block, and a head tied to the embedding."""

    def __init__(self, words: int = 11, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.attention = Attention(width)
        self.block = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 13), nn.GELU(), nn.Linear(13, width))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Any) -> Any:
        x = self.attention(self.words(tokens))
        return self.head((x + self.block(x)) * self.scale)


def mlp() -> nn.Sequential:
    """Two layers; 13 divides by nothing."""
    return nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 5))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Linear(8, 5), lambda: torch.randn(7, 8)),
    "embedding": (lambda: nn.Embedding(11, 6, padding_idx=2), lambda: torch.randint(0, 11, (4, 3))),
    "layer norm": (lambda: nn.LayerNorm((3, 8)), lambda: torch.randn(5, 3, 8)),
    "mlp": (mlp, lambda: torch.randn(7, 8)),
    "attention": (Attention, lambda: torch.randn(3, 6, 8)),
    "language": (Language, lambda: torch.randint(0, 11, (3, 6))),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), lambda: torch.randn(5, 4)),
    "convolution": (lambda: nn.Conv1d(3, 4, 3, padding=1), lambda: torch.randn(2, 3, 8)),
    "recurrent cell": (lambda: nn.GRUCell(4, 5), lambda: torch.randn(3, 4)),
    "batch norm": (lambda: nn.BatchNorm1d(6), lambda: torch.randn(7, 6)),
    "root mean square norm": (lambda: nn.RMSNorm(8), lambda: torch.randn(7, 8)),
    "activation": (lambda: nn.Sequential(nn.Linear(8, 6), nn.PReLU(6)), lambda: torch.randn(7, 8)),
}

# mesh, placement of parameters of each rank (the last for all higher ones), placements of the data
LAYOUTS: dict[str, tuple[tuple[int, ...], list[str], str]] = {
    "one device": ((1,), ["R", "S(0)", "S(0)"], "S(0)"),
    "data-parallel": ((2,), ["R", "R", "R"], "S(0)"),
    "rows": ((4,), ["R", "S(0)", "S(0)"], "R"),
    "columns": ((4,), ["R", "R", "S(1)"], "R"),
    "both": ((2, 2), ["R, R", "R, S(0)", "R, S(0)"], "S(0), R"),
    "fully sharded": ((2, 4), ["R, R", "S(0), S(0)", "S(0), S(1)"], "S(0), S(0)"),
    "nested": ((2, 4), ["R, R", "S(0), S(0)", "S(0), S(0)"], "R, S(0)"),
    "three axes": ((2, 2, 2), ["R, R, R", "S(0), R, R", "S(1), R, S(0)"], "S(0), R, R"),
}


def put(module: nn.Module, layout: str) -> nn.Module:
    """The module with its parameters on a mesh; tied parameters stay tied."""
    shape, ranks, _ = LAYOUTS[layout]
    mesh = loom.open_mesh(shape)
    made: dict[int, Any] = {}
    for each in module.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            at = ranks[min(parameter.ndim, len(ranks) - 1)]
            if id(parameter) not in made:
                made[id(parameter)] = loom.Parameter(parameter.detach(), mesh, at)
            setattr(each, name, made[id(parameter)])
    return module


def place(data: torch.Tensor, layout: str) -> Any:
    """The data on the mesh of a layout."""
    shape, _, at = LAYOUTS[layout]
    return loom.distribute(data, loom.open_mesh(shape), at)


def run(module: nn.Module, data: Any) -> Any:
    """What a module gives for its data."""
    return module(data, data) if isinstance(module, nn.Bilinear) else module(data)


def check_same(found: Any, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Raise unless a tensor on a mesh equals a dense one."""
    torch.testing.assert_close(found.detach().to_torch(), expected.detach(), atol=tolerance, rtol=1e-4)


def check_parameters(found: nn.Module, expected: nn.Module) -> None:
    """Raise unless two modules have the same parameters under the same names."""
    mine, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert list(mine) == list(theirs)
    for name, each in mine.items():
        check_same(each, theirs[name])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_of_modules_equal_dense(name: str, layout: str) -> None:
    torch.manual_seed(0)
    make, give = MODELS[name]
    dense, data = make(), give()
    module = put(copy.deepcopy(dense), layout)
    expected, found = run(dense, data), run(module, place(data, layout))
    check_same(found, expected)
    (expected * expected).sum().backward()
    (found * found).sum().backward()
    for (label, mine), theirs in zip(module.named_parameters(), dense.parameters(), strict=True):
        assert mine.grad.placements == mine.placements, label
        assert theirs.grad is not None
        check_same(mine.grad, theirs.grad, 1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_a_language_model_equals_dense(layout: str) -> None:
    torch.manual_seed(0)
    dense = Language()
    module = put(copy.deepcopy(dense), layout)
    tokens = torch.randint(0, 11, (4, 7))
    losses: list[list[float]] = []
    for model, data in ((dense, tokens), (module, place(tokens, layout))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            scores = model(data[:, :-1]).reshape(24, 11)
            loss = F.cross_entropy(scores, data[:, 1:].reshape(24))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[0][-1] < losses[0][0]
    for mine, theirs in zip(module.parameters(), dense.parameters(), strict=True):
        check_same(mine, theirs, 1e-4)


def test_parameters_register_and_are_found_by_name() -> None:
    module = put(Language(), "both")
    names = [name for name, _ in Language().named_parameters()]
    assert [name for name, _ in module.named_parameters()] == names
    assert len(list(module.parameters())) == len(names)
    assert all(isinstance(each, (loom.Parameter, nn.Parameter, torch.Tensor)) for each in module.parameters())
    assert sum(each.numel() for each in module.parameters()) == sum(each.numel() for each in Language().parameters())
    assert module.head.weight is module.words.weight
    assert "Language" in repr(module)


def test_a_parameter_is_a_parameter_to_torch() -> None:
    p = loom.Parameter(torch.ones(7, 5), loom.open_mesh((4,), axes=("tp",)), "S(0)")
    assert isinstance(p, nn.Parameter)
    assert isinstance(p, torch.Tensor)
    assert p.is_leaf
    assert p.requires_grad
    assert p.shape == (7, 5)
    assert p.dtype == torch.float32
    assert p.grad is None
    assert str(p.topology) == "f32[7, 5](S(0)) on Mesh(tp=4)"
    assert p.block.shape == (4, 2, 5)
    assert "Parameter containing:\nTensor f32[7, 5](S(0)) on Mesh(tp=4), requires_grad=True" in repr(p)
    assert len(p) == len(list(p)) == 7


def test_a_parameter_has_memory_of_its_own() -> None:
    dense = torch.ones(8, 4)
    p = loom.Parameter(dense, loom.open_mesh((2,)), "S(0)")
    with torch.no_grad():
        p.mul_(2)
    assert torch.equal(dense, torch.ones(8, 4))


def test_a_parameter_needs_a_mesh() -> None:
    with pytest.raises(loom.ArgumentError) as error:
        loom.Parameter(torch.ones(3))
    assert str(error.value) == ("a parameter needs a mesh\n  fix  loom.Parameter(loom.distribute(w, mesh, placements))")


@pytest.mark.parametrize("name", ["mlp", "attention", "language", "batch norm"])
@pytest.mark.parametrize("layout", ["rows", "fully sharded", "nested"])
def test_state_goes_between_dense_and_any_placements(name: str, layout: str) -> None:
    make, _ = MODELS[name]
    first, second = make(), put(make(), layout)
    before = [each.topology for each in second.parameters()]
    assert second.load_state_dict(first.state_dict()).missing_keys == []
    check_parameters(second, first)
    assert [each.topology for each in second.parameters()] == before
    third = put(make(), "three axes" if layout != "three axes" else "rows")
    moved = {
        key: each.to_torch() if isinstance(each, loom.Tensor) else each for key, each in second.state_dict().items()
    }
    third.load_state_dict(moved)
    check_parameters(third, first)
    fourth = make()
    fourth.load_state_dict(second.state_dict())
    for mine, theirs in zip(fourth.parameters(), first.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_state_goes_between_placements_of_one_mesh() -> None:
    mesh = loom.open_mesh((2, 4))
    first, second = mlp(), mlp()
    for module, at in ((first, "S(0), S(0)"), (second, "R, S(0)")):
        for layer in (module[0], module[2]):
            for name, each in list(layer.named_parameters()):
                setattr(layer, name, loom.Parameter(each.detach(), mesh, at))
    second.load_state_dict(first.state_dict())
    for mine, theirs in zip(second.parameters(), first.parameters(), strict=True):
        check_same(mine, theirs.detach().to_torch())
        assert mine.placements != theirs.placements


def test_strict_loading_names_what_is_missing_and_what_does_not_fit() -> None:
    module = put(mlp(), "rows")
    state = mlp().state_dict()
    weight = state.pop("0.weight")
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        module.load_state_dict(state)
    assert module.load_state_dict(state, strict=False).missing_keys == ["0.weight"]
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        module.load_state_dict({**state, "0.weight": weight[:5]})


def test_loading_state_keeps_the_parameters_an_optimizer_holds() -> None:
    module = put(mlp(), "rows")
    held = list(module.parameters())
    module.load_state_dict(mlp().state_dict())
    assert all(now is before for now, before in zip(module.parameters(), held, strict=True))


@pytest.mark.parametrize("layout", ["rows", "nested", "three axes"])
def test_a_deep_copy_shares_nothing_and_keeps_everything(layout: str) -> None:
    module = put(Language(), layout)
    kept = {name: each.detach().to_torch() for name, each in module.named_parameters()}
    copied = copy.deepcopy(module)
    assert copied.head.weight is copied.words.weight
    for mine, theirs in zip(copied.parameters(), module.parameters(), strict=True):
        assert isinstance(mine, loom.Parameter)
        assert mine.topology is theirs.topology
        assert mine.requires_grad
    with torch.no_grad():
        for each in copied.parameters():
            each.add_(1)
    for name, each in module.named_parameters():
        check_same(each, kept[name])


def test_a_deep_copy_of_a_frozen_parameter_is_frozen() -> None:
    p = loom.Parameter(torch.ones(7), loom.open_mesh((4,)), "S(0)", requires_grad=False)
    assert not copy.deepcopy(p).requires_grad
    assert copy.deepcopy([p, p])[0] is not p
    pair = copy.deepcopy([p, p])
    assert pair[0] is pair[1]


@pytest.mark.parametrize("layout", ["rows", "nested", "three axes"])
def test_modules_states_and_parameters_survive_saving(layout: str) -> None:
    module = put(Language(), layout)
    for saved in (module, module.state_dict()):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        target = loaded if isinstance(loaded, nn.Module) else put(Language(), layout)
        if target is not loaded:
            target.load_state_dict(loaded)
        for (name, mine), theirs in zip(target.named_parameters(), module.parameters(), strict=True):
            assert isinstance(mine, loom.Parameter), name
            assert mine.topology is theirs.topology
            check_same(mine, theirs.detach().to_torch())
    again = pickle.loads(pickle.dumps(module.words.weight))
    assert again.topology is module.words.weight.topology
    check_same(again, module.words.weight.detach().to_torch())


def test_casting_a_module_casts_its_parameters_and_keeps_their_placements() -> None:
    for cast, dtype in ((nn.Module.double, torch.float64), (nn.Module.bfloat16, torch.bfloat16)):
        module = put(mlp(), "rows")
        held = list(module.parameters())
        cast(module)
        for now, before in zip(module.parameters(), held, strict=True):
            assert now.dtype == dtype
            assert now.placements == before.placements
        out = module(torch.ones(3, 8, dtype=dtype))
        assert out.dtype == dtype
        out.sum().backward()
        assert all(each.grad.dtype == dtype for each in module.parameters())
    assert next(put(mlp(), "rows").to("cpu").parameters()).placements == (Shard(0),)


def test_initialisers_fill_parameters_of_any_placement_alike() -> None:
    for fill in (nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.trunc_normal_):
        found = []
        for shape, at in (((1,), "R"), ((4,), "S(0)"), ((2, 4), "S(0), S(0)")):
            torch.manual_seed(0)
            p = loom.Parameter(torch.zeros(7, 5), loom.open_mesh(shape), at)
            assert fill(p) is p
            found.append(p.detach().to_torch())
        assert found[0].any()
        assert all(torch.equal(each, found[0]) for each in found)
    put(mlp(), "rows")[0].reset_parameters()


def test_zero_grad_takes_gradients_away_or_sets_them_to_zero() -> None:
    module = put(mlp(), "nested")
    module(torch.ones(3, 8)).sum().backward()
    assert all(each.grad is not None for each in module.parameters())
    module.zero_grad(set_to_none=False)
    assert not any(each.grad.any() for each in module.parameters())
    module.zero_grad()
    assert all(each.grad is None for each in module.parameters())


def test_freezing_and_thawing() -> None:
    module = put(mlp(), "rows")
    module[0].requires_grad_(False)
    module(torch.ones(3, 8)).sum().backward()
    assert [each.grad is None for each in module.parameters()] == [True, True, False, False]
    module.requires_grad_(True)
    module[2].weight.requires_grad = False
    module.zero_grad()
    module(torch.ones(3, 8)).sum().backward()
    assert [each.grad is None for each in module.parameters()] == [False, False, True, False]


def test_data_is_the_value_without_its_gradient_and_shares_memory() -> None:
    p = loom.Parameter(torch.ones(7, 5), loom.open_mesh((4,)), "S(0)")
    assert not p.data.requires_grad
    p.data.mul_(3)
    check_same(p, torch.full((7, 5), 3.0))
    p.data = torch.full((7, 5), 2.0)
    check_same(p, torch.full((7, 5), 2.0))
    assert p.requires_grad
    assert p.is_leaf
    assert p.placements == (Shard(0),)
    p.data = loom.zeros(7, 5, mesh=p.mesh, placements="S(1)")
    assert p.placements == (Shard(0),)
    check_same(p, torch.zeros(7, 5))
    (p * 2).sum().backward()
    check_same(p.grad, torch.full((7, 5), 2.0))
    p.grad = None
    p.data = torch.ones(3)  # of another shape, as torch takes it
    check_same(p, torch.ones(3))
    (p * 2).sum().backward()
    check_same(p.grad, torch.full((3,), 2.0))


def test_a_gradient_may_be_set_and_changed_in_place() -> None:
    p = loom.Parameter(torch.ones(7, 5), loom.open_mesh((4,)), "S(0)")
    p.grad = torch.ones(7, 5)
    p.grad.mul_(4)
    p.grad[0] = 1
    expected = torch.full((7, 5), 4.0)
    expected[0] = 1
    check_same(p.grad, expected)
    assert isinstance(p.grad, torch.Tensor)
    assert p.grad.placements == p.placements
    p.grad.zero_()
    check_same(p.grad, torch.zeros(7, 5))
    p.grad = None
    assert p.grad is None


def test_an_in_place_op_on_a_parameter_needs_no_grad_and_returns_it() -> None:
    p = loom.Parameter(torch.ones(7, 5), loom.open_mesh((4,)), "S(0)")
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        p.add_(1)
    same = p
    with torch.no_grad():
        p += 1
        p[0] = 5
        assert p.mul_(2) is p
    assert p is same
    expected = torch.full((7, 5), 4.0)
    expected[0] = 10
    check_same(p, expected)


def test_dropout_in_a_module_is_off_in_eval_mode() -> None:
    module = put(nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5)), "rows")
    data = torch.ones(3, 8)
    assert (module(data) == 0).any()
    check_same(module.eval()(data), module[0](data).detach().to_torch())


# --- what communicates ------------------------------------------------------------------------------------------------


def moved(events: Any) -> list[tuple[str, str, int]]:
    """Collective, axis and bytes of each event."""
    return [(event.kind, event.axis, event.bytes) for event in events]


def all_reduce(size: int, devices: int) -> int:
    """The bytes that one device receives: twice (p - 1) / p of what it holds."""
    return 2 * size * (devices - 1) // devices


def two_layers(mesh: loom.Mesh, first: Any, bias: Any, second: Any) -> list[Any]:
    """The parameters of an MLP 8 -> 12 -> 8: two weights, two biases."""
    drawn = torch.Generator().manual_seed(0)
    shapes = ((12, 8), first), ((12,), bias), ((8, 12), second), ((8,), {})
    return [loom.Parameter(torch.randn(shape, generator=drawn), mesh, at) for shape, at in shapes]


def forward(x: Any, held: list[Any]) -> Any:
    """The MLP."""
    return F.linear(F.relu(F.linear(x, held[0], held[1])), held[2], held[3])


@pytest.mark.parametrize("micro", [1, 2, 5])
def test_gradient_accumulation_reduces_once_per_parameter(micro: int) -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    held = two_layers(mesh, {}, {}, {})
    optimizer = torch.optim.SGD(held, lr=0.1)
    sizes = [12 * 8 * 4, 12 * 4, 8 * 12 * 4, 8 * 4]
    with loom.record() as log:
        for step in range(2):
            optimizer.zero_grad()
            losses = [
                forward(loom.randn(8, 8, mesh=mesh, placements={"dp": Shard(0)}), held).sum() for _ in range(micro + 1)
            ]
            seen = len(log)
            with loom.accumulate():
                for loss in losses[1:]:
                    loss.backward()
            assert moved(log.events[seen:]) == []
            assert len(log.pending) == 4
            losses[0].backward()
            sums = log.events[seen:]
            assert sorted(moved(sums)) == sorted(("all_reduce", "dp", all_reduce(size, 4)) for size in sizes), step
            assert log.pending == []
            assert all(event.phase == "backward" for event in sums)
            assert all(event.where.startswith("test_training.py:") for event in sums)
            optimizer.step()
            assert len(log) == seen + 4


def test_accumulated_gradients_equal_those_of_the_whole_batch() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    data = torch.randn(24, 8)
    gradients = []
    for parts in (data.split(6), (data,)):
        held = two_layers(mesh, {}, {}, {})
        for part in parts:
            forward(loom.distribute(part, mesh, "S(0)"), held).square().sum().backward()
        gradients.append([each.grad.to_torch() for each in held])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_backward_reduces_a_gradient_and_reading_it_or_a_step_does_not() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    p = loom.Parameter(torch.ones(8, 8), mesh, {})
    x = loom.ones(8, 8, mesh=mesh, placements={"dp": Shard(0)})
    with loom.record() as log:
        y = x @ p
        assert moved(log) == []
        y.backward(torch.ones(8, 8))
        assert moved(log) == [("all_reduce", "dp", all_reduce(256, 4))]
        assert p.grad is not None
        nn.utils.clip_grad_value_([p], 1.0)
        torch.optim.SGD([p], lr=0.1).step()
        assert len(log) == 1
        (x @ p).backward(torch.ones(8, 8))
        assert len(log) == 2


def test_parts_that_are_thrown_away_are_never_reduced() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    p = loom.Parameter(torch.ones(8, 8), mesh, {})
    with loom.record() as log:
        with loom.accumulate():
            (loom.ones(8, 8, mesh=mesh, placements={"dp": Shard(0)}) @ p).backward(torch.ones(8, 8))
        p.grad = None
        assert p.grad is None
        loom.synchronize()
    assert moved(log) == [] and log.pending == []


def test_autograd_grad_reduces_what_it_gives_and_leaves_what_waits() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    p, q = (loom.Parameter(torch.ones(8, 8), mesh, {}) for _ in range(2))
    x = loom.ones(8, 8, mesh=mesh, placements={"dp": Shard(0)})
    with loom.record() as log, loom.accumulate():
        (x @ p).sum().backward()
        seen = len(log)
        (found,) = torch.autograd.grad((x @ p @ q).sum(), [q])
    assert moved(log.events[seen + 1 :]) == [("all_reduce", "dp", all_reduce(256, 4))]
    check_same(found, torch.full((8, 8), 64.0))
    assert len(log.pending) == 1
    with pytest.raises(loom.GradientError, match="not summed"):
        p.grad  # noqa: B018
    loom.synchronize(p)
    check_same(p.grad, torch.full((8, 8), 8.0))


def test_a_replicated_and_a_sharded_use_of_one_parameter_add_up() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    p = loom.Parameter(torch.ones(8, 8), mesh, {})
    dense = torch.ones(8, 8, requires_grad=True)
    x = torch.randn(8, 8)
    with loom.record() as log:
        ((loom.distribute(x, mesh, {"dp": Shard(0)}) @ p).sum() + (p * p).sum()).backward()
        check_same(p.grad, torch.autograd.grad((x @ dense).sum() + (dense * dense).sum(), dense)[0])
    backward = [event for event in log if event.phase == "backward"]
    assert moved(backward) == [("all_reduce", "dp", all_reduce(256, 4))]


def test_the_collectives_of_a_data_parallel_mlp() -> None:
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    held = two_layers(mesh, {}, {}, {})
    x = loom.randn(16, 8, mesh=mesh, placements={"dp": Shard(0)})
    with loom.record() as log:
        y = forward(x, held)
        assert moved(log) == []
        y.backward(torch.ones(16, 8))
    gradients = [each.grad for each in held]
    assert all(each.placements == (Replicate(), Replicate()) for each in gradients)
    sizes = [12 * 8 * 4, 12 * 4, 8 * 12 * 4, 8 * 4]
    assert sorted(moved(log)) == sorted(("all_reduce", "dp", all_reduce(size, 2)) for size in sizes)


def test_the_collectives_of_a_tensor_parallel_mlp() -> None:
    mesh = loom.open_mesh((4,), axes=("tp",))
    held = two_layers(mesh, {"tp": Shard(0)}, {"tp": Shard(0)}, {"tp": Shard(1)})
    x = loom.randn(16, 8, mesh=mesh, placements={}).requires_grad_()
    activations = 16 * 8 * 4
    with loom.record() as log:
        hidden = x * 2
        y = forward(hidden, held)
        # column-parallel, then row-parallel: one all-reduce of the activations forward
        assert moved(log) == [("all_reduce", "tp", all_reduce(activations, 4))]
        y.backward(torch.ones(16, 8))
        # and one backward, where the replicated input met the column-parallel layer
        assert moved(log) == [("all_reduce", "tp", all_reduce(activations, 4))] * 2
        assert [event.phase for event in log] == ["forward", "backward"]
        assert [each.grad.placements for each in held] == [each.placements for each in held]
        assert x.grad.placements == (Replicate(),)
        assert len(log) == 2


def test_the_collectives_of_a_data_and_tensor_parallel_mlp() -> None:
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    held = two_layers(mesh, {"tp": Shard(0)}, {"tp": Shard(0)}, {"tp": Shard(1)})
    dense = [each.detach().to_torch().requires_grad_() for each in held]
    data = torch.randn(16, 8)
    x = loom.distribute(data, mesh, {"dp": Shard(0)})
    with loom.record() as log:
        loss = forward(x, held).square().mean()
        # a device has 8 of 16 rows; the loss is one number of 4 B
        assert moved(log) == [
            ("all_reduce", "tp", all_reduce(8 * 8 * 4, 4)),
            ("all_reduce", "dp", all_reduce(4, 2)),
        ]
        loss.backward()
    gradients = [each.grad for each in held]
    # a quarter of both weights and of the first bias, all of the second bias, over dp alone
    sizes = [3 * 8 * 4, 3 * 4, 8 * 3 * 4, 8 * 4]
    assert sorted(moved(log.events[2:])) == sorted(("all_reduce", "dp", all_reduce(size, 2)) for size in sizes)
    forward(data, dense).square().mean().backward()
    for mine, theirs in zip(gradients, dense, strict=True):
        assert theirs.grad is not None
        check_same(mine, theirs.grad)


def test_the_collectives_of_fully_sharded_parameters() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    held = two_layers(mesh, {"dp": Shard(0)}, {"dp": Shard(0)}, {"dp": Shard(0)})
    x = loom.randn(16384, 8, mesh=mesh, placements={"dp": Shard(0)})
    with loom.record() as log:
        y = forward(x, held)
        gathered = [("all_gather", "dp", size * 3 // 4) for size in (12 * 8 * 4, 12 * 4, 8 * 12 * 4)]
        assert sorted(moved(log)) == sorted(gathered)
        seen = len(log)
        y.backward(torch.ones(16384, 8))
        gradients = [each.grad for each in held]
    assert [each.placements for each in gradients] == [each.placements for each in held]
    scattered = [("reduce_scatter", "dp", size * 3 // 4) for size in (12 * 8 * 4, 12 * 4, 8 * 12 * 4)]
    again = ("all_gather", "dp", 8 * 12 * 4 * 3 // 4)  # the second weight, which the gradient of its input needs
    others = [again, ("all_reduce", "dp", all_reduce(8 * 4, 4))]
    assert sorted(moved(log.events[seen:])) == sorted([*scattered, *others])


def test_backward_communication_is_forbidden_where_it_would_happen_and_a_step_has_none() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    p = loom.Parameter(torch.ones(8, 8), mesh, {})
    y = loom.ones(8, 8, mesh=mesh, placements={"dp": Shard(0)}) @ p
    with (
        loom.communication("forbid"),
        pytest.raises(loom.CommunicationError, match="matmul would communicate 384 B per device"),
    ):
        y.backward(torch.ones(8, 8), retain_graph=True)
    p.grad = None
    y.backward(torch.ones(8, 8))
    with loom.communication("forbid"):
        torch.optim.SGD([p], lr=0.1).step()
    check_same(p, torch.ones(8, 8) - 0.8)


def test_the_backward_of_a_dense_loss_is_seen_too() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    p = loom.Parameter(torch.ones(8, 8), mesh, {})
    loss = F.mse_loss((loom.ones(8, 8, mesh=mesh, placements={"dp": Shard(0)}) @ p).to_torch(), torch.zeros(8, 8))
    assert type(loss) is torch.Tensor
    with loom.communication("forbid"), pytest.raises(loom.CommunicationError, match="matmul would communicate 384 B"):
        loss.backward()
    p.grad = None


def test_what_moves_back_is_told_where_the_stored_array_did_not_change() -> None:
    x = loom.ones(8, mesh=loom.open_mesh((4,), axes=("dp",)), placements="R").requires_grad_()
    y = (x * 1).redistribute("S(0)")
    with loom.record() as log:
        y.backward(torch.ones(8))
    assert moved(log) == [("all_gather", "dp", 24)]


@pytest.mark.parametrize("is_leaf", [True, False])
def test_what_moves_back_is_told_of_an_op_that_gives_its_operand(is_leaf: bool) -> None:
    leaf = loom.ones(8, mesh=loom.open_mesh((4,), axes=("dp",)), placements="R").requires_grad_()
    x = leaf if is_leaf else leaf * 1
    y, z = loom.positive(x, output="S(0)"), x * 2
    with loom.record() as log:
        z.sum().backward(retain_graph=True)
    assert moved(log) == []
    with loom.record() as log:
        y.backward(torch.ones(8))
    assert moved(log) == [("all_gather", "dp", 24)]


def test_the_backward_of_what_one_device_holds_is_seen_too() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    p = loom.Parameter(torch.ones(8, 8), mesh, {})
    part = (loom.ones(8, 8, mesh=mesh, placements={"dp": Shard(0)}) @ p).shard_at((1,))
    with loom.communication("forbid"), pytest.raises(loom.CommunicationError, match="matmul would communicate 384 B"):
        part.sum().backward()
    p.grad = None


@pytest.mark.parametrize("given", [5, ["a"], "all"])
def test_synchronize_takes_parameters_alone(given: Any) -> None:
    with pytest.raises(loom.ArgumentError, match="parameters"):
        loom.synchronize(given)


def test_graphs_with_notes_are_freed() -> None:
    mesh = loom.open_mesh((4,), axes=("dp",))
    p, x = loom.Parameter(torch.ones(8, 8), mesh, {}), loom.ones(8, 8, mesh=mesh, placements={"dp": Shard(0)})
    gc.collect()
    gc.disable()
    try:
        for make in (
            lambda: x @ p,
            lambda: (x @ p).to_torch(),
            lambda: (x * 1).add_(p),
            lambda: (x @ p).shard_at((0,)),
        ):
            made, held = make(), threading.Event()
            made.grad_fn.metadata["held by the graph"] = held
            alive = weakref.ref(held)
            del made, held
            assert alive() is None
    finally:
        gc.enable()


def test_only_gradients_that_are_computed_are_told() -> None:
    mesh = loom.open_mesh((4,), axes=("tp",))
    w = loom.Parameter(torch.ones(8, 8), mesh, {"tp": Shard(1)})
    x = loom.ones(2, 8, mesh=mesh, placements={}).requires_grad_()
    loss = ((x * 2) @ w).square().sum()
    with loom.record() as log:
        loss.backward(inputs=[w], retain_graph=True)
        torch.autograd.grad(loss, [w], retain_graph=True)
    assert moved(log) == []
    with loom.record() as log:
        torch.autograd.grad(loss, [x])
    assert moved(log) == [("all_reduce", "tp", all_reduce(2 * 8 * 4, 4))]


def test_training_while_recording_gives_the_same_numbers() -> None:
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        module = put(Language(), "both")
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        tokens = place(torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(1)), "both")
        for _ in range(2):
            if watched:
                with loom.record() as log:
                    _step(module, optimizer, tokens)
                assert len(log)
            else:
                _step(module, optimizer, tokens)
        results.append([each.detach().to_torch() for each in module.parameters()])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, tokens: Any) -> None:
    optimizer.zero_grad()
    F.cross_entropy(module(tokens).reshape(28, 11), tokens.reshape(28)).backward()
    optimizer.step()
