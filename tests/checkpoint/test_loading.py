"""Loading: what does not fit is refused by name before anything is changed; parts, exports, the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import meshloom as loom
from checkpoint_cases import check_state, make_state
from meshloom import Mesh, Shard, Topology
from meshloom.checkpoint import exporting, open_weights, verify
from meshloom.cli import main

MESH = Mesh(dp=2, tp=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading") / "step-000300"
    loom.save(make_state(MESH, True), folder)
    return folder


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """Everything that a load could change, as it is now."""
    found: dict[str, Any] = {"step": state["step"], "history": state["history"], "place": state["loader"].place}
    found |= {"generator": state["generator"].get_state(), "lr": state["optimizer"].param_groups[0]["lr"]}
    found |= {"moments": len(state["optimizer"].state), "epoch": state["scheduler"].last_epoch}
    for name, each in state["model"].state_dict().items() if state["model"] is not None else ():
        if isinstance(each, torch.Tensor) and not each.is_meta:
            found[name] = (each.to_torch() if isinstance(each, loom.Tensor) else each).clone()
    return found


def check_unchanged(state: dict[str, Any], before: dict[str, Any]) -> None:
    now = snapshot(state)
    assert set(now) == set(before) and len(now) > 6
    for name, each in before.items():
        same = (
            torch.equal(now[name], each) if isinstance(each, torch.Tensor) else now[name] is each or now[name] == each
        )
        assert same, name


# Parts of a state


def test_weights_alone_are_read_and_the_state_is_returned(saved):
    state = make_state(Mesh(x=4), False)
    part = {"model": state["model"]}
    assert loom.load(saved, into=part) is part
    assert torch.equal(part["model"].up.weight.to_torch(), make_state(None, True)["model"].up.weight)
    assert state["step"] == 0 and not state["optimizer"].state


def test_memory_and_parameters_stay_the_same_objects_and_torch_knows_of_the_write(saved):
    state = make_state(MESH, False)
    weight = state["model"].up.weight
    memory, version = weight._data.data_ptr(), weight._data._version
    kept = (weight * 2).sum()  # a graph that has kept the value from before
    loom.load(saved, into=state)
    assert state["model"].up.weight is weight and weight._data.data_ptr() == memory and weight._data._version > version
    assert weight.requires_grad and kept.requires_grad
    check_state(state, MESH)


def test_a_view_and_a_turned_array_are_read_in_place(tmp_path):
    loom.save({"x": torch.arange(12.0).view(3, 4)}, tmp_path / "a")
    turned = torch.zeros(4, 3).t()
    part = torch.zeros(6, 8)
    loom.load(tmp_path / "a", into={"x": turned})
    loom.load(tmp_path / "a", into={"x": part[1:4, 2:6]})
    wanted = torch.arange(12.0).view(3, 4)
    assert torch.equal(turned, wanted) and torch.equal(part[1:4, 2:6], wanted) and part.sum() == wanted.sum()


def test_a_view_that_had_to_move_writes_its_base(tmp_path):
    loom.save({"x": torch.arange(10.0)}, tmp_path / "a")
    base = loom.zeros(4, 10, mesh=MESH, placements="S(0), S(1)")
    loom.load(tmp_path / "a", into={"x": base[1]})
    assert torch.equal(base.to_torch()[1], torch.arange(10.0)) and base.sum().item() == 45.0


# What does not fit


def change_shape(state: dict[str, Any]) -> None:
    state["model"].up.weight = loom.Parameter(torch.zeros(10, 5), MESH, "S(0), R")


def change_dtype(state: dict[str, Any]) -> None:
    state["model"].up.weight = loom.Parameter(torch.zeros(10, 6).half(), MESH, "S(0), R")


def add_name(state: dict[str, Any]) -> None:
    state["model"].extra = nn.Linear(2, 2)


def drop_name(state: dict[str, Any]) -> None:
    del state["model"].norm


def other_optimizer(state: dict[str, Any]) -> None:
    state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.5)


def other_groups(state: dict[str, Any]) -> None:
    first, *rest = state["model"].parameters()
    state["optimizer"] = torch.optim.AdamW([{"params": [first]}, {"params": rest}], lr=0.5)


def repeat(state: dict[str, Any]) -> None:
    state["tensors"][1]["dense"] = state["tensors"][0]


REFUSALS = {
    "other shape": (change_shape, r"state\['model'\]\['up.weight'\].*f32\[10, 6\] there and f32\[10, 5\] here"),
    "other dtype": (change_dtype, r"state\['model'\]\['up.weight'\].*f32\[10, 6\] there and f16\[10, 6\] here"),
    "a name more": (add_name, r"state\['model'\] cannot be read.*it has no 'extra.bias', 'extra.weight' there"),
    "a name less": (drop_name, r"state\['model'\] cannot be read.*it also has 'norm.bias', 'norm.num_batches_tracked'"),
    "another optimizer": (other_optimizer, "it is the state of 'AdamW' there and of SGD here"),
    "other groups": (other_groups, "it has 1 groups of parameters there and 2 here"),
    "another kind": (lambda state: state.update(step=torch.zeros(2)), r"state\['step'\].*it is 300 there and a tensor"),
    "a module for a value": (lambda state: state.update(model=None), r"state\['model'\].*it is a module there"),
    "a key that is not there": (lambda state: state.update(best=1), r"state\['best'\].*it is not in the checkpoint"),
    "a tensor of a list": (lambda state: state["tensors"].append(torch.zeros(1)), "a list there and 3 in"),
    "another tensor in its place": (repeat, r"state\['tensors'\]\[1\]\['dense'\].*bool\[9, 5\] here"),
    "no memory": (lambda state: state.update(model=state["model"].to("meta")), "it lies on meta|it has no memory"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_changed(saved, case):
    change, words = REFUSALS[case]
    state = make_state(MESH, False)
    change(state)
    before = snapshot(state)
    with pytest.raises(loom.CheckpointError, match=words):
        loom.load(saved, into=state)
    check_unchanged(state, before)


def test_the_check_for_changes_can_fail(saved):
    state = make_state(MESH, False)
    before = snapshot(state)
    loom.load(saved, into=state)
    with pytest.raises(AssertionError):
        check_unchanged(state, before)


def test_the_message_of_a_refusal_says_both_sides(saved):
    state = make_state(MESH, False)
    state["model"].upp = state["model"].up
    del state["model"].up
    with pytest.raises(loom.CheckpointError) as refused:
        loom.load(saved, into={"model": state["model"]})
    assert str(refused.value).splitlines()[0] == (
        f"state['model'] cannot be read from {saved}: it has no 'upp.bias', 'upp.weight' there, "
        "and 'up.bias', 'up.weight'"
    )
    assert "did you mean 'up.bias'?" in str(refused.value)


def test_tensors_that_are_one_here_and_two_there_are_refused(tmp_path):
    loom.save({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "a")
    one = torch.full((3,), 7.0)
    with pytest.raises(loom.CheckpointError, match="it is the same tensor as 'a' here, and another one there"):
        loom.load(tmp_path / "a", into={"a": one, "b": one})
    assert one.tolist() == [7.0] * 3


def test_folders_that_are_no_checkpoints_are_told_with_what_to_do(tmp_path, saved):
    with pytest.raises(loom.CheckpointError, match=r"is not a folder; loom\.latest"):
        loom.load(tmp_path / "absent", into={"x": 1})
    with pytest.raises(loom.CheckpointError, match="checkpoints lie inside of it: step-000300"):
        loom.load(saved.parent, into={"x": 1})
    with pytest.raises(loom.ArgumentError, match="folder=7 is of type int"):
        loom.load(7, into={})  # type: ignore[arg-type]


def test_optimizers_of_every_kind_of_state_come_back(tmp_path):
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.Adafactor(p, lr=0.1),
        lambda p: torch.optim.RMSprop(p, lr=torch.tensor(0.1), centered=True),
        lambda p: torch.optim.LBFGS(p, lr=0.1),
        lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1, amsgrad=True),
    ):
        model, other = (nn.Linear(4, 3) for _ in range(2))
        first, second = make(list(model.parameters())), make(list(other.parameters()))

        def closure(model: nn.Module = model, first: torch.optim.Optimizer = first) -> torch.Tensor:
            first.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        first.step(closure)
        name = type(first).__name__
        loom.save({"model": model, "optimizer": first}, tmp_path / name)
        loom.load(tmp_path / name, into={"model": other, "optimizer": second})
        wanted, found = first.state_dict(), second.state_dict()
        assert repr(wanted) == repr(found), name
        assert wanted["state"], name


# Exports


def test_an_export_is_one_file_that_anybody_reads(tmp_path, saved):
    (written,) = loom.export(saved, tmp_path / "model.safetensors")
    wanted = make_state(None, True)["model"].state_dict()
    found = load_file(written)
    assert set(found) == {name for name in wanted if not name.endswith("_extra_state")}
    for name, each in found.items():
        assert torch.equal(each, wanted[name]) and each.dtype == wanted[name].dtype, name
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.safetensors"]


def test_an_export_in_the_layout_of_hugging_face_is_cut_into_files(tmp_path, saved, monkeypatch):
    monkeypatch.setattr(exporting, "BLOCK", 64)  # some rows at a time
    written = loom.export(saved, tmp_path / "hf", layout="huggingface", max_shard=300)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert {each.name for each in written} == {*files, "model.safetensors.index.json"}
    weights, wanted = open_weights(tmp_path / "hf"), make_state(None, True)["model"].state_dict()
    for name in weights.names():
        topology = Topology(MESH, (loom.Replicate(),) * 2, weights.shape(name), weights.dtype(name))
        assert torch.equal(weights.read(name, topology).to_torch(), wanted[name]), name
    with pytest.raises(loom.CheckpointError, match="it is there already"):
        loom.export(saved, tmp_path / "hf", layout="huggingface")
    (one, *_) = loom.export(saved, tmp_path / "small", layout="huggingface")
    assert one.name == "model.safetensors" and not (tmp_path / "small" / "model.safetensors.index.json").exists()


def test_exports_that_cannot_be_are_refused(tmp_path, saved):
    for size in ("five", "0GB", -1, True, "5TB"):
        with pytest.raises(loom.ArgumentError, match="is not a size"):
            loom.export(saved, tmp_path / "x", max_shard=size)
    with pytest.raises(loom.ArgumentError, match="layout='onnx' is not known"):
        loom.export(saved, tmp_path / "x", layout="onnx")
    with pytest.raises(loom.CheckpointError, match="there is no module 'net'"):
        loom.export(saved, tmp_path / "x", part="net")
    loom.save({"a": nn.Linear(1, 1), "b": {"c": nn.Linear(2, 2)}}, tmp_path / "two")
    with pytest.raises(loom.CheckpointError, match="there are 2 modules"):
        loom.export(tmp_path / "two", tmp_path / "x")
    (written,) = loom.export(tmp_path / "two", tmp_path / "x", part="b/c")
    assert load_file(written)["weight"].shape == (2, 2)


def test_the_weights_of_a_checkpoint_are_opened_like_any_others(saved):
    weights = open_weights(saved)
    wanted = make_state(None, True)["model"].state_dict()
    for name in weights.names():
        mesh = Mesh(a=2, b=2)
        placements = (Shard(0), Shard(0)) if len(weights.shape(name)) else (loom.Replicate(),) * 2
        found = weights.read(name, Topology(mesh, placements, weights.shape(name), weights.dtype(name)))
        assert torch.equal(found.to_torch(), wanted[name]), name
        assert float(found._data.double().sum()) == float(found.to_torch().double().sum())  # padding is zero


# The command line


def test_show_verify_and_export_from_the_command_line(tmp_path, saved, capsys):
    assert main(["checkpoint", "show", str(saved)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{saved}: 35 tensors, ") and shown[0].endswith(" in 1 file")
    assert "  optimizer     optimizer AdamW" in shown and "  step          300" in shown
    assert any("model/up.weight" in line and "f32[10, 6]  240 B  1 piece" in line for line in shown)
    assert main(["checkpoint", "verify", str(saved.parent)]) == 0  # the newest of a folder
    assert capsys.readouterr().out.endswith("all as they were written\n")
    assert main(["checkpoint", "export", str(saved), "--out", str(tmp_path / "m.safetensors")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'm.safetensors'}\n"
    assert main(["checkpoint", "export", str(saved)]) == 1
    assert "export needs the name" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path / "absent")]) == 1
    assert "there is no such file" in capsys.readouterr().err
    assert verify(saved).nbytes > 1000


def test_transformers_reads_an_export(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.arange(12)[None] % 40
    wanted = model(tokens).logits.detach()
    loom.parallelize(model, Mesh(tp=2), "tensor")
    loom.save({"model": model}, tmp_path / "step-000001")
    loom.export(tmp_path / "step-000001", tmp_path / "hub", layout="huggingface", max_shard="8KB")
    config.save_pretrained(tmp_path / "hub")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hub").eval()
    torch.testing.assert_close(read(tokens).logits, wanted)
    assert read.lm_head.weight is read.model.embed_tokens.weight
