"""What a compiler sees of the operators: elementwise arithmetic on bit patterns, which it fuses with the code around it.

While AOTAutograd traces a graph, an operator that needs no random bits becomes the plain torch operators of `qsim_kernels.reference`. They
work on integers, or add floats whose sum a compiler has no licence to change, so compiled code gives the same bits. Exported programs keep
the operator itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from qsim_kernels.carrier import DOUBLE, Plan, plan
from qsim_kernels.grid import Grid, Mode, Rule, read
from qsim_kernels.ops import library
from qsim_kernels.reference.rounding import as_values, checked, signed


def quantize(x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int, dtype: torch.dtype) -> Tensor | None:
    """Rounds element by element; nothing if that needs random bits."""
    how = read(Rule, rule)
    if how.mode == Mode.STOCHASTIC:
        return None
    values = plan(read(Grid, grid), wide=torch.float64 in (x.dtype, dtype))
    bits = patterns(x, values)
    magnitude = bits & ~values.carrier.sign
    # Clamped so that nothing overflows: compilers of C++ take signed overflow for impossible, and would drop the check for NaN.
    rounded = signed(magnitude.clamp(max=values.carrier.infinity), bits, values, how, None)
    return as_values(checked(rounded, magnitude, values, how), values, dtype)


def quantize_and_sum(x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Rounds a matrix element by element and adds up its rows; nothing if that needs random bits."""
    rounded = quantize(x, seed, grid, rule, stream, 0, dtype)
    return None if rounded is None else (rounded, x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)))


def patterns(x: Tensor, plan: Plan) -> Tensor:
    """A tensor's values as bit patterns of a carrier.

    16-bit values are read as integers, because a compiler may keep what it computes in float32 until its bits are read.
    """
    if x.dtype == torch.bfloat16:
        bits = x.view(torch.int16).to(torch.int32) << 16
    elif x.dtype == torch.float16:
        bits = _widened(x.view(torch.int16).to(torch.int32))
    elif x.dtype == torch.float64:
        return x.view(torch.int64)
    else:
        bits = x.view(torch.int32)
    return bits.view(torch.float32).to(torch.float64).view(torch.int64) if plan.carrier == DOUBLE else bits


def _widened(half: Tensor) -> Tensor:
    """float16's patterns, as int32, as float32's."""
    magnitude = half & 0x7FFF
    normal = (magnitude << 13) + (112 << 23)
    subnormal = (magnitude.to(torch.float32) * 2.0**-24).view(torch.int32)
    infinite = magnitude << 13 | 0x7F800000
    wide = torch.where(magnitude < 0x400, subnormal, torch.where(magnitude < 0x7C00, normal, infinite))
    return wide | half & -0x8000 << 16


def _lower(name: str, function: Callable[..., Any]) -> None:
    operator = getattr(torch.ops.qsim, name).default

    def traced(mode: FunctionalTensorMode, func: Any, types: tuple[type, ...], args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (Tensor, FunctionalTensor) and not issubclass(kind, FakeTensor) for kind in types):
            return NotImplemented
        if not torch.compiler.is_exporting():
            with mode:
                found = function(*args, **(kwargs or {}))
            if found is not None:
                return found
        return mode.__torch_dispatch__(func, types, args, kwargs)

    torch.library.register_torch_dispatch(operator, FunctionalTensorMode, traced, lib=library)


_lower("quantize", quantize)
_lower("quantize_and_sum", quantize_and_sum)
