"""Recipes for any format."""

from __future__ import annotations

from qsim.accumulators.chips import Chip
from qsim.functional.quantizer import Quantizer
from qsim.recipes.five_point import Accumulate, FivePoint
from qsim.recipes.recipe import Recipe
from qsim.recipes.spec import Spec

_FEWER_BITS = "Training with Fewer Bits, {}"


def stochastic_backward(format: Spec, *, accumulate: Accumulate = None, chip: Chip = "auto") -> Recipe:
    """Forward: full-precision inputs and the weight with round-to-nearest, once for both passes. Backward: the rest stochastically.

    So the mean of the gradients over the noise is the gradient of the loss at the rounded weight.

    Args:
        format: The format of everything that is rounded. Its scales, if any, must be those of square tiles, because of the weight.
        accumulate: The accumulator of all products, or three, as `FivePoint` takes them; torch's float32 sums by default.
        chip: Whether the GPU itself may multiply where it has the accumulator's bits, as `FivePoint` takes it.

    Example:
        >>> import qsim
        >>> qsim.recipes.stochastic_backward("e4m1").points.grad.rounding
        Stochastic()
    """
    noisy = Quantizer(format, "stochastic")
    points = FivePoint(None, format, noisy, "same", noisy, accumulate=accumulate, chip=chip)
    return Recipe("stochastic_backward", points, source=_FEWER_BITS.format("Figure 3"))


def weight_only(format: Spec, *, accumulate: Accumulate = None, chip: Chip = "auto") -> Recipe:
    """The weight alone is rounded, to nearest, once for both passes.

    Args:
        format: The weight's format. Its scales, if any, must be those of square tiles.
        accumulate: The accumulator of all products, or three, as `FivePoint` takes them; torch's float32 sums by default.
        chip: Whether the GPU itself may multiply where it has the accumulator's bits, as `FivePoint` takes it.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.weight_only("e4m1"))
        weight_only: weight=Float(4, 1), weight_bwd=same
    """
    points = FivePoint(weight=format, weight_bwd="same", accumulate=accumulate, chip=chip)
    return Recipe("weight_only", points, source=_FEWER_BITS.format("section 3.2"))


def nearest_everywhere(format: Spec, *, accumulate: Accumulate = None, chip: Chip = "auto") -> Recipe:
    """Round all five points to nearest, which makes gradients biased.

    Args:
        format: The format of all points.
        accumulate: The accumulator of all products, or three, as `FivePoint` takes them; torch's float32 sums by default.
        chip: Whether the GPU itself may multiply where it has the accumulator's bits, as `FivePoint` takes it.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.nearest_everywhere("e4m1"))
        nearest_everywhere: act=Float(4, 1), weight=Float(4, 1), act_bwd=Float(4, 1), weight_bwd=Float(4, 1), grad=Float(4, 1)
    """
    points = FivePoint(format, format, format, format, format, accumulate=accumulate, chip=chip)
    return Recipe("nearest_everywhere", points, source=_FEWER_BITS.format("section 3.1"))
