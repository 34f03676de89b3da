"""Elements rounded with scales, before and after: recomputed for observers."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from qsim.nn.product.sites import Site, as_it_lies, quantized, round_plainly, turn_of
from qsim.random.places import Place
from qsim_kernels.reference.scaling import divided, spread
from qsim_kernels.scales import Restore


class Elements(NamedTuple):
    """The elements rounded at a point with a scale or a transform.

    Attributes:
        before: The elements after the transform, divided by their scales.
        after: What they are rounded to, before they are multiplied with anything again.
        scales: What they were divided by, to be broadcast; nothing if by nothing.
    """

    before: Tensor
    after: Tensor
    scales: Tensor | None


def elements_of(site: Site, x: Tensor, seed: Tensor | None) -> Elements:
    """The elements of a site before and after rounding, from the same values and without changing histories.

    Where the tensor is distributed, all that hold shares of it must call this, for some scales are found together.
    """
    how = site.quantizer
    assert how is not None  # what rounds nothing is not shown
    seen = as_it_lies(x, site)
    turned = seen if site.transform is None else torch.ops.qsim.turned.default(seen, turn_of(site, seen.shape))
    spelt = how.spelt
    wide = torch.promote_types(turned.dtype, torch.float32)
    dtype = wide if wide in spelt.holders else spelt.holders[-1]
    if how.scale is None or not x.numel():
        return Elements(turned, round_plainly(turned, how, seed, site.stream, dtype, site.place), None)
    how = replace(how, scale=how.scale.repeated)
    # Scales are wanted of what is held, and values with the random bits of whole rows.
    site = replace(site, layouts={})
    held = replace(site, place=Place(site.place.offset))
    values, scales, under = quantized(seen, held, how, seed, dtype, Restore.NOTHING)
    assert scales is not None  # nothing was multiplied with them
    assert how.scale is not None
    if spelt.is_stochastic and site.place.row:
        values = quantized(seen, site, how, seed, dtype, Restore.NOTHING).values
    tiles = site.direction.tiles(how.scale, seen.shape)
    before, whole = divided(turned, scales, under, tiles)
    return Elements(before, values.reshape(before.shape), spread(whole, turned, tiles))
