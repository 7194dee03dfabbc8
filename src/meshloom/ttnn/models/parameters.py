"""Trees of parameters: dictionaries whose items are attributes too, and lists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshloom.ttnn.dot_access import DotAccessDict

__all__: list[str] = []  # they are found in `ttnn.model_preprocessing`


class ParameterDict(DotAccessDict):
    """A dictionary of parameters whose items are attributes too.

    >>> tree = make_parameter_dict({"layer": {"weight": 1}, 0: {"bias": 2}})
    >>> tree.layer.weight, tree[0].bias
    (1, 2)
    """

    def __repr__(self) -> str:
        return _tree(self)


class ParameterList(list[Any]):
    """A list of parameters; `index in parameters` says whether there is one of that number."""

    def __contains__(self, index: object) -> bool:
        return isinstance(index, int) and 0 <= index < len(self)

    def __repr__(self) -> str:
        return _tree(self)


def make_parameter_dict(dictionary: Mapping[Any, Any]) -> ParameterDict:
    """A dictionary, and those inside of it, as parameters."""
    if isinstance(dictionary, ParameterDict):
        return dictionary
    pairs = dictionary.items()
    return ParameterDict({key: make_parameter_dict(each) if type(each) is dict else each for key, each in pairs})


def _tree(parameters: Any, depth: int = 0) -> str:
    """One line per parameter, those below a name indented."""
    pairs = parameters.items() if isinstance(parameters, Mapping) else enumerate(parameters)
    lines = []
    for key, value in pairs:
        below = isinstance(value, (ParameterDict, ParameterList))
        lines.append(f"{'  ' * depth}{key}:" + (f"\n{_tree(value, depth + 1)}" if below else f" {_leaf(value)}"))
    return "\n".join(lines) if lines else f"{'  ' * depth}{{}}"


def _leaf(value: object) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return repr(value) if shape is None else f"{type(value).__module__.partition('.')[0]}.Tensor {list(shape)} {dtype}"
