"""Scales, and rounding under them without random bits, lowered for compilers.

Compilers divide float32 numbers approximately, so quotients are computed in float64 and rounded to float32, which gives the same bits:
float64 has more than twice as many. Compilers also contract a product with a following sum. Here every NaN is replaced by the canonical
NaN in between, which prevents that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qsim_kernels.lowered import inductor, sizes
from qsim_kernels.lowered.fusible import amax_whole, fusible, in_memory
from qsim_kernels.lowered.rounding import Draws, draws_of, onto, single_patterns
from qsim_kernels.numbers.carrier import DOUBLE, SINGLE
from qsim_kernels.numbers.grid import Rule, read
from qsim_kernels.numbers.scales import Restore, TileSizes, read_scales
from qsim_kernels.torch.rounding import one_nan
from qsim_kernels.torch.scaling import kept_from_zero, saturated, scales_of, under_whole

#: The most elements of a tile that Inductor may reduce and round in one kernel, and that the operator's own kernel holds.
_READ_ONCE, _HELD = 4096, 128 * 128


def amaxes(x: Tensor, tiles: Sequence[int], turn: Sequence[int], finite: bool) -> Tensor | None:
    """The largest magnitude of each tile, if `_is_lowered`."""
    where = TileSizes.of(tiles)
    if not _is_lowered(x, where, turn):
        return None
    # Elements of larger tiles are read again after their scale is known.
    return _amaxes(in_memory(x) if where.height * where.width > _READ_ONCE else x, where, finite)


def _amaxes(x: Tensor, tiles: TileSizes, finite: bool) -> Tensor:
    magnitudes = _magnitudes(_cut(x, tiles), finite, torch.float32)
    magnitudes = magnitudes.amax(0, keepdim=True) if tiles.across else magnitudes
    return amax_whole(magnitudes, (2, 4)) if sizes.is_small(x) else magnitudes.amax((2, 4))


@fusible("magnitudes_fused(Tensor x, bool finite, ScalarType dtype) -> Tensor", held=False)
def _magnitudes(x: Tensor, finite: bool, dtype: torch.dtype) -> Tensor:
    """The magnitudes; zero in place of those that are not finite, if only finite ones are wanted."""
    magnitudes = _as_single(x).abs()
    return torch.where(magnitudes.isfinite(), magnitudes, 0.0) if finite else magnitudes


def scales(amaxes: Tensor, under: Tensor | None, making: str, scale_grid: str, *noise: Any) -> Tensor | None:
    """The scales that result from the largest magnitudes, if they are not drawn."""
    return None if read_scales(making, scale_grid).draws else _scales(amaxes, under, making, scale_grid, torch.float32)


@fusible("scales_fused(Tensor amaxes, Tensor? under, str making, str scale_grid, ScalarType dtype) -> Tensor")
def _scales(amaxes: Tensor, under: Tensor | None, making: str, scale_grid: str, dtype: torch.dtype) -> Tensor:
    largest = amaxes.to(torch.float64)
    if under is not None:
        largest = largest / under.to(torch.float64)
    return scales_of(largest, read_scales(making, scale_grid), arithmetic=_arithmetic(largest))


#: The same, computed wherever a small tensor's scale is read: a launch would take longer.
_small_scales = fusible(
    "small_scales_fused(Tensor amaxes, Tensor? under, str making, str scale_grid, ScalarType dtype) -> Tensor", held=False
)(unwrap(_scales))


def _arithmetic(x: Tensor) -> Any:
    """The functions of `arithmetic.scales` for a tensor, or for an element of a loop."""
    if not inductor.writes_loops(x):
        return None
    from qsim_kernels.meanings import inductor as meaning  # imports Inductor

    return meaning.scales(DOUBLE if x.dtype == torch.float64 else SINGLE)


def scales_of_tiles(
    x: Tensor, under: Tensor | None, tiles: Sequence[int], turn: Sequence[int], finite: bool, making: str, scale_grid: str, *noise: Any
) -> Tensor | None:
    """The scales of a tensor's tiles, if `_is_lowered` and they are not drawn."""
    largest = None if read_scales(making, scale_grid).draws else amaxes(x, tiles, turn, finite)
    return None if largest is None else _scales_for(x)(largest, under, making, scale_grid, torch.float32)


