"""Rounding under the better of two scales for each tile, in plain torch; see `numbers.scales.ScaleChoice`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from qsim_kernels.numbers.grid import GridRounding
from qsim_kernels.numbers.scales import ScaleChoice, ScaledRounding, Scales, Turn, rounding_of_scales
from qsim_kernels.torch import quantize_into
from qsim_kernels.torch.hadamard import from_basis, hadamard, in_basis

#: The smallest scale: a normal number of float32, so that elements can be divided by it.
SMALLEST = 2.0**-126


def quantize_best_into(
    out: Tensor,
    x: Tensor,
    flips: Tensor | None,
    scales: Scales,
    choice: ScaleChoice,
    rounding: ScaledRounding,
    quantize: Callable[..., None] = quantize_into,
    transform: Callable[[Tensor, Turn], Tensor] = hadamard,
) -> None:
    """Round `x` under each candidate's scales, and keep the better values of each tile; with a transform, return to the tensor's basis.

    Args:
        out: Of `x`'s shape.
        x: Values.
        flips: See `in_basis`.
        scales: The scales' grid, the smallest scale, and the largest value of the elements' grid.
        choice: The candidates, and how they are compared.
        rounding: How elements are rounded. Random bits of a candidate follow those of the one before, in the order of whole tiles.
        quantize: The function that rounds, as `reference.quantize_into` does.
        transform: The function that transforms, as `hadamard` does.
    """
    if not x.numel():
        return
    tiles, turn, elements, noise = rounding
    matrices = in_basis(x, turn, flips, transform).view(-1, tiles.rows, tiles.columns)
    down, along = -(-tiles.rows // tiles.height), -(-tiles.columns // tiles.width)
    padded = F.pad(matrices, (0, along * tiles.width - tiles.columns, 0, down * tiles.height - tiles.rows))
    groups = padded.view(-1, down, tiles.height, along, tiles.width)
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
    best = best.reshape(padded.shape)[:, : tiles.rows, : tiles.columns].reshape(x.shape)
    out.copy_(from_basis(best, turn, flips, transform))
