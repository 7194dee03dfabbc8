"""Whole programs as users of TTNN have them, on meshes of several shapes, equal torch in float32.

A Llama that writes text by replaying a trace, a U-Net through a pipeline, a BERT from a torch model, experts.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import meshloom as loom
from meshloom import ttnn
from meshloom.ttnn import doctor
from test_examples import ENVIRONMENT, ROOT, run_example

sys.path.append(str(ROOT / "examples"))

import ttnn_bert
import ttnn_llama
import ttnn_moe
import ttnn_unet
from ttnn_llama import correlation

from ttnn_cases import close_all

ENOUGH = 0.999


@pytest.fixture(autouse=True)
def alone() -> None:
    """Programs set the fabric, which nothing open allows."""
    close_all()


@pytest.fixture
def mesh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A mesh with two queues; one of 8x4 on a Galaxy, as the environment says."""
    rows, columns = map(int, request.param.split("x"))
    monkeypatch.setenv("MESHLOOM_CHECK", "races")  # a program that forgets an event is told
    if (rows, columns) == (8, 4):
        monkeypatch.setenv("MESHLOOM_SYSTEM", "Galaxy")
    if rows * columns > 1:
        ttnn.set_fabric_config(ttnn.FabricConfig.FABRIC_1D)
    try:
        with ttnn.create_mesh_device(ttnn.MeshShape(rows, columns), num_command_queues=2) as opened:
            yield opened
    finally:
        ttnn.set_fabric_config(ttnn.FabricConfig.DISABLED)


def on(*shapes: str) -> Any:
    return pytest.mark.parametrize("mesh", shapes, indirect=True)


# a Llama


CONFIG = ttnn_llama.Config()
STATE = ttnn_llama.draw_weights(CONFIG)


@pytest.mark.parametrize("users", [1, 3])
@on("1x1", "1x8", "8x4")
def test_a_llama_reads_prompts_into_pages_and_writes_what_torch_would_by_replaying_a_trace(mesh, users, tmp_path):
    model = ttnn_llama.Llama(STATE, CONFIG, mesh, users, tmp_path)
    prompts = ttnn_llama.encode(["A short one", "A text that is longer than a tile, of two pages", "x"], users)
    texts, logits = ttnn_llama.generate(model, prompts, 4)
    for prompt, text, found in zip(prompts, texts, logits, strict=True):
        expected = ttnn_llama.reference(STATE, CONFIG, text[:-1])[len(prompt) - 1 :]
        assert len(text) == len(prompt) + 5 and found.argmax(-1).tolist() == text[len(prompt) :]
        for ours, theirs in zip(found, expected, strict=True):
            assert correlation(ours, theirs) > ENOUGH
        assert correlation(found[1:], expected[:-1]) < 0.9  # the measure tells another token's logits


# Per layer and for the scores: norms gather statistics. A line gathers the width before a product and scatters sums.
# A grid sums along both axes, and multiplies parts of the hidden dims.
STEP = {
    "1x1": {},
    "1x8": {"all_gather": 2 * 4 + 3, "reduce_scatter": 2 * 2},
    "8x4": {"all_gather": 2 * 3 + 2, "reduce_scatter": 2 * 2, "all_reduce": 2 * 3 + 1},
}


@on("1x1", "1x8", "8x4")
def test_a_step_of_a_llama_has_the_collectives_that_its_program_names_and_a_replay_allocates_nothing(mesh, tmp_path):
    model = ttnn_llama.Llama(STATE, CONFIG, mesh, 1, tmp_path)
    model.prefill([1, 2, 3], 0)
    inputs = [ttnn.to_device(each, mesh) for each in model.inputs([4], [3])]
    with loom.record() as log:
        model.step(*inputs)
    assert dict(log.kinds()) == STEP["x".join(map(str, mesh.shape))]
    model.decode([4], [3])

    def state() -> list[Any]:
        tensors = (*model.device_inputs, *model.outputs)
        used = [mesh.memory_usage(kind)[0, 0].used for kind in ("dram", "l1")]
        return [*(each.buffer_address() for each in tensors), *used]

    before = state()
    for position in (4, 5):
        model.decode([position], [position])
        assert state() == before
    model.release()


