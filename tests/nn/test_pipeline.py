"""Pipelines: losses and gradients of the dense model, the order of events, and what goes wrong."""

from __future__ import annotations

import copy
import itertools
import math
import os
import re

import pytest
import torch
from torch import nn

import meshloom as loom
import pipeline_ranks
import ranks
from meshloom import PipelineError
from meshloom.planner.pipelines import BACKWARD, FORWARD

os.environ.setdefault("HF_HUB_OFFLINE", "1")

mse = nn.functional.mse_loss
# stages, schedule, mesh (pp, dp, tp), plan: on 4 and 8 devices, alone and with data, tensor and full sharding
CASES = [
    (2, "1f1b", (2, 2), "tensor"),
    (2, "gpipe", (2, 2), "data"),
    (4, "1f1b", (4, 1, 2), "tensor"),
    (2, "1f1b", (2, 2, 2), "tensor"),
]
MORE = [
    (stages, schedule, shape, plan)
    for stages, shape in ((2, (2, 2)), (4, (4,)), (2, (2, 4)), (4, (4, 2)), (2, (2, 2, 2)))
    for schedule, plan in itertools.product(("1f1b", "gpipe"), ("data", "tensor", "fsdp"))
]
EVERYTHING = os.environ.get("MESHLOOM_MODELS") == "all"


def layers(count: int = 4, width: int = 6) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(each for _ in range(count) for each in (nn.Linear(width, width), nn.Tanh())))


def meshes(*shape: int) -> loom.Mesh:
    return loom.open_mesh(shape, axes=("pp", "dp", "tp")[: len(shape)])


def check_step(pipe: loom.Pipeline, dense: nn.Module, rows: int = 7, width: int = 6) -> None:
    """One step of a pipeline of layers beside the dense one."""
    x, y = torch.randn(rows, width), torch.randn(rows, width)
    loss, expected = pipe.step(x, target=y), mse(dense(x), y)
    expected.backward()
    torch.testing.assert_close(loss.to_torch(), expected.detach())
    for p, q in zip(pipe.module.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_torch(), q.grad)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_pipeline_equals_the_dense_model_in_one_process(case):
    pipeline_ranks.check_pipeline(*case)


@pytest.mark.parametrize("count", [2, 4])
def test_a_pipeline_equals_the_dense_model_between_processes(count):
    found = ranks.run(count, "pipeline_ranks:matrix", CASES, timeout=200)
    assert all(len(each) == len(CASES) for each in found)


@pytest.mark.skipif(not EVERYTHING, reason="the whole matrix is part of make full")
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_pipeline_equals_the_dense_model(count):
    found = ranks.run(count, "pipeline_ranks:matrix", MORE, timeout=900)
    assert all(len(each) == len(MORE) for each in found)


def test_a_public_model_goes_through_stages_of_different_shapes():
    from library_models import llama, tokens

    dense = llama(tie_word_embeddings=False, num_hidden_layers=3).double()
    ours = copy.deepcopy(dense)
    whole = meshes(2, 2, 2)
    stages = [whole.submesh(pp=0).reshape(tp=4), whole.submesh(pp=1)]

    def loss(output, labels):
        return nn.functional.cross_entropy(output.logits.transpose(1, 2), labels)

    pipe = loom.pipeline(ours, ["model.layers.1"], stages, micro_batches=3, plan="tensor", loss=loss)
    x, y = tokens(8), tokens(8, seed=1)
    mask = torch.ones_like(x)
    found = pipe.step(input_ids=x, attention_mask=mask, use_cache=False, target=y)
    expected = loss(dense(input_ids=x, attention_mask=mask, use_cache=False), y)
    expected.backward()
    torch.testing.assert_close(found.to_torch(), expected.detach())
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_torch(), q.grad)
    assert repr(pipe).splitlines()[0] == "stage 0 on Mesh(tp=4)  model.embed_tokens model.layers.0"
    logits = pipe(input_ids=x, use_cache=False)["logits"]
    torch.testing.assert_close(logits.to_torch(), dense(input_ids=x, use_cache=False).logits.detach())


