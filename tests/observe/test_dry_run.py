"""A dry run: time, memory and links of whole steps, against closed formulas, on 8 and on 16,384 devices."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import meshloom as loom
import ranks
from llama import (
    LARGE_70B,
    SMALL_7B,
    Llama,
    Sizes,
    make_step,
    parameters_per_device,
    saved_bytes,
    summarise_step,
    train,
)
from meshloom import Shard
from meshloom.cost import price
from meshloom.fabric import preset
from meshloom.observe.dry_run import TABLES
from step_graphs import SECONDS

TINY = Sizes(width=64, hidden=96, heads=4, groups=4, vocabulary=96, layers=3, dp=2, tp=4, rows=2, length=16)


@pytest.fixture(scope="module")
def run() -> loom.DryRun:
    with loom.dry_run("galaxy") as found:
        make_step(TINY)()
    return found


def check_memory(run: loom.DryRun, sizes: Sizes) -> None:
    """Parameters, gradients and state to the byte; activations within 1 %."""
    held, bytes_of_parameters = run.memory.peaks, 2 * parameters_per_device(sizes)
    assert held["parameters"] == held["gradients"] == bytes_of_parameters
    assert held["optimizer state"] == 2 * bytes_of_parameters
    assert held["activations"] == pytest.approx(saved_bytes(sizes), rel=0.01)
    assert run.memory.peak >= 4 * bytes_of_parameters


def bytes_per_axis(sizes: Sizes) -> dict[str, int]:
    """What one device receives, counted by hand: gradients over dp, activations over tp."""
    activation = 2 * sizes.tokens * sizes.width
    ring = lambda size, devices: 2 * size * (devices - 1) / devices  # noqa: E731  an all-reduce
    return {"dp": ring(2 * parameters_per_device(sizes), sizes.dp), "tp": ring(activation, sizes.tp)}


@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(**SMALL_7B, layers=2, dp=4, tp=8),
        Sizes(**LARGE_70B, layers=2, dp=2048, tp=8),
        pytest.param(Sizes(**SMALL_7B, layers=32, dp=4, tp=8), marks=pytest.mark.slow),
    ],
    ids=["7B, 2 layers, 32 devices", "70B, 2 layers, 16384 devices", "7B, 32 devices"],
)
def test_a_step_holds_and_moves_what_the_closed_formulas_say(sizes):
    with loom.dry_run("galaxy", memory=math.inf) as run:
        make_step(sizes)()
    check_memory(run, sizes)
    by_hand = bytes_per_axis(sizes)
    assert run.links["dp"].bytes == pytest.approx(by_hand["dp"], rel=1e-6)  # the rest is the loss, a few bytes
    statistics = 4 * 4 * sizes.tokens * 2  # largest score and sum of each token, in the loss
    reduced = (4 * sizes.layers + 1) * by_hand["tp"]  # two for a layer forward, two backward; one of the head
    assert run.links["tp"].bytes == pytest.approx(reduced, abs=statistics)
    per_layer = [each for each in run.nodes if each.module.startswith("Llama.layers.1.") and each.phase == "forward"]
    assert sum(each.bytes for each in per_layer) == 2 * by_hand["tp"]
    assert run.time > run.timing.compute > 0 and 0 < run.mfu < 1
    assert run.graph.devices == sizes.dp * sizes.tp


SCRIPT = """
import json, math, re, sys, time
sys.path.insert(0, {tests!r})
from llama import LARGE_70B, Sizes, make_step
import meshloom as loom
import ranks
sizes = Sizes(**LARGE_70B, layers=80, dp=2048, tp=8)
step = make_step(sizes)
with loom.dry_run("galaxy", memory=math.inf) as run:
    step()
