"""A converted model for a monitor to watch."""

from __future__ import annotations

from typing import Any

from torch import nn

import qsim
from qsim import FivePoint, Quantizer

NOISY = Quantizer("e5m2", rounding="stochastic")
POINTS = FivePoint(act="e4m3", weight="e4m3", act_bwd=NOISY, weight_bwd=Quantizer("e4m3", "stochastic"), grad=NOISY)


def net(points: Any = POINTS, **options: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    return qsim.convert(model, points, **options)
