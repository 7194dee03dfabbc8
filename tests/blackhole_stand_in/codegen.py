"""The compiler: a kernel's source is its binary. Its cache on disk is written by a plain copy, with no lock."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from stand_in import MACHINE

HEAD, TAIL = b"\x7fELF", b"\x00END"


@dataclass(frozen=True)
class CkernelConfig:
    """How compute kernels are compiled."""

    fidelity: str = "hifi2"


@dataclass(frozen=True)
class CompiledKernel:
    """A binary for one processor of a core."""

    elf: bytes
    processor: str

    def source(self) -> str:
        """What the core runs; half a binary runs nothing."""
        if not (self.elf.startswith(HEAD) and self.elf.endswith(TAIL)):
            raise RuntimeError("bad ELF: it was cut off")
        return self.elf[len(HEAD) : -len(TAIL)].decode()


class Compiler:
    """Compiles sources. `compiled` counts how many."""

    compiled = 0

    def __init__(self, ckernel: CkernelConfig | None = None) -> None:
        self.ckernel = ckernel or CkernelConfig()

    def compile_dataflow(self, src: str, processor: str, noc_index: int | None = None) -> CompiledKernel:
        """A kernel that moves data."""
        assert processor in ("brisc", "ncrisc"), f"no processor {processor!r}"
        return self._compile(src, processor)

    def compile_compute(self, src: str) -> tuple[CompiledKernel, CompiledKernel, CompiledKernel]:
        """A kernel that computes, for the three processors that do."""
        return tuple(self._compile(src, processor) for processor in ("trisc0", "trisc1", "trisc2"))

    def _compile(self, src: str, processor: str) -> CompiledKernel:
        if "#error" in src:
            raise RuntimeError(f"compile failed: {src.splitlines()[0]}")
        name = hashlib.sha256(f"{processor}/{src}".encode()).hexdigest()[:16]
        kept = None if MACHINE.cache is None else Path(MACHINE.cache) / "kernels" / f"{processor}-{name}.elf"
        if kept is not None and kept.exists():
            return CompiledKernel(kept.read_bytes(), processor)
        Compiler.compiled += 1
        elf = HEAD + src.encode() + TAIL
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with kept.open("wb") as file:  # whoever looks now finds half of it
                file.write(elf[: len(elf) // 2])
                file.flush()
                time.sleep(0.02)
                file.write(elf[len(elf) // 2 :])
        return CompiledKernel(elf, processor)