print(json.dumps({{
    "held": dict(run.memory.peaks), "peak": run.memory.peak, "time": run.time, "mfu": run.mfu,
    "links": {{axis: load.bytes for axis, load in run.links.items()}},
    "rows": [row.name for row in run.table("module").rows],
    "rss": 1024 * int(re.search("VmHWM: +([0-9]+)", open("/proc/self/status").read().replace(chr(9), " "))[1]),
    "lines": len(str(run).splitlines()),
}}))
"""


@pytest.mark.slow
def test_seventy_billion_parameters_on_sixteen_thousand_devices_take_less_than_a_gigabyte():
    sizes = Sizes(**LARGE_70B, layers=80, dp=2048, tp=8)
    tests = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(tests=tests)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    held, size = found["held"], 2 * parameters_per_device(sizes)
    assert held["parameters"] == held["gradients"] == size and held["optimizer state"] == 2 * size
    assert held["activations"] == pytest.approx(saved_bytes(sizes), rel=0.01)
    assert found["links"]["dp"] == pytest.approx(bytes_per_axis(sizes)["dp"], rel=1e-6)
    assert 0 < found["mfu"] < 1 and found["time"] > 0 and set(found["links"]) == {"dp", "tp"}
    assert found["rss"] < 1e9
    assert len([name for name in found["rows"] if "layers" in name]) < 20  # 80 layers folded
    assert found["lines"] < 50


def test_layers_are_folded_and_the_tables_add_up(run):
    rows = {row.name: row for row in run.table("module").rows}
    assert rows["Llama.layers.[0-2].feed.up_proj"].count == 3
    for by in ("module", "phase", "line", "kind"):
        table = run.table(by)
        assert sum(row.compute for row in table.rows) == pytest.approx(run.timing.compute)
        assert sum(row.exposed for row in table.rows) == pytest.approx(run.timing.exposed)
        assert sum(row.bytes for row in table.rows) == run.bytes == run.log.bytes
        assert sum(row.flops for row in table.rows) == pytest.approx(run.device_flops)
        assert sum(row.calls for row in table.rows) == len(run.nodes)
    assert [row.name for row in run.table("phase").rows] == ["forward", "backward", "optimizer"]
    assert {row.name for row in run.table("axis").rows} == {"compute", "dp", "tp"}


def test_the_tree_holds_every_module_once(run):
    tree = run.tree
    assert tree.total.time == pytest.approx(run.time)
    (llama,) = [branch for name, branch in tree.children.items() if name == "Llama"]
    layers = llama.children["layers"].children["[0-2]"]
    assert layers.count == 3 and layers.path == "Llama.layers.[0-2]"
    assert set(layers.children) == {"first", "attention", "second", "feed"}
    inside = sum(each.total.time for each in layers.children.values()) + sum(each.time for each in layers.ops.values())
    assert layers.total.time == pytest.approx(inside)


def test_links_tell_what_each_axis_carries(run):
    for axis, load in run.links.items():
        moved = [each for node in run.nodes for each in node.collectives if each.axis == axis]
        assert load.collectives == len(moved) and load.bytes == sum(each.bytes for each in moved)
        assert load.devices == {"dp": 2, "tp": 4}[axis] and load.used == pytest.approx(load.seconds / run.time)
        assert sum(load.kinds.values()) == load.bytes
    assert sum(load.exposed for load in run.links.values()) == pytest.approx(run.timing.exposed)


def test_the_bounds_add_up_to_the_time(run):
    assert sum(run.bounds.values()) == pytest.approx(run.time)
    assert set(run.bounds) == {"arithmetic", "memory traffic", "waits for dp", "waits for tp"}
    assert sum(run.bounds[name] for name in ("arithmetic", "memory traffic")) == pytest.approx(run.timing.compute)


def test_a_large_product_is_bound_by_arithmetic_and_a_sum_by_traffic():
    x = loom.empty(4096, 4096, mesh=loom.open_mesh((2,)), placements="R", device="meta", dtype=torch.bfloat16)
    for program, bound in ((lambda: x @ x, "arithmetic"), (lambda: x + x, "memory traffic")):
        with loom.dry_run("t3000") as found:
            program()
        assert next(iter(found.bounds)) == bound


def test_a_run_can_be_kept_in_a_file(run):
    again = pickle.loads(pickle.dumps(run))
    assert again.time == run.time and str(again) == str(run)
    assert again.log.events == run.log.events


def test_the_timeline_is_in_order_and_priced_by_the_cost_module(run):
    starts = [each.start for each in run.timeline]
    assert starts == sorted(starts) and max(each.end for each in run.timeline) == run.time
    machine = preset("galaxy").machine().on(run.graph.mesh)
    by_number = {node.number: node for node in run.nodes}
    moved = [each for each in run.timeline if each.stream == "communication" and "small" not in each.name]
    assert moved
    for each in moved:
        prices = [price(c, machine) for c in by_number[each.node].collectives if c.axis == each.axis]
        assert each.duration in prices
    busy = [each for each in run.timeline if each.stream == "compute"]
    assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(busy))


def test_each_axis_is_priced_on_its_own_links():
    mesh = loom.open_mesh((16, 8), axes=("host", "chip"))
    x = loom.empty(1 << 14, 1 << 12, mesh=mesh, placements="S(0), S(1)", device="meta")
    with loom.dry_run("nvlink8x16", memory=math.inf) as run:
        x.redistribute("R, S(1)")
        x.redistribute("S(0), R")
    assert run.links["host"].seconds / run.links["host"].bytes > 3 * run.links["chip"].seconds / run.links["chip"].bytes
    assert "switch of 16" in run.links["host"].links and "switch of 8" in run.links["chip"].links


def test_memory_over_time_reaches_the_peak(run):
    points = run.memory.timeline
    assert max(point.bytes for point in points) == run.memory.peak
    assert all(sum(point.held) == point.bytes for point in points)
    times = [point.time for point in points]
    assert times == sorted(times) and len(points) == len(run.nodes)
    assert sum(run.memory.at_peak.values()) == run.memory.peak == sum(each.bytes for each in run.memory.alive)


def test_overlap_can_be_turned_off():
    step = make_step(TINY)
    found = []
    for overlap in (True, False):
        with loom.dry_run("galaxy", overlap=overlap) as run:
            step()
        found.append(run)
    beside, alone = found
    assert alone.time == pytest.approx(alone.timing.compute + alone.timing.communication)
    assert beside.timing.compute == pytest.approx(alone.timing.compute)
    assert beside.time < alone.time


def test_the_machine_decides_the_time_and_not_the_bytes():
    found = {}
    for name in ("galaxy", "nvlink8", SECONDS):
        with loom.dry_run(name, memory=math.inf) as run:
            make_step(TINY)()
        found[run.machine.name] = run
    assert len({run.time for run in found.values()}) == 3
    assert len({run.bytes for run in found.values()}) == len({run.flops for run in found.values()}) == 1


def test_a_machine_without_fused_attention_keeps_the_scores():
    sizes = Sizes(width=64, hidden=64, heads=4, groups=4, vocabulary=64, layers=2, dp=1, tp=2, rows=1, length=256)
    kept = []
    for fused in (True, False):
        with loom.dry_run("galaxy", fused_attention=fused) as run:
            make_step(sizes, dtype=torch.float32)()
        kept.append(run.memory.peaks["activations"])
        (told,) = (each for each in run.assumptions if each.what == "attention without data")
        assert ("fused kernel" in told.value) is fused
    scores = 4 * sizes.heads // sizes.tp * sizes.length**2  # bytes of one layer's on one device
    assert kept[1] - kept[0] == pytest.approx(sizes.layers * scores, rel=0.01)


def test_without_a_machine_it_is_the_one_in_use():
    x = loom.ones(4, mesh=loom.open_mesh((2,)))
    with loom.use_machine(SECONDS), loom.dry_run() as run:
        x.sum()
    assert run.machine is SECONDS


def test_a_step_that_does_not_fit_is_an_error_and_the_run_can_still_be_read():
    step = make_step(TINY)
    with pytest.raises(loom.OutOfMemoryError) as caught, loom.dry_run("galaxy", memory=1000) as run:
        step()
    text = str(caught.value)
    assert text.startswith(f"one device needs {run.memory.peak / 1e3:.0f} KB and has 1.00 KB: ")
    assert "llama.py:" in text and "Llama." in text and "fix" in text
    assert run.memory.peak > 1000 and run.time > 0


def test_a_preset_has_its_own_limit():
    with pytest.raises(loom.OutOfMemoryError, match=r"has 12\.0 GB"), loom.dry_run("galaxy"):
        make_step(Sizes(**LARGE_70B, layers=8, dp=2, tp=2))()


def test_an_error_inside_is_the_error_outside():
    with pytest.raises(ZeroDivisionError), loom.dry_run("galaxy", memory=1):
        make_step(TINY)()
        1 / 0  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"machine": "galaxi"}, "did you mean 'galaxy'"),
        ({"machine": 3}, "is no machine"),
        ({"memory": "12 GB"}, "is of type str"),
    ],
)
def test_wrong_arguments_are_told(arguments, message):
    with pytest.raises(loom.MeshloomError, match=message), loom.dry_run(**arguments):
        pass


def test_answers_come_when_the_block_has_ended():
    with loom.dry_run() as run, pytest.raises(loom.UnsupportedError, match="when its block has ended"):
        run.time  # noqa: B018
    assert run.time == 0 and run.memory.peak == 0 and run.table("module").rows == () and "0 calls" in str(run)


def test_a_table_that_is_not_there_names_those_that_are(run):
    with pytest.raises(loom.ArgumentError, match="did you mean 'module'"):
        run.table("modul")
    assert all(len(run.table(by)) for by in TABLES)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"memory": -1}, "memory=-1 is no memory"),
        ({"memory": math.nan}, "memory=nan is no memory"),
        ({"overlap": "no"}, "overlap='no' is of type str"),
        ({"fused_attention": None}, "fused_attention=None is of type NoneType"),
    ],
)
def test_an_argument_that_means_nothing_is_refused_before_the_step(given, said):
    with pytest.raises(loom.ArgumentError, match=said), loom.dry_run("galaxy", **given):
        pytest.fail("the block ran")


def test_a_line_of_a_table_by_its_name(run):
    table = run.table("phase")
    assert table["backward"].calls == len([node for node in run.nodes if node.phase == "backward"])
    assert [row.name for row in table] == ["forward", "backward", "optimizer"]
    with pytest.raises(loom.BoundsError, match="did you mean 'backward'"):
        table["backwards"]


def test_two_runs_side_by_side():
    runs = []
    for tp in (2, 4):
        sizes = Sizes(**{**vars(TINY), "tp": tp, "dp": 8 // tp})
        with loom.dry_run("galaxy") as run:
            make_step(sizes)()
        runs.append(run)
    rows = {name: (first, second) for name, first, second in runs[0].compare(runs[1]).rows}
    assert rows["time s"] == (runs[0].time, runs[1].time)
    assert rows["memory bytes"] == (runs[0].memory.peak, runs[1].memory.peak)
    assert rows["devices"] == (8, 8)
    assert rows["tp bytes"] == (runs[0].links["tp"].bytes, runs[1].links["tp"].bytes)
    assert "second/first" in str(runs[0].compare(runs[1]))
    with pytest.raises(loom.ArgumentError, match="takes another dry run"):
        runs[0].compare("x")


def test_the_page_has_the_totals_first_and_fits_on_one(run):
    lines = str(run).splitlines()
    assert lines[0].endswith("8 devices of galaxy, without data")
    assert [line.split()[0] for line in lines[1:7]] == ["time", "bound", "MFU", "memory", "tp", "dp"]
    assert len(lines) <= 40 and max(map(len, lines)) < 240


def test_every_figure_has_a_source(run):
    assert len(run.assumptions) > 8
    assert all(each.what and each.value and each.source for each in run.assumptions)


def test_with_data_it_runs_and_the_values_are_those_of_a_run_without_it():
    torch.manual_seed(0)
    steps = [make_step(TINY, "cpu", torch.float32) for _ in range(2)]
    steps[1].model.load_state_dict(steps[0].model.state_dict())
    with loom.dry_run("galaxy") as run:
        steps[0]()
    steps[1]()
    for one, other in zip(steps[0].model.parameters(), steps[1].model.parameters(), strict=True):
        torch.testing.assert_close(one.to_torch(), other.to_torch(), rtol=0, atol=0)
    assert run.graph.has_data


def test_explain_of_a_whole_step_is_a_page_and_the_rest_on_request():
    found = loom.explain(make_step(Sizes(**{**vars(TINY), "layers": 12})))
    assert len(str(found).splitlines()) < 60 < len(found.brief.splitlines()) < len(found.full.splitlines())
    assert str(found).startswith(f"{len(found.log.calls)} calls, {len(found.events)} collectives, {found.bytes} B")


def test_explain_of_a_few_calls_is_as_long_as_ever():
    x = loom.ones(8, 8, mesh=loom.open_mesh((4,)), placements="S(1)")
    found = loom.explain(lambda: (x + 1).sum(1))
    assert str(found) == found.full and "chosen" in str(found)


def public_llama(layers: int, mesh: loom.Mesh):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=96, max_position_embeddings=64,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    rows = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}
    for name, parameter in list(model.named_parameters()):
        path, _, which = name.rpartition(".")
        dim = rows.get(path.rpartition(".")[2])
        placements = {} if dim is None else {"tp": Shard(dim)}
        setattr(model.get_submodule(path), which, loom.Parameter(parameter.detach(), mesh, placements))
    return model


def test_an_unmodified_public_llama_built_without_data():
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    model = public_llama(3, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = loom.distribute(torch.zeros(4, 16, dtype=torch.long), mesh, {"dp": Shard(0)})

    def step():
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()

    with loom.dry_run("galaxy") as run:
        step()
    expected = sum(parameter.topology.local_bytes for parameter in model.parameters())
    held = run.memory.peaks
    assert held["parameters"] == held["gradients"] == expected and held["optimizer state"] == 2 * expected
    names = [row.name for row in run.table("module").rows]
    assert "LlamaForCausalLM.model.layers.[0-2].mlp.down_proj" in names
    kernels = [k for n in run.nodes if n.op == "scaled_dot_product_attention" for k in n.kernels]
    assert len(kernels) == 2 * 3  # fused, forward and backward: no mask was made
    weights = 3 * (4 * 64 * 64 + 3 * 64 * 96) + 64 * 96
    attention = 3 * 4 * 4 * 16 * 16 * 64
    assert run.flops == 3 * 2 * weights * 4 * 16 + 3.5 * attention


def test_a_public_llama_can_be_explained_on_data_too():
    mesh = loom.open_mesh((2, 4), axes=("dp", "tp"))
    model = public_llama(1, mesh)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            made = loom.Parameter(torch.randn(parameter.shape), mesh, parameter.placements)
            setattr(module, name, made)
    tokens = loom.distribute(torch.zeros(4, 16, dtype=torch.long), mesh, {"dp": Shard(0)})
    model.model.rotary_emb.to_empty(device="cpu")
    found = loom.explain(lambda: model(input_ids=tokens, use_cache=False).logits)
    assert found.bytes > 0


def test_the_time_it_takes_does_not_grow_with_the_devices():
    """By what is done, not by a clock: as many prices are asked for on 16,384 devices as on 32."""
    counts = []
    for dp in (4, 2048):
        with loom.dry_run("galaxy", memory=math.inf) as run:
            make_step(Sizes(**LARGE_70B, layers=1, dp=dp, tp=8, length=128))()
        counts.append((len(run.nodes), len(run.timeline), len(run.graph.storages), run.graph.kernels))
    assert counts[0] == counts[1]


def test_stages_of_a_pipeline_are_classes_of_devices_of_their_own():
    whole = loom.open_mesh((2, 4), axes=("pp", "dp"))
    stages = [whole.submesh(pp=i) for i in range(2)]
    weights = [loom.Parameter(torch.empty(256, 256, device="meta"), stage) for stage in stages]
    x = loom.empty(64, 256, mesh=stages[0], placements="S(0)", device="meta")

    def step():
        hidden = F.linear(x, weights[0]).to_torch()
        F.linear(loom.distribute(hidden, stages[1], "S(0)"), weights[1])

    with loom.dry_run(SECONDS, memory=math.inf) as run:
        step()
    assert [(each.devices, each.meshes) for each in run.graph.classes] == [(4, (0,)), (4, (1,))]
    assert run.graph.devices == 8
    first, second = (node for node in run.nodes if node.op == "linear")
    assert (first.mesh, second.mesh) == (0, 1)
    starts = {each.node: each.start for each in run.timeline if each.stream == "compute"}
    assert starts[second.number] >= starts[first.number] + first.flops  # it waits for what the first stage gives
    assert run.timing.compute == pytest.approx(first.flops)
    assert run.memory.peaks["parameters"] == 256 * 256 * 4  # of one stage


def test_cross_entropy_of_a_micro_batch_loop_is_summed_once():
    mesh = loom.open_mesh((2,), axes=("dp",))
    weight = loom.Parameter(torch.randn(8, 8), mesh)
    batches = [loom.ones(4, 8, mesh=mesh, placements="S(0)") for _ in range(3)]
    with loom.dry_run("galaxy") as run:
        with loom.accumulate():
            for x in batches[:-1]:
                F.linear(x, weight).square().sum().backward()
        F.linear(batches[-1], weight).square().sum().backward()
    assert len([node for node in run.nodes if node.is_gradient_sum]) == 1
    assert run.memory.peaks["gradients"] == 8 * 8 * 4


def test_processes_that_split_the_mesh_say_the_same_as_one():
    alone = summarise_step(TINY)
    for found in (*ranks.run(2, "llama:summarise_steps", TINY), *ranks.run(4, "llama:summarise_steps", TINY)):
        assert found.pop("activations") == pytest.approx(alone["activations"], rel=0.05)  # losses keep other statistics
        assert found == {name: value for name, value in alone.items() if name != "activations"}


def allocated_at_most(step) -> int:
    """The most that torch's allocator has given out during a step, beyond what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    changes = [each.nbytes() for each in sorted(events, key=lambda each: each.start_ns())]
    return max(itertools.accumulate(changes))


def test_the_peak_on_one_device_is_what_torch_allocates_for_the_dense_step():
    sizes = Sizes(width=128, hidden=192, heads=4, groups=4, vocabulary=256, layers=3, dp=1, tp=1, rows=2, length=64)
    model = Llama(sizes)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(sizes.tokens).reshape(-1, sizes.length) % sizes.vocabulary
    dense = partial(train, model, optimizer, tokens)
    dense()  # the optimizer's state is there afterwards
    step = make_step(sizes, "cpu", torch.float32)
    step()
    with loom.dry_run("galaxy") as run:
        step()
    before = sum(each.bytes for each in run.graph.storages if each.made < 0)
    assert run.memory.peak - before == allocated_at_most(dense)
