"""Fingerprints of functions, data and other objects by what they contain: stored results are used again only where these are equal."""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

#: What is in these folders, and of these packages, is identified by its name: it changes with an installation, not with an experiment.
_INSTALLED = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NAMED = {"builtins", "torch", "numpy", "qsim", "qsim_kernels"}
#: Attributes of classes that say nothing about what their instances do.
_OF_EVERY_CLASS = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__", "__abstractmethods__", "_abc_impl"}


class UnidentifiableError(TypeError):
    """An object that has no contents to compare, such as an open file."""


def fingerprint(value: Any, name: str = "value") -> str:
    """The digest of a value's contents.

    Functions count with their code, defaults, closures and the global variables that they read; classes with their methods; datasets and
    other objects with their state, as `pickle` would store it; paths of existing files with their sizes and times of change. What is
    installed counts with its name.

    Args:
        value: The value.
        name: Its name in errors.

    Raises:
        UnidentifiableError: If a part of it cannot be told from another object of its type.

    Example:
        >>> def scaled(by):
        ...     return lambda x: by * x
        >>> fingerprint(scaled(2)) == fingerprint(scaled(2)), fingerprint(scaled(2)) == fingerprint(scaled(3))
        (True, False)
    """
    return _Fingerprinter().digest(value, name).hex()[:16]


class _Fingerprinter:
    """Digests of objects; each is read once, and one that contains itself ends there."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}
        self._kept: list[Any] = []  # an object that is kept keeps its identity
        self._open: list[int] = []

    def digest(self, value: Any, name: str) -> bytes:
        """The digest of an object, by its type and parts."""
        key = id(value)
        if key in self._open:
            return _hashed(b"itself", str(len(self._open) - self._open.index(key)).encode())
        if key not in self._known:
            self._open.append(key)
            found = _hashed(*self._parts(value, name))
            self._open.pop()
            self._kept.append(value)
            self._known[key] = found
        return self._known[key]

    def _parts(self, value: Any, name: str) -> Iterator[bytes]:
        kind = type(value)
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        if isinstance(value, enum.Enum) or value is None or kind in (bool, int, float, complex, torch.dtype, torch.device):
            yield repr(value).encode()
        elif kind is bytes:
            yield value
        elif isinstance(value, str | os.PathLike):
            yield from _of_path(os.fspath(value))
        elif isinstance(value, Tensor):
            yield from self._of_tensor(value, name)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            yield from (str((value.dtype, value.shape)).encode(), np.ascontiguousarray(value).tobytes())
        elif kind in (list, tuple):
            yield from (self.digest(part, f"{name}[{place}]") for place, part in enumerate(value))
        elif kind in (set, frozenset):
            yield from sorted(self.digest(part, f"a part of {name}") for part in value)
        elif kind in (dict, MappingProxyType):
            yield from self._of_mapping(value, name)
        elif isinstance(value, ModuleType):
            yield from _of_module(value.__name__)
        elif isinstance(value, type):
            yield from self._of_class(value, name)
        elif isinstance(value, FunctionType):
            yield from self._of_function(value, name)
        elif isinstance(value, MethodType):
            yield from (self.digest(value.__func__, name), self.digest(value.__self__, f"{name}.__self__"))
        elif isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | type | None):
            yield f"{value.__module__}.{value.__qualname__}".encode()
        elif isinstance(value, CodeType):
            yield from self._of_code(value, name)
        elif isinstance(value, staticmethod | classmethod):
            yield self.digest(value.__func__, name)
        elif isinstance(value, property):
            yield from (self.digest(part, name) for part in (value.fget, value.fset, value.fdel))
        elif isinstance(value, functools.cached_property):
            yield self.digest(value.func, name)
        elif isinstance(value, GetSetDescriptorType | MemberDescriptorType):
            yield value.__qualname__.encode()
        elif isinstance(value, torch.Generator):
            yield self.digest(value.get_state(), name)
        elif isinstance(value, DataLoader):
            yield from (self.digest(value.dataset, name), self.digest(value.collate_fn, f"{name}.collate_fn"))
        else:
            yield from self._of_object(value, name)

    def _of_tensor(self, x: Tensor, name: str) -> Iterator[bytes]:
        flat = x.detach().cpu()
        if flat.layout != torch.strided or flat.is_quantized:
            yield from self._of_object(x, name)
            return
        yield str((x.dtype, tuple(x.shape), x.requires_grad)).encode()
        yield flat.contiguous().flatten().view(torch.uint8).numpy().tobytes() if flat.numel() else b""

    def _of_mapping(self, value: Mapping[Any, Any], name: str) -> Iterator[bytes]:
        for key, part in value.items():
            place = f"{name}.{key}" if isinstance(key, str) and key.isidentifier() else f"{name}[{key!r}]"
            yield from (self.digest(key, f"a key of {name}"), self.digest(part, place))

    def _of_function(self, function: FunctionType, name: str) -> Iterator[bytes]:
        if _is_installed(function.__module__):
            yield f"{function.__module__}.{function.__qualname__}".encode()
            if "<locals>" not in function.__qualname__:
                return
        # A function made by another one, even by a library's, depends on what it was made with.
        yield self.digest(function.__code__, name)
        yield from (self.digest(part, f"a default of {name}") for part in (function.__defaults__, function.__kwdefaults__))
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            # An empty cell is that of a variable without a value yet, such as a nested function that calls itself.
            yield self.digest(_content(cell), f"the variable {variable} of {name}")
        for variable in sorted(_globals_of(function.__code__)):
            if variable in function.__globals__:
                yield variable.encode()
                yield self.digest(function.__globals__[variable], f"the global variable {variable} of {name}")
        for module in sorted(_imports_of(function.__code__)):
            yield from _of_module(module)

    def _of_code(self, code: CodeType, name: str) -> Iterator[bytes]:
        yield code.co_code
        yield str((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_argcount, code.co_flags)).encode()
        yield from (self.digest(constant, name) for constant in code.co_consts)

    def _of_class(self, kind: type, name: str) -> Iterator[bytes]:
        yield f"{kind.__module__}.{kind.__qualname__}".encode()
        if not _is_installed(kind.__module__):
            yield from (self.digest(base, f"a base of {name}") for base in kind.__bases__)
            own = {key: part for key, part in vars(kind).items() if key not in _OF_EVERY_CLASS}
            yield from self._of_mapping(own, kind.__qualname__)

    def _of_object(self, value: Any, name: str) -> Iterator[bytes]:
        """The parts from which `pickle` would make the object again."""
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as error:  # whatever pickling raises
            raise UnidentifiableError(f"{name} is a {kind}, which cannot be told from another one") from error
        if isinstance(reduced, str):
            yield reduced.encode()
            # A function with a cache is stored by its name.
            yield self.digest(getattr(value, "__wrapped__", None), name)
            return
        make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        yield from (self.digest(part, name) for part in (make, tuple(arguments), type(value)))
        # Attributes by their names, so that an error names the one that it is about.
        yield from self._of_mapping(state, name) if isinstance(state, dict) else [self.digest(state, name)]
        yield self.digest(list(items or ()), name)
        yield from self._of_mapping(dict(pairs or ()), name)


def _hashed(*parts: bytes) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _content(cell: CellType) -> Any:
    """The value of a variable of an enclosing function; it has none yet if the function is defined before it."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _globals_of(code: CodeType) -> set[str]:
    """The global variables that a function and the functions inside it read."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return own.union(*(_globals_of(part) for part in code.co_consts if isinstance(part, CodeType)))


def _imports_of(code: CodeType) -> set[str]:
    """The modules that a function and the functions inside it import."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"}
    return own.union(*(_imports_of(part) for part in code.co_consts if isinstance(part, CodeType)))


