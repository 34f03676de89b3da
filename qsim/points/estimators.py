"""Points that round as any quantizer and replace its gradient: DGE and QuEST's trust mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qsim.formats import Int
from qsim.formats.base import check_integer
from qsim.functional.quantizer import Point, Quantizer, check_call
from qsim.points.base import Gradient, PointModule, callable_of, check_number, quantizer_of, surrogate, wide
from qsim.rounding import DOWN, UP, Rounding


class DGE(PointModule):
    """Differentiable gradient estimator: Wang et al., arXiv 2501.17116, equation 8, and the code in MS-AMP.

    Values are rounded by a quantizer. The gradient is multiplied by the slope of a smooth function that stands in for rounding: in an
    interval of width `d` between two neighbouring values of the format, at the distance `x` from the lower one, it is
    `|2x/d - 1|**(1/k - 1) / k`, at most `cap`: `1/k` at both ends and `cap` in the middle. Beyond the format's largest value, which the
    paper's scales do not reach, it is `1/k` as well. The paper uses it for weights.

    Args:
        format: A format, a block format or a `Quantizer`, with or without scales.
        k: Steepness: 1 is straight through, and larger is closer to a staircase.
        cap: The largest slope.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([1.0, 1.2, 1.25, 2.5], requires_grad=True)
        >>> y = qsim.points.DGE("e2m1")(x)
        >>> y.sum().backward()
        >>> y.detach(), x.grad
        (tensor([1., 1., 1., 2.]), tensor([0.2000, 0.7248, 3.0000, 3.0000]))
    """

    def __init__(self, format: Point = "e2m1", k: float = 5.0, cap: float = 3.0) -> None:
        super().__init__()
        self.quantizer = quantizer_of("DGE", format, scales=True)
        check_call("DGE", self.quantizer)
        self._neighbors = tuple(replace(self.quantizer, rounding=rounding) for rounding in (DOWN, UP))
        self.k = check_number("DGE", "k", k, 0.0, math.inf)
        self.cap = check_number("DGE", "cap", cap, 0.0, math.inf)

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round with the quantizer."""
        values = wide(x.detach())
        low, high = (neighbor(values) for neighbor in self._neighbors)
        position = torch.where(high > low, (values - low) / (high - low), 0.0)
        slope = ((2 * position - 1).abs() ** (1 / self.k - 1) / self.k).clamp(max=self.cap)
        return surrogate(x, self.quantizer(x.detach(), **noise), slope)

    def extra_repr(self) -> str:
        """The quantizer's format and the parameters."""
        return f"{self.quantizer.format!r}, k={self.k:g}, cap={self.cap:g}"


#: How many root mean squares a grid of `2**bits` levels reaches for the least mean squared error of normal values: from QuEST's code.
_GAUSSIAN_RANGES = {
    1: 0.7978845587140913,
    2: 1.4935346200015913,
    3: 2.051068354131873,
    4: 2.513930578568423,
    5: 2.9160938834961225,
    6: 3.276597282593217,
    7: 3.6010497188221655,
    8: 3.884938678807525,
}


class GaussianGrid(PointModule):
    """QuEST's quantizer: Panferov et al., arXiv 2502.05003, and the class `STEQuantizer` of its code.

    The grid has `2**bits` evenly spaced levels, symmetric about zero, which is not one of them. It reaches to the multiple of the root mean
    square along a dimension that gives the least mean squared error for normal values. The gradient is straight through; the grid takes
    none.

    Args:
        bits: 1 to 8.
        dim: The dimension along which values share a grid.
        rounding: How values are rounded.

    Example:
        >>> import torch, qsim
        >>> qsim.points.GaussianGrid(2)(torch.tensor([-3.0, -0.4, 0.1, 1.0]))
        tensor([-2.3815, -0.7938,  0.7938,  0.7938])
    """

    gradient: Gradient = "straight"

    def __init__(self, bits: int, dim: int = -1, rounding: str | Rounding = "nearest") -> None:
        super().__init__()
        self.bits = check_integer("GaussianGrid", "bits", bits, 1, 8)
        self.dim = check_integer("GaussianGrid", "dim", dim, -64, 63)
        self.quantizer = Quantizer(Int(bits), rounding)

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round to the grid."""
        values = wide(x.detach())
        step = _root_mean_square(values, self.dim) * (2 * _GAUSSIAN_RANGES[self.bits] / (2**self.bits - 1))
        levels = self.quantizer(values / torch.where(step > 0, step, 1.0) - 0.5, **noise) + 0.5
        return surrogate(x, (levels * step).to(x.dtype))

    def extra_repr(self) -> str:
        """The bits, the dimension and the rounding."""
        return f"{self.bits}, dim={self.dim}, rounding={self.quantizer.rounding}"


class TrustMask(PointModule):
    """QuEST's trust estimator: Panferov et al., arXiv 2502.05003, and the class `TrustQuantizer` of its code.

    Values are rounded by a point. The gradient passes where the error is at most `trust` times the root mean square along a dimension, and
    is zero where rounding has moved a value further: these are outliers, whose gradients cannot be trusted. `TrustMask.quest(bits)` has the
    paper's grid and trust. The paper rounds after a Hadamard transform, so that gradients are masked in its basis:
    `hadamard.inverse(point(hadamard(x)))`.

    Args:
        point: A format, a `Quantizer`, or any function or module from tensor to tensor.
        trust: The largest error that is trusted, in units of the root mean square.
        dim: The dimension along which the root mean square is taken.

    Example:
        >>> import torch, qsim
        >>> x = torch.tensor([0.4, -0.2, 0.5, 8.0], requires_grad=True)
        >>> y = qsim.points.TrustMask("e2m1", trust=0.25)(x)
        >>> y.sum().backward()
        >>> y.detach(), x.grad
        (tensor([0.5000, -0.0000, 0.5000, 6.0000]), tensor([1., 1., 1., 0.]))
    """

    def __init__(self, point: Point | Callable[..., Tensor], trust: float, dim: int = -1) -> None:
        super().__init__()
        self.point = callable_of("TrustMask", point)
        self.trust = check_number("TrustMask", "trust", trust, 0.0, math.inf)
        self.dim = check_integer("TrustMask", "dim", dim, -64, 63)

    @classmethod
    def quest(cls, bits: int, dim: int = -1, rounding: str | Rounding = "nearest") -> TrustMask:
        """Return the paper's point: its grid, and the trust of half a step.

        Example:
            >>> import qsim
            >>> print(qsim.points.TrustMask.quest(4))
            TrustMask(
              trust=0.167595, dim=-1
              (point): GaussianGrid(4, dim=-1, rounding=nearest)
            )
        """
        grid = GaussianGrid(bits, dim, rounding)
        return cls(grid, _GAUSSIAN_RANGES[bits] / (2**bits - 1), dim)

    def rounded(self, x: Tensor, **noise: Any) -> Tensor:
        """Round with the point."""
        values = self.point(x.detach(), **noise)
        error = wide(values.detach()) - wide(x.detach())
        trusted = error.abs() <= self.trust * _root_mean_square(wide(x.detach()), self.dim)
        return surrogate(x, values, trusted)

    def extra_repr(self) -> str:
        """The trust, and the quantizer if the point is one."""
        point = "" if isinstance(self.point, torch.nn.Module) else f"{self.point!r}, "
        return f"{point}trust={self.trust:g}, dim={self.dim}"


def _root_mean_square(x: Tensor, dim: int) -> Tensor:
    return x.square().mean(dim, keepdim=True).sqrt()
