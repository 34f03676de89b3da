"""Elements rounded with scales, before and after: recomputed for observers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from qsim.nn.product.grouped_rounding import round_units
from qsim.nn.product.sites import Site
from qsim.random.places import Place
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.direct import operators
from qsim_kernels.torch.scaling import divided, spread


class RoundedElements(NamedTuple):
    """The elements rounded at a point with a scale or a transform.

    Attributes:
        before: The elements after the transform, divided by their scales.
        after: The rounded elements, before they are multiplied by their scales again.
        scales: The scales that they were divided by, to be broadcast; None without scales.
    """

    before: Tensor
    after: Tensor
    scales: Tensor | None


def elements_of(site: Site, x: Tensor, seed: Tensor | None) -> RoundedElements:
    """The elements of a site before and after rounding, from the same values and without changing histories.

    If the tensor is distributed, all processes that hold shards must call this, because some scales are computed together.

    Args:
        site: The site.
        x: The tensor.
        seed: Needed only for stochastic rounding.
    """
    how = site.quantizer
    assert how is not None  # points that round nothing are not reported
    if site.groups is not None and not site.is_plain and x.numel():
        return _elements_in_groups(site, x, seed)
    ops, seen = operators(x), site.as_matrix(x)
    transformed = seen if site.transform is None else ops.hadamard(seen, site.turn(seen.shape))
    spelt = how.spelt
    wide = torch.promote_types(transformed.dtype, torch.float32)
    dtype = wide if wide in spelt.holders else spelt.holders[-1]
    if how.scale is None or not x.numel():
        return RoundedElements(transformed, site.round_plainly(ops, transformed, seed, dtype), None)
    how = replace(how, scale=how.scale.repeated)
    # Scales are those of the local elements, values use the random bits of whole rows.
    site = replace(site, quantizer=how, layouts={})
    held = replace(site, place=Place(site.place.offset))
    values, scales, under = held.quantized(ops, seen, held.layout(seen.shape), seed, dtype, Restore.NOTHING)
    assert scales is not None  # there are no scales
    assert how.scale is not None
    if spelt.is_stochastic and site.place.row:
        values, _, _ = site.quantized(ops, seen, site.layout(seen.shape), seed, dtype, Restore.NOTHING)
    tiles = how.scale.tiles(seen.shape) if site.along is None else site.along.tiles(how.scale, seen.shape)
    before, whole = divided(transformed, scales, under, tiles)
    return RoundedElements(before, values.reshape(before.shape), spread(whole, transformed, tiles))


def _elements_in_groups(site: Site, x: Tensor, seed: Tensor | None) -> RoundedElements:
    """`elements_of` an operand of a grouped product; rows after the last group count as well."""
    assert site.quantizer is not None
    how = site.quantizer
    how = replace(how, scale=None if how.scale is None else how.scale.repeated)
    wide = torch.promote_types(x.dtype, torch.float32)
    dtype = wide if wide in how.spelt.holders else how.spelt.holders[-1]
    ops = operators(x)
    found = round_units(replace(site, quantizer=how), ops, x, seed, dtype, restore=Restore.NOTHING)
    if found.tiles is None or found.scales is None:
        return RoundedElements(found.units.joined(found.before), found.values, None)
    divisors, whole = divided(found.before, found.scales, found.under, found.tiles)
    before, scales = (found.units.joined(units) for units in (divisors, spread(whole, found.before, found.tiles).contiguous()))
    return RoundedElements(before, found.values, scales)