def _of_module(name: str) -> Iterator[bytes]:
    """A module by its name, and one that is not installed by its file."""
    yield name.encode()
    file = None if _is_installed(name) else _file_of(name)
    if file is not None and file.is_file():
        yield file.read_bytes()


def _of_path(text: str | bytes) -> Iterator[bytes]:
    """A text; if it is a file or a folder, with the sizes and times of change of the files."""
    yield os.fsencode(text)
    path = Path(os.fsdecode(text)) if len(text) < 4096 and os.sep in os.fsdecode(text) and "\0" not in os.fsdecode(text) else None
    try:
        files = [] if path is None or not path.exists() else [path] if path.is_file() else sorted(path.rglob("*"))
    except OSError:
        return
    for file in files:
        if file.is_file():
            state = file.stat()
            yield f"{file}: {state.st_size}, {state.st_mtime_ns}".encode()


def _is_installed(module: str | None) -> bool:
    """Whether a module is a library's: of Python, of an installed package, or of qsim."""
    if module is None or module.partition(".")[0] in _NAMED:
        return True
    file = _file_of(module)
    return module != "__main__" if file is None else os.path.realpath(file).startswith(_INSTALLED)


@functools.cache
def _file_of(module: str) -> Path | None:
    loaded = sys.modules.get(module)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
    else:
        try:
            spec = importlib.util.find_spec(module)
        except (ImportError, ValueError):  # relative imports, and modules that do not exist
            spec = None
        file = spec.origin if spec is not None and spec.has_location else None
    return None if file is None else Path(file)
