"""Compilation of a loop to machine code that needs neither Numba nor Python."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numba
from llvmlite import binding
from numba import types

from qsim_kernels.private import NUMBA_OPTIONS


def machine_code(module: str, name: str, symbol: str, machine: Any) -> bytes:
    """Compile a function of 64-bit integers.

    Args:
        module: The module in `loops` that defines it.
        name: Its name there.
        symbol: The name of the machine code's entry.
        machine: llvmlite's target machine.

    Returns:
        An object file.
    """
    function = getattr(importlib.import_module(f"qsim_kernels.numba.loops.{module}"), name)
    arguments = (types.int64,) * len(inspect.signature(function).parameters)
    compiled = numba.njit(types.void(*arguments), **OPTIONS)(function)
    (overload,) = compiled.overloads.values()
    text = compiled.inspect_llvm(overload.signature.args) + _entry(symbol, overload.fndesc.llvm_func_name, len(arguments))
    code = binding.parse_assembly(text)
    for part in code.functions:
        if not part.is_declaration and part.name != symbol:
            part.linkage = "internal"
        assert not part.is_declaration or part.name.startswith("llvm."), f"{module}.{name} calls {part.name}, which only Numba provides"
    return machine.emit_object(code)  # type: ignore[no-any-return]


#: Python does not call compiled code.
OPTIONS = {**NUMBA_OPTIONS, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def _entry(symbol: str, function: str, arguments: int) -> str:
    """A function of integers only: Numba's own also take the places of a result and of an error."""
    given = ", ".join(f"i64 %{i}" for i in range(arguments))
    return f"""
define void @{symbol}({given}) {{
start:
  %result = alloca ptr
  %error = alloca ptr
  call i32 @"{function}"(ptr %result, ptr %error, {given})
  ret void
}}
"""
