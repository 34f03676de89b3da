"""Least squares for many problems at once: data, and gradients and updates with and without rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import qsim
from qsim.formats import holders

#: What is rounded: nothing; the weights, in three ways; or everything except the weights.
EXACT, NEAREST, COMPUTE, STOCHASTIC, KAHAN = "no rounding", "nearest", "forward and backward", "stochastic", "kahan"
METHODS = (EXACT, NEAREST, COMPUTE, STOCHASTIC, KAHAN)
#: The samples of a step's gradient: all, or one.
ALL, ONE = "all", "one"


@dataclass(frozen=True)
class Problems:
    """Least-squares problems of the same shape, in float64.

    Attributes:
        x: Data: problems × samples × dimensions.
        y: Labels: problems × samples.
        optimum: The weights from which the labels were made: problems × dimensions.
    """

    x: Tensor
    y: Tensor
    optimum: Tensor

    def lipschitz(self, gradient: str) -> Tensor:
        """The constant L of assumption A2 for each problem: for the mean loss, or the largest one for a single sample."""
        return self._eigenvalues()[:, -1] if gradient == ALL else self.x.square().sum(2).amax(1)

    def convexity(self) -> Tensor:
        """The smallest eigenvalue of the data's covariance, for each problem."""
        return self._eigenvalues()[:, 0]

    def _eigenvalues(self) -> Tensor:
        found: Tensor = torch.linalg.eigvalsh(self.x.mT @ self.x / self.x.shape[1])
        return found


def problems(count: int, samples: int, dimensions: int, noise: float, format: str, seed: int) -> Problems:
    """Problems drawn as in Section 3.1 of the paper: normal data, optimal weights uniform in [0, 100).

    Without noise the optimum is rounded to the format, because only then can weights in it fit the data perfectly (assumption A1).

    Args:
        count: Number of problems.
        samples: The samples of each.
        dimensions: The dimensions of each.
        noise: The standard deviation of the noise in the labels.
        format: The format of the weights.
        seed: The seed of everything that is drawn.
    """
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, samples, dimensions, dtype=torch.float64, generator=draw)
    optimum = 100 * torch.rand(count, dimensions, dtype=torch.float64, generator=draw)
    if not noise:
        optimum = qsim.quantize(optimum, format)
    y = (x @ optimum[:, :, None]).squeeze(2)
    return Problems(x, y + noise * torch.randn(count, samples, dtype=torch.float64, generator=draw), optimum)


@dataclass(frozen=True)
class Descent:
    """The settings of a descent.

    Attributes:
        method: One of `METHODS`.
        format: The format to round to.
        gradient: `ALL` or `ONE`.
        rate: The constant learning rate.
        seed: The seed of the samples and of stochastic rounding.
    """

    method: str
    format: str
    gradient: str
    rate: float
    seed: int


class DescendingWeights:
    """The weights of some problems during their descent from zero.

    Args:
        data: The problems.
        how: The settings of the descent.
    """

    def __init__(self, data: Problems, how: Descent) -> None:
        self.data, self.how = data, how
        exact = how.method in (EXACT, COMPUTE)
        # Float64 if weights are not rounded. Otherwise float32, which contains the values of the format, so that gradients need not be
        # rounded too; but the compensation of Kahan summation has the weights' dtype, and must not have more bits than they.
        dtype = torch.float64 if exact else weight_dtype(how.format) if how.method == KAHAN else torch.float32
        self._weights = nn.Parameter(torch.zeros(data.optimum.shape, dtype=dtype, device=data.x.device))
        self._optimizer: torch.optim.Optimizer = (
            torch.optim.SGD([self._weights], lr=how.rate)
            if exact
            else qsim.optim.SGD([self._weights], lr=how.rate, format=how.format, update=how.method, seed=how.seed)
        )
        self._order = torch.Generator().manual_seed(how.seed)

    @property
    def values(self) -> Tensor:
        """The weights in float64."""
        return self._weights.detach().double()

    def step(self) -> Tensor:
        """Take one step.

        Returns:
            The loss of each problem before the step, on the samples that were used.
        """
        x, y = self._samples()
        residuals = (x @ self.values[:, :, None]).squeeze(2) - y
        loss = residuals.square().mean(1) / 2
        if self.how.method == COMPUTE:
            residuals = qsim.quantize(residuals, self.how.format)
        gradient = (x.mT @ residuals[:, :, None]).squeeze(2) / x.shape[1]
        if self.how.method == COMPUTE:
            gradient = qsim.quantize(gradient, self.how.format)
        self._weights.grad = gradient.to(self._weights.dtype)
        self._optimizer.step()
        return loss

    def _samples(self) -> tuple[Tensor, Tensor]:
        data = self.data
        if self.how.gradient == ALL:
            return data.x, data.y
        count, samples = data.y.shape
        chosen = torch.randint(samples, (count,), generator=self._order).to(data.x.device)
        row = torch.arange(count, device=data.x.device)
        return data.x[row, chosen][:, None], data.y[row, chosen][:, None]


def weight_dtype(format: str) -> torch.dtype:
    """The narrowest dtype of weights that holds a format; the compensation of Kahan summation has the same dtype."""
    able = holders(qsim.format(format))
    return next(dtype for dtype in (torch.bfloat16, torch.float16, torch.float32) if dtype in able)
