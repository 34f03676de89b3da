"""Ready-made points: modules from tensor to tensor that round, clip or disturb values, some with parameters that train.

Each is an `nn.Module` whose result has the shape and the dtype of its argument. It works on its own, in plain PyTorch code, and as a point
of a layer. Its attribute `gradient` says which gradient a layer uses: `"straight"`, that of the identity, or `"own"`, that of the module,
which also trains its parameters. Roundings are those of `Quantizer`, in any format and with any rounding; `generator=`, `seed=` and
`stream=` of a call set the random bits of a stochastic one.

Example:
    >>> import torch, qsim
    >>> layer = torch.nn.Linear(64, 10)
    >>> act, weight = qsim.points.LSQ("uint4"), qsim.points.LSQ("int4")
    >>> y = torch.nn.functional.linear(act(torch.rand(8, 64)), weight(layer.weight), layer.bias)
    >>> y.square().mean().backward()
    >>> weight.change.grad is not None, weight.gradient
    (True, 'own')
    >>> weight.call, qsim.points.resolve(weight.call)
    ("LSQ('int4')", LSQ(Int(4), rounding=nearest))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.points.affine import Affine
from qsim.points.base import PointModule, surrogate
from qsim.points.channels import Channels
from qsim.points.clamped import Clamped
from qsim.points.codebook import NF4, Codebook
from qsim.points.eden import MSEden
from qsim.points.estimators import DGE, GaussianGrid, TrustMask
from qsim.points.four_over_six import FourOverSix
from qsim.points.if4 import IF4
from qsim.points.learned import LSQ, PACT
from qsim.points.noise import Noise
from qsim.points.outer_scale import OuterScale
from qsim.points.outliers import Outliers
from qsim.points.rotated import Rotated
from qsim.points.stochastic_scales import StochasticScales
from qsim.points.transformer_engine import TransformerEngineNVFP4
from qsim.scaling import Block, PerAxis, PerBlock, PerRow, PerTensor, PerTile
from qsim.text.parsing import read_call

__all__ = [
    "DGE",
    "IF4",
    "LSQ",
    "NF4",
    "PACT",
    "Affine",
    "Channels",
    "Clamped",
    "Codebook",
    "FourOverSix",
    "GaussianGrid",
    "MSEden",
    "Noise",
    "OuterScale",
    "Outliers",
    "PointModule",
    "Rotated",
    "StochasticScales",
    "TransformerEngineNVFP4",
    "TrustMask",
    "resolve",
    "surrogate",
]

#: What the call of a point may contain, by name.
_MAKERS: dict[str, Callable[..., Any]] = {
    maker.__name__: maker
    for maker in (
        *(DGE, IF4, LSQ, PACT, Affine, Channels, Clamped, Codebook, FourOverSix, GaussianGrid, MSEden, Noise),
        *(OuterScale, Outliers, Rotated, StochasticScales, TransformerEngineNVFP4, TrustMask),
        *(Block, Hadamard, PerAxis, PerBlock, PerRow, PerTensor, PerTile, Quantizer),
    )
}


def resolve(call: str) -> PointModule | None:
    """Create the point whose call a text spells: a new module each time; `None` if the text is no call of a point.

    Args:
        call: For example `"LSQ('int4')"` or `"TrustMask(Quantizer('e2m1', scale='row'), 0.2)"`.

    Raises:
        TypeError: If an argument does not fit.
        ValueError: If the point refuses one.

    Example:
        >>> import qsim
        >>> qsim.points.resolve("LSQ('int4', step=0.5)")
        LSQ(Int(4), rounding=nearest)
        >>> qsim.points.resolve("e4m3") is None
        True
    """
    made = read_call(call, _MAKERS)
    return made if isinstance(made, PointModule) else None
