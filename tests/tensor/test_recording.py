"""The step graph: what ran, in which phase, on whose behalf, how much of it, and what memory it held."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import meshloom as loom
from llama import SMALL_7B, Sizes, forward_flops, make_step
from meshloom import Shard
from meshloom.comms import weights
from meshloom.cost.step import Node, StepGraph
from meshloom.runtime import state
from meshloom.tensor.recording import recording
from test_observe import PROGRAMS

TINY = Sizes(width=64, hidden=96, heads=4, groups=4, vocabulary=96, layers=3, dp=2, tp=4, rows=2, length=16)


def record(step) -> StepGraph:
    with loom.record(step=True) as log:
        step()
    return log.graph()


def phases(graph: StepGraph) -> dict[str, list[Node]]:
    return {
        phase: [n for n in graph.nodes if n.phase == phase] for phase in dict.fromkeys(n.phase for n in graph.nodes)
    }


def test_a_step_has_forward_backward_and_optimizer_in_order():
    graph = record(make_step(TINY))
    assert list(phases(graph)) == ["forward", "backward", "optimizer"]
    assert [node.number for node in graph.nodes] == list(range(len(graph.nodes)))
    order = [node.phase for node in graph.nodes]
    assert order == sorted(order, key=("forward", "backward", "optimizer").index)


def test_backward_nodes_are_the_kernels_that_ran_and_know_their_forward_call():
    graph = record(make_step(TINY))
    down = [n for n in graph.nodes if n.module == "Llama.layers.1.feed.down_proj" and n.phase != "optimizer"]
    forward, backward, summed = down
    assert (forward.op, forward.phase, forward.kernels) == ("linear", "forward", ("mm",))
    assert (backward.op, backward.phase, backward.kernels) == ("linear", "backward", ("mm", "mm"))
    assert backward.gradient_of == forward.number and backward.where == forward.where
    assert backward.flops == 2 * forward.flops
    assert forward.operands == ("f32[4, 16, 96](S(0), S(2))", "f32[64, 96](R, S(1))") or "bf16" in forward.operands[0]
    assert summed.is_gradient_sum and [each.axis for each in summed.after] == ["dp"]


def test_arithmetic_is_that_of_the_closed_formula():
    graph = record(make_step(TINY))
    found = {phase: sum(n.model_flops for n in nodes) for phase, nodes in phases(graph).items()}
    attention = TINY.layers * 4 * TINY.dp * TINY.tokens * TINY.length * TINY.width
    assert found["forward"] == forward_flops(TINY)
    # a fused backward computes the scores once more: five products where forward has two
    assert found["backward"] == 2 * (forward_flops(TINY) - attention) + 2.5 * attention
    assert found["optimizer"] == 0


def test_one_device_does_its_share_and_no_more():
    graph = record(make_step(TINY))
    products = [n for n in graph.nodes if n.model_flops]
    assert len(products) > 20
    for node in products:
        assert node.flops == node.model_flops / (TINY.dp * TINY.tp), node


def test_without_data_and_with_data_the_graph_is_the_same():
    seen = []
    for device in ("meta", "cpu"):
        graph = record(make_step(TINY, device, torch.float32))
        nodes = [
            (
                n.op,
                n.phase,
                n.module,
                n.where,
                n.operands,
                n.results,
                n.kernels,
                n.loads,
                n.before,
                n.after,
                n.reads,
                n.writes,
            )
            for n in graph.nodes
        ]
        seen.append((nodes, Counter((s.name, s.held_for, s.bytes) for s in graph.storages), graph.has_data))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] == seen[1][1]
    assert [has_data for *_, has_data in seen] == [False, True]


def test_the_collectives_are_those_of_a_record():
    graph = record(make_step(TINY))
    with loom.record() as log:
        make_step(TINY)()
    listed = Counter(each for node in graph.nodes for each in node.collectives)
    assert listed == Counter(event.collective for event in log.events)
    assert len(listed) > 5


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_collectives_of_any_program_are_in_its_graph(name):
    run = PROGRAMS[name]()
    with loom.record(step=True) as log:
        run()
    graph = log.graph()
    listed = Counter(each for node in graph.nodes for each in node.collectives)
    assert listed == Counter(event.collective for event in log.events)
    numbers = set(range(len(graph.storages)))
    assert all({*node.reads, *node.writes} <= numbers for node in graph.nodes)
    assert all(each.freed is None or each.freed >= each.made for each in graph.storages)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_parameters_gradients_and_state_are_counted_exactly_for_every_optimizer(options):
    step = make_step(TINY, "cpu", torch.float32, **options)
    with loom.record(step=True) as log:
        step()
    held = Counter()
    for each in log.graph().storages:
        held[each.held_for] += each.bytes
    expected = sum(parameter.topology.local_bytes for parameter in step.model.parameters())
    assert held["parameters"] == held["gradients"] == expected
    assert held["optimizer state"] == 2 * expected
    assert any(node.phase == "optimizer" for node in log.graph().nodes)


def test_a_fused_optimizer_is_one_kernel_that_reads_four_arrays_and_writes_three():
    step = make_step(TINY, "cpu", torch.float32, fused=True)
    nodes = [node for node in record(step).nodes if node.phase == "optimizer" and "fused" in node.op]
    held = sum(parameter.topology.local_bytes for parameter in step.model.parameters())
    counters = 4 * len(list(step.model.parameters()))  # of steps, on the host
    assert [node.kernels for node in nodes] == [("_fused_adamw_",)]
    assert nodes[0].traffic == pytest.approx(7 * held, abs=2 * counters)


def test_state_of_an_earlier_step_is_state_again():
    step = make_step(TINY)
    step()
    graph = record(step)
    state_bytes = sum(each.bytes for each in graph.storages if each.held_for == "optimizer state")
    assert state_bytes == 2 * sum(parameter.topology.local_bytes for parameter in step.model.parameters())
    assert all(each.made == -1 for each in graph.storages if each.held_for == "optimizer state")


class Saved:
    """What autograd saves of a dense model, by torch's own hooks: the oracle of activations."""

    def __init__(self, model: nn.Module) -> None:
        self.known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self.kept: dict[int, torch.UntypedStorage] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.kept[storage._cdata] = storage
        return tensor

    def bytes(self) -> int:
        return sum(each.nbytes() for each in self.kept.values())


