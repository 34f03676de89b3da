"""Rounding of the operands of grouped products: scales and transforms are those of single groups, computed for all groups at once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from qsim.functional.quantizer import Quantizer
from qsim.nn.product.arithmetic import Left
from qsim.nn.product.groups import Groups, Units, transformed
from qsim.nn.product.sites import Rounded, Site
from qsim.scaling import Given, PerBlock, PerTile, Scaling
from qsim.scaling.tiling import PerSlice
from qsim_kernels.numbers import scales as numbers
from qsim_kernels.numbers.scales import Restore, Turn
from qsim_kernels.ops.direct import Operators
from qsim_kernels.torch.scaling import under_whole


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


@dataclass(frozen=True)
class GroupedSite(Site):
    """A site in one pass of a grouped product.

    Attributes:
        groups: Which rows belong to which group.
    """

    groups: Groups = field(kw_only=True)

    @classmethod
    def of(cls, site: Site, groups: Groups) -> GroupedSite:
        """The site in a pass."""
        return cls(*(getattr(site, name) for name in _OF_SITES), groups=groups)

    def round(self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype, known: Tensor | None = None) -> Rounded:
        """Round a tensor whose rows fall into groups, or a stack of a matrix for each group."""
        if self.is_plain:
            return super().round(ops, x, seed, dtype)
        if not x.numel():
            return x.new_empty(x.shape, dtype=dtype), None
        found = self.round_units(ops, x, seed, dtype, known)
        values = found.units.rows(found.after, x.shape)
        if found.factor is None:
            return values, None
        is_turned = self.direction.kept != self.direction.result
        return values, Left((found.factor.mT if is_turned else found.factor,), found.of_groups)

    def round_units(
        self,
        ops: Operators,
        x: Tensor,
        seed: Tensor | None,
        dtype: torch.dtype,
        known: Tensor | None = None,
        restore: Restore = Restore.SCALE,
    ) -> RoundedUnits:
        """Round the units of a tensor that has elements, after a transform or under scales.

        Args:
            ops: The operators.
            x: The tensor.
            seed: Needed only for stochastic rounding.
            dtype: The dtype of the result.
            known: The scales that all units of a group share, if already computed.
            restore: Whether elements are multiplied by the scales of blocks and tiles again.
        """
        how = self.quantizer
        assert how is not None  # only such sites have scales or transforms
        units = self.groups.units(x, self._unit(how.scale))
        before, turn = self._turned(units)
        if how.scale is None:
            before = ops.hadamard(before, turn) if turn else before
            return RoundedUnits(units, before, self.round_plainly(ops, before, seed, dtype))
        scale, spelt = how.scale, how.spelt
        tiles, making = self._tiles(scale, before), scale.spelling(how.format)
        own = _numbers(tiles)
        rounding = (seed if spelt.is_stochastic else None, spelt.grid, spelt.rule, self.stream, 0, dtype)
        under_groups = _outer_scales(ops, before, units, how, tiles, turn)
        under = None if under_groups is None else units.spread(under_groups)
        if isinstance(scale, (PerBlock, PerTile)):
            after, scales = ops.quantize_tiles(before, under, own, turn, *making, *rounding, int(restore))
            return RoundedUnits(units, before, after, tiles, scales, under, factor=under_groups)
        if isinstance(scale, PerSlice) and (units.groups is None or not self._sums_rows):
            scales, of_groups = ops.scales_of_tiles(before, under, own, turn, False, *making), None
            factor = scales if under is None else under_whole(scales, under)
            factor = factor if units.groups is None else factor.view(1, -1, 1)
        else:
            of_groups = _scales_of_groups(ops, before, units, scale, own, turn, under_groups, making) if known is None else known
            scales = units.spread(of_groups)
            factor = of_groups if under_groups is None else under_whole(of_groups, under_groups)
        after = ops.quantize_scaled(before, scales, under, own, turn, *rounding, int(Restore.NOTHING))
        return RoundedUnits(units, before, after, tiles, scales, under, of_groups, factor)

    @property
    def _sums_rows(self) -> bool:
        return self.direction.summed == -2

    def _unit(self, scale: Scaling | None) -> int:
        """The number of rows that must begin with a group: those of a block, a tile or a transform, or of one part of a column."""
        sizes = [1]
        if isinstance(scale, PerTile):
            sizes.append(scale.height)
        if self._sums_rows:
            sizes += [self.transform.size] if self.transform is not None else []
            sizes += [scale.size] if isinstance(scale, PerBlock) else [_PART] if isinstance(scale, PerSlice) else []
        return math.lcm(*sizes)

    def _turned(self, units: Units) -> tuple[Tensor, tuple[int, ...]]:
        """The units, transformed where groups have to begin with new blocks; otherwise the transform for the operators."""
        if self.transform is None:
            return units.values, ()
        turn = self.transform.turn(units.values.shape, self.direction.summed)
        if units.groups is None or not self._sums_rows:
            return units.values, turn
        return transformed(units, Turn(*turn)), ()

    def _tiles(self, scale: Scaling, x: Tensor) -> numbers.TileSizes:
        """Which elements of units share a scale, within a unit."""
        _, rows, columns = x.shape
        height, width = rows, columns
        if isinstance(scale, PerTile):
            height, width = scale.height, scale.width
        elif isinstance(scale, PerBlock):
            height, width = (scale.size, 1) if self._sums_rows else (1, scale.size)
        elif isinstance(scale, PerSlice):
            height, width = (rows, 1) if self._sums_rows else (1, columns)
        else:
            scale.tiles(x.shape)  # raises an error for delayed scales without a history
        return numbers.TileSizes(rows, columns, height, width, False)


_OF_SITES = tuple(own.name for own in fields(Site))
#: Rows of the parts of a column whose largest magnitudes are found first.
_PART = 32


def _outer_scales(
    ops: Operators, before: Tensor, units: Units, how: Quantizer, tiles: numbers.TileSizes, turn: tuple[int, ...]
) -> Tensor | None:
    """The scale of each group that its other scales are under, if they are."""
    if how.scale is None or how.scale.outer is None:
        return None
    whole = _numbers(tiles._replace(height=tiles.rows, width=tiles.columns))
    amaxes = units.largest(ops.amaxes(before, whole, turn, True))
    return ops.scales(amaxes, None, *how.scale.outer.spelling(how.format, how.scale.format))  # type: ignore[no-any-return]


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


def _numbers(tiles: numbers.TileSizes) -> list[int]:
    return [*tiles[:4], int(tiles.across)]
