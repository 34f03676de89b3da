"""Rounding in the basis of a transform, under scales that are chosen or corrected, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim_kernels.numbers.grid import GridRounding
from qsim_kernels.numbers.scales import ScaleChoice, ScaleCorrection, ScaledRounding, Scales, Turn, rounding_of_scales
from qsim_kernels.torch import quantize_into
from qsim_kernels.torch.chunks import in_tiles
from qsim_kernels.torch.hadamard import flipped, hadamard, turned_back

#: The smallest scale: a normal number of float32, so that elements can be divided by it.
SMALLEST = 2.0**-126


def quantize_in_basis(
    round_values: Callable[..., Tensor],
    out: Tensor,
    x: Tensor,
    flips: Tensor | None,
    scales: Scales,
    how: Any,
    rounding: ScaledRounding,
    quantize: Callable[..., None] = quantize_into,
    transform: Callable[[Tensor, Turn], Tensor] = hadamard,
) -> None:
    """Round `x` in the basis of a transform, if there is one, and return to the tensor's own.

    Args:
        round_values: The function that rounds float32 or float64 values in logical order, given `scales`, `how`, `rounding` and `quantize`.
        out: Of `x`'s shape.
        x: Values.
        flips: 1 or -1 for each element of a block of the transform, which changes its signs.
        scales: How the scales of tiles are made.
        how: What is special about the operator.
        rounding: How elements are rounded.
        quantize: The function that rounds elements, as `reference.quantize_into` does.
        transform: The function that transforms, as `hadamard` does.
    """
    if not x.numel():
        return
    values, turn = x.contiguous().to(torch.promote_types(x.dtype, torch.float32)), rounding.turn
    if turn is not None:
        values = transform(flipped(values, turn, flips), turn)
    result = round_values(values, scales, how, rounding, quantize).reshape(x.shape)
    out.copy_(result if turn is None else flipped(turned_back(result, turn, transform), turn, flips))


def under_better_scales(
    values: Tensor, scales: Scales, choice: ScaleChoice, rounding: ScaledRounding, quantize: Callable[..., None]
) -> Tensor:
    """Round under each candidate's scales, and keep the better values of each tile; see `ScaleChoice`.

    Random bits of a candidate follow those of the one before, in the order of whole tiles.
    """
    tiles, _, elements, noise = rounding
    groups = in_tiles(values.view(-1, tiles.rows, tiles.columns), tiles)
    within = (0, 2, 4) if tiles.across else (2, 4)
    amax = groups.abs().amax(within, keepdim=True).double()
    # Tensors, because a GPU would multiply by the inverse of a number.
    reach, *candidates = (amax.new_full((), number) for number in (choice.reach * scales.largest, *choice.candidates))
    whole = amax.amax() / reach
    whole = torch.where(whole == 0, 1.0, whole)
    # All candidates in one tensor: half as many operations.
    wanted = torch.stack([amax / candidate for candidate in candidates]) / whole
    made = torch.empty_like(wanted)
    quantize(made, wanted, GridRounding(scales.grid, rounding_of_scales(scales.rule)), (None, 0, 0))
    made = (made.clamp(min=scales.least) * whole).clamp(min=SMALLEST).to(groups.dtype)
    quotients = groups / made
    rounded = torch.empty_like(quotients)
    quantize(rounded, quotients, GridRounding(elements.grid, elements.rule), noise)
    products = rounded * made
    # In float64, so that the order of their sum does not decide.
    difference = products.double() - groups.double()
    errors = (difference.square() if choice.squares else difference.abs()).sum([dim + 1 for dim in within], keepdim=True)
    best, least = products[0], errors[0]
    for other, error in zip(products[1:], errors[1:], strict=True):
        best, least = torch.where(error < least, other, best), torch.minimum(error, least)
    return best.flatten(3).flatten(1, 2)[:, : tiles.rows, : tiles.columns]


def under_corrected_scales(
    values: Tensor, scales: Scales, correction: ScaleCorrection, rounding: ScaledRounding, quantize: Callable[..., None]
) -> Tensor:
    """Round to nearest under the scales of tiles of one row, which are corrected and rounded again; see `ScaleCorrection`.

    Random bits are those of the scales, in the order of the tiles of whole groups.
    """
    tiles, _, elements, noise = rounding
    padded = F.pad(values.view(-1, tiles.columns), (0, -tiles.columns % correction.size))
    groups = padded.view(len(padded), -1, correction.size // tiles.width, tiles.width)
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
    quantize(corrected, made * _corrections(quotients, rounded), GridRounding(scales.grid, correction.rule), noise)
    return (rounded * (corrected * whole)).view(padded.shape)[:, : tiles.columns]


def _corrections(quotients: Tensor, rounded: Tensor) -> Tensor:
    """The factor by which a group's elements are too small on average; summed in float64, so that the order does not decide."""
    values = quotients.double()
    wanted, found = (values.mul(other).sum((-2, -1), keepdim=True) for other in (values, rounded.double()))
    return torch.where(found == 0, 1.0, wanted / found).to(quotients.dtype)
