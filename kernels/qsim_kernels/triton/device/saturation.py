"""Products of elements and scales that the dtype of the result cannot hold: where they can occur, and how they saturate.

Which value they get, and why, is documented at `reference.scaling.saturated`. Kernels clamp only where a product can leave the range.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch
import triton
import triton.language as tl

from qsim_kernels.numbers.scales import ElementRounding, Restore, ScaleRule, Scales
from qsim_kernels.triton.device.tile_scales import is_e8m0
from qsim_kernels.triton.device.values import as_double

_FLOAT32 = torch.finfo(torch.float32).max


class Clamp(IntEnum):
    """Where a kernel clamps products.

    NEVER: no product is beyond the largest value. BY_TENSOR: only if the scale of the whole tensor is so large that one could be, which is
    one comparison per program. ALWAYS: every element.
    """

    NEVER = 0
    BY_TENSOR = 1
    ALWAYS = 2


def clamp_of_tiles(making: Scales, elements: ElementRounding, is_under: bool, source: torch.dtype, target: torch.dtype) -> Clamp:
    """Where products are clamped under scales that are made by a rule.

    Args:
        making: How scales are made.
        elements: How elements are rounded.
        is_under: Whether scales are under one of the whole tensor.
        source: The dtype in which largest magnitudes are found: that of the input, or float32 after a transform.
        target: The dtype of the result.
    """
    if clamp_of_given(elements) == Clamp.NEVER:
        return Clamp.NEVER
    if is_under and elements.restore == Restore.ALL:
        return Clamp.BY_TENSOR
    largest = min(_FLOAT32, torch.finfo(target).max)
    most = max(elements.grid.max, -elements.grid.min)
    if most * making.grid.max <= largest or (not is_under and _keeps_exponents(making, elements, source, largest)):
        return Clamp.NEVER
    return Clamp.ALWAYS


def clamp_of_given(elements: ElementRounding) -> Clamp:
    """Where products are clamped under arbitrary scales."""
    return Clamp.ALWAYS if elements.restore != Restore.NOTHING and elements.rule.saturates else Clamp.NEVER


def _keeps_exponents(making: Scales, elements: ElementRounding, source: torch.dtype, largest: float) -> bool:
    """Whether no value of a block is in a higher binade than its largest element was, and none of the highest binade is too large.

    OCP's rule divides by a power of two such that the largest element has the exponent of the format's largest value, where it saturates.
    """
    grid = elements.grid
    if making.rule != ScaleRule.FLOOR or making.margin > 0 or not is_e8m0(making.grid) or -grid.min > grid.max:
        return False
    fraction, _ = math.frexp(grid.max)
    _, exponent = math.frexp(torch.finfo(source).max)
    return math.ldexp(fraction, exponent) <= largest


BY_TENSOR, ALWAYS = (tl.constexpr(int(clamp)) for clamp in (Clamp.BY_TENSOR, Clamp.ALWAYS))


@triton.constexpr_function
def largest_finite(target):
    """The largest finite value of a type that float32 products are stored in."""
    return 65504.0 if target == tl.float16 else 3.3895313892515355e38 if target == tl.bfloat16 else _FLOAT32


@triton.jit
def clamped(products, TARGET: tl.constexpr):
    """Clamp float32 products to the finite values of a type; NaN stays."""
    LARGEST: tl.constexpr = largest_finite(TARGET)
    products = tl.minimum(products, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(products, -LARGEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def reach_of(under, making, SCALE_ROUNDING: tl.constexpr):
    """A number that no product of an element, a scale and the scale of the whole tensor exceeds in magnitude, in float64."""
    largest_scale = making.grid.top.to(tl.float64 if SCALE_ROUNDING.wide else tl.float32, bitcast=True).to(tl.float64)
    # Two's complement reaches further below zero than above, but not twice as far.
    return tl.load(under).to(tl.float64) * largest_scale * as_double(making.largest) * 2
