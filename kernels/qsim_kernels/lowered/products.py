"""Products that a chip's library computes, as calls that compilers make themselves: there is no Python in between.

Shapes are known while a graph is traced, so products are compared with the emulator then, before any of them runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qsim_kernels import private
from qsim_kernels.chip import factored
from qsim_kernels.chip.verified import CHIP
from qsim_kernels.ops.accumulate import AccumulateArguments


def accumulate(*arguments: Any) -> Tensor | None:
    """The library's product where it has the emulator's bits; `None` for others, and where a compiler would look for another kernel."""
    given = AccumulateArguments(*arguments)
    asked = given.a, given.b, given.how, given.dtype, given.bias
    if given.chip == "never" or not all(map(_is_static, (given.a, given.b))) or _chooses_kernels():
        return None
    with private.without_modes():
        way = CHIP.find(*asked, lambda a, b: torch.ops.qsim.accumulate.default(a, b, None, given.how, 0, 0, None, "never"))
    if isinstance(way, str) or way.case.settings != () or not way.case.is_stored(given.a, given.b, given.bias):
        return None
    call = way.call(CHIP.library, torch.ones((), device=given.a.device))
    return call(given.a, given.b, bias=given.bias)


def matmul_rescaled(a: Tensor, b: Tensor, factors: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The operator with one number in place of two, if cuBLAS gets one: a compiler multiplies them in the loop that computes the last."""
    if not a.is_cuda or len(factors) != 2 or not all(map(_is_static, (a, b, *factors))):
        return None
    with private.without_modes():
        if factored.product_of(a, b, factors, bias, dtype) is None:
            return None
    first, second = (factor.reshape(()) for factor in factors)
    return torch.ops.qsim.matmul_rescaled.default(a, b, [first * second], bias, dtype)  # type: ignore[no-any-return]


def _is_static(x: Tensor) -> bool:
    """Whether a tensor's shape is known, and not empty."""
    return all(isinstance(size, int) and size > 0 for size in x.shape)


def _chooses_kernels() -> bool:
    """Whether Inductor measures kernels of its own for matrix products, which add in other orders."""
    config = private.inductor_config  # imports much
    return config is None or bool(config.max_autotune or config.max_autotune_gemm)
