"""Scales, and rounding under them, in plain torch; see `qsim_kernels.numbers.scales`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qsim_kernels.meanings import torch as meaning
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE, used_bits
from qsim_kernels.numbers.grid import GridRounding, Noise
from qsim_kernels.numbers.scales import (
    SCALE_INDICES,
    Restore,
    ScaledRounding,
    ScaleGroups,
    ScaleRule,
    Scales,
    TileSizes,
    Turn,
    rounding_of_scales,
    scale_numbers,
    variant_of_scales,
)
from qsim_kernels.numbers.sums import SINGLE_GRID
from qsim_kernels.torch import quantize_into, runs
from qsim_kernels.torch.basis import SMALLEST, quantize_in_basis, under_better_scales, under_corrected_scales
from qsim_kernels.torch.chunks import in_tiles
from qsim_kernels.torch.hadamard import hadamard
from qsim_kernels.torch.philox import ElementNoise, key_of, random_bits
from qsim_kernels.torch.rounding import one_nan

_LARGEST = torch.finfo(torch.float32).max
#: That of scales whose rule draws nothing.
NO_NOISE: Noise = (None, 0, 0)


def amaxes_into(out: Tensor, x: Tensor, tiles: TileSizes, turn: Turn | None, finite: bool) -> None:
    """Write the largest magnitude of each tile.

    Args:
        out: Of `tiles.counts`' shape.
        x: Values.
        tiles: Which elements belong together.
        turn: The transform of the values beforehand.
        finite: Whether to ignore non-finite values; otherwise a NaN makes its tile's magnitude NaN.
    """
    if not out.numel():
        return
    matrices = (x if turn is None else hadamard(x, turn)).reshape(-1, tiles.rows, tiles.columns).abs()
    if finite:
        matrices = torch.where(matrices.isfinite(), matrices, 0)
    if tiles.across:
        matrices = matrices.amax(0, keepdim=True)
    out.copy_(in_tiles(matrices, tiles).amax((2, 4)))


def scales_into(
    out: Tensor, amaxes: Tensor, under: Tensor | None, scales: Scales, noise: Noise = NO_NOISE, tiles: TileSizes | None = None
) -> None:
    """Write the scales that result from the largest magnitudes.

    Args:
        out: float32. NaN where the magnitude is not finite.
        amaxes: The largest magnitudes.
        under: A 0-d float32 scale of the whole tensor, which these scales are under: they are computed for `x / under`. Or such a scale for
            each matrix, of shape [matrices, 1, 1].
        scales: How scales are computed.
        noise: The random bits of the tensor, for rules that draw.
        tiles: Which elements share a scale; if not known, each is a tensor's element.
    """
    if not out.numel():
        return
    largest = amaxes.to(torch.float64)
    if under is not None:
        largest = largest / under.to(torch.float64)
    out.copy_(scales_of(largest, scales, _noise_of_scales(largest, noise, tiles) if scales.draws else None))


def _noise_of_scales(largest: Tensor, noise: Noise, tiles: TileSizes | None) -> ElementNoise:
    """The random bits of scales: those of the first elements of their tiles, behind `SCALE_INDICES`."""
    seed, stream, offset = noise
    assert seed is not None  # the operators reject rules that draw without a seed
    if tiles is None:
        firsts = torch.arange(largest.numel(), device=largest.device)
    else:
        steps = tiles.rows * tiles.columns, tiles.height * tiles.columns, tiles.width
        pairs = zip(largest.shape, steps, strict=True)
        matrix, down, along = (torch.arange(size, device=largest.device) * step for size, step in pairs)
        firsts = (matrix[:, None, None] + down[:, None] + along).view(-1)
    return ElementNoise(key_of(seed, largest), stream, SCALE_INDICES + offset + firsts)


def scales_of_tiles_into(
    out: Tensor,
    x: Tensor,
    under: Tensor | None,
    tiles: TileSizes,
    turn: Turn | None,
    finite: bool,
    scales: Scales,
    noise: Noise = NO_NOISE,
    largest: Callable[..., None] = amaxes_into,
    make: Callable[..., None] = scales_into,
) -> None:
    """Write the scales of a tensor's tiles: `amaxes_into` and `scales_into` in one.

    Args:
        out: See `scales_into`.
        x: See `amaxes_into`.
        under: See `scales_into`.
        tiles: See `amaxes_into`.
        turn: See `amaxes_into`.
        finite: See `amaxes_into`.
        scales: See `scales_into`.
        noise: See `scales_into`.
        largest: The function that finds the largest magnitudes, as `amaxes_into` does.
        make: The function that computes scales, as `scales_into` does.
    """
    amaxes = x.new_empty(out.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    largest(amaxes, x, tiles, turn, finite)
    make(out, amaxes, under, scales, noise, tiles)


def quantize_tiles_into(
    out: Tensor, scales: Tensor | None, x: Tensor, under: Tensor | None, making: Scales, rounding: ScaledRounding
) -> None:
    """Round `x` under the scales of its tiles: `scales_of_tiles_into` and `quantize_scaled_into` in one.

    The scales are written if a tensor for them is given.
    """
    x = x if rounding.turn is None else hadamard(x, rounding.turn)
    if scales is None:
        scales = x.new_empty(rounding.tiles.counts(x.numel()), dtype=torch.float32)
    scales_of_tiles_into(scales, x, under, rounding.tiles, None, False, making, rounding.noise)
    quantize_scaled_into(out, x, scales, under, rounding._replace(turn=None))


def quantize_both_ways_into(
    outs: Sequence[Tensor],
    x: Tensor,
    making: Scales,
    roundings: Sequence[ScaledRounding],
    quantize_tiles: Callable[..., None] = quantize_tiles_into,
) -> None:
    """Round `x` into two tensors, as `quantize_tiles` does, by roundings that differ only in their tiles."""
    for out, rounding in zip(outs, roundings, strict=True):
        quantize_tiles(out, None, x, None, making, rounding)


def quantize_tiles_and_amaxes_into(
    out: Tensor,
    amaxes: Tensor,
    x: Tensor,
    under: Tensor | None,
    making: Scales,
    rounding: ScaledRounding,
    tiles: TileSizes,
    turn: Turn,
    quantize_tiles: Callable[..., None] = quantize_tiles_into,
    largest: Callable[..., None] = amaxes_into,
) -> None:
    """Round `x`, as `quantize_tiles` does, and write the largest finite magnitudes of tiles of a transform of it, as `largest` does."""
    quantize_tiles(out, None, x, under, making, rounding)
    largest(amaxes, x, tiles, turn, True)


def scales_of(largest: Tensor, scales: Scales, noise: ElementNoise | None = None, arithmetic: Any = None) -> Tensor:
    """The scales of tiles with given largest magnitudes, in float64.

    Args:
        largest: The largest magnitudes.
        scales: How scales are computed.
        noise: Their random bits, for rules that draw.
        arithmetic: `arithmetic.scales` in float64's bits, if not for tensors.
    """
    if scales.rule == ScaleRule.FIT and scales.grid == SINGLE_GRID:
        # By a conversion: bits need views, which vmap lacks before torch 2.13.
        wanted = (largest * math.ldexp(1.0, scales.margin) / scales.largest).to(torch.float32).clamp(scales.least, _LARGEST)
        return torch.where(largest.isfinite(), wanted, math.nan)
    arithmetic = arithmetic or meaning.scales(DOUBLE)
    drawn = None if noise is None else _drawn(largest, scales, noise)
    bits = arithmetic.scale_of(largest.view(torch.int64), drawn, scale_numbers(scales), scales.rule, variant_of_scales(scales.rule))
    return bits.view(torch.float64).to(torch.float32)  # type: ignore[no-any-return]


def _drawn(largest: Tensor, scales: Scales, noise: ElementNoise) -> Tensor:
    """The random bits of scales with given largest magnitudes, as `arithmetic.scales` takes them."""
    rule, words = rounding_of_scales(scales.rule), random_bits(noise, 32).view(largest.shape)
    return meaning.rounding(DOUBLE).random_bits(words, used_bits(DOUBLE, rule.bits, rule.correction))  # type: ignore[no-any-return]


def quantize_scaled_into(
    out: Tensor, x: Tensor, scales: Tensor, under: Tensor | None, rounding: ScaledRounding, quantize: Callable[..., None] = quantize_into
) -> None:
    """Round `x` divided by its scales onto a grid.

    `x` is multiplied by the scale's inverse. If that is a power of two, this is exact; otherwise inverse and product are rounded to
    float32, or to float64 if `x` is float64. So is the product with the scale.

    Args:
        out: Of `x`'s shape.
        x: Values.
        scales: The output of `scales_into`.
        under: The scale of the whole tensor, if they are under one.
        rounding: How it is rounded.
        quantize: The function that rounds them, as `reference.quantize_into` does.
    """
    if not x.numel():
        return
    tiles, turn, elements, noise = rounding
    x = x if turn is None else hadamard(x, turn)
    elements_of_x, whole = divided(x, scales, under, tiles)
    if elements.rule.leaves_zero:
        elements_of_x = kept_from_zero(elements_of_x, x.contiguous().to(elements_of_x.dtype).view(elements_of_x.shape))
    rounded = torch.empty_like(elements_of_x)
    quantize(rounded, elements_of_x, GridRounding(elements.grid, elements.rule), noise)
    if elements.restore:
        rounded = rounded * spread(whole if elements.restore == Restore.ALL else scales.to(rounded.dtype), x, tiles)
        if elements.rule.saturates:
            rounded = saturated(rounded, out.dtype)
    out.copy_(one_nan(rounded.to(out.dtype)).view(out.shape))


def under_nested_scales(
    values: Tensor, making: Scales, groups: ScaleGroups, rounding: ScaledRounding, quantize_tiles: Callable[..., None]
) -> Tensor:
    """Divide by the scales of groups, round under the scales of tiles, as `quantize_tiles_into` does, and multiply."""
    largest = values.new_empty(groups.tiles.counts(values.numel()))
    amaxes_into(largest, values, groups.tiles, None, False)
    # Divided by a tensor, because a GPU would multiply by the inverse of a number.
    scale = largest / largest.new_full((), groups.reach)
    scale = spread(torch.where(scale == 0, 1.0, scale).clamp(min=SMALLEST), values, groups.tiles).reshape(values.shape)
    rounded = torch.empty_like(values)
    elements = rounding.elements._replace(restore=Restore.ALL)
    quantize_tiles(rounded, None, values / scale, None, making, rounding._replace(turn=None, elements=elements))
    return rounded * scale


# Round in a transform's basis: under scales that are chosen, corrected, or under those of groups; see `quantize_in_basis`.
quantize_best_into, quantize_eden_into = (partial(quantize_in_basis, each) for each in (under_better_scales, under_corrected_scales))
quantize_nested_into = partial(quantize_in_basis, under_nested_scales, quantize=quantize_tiles_into)
# The same of matrices that are runs of rows.
hadamard_of_runs = partial(runs.hadamard_of_runs, transform=hadamard)
amaxes_of_runs_into = partial(runs.amaxes_of_runs_into, transform=hadamard, largest=amaxes_into)
quantize_runs_into = partial(runs.quantize_runs_into, transform=hadamard, quantize_tiles=quantize_tiles_into)


def divided(x: Tensor, scales: Tensor, under: Tensor | None, tiles: TileSizes) -> tuple[Tensor, Tensor]:
    """A tensor divided by its scales, as matrices, and those scales times that of the whole tensor, if they are under one."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    whole = (scales if under is None else under_whole(scales, under)).to(dtype)
    return x.contiguous().to(dtype).view(-1, tiles.rows, tiles.columns) * spread(whole.reciprocal(), x, tiles), whole


