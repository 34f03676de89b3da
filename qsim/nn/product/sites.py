"""Sites: the points of a layer, with everything about the rounding that is known before the tensor.

Scales of blocks and tiles are multiplied into the operand of a product, unless its accumulator promotes short sums in which they do not
change: then they enter with these. Those of channels and of the whole tensor divide all terms of a sum equally, so the sum is multiplied
by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from qsim.formats import Float, Format
from qsim.functional.arguments import Spelling
from qsim.functional.callables import CallablePoint
from qsim.functional.hadamard import Hadamard
from qsim.functional.quantizer import Quantizer, short
from qsim.functional.scaled import Scaled, ScaleLayout, Share, quantize_scaled, whole_scale, whole_scale_of
from qsim.nn.product.along import Along
from qsim.nn.product.arithmetic import rows
from qsim.nn.product.carriers import Values
from qsim.nn.product.codes import encoded
from qsim.nn.product.grouped_rounding import round_units
from qsim.nn.product.groups import Groups
from qsim.random.noise import Noise
from qsim.random.places import WHOLE, Place, narrowed, widened
from qsim.scaling import PerBlock, PerTile
from qsim_kernels.numbers.scales import AHEAD, Restore
from qsim_kernels.ops.direct import DISPATCHED, Operators
from qsim_kernels.torch.scaling import under_whole
from qsim_kernels.torch.sums import ChainScales

#: Significant bits that float32 holds.
_SINGLE = 24
#: The fewest elements of which a later scale is found in the same read.
_LARGE = 2**20
#: Number of shapes for which a site caches the layout of scales.
MOST_LAYOUTS = 64


class SharedOperand(Protocol):
    """A process's shard of a distributed operand."""

    def along(self, direction: Along, merges: bool) -> Share:
        """The shard of an operand, with its dimensions in a product."""


class RoundedOperand(NamedTuple):
    """A rounded operand of a product.

    Attributes:
        values: Numbers in the product's carrier, or their codes.
        factor: What the product's result is still to be multiplied by, if anything.
        scales: The scales that were not multiplied in, for another rounding with the same ones.
        chains: The scales that enter with the short sums of an accumulator.
        ahead: The scale that a later rounding needs, if it was found in the same read.
    """

    values: Tensor
    factor: Tensor | None = None
    scales: Tensor | None = None
    chains: ChainScales | None = None
    ahead: Tensor | None = None