def test_activations_on_one_device_are_what_autograd_saves_of_the_dense_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Softmax(-1))
    x = torch.randn(16, 8)
    saved = Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        model(x).square().sum().backward()
    mesh = loom.open_mesh((1,), axes=("dp",))
    for name, parameter in list(model.named_parameters()):
        path, _, which = name.rpartition(".")
        setattr(model.get_submodule(path), which, loom.Parameter(parameter.detach(), mesh))
    inputs = loom.distribute(x, mesh)
    graph = record(lambda: model(inputs).square().sum().backward())
    loss = 4  # bytes: alive while backward runs from it
    kept = sum(each.bytes for each in graph.storages if each.held_for in ("activations", "inputs"))
    assert abs(kept - saved.bytes()) <= 2 * loss
    assert saved.bytes() > 16 * 32 * 4 * 4


def test_a_storage_lives_from_its_kernel_to_the_last_before_it_is_freed():
    mesh = loom.open_mesh((2,), axes=("dp",))
    x = loom.ones(8, 4, mesh=mesh, placements="S(0)")

    def program():
        first = x + 1
        second = first * 2
        del first
        third = second.exp()
        del second
        return third.sum()

    graph = record(program)
    named = {each.name: (each.made, each.freed, each.bytes) for each in graph.storages}
    assert named["f32[8, 4](S(0))"] == (-1, None, 64)
    assert named["add f32[8, 4](S(0))"] == (0, 1, 64)
    assert named["mul f32[8, 4](S(0))"] == (1, 2, 64)
    assert named["exp f32[8, 4](S(0))"][:2] == (2, 3)


def test_views_take_no_memory_and_no_time():
    x = loom.ones(8, 4, mesh=loom.open_mesh((2,)), placements="S(0)")
    graph = record(lambda: x.transpose(0, 1).unsqueeze(0)[:, 1:3])
    assert [each.name for each in graph.storages] == ["f32[8, 4](S(0))"]
    assert all(node.traffic == 0 for node in graph.nodes)


def test_data_flows_by_storage():
    x = loom.ones(8, 4, mesh=loom.open_mesh((2,)), placements="S(0)")
    graph = record(lambda: (x.exp() + x.T.exp().T).sum())
    first, second, added, summed = (n for n in graph.nodes if n.kernels)
    assert set(added.reads) == {*first.writes, *second.writes}
    assert set(summed.reads) == set(added.writes)
    assert set(first.reads) == set(second.reads)


def sharded_layers(count: int, device: str = "cpu", uneven: bool = False):
    """Products of weights that are sharded over four devices, and a step of them."""
    mesh = loom.open_mesh((4,), axes=("dp",))
    model = nn.Sequential(*(nn.Linear(64, 62 if uneven and i + 1 == count else 64, bias=False) for i in range(count)))
    for layer in model:
        layer.weight = loom.Parameter(layer.weight.detach().to(device), mesh, {"dp": Shard(0)})
    x = loom.ones(4096, 64, mesh=mesh, placements="S(0)", device=device)
    return lambda: model(x).sum().backward()