@on("1x8")
def test_a_replay_reads_tokens_positions_and_pages_where_they_were_captured(mesh, tmp_path):
    tokens = [7, 8, 9, 10, 11]
    expected = ttnn_llama.reference(STATE, CONFIG, tokens)
    model = ttnn_llama.Llama(STATE, CONFIG, mesh, 1, tmp_path)
    model.prefill(tokens[:3], 0)
    assert correlation(model.decode([10], [3])[0], expected[3]) > ENOUGH
    for changed in (0, 1, 2):  # tokens, positions, the positions of angles: each of them counts
        stale = model.inputs([10], [3])
        fresh = model.inputs([11], [4])
        for number, device in enumerate(model.device_inputs):
            ttnn.copy_host_to_device_tensor((stale if number == changed else fresh)[number], device)
        ttnn.execute_trace(mesh, model.trace, cq_id=0, blocking=True)
        assert correlation(model.parallel.read_logits(model.outputs[0])[0, 0, 0], expected[4]) < ENOUGH
    model.decode([10], [3])  # what a stale position had overwritten
    assert correlation(model.decode([11], [4])[0], expected[4]) > ENOUGH
    moved = model.inputs([11], [4])
    moved[3] = model.host(model.pages.flip(1), ttnn.int32)
    for host, device in zip(moved, model.device_inputs, strict=True):
        ttnn.copy_host_to_device_tensor(host, device)
    ttnn.execute_trace(mesh, model.trace, cq_id=0, blocking=True)
    assert correlation(model.parallel.read_logits(model.outputs[0])[0, 0, 0], expected[4]) < ENOUGH


@on("1x1", "1x8", "8x4")
def test_a_trace_that_writes_its_own_next_inputs_needs_nothing_from_the_host(mesh, tmp_path):
    users, count = 2, 4
    model = ttnn_llama.Llama(STATE, CONFIG, mesh, users, tmp_path)
    prompts = ttnn_llama.encode(ttnn_llama.PROMPTS, users)
    texts = [[*prompt, int(model.prefill(prompt, user).argmax())] for user, prompt in enumerate(prompts)]
    given = model.inputs([text[-1] for text in texts], [len(prompt) for prompt in prompts])
    tokens, positions, places, _ = inputs = [ttnn.to_device(each, mesh) for each in given]

    def step() -> Any:
        logits, chosen = model.step(*inputs)
        ttnn.copy(ttnn.reshape(chosen, (1, 32)), tokens)
        for counter in (positions, places):
            ttnn.plus_one(counter)
        return logits

    step()
    for host, device in zip(given, inputs, strict=True):
        ttnn.copy_host_to_device_tensor(host, device)
    trace = ttnn.begin_trace_capture(mesh, cq_id=0)
    logits = step()
    ttnn.end_trace_capture(mesh, trace, cq_id=0)
    found = []
    for _ in range(count):
        ttnn.execute_trace(mesh, trace, cq_id=0, blocking=False)
        found.append(model.parallel.read_logits(logits)[0, 0, :users])
        for text, token in zip(texts, ttnn.to_torch(ttnn.get_device_tensors(tokens)[0])[0], strict=False):
            text.append(int(token))
    ttnn.release_trace(mesh, trace)
    for user, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        expected = ttnn_llama.reference(STATE, CONFIG, text[:-1])[len(prompt) :]
        ours = torch.stack([each[user] for each in found])
        assert correlation(ours, expected) > ENOUGH and text[len(prompt) + 1 :] == ours.argmax(-1).tolist()


@on("8x1", "4x2", "2x2")
def test_a_llama_runs_on_grids_of_other_shapes(mesh, tmp_path):
    model = ttnn_llama.Llama(STATE, CONFIG, mesh, 1, tmp_path)
    (text,), (found,) = ttnn_llama.generate(model, [[65, 66, 67]], 2)
    assert correlation(found, ttnn_llama.reference(STATE, CONFIG, text[:-1])[2:]) > ENOUGH


