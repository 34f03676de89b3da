"""A program that uses qsim, for type checkers: `make dist` checks it against the installed wheel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Float, Quantizer, Stochastic


def rounded(x: Tensor) -> Tensor:
    """Round in several ways."""
    own: Tensor = qsim.quantize(x, Float(3, 2), rounding=Stochastic(8), seed=1)
    named: Tensor = qsim.quantize(own, "e4m3", overflow="nonfinite")
    spread: Tensor = qsim.transforms.Hadamard(16)(named)
    block: qsim.Block = qsim.scaling.NVFP4
    return Quantizer("mxfp4")(qsim.quantize(spread, block))


def converted(model: nn.Module) -> nn.Module:
    """Convert a model, by a recipe and by points."""
    points = FivePoint(act="e4m3", weight="e4m3", grad=Quantizer("e5m2", "stochastic"))
    qsim.convert(model, points, exclude=["head"])
    layer: nn.Linear = qsim.nn.Linear(4, 2, points=qsim.recipes.fp8_hybrid().points)
    return nn.Sequential(model, layer)


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Create an optimizer whose updates round."""
    return qsim.optim.AdamW(model.parameters(), lr=1e-3, weight="bf16", update="stochastic")