def kept_from_zero(quotients: Tensor, x: Tensor, arithmetic: Any = None) -> Tensor:
    """Put the number next to zero wherever a nonzero number underflowed to zero when it was divided by its scale."""
    carrier, pattern = (DOUBLE, torch.int64) if x.dtype == torch.float64 else (SINGLE, torch.int32)
    arithmetic = arithmetic or meaning.scales(carrier)
    return arithmetic.kept_from_zero(quotients.view(pattern), x.view(pattern)).view(x.dtype)  # type: ignore[no-any-return]


def saturated(products: Tensor, dtype: torch.dtype) -> Tensor:
    """Clamp products of elements and scales to the finite values of the dtype they are about to be written in; NaN stays.

    A block can hold values that its dtype cannot: -2 times a scale of 2**127 in MXINT8, or 256 times 2**8 in float16 where E8M0 scales are
    rounded up. OCP's MX specification leaves values beyond float32's range to implementations. Here such a value becomes the nearest one
    that the dtype has, as in every other saturation. The alternatives are worse: a smaller scale would break the rule for computing scales
    and would halve other elements of the block, and the next smaller element would change 6 to 4 because of an error in the last place of
    a float32 scale. Elements and scales, and with them the codes, do not depend on the dtype of the result.
    """
    largest = min(torch.finfo(products.dtype).max, torch.finfo(dtype).max)
    return products.clamp(-largest, largest)


