"""Sites: the points of a layer, with everything about the rounding that is known before the tensor.

Scales of blocks and tiles are multiplied into the operand of a product, unless its accumulator promotes short sums in which they do not
change: then they enter with these. Those of channels and of the whole tensor divide all terms of a sum equally, so the sum is multiplied
by them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from qsim.formats import Float, Format
from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer
from qsim.functional.scaled import Scaled, ScaleLayout, Share, quantize_scaled
from qsim.nn.product.arithmetic import Left
from qsim.nn.product.bilinear import rows
from qsim.nn.product.carriers import Values
from qsim.nn.product.directions import Direction
from qsim.random.places import Place, narrowed, widened
from qsim.scaling import PerBlock, PerTile
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.direct import DISPATCHED, Operators
from qsim_kernels.torch.scaling import under_whole

#: Significant bits that float32 holds.
_SINGLE = 24
#: Number of shapes for which a site caches the layout of scales.
MOST_LAYOUTS = 64


class SharedOperand(Protocol):
    """A process's shard of a distributed operand."""

    def along(self, direction: Direction, merges: bool) -> Share:
        """The shard of an operand, with a direction in a product."""


#: A rounded tensor in its carrier, in its own shape, and what is left to multiply by, if anything.
Rounded = tuple[Tensor, Left | None]


