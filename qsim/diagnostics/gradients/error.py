"""The error of one layer's gradient at one point."""

from __future__ import annotations

from dataclasses import dataclass

from qsim.diagnostics.gradients.statistics import Estimate


@dataclass(frozen=True)
class GradientError:
    """The error of a layer's gradient when a point rounds; all values are squared norms.

    Attributes:
        layer: The layer whose gradient it is, or `"all weights"`.
        point: The point that rounds, in all layers, or `"all"`, or `"none"`.
        bias: The squared mean error of the gradient: `|E[h] - E[g]|²`, `g` being the gradient in full precision.
        sampling: `T^s`: its variance from batch to batch.
        rounding: `T^Q`: its variance from draw to draw.
        gradient: `|E[g]|²`, to compare with.
    """

    layer: str
    point: str
    bias: Estimate
    sampling: Estimate
    rounding: Estimate
    gradient: Estimate
