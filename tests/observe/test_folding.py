"""Equal layers are one line; layers that differ in anything stay apart."""

from __future__ import annotations

from meshloom.observe.folding import Folding
from step_graphs import node


def layers(*does: str):
    """A node or two for each layer, which does what the text says."""
    return [node(0, op=op, where="model.py:1", module=f"M.layers.{i}.inner") for i, op in enumerate(does)]


def folded(nodes):
    folding = Folding(nodes)
    return list(dict.fromkeys(folding.path(each.module) for each in nodes))


def test_equal_layers_are_one():
    assert folded(layers("a", "a", "a")) == ["M.layers.[0-2].inner"]


def test_layers_that_do_other_things_stay_apart():
    assert folded(layers("a", "b", "a", "a")) == ["M.layers.[0,2-3].inner", "M.layers.1.inner"]


def test_layers_that_do_it_at_other_prices_or_in_other_phases_stay_apart():
    nodes = layers("a", "a", "a")
    dear = node(0, 5.0, op="a", where="model.py:1", module="M.layers.3.inner")
    late = node(0, op="a", where="model.py:1", module="M.layers.4.inner", phase="backward")
    assert folded([*nodes, dear, late]) == ["M.layers.[0-2].inner", "M.layers.3.inner", "M.layers.4.inner"]


def test_layers_inside_of_layers_fold_too():
    nodes = [
        node(0, op="a", where="model.py:1", module=f"M.layers.{i}.experts.{j}") for i in range(3) for j in range(4)
    ]
    assert folded(nodes) == ["M.layers.[0-2].experts.[0-3]"]


def test_a_path_without_an_index_stays():
    assert folded([node(0, module="M.norm"), node(1, module="")]) == ["M.norm", ""]