def gathered_at(graph, kernel: int) -> int:
    return sum(each.bytes for each in graph.storages if each.held_for == "gathered" and each.is_alive(kernel))


@pytest.mark.parametrize("uneven", [False, True])
def test_nothing_of_a_gathered_parameter_is_kept_between_forward_and_backward(uneven, monkeypatch):
    def between(graph) -> tuple[int, int]:
        last = max(n.kernel_range[1] for n in graph.nodes if n.op == "linear" and n.phase == "forward")
        return gathered_at(graph, last), max(gathered_at(graph, kernel) for kernel in range(graph.kernels))

    whole = 64 * 64 * 4
    assert between(record(sharded_layers(6, uneven=uneven))) == (0, 2 * whole)  # a weight beside a gradient
    monkeypatch.setattr(weights, "keeps_by_itself", lambda: False)  # as if processes kept them
    kept, most = between(record(sharded_layers(6)))
    assert kept == 5 * whole and most > kept  # the first one's input has no gradient


def test_the_peak_falls_by_what_is_not_kept(monkeypatch):
    def peak() -> int:
        with loom.dry_run(memory=math.inf) as run:
            sharded_layers(6)()
        return run.memory.peak

    found = peak()
    monkeypatch.setattr(weights, "keeps_by_itself", lambda: False)
    assert peak() - found > 3 * 64 * 64 * 4  # of five weights; the peak itself is elsewhere then


