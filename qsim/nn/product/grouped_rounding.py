"""Rounding of the operands of grouped products: scales and transforms are those of single groups, computed for all groups at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qsim.nn.product.groups import Units, transformed, units_of
from qsim.scaling import Blocks, Channel, Given, Scaling, Tiles
from qsim_kernels import scales as numbers
from qsim_kernels.ops.direct import Operators
from qsim_kernels.reference.scaling import under_whole
from qsim_kernels.scales import Restore, Turn

if TYPE_CHECKING:
    from qsim.nn.product.sites import Site


class RoundedUnits(NamedTuple):
    """The units of a tensor, rounded after a transform or under scales.

    Attributes:
        units: The units, before a transform.
        before: The units as they were rounded: transformed, unless that is part of the rounding.
        after: The rounded units.
        tiles: Which of their elements share a scale, if there are scales.
        scales: The scales of the units' tiles; empty if they were multiplied in again.
        under: The scale of its group for each unit, if scales are under one.
        of_groups: The scales that all units of a group share, if they do.
        factor: What elements are still to be multiplied by, of shape [groups, rows, columns] or 1 in place of any of these.
    """

    units: Units
    before: Tensor
    after: Tensor
    tiles: numbers.TileSizes | None = None
    scales: Tensor | None = None
    under: Tensor | None = None
    of_groups: Tensor | None = None
    factor: Tensor | None = None


def rounded_units(
    ops: Operators,
    x: Tensor,
    site: Site,
    seed: Tensor | None,
    dtype: torch.dtype,
    ends: Tensor,
    known: Tensor | None = None,
    restore: Restore = Restore.SCALE,
) -> RoundedUnits:
    """Round a tensor whose rows fall into groups, or a stack of a matrix for each group.

    Args:
        ops: The operators.
        x: The tensor.
        site: A site with a scale or a transform.
        seed: Needed only for stochastic rounding.
        dtype: The dtype of the result.
        ends: The ends of the groups.
        known: The scales that all units of a group share, if already computed.
        restore: Whether elements are multiplied by the scales of blocks and tiles again.
    """
    how = site.quantizer
    assert how is not None  # only such sites have scales or transforms
    sums_rows = site.direction.summed == -2
    units = units_of(x, ends, _unit(site, how.scale, sums_rows=sums_rows))
    before, turn = _turned(units, site, sums_rows=sums_rows)
    if how.scale is None:
        before = ops.hadamard(before, turn) if turn else before
        return RoundedUnits(units, before, site.round_plainly(ops, before, seed, dtype))
    scale, spelt = how.scale, how.spelt
    tiles, making = _tiles(scale, site, before), scale.spelling(how.format)
    own, whole = _numbers(tiles), _numbers(tiles._replace(height=tiles.rows, width=tiles.columns))
    rounding = (seed if spelt.is_stochastic else None, spelt.grid, spelt.rule, site.stream, 0, dtype)
    under = under_groups = None
    if scale.outer is not None:
        amaxes = units.largest(ops.amaxes(before, whole, turn, True))
        under_groups = ops.scales(amaxes, None, *scale.outer.spelling(how.format, scale.format))
        under = units.spread(under_groups)
    if isinstance(scale, (Blocks, Tiles)):
        after, scales = ops.quantize_tiles(before, under, own, turn, *making, *rounding, int(restore))
        return RoundedUnits(units, before, after, tiles, scales, under, factor=under_groups)
    if isinstance(scale, Channel) and (units.groups is None or not sums_rows):
        scales = ops.scales_of_tiles(before, under, own, turn, False, *making)
        factor = scales if under is None else under_whole(scales, under)
        factor, of_groups = factor if units.groups is None else factor.view(1, -1, 1), None
    else:
        of_groups = _scales_of_groups(ops, before, units, scale, own, turn, under_groups, making) if known is None else known
        scales = units.spread(of_groups)
        factor = of_groups if under_groups is None else under_whole(of_groups, under_groups)
    after = ops.quantize_scaled(before, scales, under, own, turn, *rounding, int(Restore.NOTHING))
    return RoundedUnits(units, before, after, tiles, scales, under, of_groups, factor)


def _scales_of_groups(
    ops: Operators,
    before: Tensor,
    units: Units,
    scale: Scaling,
    tiles: list[int],
    turn: tuple[int, ...],
    under: Tensor | None,
    making: tuple[str, str],
) -> Tensor:
    """The scales that all units of a group share, for each group, or for all groups if they do not differ between these."""
    if isinstance(scale, Given):
        return before.new_full((1, 1, 1), scale.value, dtype=torch.float32)
    amaxes = units.largest(ops.amaxes(before, tiles, turn, False))
    if scale.is_recorded:
        amaxes = scale.used(amaxes.amax().view(1, 1, 1))
    return ops.scales(amaxes, under, *making)  # type: ignore[no-any-return]


def _unit(site: Site, scale: Scaling | None, *, sums_rows: bool) -> int:
    """The number of rows that must begin with a group: those of a block, a tile or a transform, or of one part of a column."""
    sizes = [1]
    if site.transform is not None and sums_rows:
        sizes.append(site.transform.size)
    if isinstance(scale, Tiles):
        sizes.append(scale.height)
    if isinstance(scale, Blocks) and sums_rows:
        sizes.append(scale.size)
    if isinstance(scale, Channel) and sums_rows:
        sizes.append(_PART)
    return math.lcm(*sizes)


#: Rows of the parts of a column whose largest magnitudes are found first.
_PART = 32


def _turned(units: Units, site: Site, *, sums_rows: bool) -> tuple[Tensor, tuple[int, ...]]:
    """The units, transformed where groups have to begin with new blocks; otherwise the transform for the operators."""
    if site.transform is None:
        return units.values, ()
    turn = site.transform.turn(units.values.shape, site.direction.summed)
    if units.groups is None or not sums_rows:
        return units.values, turn
    return transformed(units, Turn(*turn)), ()


def _tiles(scale: Scaling, site: Site, x: Tensor) -> numbers.TileSizes:
    """Which elements of units share a scale, within a unit."""
    _, rows, columns = x.shape
    height, width, sums_rows = rows, columns, site.direction.summed == -2
    if isinstance(scale, Tiles):
        height, width = scale.height, scale.width
    elif isinstance(scale, Blocks):
        height, width = (scale.size, 1) if sums_rows else (1, scale.size)
    elif isinstance(scale, Channel):
        height, width = (rows, 1) if sums_rows else (1, columns)
    else:
        scale.tiles(x.shape)  # raises an error for delayed scales without a history
    return numbers.TileSizes(rows, columns, height, width, False)


def _numbers(tiles: numbers.TileSizes) -> list[int]:
    return [*tiles[:4], int(tiles.across)]
