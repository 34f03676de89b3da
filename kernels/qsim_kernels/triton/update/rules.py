"""Update rules inside kernels: `arithmetic.updates` for blocks, and how results are stored."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels import arithmetic
from qsim_kernels.meanings.binding import bound
from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.triton.device.blocks import as_dtype, as_single, rounded
from qsim_kernels.triton.device.rounding import NAN
from qsim_kernels.triton.device.values import KernelVariant


class Kind(NamedTuple):
    """The compile-time variant of the kernels, apart from the roundings of weights and moments: an `UpdateVariant`, and more.

    Attributes:
        moment: See `updates.UpdateVariant`, as the next ones.
        nesterov: See there.
        coupled: See there.
        decoupled: See there.
        maximize: See there.
        amsgrad: See there.
        in_format: See there.
        scaled: See there.
        adam: Adam; otherwise SGD.
        kahan: Whether there is a compensation.
        own: Whether weights are rounded to nearest on their dtype's own values.
        own_inner: The same for the compensation.
        own_state: The same for the moments.
        inner: The `KernelVariant` of the rounding of intermediates.
        stored: The weights' dtype.
    """

    moment: bool
    nesterov: bool
    coupled: bool
    decoupled: bool
    maximize: bool
    amsgrad: bool
    in_format: bool
    scaled: bool
    adam: bool
    kahan: bool
    own: bool
    own_inner: bool
    own_state: bool
    inner: KernelVariant
    stored: tl.dtype


@triton.jit
def written(x, drawn, grid, V: tl.constexpr, OWN: tl.constexpr, TARGET: tl.constexpr):
    """Round float32 values and convert them to their storage dtype. A rule that saturates turns infinities into NaN."""
    if OWN and TARGET == tl.float32:
        result = tl.where(x == x, x.to(tl.int32, bitcast=True), NAN).to(tl.float32, bitcast=True)
    elif OWN and not INTERPRETED:
        # The hardware conversion rounds to nearest.
        result = x.to(TARGET)
    else:
        if V.saturates:
            x = tl.where(tl.abs(x) == float("inf"), float("nan"), x)
        result = as_dtype(rounded(x, drawn, grid, V, TARGET == tl.float32), TARGET)
    return result


@triton.jit
def q(x, inner, K: tl.constexpr):
    """The result of an operation, rounded if arithmetic is in the format."""
    if K.in_format:
        N: tl.constexpr = K.inner  # Triton 3.6 takes a record in a record for a tuple of numbers
        x = as_single(written(x, 0, inner, N, K.own_inner, K.stored))
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
