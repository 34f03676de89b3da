"""Outliers apart from what is rounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsim.formats.base import check_integer
from qsim.functional.arguments import check_input
from qsim.functional.quantizer import Point
from qsim.points.base import PointModule, callable_of, check_number
from qsim.points.clamped import clamped


class Outliers(PointModule):
    """Outlier clamping and compensation: Wang et al., arXiv 2501.17116, section 3.2, and the code in MS-AMP.

    `split` clamps a tensor to two of its quantiles, `1 - quantile` and `quantile`, and returns the clamped tensor and the rest, which is
    zero except for outliers. The clamped tensor is rounded by a point; the rest is not rounded, and is an operand of a second product.
    A quantile is an element of the tensor: number `floor(quantile * N)` of its `N` elements in order, counted from 0.

    As `act`, `weight` or `grad` of a layer it makes two products of each that the tensor is in: that of the rounded tensor, by the layer's
    accumulator, and that of the rest, which is added in float32. Elsewhere (at a backward point, for the inputs of a matrix product, or
    called), it returns the sum of the rounded tensor and the rest, which gives the same result with one product in high precision.

    The gradient of a value is the point's where it was not clamped, and 1 where it was; the quantiles take none.

    Args:
        point: A format, a `Quantizer`, or any function or module from tensor to tensor.
        quantile: The larger of the two quantiles, more than 0.5; the paper compares 0.999, 0.99 and 0.97.
        dim: The dimension along which quantiles are taken, such as -1 for those of each token; by default those of the whole tensor.

    Example:
        >>> import torch, qsim
        >>> outliers = qsim.points.Outliers(qsim.Quantizer("e2m1", scale="tensor"), quantile=0.7)
        >>> x = torch.tensor([-0.6, 0.2, 0.3, 0.6, 60.0])
        >>> outliers.split(x)
        (tensor([0.2000, 0.2000, 0.3000, 0.6000, 0.6000]), tensor([-0.8000,  0.0000,  0.0000,  0.0000, 59.4000]))
    """

    def __init__(self, point: Point | Callable[..., Tensor], quantile: float = 0.99, dim: int | None = None) -> None:
        super().__init__()
        self.point = callable_of("Outliers", point)
        self.quantile = check_number("Outliers", "quantile", quantile, 0.5, 1.0)
        self.dim = None if dim is None else check_integer("Outliers", "dim", dim, -64, 63)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the clamped tensor and the rest, which add up to the tensor."""
        check_input("Outliers", x)
        if not x.numel():
            return x.clone(), x.clone()
        inside = clamped(x, self.quantile, self.dim)
        return inside, x - inside

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round all but the outliers' rest."""
        inside, rest = self.split(x)
        return self.point(inside, **noise) + rest

    def extra_repr(self) -> str:
        """The quantile, and the quantizer if the point is one."""
        point = "" if isinstance(self.point, torch.nn.Module) else f"{self.point!r}, "
        return f"{point}quantile={self.quantile:g}" + ("" if self.dim is None else f", dim={self.dim}")
