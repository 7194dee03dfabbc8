"""What one device holds of arrays inside of calls, against the topologies that their gradients must have."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

import meshloom as loom
from meshloom import Replicate, Shard, Topology
from meshloom.mesh import Mesh
from meshloom.tensor.layouts import Layout, infer_share, layout_of

MESH = Mesh(dp=2, tp=4)
PLACEMENTS = st.tuples(*[st.sampled_from([Replicate(), Shard(0), Shard(1)])] * 2)


@settings(max_examples=60, deadline=None)
@given(rows=st.sampled_from([8, 16, 24]), inner=st.sampled_from([32, 40]), columns=st.sampled_from([56, 64]),
       left=PLACEMENTS, right=PLACEMENTS)  # fmt: skip
def test_gradients_of_a_products_operands_are_shared_out_like_the_operands(rows, inner, columns, left, right):
    x, w = (
        loom.distribute(torch.ones(shape), MESH, placements).requires_grad_()
        for shape, placements in (((rows, inner), left), ((inner, columns), right))
    )
    with loom.record(step=True) as log:
        first, second = x * 2, w * 2  # no leaves: what is known of their gradients is inferred
        (first @ second).sum().backward()
    graph = log.graph()
    (backward,) = (n for n in graph.nodes if n.op == "matmul" and n.phase == "backward")
    made = {
        tuple(map(int, s.name[s.name.index("[") + 1 : -1].split(", "))): s.bytes
        for s in graph.storages
        if s.node == backward.number and s.held_for == "temporaries" and "(" not in s.name
    }
    # a gradient comes from a transposed product; autograd keeps it in the shape of its operand
    for tensor in (first, second):
        assert made[tuple(tensor.shape)] == tensor.topology.local_bytes


@given(st.lists(st.sampled_from([2, 3, 4, 6, 8]), min_size=1, max_size=3), PLACEMENTS)
def test_a_flattened_or_reordered_array_has_the_share_of_the_whole(shape, placements):
    placed = tuple(each if isinstance(each, Replicate) or each.dim < len(shape) else Replicate() for each in placements)
    layout = layout_of(Topology(MESH, placed, tuple(shape), "f32"))
    elements = 1
    for size in layout.stored:
        elements *= size
    assert infer_share((elements,), [layout]) == layout.share
    assert infer_share(tuple(reversed(layout.stored)), [layout]) == layout.share


def test_a_sum_over_a_dim_keeps_the_shares_of_the_others():
    x = Layout((8, 6, 4), (2, 6, 1))
    assert infer_share((8, 6), [x]) == 2 / 8
    assert infer_share((8, 1, 4), [x]) == 1 / 16
    assert infer_share((48,), [x]) == 1 / 4
    assert infer_share((5,), [x]) == 1.0


def test_without_anything_known_nothing_is_inferred():
    assert infer_share((4,), []) is None
