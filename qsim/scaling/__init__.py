"""Scales: which elements share one, which values it can have, and how it follows from its elements.

With a scale `s` a value becomes `Q(x / s) * s`: the format's range is moved to the magnitudes of the values. A scale is a frozen value, an
argument of `Quantizer` or `quantize`.

Example:
    >>> import torch, qsim
    >>> x = torch.tensor([[0.001, 0.003], [100.0, 300.0]])
    >>> qsim.quantize(x, "e2m1", scale=qsim.scaling.Channel(0))
    tensor([[1.0000e-03, 3.0000e-03],
            [1.0000e+02, 3.0000e+02]])
    >>> from typing import get_args
    >>> get_args(qsim.scaling.Rule)
    ('fit', 'ceil', 'floor', 'even')
"""

from __future__ import annotations

from qsim.scaling.base import Rule, Scaling, Tensor
from qsim.scaling.given import Delayed, Given
from qsim.scaling.tiling import Blocks, Channel, Tiles
from qsim.text.parsing import read_call

__all__ = ["Blocks", "Channel", "Delayed", "Given", "Rule", "Scaling", "Tensor", "Tiles", "resolve"]


def resolve(scale: str | Scaling | None) -> Scaling | None:
    """Resolve a scale, its `repr`, `"tensor"` or `"delayed"` to a scale.

    Raises:
        TypeError: If it is neither.
        ValueError: If a string is not such a call.

    Example:
        >>> import qsim
        >>> scale = qsim.scaling.Blocks(16, format="e4m3", outer=qsim.scaling.Tensor())
        >>> qsim.scaling.resolve(repr(scale)) == scale
        True
    """
    if scale is None or isinstance(scale, Scaling):
        return scale
    if not isinstance(scale, str):
        raise TypeError(f"scale must be one of qsim.scaling's, got {scale!r}")
    kinds = {kind.__name__: kind for kind in (Tensor, Channel, Blocks, Tiles, Given, Delayed)}
    # A kind without required arguments may be written without parentheses.
    whole = {name.lower(): f"{name}()" for name in ("Tensor", "Delayed")}
    found: Scaling | None = read_call(whole.get(scale.lower(), scale), kinds)
    if found is None:
        raise ValueError(f"scale must be {', '.join(f'{name}(…)' for name in kinds)}, got {scale!r}")
    return found
