"""Additive noise."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from qsim.points.base import Gradient, PointModule, check_number, wide

Distribution = Literal["normal", "uniform"]
Unit = Literal["rms", "max"]


class Noise(PointModule):
    """Additive noise of mean zero, in training and in evaluation: a model of analog hardware, or pseudo quantization noise.

    Uniform noise of the standard deviation `step / 12**0.5` is spread over one step, as the error of rounding to multiples of it: the noise
    of DiffQ, Défossez et al., arXiv 2104.09987. The gradient is that of the identity. The noise is drawn from torch's generator of the
    tensor's device, as dropout's is, or from `generator=` of a call.

    Args:
        std: The standard deviation of the noise; 0 adds none, as the beginning of a sweep.
        distribution: `"normal"` or `"uniform"`.
        relative_to: The unit of `std`: `"rms"`, the tensor's root mean square, `"max"`, its largest magnitude, or `None` for 1.

    Example:
        >>> import torch, qsim
        >>> noise = qsim.points.Noise(0.01, relative_to="max")
        >>> x = torch.randn(1000)
        >>> error = noise(x) - x
        >>> bool((error.std() / x.abs().max() - 0.01).abs() < 0.002)
        True
    """

    gradient: Gradient = "straight"

    def __init__(self, std: float, distribution: Distribution = "normal", *, relative_to: Unit | None = None) -> None:
        super().__init__()
        self.std = check_number("Noise", "std", std, -math.inf, math.inf)
        if self.std < 0:
            raise ValueError(f"Noise: std must not be negative, got {std!r}")
        if distribution not in get_args(Distribution):
            raise ValueError(f"Noise: distribution must be 'normal' or 'uniform', got {distribution!r}")
        if relative_to not in (None, *get_args(Unit)):
            raise ValueError(f"Noise: relative_to must be 'rms', 'max' or None, got {relative_to!r}")
        self.distribution, self.relative_to = distribution, relative_to

    def rounded(self, x: Tensor, *, generator: torch.Generator | None = None, **noise: Any) -> Tensor:
        """Add noise."""
        if noise:
            raise TypeError(f"Noise: it draws from a generator; give generator= instead of {', '.join(f'{name}=' for name in noise)}")
        values = wide(x)
        drawn = torch.empty(x.shape, dtype=values.dtype, device=x.device if generator is None else generator.device)
        if self.distribution == "normal":
            drawn = drawn.normal_(generator=generator)
        else:
            drawn = drawn.uniform_(-math.sqrt(3), math.sqrt(3), generator=generator)
        return (values + drawn.to(x.device) * (self.std * self._unit(values.detach()))).to(x.dtype)

    def _unit(self, x: Tensor) -> Tensor | float:
        if self.relative_to is None:
            return 1.0
        return x.abs().max() if self.relative_to == "max" else x.square().mean().sqrt()

    def extra_repr(self) -> str:
        """The parameters."""
        return f"{self.std:g}, {self.distribution!r}" + (f", relative_to={self.relative_to!r}" if self.relative_to else "")