def under_whole(scales: Tensor, whole: Tensor) -> Tensor:
    """Multiply scales by the scale of the whole tensor, in float32, saturating: an infinite scale would turn zeros into NaN."""
    return (scales.to(torch.float32) * whole).clamp(max=torch.finfo(torch.float32).max)


def rescaled_into(out: Tensor, product: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> None:
    """Write a product times the scales left out of its operands, plus a bias, rounded once.

    It is multiplied by them one after the other, because their own product could leave float32's range where the result does not.

    Args:
        out: Of `product`'s shape.
        product: float32 or float64.
        factors: Scales, which broadcast to it; none if nothing was left out.
        bias: Numbers to add at the end, one per index of the last dimension.
    """
    for factor in factors:
        product = product * factor
    if bias is None:
        out.copy_(product)
    else:
        if torch.is_grad_enabled():  # exported programs call the operator itself, with parameters
            product, bias = product.detach(), bias.detach()
        torch.add(product, bias, out=out)


def matmul_rescaled_into(out: Tensor, a: Tensor, b: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> None:
    """`rescaled_into` of the float32 product of two 16-bit matrices."""
    product = torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.to(torch.float32) @ b.to(torch.float32)
    rescaled_into(out, product, factors, bias)


def spread(scales: Tensor, x: Tensor, tiles: TileSizes) -> Tensor:
    """The scale of each element, as matrices."""
    rows, columns, height, width, _ = tiles
    wide = scales[:, :, None, :, None].expand(-1, -1, height, -1, width).reshape(len(scales), scales.shape[1] * height, -1)
    return wide[:, :rows, :columns].expand(x.numel() // (rows * columns), rows, columns)