@dataclass(frozen=True)
class Site:
    """A site at which a tensor is rounded.

    Attributes:
        name: The point's name.
        quantizer: The quantizer, if any.
        stream: The stream of random bits.
        along: The dimensions of scales and transforms; by default those of the scaling itself.
        call: The callable that rounds in place of a quantizer.
        is_outside: Whether it was called before the product, in autograd, for the sake of its gradient.
        place: The position of the local elements in the whole tensor.
        merges: Whether all dimensions but the last count as one.
        transform: The transform applied before rounding; both operands of a product have the same.
        shared: This process's shard, if the tensor is distributed.
        multiplies: Whether the tensor is an operand of a product, whose result can be multiplied by its scales.
        shared_stream: The stream of random bits that both operands of the product share.
        on_chip: Whether its codes are multiplied, instead of its values.
        chain: The number of products in the short sums with which scales of blocks and tiles enter; 0 if they are multiplied in.
        groups: Which rows belong to which group, in one pass of a grouped product.
    """

    name: str
    quantizer: Quantizer | None
    stream: int
    along: Along | None = None
    call: CallablePoint | None = None
    is_outside: bool = False
    place: Place = WHOLE
    merges: bool = False
    transform: Hadamard | None = None
    shared: SharedOperand | None = None
    multiplies: bool = True
    on_chip: bool = False
    chain: int = 0
    groups: Groups | None = None
    shared_stream: int = 0
    #: Cached layouts of scales, by tensor shape.
    layouts: dict[torch.Size, ScaleLayout] = field(default_factory=dict, compare=False, repr=False)

    @property
    def is_plain(self) -> bool:
        """Whether there is neither a scale nor a transform."""
        return self.transform is None and (self.quantizer is None or self.quantizer.scale is None)

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded."""
        return self.quantizer is not None or self.call is not None

    @property
    def description(self) -> str:
        """A short description of the rounding."""
        return self.call.name if self.call is not None else "" if self.quantizer is None else short(self.quantizer, self.name)

    @property
    def spelt(self) -> Spelling:
        """The quantizer for the operators."""
        assert self.quantizer is not None  # asked only where there is one
        return self.quantizer.spelt

    @property
    def is_stochastic(self) -> bool:
        """Whether a quantizer draws random bits here."""
        return self.quantizer is not None and self.quantizer.spelt.is_stochastic

    @property
    def draws_signs(self) -> bool:
        """Whether it rounds by a callable that shares random signs with the other operand of its product."""
        return self.call is not None and self.call.draws_signs

    @property
    def draws(self) -> bool:
        """Whether the seed of inputs and gradients is needed: a callable of a weight draws from it, too."""
        return self.call is not None and (self.call.draws_signs or self.call.is_stochastic)

    @property
    def leaves_factor(self) -> bool:
        """Whether the result of a product is multiplied by scales."""
        scale = None if self.quantizer is None else self.quantizer.scale
        return self.multiplies and scale is not None and (not isinstance(scale, (PerBlock, PerTile)) or scale.outer is not None)

    def round(
        self,
        ops: Operators,
        x: Tensor,
        seed: Tensor | None,
        dtype: torch.dtype,
        known: Tensor | None = None,
        later: Site | None = None,
    ) -> RoundedOperand:
        """Round a tensor.

        Args:
            ops: The operators.
            x: The tensor.
            seed: Needed only for stochastic rounding.
            dtype: The carrier.
            known: The scales that are not multiplied in, if already computed.
            later: A site that needs a scale of the whole transform of the tensor, to be found in the same read if a kernel can.
        """
        if later is not None and self.looks_ahead(x, later, dtype):
            return self._round_ahead(ops, x, later, seed, dtype)
        point = self.quantizer
        if point is None:
            seen = x if self.call is None or self.is_outside else self.called(self.call, x, seed)
            return RoundedOperand(seen if seen.dtype == dtype or not seen.is_floating_point() else seen.to(dtype))
        if point.scale is None and self.transform is None:
            return RoundedOperand(encoded(ops, x, self, seed) if self.on_chip else self.round_plainly(ops, x, seed, dtype))
        if self.groups is not None:
            return self._round_in_groups(ops, x, seed, dtype, known)
        if point.scale is not None:
            return self._round_under_scales(ops, x, seed, dtype, known)
        seen = self.as_matrix(x)
        return RoundedOperand(self.round_plainly(ops, ops.hadamard(seen, self.turn(seen.shape)), seed, dtype).view(x.shape))

    def called(self, call: CallablePoint, x: Tensor, seed: Tensor | None) -> Tensor:
        """Round a tensor by a callable."""
        noise = {}
        if call.is_stochastic and seed is not None:
            noise["seed"] = Noise(seed, self.stream)
        if call.draws_signs and seed is not None:
            noise["signs"] = Noise(seed, self.shared_stream)
        return self._along_sum(call, x, lambda seen: call.rounded(self.name, seen, **noise))

    def with_gradient(self, call: CallablePoint, x: Tensor) -> Tensor:
        """Round a tensor by a callable before the product, with the gradient that was chosen."""
        return self._along_sum(call, x, lambda seen: call.with_gradient(self.name, seen))

    def _along_sum(self, call: CallablePoint, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The result of a function that sees a directed callable's tensor as matrices whose last dimension the product sums over."""
        if not call.is_directed or self.along is None or not self.multiplies:
            return function(x)
        dim = self.along.summed
        return function(self.as_matrix(x).movedim(dim, -1)).movedim(-1, dim).reshape(x.shape)

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

    def round_and_sum(self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype) -> tuple[RoundedOperand, Tensor]:
        """Round a tensor without scales, and sum it, unrounded, over all dimensions but the last, in one read."""
        assert self.quantizer is not None  # a tensor that is not rounded is only summed
        spelt = self.quantizer.spelt
        chosen = seed if spelt.is_stochastic else None
        values, total = ops.quantize_and_sum(x if x.dim() == 2 else rows(x), chosen, spelt.grid, spelt.rule, self.stream, dtype)
        return RoundedOperand(values if x.dim() == 2 else values.view(x.shape)), total

    def round_both_ways(self, ops: Operators, x: Tensor, other: Site, dtype: torch.dtype) -> tuple[RoundedOperand, RoundedOperand]:
        """Round a tensor here and at a site that differs only in the direction of its blocks, in one read; see `Gradient`."""
        spelt, seen = self.spelt, self.as_matrix(x)
        own, others = self.layout(seen.shape), other.layout(seen.shape)
        values = ops.quantize_both_ways(seen, own.numbers, others.numbers, *own.making, spelt.grid, spelt.rule, dtype)
        one, second = (RoundedOperand(each.view(x.shape)) for each in values)
        return one, second

    def looks_ahead(self, x: Tensor, later: Site, dtype: torch.dtype) -> bool:
        """Whether a kernel finds a later scale in the same read, for a tensor so large that its reads determine the time."""
        if not x.is_cuda or self.groups is not None or (x.dtype, dtype) != (torch.bfloat16, torch.bfloat16):
            return False
        seen = self.as_matrix(x)
        if seen.dim() != 2 or not all(isinstance(size, int) for size in seen.shape) or seen.numel() < _LARGE:
            return False
        size, *matrix, _ = later.turn(seen.shape)
        return size <= 32 and matrix == [*seen.shape] and not (seen.shape[0] % size or seen.shape[1] % 32)

    def _round_ahead(self, ops: Operators, x: Tensor, later: Site, seed: Tensor | None, dtype: torch.dtype) -> RoundedOperand:
        """Round a tensor, and find in the same read the scale of its whole transform, which a later site needs."""
        spelt, seen = self.spelt, self.as_matrix(x)
        layout, turn = self.layout(seen.shape), later.turn(seen.shape)
        under, parts = whole_scale(ops, seen, layout), [*seen.shape, turn[0], AHEAD, 0]
        chosen = seed if spelt.is_stochastic else None
        rounding = chosen, spelt.grid, spelt.rule, self.stream, 0, dtype, int(Restore.SCALE)
        values, amaxes = ops.quantize_tiles_and_amaxes(seen, under, layout.numbers, parts, turn, *layout.making, *rounding)
        return RoundedOperand(values.view(x.shape), under, ahead=whole_scale_of(ops, amaxes, later.layout(seen.shape)))

    def restored(self, ops: Operators, x: Tensor, seed: Tensor | None) -> Tensor:
        """The rounded tensor, times its scales and without the transform, in at least float32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        values = replace(self, multiplies=False, chain=0, layouts={}).round(ops, x, seed, dtype).values
        if self.transform is None or self.along is None:
            return values
        return self.transform.inverse(self.as_matrix(values), self.along.summed).view(x.shape)

    def show(self, observer: Any, x: Tensor, seed: Tensor | None, rounded: RoundedOperand) -> None:
        """Report to an `observers.Observer` that a tensor was rounded here; one that was rounded before the product was reported there."""
        if self.rounds and not self.is_outside:
            observer.rounds(self, x, seed, rounded.values if self.call is not None else None)

    def saturates(self, x: Tensor) -> Tensor:
        """Where a tensor is beyond the range of the quantizer."""
        fmt = self.spelt.format
        return (x < fmt.min) | (x > fmt.max)

    def as_matrix(self, x: Tensor) -> Tensor:
        """A tensor in the shape that its scales follow."""
        return rows(x) if self.merges else x

    def turn(self, shape: Sequence[int]) -> Sequence[int]:
        """The parameters of the transform applied before rounding."""
        return () if self.transform is None or self.along is None else self.transform.turn(shape, self.along.summed)

    def layout(self, shape: torch.Size) -> ScaleLayout:
        """The layout and the parameters of the scales of a tensor of a shape."""
        is_cached = not torch.compiler.is_compiling()
        known = self.layouts.get(shape) if is_cached else None
        if known is not None:
            return known
        point = self.quantizer
        assert point is not None
        assert point.scale is not None  # the layout is that of the scale
        tiles = point.scale.tiles(shape) if self.along is None else self.along.tiles(point.scale, shape)
        found = ScaleLayout.of(point.scale, point.format, shape, tiles, self.turn(shape))
        if is_cached:
            if len(self.layouts) == MOST_LAYOUTS:
                self.layouts.clear()
            self.layouts[shape] = found
        return found

    def _round_under_scales(
        self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype, known: Tensor | None
    ) -> RoundedOperand:
        seen = x if x.dim() == 2 else self.as_matrix(x)
        layout = None if ops is DISPATCHED else self.layouts.get(seen.shape)
        if layout is None:
            layout = self.layout(seen.shape)
        restore = Restore.ALL if not self.multiplies else Restore.SCALE if layout.is_local and not self.chain else Restore.NOTHING
        values, scales, under = self.quantized(ops, seen, layout, seed, dtype, restore, known)
        values = values if values.shape == x.shape else values.reshape(x.shape)
        if restore == Restore.ALL:
            return RoundedOperand(values)
        assert self.along is not None  # an operand's
        if layout.is_local:
            chains = None if scales is None else self.along.chains(scales, layout.tiles, seen.shape, self.chain)
            return RoundedOperand(values, under, under, chains)
        assert scales is not None  # only scales of blocks and tiles are not returned
        return RoundedOperand(values, self.along.spread(scales if under is None else under_whole(scales, under), seen.shape), scales)

    def quantized(
        self,
        ops: Operators,
        x: Tensor,
        layout: ScaleLayout,
        seed: Tensor | None,
        dtype: torch.dtype,
        restore: Restore,
        known: Tensor | None = None,
    ) -> Scaled:
        """A tensor rounded with scales that are laid out in it, using the random bits that its elements have in the whole."""
        point = self.quantizer
        assert point is not None
        assert point.scale is not None  # a point with scales
        spelt = point.spelt
        share = None if self.shared is None or self.along is None else self.shared.along(self.along, self.merges)
        chosen = seed if spelt.is_stochastic else None
        if chosen is None or not self.place.row:
            noise = chosen, self.stream, self.place.offset
            return quantize_scaled(ops, x, spelt, point.scale, noise, dtype, restore, layout, share, known)
        wide, offset = widened(x, self.place)
        layout = self.layout(wide.shape)
        # Scales of columns are widened and narrowed with these.
        is_of_columns = layout.tiles.across and layout.tiles.columns == 1
        if known is not None and is_of_columns:
            known = widened(known, self.place, 1.0)[0].view(1, -1, 1)
        noise = chosen, self.stream, offset
        values, scales, under = quantize_scaled(ops, wide, spelt, point.scale, noise, dtype, restore, layout, share, known)
        if is_of_columns and scales is not None:
            scales = narrowed(scales.view(-1), self.place).view(1, -1, 1)
        return narrowed(values.view(wide.shape), self.place), scales, under

    def _round_in_groups(self, ops: Operators, x: Tensor, seed: Tensor | None, dtype: torch.dtype, known: Tensor | None) -> RoundedOperand:
        """Round a tensor whose rows fall into groups, or a stack of a matrix for each group."""
        if not x.numel():
            return RoundedOperand(x.new_empty(x.shape, dtype=dtype))
        found = round_units(self, ops, x, seed, dtype, known)
        if found.factor is None:
            return RoundedOperand(found.values)
        assert self.along is not None
        return RoundedOperand(found.values, found.factor if self.along.kept == self.along.result else found.factor.mT, found.of_groups)

    def values(self, dtype: torch.dtype) -> Values:
        """A format that holds the rounded values of a tensor of a dtype, if it is rounded and there is one, and that dtype.

        Elements times scales are assumed to have exponents within those of bfloat16 and float32: below these, in blocks whose largest
        magnitude is some 2**-120 or less, products are rounded to the carrier's subnormal numbers.
        """
        if self.quantizer is None:
            return None, dtype
        scale = self.quantizer.scale
        if not isinstance(scale, (PerBlock, PerTile)) or self.chain:
            return self.quantizer.format, dtype
        return _values(self.quantizer.format, scale.format, dtype), dtype


def _values(element: Format, scale: Format, dtype: torch.dtype) -> Format | None:
    """A format that holds the products of elements and scales, or float32's where these are float32.

    A power of two has no bits to add to those of an element. Products of float64 operands that need more than float32's stay float64.
    """
    bits = element.precision + (scale.precision if scale.precision > 1 else 0)
    if bits > _SINGLE and dtype == torch.float64:
        return None
    return Float(8, min(bits, _SINGLE) - 1, specials="ieee")