def test_a_loss_may_call_the_model_itself():
    dense = layers()
    x, y = torch.randn(7, 6), torch.randn(7, 6)

    def loss(model, batch):
        given, wanted = batch
        return mse(model(given), wanted)

    pipe = loom.pipeline(copy.deepcopy(dense), 2, meshes(2, 2), micro_batches=3, plan="data", batch_loss=loss)
    found, expected = pipe.step(x, y), loss(dense, (x, y))
    expected.backward()
    torch.testing.assert_close(found.to_torch(), expected.detach())
    for p, q in zip(pipe.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_torch(), q.grad)
    torch.testing.assert_close(pipe(x).to_torch(), dense(x).detach())  # a forward pass has no loss
    with pytest.raises(loom.ArgumentError, match="batch_loss takes no target"):
        pipe.step(x, target=y)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"loss": mse, "batch_loss": mse}, "two losses"),
        ({"loss": 3}, "loss=3 is no function"),
        ({"batch_loss": "mse"}, "batch_loss='mse' is no function"),
    ],
)
def test_losses_that_are_none_are_refused(wrong, said):
    with pytest.raises(loom.ArgumentError, match=said):
        loom.pipeline(layers(), 2, meshes(2, 2), **wrong)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("rows", "batches", "made"), [(7, 3, 3), (3, 8, 3), (1, 1, 1), (8, 4, 4), (5, 4, 3)])
def test_batches_of_any_size_are_cut_and_weighed_by_rows(schedule, rows, batches, made):
    dense = layers()
    pipe = loom.pipeline(copy.deepcopy(dense), 2, meshes(2, 2), schedule, micro_batches=batches, plan="data", loss=mse)
    check_step(pipe, dense, rows)
    assert pipe.report.schedule.batches == made


def test_losses_that_are_sums_are_added():
    dense = layers()
    ours = copy.deepcopy(dense)
    pipe = loom.pipeline(ours, 2, meshes(2), micro_batches=3, loss=lambda a, b: (a - b).square().sum(), reduction="sum")
    x = torch.randn(7, 6)
    loss = pipe.step(x, target=x)
    torch.testing.assert_close(loss.to_torch(), (dense(x) - x).square().sum().detach())


def test_stages_can_be_named_by_patterns_and_a_model_may_give_its_own_loss():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first, self.scale = nn.Linear(6, 1), nn.Linear(6, 6), nn.Parameter(torch.ones(6))

        def forward(self, x):
            return self.last(self.first(x * self.scale)).square().mean()

    torch.manual_seed(2)
    dense = Own()
    ours = copy.deepcopy(dense)
    pipe = loom.pipeline(ours, [["first"], ["last"]], meshes(2, 2), plan="data")
    x = torch.randn(8, 6)
    loss, expected = pipe.step(x), dense(x)
    expected.backward()
    torch.testing.assert_close(loss.to_torch(), expected.detach())
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_torch(), q.grad)
    wrong = loom.pipeline(Own(), 2, meshes(2))
    with pytest.raises(loom.ArgumentError, match="a Linear of stage 0 is called after stage 1 has begun"):
        wrong.step(x)


def test_the_record_has_each_copy_once_and_gradients_are_summed_once():
    pipe = loom.pipeline(layers(), 2, meshes(2, 2), micro_batches=3, plan="data", loss=mse)
    x = torch.randn(6, 6)
    with loom.record() as log:
        pipe.step(x, target=x)
    copies = [(event.phase, event.bytes) for event in log if event.kind == "copy"]
    assert copies.count(("forward", 24)) == copies.count(("backward", 24)) == 3  # one row of six numbers per device
    sums = [event for event in log if event.kind == "all_reduce" and event.phase == "backward"]
    assert len(sums) == 8  # of weights and biases, not of micro-batches
    with loom.communication("forbid"), pytest.raises(PipelineError, match="where communication is forbidden"):
        pipe.step(x, target=x)


def test_steps_inside_of_accumulate_sum_gradients_once():
    dense = layers()
    ours = copy.deepcopy(dense)
    pipe = loom.pipeline(ours, 2, meshes(2, 2), micro_batches=2, plan="data", loss=mse)
    x = torch.randn(8, 6)
    with loom.record() as log:
        with loom.accumulate():
            pipe.step(x, target=x)
        pipe.step(x, target=x)
    assert len([event for event in log if event.kind == "all_reduce" and event.phase == "backward"]) == 8
    (2 * mse(dense(x), x)).backward()
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(p.grad.to_torch(), q.grad)


