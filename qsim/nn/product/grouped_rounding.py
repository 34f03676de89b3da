"""Rounding of the operands of grouped products: scales and transforms are those of single groups, computed for all groups at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from qsim.functional.hadamard import Hadamard
from qsim.nn.product.groups import Units
from qsim.scaling import Given, PerBlock, PerTile, Scaling
from qsim.scaling.tiling import PerSlice
from qsim_kernels.numbers import scales as numbers
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.direct import Operators
from qsim_kernels.torch.scaling import under_whole

if TYPE_CHECKING:
    from qsim.nn.product.sites import Site


class RoundedUnits(NamedTuple):
    """A tensor that was rounded after a transform or under scales of its units.

    Attributes:
        units: The units, before a transform.
        before: The units as they were rounded: transformed, unless that is part of the rounding. The tensor, if that is all of one.
        values: The rounded tensor.
        tiles: Which of their elements share a scale, if there are scales.
        scales: The scales of the units' tiles; empty if they were multiplied in again.
        under: The scale of its group for each unit, if scales are under one.
        of_groups: The scales that all units of a group share, if they do: their own, or those that scales of blocks and tiles are under.
        factor: What elements are still to be multiplied by, of shape [groups, rows, columns] or 1 in place of any of these.
    """

    units: Units
    before: Tensor
    values: Tensor
    tiles: numbers.TileSizes | None = None
    scales: Tensor | None = None
    under: Tensor | None = None
    of_groups: Tensor | None = None
    factor: Tensor | None = None


def round_units(
    site: Site,
    ops: Operators,
    x: Tensor,
    seed: Tensor | None,
    dtype: torch.dtype,
    known: Tensor | None = None,
    restore: Restore = Restore.SCALE,
) -> RoundedUnits:
    """Round the units of a tensor in groups that has elements, after a transform or under scales.

    Args:
        site: The site, with its groups.
        ops: The operators.
        x: The tensor.
        seed: Needed only for stochastic rounding.
        dtype: The dtype of the result.
        known: The scales that all units of a group share, if already computed.
        restore: Whether elements are multiplied by the scales of blocks and tiles again.
    """
    point, groups, along = site.quantizer, site.groups, site.along
    assert point is not None
    assert groups is not None
    assert along is not None
    scale, spelt, sums_rows = point.scale, point.spelt, along.summed == -2
    units = groups.units(x, _unit(scale, site.transform, sums_rows))
    turn = () if site.transform is None else site.transform.turn(units.shape, along.summed)
    rounding = (seed if spelt.is_stochastic else None, spelt.grid, spelt.rule, site.stream, 0, dtype)
    if scale is None:
        before, turn = _turned(ops, units, turn, sums_rows)
        before = ops.hadamard(before, turn) if turn else before
        return RoundedUnits(units, before, units.joined(ops.quantize(before, *rounding)))
    tiles, making = _tiles(scale, units.shape, sums_rows), scale.spelling(point.format)
    own = _numbers(tiles)
    is_local = isinstance(scale, (PerBlock, PerTile))
    under_groups = known if is_local and known is not None else _outer_scales(ops, x, units, site, turn)
    under = None if under_groups is None else units.spread(under_groups)
    if is_local and units.held is not None and restore != Restore.NOTHING:
        values = ops.quantize_runs(x, units.held, under, own, turn, *making, *rounding, int(restore))
        return RoundedUnits(units, x, values, of_groups=under_groups, factor=under_groups)
    before, turn = _turned(ops, units, turn, sums_rows)
    if is_local:
        after, scales = ops.quantize_tiles(before, under, own, turn, *making, *rounding, int(restore))
        return RoundedUnits(units, before, units.joined(after), tiles, scales, under, under_groups, under_groups)
    if isinstance(scale, PerSlice) and (units.groups is None or not sums_rows):
        scales, of_groups = ops.scales_of_tiles(before, under, own, turn, False, *making), None
        factor = scales if under is None else under_whole(scales, under)
        factor = factor if units.groups is None else factor.view(1, -1, 1)
    else:
        of_groups = _scales_of_groups(ops, before, units, scale, own, turn, under_groups, making) if known is None else known
        scales = units.spread(of_groups)
        factor = of_groups if under_groups is None else under_whole(of_groups, under_groups)
    after = ops.quantize_scaled(before, scales, under, own, turn, *rounding, int(Restore.NOTHING))
    return RoundedUnits(units, before, units.joined(after), tiles, scales, under, of_groups, factor)


def _unit(scale: Scaling | None, transform: Hadamard | None, sums_rows: bool) -> int:
    """The number of rows that must begin with a group: those of a block, a tile or a transform, or of one part of a column."""
    sizes = [scale.height] if isinstance(scale, PerTile) else [1]
    if sums_rows:
        sizes += [transform.size] if transform is not None else []
        sizes += [scale.size] if isinstance(scale, PerBlock) else [_PART] if isinstance(scale, PerSlice) else []
    return math.lcm(*sizes)


def _turned(ops: Operators, units: Units, turn: tuple[int, ...], sums_rows: bool) -> tuple[Tensor, tuple[int, ...]]:
    """The units, transformed where groups have to begin with new blocks; otherwise the transform for the operators."""
    if units.held is None or not turn or not sums_rows:
        return units.values, turn
    return ops.hadamard_of_runs(units.x, units.held, units.rows, turn), ()


def _tiles(scale: Scaling, shape: torch.Size, sums_rows: bool) -> numbers.TileSizes:
    """Which elements of units of a shape share a scale, within a unit."""
    _, rows, columns = shape
    height, width = rows, columns
    if isinstance(scale, PerTile):
        height, width = scale.height, scale.width
    elif isinstance(scale, PerBlock):
        height, width = (scale.size, 1) if sums_rows else (1, scale.size)
    elif isinstance(scale, PerSlice):
        height, width = (rows, 1) if sums_rows else (1, columns)
    else:
        scale.tiles(shape)  # raises an error for delayed scales without a history
    return numbers.TileSizes(rows, columns, height, width, False)


#: Rows of the parts of a column whose largest magnitudes are found first.
_PART = 32


def _outer_scales(ops: Operators, x: Tensor, units: Units, site: Site, turn: tuple[int, ...]) -> Tensor | None:
    """The scale of each group that its other scales are under, if they are."""
    how, groups, along = site.quantizer, site.groups, site.along
    assert how is not None
    assert groups is not None
    assert along is not None
    if how.scale is None or how.scale.outer is None:
        return None
    if units.held is not None and turn and along.summed == -2:
        amaxes = ops.amaxes_of_runs(x, units.held, _whole(units), turn, True)
    else:
        # Unless blocks of a transform begin with groups, rows do.
        units = groups.units(x, 1)
        amaxes = ops.amaxes(units.values, _whole(units), turn, True)
    return ops.scales(units.largest(amaxes), None, *how.scale.outer.spelling(how.format, how.scale.format))  # type: ignore[no-any-return]


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


def _whole(units: Units) -> list[int]:
    """Tiles that are whole units."""
    _, rows, columns = units.shape
    return [rows, columns, rows, columns, 0]


def _numbers(tiles: numbers.TileSizes) -> list[int]:
    return [*tiles[:4], int(tiles.across)]