@on("1x8", "8x4")
def test_weights_come_from_files_if_they_were_made_before(mesh, tmp_path):
    first = ttnn_llama.Llama(STATE, CONFIG, mesh, 1, tmp_path).prefill([1, 2, 3], 0)
    files = sorted(tmp_path.rglob("*.tensorbin"))
    assert len(files) == 2 * 7 + 3
    nothing = {name: torch.zeros_like(each) for name, each in STATE.items()}
    again = ttnn_llama.Llama(nothing, CONFIG, mesh, 1, tmp_path).prefill([1, 2, 3], 0)
    assert torch.equal(first, again)
    other = ttnn_llama.Llama(nothing, CONFIG, mesh, 1, tmp_path / "other").prefill([1, 2, 3], 0)
    assert not torch.equal(first, other)


# a U-Net


@pytest.mark.parametrize("pictures", [1, 2])
@pytest.mark.parametrize("queues", [1, 2])
@on("1x1", "1x2")
def test_a_unet_goes_through_a_traced_pipeline(mesh, queues, pictures):
    model = ttnn_unet.make_model()
    batches = ttnn_unet.draw_batches(3, pictures * mesh.get_num_devices(), 32)
    config = ttnn_unet.PipelineConfig(use_trace=True, num_command_queues=queues)
    found = list(ttnn_unet.stream(model, batches, mesh, config))
    with torch.no_grad():
        expected = [model(each) for each in batches]
    for number, ours in enumerate(found):
        assert correlation(ours, expected[number]) > ENOUGH
        assert correlation(ours, expected[number - 1]) < 0.9  # the measure tells another batch's masks


@on("1x2")
def test_convolutions_of_a_unet_give_the_shards_that_they_are_asked_for(mesh, monkeypatch):
    seen = []
    call = ttnn_unet.Convolution.__call__

    def note(self: Any, x: Any, device: Any) -> Any:
        found = call(self, x, device)
        seen.append((self.config.shard_layout, found.memory_config()))
        return found

    monkeypatch.setattr(ttnn_unet.Convolution, "__call__", note)
    config = ttnn_unet.PipelineConfig(use_trace=False)
    assert len(list(ttnn_unet.stream(ttnn_unet.make_model(), ttnn_unet.draw_batches(1, 2, 32), mesh, config))) == 1
    assert len(seen) == 2 * 13  # once when it is compiled
    for asked, given in seen:
        assert given.memory_layout is asked and given.buffer_type is ttnn.BufferType.L1
        assert given.shard_spec.grid.num_cores() > 1
    assert {asked for asked, _ in seen} == {ttnn_unet.HEIGHT, ttnn_unet.BLOCK}


# a BERT


@on("1x1", "1x2")
def test_a_bert_from_a_torch_model_marks_the_answers_that_torch_marks(mesh):
    config = ttnn_bert.Config()
    model, batch = ttnn_bert.make_model(config), ttnn_bert.draw_batch(config, 4, 64)
    with torch.no_grad():
        expected = model(batch.ids, batch.types, batch.mask)
        unmasked = model(batch.ids, batch.types, torch.zeros_like(batch.mask))
    with loom.record() as log:
        found = ttnn_bert.run(model, config, batch, mesh)
    assert correlation(found, expected) > ENOUGH and not log.kinds()
    assert correlation(found, unmasked) < ENOUGH  # the mask counts


@on("1x2")
def test_a_preprocessor_of_a_users_own_replaces_what_it_knows_and_leaves_the_rest(mesh):
    config = ttnn_bert.Config()
    parameters = ttnn_bert.load_parameters(ttnn_bert.make_model(config), mesh)
    layer = parameters.layers[2]
    assert list(layer.attention) == ["query_key_value"]
    assert tuple(layer.attention.query_key_value.weight.shape) == (config.width, 3 * config.width)
    assert tuple(layer.up.weight.shape) == (config.width, config.hidden) and layer.up.weight.device() is mesh
    assert layer.up.weight.tensor_topology().placements() == [ttnn.PlacementReplicate()]