def test_a_parameter_is_gathered_again_for_backward_and_its_gradient_scattered_beside_it():
    graph = record(sharded_layers(2))
    whole = 64 * 64 * 4
    gathered = [each for each in graph.storages if each.held_for == "gathered"]
    assert {each.bytes for each in gathered} == {whole}
    forward = [n for n in graph.nodes if n.op == "linear" and n.phase == "forward"]
    backward = {n.gradient_of: n for n in graph.nodes if n.op == "linear" and n.phase == "backward"}
    assert [[c.kind for c in n.before] for n in forward] == [["all_gather"]] * 2
    # the second weight is needed again for the gradient of its input; the first one's input has no gradient
    last, first = backward[forward[1].number], backward[forward[0].number]
    assert [c.kind for c in last.before] == ["all_gather"] and not first.before
    assert graph.storages[last.before_of[0]].held_for == "parameters"
    scatters = [n for n in graph.nodes if n.is_gradient_sum]
    assert [[c.kind for c in n.after] for n in scatters] == [["reduce_scatter"]] * 2
    assert [n.number for n in scatters] == [last.number + 1, first.number + 1]
    assert [[graph.storages[i].held_for for i in n.writes] for n in scatters] == [["gradients"]] * 2
    # a gradient is whole before it is reduced and scattered
    assert len([each for each in gathered if each.name.startswith("gradient")]) == 2
    kept = [each.bytes for each in graph.storages if each.held_for in ("parameters", "gradients")]
    assert kept == [whole // 4] * 4


def test_recomputed_calls_have_a_phase_of_their_own_and_no_model_flops():
    mesh = loom.open_mesh((2,), axes=("dp",))
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = loom.Parameter(layer.weight.detach(), mesh)
    x = loom.ones(8, 16, mesh=mesh, placements="S(0)").requires_grad_()

    def step():
        hidden = torch.utils.checkpoint.checkpoint(lambda y: layer(y).tanh(), x, use_reentrant=False)
        hidden.sum().backward()

    graph = record(step)
    again = [n for n in graph.nodes if n.phase == "recompute"]
    assert [n.op for n in again if n.kernels] == ["linear", "tanh"]
    assert all(n.model_flops == 0 for n in again) and again[0].flops > 0
    assert sum(n.model_flops for n in graph.nodes) == 3 * 2 * 8 * 16 * 16


def test_the_sum_of_a_gradient_waits_for_the_last_use_of_its_value():
    mesh = loom.open_mesh((2,), axes=("tp",))
    x = loom.ones(4, 8, mesh=mesh, placements="R").requires_grad_()
    weights = [loom.Parameter(torch.ones(8, 8), mesh, {"tp": Shard(1)}) for _ in range(3)]

    def step():
        value = x * 2
        total = sum((value @ weight).sum() for weight in weights)
        total.backward()

    graph = record(step)
    uses = [n for n in graph.nodes if n.op == "matmul" and n.phase == "forward"]
    back = [n for n in graph.nodes if n.op == "matmul" and n.phase == "backward"]
    assert [n.gradient_of for n in back] == [n.number for n in reversed(uses)]
    assert [[c.kind for c in n.after] for n in back] == [[], [], ["all_reduce"]]
    (made,) = (n for n in graph.nodes if n.op == "mul" and n.phase == "backward")
    assert set(made.reads) & set(back[-1].writes)


def test_a_function_without_a_rule_is_done_whole_by_every_device():
    mesh = loom.open_mesh((4,), axes=("dp",))
    x = loom.ones(8, 16, mesh=mesh, placements="S(0)").requires_grad_()
    graph = record(lambda: (torch.renorm(x * 2, 2, 0, 1.0) * 1).sum().backward())
    size = 8 * 16 * 4
    forward, backward = (n for n in graph.nodes if n.op == "renorm" and n.kernels)
    assert forward.kernels and forward.traffic >= 2 * size and backward.phase == "backward"
    assert backward.gradient_of == forward.number and backward.traffic >= 2 * size
    assert [s.bytes for s in graph.storages if s.held_for == "gathered" and s.node == forward.number] == [size]
    after = next(n for n in graph.nodes if n.op == "mul" and n.number > forward.number)
    assert after.traffic == 2 * size / 4  # sharded again


def test_small_gradients_are_summed_in_a_buffer_beside_them():
    step = make_step(TINY)
    graph = record(step)
    (bucket,) = (s for s in graph.storages if "to be summed" in s.name)
    summed = sum(p.topology.local_bytes for p in step.model.parameters())  # none has 2^18 elements
    last = max(n.kernel_range[1] for n in graph.nodes if n.phase == "backward") - 1
    assert (bucket.bytes, bucket.made, bucket.freed) == (summed, last, last)


def test_attention_without_data_keeps_no_scores():
    sizes = Sizes(width=64, hidden=96, heads=4, groups=2, vocabulary=96, layers=1, dp=2, tp=2, rows=1, length=512)
    scores = 2 * 2 * sizes.length * sizes.length  # bytes of one device's, at least
    graph = record(make_step(sizes))
    assert max(s.bytes for s in graph.storages if "attention" in s.name) < scores / 8
    kernels = [k for n in graph.nodes if n.op == "scaled_dot_product_attention" for k in n.kernels]
    assert len(kernels) == 2 and "softmax" not in " ".join(kernels)


def test_inner_arrays_are_shared_out_like_the_calls_operands():
    mesh = loom.open_mesh((4,), axes=("dp",))
    x = loom.ones(32, 16, mesh=mesh, placements="S(0)", dtype=torch.bfloat16).requires_grad_()
    graph = record(lambda: F.rms_norm(x, (16,)).sum().backward())
    inner = [s for s in graph.storages if s.name.startswith("rms_norm f32")]
    assert {s.name: s.bytes for s in inner}["rms_norm f32[32, 1]"] == 32 * 4 // 4
    assert {s.name: s.bytes for s in inner}["rms_norm f32[32, 16]"] == 32 * 16 * 4 // 4


def test_nothing_is_left_behind():
    before = (state.plain, len(torch.nn.modules.module._global_forward_hooks), torch._C._len_torch_dispatch_stack())
    with pytest.raises(ZeroDivisionError), recording():
        1 / 0  # noqa: B018
    record(make_step(TINY))
    after = (state.plain, len(torch.nn.modules.module._global_forward_hooks), torch._C._len_torch_dispatch_stack())
    assert before == after
    assert state.plain


def test_the_graph_has_as_many_nodes_on_sixteen_thousand_devices_as_on_eight():
    few, many = (
        record(make_step(Sizes(**{**SMALL_7B, "vocabulary": 2048}, layers=1, dp=dp, tp=8, length=64)))
        for dp in (1, 2048)
    )
    assert many.devices == 16384 and few.devices == 8
    kinds = [[(n.op, n.phase, n.kernels) for n in graph.nodes if not n.is_gradient_sum] for graph in (few, many)]
    assert kinds[0] == kinds[1]
    assert math.isclose(sum(n.flops for n in few.nodes), sum(n.flops for n in many.nodes))


def test_lists_without_data_are_counted_and_not_walked_through():
    from meshloom.tensor.recording import Unchanged, changes_nothing

    empty, real = torch.empty(3, device="meta"), torch.ones(3)
    in_place = torch.ops.aten._foreach_add_.Scalar
    assert changes_nothing(in_place, ([empty, empty], 1.0))
    assert not changes_nothing(in_place, ([empty, real], 1.0))
    assert not changes_nothing(torch.ops.aten._foreach_add.Scalar, ([empty], 1.0))
    with Unchanged():
        torch._foreach_add_([real], 1.0)
        torch._foreach_add_([empty], 1.0)
    assert real.tolist() == [2.0, 2.0, 2.0]
