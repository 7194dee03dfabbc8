"""Opening a card: fast dispatch, unless TT_USB says otherwise."""

from __future__ import annotations

import os
import time

from codegen import CkernelConfig, CompiledKernel, Compiler
from device_dispatch import ArgGen, DataflowLaunch, Program
from device_runtime import CommonDevice, TileGrid

__all__ = ["ArgGen", "CkernelConfig", "CompiledKernel", "Compiler", "DataflowLaunch", "Program", "TileGrid"]


class SlowDevice(CommonDevice):
    """Every command is done when the call returns."""

    def __init__(self, device: int = 0, enable_sysmem: bool = False, init_core_plans: bool = True) -> None:
        super().__init__(device)

    def _enqueue(self, command) -> None:
        self._commands.append(command)
        self.sync()

    def run(self, program: Program, timing: bool = False, wait: bool = True) -> tuple[float, float]:
        """Run a program to its end."""
        began = time.perf_counter()
        stream = self._stream(program)
        self._enqueue(lambda: self._cores.run(stream))
        return time.perf_counter() - began, 0.0


class FastDevice(CommonDevice):
    """Commands are queued; they run when somebody waits."""

    is_fast = True

    def run(self, program: Program, timing: bool = False, wait: bool = False) -> tuple[float, float]:
        """Queue a program."""
        began = time.perf_counter()
        stream = self._stream(program)
        self._enqueue(lambda: self._cores.run(stream))
        if wait or timing:
            self.sync()
        return time.perf_counter() - began, 0.0


class Device:
    """The device of a number."""

    def __new__(cls, device: int = 0) -> CommonDevice:
        return SlowDevice(device) if os.environ.get("TT_USB") == "1" else FastDevice(device)
