"""Kernels compiled once: a binary by the fingerprint of the kernel's code, in memory or in a directory that is shared.

Without a directory the cache is this process's own. With one (an argument, MESHLOOM_CACHE, or a folder of ours in
TT_METAL_CACHE), processes share it: a
binary is written beside its place and renamed onto it, so that nobody ever reads half of one, and whoever finds a
broken one (its checksum tells) compiles again. Two that compile the same kernel at once write the same file twice.

A binary is code that will run here, so the directory must be this user's own: one that others own or can write to is
refused, and a file in it that others own or can write to is not read.

A binary of a virtual card is the kernel's code object; what it closes over stays with the kernel itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import stat
import tempfile
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshloom import settings
from meshloom.errors import ArgumentError, expect

VARIABLE, SHARED = "MESHLOOM_CACHE", "TT_METAL_CACHE"
FOLDER = "meshloom"  # ours in the folder that TT_METAL_CACHE names, in which others have theirs
_MAGIC = b"loom2\n"
_DIGEST = hashlib.sha256().digest_size
Kernel = Callable[..., Any]


def code_of(kernel: Kernel) -> types.CodeType:
    """The code of a kernel, or an error that says what a kernel is."""
    code = getattr(kernel, "__code__", None)
    if not isinstance(code, types.CodeType):
        raise ArgumentError(f"a kernel is a Python function, not {kernel!r}", fix="wrap it: def kernel(x, y): ...")
    return code


def fingerprint(kernel: Kernel) -> str:
    """A name for what a kernel does: equal for equal code, in every process.

    >>> fingerprint(lambda x: x + 1) == fingerprint(lambda x: x + 1), fingerprint(lambda x: x) == fingerprint(print_it)
    (True, False)
    """
    own = getattr(kernel, "fingerprint", None)
    if isinstance(own, str):  # a kernel in the language of a driver
        return own
    text = repr((importlib.util.MAGIC_NUMBER, _describe_code(code_of(kernel))))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def print_it(x: object) -> None:
    """A kernel for the example above."""
    print(x)


def _describe_code(code: types.CodeType) -> tuple[object, ...]:
    constants = tuple(_constant(each) for each in code.co_consts)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, constants, names, code.co_flags, code.co_argcount, code.co_kwonlyargcount


def _constant(value: object) -> Any:
    if isinstance(value, types.CodeType):
        return _describe_code(value)
    if isinstance(value, frozenset):  # its order differs between processes
        return "frozenset", sorted(map(repr, value))
    return type(value).__name__, repr(value)


def translate(kernel: Kernel) -> bytes:
    """A kernel as bytes."""
    return marshal.dumps(code_of(kernel))


def link(binary: bytes, kernel: Kernel) -> Kernel:
    """A function that runs the code of a binary, with the globals, defaults and closure of its kernel."""
    code: types.CodeType = marshal.loads(binary)
    made = types.FunctionType(code, kernel.__globals__, kernel.__name__, kernel.__defaults__, kernel.__closure__)
    made.__kwdefaults__ = kernel.__kwdefaults__
    return made


def seal(name: str, binary: bytes) -> bytes:
    """A binary with what it takes to notice that it is broken, or is another kernel's."""
    return _MAGIC + _digest(name, binary) + binary


def unseal(name: str, content: bytes) -> bytes | None:
    """The binary of a file's content; None if it is not whole, or not of that name.

    >>> kept = seal("a", b"code")
    >>> unseal("a", kept), unseal("a", kept[:-1]), unseal("b", kept)
    (b'code', None, None)
    """
    head = len(_MAGIC) + _DIGEST
    binary = content[head:]
    return binary if content[:head] == _MAGIC + _digest(name, binary) else None


def _digest(name: str, binary: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + binary).digest()


def is_own(found: os.stat_result) -> bool:
    """Whether nobody but this user can have written what is there."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _named_directory() -> str | None:
    """The directory that the environment names."""
    shared = settings.read(SHARED)
    return settings.read(VARIABLE) or (os.path.join(shared, FOLDER) if shared else None)


class CompileCache:
    """Binaries by fingerprint. `compiles` counts how many this process had to make, `hits` how many it found."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        named = directory if directory is not None else _named_directory()
        if named is not None:
            expect("cache", named, (str, os.PathLike), fix="give the path of a directory of your own")
        self.directory = None if named is None else Path(named)
        self.compiles = self.hits = 0
        self._known: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._check_owner()

    def binary(self, kernel: Kernel, compile: Callable[[Kernel], bytes], compiler: str = "") -> bytes:
        """The kernel's binary, compiled if nobody has; by a compiler of that name, where there are several."""
        name = fingerprint(kernel) + (f"-{compiler}" if compiler else "")
        with self._lock:
            found = self._known.get(name) or self._read(name)
            if found is None:
                self.compiles += 1
                found = compile(kernel)
                self._write(name, found)
            else:
                self.hits += 1
            self._known[name] = found
            return found

    def _check_owner(self) -> None:
        """An error if somebody else can put code into the directory."""
        if self.directory is None or not self.directory.exists():
            return
        found = self.directory.stat()
        if not is_own(found):
            raise ArgumentError(
                f"the kernel cache {self.directory} can be written by others, who could run code in this process",
                owner=f"user id {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o}; this is user id {os.geteuid()}",
                fix=f"chmod go-w {self.directory}, or name a directory of your own in {VARIABLE}",
            )

    def _read(self, name: str) -> bytes | None:
        if self.directory is None:
            return None
        self._check_owner()
        try:
            with (self.directory / name).open("rb") as file:
                return unseal(name, file.read()) if is_own(os.fstat(file.fileno())) else None
        except FileNotFoundError:
            return None

    def _write(self, name: str, binary: bytes) -> None:
        if self.directory is None:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_owner()
        handle, temporary = tempfile.mkstemp(dir=self.directory, prefix=f".{name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(seal(name, binary))
            os.replace(temporary, self.directory / name)
        except BaseException:
            os.unlink(temporary)
            raise
