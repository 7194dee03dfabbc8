"""Plans are values: they print, read back, compare, and say what they would do."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, strategies as st
from torch import nn

import meshloom as loom
from meshloom import Plan, Replicate, Shard
from refusals import refusal

AXES = st.dictionaries(st.sampled_from(["dp", "tp", "fsdp"]), st.integers(-3, 3).map(Shard), max_size=3)
KEPT = st.dictionaries(
    st.sampled_from(["dp", "tp"]), st.one_of(st.integers(-3, 3).map(Shard), st.just(Replicate())), max_size=2
)
PATTERNS = st.sampled_from(["**", "**.weight", "a.*.b", "layers.*.{q,k}_proj.weight", "x", "*.b?as", "üml.é"])
PLANS = st.builds(
    Plan,
    parameters=st.dictionaries(PATTERNS, AXES, max_size=5),
    batch=AXES,
    inputs=st.dictionaries(PATTERNS, KEPT, max_size=3),
    outputs=st.dictionaries(PATTERNS, KEPT, max_size=3),
    units=st.lists(PATTERNS, max_size=3),
    recompute=st.lists(PATTERNS, max_size=3),
)


@given(PLANS)
def test_a_plan_reads_back_from_every_form_that_it_has(plan):
    assert Plan.parse(str(plan)) == plan
    assert Plan.from_toml(plan.to_toml() + "\n") == plan
    assert eval(repr(plan)) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert copy.deepcopy(plan) == plan
    assert hash(Plan.parse(str(plan))) == hash(plan)


@given(PLANS, PLANS)
def test_plans_are_equal_only_if_they_print_the_same(one, other):
    assert (one == other) == (str(one) == str(other))


def test_the_order_of_lines_counts_and_that_of_axes_does_not():
    first, second = {"**.weight": "tp=S(0)"}, {"**": "dp=S(0)"}
    assert Plan({**first, **second}) != Plan({**second, **first})
    assert Plan(batch={"tp": Shard(1), "dp": Shard(0)}) == Plan(batch="dp=S(0), tp=S(1)")


def test_replicated_and_not_named_are_the_same_of_a_parameter_and_not_of_an_activation():
    assert Plan({"a": {"tp": Replicate()}}) == Plan({"a": "R"}) == Plan({"a": {}})
    assert Plan(outputs={"a": "tp=R"}) != Plan(outputs={"a": "R"})


def test_a_file_of_toml_is_read_by_its_path(tmp_path):
    plan = Plan({"**.weight": "tp=S(0)"}, batch="dp=S(0)", units=["layers.*"], outputs={"head": "tp=R"})
    file = tmp_path / "plan.toml"
    file.write_text(plan.to_toml())
    assert Plan.from_toml(file) == Plan.from_toml(str(file)) == plan
    assert file.read_text() == (
        'batch = "dp=S(0)"\nunits = ["layers.*"]\n\n[parameters]\n"**.weight" = "tp=S(0)"\n\n'
        '[outputs]\n"head" = "tp=R"\n'
    )


def test_toml_may_name_axes_one_by_one():
    text = '[batch]\ndp = "S(0)"\n[parameters]\n"**.weight" = { tp = "S(0)", dp = "S(1)" }\n'
    assert Plan.from_toml(text) == Plan({"**.weight": "dp=S(1), tp=S(0)"}, batch="dp=S(0)")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Plan({"a": "S(0)"}), "'S(0)' does not say once for each axis where it goes\n  fix  name the axes: "),
        (lambda: Plan({"a": "tp=S(0), tp=S(1)"}), "'tp=S(0), tp=S(1)' does not say once for each axis"),
        (lambda: Plan({"a": "tp=X"}), "'X' is not a placement"),
        (lambda: Plan({"a": {"tp": loom.Partial()}}), "a plan cannot place anything as P(sum) on axis 'tp'"),
        (lambda: Plan({"a": {"tp": 0}}), "0 is not a placement"),
        (lambda: Plan({"a": {0: Shard(0)}}), "0 is no name of a mesh axis"),
        (lambda: Plan({"a b": "R"}), "'a b' is not a pattern of names"),
        (lambda: Plan({"{a": "R"}), "'{a' has a brace that is not closed"),
        (lambda: Plan(["a"]), "['a'] is no table"),
        (lambda: Plan({"a": 3}), "3 does not name mesh axes"),
        (lambda: Plan(units="layers.*"), "units='layers.*' is no list of patterns"),
        (lambda: Plan.parse("parameter a"), "line 1: 'parameter a' cannot be read\n  fix  write lines such as"),
        (lambda: Plan.parse("batch tp=S(0)\nunits a"), "line 2: 'units a' cannot be read\n  fix  did you mean 'unit'?"),
        (lambda: Plan.parse("parameter a tp=S(0)\nparameter a R"), "line 2: 'parameter a R' cannot be read"),
        (lambda: Plan.from_toml("a = 1"), "the text has a key 'a' that plans do not have\n  fix  "),
        (lambda: Plan.from_toml("units = 3"), "the text: units = 3 cannot be read\n  fix  units is a list of patterns"),
        (lambda: Plan.from_toml("a = = 1"), "the text is not TOML: "),
        (lambda: Plan.from_toml("nowhere.toml"), "nowhere.toml cannot be read: No such file or directory"),
    ],
)
def test_what_is_no_plan_is_refused(make, says):
    with pytest.raises(loom.MeshloomError) as caught:
        make()
    assert str(caught.value).startswith(says)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


def test_the_check_of_a_plan_prints_what_every_line_takes():
    plan = Plan(
        {"head.weight": "tp=S(0)", "layers.*.0.weight": "tp=S(0)", "layers.0.*.weight": "tp=S(1)", "**.0.weight": "R"},
        batch="dp=S(0)",
        outputs={"layers.*.2": "tp=S(0)"},
        units=["layers.*"],
        recompute=["layers.{0,1}"],
    )
    assert str(plan.check(Net())) == (
        "Net: 13 parameters, 5 on a line of the plan\n"
        "  batch                         dp=S(0)\n"
        "  parameter  head.weight        tp=S(0)  embedding.weight\n"
        "  parameter  layers.*.0.weight  tp=S(0)  layers.*.*.weight x3\n"
        "  parameter  layers.0.*.weight  tp=S(1)  layers.0.2.weight\n"
        "  parameter  **.0.weight        R        nothing: earlier lines took layers.*.*.weight x3\n"
        "  output     layers.*.2         tp=S(0)  layers.*.* x3\n"
        "  unit       layers.*                    layers.* x3\n"
        "  recompute  layers.{0,1}                layers.* x2\n"
        "  no line names these           R        layers.*.*.bias x6, layers.*.*.weight x2\n"
        "  tied                                   head.weight to embedding.weight"
    )


def test_the_check_is_a_value_with_every_placement():
    found = Plan({"**.0.weight": "tp=S(0)"}).check(Net())
    assert found.parameters["layers.2.0.weight"] == {"tp": Shard(0)}
    assert found.parameters["embedding.weight"] == {}
    assert set(found.parameters) == {name for name, _ in Net().named_parameters()}
    assert found.tied == {"head.weight": "embedding.weight"}
    assert hash(found) == hash(Plan({"**.0.weight": "tp=S(0)"}).check(Net()))


def test_a_line_that_fits_nothing_is_refused_with_the_nearest_names():
    assert refusal(lambda: Plan({"layers.*.0.weihgt": "tp=S(0)"}).check(Net()), loom.PlacementError) == (
        "the line 'layers.*.0.weihgt' fits no parameter\n"
        "  asked  tp=S(0)\n"
        "  fix    did you mean 'layers.*.*.weight'? known: 'embedding.weight', 'head.weight', 'layers.*.*.weight', "
        "'layers.*.*.bias'"
    )


@pytest.mark.parametrize("what", ["units", "recompute", "inputs", "outputs"])
def test_a_line_that_fits_no_module_is_refused(what):
    lines = {"leyers.*": "tp=S(0)"} if what.endswith("puts") else ["leyers.*"]
    with pytest.raises(loom.PlacementError, match=r"'leyers\.\*' fits no module\n  fix  did you mean 'layers\.\*'"):
        Plan(**{what: lines}).check(Net())


def test_a_dim_that_a_parameter_does_not_have_is_refused():
    assert refusal(lambda: Plan({"**": "tp=S(1)"}).check(Net()), loom.PlacementError) == (
        "the line '**' shards dim 1 of 'layers.0.0.bias', which has 1 dims\n"
        "  asked  tp=S(1)\n"
        "  shape  [8]\n"
        "  fix    write a line for it above: 'layers.0.0.bias': 'R'"
    )


@pytest.mark.parametrize(
    ("name", "fix"),
    [("layers.0.0.bias", "say S(0) or R"), ("layers.0.0.weight", "shard a dim from 0 to 1, or say 'R'")],
)
def test_a_line_of_one_parameter_is_corrected_and_needs_no_line_above(name, fix):
    told = refusal(lambda: Plan({name: "tp=S(2)"}).check(Net()), loom.PlacementError)
    assert told.endswith(f"\n  fix    {fix}")


def test_a_check_with_a_mesh_refuses_an_axis_that_the_mesh_lacks():
    plan = Plan({"**.weight": "model=S(0)"})
    plan.check(Net())
    told = refusal(lambda: plan.check(Net(), loom.Mesh(dp=2, tp=4)), loom.MeshError)
    assert told.startswith("the plan names a mesh axis 'model' that the mesh does not have\n  mesh  Mesh(dp=2, tp=4)")


def test_axes_can_be_renamed_everywhere():
    plan = Plan({"a": "tp=S(0)"}, batch="dp=S(0)", inputs={"b": "tp=R"}, outputs={"c": "tp=S(1)"})
    assert plan.axes == ("dp", "tp")
    assert plan.rename({"tp": "model"}).axes == ("dp", "model")
    assert plan.rename({"tp": "model"}).rename({"model": "tp"}) == plan


def test_with_a_mesh_the_check_notes_what_does_not_divide():
    class Attention(nn.Module):
        num_heads = 4

        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.o_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    plan = Plan({"q_proj.*": "tp=S(0)", "o_proj.weight": "tp=S(1)"}, batch="tp=S(0)")
    assert plan.check(Attention(), loom.Mesh(tp=4)).notes == plan.check(Attention()).notes == ()
    assert plan.check(Attention(), loom.Mesh(tp=3)).notes == (
        "8 over tp=3 does not divide, so some devices hold less: q_proj.weight, q_proj.bias, o_proj.weight",
        "4 heads do not divide over tp=3, so attention may move activations",
    )
    assert plan.check(Attention(), loom.Mesh(tp=8)).notes == (
        "4 heads do not divide over tp=8, so attention may move activations",
    )
    assert str(plan.check(Attention(), loom.Mesh(tp=8))).endswith(
        "\n  note: 4 heads do not divide over tp=8, so attention may move activations"
    )
