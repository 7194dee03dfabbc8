"""What reads a tensor's memory: `data_ptr` and storages show the dense value, and tied tensors look tied."""

from __future__ import annotations

import ctypes
import gc
import itertools
import weakref

import pytest
import torch

import meshloom as loom
import ranks
from meshloom import Mesh

MESHES = (Mesh(d=2), Mesh(d=3), Mesh(a=2, b=4), Mesh(a=2, b=3))
DTYPES = [getattr(torch, name) for name in "float32 bfloat16 float16 float64 int64 int8 bool complex64".split()]
SHAPES = ((4, 6), (5, 7), (1, 3), (24,), (2, 3, 5))


def raw(dense: torch.Tensor) -> bytes:
    """The bytes of a dense tensor."""
    flat = dense.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.tolist())


def bytes_at(tensor: torch.Tensor) -> bytes:
    """What stands at a tensor's address."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 50
    return made > 0 if dtype == torch.bool else made.to(dtype)


def place_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def layouts(mesh: Mesh, dims: int) -> list[str]:
    kinds = ["R", *(f"S({dim})" for dim in range(min(dims, 2)))]
    return [", ".join(each) for each in itertools.product(kinds, repeat=mesh.ndim)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_memory_of_every_layout_is_the_dense_value(dtype):
    count = 0
    for mesh, shape in itertools.product(MESHES, SHAPES):
        dense = values(shape, dtype)
        for placements in layouts(mesh, len(shape)):
            x = loom.distribute(dense, mesh, placements)
            assert bytes_at(x) == raw(dense), (placements, shape)
            held = x.untyped_storage()
            start = x.data_ptr() - held.data_ptr()
            assert bytes(held.tolist())[start : start + x.nbytes] == raw(dense)
            count += 1
    assert count > 100


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min", "prod"])
def test_the_memory_of_partial_tensors_is_the_reduced_value(kind):
    mesh = Mesh(a=2, b=2)
    for shape in ((4, 6), (5, 3)):
        x = loom.distribute(values(shape), mesh, "S(0), R").redistribute(f"S(0), P({kind})")
        assert bytes_at(x) == raw(x.to_torch())
        torch.testing.assert_close(x.to_torch(), values(shape))


def test_the_memory_of_permuted_results_is_in_the_order_of_their_dims():
    mesh = Mesh(a=2, b=3)
    dense = values((5, 4, 7))
    for placements in layouts(mesh, 3):
        x = loom.distribute(dense, mesh, placements)
        for order in itertools.permutations(range(3)):
            assert bytes_at(x.permute(order)) == raw(dense.permute(order))
            assert bytes_at(x.permute(order) + 1) == raw(dense.permute(order) + 1)


def test_a_tensor_without_elements_and_a_number_have_their_memory():
    mesh = Mesh(d=2)
    assert bytes_at(loom.distribute(torch.zeros(0, 3), mesh, "S(0)")) == b""
    assert bytes_at(loom.distribute(torch.tensor(2.5), mesh, "R")) == raw(torch.tensor(2.5))


@pytest.mark.parametrize("placements", ["S(0), R", "S(0), S(0)", "R, R", "S(1), S(0)"])
@pytest.mark.parametrize("shape", [(8, 6), (7, 5)])
def test_tied_tensors_look_tied_and_others_do_not(placements, shape):
    mesh = Mesh(a=2, b=2)
    p = loom.Parameter(loom.distribute(values(shape), mesh, placements))
    q = loom.Parameter(loom.distribute(values(shape), mesh, placements))
    for tied in (p.detach(), p.data, torch.nn.Parameter(p.data), p.view_as(p)):
        assert tied.data_ptr() == p.data_ptr() and place_of(tied) == place_of(p)
    for other in (q, q.detach(), p + 0, p.clone(), p.detach().clone(), torch.empty_like(p)):
        assert other.data_ptr() != p.data_ptr() and place_of(other) != place_of(p)


@pytest.mark.parametrize("placements", ["S(0)", "S(1)", "R"])
def test_tied_weights_of_modules_and_their_state_dicts_look_tied(placements):
    mesh = Mesh(d=2)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False), torch.nn.Linear(7, 7))
    model[0].weight = loom.Parameter(loom.distribute(values((7, 5)), mesh, placements))
    model[1].weight = model[0].weight
    model[2].weight = loom.Parameter(loom.distribute(values((7, 7)), mesh, placements))
    model[2].bias = loom.Parameter(loom.distribute(values((7,)), mesh, "R"))
    state = model.state_dict()
    places = {name: (each.data_ptr(), place_of(each)) for name, each in state.items()}
    assert places["0.weight"] == places["1.weight"] == (model[0].weight.data_ptr(), place_of(model[0].weight))
    assert len(set(places.values())) == 3


@pytest.mark.parametrize("placements", ["S(0), R", "S(0), S(0)", "S(1), S(0)", "R, R"])
@pytest.mark.parametrize("shape", [(8, 6), (7, 5)])
def test_views_lie_in_the_copy_of_their_base_where_they_are_contiguous(placements, shape):
    mesh = Mesh(a=2, b=2)
    dense = values(shape)
    x = loom.distribute(dense, mesh, placements)
    for take in (lambda t: t[1:], lambda t: t[2], lambda t: t.view(-1), lambda t: t[1:][1], lambda t: t.unbind(0)[3]):
        mine, theirs = take(x), take(dense)
        assert mine.data_ptr() - x.data_ptr() == theirs.data_ptr() - dense.data_ptr()
        assert place_of(mine) == place_of(x)
        assert bytes_at(mine) == raw(theirs)
    for take in (lambda t: t.T, lambda t: t[:, 1], lambda t: t[:, 1:], lambda t: t[::2]):
        assert bytes_at(take(x)) == raw(take(dense))


@pytest.mark.parametrize("placements", ["S(0)", "R"])
@pytest.mark.parametrize("rows", [4, 5])
def test_a_view_keeps_its_memory_when_its_base_is_turned_in_place(placements, rows):
    dense = values((rows, 4))
    x = loom.distribute(dense, Mesh(d=2), placements)
    part = x[1:]
    x.t_()
    assert bytes_at(part) == raw(part.to_torch()) == raw(dense[1:])
    assert bytes_at(x) == raw(dense.T)


WRITES = {
    "add_": lambda t: t.add_(1),
    "copy_": lambda t: t.copy_(torch.full(tuple(t.shape), 3.0)),
    "an index": lambda t: t.__setitem__((slice(1, 3), 0), 9.0),
    "a view": lambda t: t[1].mul_(7),
    "a transposed view": lambda t: t.T.add_(2),
    "detach": lambda t: t.detach().fill_(4),
    "zero_": lambda t: t.zero_(),
}


@pytest.mark.parametrize("write", WRITES)
def test_the_address_shows_the_new_values_after_a_write(write):
    for mesh, shape in itertools.product((Mesh(d=2), Mesh(a=2, b=3)), ((4, 6), (5, 7))):
        for placements in layouts(mesh, 2):
            dense = values(shape)
            x = loom.distribute(dense, mesh, placements)
            part, address = x[1:], x.data_ptr()
            part.data_ptr()
            dense = dense.clone()
            WRITES[write](x)
            WRITES[write](dense)
            assert bytes_at(x) == raw(dense) and bytes_at(part) == raw(dense[1:])
            assert x.data_ptr() == address, "somebody has a pointer to it"


def test_the_address_shows_what_an_optimizer_wrote():
    w = loom.Parameter(loom.distribute(values((5, 3)), Mesh(d=2), "S(0)"))
    optimizer = torch.optim.SGD([w], lr=0.5)
    for _ in range(3):
        w.data_ptr()
        w.square().sum().backward()
        optimizer.step()
        assert bytes_at(w) == raw(w.to_torch())


@pytest.mark.parametrize("columns", [6, 7])
def test_tensors_that_share_memory_through_data_show_each_others_writes(columns):
    mesh = Mesh(d=2)
    p = loom.Parameter(loom.distribute(values((4, columns)), mesh, "S(1)"))
    q = loom.distribute(torch.ones(4, columns), mesh, "S(1)")
    p.data_ptr()
    p.data = q
    assert p.data_ptr() == q.data_ptr()
    q.add_(5)  # which p's own version does not tell
    assert bytes_at(p) == raw(torch.full((4, columns), 6.0)) == raw(p.to_torch())
    with torch.no_grad():
        p.mul_(2)
    assert bytes_at(q) == raw(q.to_torch()) == raw(torch.full((4, columns), 12.0))


def test_no_copy_is_stale_when_an_address_is_used_again():
    mesh, used, again = Mesh(d=2), set(), 0
    for i in range(300):
        x = loom.distribute(torch.full((3, 7), float(i)), mesh, "S(0)")
        stored = x._data.untyped_storage().data_ptr()
        again += stored in used
        used.add(stored)
        assert bytes_at(x) == raw(torch.full((3, 7), float(i)))
        if i % 3 == 0:
            del x
    assert again > 10, "no address was used again"


def test_no_copy_is_stale_when_a_tensor_got_other_memory():
    mesh, used, again = Mesh(d=2), set(), 0
    for i in range(100):
        p = loom.Parameter(loom.distribute(torch.full((4, 7), float(i)), mesh, "S(1)"))
        used.add(p._data.untyped_storage()._cdata)
        p.data_ptr()
        p.data = loom.distribute(torch.full((4, 7), -1.0), mesh, "S(1)")  # what p held is free
        fresh = [loom.distribute(torch.full((4, 7), 1000.0 + j), mesh, "S(1)") for j in range(4)]
        again += sum(each._data.untyped_storage()._cdata in used for each in fresh)
        for each in (p, *fresh):
            assert bytes_at(each) == raw(each.to_torch())
    assert again > 10, "no storage was used again"


def test_a_copy_lives_as_long_as_its_tensors_and_no_longer():
    x = loom.distribute(values((5, 3)), Mesh(d=2), "S(0)")
    x.data_ptr()
    copy, tied = weakref.ref(x._dense), x.detach()
    address = tied.data_ptr()
    del x
    gc.collect()
    assert copy() is not None and tied.data_ptr() == address
    del tied
    gc.collect()
    assert copy() is None


def test_shape_questions_answer_without_communicating():
    mesh = Mesh(a=2, b=3)
    for placements in (*layouts(mesh, 2), "S(0), P(sum)"):
        x = loom.zeros(5, 7, mesh=mesh, placements=placements)
        with loom.communication("forbid"), loom.record() as story:
            assert x.stride() == (7, 1) and x.stride(0) == 7 and x.stride(-1) == 1
            assert x.is_contiguous() and x.storage_offset() == 0
            assert "stride" in dir(x) and "topology" in dir(x)
        assert not story.events


def test_a_tensor_without_data_has_no_address():
    x = loom.zeros(5, 7, mesh=Mesh(d=2), placements="S(0)", device="meta")
    assert x.data_ptr() == 0


@pytest.mark.parametrize("shape", [(8, 6), (7, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_safetensors_of_every_layout_come_back_equal(tmp_path, shape, dtype):
    files = pytest.importorskip("safetensors.torch")
    for mesh in (Mesh(d=3), Mesh(a=2, b=4)):
        dense = values(shape, dtype)
        state = {placements: loom.distribute(dense, mesh, placements) for placements in layouts(mesh, 2)}
        files.save_file(state, tmp_path / "weights")
        loaded = files.load_file(tmp_path / "weights")
        assert set(loaded) == set(state)
        for each in loaded.values():
            assert each.dtype == dtype and torch.equal(each, dense)


@pytest.mark.parametrize("placements", ["S(0)", "S(1)", "R"])
def test_safetensors_treat_tied_weights_as_those_of_dense(tmp_path, placements):
    files = pytest.importorskip("safetensors.torch")

    class Tied(torch.nn.Module):
        def __init__(self, put):
            super().__init__()
            self.first = torch.nn.Parameter(put(values((7, 5))))
            self.second, self.other = self.first, torch.nn.Parameter(put(values((7, 5))))

    models = [Tied(lambda t: t), Tied(lambda t: loom.distribute(t, Mesh(d=2), placements))]
    for i, model in enumerate(models):
        with pytest.raises(RuntimeError, match="share memory"):
            files.save_file(model.state_dict(), tmp_path / "refused")
        files.save_model(model, tmp_path / str(i))
    dense, ours = (files.load_file(tmp_path / str(i)) for i in range(2))
    assert set(dense) == set(ours) and len(ours) == 2
    assert all(torch.equal(dense[name], ours[name]) for name in dense)
    with torch.no_grad():
        models[1].first.zero_()
        models[1].other.zero_()
    files.load_model(models[1], tmp_path / "1")
    for name in ("first", "second", "other"):
        assert torch.equal(getattr(models[1], name).detach().to_torch(), getattr(models[0], name))


def test_between_processes_memory_is_recorded_like_to_torch_every_time():
    for found in ranks.run(2, "memory_ranks:recorded"):
        expected = found.pop("to_torch, first")
        assert len(expected) == 1
        assert found.pop("stride") == []
        assert found and all(each == expected for each in found.values()), found


def test_between_processes_memory_is_forbidden_like_to_torch():
    for told in ranks.run(2, "memory_ranks:forbidden"):
        assert told.pop("stride") == "(4, 1) True 0"
        assert set(told) == {"to_torch", "data_ptr", "untyped_storage"}
        assert len(set(told.values())) == 1 and "communication is forbidden" in told["data_ptr"]


def test_between_processes_the_memory_has_the_whole_value():
    assert ranks.run(2, "memory_ranks:bytes_of_all") == [4, 4]
