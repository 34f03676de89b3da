"""Recipes for any format: without scales, as in the paper, unless they are given."""

from __future__ import annotations

from qsim.functional.quantizer import Quantizer
from qsim.recipes.five_point import FivePoint
from qsim.recipes.recipe import Recipe
from qsim.recipes.spec import Spec
from qsim.scaling import Scaling

_FEWER_BITS = "Training with Fewer Bits, {}"


def stochastic_backward(format: Spec, *, scale: Scaling | str | None = None) -> Recipe:
    """Forward: full-precision inputs and the weight with round-to-nearest, once for both passes. Backward: the rest stochastically.

    So the mean of the gradients over the noise is the gradient of the loss at the rounded weight.

    Args:
        format: The format of everything that is rounded. Its scales, if any, must be those of square tiles, because of the weight.
        scale: The scale, as `Quantizer` takes it, for example `"tensor"`. Without one, numbers beyond the format's range
            saturate, and those below half its smallest become zero.

    Example:
        >>> import qsim
        >>> qsim.recipes.stochastic_backward("e4m1").points.grad.rounding
        Stochastic()
    """
    nearest, noisy = _point(format, scale), Quantizer(format, "stochastic", scale=scale)
    points = FivePoint(None, nearest, act_bwd=noisy, weight_bwd="same", grad=noisy)
    return Recipe("stochastic_backward", points, source=_FEWER_BITS.format("Figure 3"))


def weight_only(format: Spec, *, scale: Scaling | str | None = None) -> Recipe:
    """Round only the weight, with round-to-nearest, once for both passes.

    Args:
        format: The weight's format. Scales that follow a direction are found again for the backward pass.
        scale: The scale, as `Quantizer` takes it, for example `"tensor"`. Without one, numbers beyond the format's range
            saturate, and those below half its smallest become zero.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.weight_only("e4m1"))
        weight_only: weight=Float(4, 1)
    """
    points = FivePoint(weight=_point(format, scale), weight_bwd="same")
    return Recipe("weight_only", points, source=_FEWER_BITS.format("section 3.2"))


def nearest_everywhere(format: Spec, *, scale: Scaling | str | None = None) -> Recipe:
    """Round all five points to nearest, which makes gradients biased.

    Args:
        format: The format of all points.
        scale: The scale, as `Quantizer` takes it, for example `"tensor"`. Without one, numbers beyond the format's range
            saturate, and those below half its smallest become zero.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.nearest_everywhere("e4m1"))
        nearest_everywhere: act=Float(4, 1), weight=Float(4, 1), act_bwd=Float(4, 1), weight_bwd=Float(4, 1), grad=Float(4, 1)
    """
    nearest = _point(format, scale)
    points = FivePoint(nearest, nearest, nearest, act_bwd=nearest, weight_bwd=nearest)
    return Recipe("nearest_everywhere", points, source=_FEWER_BITS.format("section 3.1"))


def _point(format: Spec, scale: Scaling | str | None) -> Spec | Quantizer:
    """A format, whose errors name the point, or a quantizer with a scale."""
    return format if scale is None else Quantizer(format, scale=scale)
