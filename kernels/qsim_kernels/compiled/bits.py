"""Operations that Numba lacks: an address as a pointer, the bits of a float as an integer, and the type that holds a dtype's patterns."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


def held_as(dtype: torch.dtype) -> Any:
    """The integer type that holds the patterns of float32 or bfloat16."""
    return np.int16 if dtype == torch.bfloat16 else np.int32


@intrinsic
def pointer(context: Any, address: Any) -> Any:
    """The memory at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


def _same_bits(source: Any, target: Any, held: ir.Type, doc: str) -> Any:
    """A function that reinterprets one type's bits as another type of the same width."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], held)

    def same_bits(context: Any, value: Any) -> Any:
        return target(source), generate

    same_bits.__doc__ = doc
    return intrinsic(same_bits)


as_float = _same_bits(types.int32, types.float32, ir.FloatType(), "The float32 of an int32's bits.")
as_int = _same_bits(types.float32, types.int32, ir.IntType(32), "The bits of a float32 as an int32.")
as_double = _same_bits(types.int64, types.float64, ir.DoubleType(), "The float64 of an int64's bits.")
as_long = _same_bits(types.float64, types.int64, ir.IntType(64), "The bits of a float64 as an int64.")
