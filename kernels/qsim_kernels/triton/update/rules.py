"""Update rules inside kernels: `arithmetic.updates` for blocks, and how results are stored."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels import arithmetic
from qsim_kernels.meanings.binding import bound
from qsim_kernels.numbers.updates import UpdateVariant
from qsim_kernels.triton.device.blocks import as_dtype, as_single, narrowed, rounded
from qsim_kernels.triton.device.values import KernelVariant


class Kind(NamedTuple):
    """The compile-time variant of the kernels, apart from the roundings of weights and moments.

    Attributes:
        update: The facts of the update, which are attributes of a kind, too.
        adam: Adam; otherwise SGD.
        kahan: Whether there is a compensation.
        native: Whether weights are rounded to nearest on their dtype's own values.
        native_inner: The same for the compensation.
        native_moments: The same for the moments.
        inner: The `KernelVariant` of the rounding of intermediates.
        stored: The weights' dtype.
    """

    update: UpdateVariant
    adam: bool
    kahan: bool
    native: bool
    native_inner: bool
    native_moments: bool
    inner: KernelVariant
    stored: tl.dtype

    def __getattr__(self, name: str) -> bool:
        """A fact of the update."""
        return getattr(self.update, name)  # type: ignore[no-any-return]


@triton.jit
def written(x, drawn, grid, ROUNDING: tl.constexpr, NATIVE: tl.constexpr, TARGET: tl.constexpr):
    """Round float32 values and convert them to their storage dtype. A rule that saturates turns infinities into NaN."""
    if NATIVE:
        # The hardware conversion rounds to nearest.
        return narrowed(x, TARGET)
    else:
        if ROUNDING.saturates:
            x = tl.where(tl.abs(x) == float("inf"), float("nan"), x)
        return as_dtype(rounded(x, drawn, grid, ROUNDING, TARGET == tl.float32), TARGET)


@triton.jit
def q(x, inner, KIND: tl.constexpr):
    """The result of an operation, rounded if arithmetic is in the format."""
    if KIND.in_format:
        INNER: tl.constexpr = KIND.inner  # Triton 3.6 takes a record in a record for a tuple of numbers
        x = as_single(written(x, 0, inner, INNER, KIND.native_inner, KIND.stored))
    return x


@triton.jit
def divide(a, b):
    """The correctly rounded quotient of float32 numbers."""
    return tl.div_rn(a, tl.broadcast_to(b, a.shape))


@triton.jit
def square_root(x):
    """The correctly rounded root of float32 numbers."""
    return tl.sqrt_rn(x)


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


_RULES = bound(arithmetic.updates, {"tl": tl, "divide": divide, "square_root": square_root, "larger": larger, "rounded": q}, triton.jit)
decayed, sgd, adam, with_decay = _RULES.decayed, _RULES.sgd, _RULES.adam, _RULES.with_decay
compensated, excess = _RULES.compensated, _RULES.excess
