"""Rounding to nearest under scales that are corrected and rounded again, in plain torch; see `numbers.scales.ScaleCorrection`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim_kernels.numbers.grid import GridRounding
from qsim_kernels.numbers.scales import ScaleCorrection, ScaledRounding, Scales, Turn, rounding_of_scales
from qsim_kernels.torch import quantize_into
from qsim_kernels.torch.best import SMALLEST
from qsim_kernels.torch.hadamard import from_basis, hadamard, in_basis


def quantize_eden_into(
    out: Tensor,
    x: Tensor,
    flips: Tensor | None,
    scales: Scales,
    correction: ScaleCorrection,
    rounding: ScaledRounding,
    quantize: Callable[..., None] = quantize_into,
    transform: Callable[[Tensor, Turn], Tensor] = hadamard,
) -> None:
    """Round `x` under the corrected scales of tiles of one row; with a transform, return to the tensor's basis.

    Args:
        out: Of `x`'s shape.
        x: Values.
        flips: See `in_basis`.
        scales: The scales' grid, and what the largest magnitude of a tile becomes under its scale.
        correction: The correction.
        rounding: How elements are rounded, and the random bits of the scales, in the order of the tiles of whole groups.
        quantize: The function that rounds, as `reference.quantize_into` does.
        transform: The function that transforms, as `hadamard` does.
    """
    if not x.numel():
        return
    tiles, turn, elements, noise = rounding
    rows = in_basis(x, turn, flips, transform).view(-1, tiles.columns)
    padded = F.pad(rows, (0, -tiles.columns % correction.size))
    groups = padded.view(len(rows), -1, correction.size // tiles.width, tiles.width)
    amax = groups.abs().amax(-1, keepdim=True)
    # Tensors, because a GPU would multiply by the inverse of a number.
    reach, largest = (amax.new_full((), number) for number in (correction.reach, scales.largest))
    whole = amax.amax() / reach / largest
    # So large that products with scales are normal numbers.
    whole = torch.where(whole == 0, 1.0, whole).clamp(min=SMALLEST / scales.grid.least)
    made = torch.empty_like(amax)
    quantize(made, amax / largest / whole, GridRounding(scales.grid, rounding_of_scales(scales.rule)), (None, 0, 0))
    made = torch.where(made == 0, 1.0, made)
    quotients = groups / (made * whole)
    rounded = torch.empty_like(quotients)
    quantize(rounded, quotients, GridRounding(elements.grid, elements.rule), (None, 0, 0))
    corrected = torch.empty_like(made)
    quantize(corrected, made * _factors(quotients, rounded), GridRounding(scales.grid, correction.rule), noise)
    result = (rounded * (corrected * whole)).view(padded.shape)[:, : tiles.columns].reshape(x.shape)
    out.copy_(from_basis(result, turn, flips, transform))


def _factors(quotients: Tensor, rounded: Tensor) -> Tensor:
    """The factor by which a group's elements are too small on average; summed in float64, so that the order does not decide."""
    values = quotients.double()
    wanted, found = (values.mul(other).sum((-2, -1), keepdim=True) for other in (values, rounded.double()))
    return torch.where(found == 0, 1.0, wanted / found).to(quotients.dtype)