# experts


@on("2x4", "4x2")
def test_tokens_go_to_their_experts_and_come_back_with_what_torch_makes_of_them(mesh):
    block = ttnn_moe.Block(ttnn_moe.Config())
    tokens = block.draw_tokens(128)
    with loom.record() as log:
        found = ttnn_moe.Experts(block, mesh, 128 // mesh.shape[0])(tokens)
    assert found.shape == tokens.shape and correlation(found, block.reference(tokens)) > ENOUGH
    assert log.kinds()["reduce_scatter"] == 1
    for ours, theirs in zip(found, block.reference(tokens), strict=True):
        assert correlation(ours, theirs) > ENOUGH


@on("2x4")
def test_experts_of_one_column_are_not_enough(mesh, monkeypatch):
    block = ttnn_moe.Block(ttnn_moe.Config())
    tokens = block.draw_tokens(64)
    monkeypatch.setattr(ttnn, "reduce_scatter", lambda x, dim, cluster_axis: ttnn.mesh_partition(x, dim, cluster_axis))
    assert correlation(ttnn_moe.Experts(block, mesh, 32)(tokens), block.reference(tokens)) < 0.9


@on("2x3")
def test_columns_that_hold_the_same_experts_each_ask_their_own(mesh):
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randn(4, 1, 3, 4, generator=draw)  # two on each row, columns have copies
    chosen = torch.rand(4, 1, 3, 4, generator=draw).argsort(-1)[..., :2]
    rows = torch.tensor([0, 1, 1, 0])  # where an expert is, in every column
    owners = torch.nn.functional.one_hot(rows, 2).repeat_interleave(3, 1)[None, None]

    def put(value: torch.Tensor, dtype: Any, row: int | None = None, column: int | None = None) -> Any:
        mapper = ttnn.ShardTensor2dMesh(mesh, (2, 3), dims=(row, column))
        return ttnn.from_torch(value, dtype=dtype, device=mesh, mesh_mapper=mapper)

    x, indices, table = put(tokens, ttnn.float32, 0), put(chosen, ttnn.uint16, 0), put(owners, ttnn.uint16)
    sent, metadata = ttnn.all_to_all_dispatch(x, indices, table, cluster_axis=0)
    factors = torch.tensor([1.0, 2, 3]).reshape(1, 1, 1, 3)  # what an expert makes is another in every column
    scaled = ttnn.multiply(sent, put(factors, ttnn.float32, None, 3))
    made = ttnn.concat([ttnn.multiply(scaled, 2.0), ttnn.multiply(scaled, 3.0)], dim=0)
    back = ttnn.all_to_all_combine(made, metadata, table, cluster_axis=0)
    for number, part in enumerate(ttnn.get_device_tensors(back)):
        row, column = divmod(number, 3)
        own, picked = tokens[2 * row : 2 * row + 2, 0], chosen[2 * row : 2 * row + 2, 0]
        factor = torch.tensor([2, 2, 3, 3])[picked].movedim(-1, 0).unsqueeze(-1) * (column + 1)
        torch.testing.assert_close(ttnn.to_torch(part), own * factor)


@on("2x4")
def test_experts_are_replayed_with_other_tokens(mesh):
    block = ttnn_moe.Block(ttnn_moe.Config())
    tokens, experts = block.draw_tokens(128), ttnn_moe.Experts(block, mesh, 32)
    x = ttnn.to_device(experts.host(tokens[:64]), mesh)
    experts.forward(x)
    trace = ttnn.begin_trace_capture(mesh, cq_id=0)
    y = experts.forward(x)
    ttnn.end_trace_capture(mesh, trace, cq_id=0)
    for given in (tokens[64:], tokens[:64]):
        ttnn.copy_host_to_device_tensor(experts.host(given), x)
        ttnn.execute_trace(mesh, trace, cq_id=0, blocking=False)
        assert correlation(experts.read(y), block.reference(given)) > ENOUGH
    ttnn.release_trace(mesh, trace)


# the examples as a user runs them


TABLE = re.findall(r"`python examples/(ttnn_\w+\.py) (.*?)` \| (\S+) \|", (ROOT / "docs" / "ttnn.md").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "promised"), TABLE)
def test_a_program_prints_what_the_guide_says(name, arguments, promised):
    printed = run_example(name, *arguments.split())
    found = [float(each) for each in re.findall(r"PCC (\d\.\d+)", printed)]
    assert min(found) > ENOUGH and min(found) == pytest.approx(float(promised), abs=5e-5)
    assert f"MeshDevice({arguments.split()[-1]} grid" in printed


