"""Ready-made points, one of each kind and variant, for tests that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable

import qsim
from qsim import points
from qsim.points import PointModule

READY: dict[str, Callable[[], PointModule]] = {
    "LSQ": lambda: points.LSQ("int4"),
    "LSQ, given step": lambda: points.LSQ("int4", step=0.25),
    "LSQ, channels": lambda: points.LSQ(qsim.Quantizer("e2m1", "toward_zero"), channels=6, dim=-1),
    "PACT": lambda: points.PACT("uint4", alpha=1.5),
    "PACT, signed": lambda: points.PACT("int4", alpha=1.5),
    "Noise": lambda: points.Noise(0.1, relative_to="rms"),
    "Affine": lambda: points.Affine("uint4"),
    "Affine, groups": lambda: points.Affine("int8", qsim.scaling.PerBlock(4)),
    "Affine, fixed": lambda: points.Affine("int4", scale=0.25, zero_point=-2),
    "Codebook": lambda: points.Codebook(points.NF4, qsim.scaling.PerBlock(4)),
    "Codebook, learned": lambda: points.Codebook([-1.0, -0.3, 0.1, 0.8], learned=True),
    "FourOverSix": lambda: points.FourOverSix(),
    "FourOverSix, mse": lambda: points.FourOverSix(qsim.scaling.PerBlock(4), error="mse", reach=448),
    "IF4": lambda: points.IF4(),
    "IF4, stochastic": lambda: points.IF4(rounding="stochastic"),
    "StochasticScales": lambda: points.StochasticScales(qsim.Quantizer("nvfp4", "stochastic")),
    "DGE": lambda: points.DGE("mxfp4"),
    "GaussianGrid": lambda: points.GaussianGrid(3),
    "TrustMask": lambda: points.TrustMask.quest(4),
    "TrustMask of LSQ": lambda: points.TrustMask(points.LSQ("int4"), trust=0.2),
    "Outliers": lambda: points.Outliers("e2m1", quantile=0.9),
    "Outliers, tokens": lambda: points.Outliers("e2m1", quantile=0.9, dim=-1),
    "Clamped": lambda: points.Clamped(qsim.Quantizer("e2m1", scale="row"), quantile=0.9),
    "OuterScale": lambda: points.OuterScale("nvfp4", qsim.scaling.PerBlock(128)),
    "Rotated": lambda: points.Rotated(points.TrustMask.quest(4), qsim.transforms.Hadamard(4)),
    "Rotated, redrawn": lambda: points.Rotated("mxfp4", "Hadamard(32)", redraw="call"),
    "MSEden": lambda: points.MSEden(32),
    "FourOverSix, stochastic": lambda: points.FourOverSix(rounding="stochastic"),
    "TransformerEngineNVFP4": lambda: points.TransformerEngineNVFP4(),
}

#: Those that draw, and those that give the same values every time.
RANDOM = ("Noise", "Rotated, redrawn", "MSEden", "FourOverSix, stochastic", "IF4, stochastic", "StochasticScales")
DETERMINISTIC = {name: make for name, make in READY.items() if name not in RANDOM}
