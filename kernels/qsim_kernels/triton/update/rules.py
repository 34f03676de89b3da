"""Update rules inside kernels: the operations of `reference.updates`, in the same order."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from qsim_kernels.meanings.triton import INTERPRETED
from qsim_kernels.triton.device.blocks import as_dtype, as_single, rounded
from qsim_kernels.triton.device.rounding import NAN


class Kind(NamedTuple):
    """The compile-time variant of the kernels, apart from roundings.

    Attributes:
        adam: Adam; otherwise SGD.
        moment: Whether there is a first moment.
        nesterov: See `updates.SGDAlgorithm`.
        coupled: Whether weight decay is added to the gradient.
        decoupled: Whether weight decay is decoupled from the update.
        maximize: See `updates.AdamAlgorithm`.
        amsgrad: See `updates.AdamAlgorithm`.
        kahan: Whether there is a compensation.
        in_format: See `updates.Roundings`.
        scaled: Whether gradients were scaled by a factor.
        own: Whether weights are rounded to nearest on their dtype's own values.
        own_inner: The same for the compensation.
        own_state: The same for the moments.
    """

    adam: bool
    moment: bool
    nesterov: bool
    coupled: bool
    decoupled: bool
    maximize: bool
    amsgrad: bool
    kahan: bool
    in_format: bool
    scaled: bool
    own: bool
    own_inner: bool
    own_state: bool


@triton.jit
def written(x, drawn, grid, V: tl.constexpr, OWN: tl.constexpr, TARGET: tl.constexpr):
    """Round float32 values and convert them to their storage dtype. A rule that saturates turns infinities into NaN."""
    if OWN and TARGET == tl.float32:
        result = tl.where(x == x, x.to(tl.int32, bitcast=True), NAN).to(tl.float32, bitcast=True)
    elif OWN and not INTERPRETED:
        # The hardware conversion rounds to nearest.
        result = x.to(TARGET)
    else:
        if V.saturate:
            x = tl.where(tl.abs(x) == float("inf"), float("nan"), x)
        result = as_dtype(rounded(x, drawn, grid, V, TARGET == tl.float32), TARGET)
    return result


@triton.jit
def q(x, inner, K: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """The result of an operation, rounded if arithmetic is in the format."""
    if K.in_format:
        x = as_single(written(x, 0, inner, N, K.own_inner, P))
    return x


@triton.jit
def decayed(grad, weight, f, inner, K: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """The gradient with sign, scale and coupled weight decay applied."""
    if K.scaled:
        grad *= f.scale
    if K.maximize:
        grad = -grad
    grad = q(grad, inner, K, N, P)
    if K.coupled:
        grad = q(grad + q(weight * f.decay, inner, K, N, P), inner, K, N, P)
    return grad


@triton.jit
def sgd(grad, first, f, inner, K: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """The update of SGD and the new momentum."""
    if K.moment:
        first = q(q(first * f.keep1, inner, K, N, P) + q(grad * f.fresh1, inner, K, N, P), inner, K, N, P)
        if K.nesterov:
            grad = q(grad + q(first * f.keep2, inner, K, N, P), inner, K, N, P)
        else:
            grad = first
    return q(grad * f.rate, inner, K, N, P), first


@triton.jit
def adam(grad, first, second, largest, f, inner, K: tl.constexpr, N: tl.constexpr, P: tl.constexpr):
    """The update of Adam and the new moments."""
    first = q(q(first * f.keep1, inner, K, N, P) + q(grad * f.fresh1, inner, K, N, P), inner, K, N, P)
    squared = q(grad * grad, inner, K, N, P)
    second = q(q(second * f.keep2, inner, K, N, P) + q(squared * f.fresh2, inner, K, N, P), inner, K, N, P)
    taken = second
    if K.amsgrad:
        largest = tl.maximum(largest, second, propagate_nan=tl.PropagateNan.ALL)
        taken = largest
    if K.in_format:
        mean = q(tl.div_rn(first, tl.broadcast_to(f.mean, first.shape)), inner, K, N, P)
        spread = q(tl.sqrt_rn(q(tl.div_rn(taken, tl.broadcast_to(f.root, taken.shape)), inner, K, N, P)), inner, K, N, P)
        change = q(tl.div_rn(q(mean * f.rate, inner, K, N, P), q(spread + f.epsilon, inner, K, N, P)), inner, K, N, P)
    else:
        change = tl.div_rn(first, tl.sqrt_rn(taken) * f.root + f.epsilon) * f.rate
    return change, first, second, largest