def test_blocks_may_be_computed_again_in_backward():
    dense = pipeline_ranks.Net()
    ours = copy.deepcopy(dense)
    plan = loom.Plan(batch="dp=S(0)", recompute=["blocks.*"])
    pipe = loom.pipeline(ours, 2, meshes(2, 2), micro_batches=1, plan=plan, loss=pipeline_ranks.loss_of)
    tokens = torch.randint(11, (4, 3))
    loss, expected = pipe.step(tokens, target=tokens), pipeline_ranks.loss_of(dense(tokens), tokens)
    expected.backward()
    torch.testing.assert_close(loss.to_torch(), expected.detach())
    pipeline_ranks.check_gradients(ours, dense)


def test_dropout_is_the_same_for_any_schedule():
    found = []
    for schedule in ("1f1b", "gpipe"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
        pipe = loom.pipeline(net, 2, meshes(2, 2), schedule, micro_batches=3, plan="data", loss=mse)
        torch.manual_seed(5)
        found.append(pipe.step(torch.ones(6, 6), target=torch.zeros(6, 6)).item())
        after = torch.rand(1).item()
        found.append(after)
    assert found[:2] == found[2:]


def test_frozen_stages_autocast_and_batches_on_a_mesh():
    dense = layers()
    dense[0].requires_grad_(False)
    dense[2].requires_grad_(False)
    ours = copy.deepcopy(dense)
    pipe = loom.pipeline(ours, 2, meshes(2, 2), micro_batches=2, plan="data", loss=mse)
    x = torch.randn(8, 6)
    with loom.record() as log:
        loss = pipe.step(loom.distribute(x, loom.open_mesh((3,))), target=x)
    assert not [event for event in log if event.kind == "copy" and event.phase == "backward"]
    expected = mse(dense(x), x)
    expected.backward()
    torch.testing.assert_close(loss.to_torch(), expected.detach())
    for p, q in zip(ours.parameters(), dense.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.to_torch(), q.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = pipe.step(x, target=x)
    assert half.item() == pytest.approx(expected.item(), rel=0.05)


def test_statistics_are_written_once_for_every_micro_batch():
    torch.manual_seed(1)
    dense = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 6), nn.BatchNorm1d(6))
    ours = copy.deepcopy(dense)
    pipe = loom.pipeline(ours, 2, meshes(2, 2), micro_batches=2, plan="data", loss=mse)
    x = torch.randn(8, 6)
    pipe.step(x, target=x)
    for part in x.split(4):
        dense(part)
    for number in (1, 3):
        torch.testing.assert_close(ours[number].running_mean.to_torch(), dense[number].running_mean)
        assert ours[number].num_batches_tracked.item() == 2


def test_a_model_comes_back_from_its_stages():
    dense = layers()
    pipe = loom.pipeline(copy.deepcopy(dense), 2, meshes(2, 2), plan="tensor", loss=mse)
    back = pipe.unparallelize()
    assert type(back[0]) is nn.Linear
    assert all(torch.equal(p, q) for p, q in zip(back.parameters(), dense.parameters(), strict=True))
    check_step(loom.pipeline(back, 4, meshes(4), loss=mse), dense)


