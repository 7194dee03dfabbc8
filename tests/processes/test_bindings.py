"""Ranks, hosts and devices as values: what is read from the environment and from files, printed, and refused."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from meshloom.errors import BindingError
from meshloom.processes.bindings import Binding, Bindings, from_environment, read_hosts, visible_devices
from meshloom.processes.rank_file import bindings_from, bindings_to, read_bindings, write_bindings

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
}

TWO_HOSTS = """
rank_bindings:
  - {rank: 0, mesh_id: 0, host: a, env_overrides: {TT_VISIBLE_DEVICES: "0,1"}}
  - {rank: 1, mesh_id: 0, host: a, env_overrides: {TT_VISIBLE_DEVICES: "2,3"}}
  - {rank: 2, mesh_id: 0, host: b, visible_devices: [0, 1], env_overrides: {DEBUG: on, OMP_NUM_THREADS: 4}}
  - {rank: 3, mesh_id: 0, host: b, visible_devices: [2, 3]}
"""

TABLE = """
rank  local rank  host  mesh  host rank  devices  environment
0     0           a     0     0          0,1      -
1     1           a     0     1          2,3      -
2     0           b     0     2          0,1      DEBUG=on OMP_NUM_THREADS=4
3     1           b     0     3          2,3      -
""".strip()


def test_row_54_the_bindings_of_two_hosts_are_checked_and_print_as_a_table():
    found = bindings_from(TWO_HOSTS)
    assert str(found) == TABLE
    assert found.hosts == (("a", 2), ("b", 2))
    assert [(row.rank, row.local_rank, row.host, row.host_rank) for row in found] == [
        (0, 0, "a", 0),
        (1, 1, "a", 1),
        (2, 0, "b", 2),
        (3, 1, "b", 3),
    ]
    with pytest.raises(BindingError, match="device 1 of host 'b' is seen by rank 2 and by rank 3"):
        bindings_from(TWO_HOSTS.replace("[2, 3]", "[1, 3]"))
    with pytest.raises(BindingError, match="the ranks of host 'a' do not follow each other"):
        bindings_from(TWO_HOSTS.replace("rank: 1,", "rank: 9,").replace("rank: 2,", "rank: 1,").replace("9", "2"))


def test_row_54_every_process_of_two_hosts_reads_its_own_row_back():
    for row in bindings_from(TWO_HOSTS):
        told = {**row.environment(), "RANK": str(row.rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(row.local_rank)}
        told |= {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
        read = from_environment(told)
        assert (read.rank, read.local_rank, read.mesh_id, read.host_rank, read.visible, read.world_size) == (
            *(row.rank, row.local_rank, row.mesh_id, row.host_rank, row.visible),
            4,
        )
        assert {name: told[name] for name, _ in row.overrides} == dict(row.overrides)


def test_a_process_alone_is_rank_0_of_1_and_sees_everything():
    found = from_environment({})
    assert (found.rank, found.world_size, found.mesh_id, found.host_rank, found.visible) == (0, 1, None, None, None)
    assert from_environment({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}).world_size == 1  # an address binds nobody


def test_torchruns_variables_are_read():
    found = from_environment(TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank) == (3, 8, 1)
    least = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    assert from_environment(least).local_rank == 3  # without local ranks there is one host


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"])
def test_a_half_set_environment_is_refused_with_what_is_missing(missing):
    half = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(BindingError, match=rf"by halves: {missing} not set") as caught:
        from_environment(half)
    assert "GROUP_RANK=1" in str(caught.value) and "meshloom run" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"RANK": "8"}, "RANK 8 is out of range for 8"),
        ({"RANK": "-1"}, "RANK='-1' is not a number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK 2 is out of range for 2"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is more than WORLD_SIZE=8"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT 70000 is out of range"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
        ({"TT_VISIBLE_DEVICES": "0,x"}, "TT_VISIBLE_DEVICES='0,x' is not a list of device ids"),
        ({"TT_VISIBLE_DEVICES": "1,1"}, "TT_VISIBLE_DEVICES names device 1 twice"),
        ({"TT_MESH_ID": "x"}, "TT_MESH_ID='x' is not a number"),
        ({"TT_MESH_HOST_RANK": "1"}, "TT_MESH_HOST_RANK=1 is set without a mesh id"),
    ],
)
def test_a_wrong_value_is_refused_by_name(change, says):
    with pytest.raises(BindingError, match=says):
        from_environment({**TORCHRUN, **change})


@pytest.mark.parametrize(
    ("ours", "theirs", "value", "name"),
    [
        ("MESHLOOM_VISIBLE_DEVICES", "TT_VISIBLE_DEVICES", "2,3", "visible"),
        ("MESHLOOM_MESH_ID", "TT_MESH_ID", "1", "mesh_id"),
        ("MESHLOOM_HOST_RANK", "TT_MESH_HOST_RANK", "2", "host_rank"),
    ],
)
def test_our_variables_and_tt_metals_mean_the_same_and_must_agree(ours, theirs, value, name):
    base = {"TT_MESH_ID": "1"} if name == "host_rank" else {}
    readings = [
        from_environment({**base, **each})
        for each in ({ours: value}, {theirs: value}, dict.fromkeys((ours, theirs), value))
    ]
    assert len({getattr(each, name) for each in readings}) == 1 and getattr(readings[0], name) is not None
    with pytest.raises(BindingError, match=f"differ: {ours}={value}, {theirs}=0"):
        from_environment({**base, ours: value, theirs: "0"})


def test_visible_devices_may_be_none_at_all():
    assert visible_devices({"TT_VISIBLE_DEVICES": ""}) == ()
    assert visible_devices({}) is None


def test_a_host_rank_may_stay_unset_and_is_then_counted():
    found = bindings_from("rank_bindings: [{rank: 1, mesh_id: 5}, {rank: 0, mesh_id: 2}, {rank: 2, mesh_id: 5}]")
    assert [(row.mesh_id, row.host_rank) for row in found] == [(2, 0), (5, 0), (5, 1)]


@pytest.mark.parametrize(
    ("text", "says", "line"),
    [
        ("rank_bindings:\n- rank: 0\n- rank: 0", "rank 0 is bound twice", None),
        ("rank_bindings:\n- rank: 0\n- rank: 2", "rank 1 is missing", None),
        ("rank_bindings:\n- rank: 0\n  mesh: 1", "unknown key 'mesh'", 3),
        ("rank_bindings:\n- rank: 0\n  rank: 1", "the key 'rank' twice", 3),
        ("rank_bindings:\n- rank: 0\n  env_overrides:\n    A: 1\n    A: 2", "the key 'A' twice", 5),
        ("rank_bindings:\n- rank: zero", "'zero' is not a number", 2),
        ("rank_bindings:\n- rank: -1", "'-1' is not a number", 2),
        ("rank_bindings:\n- mesh_id: 0", "has no 'rank'", 2),
        ("rank_bindings:\n- rank: 0\n  mesh_host_rank: 0", "host rank 0 but no mesh id", 2),
        ("rank_bindings:\n- {rank: 0, mesh_id: 0}\n- {rank: 1}", "rank 1 has no mesh id while others do", None),
        (
            "rank_bindings:\n- {rank: 0, mesh_id: 0, mesh_host_rank: 0}\n- {rank: 1, mesh_id: 0}",
            "some ranks of mesh 0 have a host rank and some have none",
            None,
        ),
        (
            "rank_bindings:\n- {rank: 0, mesh_id: 0, mesh_host_rank: 0}\n- {rank: 1, mesh_id: 0, mesh_host_rank: 2}",
            "host rank 1 is missing in mesh 0",
            None,
        ),
        ("rank_bindings:\n- rank: 0\n  env_overrides: {RANK: 1}", "overrides RANK, which the launcher sets", 2),
        ("rank_bindings:\n- rank: 0\n  visible_devices: 0;1", "is not a list of device ids", 3),
        (
            "rank_bindings:\n- {rank: 0, visible_devices: [0], env_overrides: {TT_VISIBLE_DEVICES: 1}}",
            "rank 0 sees different devices",
            2,
        ),
        ("rank_bindings: 3", "rank_bindings is not a list", 1),
        ("rank_bindings: []", "there are no ranks", None),
        ("ranks: []", "unknown key 'ranks'", 1),
        ("", "is not a mapping", 1),
        ("rank_bindings: [", "is not YAML", None),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(text, says, line):
    with pytest.raises(BindingError) as caught:
        bindings_from(text, "ranks.yaml")
    told = str(caught.value)
    assert says in told and "ranks.yaml" in told
    assert line is None or caught.value.details["line"] == line


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BindingError, match=r"nothing\.yaml cannot be read"):
        read_bindings(tmp_path / "nothing.yaml")


def test_a_tt_metal_file_is_taken_as_it_is():
    found = bindings_from(
        "rank_bindings:\n"
        "  - {rank: 0, mesh_id: 0, mesh_host_rank: 0, env_overrides: {TT_VISIBLE_DEVICES: '0'}}\n"
        "  - {rank: 1, mesh_id: 0, mesh_host_rank: 1, env_overrides: {TT_VISIBLE_DEVICES: '1'}}\n"
        "mesh_graph_desc_path: graph.textproto\n"
    )
    assert found[1].environment() == {
        **dict.fromkeys(("TT_VISIBLE_DEVICES", "MESHLOOM_VISIBLE_DEVICES"), "1"),
        **dict.fromkeys(("TT_MESH_ID", "MESHLOOM_MESH_ID"), "0"),
        **dict.fromkeys(("TT_MESH_HOST_RANK", "MESHLOOM_HOST_RANK"), "1"),
        "TT_MESH_GRAPH_DESC_PATH": "graph.textproto",
    }


def test_what_is_written_is_read_back_the_same(tmp_path):
    found = bindings_from(TWO_HOSTS)
    write_bindings(found, tmp_path / "ranks.yaml")
    assert read_bindings(tmp_path / "ranks.yaml") == found
    assert eval(repr(found), {"Bindings": Bindings, "Binding": Binding}) == found
    assert pickle.loads(pickle.dumps(found)) == found and hash(found) == hash(bindings_from(TWO_HOSTS))


VALUES = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\r\n\x85\u2028\u2029", exclude_categories=["Cs", "Cc"])
)
NAMES = st.from_regex(r"\A[A-Z_]{1,8}\Z").filter(lambda name: not name.startswith(("RANK", "TT_", "MESHLOOM_")))


@given(st.lists(st.tuples(st.booleans(), st.dictionaries(NAMES, VALUES, max_size=2)), min_size=1, max_size=6))
def test_any_bindings_survive_their_file(drawn):
    hosts = sorted(second for second, _ in drawn)
    rows = [
        Binding(
            rank,
            rank - hosts.index(second),
            "b" if second else "a",
            0,
            rank,
            (rank,),
            tuple(sorted(names.items())),
            len(drawn),
        )
        for rank, (second, (_, names)) in enumerate(zip(hosts, drawn, strict=True))
    ]
    found = Bindings.of(rows)
    assert bindings_from(bindings_to(found)) == found


@pytest.mark.parametrize("text", ["[" * 3000, "{a: " * 3000, "- " * 3000 + "a", "rank_bindings: " + "[" * 3000])
def test_nesting_without_end_is_refused_before_it_is_read(text):
    with pytest.raises(BindingError, match="nest deeper than 16"):
        bindings_from(text)


def test_hosts_are_read_from_text():
    assert read_hosts("a:4, b.c:2") == (("a", 4), ("b.c", 2))
    assert Bindings.on(read_hosts("a:2,b:1"))[2] == Binding(2, 0, "b", world_size=3)
    for text, says in [
        ("a", "'a' is not a host"),
        ("a:0", "'a:0'"),
        ("a:1,a:2", "'a' is named twice"),
        ("", "''"),
        (":3", "':3'"),
    ]:
        with pytest.raises(BindingError, match=says):
            read_hosts(text)


def test_bound_ranks_are_placed_on_hosts():
    found = bindings_from("rank_bindings: [{rank: 0}, {rank: 1}, {rank: 2}]").placed(read_hosts("a:2,b:1"))
    assert found == Bindings.on([("a", 2), ("b", 1)])
    assert found.placed([("a", 2), ("b", 1)]) == found
    with pytest.raises(BindingError, match="bound to a:2,b:1, not to a:1,b:2"):
        found.placed([("a", 1), ("b", 2)])
    with pytest.raises(BindingError, match="3 ranks are bound"):
        bindings_from("rank_bindings: [{rank: 0}, {rank: 1}, {rank: 2}]").placed([("a", 2)])


def test_a_rank_that_is_not_bound_is_an_error():
    with pytest.raises(BindingError, match="rank 4 is not bound"):
        bindings_from(TWO_HOSTS)[4]


def test_the_modules_themselves_do_not_ask_for_torch():
    folder = Path(__file__).resolve().parents[2] / "src" / "meshloom" / "processes"
    program = (
        "import importlib.util, sys\n"
        "sys.modules['torch'] = None\n"  # an import of it fails
        "import types; sys.modules['meshloom.processes'] = room = types.ModuleType('meshloom.processes')\n"
        f"room.__path__ = [{str(folder)!r}]\n"
        "import meshloom.processes.bindings, meshloom.processes.discovery, meshloom.processes.rank_file\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