def test_the_guide_names_every_program():
    programs = {path.name for path in (ROOT / "examples").glob("ttnn_*.py")}
    assert {name for name, _, _ in TABLE} == programs and len(TABLE) == 10


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("ttnn_llama.py --mesh 1x3", "8 heads of keys do not divide"),
        ("ttnn_llama.py --mesh 1x1 --tokens 200", "is longer than 128"),
        ("ttnn_unet.py --size 20", "no multiple of 32"),
        ("ttnn_bert.py --length 20", "no multiple of 32"),
        ("ttnn_moe.py --mesh 1x8", "do not divide over rows and columns"),
        ("ttnn_moe.py --tokens 40", "20 tokens on each row"),
    ],
)
def test_a_program_says_what_it_cannot_do(command, reason, monkeypatch, capsys):
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as told:
        sys.modules[name.removesuffix(".py")].main()
    assert reason in f"{told.value} {capsys.readouterr().err}"


def test_programs_have_other_options():
    printed = run_example("ttnn_llama.py", "--mesh", "1x1", "--users", "1", "--prompt", "Hello", "--tokens", "3")
    assert "3 tokens replayed PCC 0.9999" in printed and "'Hello" in printed
    assert run_example("ttnn_unet.py", "--queues", "1", "--batches", "2", "--pictures", "2").count("PCC 0.9998") == 2


@pytest.mark.parametrize("name", ["ttnn_llama.py", "ttnn_unet.py", "ttnn_bert.py", "ttnn_moe.py"])
def test_a_program_is_tied_to_meshloom_by_its_imports_alone(name):
    lines = Path(ROOT / "examples" / name).read_text().splitlines()
    assert {line.split()[0] for line in lines if "meshloom" in line} == {"from"}
    assert "--mesh" in run_example(name, "--help")


ORIGINAL = {  # the imports of a program for hardware, by ours
    "from meshloom import ttnn\n": "import ttnn\n",
    "from meshloom.ttnn.pipeline import": "from models.tt_cnn.tt.pipeline import",
    "from meshloom.ttnn.model_preprocessing import": "from ttnn.model_preprocessing import",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ttnn_llama.py", "ttnn_unet.py", "ttnn_bert.py", "ttnn_moe.py"])
def test_a_program_with_the_imports_of_the_original_runs_as_it_is(name, tmp_path):
    text = Path(ROOT / "examples" / name).read_text()
    for ours, theirs in ORIGINAL.items():
        text = text.replace(ours, theirs)
    assert "meshloom" not in text
    script = tmp_path / name
    script.write_text(text)
    command = [sys.executable, "-c", "from meshloom.cli import main; raise SystemExit(main())", "doctor", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all 7 items hold" in done.stdout and "PCC 0.999" in done.stdout


@pytest.mark.parametrize("name", ["ttnn_llama.py", "ttnn_unet.py", "ttnn_bert.py", "ttnn_moe.py"])
def test_the_doctor_finds_nothing_wrong_with_a_program(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name])
    with doctor.watch() as seen:
        sys.modules[name.removesuffix(".py")].main()
    assert [each for each in seen.findings() if not each.holds] == []
