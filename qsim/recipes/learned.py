"""Recipes with learned or fitted grids, for training a model that is to be quantized: gradients are in high precision."""

from __future__ import annotations

from qsim.functional.hadamard import Hadamard
from qsim.points import LSQ, Rotated, TrustMask
from qsim.recipes.five_point import FivePoint
from qsim.recipes.recipe import Recipe


def lsq(weight: str = "int4", act: str = "int4") -> Recipe:
    """Integers with learned step sizes for inputs and weights, one step per tensor; the first and the last layer in high precision.

    Steps train with the model: create the optimizer after the conversion, and give steps a smaller learning rate than weights. The paper
    has 8 bits in the first and the last layer, and unsigned formats for inputs, which follow a ReLU: `lsq(act="uint4")`.

    Args:
        weight: The weights' format.
        act: The inputs' format.

    Example:
        >>> import qsim
        >>> print(qsim.recipes.lsq(act="uint4"))
        lsq: act=LSQ('uint4'), weight=LSQ('int4'); high precision: the first and the last layer
    """
    points = FivePoint(LSQ(act), LSQ(weight))
    return Recipe("lsq", points, first=1, last=1, source="Esser et al., Learned Step Size Quantization, arXiv 1902.08153")


def quest(bits: int = 4) -> Recipe:
    """Even grids that fit normal values, after a Hadamard transform of 128; gradients pass where the rounding error is small.

    Inputs and weights are transformed along the dimension that the product sums over. The grid reaches to a multiple of the root mean
    square of each row; gradients whose value was moved by more than half a step are masked in the transformed basis.

    Args:
        bits: Bits of inputs and weights, 1 to 8.

    Example:
        >>> import qsim
        >>> qsim.recipes.quest().points.act.gradient, qsim.recipes.quest(2).points.weight.function.point.point
        ('own', GaussianGrid(2, dim=-1, rounding=nearest))
    """
    act, weight = (Rotated(TrustMask.quest(bits), Hadamard(128, random_signs=False)) for _ in range(2))
    return Recipe("quest", FivePoint(act, weight), source="Panferov et al., QuEST, arXiv 2502.05003")
