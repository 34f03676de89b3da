"""Scales of a whole tensor that is not there as a whole: found from largest magnitudes, and then used for its parts."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from qsim.formats import FP32
from qsim.functional.codes import decode, encode
from qsim.functional.quantizer import Quantizer
from qsim.random.noise import Noise
from qsim.scaling import PerAxis, PerBlock, PerRow, PerTensor, PerTile, Scaling


def without_whole(point: Quantizer) -> tuple[Scaling | None, Quantizer]:
    """The scaling of a point that has a scale of the whole tensor, or of its slices, and the rounding under that scale.

    Returns:
        The scaling, `None` if there is no such scale; and the rounding.

    Example:
        >>> from qsim import Quantizer
        >>> whole, under = without_whole(Quantizer("nvfp4"))
        >>> str(whole.outer), str(under.scale)
        ('tensor', 'blocks(16, e4m3)')
    """
    scale = point.scale
    if isinstance(scale, (PerTensor, PerAxis)):
        return scale, replace(point, scale=None)
    if isinstance(scale, (PerRow, PerBlock, PerTile)) and scale.outer is not None:
        given = {name: getattr(scale, name) for name in scale._geometry}
        return scale, replace(point, scale=type(scale)(**given, format=scale.format, rule=scale.rule, margin=scale.margin))
    return None, point


def scales_from(amaxes: Tensor, point: Quantizer, scaling: Scaling) -> Tensor:
    """The scales of tensors or slices with given largest magnitudes.

    Args:
        amaxes: The largest magnitudes, flat.
        point: The rounding.
        scaling: The first result of `without_whole`.

    Example:
        >>> import torch
        >>> from qsim import Quantizer
        >>> point = Quantizer("e4m3", scale="tensor")
        >>> scales_from(torch.tensor([448.0, 1.0]), point, point.scale)
        tensor([1.0000, 0.0022])
    """
    if scaling.outer is not None:
        blocks = PerBlock(1, format=scaling.format, rule=scaling.rule, margin=scaling.margin, outer=scaling.outer)
        found = encode(amaxes.float().amax().view(1, 1), point.format, scale=blocks).outer
        assert found is not None  # there is an outer scale
        return found.view(1)
    rows = PerRow(format=scaling.format, rule=scaling.rule, margin=scaling.margin)
    scales = encode(amaxes.float().view(-1, 1), point.format, scale=rows).scales
    return (scales if scaling.format == FP32 else decode(scales, scaling.format)).view(-1)


def rounded_under(x: Tensor, under: Quantizer, scale: Tensor, seed: Noise | None = None) -> Tensor:
    """Round a part of a tensor under a scale that is known.

    Example:
        >>> import torch
        >>> from qsim import Quantizer
        >>> rounded_under(torch.tensor([0.3, 100.0]), Quantizer("e2m1"), torch.tensor(0.25))
        tensor([0.2500, 1.5000])
    """
    return (under((x / scale).float(), seed=seed) * scale).to(x.dtype)
