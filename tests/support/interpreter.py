"""A faster Triton interpreter for tests: it skips repeated work and checks whose results are dropped.

The interpreter patches `triton.language` for each call of a jitted function, even inside a kernel. A qsim kernel makes dozens of such
calls, which took half the time of a small launch. Patching once per launch is enough.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter

#: The modules that the current launch has patched.
_patched: set[ModuleType] = set()


class _Scope:
    """Patches that are undone at the end of a launch."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        _patched.clear()
        self._scope.restore()


@cache
def _languages(function: FunctionType) -> frozenset[ModuleType]:
    """The modules that the interpreter patches for a function."""
    return frozenset(value for value in function.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core))


def _index(tensor: tl.tensor) -> int:
    """Convert a loop bound; Triton 3.6 passes an array of one element to `int`, which NumPy 2.5 rejects."""
    return int(tensor.handle.data.item())


def _remembered(numpy_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtype for one of Triton's: the interpreter looks it up in a table that it rebuilds each time."""
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_dtype(dtype)
        return known[name]

    return remembered


def _remember_types() -> None:
    """Make one block type for an element type and a shape, and what a tensor takes from its type once for each type.

    The interpreter makes both again for every operation on a block, which took a quarter of a kernel's time.
    """
    make_type, make_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__
    known: dict[Any, Any] = {}

    def new(cls: Any, element_ty: Any, shape: Any) -> Any:
        key = (cls, element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key not in known:
            known[key] = object.__new__(cls)
        return known[key]

    def make_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        if "name" not in self.__dict__:
            make_type(self, element_ty, shape)

    def make_tensor_of(self: Any, handle: Any, type: Any) -> None:
        if "_of_tensors" not in type.__dict__:
            make_tensor(self, handle, type)
            type._of_tensors = {name: value for name, value in self.__dict__.items() if name != "handle"}
        self.__dict__.update(type._of_tensors)
        self.handle = handle

    tl.core.block_type.__new__ = new
    tl.core.block_type.__init__ = make_type_once
    tl.core.tensor.__init__ = make_tensor_of


def speed_up() -> None:
    """Make the interpreter patch each module once per launch; does nothing if kernels are compiled."""
    patch = getattr(interpreter, "_patch_lang", None)
    if not triton.knobs.runtime.interpret or patch is None or patch.__module__ == __name__:
        return

    def patch_once(function: FunctionType) -> Any:
        languages = _languages(function)
        if languages <= _patched:
            return None
        scope = patch(function)
        tl.tensor.__index__ = _index
        _patched.update(languages)
        # The interpreter restores the outermost scope only.
        return scope and _Scope(scope)

    interpreter._patch_lang = patch_once
    _remember_types()
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    # The interpreter recomputes every sum and product of 32-bit integers in 64 bits, for an assertion that is only active with `debug`.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
