"""Which module of a model is running, by its path from the module that the program called: `GPT.blocks.3.attention`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from meshloom.tensor.base import Tensor
from meshloom.tensor.kernel_work import address_of


class ModulePaths:
    """The stack of modules that are running, and the names of their parameters.

    `found` is told of every parameter of a model when the model is first called.
    """

    def __init__(self, found: Callable[[Tensor, str], None]) -> None:
        self.found = found
        self.paths: dict[int, str] = {}
        self.names: dict[int, str] = {}  # of parameters, by the address of their memory
        self.stack: list[str] = []

    @property
    def path(self) -> str:
        """The path of the module that is running; empty outside of modules."""
        return self.stack[-1] if self.stack else ""

    def name_of(self, tensor: Tensor) -> str:
        """The name of a parameter; empty for one that no module has."""
        return self.names.get(address_of(tensor._data), "")

    def enter(self, module: torch.nn.Module, *_: object) -> None:
        """A module is called."""
        if id(module) not in self.paths:
            self._read(module)
        self.stack.append(self.paths[id(module)])

    def leave(self, module: torch.nn.Module, *_: object) -> None:
        """It is done."""
        if self.stack:
            self.stack.pop()

    def _read(self, root: torch.nn.Module) -> None:
        start = f"{self.path}.{type(root).__name__}" if self.path else type(root).__name__
        for name, module in root.named_modules():
            self.paths.setdefault(id(module), f"{start}.{name}" if name else start)
        for name, parameter in root.named_parameters():
            if isinstance(parameter, Tensor):
                self.names.setdefault(address_of(parameter._data), f"{start}.{name}")
                self.found(parameter, f"{start}.{name}")
