"""The error of one layer's gradient at one point."""

from __future__ import annotations

from dataclasses import dataclass

from qsim.diagnostics.gradients.statistics import Estimate


@dataclass(frozen=True)
class GradientError:
    """The error of a layer's gradient when a point rounds; all values are squared norms.

    Attributes:
        layer: The layer whose gradient it is, or `"all weights"`.
        point: Point that rounds, in all layers, or `"all"`, or `"none"`.
        bias: Squared mean error of the gradient: `|E[h] - E[g]|²`, `g` being the gradient in full precision.
        sampling: `T^s`: its variance from batch to batch.
        rounding: `T^Q`: its variance from draw to draw.
        gradient: `|E[g]|²`, to compare with.

    Example:
        >>> import torch, qsim
        >>> _ = torch.manual_seed(0)
        >>> model = qsim.convert(torch.nn.Linear(8, 4), qsim.FivePoint(weight="e4m1", weight_bwd="same"))
        >>> found = qsim.diagnostics.gradient_error(model, lambda model, x: model(x).square().mean(), list(torch.randn(8, 16, 8)))
        >>> error = found.of("weight")
        >>> error.bias.low > 0, error.rounding.value
        (True, 0.0)
    """

    layer: str
    point: str
    bias: Estimate
    sampling: Estimate
    rounding: Estimate
    gradient: Estimate
