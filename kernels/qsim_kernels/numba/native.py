"""Functions compiled by Numba and kept as machine code in the user's cache folder, from which later processes load them without Numba.

Importing Numba takes ten times as long as loading machine code with llvmlite. Numba's own cache neither keeps processes from compiling the
same function at once, nor works where no folder can be written.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import platform
import sys
import threading
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from llvmlite import binding

from qsim_kernels.numba import cache

_ROOM = Path(__file__).parent
#: What the compiled functions are made of.
_SOURCES = (
    *sorted((_ROOM / "loops").glob("*.py")),
    *(_ROOM / name for name in ("building.py", "jobs.py")),
    *sorted((_ROOM.parent / "arithmetic").glob("*.py")),
    *(_ROOM.parent / "meanings" / name for name in ("binding.py", "numba.py")),
    *sorted((_ROOM.parent / "numbers").glob("*.py")),
)
_addresses: dict[str, int] = {}
_one_at_a_time = threading.RLock()


#: Earlier versions write LLVM's code in a form of their own.
OLDEST = 0, 65


def check_numba() -> None:
    """Raise an `ImportError` where functions cannot be compiled: an old Numba, one without its compiler or a private name."""
    if os.environ.get("NUMBA_DISABLE_JIT", "").strip() not in ("", "0"):
        raise ImportError("loops need Numba's compiler, and NUMBA_DISABLE_JIT is set")
    installed = version("numba")
    if tuple(map(int, installed.split(".")[:2])) < OLDEST:
        raise ImportError(f"loops need Numba {'.'.join(map(str, OLDEST))} or later, and {installed} is installed")
    kept = folder()
    if kept is None or not any(kept.glob("*.o")):
        importlib.import_module("numba")
        importlib.import_module("qsim_kernels.numba.loops.bits")  # private names


def _after_fork() -> None:
    """Another thread may have held the lock."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Native:
    """A function of 64-bit integers, many of them addresses, that is loaded or compiled on first use.

    Args:
        module: The module in `loops` that defines it.
        name: Its name there.
        arguments: The number of its arguments.
    """

    def __init__(self, module: str, name: str, arguments: int) -> None:
        self._module, self._name, self._arguments = module, name, arguments

    @property
    def address(self) -> int:
        """The address of its machine code, which compiled functions call."""
        symbol = f"qsim_{self._module}_{self._name}"
        with _one_at_a_time:
            if symbol not in _addresses:
                engine = _engine()
                engine.add_object_file(binding.ObjectFileRef.from_data(_machine_code(self._module, self._name, symbol)))
                engine.finalize_object()
                _addresses[symbol] = engine.get_function_address(symbol)
            return _addresses[symbol]

    @cached_property
    def run(self) -> Any:
        """The function for Python, which releases the GIL while it runs."""
        return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * self._arguments)(self.address)


def _machine_code(module: str, name: str, symbol: str) -> bytes:
    """An object file with a function, from the cache folder or compiled."""
    kept = folder()
    if kept is None:
        return _compiled(module, name, symbol)
    path = kept / f"{module}.{name}.o"
    if (code := cache.read(path)) is not None:
        return code
    with cache.locked(path.with_suffix(".lock")):
        if (code := cache.read(path)) is None:
            code = _compiled(module, name, symbol)
            cache.write(path, code)
        return code


def _compiled(module: str, name: str, symbol: str) -> bytes:
    from qsim_kernels.numba import building

    return building.machine_code(module, name, symbol, _machine())


@lru_cache(maxsize=1)
def folder() -> Path | None:
    """The cache folder for this machine's processor, these versions, and the present sources; None if no folder is safe."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES))
    cpu, features = processor()
    for part in (
        cpu,
        features,
        platform.machine(),
        sys.platform,
        sys.implementation.cache_tag,
        *map(version, ("numba", "llvmlite", "numpy")),
    ):
        digest.update(f"{part}\n".encode())
    return cache.private_folder(digest.hexdigest()[:32])


def processor() -> tuple[str, str]:
    """The processor that code is compiled for, and its features; Numba's environment variables choose others."""
    features = os.environ.get("NUMBA_CPU_FEATURES")
    if name := os.environ.get("NUMBA_CPU_NAME"):
        return name, features or ""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten() if features is None else features


@lru_cache(maxsize=1)
def _machine() -> Any:
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    cpu, features = processor()
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=features, opt=3, jit=True)


@lru_cache(maxsize=1)
def _engine() -> Any:
    return binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
