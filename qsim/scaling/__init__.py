"""Scales: which elements share one, which values it can have, and how it follows from its elements.

With a scale `s` a value becomes `Q(x / s) * s`: the format's range is moved to the magnitudes of the values. A scale is a frozen value, an
argument of `Quantizer` or `quantize`; granularities have torchao's names. A block format is an element format with such a scale.

Example:
    >>> import torch, qsim
    >>> x = torch.tensor([[0.001, 0.003], [100.0, 300.0]])
    >>> qsim.quantize(x, "e2m1", scale=qsim.scaling.PerRow())
    tensor([[1.0000e-03, 3.0000e-03],
            [1.0000e+02, 3.0000e+02]])
    >>> from typing import get_args
    >>> get_args(qsim.scaling.Rule)
    ('fit', 'ceil', 'floor', 'even', 'ceil_log2', 'stochastic')
    >>> from qsim.scaling import FP8_1X128, FP8_128X128, MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, MXINT8, NAMED, NVFP4
    >>> x = torch.linspace(0.1, 3.1, 32)
    >>> for fmt in (MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXINT8, MXFP4, NVFP4):
    ...     print(f"{(qsim.quantize(x, fmt) - x).abs().max():.4f}", fmt)
    0.1177 Block('e4m3', 32, scale='e8m0', rule='floor')
    0.2290 Block('e5m2', 32, scale='e8m0', rule='floor')
    0.1177 Block('e2m3', 32, scale='e8m0', rule='floor')
    0.2290 Block('e3m2', 32, scale='e8m0', rule='floor')
    0.0153 Block('Fixed(8, 6)', 32, scale='e8m0', rule='floor')
    0.4806 Block('e2m1', 32, scale='e8m0', rule='floor')
    0.4839 Block('e2m1', 16, scale='e4m3', rule='fit', outer="PerTensor(format='fp32', rule='fit')")
    >>> FP8_1X128 == NAMED["fp8_1x128"], FP8_128X128 == NAMED["fp8_128x128"]
    (True, True)
"""

from __future__ import annotations

import difflib
from typing import NoReturn

from qsim.scaling.base import PerTensor, Rule, Scaling
from qsim.scaling.block_formats import (
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NAMED,
    NVFP4,
    Block,
)
from qsim.scaling.given import Delayed, Given
from qsim.scaling.tiling import PerAxis, PerBlock, PerRow, PerTile
from qsim.text.parsing import read_call

__all__ = [
    "Block",
    "Delayed",
    "FP8_128X128",
    "FP8_1X128",
    "Given",
    "MXFP4",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "MXINT8",
    "NAMED",
    "NVFP4",
    "PerAxis",
    "PerBlock",
    "PerRow",
    "PerTensor",
    "PerTile",
    "Rule",
    "Scaling",
    "resolve",
]

#: Names that granularities had before 1.0, for error messages.
_RENAMED = {"Tensor": "PerTensor", "Channel": "PerRow (a scale per row) or PerAxis", "Blocks": "PerBlock", "Tiles": "PerTile"}


def resolve(scale: str | Scaling | None) -> Scaling | None:
    """Resolve a scale, its `repr`, `"tensor"`, `"row"` or `"delayed"` to a scale.

    Raises:
        TypeError: If it is neither.
        ValueError: If a string is not such a call.

    Example:
        >>> import qsim
        >>> scale = qsim.scaling.PerBlock(16, format="e4m3", outer=qsim.scaling.PerTensor())
        >>> qsim.scaling.resolve(repr(scale)) == scale
        True
    """
    if scale is None or isinstance(scale, Scaling):
        return scale
    if not isinstance(scale, str):
        raise TypeError(f"scale must be one of qsim.scaling's, got {scale!r}")
    kinds = {kind.__name__: kind for kind in (PerTensor, PerRow, PerAxis, PerBlock, PerTile, Given, Delayed)}
    # A kind without required arguments may be written as one word.
    whole = {"tensor": "PerTensor()", "row": "PerRow()", "delayed": "Delayed()"}
    parsed: Scaling | None = read_call(whole.get(scale.lower(), scale), kinds)
    if parsed is None:
        former = scale.partition("(")[0]
        hint = f"; {former} is called {_RENAMED[former]}" if former in _RENAMED else ""
        close = difflib.get_close_matches(scale.lower(), whole, n=1)
        hint = hint or (f": did you mean {close[0]!r}?" if close else "")
        words = [*map(repr, whole), *(f"{name}(…)" for name in kinds)]
        raise ValueError(f"scale must be {', '.join(words)}, got {scale!r}{hint}")
    return parsed


def __getattr__(name: str) -> NoReturn:
    hint = f": it is called {_RENAMED[name]}" if name in _RENAMED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