@dataclass(frozen=True)
class Site:
    """A site at which a tensor is rounded.

    Attributes:
        name: The point's name.
        quantizer: The quantizer, if any.
        stream: The stream of random bits.
        place: The position of the local elements in the whole tensor.
        direction: The dimensions of scales and transforms.
        merges: Whether all dimensions but the last count as one.
        transform: The transform applied before rounding; both operands of a product have the same.
        shared: This process's shard, if the tensor is distributed.
        multiplies: Whether the tensor is an operand of a product, whose result can be multiplied by its scales.
        chain: The number of products in the short sums with which scales of blocks and tiles enter; 0 if they are multiplied in.
    """

    name: str
    quantizer: Quantizer | None
    stream: int
    place: Place
    direction: Direction
    merges: bool = False
    transform: Hadamard | None = None
    shared: SharedOperand | None = None
    multiplies: bool = True
    chain: int = 0
    #: Cached layouts of scales, by tensor shape.
    layouts: dict[torch.Size, ScaleLayout] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a scale nor a transform."""
        return self.transform is None and (self.quantizer is None or self.quantizer.scale is None)

    def round(self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype, known: Tensor | None = None) -> Rounded:
        """Round a tensor.

        Args:
            ops: The operators.
            x: The tensor.
            seed: Needed only for stochastic rounding.
            dtype: The carrier.
            known: The scales that are not multiplied in, if already computed.
        """
        how = self.quantizer
        if how is None:
            return (x if x.dtype == dtype else x.to(dtype)), None
        if how.scale is not None:
            return _round_under_scales(ops, x, self, how, seed, dtype, known)
        if self.transform is not None:
            seen = as_it_lies(x, self)
            return self.round_plainly(ops, ops.hadamard(seen, turn_of(self, seen.shape)), seed, dtype).view(x.shape), None
        return self.round_plainly(ops, x, seed, dtype), None

    def round_plainly(self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Round a tensor without scales, with the random bits that its elements have in the whole."""
        assert self.quantizer is not None
        spelt, place = self.quantizer.spelt, self.place
        if not spelt.is_stochastic:
            return ops.quantize(x, None, spelt.grid, spelt.rule, self.stream, 0, dtype)  # type: ignore[no-any-return]
        if not place.row:
            return ops.quantize(x, seed, spelt.grid, spelt.rule, self.stream, place.offset, dtype)  # type: ignore[no-any-return]
        wide, offset = widened(x, place)
        rounded = ops.quantize(wide, seed, spelt.grid, spelt.rule, self.stream, offset, dtype)
        return narrowed(rounded, place).reshape(x.shape)

    def round_and_sum(self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Round a tensor without scales, and sum it, unrounded, over all dimensions but the last, in one read."""
        assert self.quantizer is not None  # a tensor that is not rounded is only summed
        spelt = self.quantizer.spelt
        chosen = seed if spelt.is_stochastic else None
        values, total = ops.quantize_and_sum(x if x.dim() == 2 else rows(x), chosen, spelt.grid, spelt.rule, self.stream, dtype)
        return (values if x.dim() == 2 else values.view(x.shape)), total


def beyond(x: Tensor, site: Site) -> Tensor:
    """Where a tensor saturates at a site."""
    assert site.quantizer is not None  # nothing saturates where nothing is rounded
    return (x < site.quantizer.format.min) | (x > site.quantizer.format.max)


def leaves_factor(site: Site) -> bool:
    """Whether the result of a product is multiplied by scales."""
    scale = None if site.quantizer is None else site.quantizer.scale
    return scale is not None and (not isinstance(scale, (PerBlock, PerTile)) or scale.outer is not None)


def values_of_site(site: Site, dtype: torch.dtype) -> Values:
    """A format that holds the rounded values of a tensor of a dtype, if it is rounded and there is one, and that dtype.

    Elements times scales are assumed to have exponents within those of bfloat16 and float32: below these, in blocks whose largest magnitude
    is some 2**-120 or less, products are rounded to the carrier's subnormal numbers.
    """
    if site.quantizer is None:
        return None, dtype
    scale = site.quantizer.scale
    if not isinstance(scale, (PerBlock, PerTile)) or site.chain:
        return site.quantizer.format, dtype
    find = _values if torch.compiler.is_compiling() else _known_values
    return find(site.quantizer.format, scale.format, dtype), dtype


def _values(element: Format, scale: Format, dtype: torch.dtype) -> Format | None:
    """A format that holds the products of elements and scales, or float32's where these are float32.

    A power of two has no bits to add to those of an element. Products of float64 operands that need more than float32's stay float64.
    """
    bits = element.precision + (scale.precision if scale.precision > 1 else 0)
    if bits > _SINGLE and dtype == torch.float64:
        return None
    return Float(8, min(bits, _SINGLE) - 1, specials="ieee")


_known_values = lru_cache(maxsize=1024)(_values)


def as_it_lies(x: Tensor, site: Site) -> Tensor:
    """A tensor in the shape that its scales follow."""
    return rows(x) if site.merges else x


def turn_of(site: Site, shape: Sequence[int]) -> Sequence[int]:
    """The parameters of the transform applied before rounding."""
    return () if site.transform is None else site.transform.turn(shape, site.direction.summed)


def layout_of(site: Site, how: Quantizer, shape: torch.Size) -> ScaleLayout:
    """The layout and the parameters of the scales of a tensor of a shape."""
    if torch.compiler.is_compiling():
        return _layout(site, how, shape)
    known = site.layouts.get(shape)
    if known is None:
        if len(site.layouts) == MOST_LAYOUTS:
            site.layouts.clear()
        known = site.layouts[shape] = _layout(site, how, shape)
    return known


def _layout(site: Site, how: Quantizer, shape: torch.Size) -> ScaleLayout:
    assert how.scale is not None  # the layout is that of the scale
    return ScaleLayout.of(how.scale, how.format, shape, site.direction.tiles(how.scale, shape), turn_of(site, shape))


def _round_under_scales(
    ops: Operators, x: Tensor, site: Site, how: Quantizer, seed: Tensor | None, dtype: torch.dtype, known: Tensor | None
) -> Rounded:
    seen = x if x.dim() == 2 else as_it_lies(x, site)
    layout = None if ops is DISPATCHED else site.layouts.get(seen.shape)
    if layout is None:
        layout = layout_of(site, how, seen.shape)
    restore = Restore.ALL if not site.multiplies else Restore.SCALE if layout.is_local and not site.chain else Restore.NOTHING
    values, scales, under = quantized(ops, seen, site, how, layout, seed, dtype, restore, known)
    values = values if values.shape == x.shape else values.reshape(x.shape)
    if restore == Restore.ALL or (layout.is_local and scales is None and under is None):
        return values, None
    if layout.is_local:
        chains = None if scales is None else site.direction.chains(scales, layout.tiles, seen.shape, site.chain)
        return values, Left(() if under is None else (under,), chains=chains)
    assert scales is not None  # only scales of blocks and tiles are not returned
    return values, Left((site.direction.spread(scales if under is None else under_whole(scales, under), seen.shape),), scales)


def quantized(
    ops: Operators,
    x: Tensor,
    site: Site,
    how: Quantizer,
    layout: ScaleLayout,
    seed: Tensor | None,
    dtype: torch.dtype,
    restore: Restore,
    known: Tensor | None = None,
) -> Scaled:
    """A tensor rounded with scales that are laid out in it, using the random bits that its elements have in the whole."""
    assert how.scale is not None
    spelt = how.spelt
    share = None if site.shared is None else site.shared.along(site.direction, site.merges)
    chosen = seed if spelt.is_stochastic else None
    if chosen is None or not site.place.row:
        noise = chosen, site.stream, site.place.offset
        return quantize_scaled(ops, x, spelt, how.scale, noise, dtype, restore, layout, share, known)
    wide, offset = widened(x, site.place)
    layout = layout_of(site, how, wide.shape)
    # Scales of columns are widened and narrowed with these.
    is_of_columns = layout.tiles.across and layout.tiles.columns == 1
    if known is not None and is_of_columns:
        known = widened(known, site.place, 1.0)[0].view(1, -1, 1)
    noise = chosen, site.stream, offset
    values, scales, under = quantize_scaled(ops, wide, spelt, how.scale, noise, dtype, restore, layout, share, known)
    if is_of_columns and scales is not None:
        scales = narrowed(scales.view(-1), site.place).view(1, -1, 1)
    return narrowed(values.view(wide.shape), site.place), scales, under