def _scales_for(x: Tensor) -> Callable[..., Tensor]:
    """The function that computes a tensor's scales."""
    return _small_scales if sizes.is_small(x) else _scales


def quantize_scaled(
    x: Tensor, scales: Tensor, under: Tensor | None, tiles: Sequence[int], turn: Sequence[int], *rounding: Any
) -> Tensor | None:
    """Round a tensor under given scales, if `_is_lowered` and elements are rounded alone."""
    where, given = TileSizes.of(tiles), _RoundingArguments(*rounding)
    draws = given.draws(x) if _is_lowered(x, where, turn) else None
    return None if draws is None else _rounded_under(x, scales, under, where, given, draws)


def quantize_tiles(
    x: Tensor, under: Tensor | None, tiles: Sequence[int], turn: Sequence[int], making: str, scale_grid: str, *rounding: Any
) -> tuple[Tensor, Tensor] | None:
    """Round a tensor under the scales of its own tiles, if `_is_lowered`, elements are rounded alone, and its kernel is not faster.

    Scales that are drawn are left to the operator.
    """
    where, given = TileSizes.of(tiles), _RoundingArguments(*rounding)
    if read_scales(making, scale_grid).draws or not _is_rounded_in_loops(x, where, turn) or (draws := given.draws(x)) is None:
        return None
    made = _scales_for(x)(_amaxes(x, where, False), under, making, scale_grid, torch.float32)
    return _rounded_under(x, made, under, where, given, draws), made.new_empty((0,)) if given.restore else made