def test_a_checkpoint_of_a_pipeline_is_that_of_its_model(tmp_path):
    pipe = loom.pipeline(layers(), 2, meshes(2, 2), plan="tensor", loss=mse)
    loom.save({"model": pipe.module}, tmp_path / "saved")
    other = loom.pipeline(nn.Sequential(*(nn.Linear(6, 6), nn.Tanh()) * 1, *layers(3)), 4, meshes(4), loss=mse)
    loom.load(tmp_path / "saved", into={"model": other.module})
    for p, q in zip(pipe.module.parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(p.to_torch(), q.to_torch())


@pytest.mark.parametrize("count", [1, 2, 4] if EVERYTHING else [2])
def test_pipelines_with_their_optimizer_go_to_files_and_come_back_on_other_stages(count, tmp_path):
    names = ranks.run(count, "pipeline_ranks:save_and_load", str(tmp_path / "saved"))
    assert all(len(each) == len(list(pipeline_ranks.Net().parameters())) for each in names)


# what goes wrong


class Failing(nn.Linear):
    """Fails at its third call."""

    calls = 0

    def forward(self, x):
        if not x._data.is_meta:
            self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("no luck")
        return super().forward(x)


def test_a_failing_stage_says_where_and_loses_nothing():
    net = nn.Sequential(nn.Linear(6, 6), Failing(6, 6))
    pipe = loom.pipeline(net, 2, meshes(2, 2), micro_batches=4, plan="data", loss=mse)
    x = torch.randn(8, 6)
    message = "stage 1 of 2 failed in the forward pass of micro-batch 2: ZeroDivisionError: no luck"
    with pytest.raises(PipelineError, match=re.escape(message)) as told:
        pipe.step(x, target=x)
    assert "modules  1" in str(told.value)
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    net.zero_grad()
    loss = pipe.step(x, target=x)
    torch.testing.assert_close(loss.to_torch(), mse(pipe(x).to_torch(), x))


WRONG = {
    "stages": (lambda mesh: loom.pipeline(layers(), 9, meshes(2)), "4 modules cannot make 9 stages"),
    "a name": (lambda mesh: loom.pipeline(layers(), ["7"], mesh), "no stage can begin at '7'"),
    "an order": (lambda mesh: loom.pipeline(layers(), ["4", "2"], mesh), "are not in the order of the model"),
    "a type": (lambda mesh: loom.pipeline(layers(), 2.5, mesh), "stages=2.5 is of type float"),
    "a mesh": (lambda mesh: loom.pipeline(layers(), 3, mesh), "3 stages do not pair up with 2 places on axis 'pp'"),
    "meshes": (lambda mesh: loom.pipeline(layers(), 2, [mesh, mesh]), "two stages are on the same mesh"),
    "no meshes": (lambda mesh: loom.pipeline(layers(), 2, [mesh]), "2 stages and 1 meshes do not pair up"),
    "no module": (lambda mesh: loom.pipeline(len, 2, mesh), "module=.* is of type"),
    "no units": (lambda mesh: loom.pipeline(nn.Linear(2, 2), 1, mesh), "has no modules with parameters"),
    "a schedule": (lambda mesh: loom.pipeline(layers(), 2, mesh, "2f2b"), "schedule='2f2b' is not known"),
    "batches": (lambda mesh: loom.pipeline(layers(), 2, mesh, micro_batches=0), "is no number of micro-batches"),
    "a reduction": (lambda mesh: loom.pipeline(layers(), 2, mesh, reduction="max"), "reduction='max' is not known"),
    "a plan": (lambda mesh: loom.pipeline(layers(), 2, mesh, plan={"9.weight": "dp=S(0)"}), "9.weight"),
    "patterns": (lambda mesh: loom.pipeline(layers(), [["0"], ["{2,4}"]], mesh), "no stage has a pattern for '6'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused_and_leaves_the_model_as_it_was(name):
    act, message = WRONG[name]
    with pytest.raises(loom.MeshloomError, match=message):
        act(meshes(2, 2))


def test_a_plan_that_fails_on_a_later_stage_leaves_the_model_dense():
    net = layers()
    stages = [loom.open_mesh((2,), axes=("tp",)), loom.Mesh.of((2,), ("dp",), (4, 5))]
    with pytest.raises(loom.MeshError, match="the plan names a mesh axis 'tp' that the mesh does not have"):
        loom.pipeline(net, 2, stages, plan={"*.weight": "tp=S(0)"})
    assert not any(isinstance(each, loom.Tensor) for each in net.parameters())


def test_batches_without_rows_and_losses_that_are_none_are_refused():
    pipe = loom.pipeline(layers(), 2, meshes(2))
    for batch in ((), (torch.ones(0, 6),), (torch.tensor(1.0),)):
        with pytest.raises(loom.ArgumentError, match="the batch has no rows"):
            pipe.step(*batch)
    with pytest.raises(loom.ArgumentError, match="the last stage gives no loss"):
        pipe.step(torch.ones(2, 6))
    with pytest.raises(loom.ArgumentError, match="there is a target and no loss"):
        pipe.step(torch.ones(2, 6), target=torch.ones(2, 6))


def test_tied_parameters_in_two_stages_are_refused():
    net = layers()
    net[6].weight = net[0].weight
    with pytest.raises(loom.ArgumentError, match=r"'0.weight' of stage 0 and '6.weight' of stage 1 are one parameter"):
        loom.pipeline(net, 2, meshes(2))


# between processes


def test_stages_on_two_processes_really_overlap():
    """Every pass sleeps, which takes no core: in a row they would take 24 naps, beside each other 14."""
    for seconds, naps in ranks.run(2, "pipeline_ranks:sleep_in_stages", 0.08):
        assert seconds < 0.85 * naps * 0.08


def test_a_stage_that_fails_ends_all_processes_with_its_name():
    with pytest.raises(AssertionError) as told:
        ranks.run(2, "pipeline_ranks:fail_in_a_stage", timeout=60)
    text = str(told.value)
    assert "stage 1 of 2 failed in the forward pass of micro-batch 1: ZeroDivisionError: no luck" in text
    lost = [line for line in text.splitlines() if line.startswith("[rank0]: meshloom.errors.PeerLostError")]
    assert len(lost) == 1 and "rank 1 raised" in lost[0] and "stage 1 of 2 failed" in lost[0]


def test_an_interrupt_ends_all_processes():
    with pytest.raises(AssertionError) as told:
        ranks.run(2, "pipeline_ranks:interrupt_a_stage", timeout=60)
    text = str(told.value)
    assert "rank 1 was interrupted" in text
    assert "[rank0]: meshloom.errors.PeerLostError" in text


# dry runs


def expected_bubble(schedule):
    """The bubble if a product takes one second: a pass of backward has two, but one where no input wants a gradient."""
    played = schedule.play(lambda turn: 1.0 if turn.phase == FORWARD or turn.stage == 0 else 2.0)
    busy, time = sum(end - start for _, start, end in played), max(end for _, _, end in played)
    return 1 - busy / (time * schedule.stages)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_dry_run_has_the_bubble_and_the_order_of_the_schedule(schedule, stages):
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(stages)))
    mesh = meshes(stages, 2)
    pipe = loom.pipeline(
        net, stages, mesh, schedule, micro_batches=6, plan="data", loss=lambda a, b: a.sum(), device="meta"
    )
    x = torch.empty(6 * 64, 512, device="meta")
    free = loom.Machine("free links", latency=1e-12, bandwidth=1e18, flops=1e12, memory_bandwidth=1e18)
    with loom.dry_run(free, memory=math.inf) as run:
        pipe.step(x, target=x)
    assert len(run.classes) == stages
    assert [each.devices for each in run.classes] == [2] * stages
    assert run.bubble == pytest.approx(expected_bubble(pipe.report.schedule), rel=0.01)
    assert f"bubble {100 * run.classes[0].bubble:.0f} %" in str(run)
    for stage in pipe.stages:
        number = run.graph.meshes.index(stage.mesh)
        nodes = [node for node in run.nodes if node.mesh == number and node.op == "linear"]
        rows = [turn.phase for turn in pipe.report.schedule.rows[stage.number]]
        assert [node.phase for node in nodes] == rows
        assert pipe.report.order(stage.number) == pipe.report.schedule.rows[stage.number]
        starts = [min(s.start for s in run.timeline if s.node == node.number) for node in nodes]
        assert starts == sorted(starts)
    assert {turn.phase for turn in pipe.report.schedule.turns} == {FORWARD, BACKWARD}


def test_a_dry_run_of_one_forward_one_backward_needs_less_memory():
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        with torch.device("meta"):
            net = nn.Sequential(*(each for _ in range(2) for each in (nn.Linear(64, 64), nn.GELU())))
        pipe = loom.pipeline(net, 2, meshes(2), schedule, micro_batches=16, loss=mse, device="meta")
        x = torch.empty(16 * 256, 64, device="meta")
        with loom.dry_run("galaxy", memory=math.inf) as run:
            pipe.step(x, target=x)
        peaks[schedule] = run.memory.peaks["activations"]
    assert peaks["1f1b"] < 0.5 * peaks["gpipe"]
