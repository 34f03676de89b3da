"""Quantiles of tensors, and clamping to them before rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsim.formats.base import check_integer
from qsim.functional.quantizer import Point
from qsim.points.base import Gradient, PointModule, callable_of, check_number, limited, surrogate


def clamped(x: Tensor, quantile: float, dim: int | None) -> Tensor:
    """A tensor clamped to two of its quantiles, `1 - quantile` and `quantile`: of `N` elements in order, number `floor(quantile * N)`.

    Args:
        x: The tensor, with at least one element.
        quantile: The larger of the two.
        dim: The dimension along which quantiles are taken; `None` for those of the whole tensor.
    """
    values, along = (x.detach().flatten(), 0) if dim is None or x.dim() == 0 else (x.detach(), dim)
    count = values.shape[along]
    numbers = [min(math.floor(part * count), count - 1) for part in (1 - quantile, quantile)]
    low, high = (torch.kthvalue(values, number + 1, along, keepdim=True).values for number in numbers)
    return limited(x, low.view(()), high.view(())) if dim is None or x.dim() == 0 else limited(x, low, high)


class Clamped(PointModule):
    """Outlier clamping: Wang et al., arXiv 2501.17116, section 3.2, as the code in MS-AMP does it in layers.

    A tensor is clamped to two of its quantiles and rounded by a point; what clamping cuts off is lost. `Outliers` keeps it in a second
    product. The gradient is straight through, also for clamped values.

    Args:
        point: A format, a `Quantizer`, or any function or module from tensor to tensor.
        quantile: The larger of the two quantiles, more than 0.5.
        dim: The dimension along which quantiles are taken: by default those of each row, which is a token. `None` for the whole tensor.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([-0.6, 0.2, 0.3, 0.6, 60.0])
        >>> qsim.points.Clamped("e2m1", quantile=0.7)(x)
        tensor([0.0000, 0.0000, 0.5000, 0.5000, 0.5000])
    """

    gradient: Gradient = "straight"

    def __init__(self, point: Point | Callable[..., Tensor], quantile: float = 0.99, dim: int | None = -1) -> None:
        super().__init__()
        self.point = callable_of("Clamped", point)
        self.quantile = check_number("Clamped", "quantile", quantile, 0.5, 1.0)
        self.dim = None if dim is None else check_integer("Clamped", "dim", dim, -64, 63)

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Clamp and round."""
        return surrogate(x, self.point(clamped(x.detach(), self.quantile, self.dim), **noise))

    def extra_repr(self) -> str:
        """The quantile and the dimension, and the quantizer if the point is one."""
        point = "" if isinstance(self.point, torch.nn.Module) else f"{self.point!r}, "
        return f"{point}quantile={self.quantile:g}, dim={self.dim}"