def quantize_both_ways(
    x: Tensor, tiles: Sequence[int], others: Sequence[int], making: str, scale_grid: str, grid: str, rule: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Round a tensor under the scales of two kinds of tiles in two operators, if one of these is lowered."""
    given, both = _RoundingArguments(None, grid, rule, 0, 0, dtype, int(Restore.SCALE)), (tiles, others)
    if given.draws(x) is None or not any(_is_rounded_in_loops(x, TileSizes.of(where), ()) for where in both):
        return None
    one, other = (torch.ops.qsim.quantize_tiles.default(x, None, where, (), making, scale_grid, *given)[0] for where in both)
    return one, other


class _RoundingArguments(NamedTuple):
    """How an operator rounds the elements: its last arguments."""

    seed: Tensor | None
    grid: str
    rule: str
    stream: int
    offset: int
    dtype: torch.dtype
    restore: int

    def draws(self, x: Tensor) -> Draws | None:
        """The random bits with which elements are rounded by themselves; `None` for a float64 result, too."""
        return None if self.dtype == torch.float64 else draws_of(x, self.seed, self.grid, self.rule, self.stream, self.offset)


def rescaled(product: Tensor, factors: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Multiply a float32 product by the scales that its operands were divided by and add a bias; return None for float64."""
    if product.dtype != torch.float32 or torch.float64 in (dtype, None if bias is None else bias.dtype):
        return None
    return _rescaled(product, factors, bias, dtype)


@fusible("rescaled_fused(Tensor product, Tensor[] factors, Tensor? bias, ScalarType dtype) -> Tensor")
def _rescaled(product: Tensor, factors: Sequence[Tensor], bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    for factor in factors:
        product = product * factor
    if factors:
        product = one_nan(product)
    return _rounded_to(product if bias is None else product + bias, dtype)


def _as_single(x: Tensor) -> Tensor:
    """The values as float32; those of a 16-bit tensor are rounded to 16 bits first."""
    return x if x.dtype == torch.float32 else single_patterns(x).view(torch.float32)


def _rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert float32 values to a dtype, rounding even if the following code continues in float32."""
    return x if dtype == torch.float32 else _as_single(x.to(dtype)).to(dtype)


def _is_lowered(x: Tensor, tiles: TileSizes, turn: Sequence[int]) -> bool:
    """Whether a tensor is statically known to be nonempty with tiles of equal size, and no transform comes first.

    A large tensor that a graph on a GPU gets as it is, such as a weight, has nothing before it to fuse with: there the operator's own
    kernels take no longer than Inductor's, which have to be generated.
    """
    conditions = x.numel() > 0, tiles.rows % tiles.height == 0, tiles.columns % tiles.width == 0
    return not turn and x.dtype != torch.float64 and sizes.are_known(*conditions) and not (sizes.is_large(x) and inductor.is_given(x))


def _is_rounded_in_loops(x: Tensor, tiles: TileSizes, turn: Sequence[int]) -> bool:
    """Whether a rounding under a tensor's own scales is lowered: not for a large one whose tiles its own kernel holds, which is faster."""
    return _is_lowered(x, tiles, turn) and not (sizes.is_large(x) and sizes.are_known(tiles.height * tiles.width <= _HELD))


def _rounded_under(x: Tensor, scales: Tensor, under: Tensor | None, tiles: TileSizes, given: _RoundingArguments, draws: Draws) -> Tensor:
    """Round values under the scales of their tiles."""
    whole = scales if under is None else under_whole(scales, under)
    restored = whole if given.restore == Restore.ALL else scales if given.restore else None
    inverses = (_small_inverses if sizes.is_small(x) else _inverses)(whole, torch.float32)
    seen, where = x, draws.where
    spread: Callable[[Tensor], Tensor] = _scalar
    if not sizes.are_known(scales.numel() == 1):
        seen, where, spread = _cut(x, tiles), None if where is None else _cut(where, tiles), _spread
    factors = spread(inverses), None if restored is None else spread(restored)
    rounded = _elements_under(seen, *factors, where, draws.seed, draws.stream, given.grid, given.rule, given.dtype)
    return rounded.reshape(x.shape)


@fusible("inverses_fused(Tensor scales, ScalarType dtype) -> Tensor")
def _inverses(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers by which elements are multiplied in place of dividing them by their scales; a block has a single one."""
    return scales.to(torch.float64).reciprocal().to(dtype)


#: The same, computed for every element of a small tensor: a launch would take longer.
_small_inverses = fusible("small_inverses_fused(Tensor scales, ScalarType dtype) -> Tensor", held=False)(unwrap(_inverses))


@fusible(
    "quantize_scaled_fused(Tensor x, Tensor inverses, Tensor? scales, Tensor? where, Tensor? seed, int stream, "
    "str grid, str rule, ScalarType dtype) -> Tensor"
)
def _elements_under(
    x: Tensor,
    inverses: Tensor,
    scales: Tensor | None,
    where: Tensor | None,
    seed: Tensor | None,
    stream: int,
    grid: str,
    rule: str,
    dtype: torch.dtype,
) -> Tensor:
    """Divide values by their scales, round, and multiply by the scales that are restored."""
    rounding, single = read(Rule, rule), _as_single(x)
    quotients = single * inverses
    kept = kept_from_zero(quotients, single, _arithmetic(single)) if rounding.leaves_zero else quotients
    values = onto(kept, where, seed, stream, grid, rule, torch.float32)
    if scales is not None:
        values = values * scales
        if rounding.saturates:
            values = saturated(values, dtype)
    return one_nan(values.to(dtype))


def _cut(x: Tensor, tiles: TileSizes) -> Tensor:
    """View matrices as tiles: matrix, tile down, row in it, tile along, column in it."""
    rows, columns, height, width, _ = tiles
    return x.reshape(-1, rows // height, height, columns // width, width)


def _scalar(scale: Tensor) -> Tensor:
    """View the scale of a whole tensor so that it broadcasts to any shape."""
    return scale.reshape(())


def _spread(scales: Tensor) -> Tensor:
    """View scales of tiles so that they broadcast to `_cut`'s result."""
    matrices, down, along = scales.shape
    return scales.reshape(matrices, down, 1, along, 1)
